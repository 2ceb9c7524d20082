//! The way back of the Gateway's own question: by what its record is known, and what the Gateway's
//! word about it means for a decision (rules N1 to N4).

use std::collections::BTreeMap;

use sha2::{Digest, Sha256};

use crate::call::GATEWAY_RESTART;
use crate::entry::{DecidedBy, Decision, Entry, Road};
use crate::key::QuestionKey;
use crate::outcome::{CancelReason, Outcome, Returned};
use crate::question::{Invalid, Question};
use crate::reply::{Answer, Reply, ReplyContent, check_answers};
use crate::surface::Surface;

/// Longest `resolutionId` that the Gateway takes, in bytes.
const MAX_RESOLUTION_ID: usize = 128;

/// Why nobody knows what became of a question: the Gateway holds neither it nor its tool result.
const NOT_FOUND: &str = "question_not_found";
/// The same, where not all of the transcript was read.
const NOT_FOUND_IN_PART: &str = "question_not_found, and only a part of the transcript was read";

/// What the Gateway says about a question that was decided here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GatewaySays {
    /// It has taken the decision.
    Resolved,
    /// It had an outcome before; this is its record.
    Settled {
        /// Who gave it, as the record names them.
        by: Option<String>,
        /// What it was.
        outcome: Outcome,
    },
    /// It holds the question no more; this is what the transcript has instead.
    Forgotten(InTranscript),
}

/// The tool result of a question in the Gateway's transcript.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum InTranscript {
    /// There is none in all of it.
    Nothing,
    /// There is none in what was read of it; the rest is too far back, or can't be read.
    NothingInPart,
    /// The tool had no answer.
    NoAnswer,
    /// The tool had these answers.
    Answers {
        /// They are those of our decision.
        ours: bool,
        /// By prompt id.
        answers: BTreeMap<String, Answer>,
    },
}

/// The id of the reply that carries the Gateway's own outcome.
pub fn gateway_reply_id(key: &QuestionKey) -> String {
    format!("gateway-{}", key.question)
}

fn lost_reply_id(key: &QuestionKey) -> String {
    format!("lost-{}", key.question)
}

fn lost_in_part_reply_id(key: &QuestionKey) -> String {
    format!("lost-in-part-{}", key.question)
}

/// What is handed in for a pending question that the Gateway holds no more, and under which id.
/// What the transcript shows is the Gateway's outcome. Where it shows none, nobody knows one: the
/// question is called off, and the id keeps its return unconfirmed (rules N3, N4). `new_boot`: the
/// Gateway's process is another one than when it was asked.
pub fn forgotten_pending(key: &QuestionKey, found: InTranscript, new_boot: bool) -> (String, ReplyContent) {
    let cancelled = |reason| ReplyContent::Cancelled { reason };
    let lost = if new_boot { CancelReason::GatewayRestart } else { CancelReason::RunEnded };
    match found {
        InTranscript::Answers { answers, .. } => (gateway_reply_id(key), ReplyContent::Answers { answers }),
        InTranscript::NoAnswer => (gateway_reply_id(key), cancelled(CancelReason::RunEnded)),
        InTranscript::Nothing => (lost_reply_id(key), cancelled(lost)),
        InTranscript::NothingInPart => (lost_in_part_reply_id(key), cancelled(lost)),
    }
}

/// What becomes of a decision that the Gateway itself gave, or that stands for one nobody knows;
/// `None` for every other one.
pub fn decided_by_gateway(entry: &Entry) -> Option<Returned> {
    let decision = entry.decision()?;
    let DecidedBy::Reply { id, surface: Surface::Gateway, .. } = &decision.by else { return None };
    let key = &entry.key;
    let lost = if *id == lost_reply_id(key) {
        Some(NOT_FOUND)
    } else if *id == lost_in_part_reply_id(key) {
        Some(NOT_FOUND_IN_PART)
    } else if *id == gateway_reply_id(key) {
        None
    } else {
        return None;
    };
    let in_restart = decision.outcome == Outcome::Cancelled { reason: CancelReason::GatewayRestart };
    let why = if in_restart { Some(GATEWAY_RESTART) } else { lost };
    Some(match why {
        Some(why) => Returned::Unconfirmed { why: why.into() },
        None => Returned::Delivered { proof: "decided by the gateway".into() },
    })
}

/// Checks the answers of a reply to `entry`. The Gateway's own are a fact, whatever the question
/// allows; only a secret is never taken in clear.
///
/// # Errors
/// As [`check_answers`].
pub(crate) fn check_reply(
    entry: &Entry,
    reply: &Reply,
    answers: &BTreeMap<String, Answer>,
) -> Result<(), Invalid> {
    let is_fact = entry.road == Road::Native
        && reply.surface == Surface::Gateway
        && reply.id == gateway_reply_id(&entry.key);
    match is_fact {
        true => check_secrets(&entry.question, answers),
        false => check_answers(&entry.question, answers),
    }
}

fn check_secrets(question: &Question, answers: &BTreeMap<String, Answer>) -> Result<(), Invalid> {
    let in_clear = |id: &String| matches!(answers.get(id), Some(Answer::Given { .. }));
    match question.prompts.iter().find(|prompt| prompt.secret && in_clear(&prompt.id)) {
        Some(prompt) => Err(Invalid::new(&prompt.id, "a sealed secret", "a plain value (not shown)")),
        None => Ok(()),
    }
}

/// By this the Gateway's record tells whether it has our decision. The same for every repetition.
pub fn resolution_id(entry: &Entry) -> String {
    let id = match entry.decision().map(|d| &d.by) {
        Some(DecidedBy::Reply { id, .. }) => id.clone(),
        Some(DecidedBy::Rule { name }) => format!("{name}-{}", entry.key.question),
        // Only calls are answered from the record.
        Some(DecidedBy::Record { .. }) | None => entry.key.question.clone(),
    };
    match id.len() <= MAX_RESOLUTION_ID {
        true => id,
        false => Sha256::digest(&id).iter().map(|b| format!("{b:02x}")).collect(),
    }
}

/// Who resolves, as it stands in the Gateway's record; by this an adapter knows its own decision again.
pub fn resolved_by(entry: &Entry) -> String {
    let id = resolution_id(entry);
    match entry.decision().map(|d| &d.by) {
        Some(DecidedBy::Reply { responder, surface, .. }) => {
            format!("askbus:{}:{}:{id}", surface.name(), responder.user)
        }
        _ => format!("askbus:{id}"),
    }
}

/// What became of the decision of `entry`, by what the Gateway says. `new_boot`: its process is
/// another one than when the question was asked. `None` while the entry is pending.
pub fn returned(entry: &Entry, says: GatewaySays, new_boot: bool) -> Option<Returned> {
    let decision = entry.decision()?;
    Some(match says {
        GatewaySays::Resolved => Returned::Delivered { proof: "resolved".into() },
        GatewaySays::Settled { by, outcome } => settled(entry, decision, by, outcome),
        GatewaySays::Forgotten(found) => forgotten(decision, found, new_boot),
    })
}

fn settled(entry: &Entry, decision: &Decision, by: Option<String>, theirs: Outcome) -> Returned {
    if by.as_deref() == Some(resolved_by(entry).as_str()) {
        Returned::Delivered { proof: "resolution_id".into() }
    } else if decision.outcome.is_no_answer() && theirs.is_no_answer() {
        Returned::Delivered { proof: "the gateway has no answer either".into() }
    } else {
        Returned::Overruled { by, outcome: theirs }
    }
}

fn forgotten(decision: &Decision, found: InTranscript, new_boot: bool) -> Returned {
    let delivered = || Returned::Delivered { proof: "tool_result".into() };
    match (found, decision.outcome.is_no_answer()) {
        (InTranscript::Nothing | InTranscript::NothingInPart, _) if new_boot => {
            Returned::Unconfirmed { why: GATEWAY_RESTART.into() }
        }
        (InTranscript::Nothing, _) => Returned::Unconfirmed { why: NOT_FOUND.into() },
        (InTranscript::NothingInPart, _) => Returned::Unconfirmed { why: NOT_FOUND_IN_PART.into() },
        (InTranscript::NoAnswer, true) | (InTranscript::Answers { ours: true, .. }, false) => delivered(),
        (InTranscript::NoAnswer, false) => {
            let outcome = Outcome::Cancelled { reason: CancelReason::RunEnded };
            Returned::Overruled { by: None, outcome }
        }
        (InTranscript::Answers { answers, .. }, _) => {
            Returned::Overruled { by: None, outcome: Outcome::Answered { answers } }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::entry::Verdict;
    use crate::question::Prompt;
    use crate::reply::Responder;
    use crate::time::Timestamp;

    fn pending() -> Entry {
        let question = Question::new(vec![Prompt::free_text("Where?")]).unwrap();
        let key = "g.s.r.q".parse().unwrap();
        Entry::ask(key, Road::Native, "ask_user", "c", question, Timestamp(1), Timestamp(9), None).unwrap()
    }

    fn replied(id: &str, surface: Surface, content: ReplyContent) -> Entry {
        let by = Responder { user: "alice".into(), name: None, chat: None };
        let reply = Reply { id: id.into(), by, surface, content };
        let Verdict::Decide(entry) = pending().reply(&reply, Timestamp(2)) else { panic!() };
        *entry
    }

    fn answers(text: &str) -> BTreeMap<String, Answer> {
        [("answer".to_owned(), Answer::text(text))].into()
    }

    fn answered(id: &str) -> Entry {
        replied(id, Surface::Card, ReplyContent::Answers { answers: answers("here") })
    }

    #[test]
    fn n1_to_n4_the_record_or_the_transcript_says_what_became_of_a_decision() {
        let (ours, no_answer) = (answered("r1"), pending().expire(false, Timestamp(9)).unwrap());
        let theirs = || Outcome::Answered { answers: answers("there") };
        let settled = |by: &str, outcome| GatewaySays::Settled { by: Some(by.into()), outcome };
        let found = |ours| GatewaySays::Forgotten(InTranscript::Answers { ours, answers: answers("there") });
        let delivered = |proof: &str| Returned::Delivered { proof: proof.into() };
        let overruled =
            |by: Option<&str>, outcome| Returned::Overruled { by: by.map(str::to_owned), outcome };
        let run_ended = Outcome::Cancelled { reason: CancelReason::RunEnded };
        let nothing = || GatewaySays::Forgotten(InTranscript::Nothing);
        let in_part = || GatewaySays::Forgotten(InTranscript::NothingInPart);
        let table = [
            (&ours, GatewaySays::Resolved, false, delivered("resolved")),
            (&ours, settled("askbus:card:alice:r1", theirs()), false, delivered("resolution_id")),
            (&ours, settled("tui", theirs()), false, overruled(Some("tui"), theirs())),
            // Another's id may end like ours.
            (&ours, settled("tui-r1", theirs()), false, overruled(Some("tui-r1"), theirs())),
            (&ours, settled("tui", Outcome::Expired), false, overruled(Some("tui"), Outcome::Expired)),
            (
                &no_answer,
                settled("tui", run_ended.clone()),
                false,
                delivered("the gateway has no answer either"),
            ),
            (&no_answer, settled("tui", theirs()), false, overruled(Some("tui"), theirs())),
            (&ours, found(true), false, delivered("tool_result")),
            (&ours, found(false), false, overruled(None, theirs())),
            (&no_answer, found(false), false, overruled(None, theirs())),
            (&ours, GatewaySays::Forgotten(InTranscript::NoAnswer), false, overruled(None, run_ended)),
            (&no_answer, GatewaySays::Forgotten(InTranscript::NoAnswer), false, delivered("tool_result")),
            (&ours, nothing(), false, Returned::Unconfirmed { why: "question_not_found".into() }),
            (&ours, in_part(), false, Returned::Unconfirmed { why: NOT_FOUND_IN_PART.into() }),
            (&no_answer, nothing(), true, Returned::Unconfirmed { why: "gateway_restart".into() }),
            (&no_answer, in_part(), true, Returned::Unconfirmed { why: "gateway_restart".into() }),
        ];
        for (entry, says, new_boot, expected) in table {
            assert_eq!(returned(entry, says.clone(), new_boot), Some(expected), "{says:?}");
        }
        assert_eq!(returned(&pending(), GatewaySays::Resolved, false), None);
    }

    #[test]
    fn what_the_gateway_decided_needs_no_way_back() {
        let content = |reason| ReplyContent::Cancelled { reason };
        let table = [
            (answered("r1"), None),
            (
                replied("gateway-q", Surface::Gateway, content(CancelReason::RunEnded)),
                Some(Returned::Delivered { proof: "decided by the gateway".into() }),
            ),
            (
                replied("gateway-q", Surface::Gateway, content(CancelReason::GatewayRestart)),
                Some(Returned::Unconfirmed { why: "gateway_restart".into() }),
            ),
            (replied("cancel-q", Surface::Gateway, content(CancelReason::Caller)), None),
            (pending(), None),
        ];
        for (entry, returned) in table {
            assert_eq!(decided_by_gateway(&entry), returned, "{:?}", entry.state);
        }
    }

    #[test]
    fn n3_n4_a_pending_question_that_the_gateway_forgot_is_delivered_only_by_its_transcript() {
        let delivered = || Returned::Delivered { proof: "decided by the gateway".into() };
        let unconfirmed = |why: &str| Returned::Unconfirmed { why: why.into() };
        let theirs = || InTranscript::Answers { ours: false, answers: answers("there") };
        let cancelled = |reason| Outcome::Cancelled { reason };
        let (ended, restart) = (CancelReason::RunEnded, CancelReason::GatewayRestart);
        let table = [
            (theirs(), false, Outcome::Answered { answers: answers("there") }, delivered()),
            (theirs(), true, Outcome::Answered { answers: answers("there") }, delivered()),
            (InTranscript::NoAnswer, false, cancelled(ended), delivered()),
            (InTranscript::Nothing, false, cancelled(ended), unconfirmed("question_not_found")),
            (InTranscript::NothingInPart, false, cancelled(ended), unconfirmed(NOT_FOUND_IN_PART)),
            (InTranscript::Nothing, true, cancelled(restart), unconfirmed("gateway_restart")),
            (InTranscript::NothingInPart, true, cancelled(restart), unconfirmed("gateway_restart")),
        ];
        for (found, new_boot, outcome, returned) in table {
            let (id, content) = forgotten_pending(&pending().key, found.clone(), new_boot);
            let entry = replied(&id, Surface::Gateway, content);
            assert_eq!(entry.decision().unwrap().outcome, outcome, "{found:?}");
            assert_eq!(decided_by_gateway(&entry), Some(returned), "{found:?}");
        }
    }

    #[test]
    fn what_the_gateway_had_is_taken_whatever_the_question_allows_but_no_secret_in_clear() {
        let options = ["A", "B"].map(crate::question::Choice::label).into();
        let closed = Prompt { options, allow_other: false, ..Prompt::free_text("Which?") };
        let more = Prompt { id: "more".into(), ..Prompt::free_text("And?") };
        let ask = |prompts, road| Entry { question: Question::new(prompts).unwrap(), road, ..pending() };
        let entry = || ask(vec![closed.clone(), more.clone()], Road::Native);
        let secret = || ask(vec![Prompt { secret: true, ..Prompt::free_text("Token?") }], Road::Native);
        let table = [
            ("one that is no option", entry(), "gateway-q", Answer::text("else"), true),
            ("several", entry(), "gateway-q", Answer::Given { options: vec![0, 1], other: None }, true),
            ("none", entry(), "gateway-q", Answer::Given { options: vec![], other: None }, true),
            ("somebody else's", entry(), "r1", Answer::text("else"), false),
            ("a call's", ask(vec![closed.clone()], Road::Plugin), "gateway-q", Answer::text("else"), false),
            ("hidden", secret(), "gateway-q", Answer::Hidden, true),
            ("in clear", secret(), "gateway-q", Answer::text("hunter2"), false),
        ];
        for (what, entry, id, answer, taken) in table {
            let by = Responder { user: "control-ui".into(), name: None, chat: None };
            let content = ReplyContent::Answers { answers: [("answer".to_owned(), answer)].into() };
            let reply = Reply { id: id.into(), by, surface: Surface::Gateway, content };
            assert_eq!(matches!(entry.reply(&reply, Timestamp(2)), Verdict::Decide(_)), taken, "{what}");
        }
    }

    #[test]
    fn a_decision_has_the_same_resolution_id_whenever_it_is_given_back() {
        assert_eq!(resolution_id(&answered("r1")), "r1");
        assert_eq!(resolved_by(&answered("r1")), "askbus:card:alice:r1");
        let expired = pending().expire(false, Timestamp(9)).unwrap();
        assert_eq!(resolved_by(&expired), "askbus:deadline-q");
        let long = answered(&"r".repeat(MAX_RESOLUTION_ID + 1));
        assert_eq!(resolution_id(&long).len(), 64);
        assert!(resolved_by(&long).ends_with(&resolution_id(&long)));
    }
}
