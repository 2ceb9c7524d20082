//! What the services say to each other besides the entries: requests to the routers and their
//! answers, steps for front ends, and the items of the streams `CHAT` and `RUNS`.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::entry::StepKind;
use crate::key::{QuestionKey, SessionKey};
use crate::outcome::Outcome;
use crate::question::{Invalid, Question, clamp};
use crate::reply::{Reply, ReplyContent, Responder};
use crate::session::{MessageDecision, SendBy};
use crate::surface::Surface;
use crate::text_reply::{self, TextReply};
use crate::time::Timestamp;

/// A reply to a question: to `reply.<key>` from front ends, where only the session's owner is
/// heard; to `outcome.<key>` from the gateway's adapters and from operators.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ReplyRequest {
    /// Version of this payload.
    pub schema: u32,
    /// Which question.
    pub key: QuestionKey,
    /// The reply.
    pub reply: Reply,
}

/// The answer to a [`ReplyRequest`], given after the durable write.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "result", rename_all = "snake_case")]
pub enum ReplyResponse {
    /// This reply decided, now or earlier.
    Saved,
    /// Another decision came first.
    Closed {
        /// That decision's outcome, without secrets.
        outcome: Outcome,
        /// When.
        at: Timestamp,
        /// Who decided, as people read it.
        by: String,
        /// Where, when a person decided.
        surface: Option<Surface>,
        /// The answer went to the agent as a message instead.
        #[serde(default)]
        sent_as_message: bool,
    },
    /// The sender does not own the session.
    WrongUser,
    /// There is no such question.
    UnknownQuestion,
    /// It does not fit the question, which stays pending.
    Invalid {
        /// What does not fit.
        invalid: Invalid,
    },
    /// It could not be written; send it again.
    Retry {
        /// Why.
        why: String,
    },
}

/// A user's message, to `say.<gateway>.<session>`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct SayRequest {
    /// Version of this payload.
    pub schema: u32,
    /// Which session.
    pub session: SessionKey,
    /// The front end's id of the message, repeated on retry.
    pub message: String,
    /// The user who typed it.
    pub user: String,
    /// The user's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user_name: Option<String>,
    /// The front end, e.g. `openwebui`.
    pub front: String,
    /// The chat there.
    #[serde(default)]
    pub chat: Option<String>,
    /// What the front end can show.
    pub surfaces: BTreeSet<Surface>,
    /// What was typed.
    pub text: String,
    /// Images and files.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub attachments: Vec<Attachment>,
    /// The ids of the questions that were on screen; absent when not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_screen: Option<Vec<String>>,
    /// How many messages of the session its sender had seen; absent when not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seen: Option<u64>,
    /// It only has the agent go on: it is no person's answer, whatever waits.
    #[serde(default)]
    pub goes_on: bool,
}

impl SayRequest {
    /// The message as the reply to a question; `None` where it is none. The text is read anew each
    /// time: what it says of a question never changes.
    pub fn as_reply(&self, question: &Question) -> Option<Reply> {
        let TextReply::Complete(answers) = text_reply::parse(question, &self.text) else {
            return None;
        };
        let by = Responder { user: self.user.clone(), name: self.user_name.clone(), chat: self.chat.clone() };
        let content = ReplyContent::Answers { answers };
        Some(Reply { id: format!("message-{}", self.message), by, surface: Surface::Message, content })
    }
}

/// An image or a file.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Attachment {
    /// Its name.
    pub name: String,
    /// Its media type.
    pub mime: String,
    /// Its content in base64.
    pub data: String,
}

/// The answer to a [`SayRequest`], given after the decision and its effect are durable.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "result", rename_all = "snake_case")]
pub enum SayResponse {
    /// It was routed.
    Routed {
        /// What it was taken for.
        decision: MessageDecision,
        /// The rule that said so.
        rule: String,
        /// How many messages the session has had with it.
        count: u64,
        /// What the person should know, e.g. who won where this answer was late.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        note: Option<String>,
    },
    /// The sender does not own the session.
    WrongUser,
    /// It can't be taken.
    Refused {
        /// Why, and what to do, as people read it.
        why: String,
    },
    /// It could not be written; send it again.
    Retry {
        /// Why.
        why: String,
    },
}

/// Stop, to `stop.<gateway>.<session>`: cancels the session's questions and aborts its run.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct StopRequest {
    /// Version of this payload.
    pub schema: u32,
    /// Which session.
    pub session: SessionKey,
    /// The user who pressed it.
    pub user: String,
}

/// The answer to a [`StopRequest`].
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "result", rename_all = "snake_case")]
pub enum StopResponse {
    /// Done as far as the router can do it.
    Stopped {
        /// How many questions were cancelled.
        cancelled: u64,
        /// Whether the adapter confirmed the abort.
        aborted: bool,
    },
    /// The sender does not own the session.
    WrongUser,
    /// It could not be written; send it again.
    Retry {
        /// Why.
        why: String,
    },
}

/// What a front end reports about a question, to `shown.<key>`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ShownRequest {
    /// Version of this payload.
    pub schema: u32,
    /// Which question.
    pub key: QuestionKey,
    /// The surface that it is about.
    pub surface: Surface,
    /// The chat in which it happened.
    pub chat: Option<String>,
    /// What happened.
    pub event: ShownEvent,
    /// Answer only once it is on record. Text and durable cards need it, since a message may
    /// answer them at once.
    #[serde(default)]
    pub on_record: bool,
}

/// What happened to a question at a front end.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum ShownEvent {
    /// It reached the surface.
    Delivered,
    /// It reaches the surface once another question is off it.
    Waiting,
    /// The surface refused it.
    Refused {
        /// Why.
        reason: String,
    },
}

/// Longest reason of a front end that is kept, in characters.
const MAX_REASON: usize = 400;

impl ShownEvent {
    /// The step that it is on record.
    pub fn as_step(&self, surface: Surface, chat: Option<&str>) -> StepKind {
        match self {
            Self::Delivered => StepKind::Delivered { surface, chat: chat.map(str::to_owned) },
            Self::Waiting => StepKind::Waiting { surface },
            Self::Refused { reason } => StepKind::Refused { surface, reason: clamp(reason, MAX_REASON) },
        }
    }
}

/// The answer to a [`ShownRequest`].
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "result", rename_all = "snake_case")]
pub enum ShownResponse {
    /// Taken; repeat it until it is read in the entry, unless `on_record`.
    Noted {
        /// It is in the entry.
        on_record: bool,
    },
    /// There is no such question.
    UnknownQuestion,
    /// It could not be written; send it again.
    Retry {
        /// Why.
        why: String,
    },
}

/// From the routers to front ends on `step.<key>`; not stored, since it can be derived again.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ShowStep {
    /// Version of this payload.
    pub schema: u32,
    /// Which question.
    pub key: QuestionKey,
    /// Show it here.
    pub surface: Surface,
    /// By this rule.
    pub rule: String,
}

/// Who is there for a session, in the bucket `presence` under `<gateway>.<session>.<stream>`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Presence {
    /// Version of this payload.
    pub schema: u32,
    /// The emitter replica that serves the stream.
    pub emitter: String,
    /// What the stream's front end can show.
    pub surfaces: BTreeSet<Surface>,
    /// A person has the chat on screen.
    pub looking: bool,
    /// One of the person's tabs shows another chat.
    pub other_chat: bool,
}

/// An item of `CHAT`, on `chat.<gateway>.<session>`: what goes to the gateway.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ChatItem {
    /// Version of this payload.
    pub schema: u32,
    /// Which session.
    pub session: SessionKey,
    /// The front end's id of the message.
    pub message: String,
    /// Its run id and idempotency key.
    pub run: String,
    /// Its number in the session; not sent when the session was stopped through it (rule S10).
    pub number: u64,
    /// How it is sent.
    pub send: SendBy,
    /// What was typed.
    pub text: String,
    /// Images and files.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub attachments: Vec<Attachment>,
}

/// From the router to the gateway's active adapter, on `abort.<gateway>`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct AbortRequest {
    /// Version of this payload.
    pub schema: u32,
    /// Which session.
    pub session: SessionKey,
}

/// The answer to an [`AbortRequest`].
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct AbortResponse {
    /// A run was aborted.
    pub aborted: bool,
    /// What went wrong.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// From an emitter to the gateway's active adapter, on `agents.<gateway>`; the answer is a list.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Agent {
    /// The agent's id, the second part of its session keys.
    pub id: String,
    /// Its name.
    pub name: String,
}

/// An item of `RUNS`, on `run.<gateway>.<session>.<run>.<kind>`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RunItem {
    /// Version of this payload.
    pub schema: u32,
    /// Which session.
    pub session: SessionKey,
    /// Which run.
    pub run: String,
    /// The Gateway's sequence number in the run, by which repeated items are dropped; 0 for items
    /// that the adapter makes itself.
    pub seq: u64,
    /// What happened.
    #[serde(flatten)]
    pub what: RunEvent,
}

/// What happened in a run.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum RunEvent {
    /// The message of this run id went to the Gateway.
    Sent {
        /// The active run it was steered into; absent when it began a turn of its own.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        into: Option<String>,
    },
    /// The message of this run id could not be sent.
    Failed {
        /// Why, and what to do, as people read it.
        why: String,
    },
    /// The run began.
    Started,
    /// More of the agent's text.
    Text {
        /// What to append.
        text: String,
    },
    /// A tool call began, went on, or ended.
    Tool {
        /// The call's id.
        call: String,
        /// The tool's name.
        name: String,
        /// `start`, `update` or `end`.
        phase: ToolPhase,
        /// One line for people.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        title: Option<String>,
        /// The arguments or the result; absent for asking tools.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        data: Option<Value>,
        /// At the end: it went well.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        ok: Option<bool>,
    },
    /// The run ended.
    Ended {
        /// How.
        how: RunEnd,
        /// The whole text, where the Gateway gave it: what was not streamed is appended.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        text: Option<String>,
    },
}

/// A phase of a tool call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ToolPhase {
    /// It began.
    Start,
    /// It reports.
    Update,
    /// It ended.
    End,
}

/// How a run ended.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "how", rename_all = "snake_case")]
pub enum RunEnd {
    /// It has said what it had to say.
    Done,
    /// The message of this run id was taken into another run, or queued: not the answer.
    Empty,
    /// It was stopped.
    Aborted,
    /// It failed.
    Error {
        /// The Gateway's words.
        message: String,
    },
}

impl RunEvent {
    /// The last token of the subject.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Sent { .. } => "sent",
            Self::Failed { .. } => "failed",
            Self::Started => "started",
            Self::Text { .. } => "text",
            Self::Tool { .. } => "tool",
            Self::Ended { .. } => "ended",
        }
    }
}
