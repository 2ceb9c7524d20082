//! The checker finds what a broken product would leave behind, and nothing in a good history.

use ask_core::SCHEMA;
use ask_core::entry::{Entry, Road, Verdict};
use ask_core::key::SessionKey;
use ask_core::outcome::{CancelReason, Outcome, Returned};
use ask_core::question::{Choice, Prompt, Question};
use ask_core::reply::{Answer, Reply, ReplyContent, Responder};
use ask_core::session::{MessageDecision, RoutedMessage, SendBy, Session};
use ask_core::surface::Surface;
use ask_core::time::Timestamp;
use faults::checker::{Kind, check};
use faults::history::{
    Call, Content, History, Life, Local, Part, Row, Said, Sent, SessionHistory, Stop, Submitted, Told,
    Written,
};
use serde_json::json;

const ASKED: Timestamp = Timestamp(1_000);
const DEADLINE: Timestamp = Timestamp(61_000);
const READ: u64 = 20_000;
const QUESTION: &str = "Which colour?";

fn asked() -> Entry {
    let options = ["Red", "Blue", "Green"].map(Choice::label).into();
    let question = Question::new(vec![Prompt { options, ..Prompt::free_text(QUESTION) }]).unwrap();
    let key = "openclaw.s.run.q".parse().unwrap();
    Entry::ask(key, Road::Plugin, "request_user_input", "c", question, ASKED, DEADLINE, None).unwrap()
}

fn reply(id: &str, option: usize) -> Reply {
    let by = Responder { user: "alice".into(), name: None, chat: None };
    let answers = [("answer".to_owned(), Answer::option(option))].into();
    Reply { id: id.into(), by, surface: Surface::Card, content: ReplyContent::Answers { answers } }
}

fn decided(reply: &Reply) -> Entry {
    let Verdict::Decide(entry) = asked().reply(reply, Timestamp(2_000)) else { panic!("no decision") };
    *entry
}

fn returned(entry: &Entry) -> Entry {
    entry.close(Returned::Delivered { proof: "acknowledged".into() }, Timestamp(3_000)).unwrap()
}

fn life(values: &[Entry]) -> Life {
    let written = |(n, entry): (usize, &Entry)| Written {
        revision: n as u64 + 1,
        at_ms: 1_000 * (n as u64 + 1),
        entry: entry.clone(),
    };
    Life { values: values.iter().enumerate().map(written).collect() }
}

fn submitted(id: &str, label: &str, result: &str) -> Submitted {
    let told = Told {
        at_ms: 2_500,
        status: 200,
        result: result.into(),
        by: Some("alice".into()),
        as_message: false,
    };
    Submitted {
        id: id.into(),
        user: "alice".into(),
        question: QUESTION.into(),
        to: "q".into(),
        content: Content::Values(vec![label.into()]),
        told: vec![told],
    }
}

fn message(id: &str, run: &str) -> RoutedMessage {
    let decision = MessageDecision::Message { run: run.into(), send: SendBy::ChatSend };
    RoutedMessage { id: id.into(), at: ASKED, decision, rule: "turn".into() }
}

/// One person, two messages, one question that is answered and returned, and a reply too late.
fn good() -> SessionHistory {
    let answered = decided(&reply("r1", 1));
    let said = |message: &str, text: &str| Said {
        message: message.into(),
        text: text.into(),
        heard: true,
        hurried: false,
        ended: Some("done".into()),
    };
    let row = |run: &str, text: &str| Row { key: format!("{run}:user"), text: text.into(), aside: false };
    let sent = |run: &str, text: &str| Sent { key: run.into(), text: text.into() };
    SessionHistory {
        session: "s".into(),
        owner: "alice".into(),
        lives: vec![life(&[asked(), answered.clone(), returned(&answered)])],
        routed: Some(Session {
            schema: SCHEMA,
            key: SessionKey::new("openclaw", "s"),
            owner: "alice".into(),
            front: "openwebui".into(),
            chat: None,
            surfaces: Default::default(),
            bound_at: ASKED,
            count: 2,
            stopped_through: 0,
            stop_done: 0,
            messages: [message("m1", "run"), message("m2", "run2")].into(),
        }),
        said: vec![said("m1", "hello there"), said("m2", "and then")],
        shown: vec![QUESTION.into()],
        replies: vec![submitted("r1", "Blue", "saved"), submitted("r2", "Red", "already_answered")],
        calls: vec![Call {
            question: QUESTION.into(),
            tool: "request_user_input".into(),
            text: "Blue".into(),
            details: json!({"status": "answered", "answers": {"answer": ["Blue"]}}),
            is_error: false,
            secret: None,
        }],
        rows: vec![row("run", "hello there"), row("run2", "and then")],
        handed: ["run", "run2", "run2"].map(str::to_owned).into(),
        sends: vec![sent("run", "hello there"), sent("run", "hello there"), sent("run2", "and then")],
        ..Default::default()
    }
}

fn found(session: SessionHistory) -> Vec<(Kind, String)> {
    found_at(session, READ)
}

fn found_at(session: SessionHistory, read_ms: u64) -> Vec<(Kind, String)> {
    found_in(History { read_ms, ..history(session) })
}

fn history(session: SessionHistory) -> History {
    History { sessions: vec![session], per_run: 1, read_ms: READ, ..Default::default() }
}

fn found_in(history: History) -> Vec<(Kind, String)> {
    check(&history).into_iter().map(|finding| (finding.kind, finding.what)).collect()
}

/// The first thing that is found after a change of the good history.
fn first(change: impl FnOnce(&mut SessionHistory)) -> (Kind, String) {
    let mut session = good();
    change(&mut session);
    found(session).into_iter().next().expect("something is found")
}

#[test]
fn nothing_is_found_in_a_good_history() {
    assert_eq!(found(good()), []);
}

#[test]
fn a_question_that_vanished_with_its_time_to_live_is_lost() {
    let (kind, what) = first(|s| {
        s.lives.clear();
        s.replies.clear();
        s.calls.clear();
    });
    assert_eq!((kind, what.contains("shown and is not on record")), (Kind::Lost, true), "{what}");
}

#[test]
fn a_question_that_is_pending_long_past_its_deadline_is_lost_for_good() {
    let mut session = good();
    session.lives = vec![life(&[asked()])];
    session.replies.clear();
    let history = History { read_ms: DEADLINE.0 + 30_000, ..history(session) };
    let finding = check(&history).into_iter().find(|finding| finding.what.contains("is pending")).unwrap();
    assert_eq!((finding.kind, finding.heals), (Kind::Lost, false));
}

#[test]
fn a_message_that_was_acknowledged_and_never_sent_is_lost() {
    let (kind, what) = first(|s| {
        s.rows.pop();
        s.sends.pop();
    });
    assert_eq!((kind, what.contains("has not got the message \"and then\"")), (Kind::Lost, true), "{what}");
}

#[test]
fn an_outcome_that_was_acknowledged_and_that_its_call_never_got_is_lost() {
    let (kind, what) = first(|s| s.calls.clear());
    assert_eq!((kind, what.contains("its call has got nothing")), (Kind::Lost, true), "{what}");
}

#[test]
fn a_decision_over_a_decision_is_doubled() {
    let (kind, what) = first(|s| {
        let (one, two) = (decided(&reply("r1", 1)), decided(&reply("r2", 0)));
        s.lives = vec![life(&[asked(), two, one.clone(), returned(&one)])];
    });
    assert_eq!((kind, what.contains("two outcomes")), (Kind::Doubled, true), "{what}");
}

#[test]
fn a_message_under_two_keys_is_doubled() {
    let (kind, what) = first(|s| {
        s.rows.push(Row { key: "run2-2:user".into(), text: "and then".into(), aside: false });
    });
    assert_eq!((kind, what.contains("2 times")), (Kind::Doubled, true), "{what}");
}

#[test]
fn whoever_was_told_saved_has_won() {
    let (kind, what) = first(|s| s.replies[1].told[0].result = "saved".into());
    assert_eq!((kind, what.contains("heard \"saved\"")), (Kind::Untrue, true), "{what}");
    let (kind, what) = first(|s| s.replies[0].told[0].result = "already_answered".into());
    assert_eq!((kind, what.contains("and has won")), (Kind::Untrue, true), "{what}");
}

#[test]
fn saved_is_told_after_it_is() {
    let (kind, what) = first(|s| s.replies[0].told[0].at_ms = 1_500);
    assert_eq!((kind, what.contains("500 ms before it was")), (Kind::Untrue, true), "{what}");
}

#[test]
fn everybody_is_told_something() {
    let (kind, what) = first(|s| s.replies[1].told.clear());
    assert_eq!((kind, what.contains("heard nothing")), (Kind::Lost, true), "{what}");
}

#[test]
fn only_the_owner_decides() {
    let (kind, what) = first(|s| {
        s.replies[0].user = "mallory".into();
        s.replies[0].told[0].result = "wrong_user".into();
    });
    assert_eq!((kind, what.contains("mallory, who is not the owner")), (Kind::Misrouted, true), "{what}");
}

#[test]
fn an_answer_is_what_its_reply_said_and_its_call_gets_the_same() {
    let (kind, what) = first(|s| s.replies[0].content = Content::Values(vec!["Red".into()]));
    assert_eq!((kind, what.contains("said something else")), (Kind::Misrouted, true), "{what}");
    let (kind, what) = first(|s| s.calls[0].details["answers"]["answer"] = json!(["Red"]));
    assert_eq!((kind, what.contains("its call got")), (Kind::Misrouted, true), "{what}");
}

#[test]
fn an_answer_of_the_gateway_was_given_there() {
    let by = Responder { user: "openclaw-control-ui".into(), name: None, chat: None };
    let answer = Reply { id: "gateway-q".into(), by, surface: Surface::Gateway, ..reply("", 1) };
    let entry = decided(&answer);
    let at_gateway = |s: &mut SessionHistory| {
        s.lives = vec![life(&[asked(), entry.clone(), returned(&entry)])];
        s.replies.clear();
    };
    let (kind, what) = first(at_gateway);
    assert_eq!((kind, what.contains("nobody answered there")), (Kind::Misrouted, true), "{what}");
    let mut session = good();
    at_gateway(&mut session);
    session.local =
        vec![Local { question: QUESTION.into(), values: Some(vec!["Blue".into()]), accepted: true }];
    assert_eq!(found(session), []);
}

#[test]
fn no_message_is_both_an_answer_and_a_message_to_the_agent() {
    let mut answer = reply("message-m2", 0);
    answer.surface = Surface::Message;
    answer.content =
        ReplyContent::Answers { answers: [("answer".to_owned(), Answer::text("and then"))].into() };
    let entry = decided(&answer);
    let (kind, what) = first(|s| {
        s.lives = vec![life(&[asked(), entry.clone(), returned(&entry)])];
        s.replies.clear();
        s.calls[0].details["answers"]["answer"] = json!(["and then"]);
    });
    assert_eq!((kind, what.contains("and the agent got it too")), (Kind::Misrouted, true), "{what}");
}

#[test]
fn messages_reach_the_gateway_in_their_order() {
    let (kind, what) = first(|s| s.sends.rotate_left(2));
    assert_eq!((kind, what.contains("reached the gateway after")), (Kind::Misrouted, true), "{what}");
    let (kind, what) = first(|s| {
        s.handed.reverse();
        s.sends.rotate_left(2);
    });
    assert_eq!((kind, what.contains("was handed over before")), (Kind::Misrouted, true), "{what}");
}

#[test]
fn unconfirmed_needs_something_that_was_interrupted() {
    let change = |why: &str, s: &mut SessionHistory| {
        let answered = decided(&reply("r1", 1));
        let unconfirmed = Returned::Unconfirmed { why: why.into() };
        let closed = answered.close(unconfirmed, Timestamp(3_000)).unwrap();
        s.lives = vec![life(&[asked(), answered, closed])];
    };
    let (kind, what) = first(|s| change("run_ended", s));
    assert_eq!((kind, what.contains("nothing was interrupted")), (Kind::Lost, true), "{what}");
    let after = |why: &str, parts: &[Part], restarted: Option<u64>| {
        let mut session = good();
        change(why, &mut session);
        let broken = parts.iter().copied().collect();
        found_in(History { broken, gateway_restarted_ms: restarted, ..history(session) })
    };
    // What breaks elsewhere is no reason, and neither is any reason good for every word.
    for (why, parts, restarted, is_good) in [
        ("run_ended", &[Part::Adapter][..], None, true),
        ("run_ended", &[Part::Router, Part::Emitter], None, false),
        ("gateway_restart", &[Part::Gateway], Some(1_500), true),
        ("gateway_restart", &[Part::Gateway], None, false),
        ("no_proof", &[Part::Adapter, Part::Nats, Part::Gateway], Some(1_500), false),
    ] {
        assert_eq!(after(why, parts, restarted).is_empty(), is_good, "{why} {parts:?} {restarted:?}");
    }
    let mut session = good();
    change("run_ended", &mut session);
    session.aborted = true;
    assert_eq!(found(session), []);
}

#[test]
fn what_was_asked_after_a_restart_of_the_gateway_is_not_interrupted_by_it() {
    let lost = |restarted: u64| {
        let session = SessionHistory { calls: Vec::new(), ..good() };
        found_in(History { gateway_restarted_ms: Some(restarted), ..history(session) })
    };
    assert_eq!(lost(ASKED.0), []);
    assert!(lost(ASKED.0 - 1)[0].1.contains("its call has got nothing"));
}

#[test]
fn nothing_is_answered_long_after_its_deadline() {
    let late = |by_ms: u64, outage_ms: u64| {
        let mut session = good();
        for written in &mut session.lives[0].values[1..] {
            written.at_ms = DEADLINE.0 + by_ms;
        }
        session.replies[0].told[0].at_ms = DEADLINE.0 + by_ms + 1;
        found_in(History { outage_ms, ..history(session) })
    };
    assert_eq!(late(8_000, 0), []);
    assert_eq!(late(9_000, 2_000), []);
    let (kind, what) = late(9_000, 0).remove(0);
    assert_eq!((kind, what.contains("long after its deadline (9000 ms)")), (Kind::Misrouted, true), "{what}");
}

#[test]
fn nothing_expires_early_by_the_clock_of_the_server_either() {
    let expired = asked().expire(false, DEADLINE).unwrap();
    let (kind, what) = first(|s| {
        s.lives = vec![life(&[asked(), expired.clone(), returned(&expired)])];
        s.replies.clear();
        s.calls[0].details = json!({"status": "expired"});
    });
    assert_eq!((kind, what.contains("after it was written")), (Kind::Misrouted, true), "{what}");
    // The Gateway's own expiry, which has no time of its own.
    let by = Responder { user: "openclaw".into(), name: None, chat: None };
    let content = ReplyContent::Expired;
    let early = decided(&Reply { id: "gateway-q".into(), by, surface: Surface::Gateway, content });
    let (kind, what) = first(|s| {
        s.lives = vec![life(&[asked(), early.clone(), returned(&early)])];
        s.replies.clear();
        s.calls[0].details = json!({"status": "expired"});
    });
    assert_eq!((kind, what.contains("before its deadline")), (Kind::Misrouted, true), "{what}");
}

/// The question is lost with the Gateway, asked again, and answered from the record.
fn asked_again() -> SessionHistory {
    let answered = decided(&reply("r1", 1));
    let lost =
        answered.close(Returned::Unconfirmed { why: "gateway_restart".into() }, Timestamp(3_000)).unwrap();
    let again = Entry {
        key: "openclaw.s.run2.q2".parse().unwrap(),
        asked_at: Timestamp(4_000),
        deadline: Timestamp(64_000),
        ..asked()
    };
    let given = lost.give_again(&again).unwrap();
    let second = again.answer_from_record(&given, Timestamp(5_000)).unwrap();
    let mut session = good();
    let mut later = life(&[again, second.clone(), returned(&second)]);
    later.values.iter_mut().for_each(|written| written.at_ms += 4_000);
    session.lives = vec![life(&[asked(), answered, lost, given]), later];
    session.calls[0].details["from_record"] = "q".into();
    session
}

fn found_again(change: impl FnOnce(&mut SessionHistory)) -> Vec<(Kind, String)> {
    let mut session = asked_again();
    change(&mut session);
    found_in(History { gateway_restarted_ms: Some(3_500), ..history(session) })
}

#[test]
fn an_answer_from_the_record_is_that_of_the_question_that_was_lost() {
    assert_eq!(found_again(|_| ()), []);
    let has = |found: Vec<(Kind, String)>, text: &str| {
        assert!(
            found.iter().any(|(kind, what)| *kind == Kind::Misrouted && what.contains(text)),
            "{found:?}"
        );
    };
    has(found_in(history(asked_again())), "no call was lost");
    has(found_again(|s| drop(s.lives.remove(0))), "not on record");
    has(found_again(|s| s.lives[0].values[3].entry.given_again = None), "given it to another");
    has(found_again(|s| s.calls[0].details["from_record"] = json!(null)), "its call got");
    let other = decided(&reply("r1", 0));
    let other =
        other.close(Returned::Unconfirmed { why: "gateway_restart".into() }, Timestamp(3_000)).unwrap();
    has(found_again(|s| s.lives[0].values[3].entry.state = other.state.clone()), "another answer");
}

#[test]
fn a_question_is_one_too_many_only_beside_others_that_wait() {
    let reason = ask_core::outcome::Undeliverable::TooManyPending;
    let more = Entry { key: "openclaw.s.run.q2".parse().unwrap(), asked_at: Timestamp(1_500), ..asked() };
    let many = more.undeliverable(reason, "too_many_pending_in_the_run", Timestamp(1_600)).unwrap();
    let with = |per_run: usize| {
        let mut session = good();
        let mut extra = life(&[more.clone(), many.clone(), returned(&many)]);
        for written in extra
            .values
            .iter_mut()
            .flat_map(|w| w.entry.question.prompts.first_mut().map(|p| (&mut w.at_ms, p)))
        {
            *written.0 += 600;
            written.1.text = "Which one more?".into();
        }
        session.lives.push(extra);
        let details = json!({"status": "undeliverable"});
        session.calls.push(Call { question: "Which one more?".into(), details, ..session.calls[0].clone() });
        found_in(History { per_run, ..history(session) })
    };
    assert_eq!(with(1), []);
    let (kind, what) = with(2).remove(0);
    assert_eq!((kind, what.contains("one too many, and 1 waited")), (Kind::Misrouted, true), "{what}");
}

/// The late reply has gone to the agent as a message.
fn sent_on() -> SessionHistory {
    let mut session = good();
    session.replies[1].told[0].as_message = true;
    let routed = session.routed.as_mut().unwrap();
    routed.count += 1;
    routed.messages.push_back(message("late-r2", "run3"));
    let text = format!("Late answer to \"{QUESTION}\": Red");
    session.rows.push(Row { key: "run3:user".into(), text, aside: false });
    session
}

#[test]
fn a_late_answer_goes_to_the_agent_once_and_only_where_the_policy_says_so() {
    let found = |policy: bool, change: &dyn Fn(&mut SessionHistory)| {
        let mut session = sent_on();
        change(&mut session);
        found_in(History { late_as_message: policy, ..history(session) })
    };
    assert_eq!(found(true, &|_| ()), []);
    type Change<'a> = &'a dyn Fn(&mut SessionHistory);
    let table: [(&str, Kind, &str, Change<'_>); 5] = [
        ("lost", Kind::Lost, "has not got the late answer", &|s| drop(s.rows.pop())),
        ("twice", Kind::Doubled, "2 times", &|s| s.rows.push(s.rows[2].clone())),
        ("other words", Kind::Misrouted, "and the agent got", &|s| {
            s.rows[2].text = "Late answer to \"?\": No".into()
        }),
        ("not on record", Kind::Lost, "is no message", &|s| {
            drop(s.routed.as_mut().unwrap().messages.pop_back())
        }),
        ("not told", Kind::Untrue, "as a message: false", &|s| s.replies[1].told[0].as_message = false),
    ];
    for (name, kind, text, change) in table {
        let found = found(true, change);
        assert!(found.iter().any(|(k, what)| *k == kind && what.contains(text)), "{name}: {found:?}");
    }
    let rejected = found(false, &|_| ());
    assert!(rejected.iter().any(|(_, what)| what.contains("is to be rejected")), "{rejected:?}");
    let secret = found(true, &|s| s.replies[1].content = Content::Secret("Red".into()));
    assert!(
        secret.iter().any(|(kind, what)| *kind == Kind::Misrouted && what.contains("late reply r2")),
        "{secret:?}"
    );
}

#[test]
fn nothing_expires_before_its_deadline_or_is_pending_after_stop() {
    let stopped = asked().cancel(CancelReason::Stop, "stop", Timestamp(2_000)).unwrap();
    let (kind, what) = first(|s| {
        s.lives = vec![life(&[asked(), stopped.clone(), returned(&stopped)])];
        s.replies.clear();
        s.calls[0].details = json!({"status": "cancelled"});
        s.stops = vec![Stop { message: None, pressed_ms: 1_400, told_ms: Some(1_900) }];
    });
    assert_eq!((kind, what.contains("when Stop was confirmed")), (Kind::Untrue, true), "{what}");

    let mut early = asked().expire(false, DEADLINE).unwrap();
    if let ask_core::entry::State::Decided { decision } = &mut early.state {
        assert_eq!(decision.outcome, Outcome::Expired);
        decision.at = Timestamp(2_000);
    }
    let (kind, what) = first(|s| {
        s.lives = vec![life(&[asked(), early.clone(), returned(&early)])];
        s.replies.clear();
        s.calls[0].details = json!({"status": "expired"});
    });
    assert_eq!((kind, what.contains("before its deadline")), (Kind::Misrouted, true), "{what}");
}
