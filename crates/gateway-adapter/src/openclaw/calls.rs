//! The Gateway methods in use, typed.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::{
    client::{Client, GatewayError},
    frames::{Answers, QuestionPrompt, QuestionRecord, QuestionResolved},
};

/// The longest text of a row that the Gateway gives; it cuts at 8,000 characters otherwise.
const MAX_CHARS: u32 = 500_000;

/// What the Gateway does with a message while a run is active.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum QueueMode {
    /// Hand it to the active run at its next step.
    Steer,
    /// Answer it in a run of its own afterwards.
    Followup,
    /// As followup, several messages together.
    Collect,
    /// Stop the active run first.
    Interrupt,
}

/// A message for [`Client::chat_send`].
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ChatSend {
    /// Session, as `agent:<agent>:<anything>`; an unknown one is created.
    pub session_key: String,
    /// Text.
    pub message: String,
    /// Also the run id. The Gateway remembers it only while its process lives.
    pub idempotency_key: String,
    /// `None` leaves it to the session's own setting.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub queue_mode: Option<QueueMode>,
    /// Files, as the Gateway takes them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub attachments: Vec<Value>,
}

/// What became of a `chat.send`.
#[derive(Clone, Debug, PartialEq)]
pub enum ChatSent {
    /// Taken; its run id is the idempotency key.
    Run {
        /// Run.
        run_id: String,
        /// `started`, or `ok` when this key was handled before.
        status: String,
        /// Whether an active run was stopped for it.
        interrupted: bool,
    },
    /// It was a stop command: nothing runs for it.
    Stopped {
        /// Runs that were stopped.
        run_ids: Vec<String>,
    },
}

/// A message for [`Client::agent`].
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AgentTurn {
    /// Session.
    pub session_key: String,
    /// Text.
    pub message: String,
    /// Also the run id.
    pub idempotency_key: String,
    /// Files, as the Gateway takes them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub attachments: Vec<Value>,
}

/// A run that was accepted.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AgentAccepted {
    /// Run.
    pub run_id: String,
    /// `accepted`.
    pub status: String,
}

/// What a `chat.abort` did.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Aborted {
    /// Whether anything ran.
    pub aborted: bool,
    /// Runs that were stopped.
    #[serde(default)]
    pub run_ids: Vec<String>,
}

/// A session as its transcript holds it.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct History {
    /// Rows, oldest first.
    #[serde(default)]
    pub messages: Vec<HistoryRow>,
    /// The run that is active now, with its text so far.
    #[serde(default)]
    pub in_flight_run: Option<InFlightRun>,
    /// Facts about the session.
    #[serde(default)]
    pub session_info: SessionInfo,
    /// Where older rows begin, for [`Client::chat_history_before`]; `None` where there are none.
    #[serde(default)]
    pub next_offset: Option<u64>,
}

/// One row of a transcript: user, assistant (with `toolCall` blocks) or toolResult.
#[derive(Clone, Debug, PartialEq)]
pub struct HistoryRow(pub Value);

impl<'de> Deserialize<'de> for HistoryRow {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Value::deserialize(deserializer).map(Self)
    }
}

impl HistoryRow {
    /// `user`, `assistant` or `toolResult`.
    pub fn role(&self) -> &str {
        self.0["role"].as_str().unwrap_or_default()
    }

    /// Run that wrote it.
    pub fn run_id(&self) -> Option<&str> {
        self.0["__openclaw"]["runId"].as_str()
    }

    /// Call of a `toolResult`.
    pub fn tool_call_id(&self) -> Option<&str> {
        self.0["toolCallId"].as_str()
    }

    /// Idempotency key of the message behind a user row.
    pub fn idempotency_key(&self) -> Option<&str> {
        self.0["idempotencyKey"]
            .as_str()
            .or_else(|| self.0["__openclaw"]["idempotencyKey"].as_str())
            .map(|key| key.strip_suffix(":user").unwrap_or(key))
    }

    /// Text of the row.
    pub fn text(&self) -> String {
        super::frames::text_of(&self.0["content"])
    }
}

/// The active run of a session.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct InFlightRun {
    /// Run.
    pub run_id: String,
    /// Its text so far.
    #[serde(default)]
    pub text: String,
    /// Its `agent` events so far (tool starts with their arguments).
    #[serde(default)]
    pub events: Vec<Value>,
}

/// Facts about a session.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct SessionInfo {
    /// Whether a run is active.
    pub has_active_run: bool,
    /// Active runs.
    pub active_run_ids: Vec<String>,
}

impl History {
    /// Whether a message with this idempotency key has reached the session: then it must not be
    /// sent again after a Gateway restart.
    pub fn knows(&self, idempotency_key: &str) -> bool {
        let active = || {
            self.session_info
                .active_run_ids
                .iter()
                .chain(self.in_flight_run.iter().map(|run| &run.run_id))
                .any(|run| run == idempotency_key)
        };
        let written = self.messages.iter().any(|row| {
            row.idempotency_key() == Some(idempotency_key) || row.run_id() == Some(idempotency_key)
        });
        written || active()
    }

    /// The result row of a tool call.
    pub fn tool_result(&self, tool_call_id: &str) -> Option<&HistoryRow> {
        self.messages
            .iter()
            .rev()
            .find(|row| row.role() == "toolResult" && row.tool_call_id() == Some(tool_call_id))
    }
}

/// The agents of a Gateway.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Agents {
    /// Agent that is used when none is named.
    pub default_id: String,
    /// All of them.
    pub agents: Vec<Agent>,
}

/// One agent.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct Agent {
    /// Id, the second part of a session key.
    pub id: String,
    /// Configured name.
    #[serde(default)]
    pub name: Option<String>,
    /// `{name, emoji, theme}` where configured.
    #[serde(default)]
    pub identity: Value,
}

impl Agent {
    /// Name for people.
    pub fn label(&self) -> &str {
        self.identity["name"].as_str().or(self.name.as_deref()).unwrap_or(&self.id)
    }
}

/// How a question is resolved.
#[derive(Clone, Debug, PartialEq)]
pub enum Resolution {
    /// With answers to all its prompts.
    Answers(Answers),
    /// Without an answer; all that the Gateway's own questions can be told.
    Cancel,
}

/// A question to open from outside, for [`Client::question_request`].
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct QuestionRequest {
    /// Id of its own choice.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// One to three prompts.
    pub questions: Vec<QuestionPrompt>,
    /// Agent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub agent_id: Option<String>,
    /// Session.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub session_key: Option<String>,
    /// Run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub run_id: Option<String>,
    /// Milliseconds until it expires.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timeout_ms: Option<u64>,
}

/// A question that was opened from outside.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct QuestionOpened {
    /// Id.
    pub id: String,
    /// Unix milliseconds.
    pub expires_at_ms: i64,
}

/// Id that the Gateway gives to the question of a tool call.
pub fn question_id(run_id: &str, tool_call_id: &str) -> String {
    let hash = Sha256::digest(format!("{run_id}\0{tool_call_id}"));
    format!("ask_{}", hex::encode(&hash[..16]))
}

impl Client {
    /// Sends a user's message. While a native question is pending in the session, the Gateway takes
    /// it as that question's answer: use [`Client::agent`] then.
    pub async fn chat_send(&self, message: &ChatSend) -> Result<ChatSent, GatewayError> {
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Ack {
            #[serde(default)]
            run_id: Option<String>,
            #[serde(default)]
            status: String,
            #[serde(default)]
            interrupted_active_run: bool,
            #[serde(default)]
            run_ids: Vec<String>,
        }
        let ack: Ack = self.typed("chat.send", message).await?;
        Ok(match ack.run_id {
            Some(run_id) => {
                ChatSent::Run { run_id, status: ack.status, interrupted: ack.interrupted_active_run }
            }
            None => ChatSent::Stopped { run_ids: ack.run_ids },
        })
    }

    /// Sends a message that never answers a pending question: its run starts after the active one.
    pub async fn agent(&self, turn: &AgentTurn) -> Result<AgentAccepted, GatewayError> {
        self.typed("agent", turn).await
    }

    /// Stops one run of a session, or what is active there.
    pub async fn chat_abort(&self, session_key: &str, run_id: Option<&str>) -> Result<Aborted, GatewayError> {
        let mut params = json!({ "sessionKey": session_key });
        if let Some(run_id) = run_id {
            params["runId"] = json!(run_id);
        }
        self.typed("chat.abort", params).await
    }

    /// The last rows of a session's transcript, and what runs there.
    pub async fn chat_history(&self, session_key: &str, limit: u32) -> Result<History, GatewayError> {
        let params = json!({ "sessionKey": session_key, "limit": limit });
        self.typed("chat.history", params).await
    }

    /// Rows of a session's transcript that are older than its last `offset`, in full length.
    pub async fn chat_history_before(
        &self,
        session_key: &str,
        limit: u32,
        offset: u64,
    ) -> Result<History, GatewayError> {
        let params =
            json!({ "sessionKey": session_key, "limit": limit, "offset": offset, "maxChars": MAX_CHARS });
        self.typed("chat.history", params).await
    }

    /// Asks for `session.tool` and `session.message` events of all sessions, on this connection.
    pub async fn sessions_subscribe(&self) -> Result<(), GatewayError> {
        self.request("sessions.subscribe", json!({})).await.map(drop)
    }

    /// The agents of this Gateway.
    pub async fn agents_list(&self) -> Result<Agents, GatewayError> {
        self.typed("agents.list", json!({})).await
    }

    /// All pending questions.
    pub async fn question_list(&self) -> Result<Vec<QuestionRecord>, GatewayError> {
        #[derive(Deserialize)]
        struct List {
            questions: Vec<QuestionRecord>,
        }
        let list: List = self.typed("question.list", json!({})).await?;
        Ok(list.questions)
    }

    /// One question; a settled one can be read for 15 s, then it is `QUESTION_NOT_FOUND`.
    pub async fn question_get(&self, id: &str) -> Result<QuestionRecord, GatewayError> {
        #[derive(Deserialize)]
        struct Get {
            question: QuestionRecord,
        }
        let get: Get = self.typed("question.get", json!({ "id": id })).await?;
        Ok(get.question)
    }

    /// Resolves a question. `resolved_by` is kept in its record; `resolution_id` (up to 128
    /// characters) goes with answers only, the Gateway takes none with a cancel.
    pub async fn question_resolve(
        &self,
        id: &str,
        resolution: &Resolution,
        resolved_by: &str,
        resolution_id: &str,
    ) -> Result<QuestionResolved, GatewayError> {
        let params = match resolution {
            Resolution::Answers(answers) => json!({
                "id": id,
                "answers": answers,
                "resolvedBy": resolved_by,
                "resolutionId": resolution_id,
            }),
            Resolution::Cancel => json!({
                "id": id,
                "cancel": true,
                "resolvedBy": resolved_by,
            }),
        };
        self.typed("question.resolve", params).await
    }

    /// Opens a question from outside.
    pub async fn question_request(&self, question: &QuestionRequest) -> Result<QuestionOpened, GatewayError> {
        self.typed("question.request", question).await
    }

    async fn typed<T: for<'de> Deserialize<'de>>(
        &self,
        method: &str,
        params: impl Serialize,
    ) -> Result<T, GatewayError> {
        let result = self.request(method, params).await?;
        serde_json::from_value(result)
            .map_err(|e| GatewayError::Unreadable { method: method.to_owned(), why: e.to_string() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn question_id_is_the_hash_of_run_and_call() {
        assert_eq!(
            question_id("run", "call"),
            format!("ask_{}", &hex::encode(Sha256::digest(b"run\0call"))[..32])
        );
    }

    #[test]
    fn history_knows_a_key_by_user_row_assistant_row_or_active_run() {
        let history = |value: Value| serde_json::from_value::<History>(value).unwrap();
        for rows in [
            json!({"messages":[{"role":"user","idempotencyKey":"K:user"}]}),
            json!({"messages":[{"role":"user","__openclaw":{"idempotencyKey":"K:user"}}]}),
            json!({"messages":[{"role":"assistant","__openclaw":{"runId":"K"}}]}),
            json!({"messages":[],"inFlightRun":{"runId":"K"}}),
            json!({"sessionInfo":{"hasActiveRun":true,"activeRunIds":["K"]}}),
        ] {
            assert!(history(rows.clone()).knows("K"), "{rows}");
            assert!(!history(rows).knows("other"));
        }
        assert!(!history(json!({"messages":[{"role":"user","content":"K"}]})).knows("K"));
    }

    #[test]
    fn an_agent_is_labelled_by_identity_then_name_then_id() {
        for (value, label) in [
            (json!({"id":"ops","name":"Ops bot","identity":{"name":"Opsy"}}), "Opsy"),
            (json!({"id":"ops","name":"Ops bot"}), "Ops bot"),
            (json!({"id":"ops"}), "ops"),
        ] {
            assert_eq!(serde_json::from_value::<Agent>(value).unwrap().label(), label);
        }
    }
}
