//! The way back of the Gateway's own question: by what its record is known, and what the Gateway's
//! word about it means for a decision (rules N1 to N4).

use std::collections::BTreeMap;

use sha2::{Digest, Sha256};

use crate::entry::{DecidedBy, Decision, Entry};
use crate::key::QuestionKey;
use crate::outcome::{CancelReason, Outcome, Returned};
use crate::reply::Answer;
use crate::surface::Surface;

/// Longest `resolutionId` that the Gateway takes, in bytes.
const MAX_RESOLUTION_ID: usize = 128;

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
    /// There is none.
    Nothing,
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

/// What becomes of a decision that the Gateway itself gave; `None` for every other one.
pub fn decided_by_gateway(entry: &Entry) -> Option<Returned> {
    let decision = entry.decision()?;
    match &decision.by {
        DecidedBy::Reply { id, surface: Surface::Gateway, .. } if *id == gateway_reply_id(&entry.key) => {
            let lost = Outcome::Cancelled { reason: CancelReason::GatewayRestart };
            Some(match decision.outcome == lost {
                true => Returned::Unconfirmed { why: "gateway_restart".into() },
                false => Returned::Delivered { proof: "decided by the gateway".into() },
            })
        }
        _ => None,
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
        (InTranscript::Nothing, _) => {
            let why = if new_boot { "gateway_restart" } else { "question_not_found" };
            Returned::Unconfirmed { why: why.into() }
        }
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
    use crate::entry::{Road, Verdict};
    use crate::question::{Prompt, Question};
    use crate::reply::{Reply, ReplyContent, Responder};
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
            (&no_answer, nothing(), true, Returned::Unconfirmed { why: "gateway_restart".into() }),
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
