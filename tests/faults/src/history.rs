//! What is recorded of some sessions: what the bucket has, and what each scripted party saw.

use std::collections::BTreeSet;

use ask_core::entry::Entry;
use ask_core::session::Session;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// All that happened in some sessions.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct History {
    /// The sessions.
    pub sessions: Vec<SessionHistory>,
    /// What was killed, frozen, cut off or late.
    pub broken: BTreeSet<Part>,
    /// When the Gateway was restarted last, in milliseconds since 1970.
    pub gateway_restarted_ms: Option<u64>,
    /// A late answer goes to the agent as a message.
    pub late_as_message: bool,
    /// How many questions of a run may wait at once.
    pub per_run: usize,
    /// For how long something was away on purpose, in milliseconds.
    pub outage_ms: u64,
    /// When this was read, in milliseconds since 1970.
    pub read_ms: u64,
}

/// Something that breaks; with each service its roads to the server and to its clients.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Part {
    /// A router.
    Router,
    /// An adapter.
    Adapter,
    /// An emitter.
    Emitter,
    /// nats-server.
    Nats,
    /// The Gateway.
    Gateway,
}

/// One chat of one person with the agent.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct SessionHistory {
    /// The gateway's key of the session.
    pub session: String,
    /// The user to whom it belongs.
    pub owner: String,
    /// The lives of its questions, from the bucket.
    pub lives: Vec<Life>,
    /// Its entry in the bucket of sessions.
    pub routed: Option<Session>,
    /// What its owner typed.
    pub said: Vec<Said>,
    /// Texts of the questions that a front end was given to show.
    pub shown: Vec<String>,
    /// What anybody replied.
    pub replies: Vec<Submitted>,
    /// Outcomes that people gave to questions at the Gateway itself.
    pub local: Vec<Local>,
    /// When Stop was pressed and confirmed.
    pub stops: Vec<Stop>,
    /// What the agent's asking calls got.
    pub calls: Vec<Call>,
    /// The users' rows of the Gateway's transcript.
    pub rows: Vec<Row>,
    /// Keys of the messages that the routers have sent to the gateway's adapter, in this order.
    pub handed: Vec<String>,
    /// The messages that the Gateway was sent, repetitions too, in this order.
    pub sends: Vec<Sent>,
    /// Its run was aborted at the Gateway itself.
    pub aborted: bool,
    /// What its front end could not make sense of.
    pub complaints: Vec<String>,
    /// What has not come to its end yet.
    pub waiting: Vec<String>,
}

/// The values that the entry of a question has had, oldest first.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Life {
    /// The values.
    pub values: Vec<Written>,
}

/// One value of an entry.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Written {
    /// Its revision.
    pub revision: u64,
    /// When the server wrote it, in milliseconds since 1970.
    pub at_ms: u64,
    /// The value.
    pub entry: Entry,
}

/// A message of the owner.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Said {
    /// Its id.
    pub message: String,
    /// What was typed; unlike anything else that is typed.
    pub text: String,
    /// Its stream brought something, so the emitter has taken it.
    pub heard: bool,
    /// It was typed before anything showed that the message before had been taken.
    pub hurried: bool,
    /// How its stream ended.
    pub ended: Option<String>,
}

/// A reply as its sender sent it and what the sender was told.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Submitted {
    /// Its id.
    pub id: String,
    /// Who sent it.
    pub user: String,
    /// Text of the question.
    pub question: String,
    /// Id of the question, which an agent that asks again can't give twice.
    pub to: String,
    /// What it says.
    pub content: Content,
    /// One for each time that it was sent and answered.
    pub told: Vec<Told>,
}

/// What a reply says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Content {
    /// Labels and own words.
    Values(Vec<String>),
    /// A secret.
    Secret(String),
    /// Decline.
    Declined,
    /// Cancel.
    Cancelled,
}

/// What the sender of a reply was told.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Told {
    /// When, in milliseconds since 1970.
    pub at_ms: u64,
    /// HTTP status.
    pub status: u16,
    /// `saved`, `already_answered`, `closed` or the code of an error.
    pub result: String,
    /// Who is said to have been first.
    pub by: Option<String>,
    /// It is said to have gone to the agent as a message.
    pub as_message: bool,
}

/// An outcome given at the Gateway.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Local {
    /// Text of the question.
    pub question: String,
    /// The answer; none for Skip.
    pub values: Option<Vec<String>>,
    /// The Gateway took it.
    pub accepted: bool,
}

/// Stop, as the owner pressed or typed it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Stop {
    /// The message by which it was typed.
    pub message: Option<String>,
    /// When it was pressed, in milliseconds since 1970.
    pub pressed_ms: u64,
    /// When it was confirmed.
    pub told_ms: Option<u64>,
}

/// What an asking call got.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Call {
    /// Text of the question.
    pub question: String,
    /// `ask_user` or `request_user_input`.
    pub tool: String,
    /// Text of the result.
    pub text: String,
    /// Its details.
    pub details: Value,
    /// It is an error.
    pub is_error: bool,
    /// The value that the agent got behind a handle.
    pub secret: Option<String>,
}

/// A user's row of the transcript.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Row {
    /// Its key, `<run>:user`.
    pub key: String,
    /// What the agent read.
    pub text: String,
    /// It went past the agent, as the answer of a question.
    pub aside: bool,
}

/// A message that the Gateway was sent.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Sent {
    /// Its idempotency key.
    pub key: String,
    /// What it says.
    pub text: String,
}

impl Life {
    /// The last value.
    pub fn last(&self) -> Option<&Written> {
        self.values.last()
    }

    /// What is asked.
    pub fn text(&self) -> &str {
        self.last().map_or("", |written| text_of(&written.entry))
    }
}

/// What a question asks, by which everything about it is found.
pub fn text_of(entry: &Entry) -> &str {
    entry.question.prompts.first().map_or("", |prompt| prompt.text.as_str())
}
