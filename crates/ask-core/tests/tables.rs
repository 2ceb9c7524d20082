//! Small tables of what nothing else in this crate's tests tells apart.

use std::collections::BTreeMap;
use std::time::Duration;

use ask_core::SCHEMA;
use ask_core::call::closes_by_itself;
use ask_core::entry::{Entry, Road, Step, StepKind, Verdict};
use ask_core::key::SessionKey;
use ask_core::outcome::{CancelReason, Delivered, Outcome, Returned, Undeliverable};
use ask_core::question::{Choice, MAX_OPTIONS, MAX_PROMPTS, Prompt, Question};
use ask_core::reply::{
    Answer, MAX_ANSWER, Reply, ReplyContent, Responder, Sealed, as_message, check_answers,
};
use ask_core::session::Session;
use ask_core::surface::{Audience, Showing, Surface, choose};
use ask_core::time::Timestamp;
use ask_core::wire::{RunEnd, RunEvent, SayRequest};

const ASKED: Timestamp = Timestamp(1_000);
const DEADLINE: Timestamp = Timestamp(301_000);

fn prompt(id: &str, change: impl FnOnce(&mut Prompt)) -> Prompt {
    let options = ["Lisbon", "Oslo"].map(Choice::label).into();
    let mut prompt = Prompt { id: id.into(), options, ..Prompt::free_text(format!(" {id}? ")) };
    change(&mut prompt);
    prompt
}

fn pending(road: Road, prompt: Prompt) -> Entry {
    let question = Question::new(vec![prompt]).unwrap();
    let key = "g.s.r.q".parse().unwrap();
    Entry::ask(key, road, "request_user_input", "c", question, ASKED, DEADLINE, None).unwrap()
}

fn plain() -> Entry {
    pending(Road::Plugin, prompt("answer", |_| ()))
}

fn answered(entry: &Entry, answer: Answer, at: Timestamp) -> Entry {
    let by = Responder { user: "alice".into(), name: None, chat: None };
    let content = ReplyContent::Answers { answers: [("answer".to_owned(), answer)].into() };
    let reply = Reply { id: "r".into(), by, surface: Surface::Card, content };
    let Verdict::Decide(decided) = entry.reply(&reply, at) else { panic!("not decided") };
    *decided
}

fn sealed() -> Answer {
    Answer::Sealed(Sealed { key_id: "k1".into(), encapsulated: "enc".into(), ciphertext: "cipher".into() })
}

#[test]
fn what_a_prompt_on_the_bus_leaves_out_is_as_in_a_plain_one() {
    let read: Prompt = serde_json::from_str(r#"{"id": "answer", "text": "Where to?"}"#).unwrap();
    assert_eq!(read, Prompt { id: "answer".into(), ..Prompt::free_text("Where to?") });
    assert!(read.required && read.allow_other);
}

#[test]
fn people_are_shown_the_outcome_that_the_agent_got() {
    let decided = answered(&plain(), Answer::option(0), Timestamp(2_000));
    let theirs = Outcome::Cancelled { reason: CancelReason::RunEnded };
    let overruled = Returned::Overruled { by: None, outcome: theirs.clone() };
    let delivered = Returned::Delivered { proof: "acknowledged".into() };
    let ours = decided.decision().map(|d| d.outcome.clone());
    for (what, entry, shown) in [
        ("pending", plain(), None),
        ("decided", decided.clone(), ours.clone()),
        ("returned", decided.close(delivered, Timestamp(3_000)).unwrap(), ours),
        ("overruled", decided.close(overruled, Timestamp(3_000)).unwrap(), Some(theirs)),
    ] {
        assert_eq!(entry.shown_outcome(), shown.as_ref(), "{what}");
    }
}

#[test]
fn an_undeliverable_question_was_not_delivered_and_says_why() {
    let ended = plain().undeliverable(Undeliverable::NoFrontEnd, "nobody_bound", Timestamp(2_000)).unwrap();
    let decision = ended.decision().unwrap();
    assert_eq!(decision.outcome, Outcome::Undeliverable { reason: Undeliverable::NoFrontEnd });
    assert_eq!((decision.delivered, decision.at), (Delivered::No, Timestamp(2_000)));
    assert_eq!(ended.undeliverable(Undeliverable::Refused, "again", Timestamp(3_000)), None);
}

#[test]
fn the_human_wait_is_from_delivery_to_decision() {
    let step = |at, what| Step { at: Timestamp(at), what };
    let delivered = || StepKind::Delivered { surface: Surface::Card, chat: None };
    let surface = StepKind::Surface { surface: Surface::Card, rule: "live_card".into() };
    let shown = plain().note(&[step(1_100, surface), step(1_500, delivered())]).unwrap();
    assert_eq!(shown.human_wait(), None, "it goes on");
    let wait = answered(&shown, Answer::option(0), Timestamp(4_000)).human_wait();
    assert_eq!(wait, Some(Duration::from_millis(2_500)));
    assert_eq!(answered(&plain(), Answer::option(0), Timestamp(4_000)).human_wait(), None, "never delivered");
}

#[test]
fn the_list_of_steps_ends_at_its_limit() {
    let step = |n: u64| {
        let what = StepKind::Corrected { why: format!("{n}") };
        Step { at: Timestamp(n), what }
    };
    let all: Vec<Step> = (0..200).map(step).collect();
    let full = plain().note(&all).unwrap();
    let kept = full.steps.len();
    assert_eq!(full.steps, all[..kept]);
    assert_eq!(kept, ask_core::entry::MAX_LISTED);
    // What is left out is counted, and takes nobody's place.
    assert_eq!((full.steps_left_out, full.note(&all).unwrap().steps), (200 - kept as u64, full.steps));
    // The last one that fits still does.
    assert_eq!(plain().note(&all[..kept - 1]).unwrap().note(&all).unwrap().steps.len(), kept);
}

#[test]
fn what_goes_wrong_with_own_words_and_nothing_is_told_apart() {
    let words = |length: usize| Answer::text("ä".repeat(length));
    let nothing = Answer::Given { options: Vec::new(), other: None };
    let several = |p: &mut Prompt| p.multiple = true;
    for (what, change, answer, limit) in [
        ("the longest", (|_| ()) as fn(&mut Prompt), words(MAX_ANSWER), None),
        ("one more", |_| (), words(MAX_ANSWER + 1), Some("at most 32000 characters")),
        ("nothing", |_| (), nothing.clone(), Some("an answer")),
        ("nothing of several", several, nothing, Some("an answer")),
    ] {
        let question = Question::new(vec![prompt("answer", change)]).unwrap();
        let checked = check_answers(&question, &[("answer".to_owned(), answer)].into());
        assert_eq!(checked.err().map(|invalid| invalid.limit).as_deref(), limit, "{what}");
    }
}

#[test]
fn a_late_answer_as_a_message_names_each_question_and_never_a_secret() {
    let optional = |p: &mut Prompt| p.required = false;
    let question = Question::new(vec![prompt("where", |_| ()), prompt("when", optional)]).unwrap();
    let given = |answers: &[(&str, Answer)]| -> BTreeMap<String, Answer> {
        answers.iter().map(|(id, answer)| ((*id).to_owned(), answer.clone())).collect()
    };
    let both = given(&[("where", Answer::option(1)), ("when", Answer::text("in May"))]);
    let lines = "Late answer to \"where?\": Oslo\nLate answer to \"when?\": in May";
    assert_eq!(as_message(&question, &both).as_deref(), Some(lines));
    let one = given(&[("where", Answer::option(0))]);
    assert_eq!(as_message(&question, &one).as_deref(), Some("Late answer to \"where?\": Lisbon"));
    assert_eq!(as_message(&question, &given(&[("where", Answer::option(2))])), None, "it does not fit");
    let secret = |p: &mut Prompt| (p.options, p.secret) = (Vec::new(), true);
    let question = Question::new(vec![prompt("answer", secret)]).unwrap();
    assert_eq!(as_message(&question, &given(&[("answer", sealed())])), None);
}

#[test]
fn people_read_labels_and_own_words_and_no_secret() {
    let priced = prompt("answer", |p| p.options[1].value = Some("oslo-42".into()));
    let both = Answer::Given { options: vec![0, 1], other: Some("or Rome".into()) };
    assert_eq!(both.display(&priced), "Lisbon, Oslo, or Rome");
    assert_eq!(both.values(&priced), ["Lisbon", "oslo-42", "or Rome"]);
    for hidden in [sealed(), Answer::Hidden] {
        assert_eq!(hidden.display(&priced), "answered (hidden)");
        assert!(hidden.values(&priced).is_empty());
    }
    // Logs have no sealed bytes either.
    assert_eq!(format!("{:?}", sealed()), "Sealed(Sealed(k1))");
}

#[test]
fn a_stop_that_is_on_record_is_not_written_again() {
    let session = Session {
        schema: SCHEMA,
        key: SessionKey::new("g", "s"),
        owner: "alice".into(),
        front: "openwebui".into(),
        chat: None,
        surfaces: Default::default(),
        bound_at: ASKED,
        count: 3,
        stopped_through: 0,
        stop_done: 0,
        messages: Default::default(),
    };
    let stopped = session.stopped(2).unwrap();
    assert_eq!([1, 2].map(|through| stopped.stopped(through)), [None, None]);
    assert_eq!(stopped.stopped(3).unwrap().stopped_through, 3);
    let done = stopped.stop_was_done(2).unwrap();
    assert_eq!([1, 2].map(|through| done.stop_was_done(through)), [None, None]);
    assert_eq!(done.stop_was_done(3).unwrap().stop_done, 3);
}

#[test]
fn a_form_says_why_it_is_one() {
    let surfaces = [Surface::Form, Surface::Text].into();
    let audience = Audience::Present { surfaces, looking: true };
    let several = |p: &mut Prompt| p.multiple = true;
    for (prompts, rule) in [
        (vec![prompt("a", several)], "multi_select_is_a_form"),
        (vec![prompt("a", |_| ()), prompt("b", |_| ())], "several_prompts_are_a_form"),
    ] {
        let question = Question::new(prompts).unwrap();
        assert_eq!(choose(&question, Road::Plugin, &audience, &[]), (Showing::Show(Surface::Form), rule));
    }
}

#[test]
fn what_proves_nothing_is_kept_for_a_minute_after_its_response_and_a_secret_for_a_day() {
    let secret = |p: &mut Prompt| (p.options, p.secret) = (Vec::new(), true);
    let at = Timestamp(2_000);
    let alone = answered(&pending(Road::McpAlone, prompt("answer", |_| ())), Answer::option(0), at);
    let kept = answered(&pending(Road::Plugin, prompt("answer", secret)), sealed(), at);
    assert_eq!(closes_by_itself(&alone, Some(Timestamp(5_000))), Some((Timestamp(65_000), "no_proof")));
    assert_eq!(closes_by_itself(&alone, None), Some((Timestamp(86_402_000), "expired")));
    assert_eq!(closes_by_itself(&kept, None), Some((Timestamp(86_402_000), "expired")));
}

#[test]
fn a_typed_message_is_the_reply_that_its_id_names() {
    let question = Question::new(vec![prompt("answer", |_| ())]).unwrap();
    let say = |text: &str| SayRequest {
        schema: SCHEMA,
        session: SessionKey::new("g", "s"),
        message: "m1".into(),
        user: "alice".into(),
        user_name: Some("Alice".into()),
        front: "openwebui".into(),
        chat: Some("c".into()),
        surfaces: Default::default(),
        text: text.into(),
        attachments: Vec::new(),
        on_screen: None,
        seen: None,
        goes_on: false,
    };
    let by = Responder { user: "alice".into(), name: Some("Alice".into()), chat: Some("c".into()) };
    let answers = [("answer".to_owned(), Answer::option(1))].into();
    let content = ReplyContent::Answers { answers };
    let reply = Reply { id: "message-m1".into(), by, surface: Surface::Message, content };
    assert_eq!(say("2").as_reply(&question), Some(reply));
    assert_eq!(say("  ").as_reply(&question), None);
}

#[test]
fn times_stay_within_what_a_clock_can_say() {
    let second = Duration::from_secs(1);
    assert_eq!(Timestamp(5).plus(second), Timestamp(1_005));
    assert_eq!(Timestamp(u64::MAX).plus(second), Timestamp(u64::MAX));
    assert_eq!([1_500, 500].map(|at| Timestamp(at).minus(second)), [Timestamp(500), Timestamp(0)]);
    assert_eq!(Timestamp(1_500).since(Timestamp(500)), second);
    assert_eq!(Timestamp(500).since(Timestamp(1_500)), Duration::ZERO);
    // Later than this was written.
    assert!(Timestamp::now() > Timestamp(1_780_000_000_000));
}

#[test]
fn a_question_may_be_as_large_as_its_limits() {
    let prompts = |count: usize| (0..count).map(|n| prompt(&format!("p{n}"), |_| ())).collect::<Vec<_>>();
    let options = |count: usize| {
        let options = (0..count).map(|n| Choice::label(format!("o{n}"))).collect();
        vec![prompt("answer", |p| p.options = options)]
    };
    for (what, prompts, fits) in [
        ("as many prompts", prompts(MAX_PROMPTS), true),
        ("one prompt more", prompts(MAX_PROMPTS + 1), false),
        ("as many options", options(MAX_OPTIONS), true),
        ("one option more", options(MAX_OPTIONS + 1), false),
    ] {
        assert_eq!(Question::new(prompts).is_ok(), fits, "{what}");
    }
}

#[test]
fn models_say_true_and_false_in_words_too() {
    for (said, multiple) in [("true", Some(true)), ("TRUE", Some(true)), ("False", Some(false)), ("on", None)]
    {
        let args = serde_json::json!({"question": "Which?", "choices": ["A", "B"], "multiple": said});
        let read = Question::from_tool_args(&args).ok();
        assert_eq!(read.map(|question| question.prompts[0].multiple), multiple, "{said}");
    }
}

#[test]
fn the_kind_of_an_event_is_the_name_that_it_has_in_json() {
    for event in [
        RunEvent::Sent { into: None },
        RunEvent::Failed { why: "?".into() },
        RunEvent::Started,
        RunEvent::Text { text: "so".into() },
        RunEvent::Ended { how: RunEnd::Done, text: None },
    ] {
        let kind = event.kind();
        assert!(serde_json::to_string(&event).unwrap().contains(&format!("\"{kind}\"")), "{event:?}");
    }
}

#[test]
fn an_agent_is_told_who_called_its_question_off() {
    let cancelled = plain().cancel(CancelReason::Stop, "stop", Timestamp(2_000)).unwrap();
    let told = ask_core::result::tool_result(&cancelled).unwrap();
    assert_eq!((&told.details["status"], &told.details["reason"]), (&"cancelled".into(), &"stop".into()));
}
