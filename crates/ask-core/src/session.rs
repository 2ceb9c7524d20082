//! The entry of a session: who owns it and how each of its last messages was routed.

use std::collections::{BTreeSet, VecDeque};

use serde::{Deserialize, Serialize};

use crate::key::SessionKey;
use crate::surface::Surface;
use crate::time::Timestamp;

/// How many messages a session remembers.
pub const MAX_MESSAGES: usize = 64;

/// A session's entry in the bucket `sessions`. Its write is the decision about a message (rule S1).
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
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
    /// Messages up to this number were stopped to the end: questions cancelled and runs aborted.
    #[serde(default)]
    pub stop_done: u64,
    /// The last [`MAX_MESSAGES`] messages, oldest first.
    pub messages: VecDeque<RoutedMessage>,
}

/// A message and how it was routed.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
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
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
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
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SendBy {
    /// `chat.send`; any pending native question would take it as its answer.
    ChatSend,
    /// `agent`: leaves a pending native question alone and runs afterwards.
    AgentMethod,
}

/// What is done about a routed message, as often as it is repeated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    /// Put it into `CHAT`.
    Send {
        /// Its run id and idempotency key.
        run: String,
        /// How it is sent.
        send: SendBy,
        /// Its number in the session.
        number: u64,
    },
    /// Hand it in as the reply to this question.
    Reply {
        /// The question's key.
        question: String,
    },
    /// Stop what was said up to this number.
    Stop {
        /// The number of the Stop itself.
        through: u64,
    },
    /// Nothing but to say again what was decided.
    Nothing,
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

    /// What is done about a message of this session, or done again (rule S2).
    pub fn effect(&self, message: &RoutedMessage) -> Effect {
        let number = self.number_of(&message.id);
        match &message.decision {
            MessageDecision::Message { run, send } => Effect::Send { run: run.clone(), send: *send, number },
            MessageDecision::Answer { question } | MessageDecision::Late { question } => {
                Effect::Reply { question: question.clone() }
            }
            MessageDecision::Stop if number <= self.stop_done => Effect::Nothing,
            MessageDecision::Stop => Effect::Stop { through: number },
            MessageDecision::Clarify { .. } => Effect::Nothing,
        }
    }

    /// The message's number in the session, counted from 1.
    fn number_of(&self, id: &str) -> u64 {
        let after = self.messages.iter().rev().take_while(|m| m.id != id).count() as u64;
        self.count.saturating_sub(after)
    }

    /// Whether the session was stopped through the message with this number (rule S10).
    pub fn is_stopped(&self, number: u64) -> bool {
        number <= self.stopped_through
    }

    /// Whether a message came after `id`, so that the cancel of its call is no Stop. `before` is
    /// how many messages there were when it was cancelled, where that is known.
    pub fn went_on(&self, id: &str, before: Option<u64>) -> bool {
        match self.messages.iter().position(|m| m.id == id) {
            Some(at) => at + 1 < self.messages.len(),
            None => before.is_some_and(|before| self.count > before),
        }
    }

    /// The Stop that died before its end and that this message came after. It is finished before
    /// the message has any effect, so that it stops nothing that came later.
    pub fn owed_stop(&self, id: &str) -> Option<u64> {
        let number = self.number_of(id);
        let forgotten = self.count - self.messages.len() as u64;
        let typed =
            self.messages.iter().zip(forgotten + 1..).filter(|(m, _)| m.decision == MessageDecision::Stop);
        let stops = typed.map(|(_, number)| number).chain([self.stopped_through]);
        stops.filter(|stop| (self.stop_done + 1..number).contains(stop)).max()
    }

    /// The session with everything held back that was said up to `through`; `None` when it is.
    pub fn stopped(&self, through: u64) -> Option<Self> {
        (through > self.stopped_through).then(|| Self { stopped_through: through, ..self.clone() })
    }

    /// The session with what was said up to `through` stopped to the end; `None` when it is.
    pub fn stop_was_done(&self, through: u64) -> Option<Self> {
        (through > self.stop_done).then(|| Self { stop_done: through, ..self.clone() })
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
            stop_done: 0,
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

    #[test]
    fn s2_the_same_effect_is_redone_until_it_was_done() {
        let decided = |id, decision| RoutedMessage { decision, ..message(id) };
        let (run, question) = (String::from("ab-1"), String::from("g.s.r.q"));
        let said = decided(1, MessageDecision::Message { run: run.clone(), send: SendBy::ChatSend });
        let answer = decided(2, MessageDecision::Answer { question: question.clone() });
        let stop = decided(3, MessageDecision::Stop);
        let clarify = decided(4, MessageDecision::Clarify { text: "which?".into() });
        let after = session().routed(said.clone()).routed(answer.clone()).routed(stop.clone());
        assert_eq!(after.effect(&said), Effect::Send { run, send: SendBy::ChatSend, number: 1 });
        assert_eq!(after.effect(&answer), Effect::Reply { question: question.clone() });
        assert_eq!(after.effect(&stop), Effect::Stop { through: 3 });
        let later = after.answer_was_late("m2").unwrap().routed(clarify.clone());
        assert_eq!(later.effect(&stop), Effect::Stop { through: 3 });
        let done = later.stopped(3).unwrap().stop_was_done(3).unwrap();
        assert_eq!(done.effect(&stop), Effect::Nothing);
        assert_eq!(later.effect(&clarify), Effect::Nothing);
        assert_eq!(later.effect(&later.messages[1]), Effect::Reply { question });
    }

    #[test]
    fn s2_a_stop_that_died_is_owed_to_what_comes_after_it() {
        let hello = RoutedMessage { decision: MessageDecision::Clarify { text: "?".into() }, ..message(1) };
        let typed = session()
            .routed(hello.clone())
            .routed(message(2))
            .routed(RoutedMessage { id: "m3".into(), ..hello });
        let pressed = typed.stop_was_done(2).unwrap().stopped(3).unwrap().routed(message(4));
        let table = [
            (&typed, "m1", None),
            (&typed, "m2", None),
            (&typed, "m3", Some(2)),
            (&typed.stopped(2).unwrap(), "m3", Some(2)),
            (&typed.stop_was_done(2).unwrap(), "m3", None),
            (&pressed, "m3", None),
            (&pressed, "m4", Some(3)),
            (&pressed.stop_was_done(3).unwrap(), "m4", None),
        ];
        for (case, (session, id, owed)) in table.into_iter().enumerate() {
            assert_eq!(session.owed_stop(id), owed, "case {case}");
        }
    }

    #[test]
    fn s10_stop_holds_back_what_was_said_before_it() {
        let stopped = session().routed(message(1)).routed(message(2)).stopped(2).unwrap().routed(message(3));
        assert_eq!([1, 2, 3].map(|number| stopped.is_stopped(number)), [true, true, false]);
        assert_eq!(stopped.stopped(1), None);
    }

    #[test]
    fn a_cancelled_call_is_no_stop_when_another_message_came() {
        let both = session().routed(message(1)).routed(message(2));
        let table = [
            ("m1", None, true),
            ("m2", None, false),
            // It was never routed: only the count can tell.
            ("m9", Some(1), true),
            ("m9", Some(2), false),
            ("m9", None, false),
        ];
        for (id, before, went_on) in table {
            assert_eq!(both.went_on(id, before), went_on, "{id} {before:?}");
        }
    }
}
