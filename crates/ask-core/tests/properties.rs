//! What holds for every input: tokens, the decoder, typed replies, the life of an entry, routing.

use std::collections::{BTreeMap, BTreeSet};

use ask_core::entry::{DecidedBy, Entry, Road, Step, StepKind, Verdict};
use ask_core::key::{QuestionKey, SessionKey, decode_token, encode_token};
use ask_core::outcome::{CancelReason, Outcome, Returned, Undeliverable};
use ask_core::question::{Choice, Prompt, Question};
use ask_core::reply::{Answer, Reply, ReplyContent, Responder, Sealed, check_answers};
use ask_core::result::tool_result;
use ask_core::route::{Route, Typed, route};
use ask_core::session::SendBy;
use ask_core::surface::{Audience, Showing, Surface, choose, is_live};
use ask_core::text_reply::{self, TextReply};
use ask_core::time::Timestamp;
use proptest::collection::{btree_map, btree_set, vec};
use proptest::option;
use proptest::prelude::*;
use proptest::sample::{select, subsequence};
use serde_json::{Value, json};

fn json_value() -> impl Strategy<Value = Value> {
    let known =
        ["question", "questions", "choices", "options", "label", "secret", "multiSelect", "header", "id"];
    let key = prop_oneof!["[a-z]{1,6}", select(known.to_vec()).prop_map(str::to_owned)];
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i32>().prop_map(Value::from),
        ".{0,12}".prop_map(Value::from),
        Just(Value::from("[\"a\",\"b\"]")),
        Just(Value::from("true")),
    ];
    leaf.prop_recursive(4, 48, 6, move |inner| {
        prop_oneof![
            vec(inner.clone(), 0..5).prop_map(Value::Array),
            btree_map(key.clone(), inner, 0..6).prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

fn prompt(id: &'static str) -> impl Strategy<Value = Prompt> {
    let labels = btree_set("[a-z]{1,4}[ ,]?[a-z]{1,4}", 0..5);
    (labels, any::<[bool; 3]>()).prop_map(move |(labels, [multiple, allow_other, required])| Prompt {
        id: id.into(),
        options: labels.into_iter().map(Choice::label).collect(),
        multiple,
        allow_other,
        required,
        ..Prompt::free_text(format!("{id}?"))
    })
}

fn question() -> impl Strategy<Value = Question> {
    let secret = Just(Question::new(vec![Prompt { secret: true, ..Prompt::free_text("?") }]).unwrap());
    prop_oneof![
        4 => prompt("answer").prop_map(|one| Question::new(vec![one]).unwrap()),
        2 => (prompt("q1"), prompt("q2")).prop_map(|(one, two)| Question::new(vec![one, two]).unwrap()),
        1 => secret,
    ]
}

fn road() -> impl Strategy<Value = Road> {
    select(vec![Road::Native, Road::Plugin, Road::Mcp, Road::McpAlone])
}

fn answer() -> impl Strategy<Value = Answer> {
    let given = (vec(0_usize..6, 0..3), option::of(" {0,2}[a-z]{0,4}"));
    let sealed = Sealed { key_id: "k".into(), encapsulated: "e".into(), ciphertext: "c".into() };
    prop_oneof![
        5 => given.prop_map(|(options, other)| Answer::Given { options, other }),
        1 => Just(Answer::Sealed(sealed)),
        1 => Just(Answer::Hidden),
    ]
}

fn content() -> impl Strategy<Value = ReplyContent> {
    let prompt = select(vec!["answer", "q1", "q2"]).prop_map(str::to_owned);
    prop_oneof![
        4 => btree_map(prompt, answer(), 0..3).prop_map(|answers| ReplyContent::Answers { answers }),
        1 => Just(ReplyContent::Declined),
        1 => Just(ReplyContent::Cancelled { reason: CancelReason::User }),
        1 => Just(ReplyContent::Expired),
    ]
}

/// Something that happens to an entry.
#[derive(Debug, Clone)]
enum Event {
    Reply(u8, ReplyContent),
    Expire(bool, u64),
    Undeliverable,
    Cancel,
    Delivered,
    Refused,
    Close(Returned),
}

fn event() -> impl Strategy<Value = Event> {
    let returned = prop_oneof![
        Just(Returned::Delivered { proof: "acknowledged".into() }),
        Just(Returned::Unconfirmed { why: "gateway_restart".into() }),
        Just(Returned::Overruled { by: None, outcome: Outcome::Expired }),
    ];
    prop_oneof![
        4 => (0_u8..4, content()).prop_map(|(id, content)| Event::Reply(id, content)),
        2 => (any::<bool>(), 0_u64..200).prop_map(|(nothing_offered, at)| Event::Expire(nothing_offered, at)),
        1 => Just(Event::Undeliverable),
        1 => Just(Event::Cancel),
        2 => Just(Event::Delivered),
        1 => Just(Event::Refused),
        2 => returned.prop_map(Event::Close),
    ]
}

fn ask(question: Question, road: Road) -> Entry {
    let key = "g.s.r.q".parse().unwrap();
    Entry::ask(key, road, "tool", "call", question, Timestamp(1), Timestamp(100), None).unwrap()
}

fn reply(id: u8, content: ReplyContent) -> Reply {
    let by = Responder { user: "alice".into(), name: None, chat: None };
    Reply { id: format!("r{id}"), by, surface: Surface::Card, content }
}

fn apply(entry: &Entry, event: &Event) -> Option<Entry> {
    let surface = Surface::Card;
    let note = |what| entry.note(&[Step { at: Timestamp(2), what }]);
    match event {
        Event::Reply(id, content) => match entry.reply(&reply(*id, content.clone()), Timestamp(50)) {
            Verdict::Decide(next) | Verdict::Late(next) => Some(*next),
            Verdict::Saved | Verdict::KnownLate | Verdict::Invalid(_) => None,
        },
        Event::Expire(nothing_offered, at) => entry.expire(*nothing_offered, Timestamp(*at)),
        Event::Undeliverable => entry.undeliverable(Undeliverable::Refused, "rule", Timestamp(50)),
        Event::Cancel => entry.cancel(CancelReason::Stop, "stop", Timestamp(50)),
        Event::Delivered => note(StepKind::Delivered { surface, chat: None }),
        Event::Refused => note(StepKind::Refused { surface, reason: "no".into() }),
        Event::Close(returned) => entry.close(returned.clone(), Timestamp(60)),
    }
}

proptest! {
    #[test]
    fn any_text_is_a_token_and_back(raw in any::<String>(), other in any::<String>()) {
        let token = encode_token(&raw);
        prop_assert!(token.bytes().all(|b| b.is_ascii_alphanumeric() || b"_-=".contains(&b)), "{}", token);
        prop_assert_eq!(decode_token(&token), Some(raw.clone()));
        prop_assert_eq!(encode_token(&other) == token, other == raw);
    }

    #[test]
    fn a_key_reads_back_whatever_is_in_it(parts in any::<[String; 4]>()) {
        let [gateway, session, run, question] = parts.map(|part| format!("x{part}"));
        let key = QuestionKey { gateway, session, run, question };
        prop_assert_eq!(key.to_string().split('.').count(), 4);
        prop_assert_eq!(key.to_string().parse::<QuestionKey>().unwrap(), key.clone());
        let session = key.session_key();
        prop_assert_eq!(session.to_string().parse::<SessionKey>().unwrap(), session);
    }

    #[test]
    fn whatever_a_model_sends_is_a_question_within_its_limits_or_an_error_that_names_a_field(
        args in json_value()
    ) {
        match Question::from_tool_args(&args) {
            Ok(question) => prop_assert_eq!(Question::new(question.prompts.clone()), Ok(question)),
            Err(invalid) => {
                prop_assert!(!invalid.field.is_empty() && !invalid.limit.is_empty());
                prop_assert!(invalid.value.chars().count() <= 200);
            }
        }
    }

    #[test]
    fn the_ways_to_write_one_question_mean_the_same(
        text in "[a-zA-Z]{1,20}\\?", labels in btree_set("[a-z]{1,6}", 1..6)
    ) {
        let objects: Vec<Value> = labels.iter().map(|label| json!({"label": label})).collect();
        let as_text = serde_json::to_string(&labels).unwrap();
        let ways = [
            json!({"question": text, "choices": labels}),
            json!({"question": text, "options": objects}),
            json!({"question": text, "choices": as_text}),
            json!({"questions": [{"id": "answer", "question": text, "options": objects}]}),
            Value::String(json!({"question": text, "choices": labels}).to_string()),
        ];
        let read = ways.map(|args| Question::from_tool_args(&args).unwrap());
        prop_assert!(read.iter().all(|question| *question == read[0]));
    }

    #[test]
    fn a_typed_reply_that_is_complete_fits_its_question(
        question in question(), text in "[a-z0-9(#)., :\n]{0,20}"
    ) {
        match text_reply::parse(&question, &text) {
            // The router takes no secret from a typed message.
            TextReply::Complete(_) if question.is_secret() => {}
            TextReply::Complete(answers) => prop_assert_eq!(check_answers(&question, &answers), Ok(())),
            TextReply::Incomplete(why) => prop_assert!(!why.is_empty()),
        }
    }

    #[test]
    fn each_option_can_be_typed_by_number_and_by_label_in_any_case(prompt in prompt("answer")) {
        let question = Question::new(vec![prompt.clone()]).unwrap();
        for (index, option) in prompt.options.iter().enumerate() {
            let expected = TextReply::Complete([("answer".into(), Answer::option(index))].into());
            let number = index + 1;
            let upper = option.label.to_uppercase();
            for text in [number.to_string(), format!("{number})"), format!(" ({number}) "), upper] {
                prop_assert_eq!(text_reply::parse(&question, &text), expected.clone(), "{}", text);
            }
        }
    }

    #[test]
    fn a_life_has_one_decision_and_one_return(
        question in question(), road in road(), events in vec(event(), 0..14)
    ) {
        let mut entry = ask(question.clone(), road);
        let mut submitted: Vec<BTreeMap<String, Answer>> = Vec::new();
        for event in &events {
            if let Event::Reply(_, ReplyContent::Answers { answers }) = event {
                submitted.push(answers.clone());
            }
            let Some(next) = apply(&entry, event) else { continue };
            match (entry.decision(), next.decision()) {
                (None, None) => {}
                (None, Some(decision)) => {
                    prop_assert!(next.returned().is_none());
                    if let Outcome::Answered { answers } = &decision.outcome {
                        prop_assert!(submitted.contains(answers));
                        prop_assert_eq!(check_answers(&question, answers), Ok(()));
                    }
                    let by_reply = matches!(decision.by, DecidedBy::Reply { .. });
                    let replied = matches!(event, Event::Reply(..));
                    prop_assert_eq!(by_reply, replied);
                }
                (Some(_), None) => prop_assert!(false, "a decision was taken back by {event:?}"),
                (Some(before), Some(after)) => {
                    prop_assert_eq!((before.at, &before.by), (after.at, &after.by));
                    // Closing hides the secret, and nothing else of an outcome ever changes.
                    prop_assert!(before.outcome == after.outcome || entry.holds_secret());
                    prop_assert_eq!(before.outcome.status(), after.outcome.status());
                }
            }
            if entry.returned().is_some() {
                prop_assert_eq!(next.returned(), entry.returned());
            }
            prop_assert!(next.late_count >= entry.late_count && next.steps.len() >= entry.steps.len());
            prop_assert!(next.returned().is_none() || !next.holds_secret());
            let written: Entry = serde_json::from_slice(&serde_json::to_vec(&next).unwrap()).unwrap();
            prop_assert_eq!(&written, &next);
            entry = next;
        }
    }

    #[test]
    fn a_call_is_told_the_truth_about_its_outcome(
        question in question(), road in road(), events in vec(event(), 1..10)
    ) {
        let asked = ask(question, road);
        let entry = events.iter().fold(asked, |entry, event| apply(&entry, event).unwrap_or(entry));
        let result = tool_result(&entry);
        prop_assert_eq!(result.is_some(), entry.decision().is_some());
        let (Some(result), Some(decision)) = (result, entry.decision()) else { return Ok(()) };
        let answered = matches!(decision.outcome, Outcome::Answered { .. });
        prop_assert_eq!(result.details.get("answers").is_some(), answered);
        if !answered {
            let text: Value = serde_json::from_str(&result.text).unwrap();
            prop_assert!(text["error"].as_str().is_some_and(|error| !error.is_empty()));
            let undeliverable = decision.outcome.status() == "undeliverable";
            prop_assert!(!undeliverable || !result.text.contains("did not respond"));
        }
    }

    #[test]
    fn a_message_answers_only_what_was_shown_and_slips_past_no_native_question(
        open in vec((question(), road(), any::<bool>(), any::<bool>()), 0..4),
        text in prop_oneof!["[a-z]{0,8}", "[0-9]{1,2}", Just("/stop".to_owned()), Just("/new".to_owned())],
        attachments in any::<bool>(),
    ) {
        let entries = open.into_iter().enumerate().map(|(n, (question, road, delivered, decided))| {
            let mut entry = ask(question, road);
            entry.key.question = format!("q{n}");
            for (happened, event) in [(delivered, Event::Delivered), (decided, Event::Cancel)] {
                if happened {
                    entry = apply(&entry, &event).unwrap();
                }
            }
            entry
        });
        let entries: Vec<Entry> = entries.filter(Entry::takes_messages).collect();
        let open: Vec<&Entry> = entries.iter().collect();
        let (decision, rule) = route(Typed { text: &text, attachments, on_screen: None }, &open);
        prop_assert!(!rule.is_empty());
        let is_command = matches!(decision, Route::Stop | Route::Message(_));
        prop_assert!(is_command || !text.starts_with('/'));
        match decision {
            Route::Answer(index, answers) => {
                let entry = open[index];
                prop_assert!(entry.is_pending() && entry.was_delivered() && !entry.question.is_secret());
                prop_assert_eq!(check_answers(&entry.question, &answers), Ok(()));
            }
            Route::Message(SendBy::ChatSend) => {
                prop_assert!(open.iter().all(|entry| entry.road != Road::Native));
            }
            _ => {}
        }
    }

    #[test]
    fn a_surface_is_one_that_the_front_end_has_and_a_secret_is_masked(
        question in question(),
        road in road(),
        looking in any::<bool>(),
        surfaces in subsequence(
            vec![Surface::Card, Surface::Form, Surface::Confirm, Surface::Masked, Surface::Durable, Surface::Text], 0..=6),
        tried in subsequence(vec![Surface::Card, Surface::Form, Surface::Durable], 0..=3),
    ) {
        let surfaces: BTreeSet<Surface> = surfaces.into_iter().collect();
        let audience = Audience::Present { surfaces: surfaces.clone(), looking };
        if let (Showing::Show(surface), _) = choose(&question, road, &audience, &tried) {
            prop_assert!(surfaces.contains(&surface) && !tried.contains(&surface));
            prop_assert!(looking || !is_live(surface));
            prop_assert!(!question.is_secret() || surface == Surface::Masked);
            // That dialog can't tell No from being closed.
            prop_assert!(surface != Surface::Confirm);
        }
    }
}
