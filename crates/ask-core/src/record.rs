//! A question that is asked again unchanged, because its first call was lost with its gateway, is
//! answered from the record instead of by the person (scenario of an agent that starts anew).

use std::time::Duration;

use crate::entry::{Entry, Road};
use crate::outcome::{Outcome, Returned};
use crate::question::Question;
use crate::reply::Answer;

/// How long an answer that was lost on its way is used again.
pub const RECORD_KEPT: Duration = Duration::from_secs(600);

/// Why a call that did not get its outcome is known to be lost with its gateway or connection.
const LOST: [&str; 2] = ["gateway_restart", "gateway_unreachable"];

/// First words of options by which something is allowed or forbidden.
const APPROVING: [&str; 12] = [
    "accept", "allow", "approve", "confirm", "deny", "disallow", "no", "ok", "proceed", "refuse", "reject",
    "yes",
];

/// True when the answer in `entry` may be given again: its call was lost with its gateway, nothing
/// in it is secret, and it allowed nothing.
pub fn was_lost(entry: &Entry) -> bool {
    let Some(Returned::Unconfirmed { why }) = entry.returned() else { return false };
    let Some(Outcome::Answered { answers }) = entry.decision().map(|d| &d.outcome) else { return false };
    is_call(entry.road)
        && LOST.contains(&why.as_str())
        && answers.values().all(|answer| matches!(answer, Answer::Given { .. }))
        && !entry.question.is_secret()
        && !is_approval(&entry.question)
}

/// True when `asked` is the question of `first` again, unchanged and in time, and the answer was
/// given to no other.
pub fn is_asked_again(asked: &Entry, first: &Entry) -> bool {
    let answered = first.decision().map(|d| d.at);
    asked.is_pending()
        && was_lost(first)
        && is_call(asked.road)
        && asked.key != first.key
        && asked.key.session_key() == first.key.session_key()
        && asked.tool == first.tool
        && asked.question == first.question
        && answered.is_some_and(|at| asked.asked_at >= at && asked.asked_at.since(at) <= RECORD_KEPT)
        && first.given_again.as_ref().is_none_or(|to| *to == asked.key.to_string())
}

/// True for a question by whose answer something is allowed.
pub fn is_approval(question: &Question) -> bool {
    let first_word = |label: &str| {
        let word: String = label.trim().chars().take_while(|c| c.is_alphabetic()).collect();
        word.to_lowercase()
    };
    question
        .prompts
        .iter()
        .flat_map(|prompt| &prompt.options)
        .any(|option| APPROVING.contains(&first_word(&option.label).as_str()))
}

fn is_call(road: Road) -> bool {
    matches!(road, Road::Plugin | Road::Mcp)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::entry::{DecidedBy, Verdict};
    use crate::question::{Choice, Prompt};
    use crate::reply::{Reply, ReplyContent, Responder, Sealed};
    use crate::surface::Surface;
    use crate::time::Timestamp;

    const MINUTE: u64 = 60_000;

    fn asked(call: &str, at: u64, change: impl Fn(&mut Entry)) -> Entry {
        let options = ["Lisbon", "Oslo"].map(Choice::label).into();
        let question = Question::new(vec![Prompt { options, ..Prompt::free_text("Where to?") }]).unwrap();
        let key = format!("g.s.r.{call}").parse().unwrap();
        let (at, deadline) = (Timestamp(at), Timestamp(at + 5 * MINUTE));
        let mut entry = Entry::ask(key, Road::Plugin, "t", call, question, at, deadline, None).unwrap();
        change(&mut entry);
        entry
    }

    /// Answered at minute 1, and not returned for this reason.
    fn lost(why: &str, answer: Answer, change: impl Fn(&mut Entry)) -> Entry {
        let by = Responder { user: "alice".into(), name: None, chat: None };
        let content = ReplyContent::Answers { answers: [("answer".into(), answer)].into() };
        let reply = Reply { id: "r".into(), by, surface: Surface::Card, content };
        let Verdict::Decide(entry) = asked("first", 0, change).reply(&reply, Timestamp(MINUTE)) else {
            panic!()
        };
        entry.close(Returned::Unconfirmed { why: why.into() }, Timestamp(2 * MINUTE)).unwrap()
    }

    fn oslo() -> Answer {
        Answer::option(1)
    }

    #[test]
    fn only_an_unchanged_question_in_time_is_answered_from_the_record() {
        let first = lost("gateway_restart", oslo(), |_| ());
        let table: [(&str, Entry, bool); 8] = [
            ("unchanged", asked("second", 3 * MINUTE, |_| ()), true),
            ("ten minutes after the answer", asked("second", 11 * MINUTE, |_| ()), true),
            ("later", asked("second", 11 * MINUTE + 1, |_| ()), false),
            ("other words", asked("second", 3 * MINUTE, |e| e.question.prompts[0].text += "?"), false),
            ("another tool", asked("second", 3 * MINUTE, |e| e.tool = "u".into()), false),
            ("another session", asked("second", 3 * MINUTE, |e| e.key.session = "s2".into()), false),
            ("the Gateway's own", asked("second", 3 * MINUTE, |e| e.road = Road::Native), false),
            ("itself", asked("first", 3 * MINUTE, |_| ()), false),
        ];
        for (what, again, expected) in table {
            assert_eq!(is_asked_again(&again, &first), expected, "{what}");
        }
    }

    #[test]
    fn only_an_answer_that_was_lost_with_its_gateway_is_given_again() {
        let sealed = Sealed { key_id: "k".into(), encapsulated: "e".into(), ciphertext: "c".into() };
        let secret = |e: &mut Entry| {
            e.question.prompts[0].options.clear();
            e.question.prompts[0].secret = true;
        };
        let approval = |e: &mut Entry| e.question.prompts[0].options[0].label = "Yes, delete it".into();
        let table = [
            ("lost", lost("gateway_restart", oslo(), |_| ()), true),
            ("lost too", lost("gateway_unreachable", oslo(), |_| ()), true),
            ("given up", lost("caller_cancelled", oslo(), |_| ()), false),
            ("perhaps received", lost("no_proof", oslo(), |_| ()), false),
            ("a secret", lost("gateway_restart", Answer::Sealed(sealed), secret), false),
            ("an approval", lost("gateway_restart", oslo(), approval), false),
            ("the Gateway's own", lost("gateway_restart", oslo(), |e| e.road = Road::Native), false),
        ];
        for (what, first, expected) in table {
            assert_eq!(was_lost(&first), expected, "{what}");
        }
        assert!(!was_lost(&asked("pending", 0, |_| ())));
    }

    #[test]
    fn an_answer_is_given_again_once() {
        let first = lost("gateway_restart", oslo(), |_| ());
        let (second, third) = (asked("second", 3 * MINUTE, |_| ()), asked("third", 3 * MINUTE, |_| ()));
        let given = first.give_again(&second).unwrap();
        assert_eq!(given.give_again(&third), None);
        // The writer that died in between goes on.
        assert_eq!(given.give_again(&second), Some(given.clone()));
        let answered = second.answer_from_record(&given, Timestamp(4 * MINUTE)).unwrap();
        let decision = answered.decision().unwrap();
        assert_eq!(decision.outcome, first.decision().unwrap().outcome);
        assert!(
            matches!(&decision.by, DecidedBy::Record { question, .. } if *question == first.key.question)
        );
        assert_eq!(second.answer_from_record(&first, Timestamp(4 * MINUTE)), None, "it is not marked");
        assert_eq!(third.answer_from_record(&given, Timestamp(4 * MINUTE)), None, "it is another's");
    }
}
