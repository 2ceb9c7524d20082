//! The entry of a session: who owns it and how each of its last messages was routed.

use std::collections::{BTreeSet, VecDeque};

use serde::{Deserialize, Serialize};

use crate::key::SessionKey;
use crate::surface::Surface;
use crate::time::Timestamp;

/// How many messages a session remembers.
pub const MAX_MESSAGES: usize = 64;

/// A session's entry in the bucket `sessions`. Its write is the decision about a message (rule S1).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Session {
    /// Version of this payload.
    pub schema: u32,
    /// Where the entry lives.
    pub key: SessionKey,
    /// The user whose session it is; never changes.
    pub owner: String,
    /// The front end that is bound to it, e.g. `openwebui`.
    pub front: String,
    /// The chat at that front end.
    pub chat: Option<String>,
    /// What that front end can show.
    pub surfaces: BTreeSet<Surface>,
    /// When the first message came.
    pub bound_at: Timestamp,
    /// How many messages were routed in all.
    pub count: u64,
    /// Messages up to this number were stopped: what was not sent yet is not sent (rule S10).
    #[serde(default)]
    pub stopped_through: u64,
    /// The last [`MAX_MESSAGES`] messages, oldest first.
    pub messages: VecDeque<RoutedMessage>,
}

/// A message and how it was routed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RoutedMessage {
    /// The front end's id of the message.
    pub id: String,
    /// When it was routed.
    pub at: Timestamp,
    /// What it was taken for.
    pub decision: MessageDecision,
    /// The rule that said so.
    pub rule: String,
}

/// What a message was taken for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "as", rename_all = "snake_case")]
pub enum MessageDecision {
    /// A message to the agent: a new turn, or steering where a run is active; the Gateway decides.
    Message {
        /// Its run id and idempotency key.
        run: String,
        /// How it is sent.
        send: SendBy,
    },
    /// The reply to a question.
    Answer {
        /// The question's key.
        question: String,
    },
    /// It was meant as an answer, and the question had another outcome first.
    Late {
        /// The question's key.
        question: String,
    },
    /// It was incomplete or ambiguous; the person is told this.
    Clarify {
        /// What the person is told.
        text: String,
    },
    /// Stop: questions are cancelled and the run is aborted.
    Stop,
}

/// The Gateway's method that carries a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SendBy {
    /// `chat.send`; any pending native question would take it as its answer.
    ChatSend,
    /// `agent`: leaves a pending native question alone and runs afterwards.
    AgentMethod,
}

/// What a session says about a message id.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Known<'a> {
    /// Not routed yet.
    New,
    /// Routed already: redo this effect, decide nothing (rule S2).
    Routed(&'a RoutedMessage),
    /// It may have been routed and forgotten (rule S3).
    TooOld,
}

impl Session {
    /// What is known about the message `id` whose sender had seen `seen` messages of the session.
    pub fn known(&self, id: &str, seen: Option<u64>) -> Known<'_> {
        if let Some(message) = self.messages.iter().find(|m| m.id == id) {
            return Known::Routed(message);
        }
        let forgotten = self.count - self.messages.len() as u64;
        match seen {
            Some(seen) if seen < forgotten => Known::TooOld,
            _ => Known::New,
        }
    }

    /// The session with this message routed.
    pub fn routed(&self, message: RoutedMessage) -> Self {
        let mut next = self.clone();
        next.count += 1;
        next.messages.push_back(message);
        if next.messages.len() > MAX_MESSAGES {
            next.messages.pop_front();
        }
        next
    }

    /// The session with everything stopped that was said so far.
    pub fn stopped(&self) -> Self {
        Self { stopped_through: self.count, ..self.clone() }
    }

    /// The session with the decision of an answer rewritten to late; `None` when there is nothing
    /// to rewrite.
    pub fn answer_was_late(&self, id: &str) -> Option<Self> {
        let mut next = self.clone();
        let message = next.messages.iter_mut().find(|m| m.id == id)?;
        let MessageDecision::Answer { question } = &message.decision else {
            return None;
        };
        message.decision = MessageDecision::Late { question: question.clone() };
        Some(next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn session() -> Session {
        Session {
            schema: crate::SCHEMA,
            key: SessionKey::new("g", "s"),
            owner: "alice".into(),
            front: "openwebui".into(),
            chat: None,
            surfaces: BTreeSet::new(),
            bound_at: Timestamp(0),
            count: 0,
            stopped_through: 0,
            messages: VecDeque::new(),
        }
    }

    fn message(id: usize) -> RoutedMessage {
        RoutedMessage {
            id: format!("m{id}"),
            at: Timestamp(0),
            decision: MessageDecision::Stop,
            rule: "command".into(),
        }
    }

    #[test]
    fn s2_a_retry_finds_its_first_decision() {
        let session = session().routed(message(1));
        assert_eq!(session.known("m1", None), Known::Routed(&message(1)));
        assert_eq!(session.known("m2", None), Known::New);
    }

    #[test]
    fn s3_an_unknown_message_older_than_the_memory_is_refused() {
        let session = (0..MAX_MESSAGES + 10).fold(session(), |s, n| s.routed(message(n)));
        assert_eq!(session.messages.len(), MAX_MESSAGES);
        assert_eq!(session.known("old", Some(9)), Known::TooOld);
        assert_eq!(session.known("new", Some(10)), Known::New);
    }

    #[test]
    fn s2_only_an_answer_is_rewritten_to_late() {
        let answer =
            RoutedMessage { decision: MessageDecision::Answer { question: "q".into() }, ..message(1) };
        let session = session().routed(answer).routed(message(2));
        let late = session.answer_was_late("m1").unwrap();
        assert_eq!(late.messages[0].decision, MessageDecision::Late { question: "q".into() });
        assert_eq!(late.answer_was_late("m1"), None);
        assert_eq!(late.answer_was_late("m2"), None);
    }
}
