//! What travels on the wire, as far as it is used. Unknown fields are ignored, and an event that
//! is unknown or not shaped as expected is passed on raw.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// A frame from the Gateway.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(tag = "type", rename_all = "lowercase")]
pub enum Incoming {
    /// Answer to a request.
    Res {
        /// Id of the request.
        id: String,
        /// Whether `payload` holds a result, otherwise `error` says why not.
        ok: bool,
        /// Result.
        #[serde(default)]
        payload: Value,
        /// Reason of a failure.
        #[serde(default)]
        error: Option<Rejection>,
    },
    /// An event.
    Event {
        /// Name.
        event: String,
        /// Content.
        #[serde(default)]
        payload: Value,
        /// Number on this connection.
        #[serde(default)]
        seq: Option<u64>,
    },
    /// Anything else.
    #[serde(other)]
    Other,
}

/// A request to the Gateway.
#[derive(Serialize)]
pub(crate) struct Outgoing<'a, P> {
    #[serde(rename = "type")]
    kind: &'static str,
    id: &'a str,
    method: &'a str,
    params: P,
}

impl<'a, P> Outgoing<'a, P> {
    pub(crate) fn new(id: &'a str, method: &'a str, params: P) -> Self {
        Self { kind: "req", id, method, params }
    }
}

/// The Gateway's own error.
#[derive(Clone, Debug, PartialEq, Deserialize, thiserror::Error)]
#[serde(rename_all = "camelCase")]
#[error("{message} ({code}{})", self.reason().map(|r| format!(", {r}")).unwrap_or_default())]
pub struct Rejection {
    /// Class, as `INVALID_REQUEST`, `UNAVAILABLE`, `FORBIDDEN`, `NOT_PAIRED`.
    #[serde(default)]
    pub code: String,
    /// Text for a person.
    #[serde(default)]
    pub message: String,
    /// Machine-readable extras.
    #[serde(default)]
    pub details: Value,
    /// Whether the Gateway says that the same request may succeed later.
    #[serde(default)]
    pub retryable: bool,
    /// Pause that the Gateway asks for, milliseconds.
    #[serde(default)]
    pub retry_after_ms: Option<u64>,
}

/// `details.reason` of a question that the Gateway doesn't hold (any more).
pub const QUESTION_NOT_FOUND: &str = "QUESTION_NOT_FOUND";
/// `details.reason` of a question that has its outcome already.
pub const QUESTION_ALREADY_TERMINAL: &str = "QUESTION_ALREADY_TERMINAL";
/// `details.reason` of an answer that the question doesn't allow; it stays pending.
pub const QUESTION_INVALID_ANSWER: &str = "QUESTION_INVALID_ANSWER";

impl Rejection {
    /// `details.reason`.
    pub fn reason(&self) -> Option<&str> {
        self.details.get("reason")?.as_str()
    }

    /// `details.code`: the precise class of a refused connect.
    pub fn detail_code(&self) -> Option<&str> {
        self.details.get("code")?.as_str()
    }
}

/// Answer to `connect`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Hello {
    /// Protocol version spoken.
    pub protocol: u32,
    /// Which Gateway process answers.
    pub server: Server,
    /// What was granted.
    pub auth: Granted,
    /// Limits.
    #[serde(default)]
    pub policy: Policy,
    /// What this Gateway can do.
    #[serde(default)]
    pub features: Features,
}

/// Which Gateway process answers.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Server {
    /// OpenClaw version.
    #[serde(default)]
    pub version: String,
    /// Changes with every Gateway process.
    pub boot_id: String,
    /// This connection, as the Gateway's log names it.
    #[serde(default)]
    pub conn_id: String,
}

/// What was granted at connect.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Granted {
    /// Live scopes: the Gateway may shorten the list that was asked for, without an error.
    #[serde(default)]
    pub scopes: Vec<String>,
    /// Token issued to a paired device.
    #[serde(default)]
    pub device_token: Option<String>,
}

/// Limits of a connection.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Policy {
    /// Largest frame that the Gateway accepts, bytes.
    pub max_payload: usize,
    /// Pause between two ticks, milliseconds.
    pub tick_interval_ms: u64,
}

impl Default for Policy {
    fn default() -> Self {
        Self { max_payload: 26_214_400, tick_interval_ms: 30_000 }
    }
}

/// What this Gateway can do.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Features {
    /// Methods by name.
    pub methods: Vec<String>,
    /// Events by name.
    pub events: Vec<String>,
}

/// An event, read.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// `question.requested`: a question opened.
    QuestionRequested(QuestionRecord),
    /// `question.resolved`: a question has its outcome at the Gateway.
    QuestionResolved(QuestionResolved),
    /// `agent`: progress of a run. Tool frames reach only the connection that started the run.
    Agent(AgentEvent),
    /// `session.tool`: a tool frame of a run that another connection started; needs
    /// `sessions.subscribe`.
    SessionTool(AgentEvent),
    /// `chat`: the reply of a run as it grows.
    Chat(ChatEvent),
    /// `shutdown`: the Gateway is about to close.
    Shutdown {
        /// Its reason.
        reason: String,
    },
    /// Everything else.
    Raw {
        /// Name.
        name: String,
        /// Content.
        payload: Value,
    },
}

impl Event {
    /// Reads an event by its name.
    pub fn read(name: String, payload: Value) -> Self {
        fn typed<T: for<'de> Deserialize<'de>>(
            name: &str,
            payload: &Value,
            wrap: fn(T) -> Event,
        ) -> Option<Event> {
            match T::deserialize(payload) {
                Ok(content) => Some(wrap(content)),
                Err(error) => {
                    tracing::warn!(event = name, %error, "gateway event has an unknown shape");
                    None
                }
            }
        }
        let read = match name.as_str() {
            "question.requested" => typed(&name, &payload, Event::QuestionRequested),
            "question.resolved" => typed(&name, &payload, Event::QuestionResolved),
            "agent" => typed(&name, &payload, Event::Agent),
            "session.tool" => typed(&name, &payload, Event::SessionTool),
            "chat" => typed(&name, &payload, Event::Chat),
            "shutdown" => Some(Event::Shutdown { reason: text_at(&payload, "reason").unwrap_or_default() }),
            _ => None,
        };
        read.unwrap_or(Event::Raw { name, payload })
    }
}

/// Answers by prompt id.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Answers {
    /// Chosen labels or own words, for each prompt.
    pub answers: BTreeMap<String, Vec<String>>,
}

/// Where a question stands at the Gateway.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum QuestionStatus {
    /// Waits for an answer.
    Pending,
    /// Has answers.
    Answered,
    /// Was withdrawn.
    Cancelled,
    /// Its time ran out.
    Expired,
}

/// A question as the Gateway holds it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct QuestionRecord {
    /// Id; of a tool call see [`question_id`](super::calls::question_id).
    pub id: String,
    /// One to three prompts.
    pub questions: Vec<QuestionPrompt>,
    /// Agent that asks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent_id: Option<String>,
    /// Session that asks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session_key: Option<String>,
    /// Run that asks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run_id: Option<String>,
    /// Unix milliseconds.
    pub created_at_ms: i64,
    /// Unix milliseconds; the Gateway expires it then.
    pub expires_at_ms: i64,
    /// Where it stands.
    pub status: QuestionStatus,
    /// Answers, once answered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub answers: Option<Answers>,
    /// Who resolved it, as that client put it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resolved_by: Option<String>,
}

/// One prompt of a question.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct QuestionPrompt {
    /// Key of its answer.
    pub question_id: String,
    /// Title, at most 12 characters.
    #[serde(default)]
    pub header: String,
    /// The question itself.
    pub question: String,
    /// Link that belongs to it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
    /// None, or two to four options.
    #[serde(default)]
    pub options: Vec<QuestionOption>,
    /// Whether several options may be chosen.
    #[serde(default)]
    pub multi_select: bool,
    /// Whether own words are allowed.
    #[serde(default)]
    pub is_other: bool,
    /// Whether the answer must be hidden.
    #[serde(default)]
    pub is_secret: bool,
    /// Where the Gateway keeps a secret answer: `{name, kind, allowedHosts?, reason?}`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret_store: Option<Value>,
}

/// One option of a prompt.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct QuestionOption {
    /// The answer when chosen.
    pub label: String,
    /// Explanation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
}

/// Content of `question.resolved`, and answer to `question.resolve`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct QuestionResolved {
    /// Question; empty in the answer to `question.resolve`.
    #[serde(default)]
    pub id: String,
    /// Its outcome.
    pub status: QuestionStatus,
    /// Answers, when answered.
    #[serde(default)]
    pub answers: Option<Answers>,
}

/// Content of `agent` and `session.tool`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AgentEvent {
    /// Run.
    pub run_id: String,
    /// Session.
    #[serde(default)]
    pub session_key: Option<String>,
    /// Agent.
    #[serde(default)]
    pub agent_id: Option<String>,
    /// Kind: `run_status`, `lifecycle`, `assistant`, `usage`, `item`, `tool` and others.
    pub stream: String,
    /// Content by kind.
    #[serde(default)]
    pub data: Value,
    /// Number within the run.
    #[serde(default)]
    pub seq: u64,
    /// Unix milliseconds.
    #[serde(default)]
    pub ts: Option<i64>,
}

impl AgentEvent {
    /// The tool frame, if this is one.
    pub fn tool(&self) -> Option<ToolFrame> {
        self.data_of("tool")
    }

    /// The piece of text, if this is one.
    pub fn assistant(&self) -> Option<AssistantText> {
        self.data_of("assistant")
    }

    /// The step of the run's life, if this is one.
    pub fn lifecycle(&self) -> Option<Lifecycle> {
        self.data_of("lifecycle")
    }

    fn data_of<T: for<'de> Deserialize<'de>>(&self, stream: &str) -> Option<T> {
        (self.stream == stream).then(|| T::deserialize(&self.data).ok())?
    }
}

/// A tool call's start, update or result.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ToolFrame {
    /// Which of the three.
    pub phase: ToolPhase,
    /// Tool.
    pub name: String,
    /// Call, as the model's provider named it: not unique.
    pub tool_call_id: String,
    /// Call this one is nested in (tool search).
    #[serde(default)]
    pub parent_tool_call_id: Option<String>,
    /// Arguments, at the start.
    #[serde(default)]
    pub args: Value,
    /// Result so far, in an update.
    #[serde(default)]
    pub partial_result: Value,
    /// `{content, details}`, in a result.
    #[serde(default)]
    pub result: Value,
    /// Whether the result is an error.
    #[serde(default)]
    pub is_error: bool,
    /// Short text about the call.
    #[serde(default)]
    pub meta: Option<String>,
}

/// Step of a tool call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ToolPhase {
    /// The call begins.
    Start,
    /// It reports progress.
    Update,
    /// It is over.
    Result,
}

/// A piece of the agent's text.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct AssistantText {
    /// All text so far.
    #[serde(default)]
    pub text: String,
    /// The new part.
    #[serde(default)]
    pub delta: String,
    /// Whether `text` takes the place of what was sent before.
    #[serde(default)]
    pub replace: bool,
}

/// Step of a run's life.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Lifecycle {
    /// `start`, `model`, `finishing`, `end`, `error`.
    pub phase: String,
    /// Whether it was stopped.
    #[serde(default)]
    pub aborted: bool,
    /// Why it ended.
    #[serde(default)]
    pub stop_reason: Option<String>,
    /// What went wrong.
    #[serde(default)]
    pub error: Option<String>,
}

/// Content of `chat`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ChatEvent {
    /// Run; for one started by `chat.send` its idempotency key.
    pub run_id: String,
    /// Session.
    pub session_key: String,
    /// Agent.
    #[serde(default)]
    pub agent_id: Option<String>,
    /// Number within the run.
    #[serde(default)]
    pub seq: u64,
    /// Which of the kinds.
    pub state: ChatState,
    /// Stage of the start, with `status`.
    #[serde(default)]
    pub phase: Option<String>,
    /// New text, with `delta`.
    #[serde(default)]
    pub delta_text: String,
    /// Whether the message takes the place of what was sent before.
    #[serde(default)]
    pub replace: bool,
    /// All text so far, or the whole reply. A `final` without it answered nothing: its message was
    /// steered, queued, or taken as an answer.
    #[serde(default)]
    pub message: Option<Value>,
    /// Why it ended.
    #[serde(default)]
    pub stop_reason: Option<String>,
    /// What went wrong.
    #[serde(default)]
    pub error_message: Option<String>,
}

impl ChatEvent {
    /// Text of the message.
    pub fn text(&self) -> Option<String> {
        self.message.as_ref().map(|m| text_of(&m["content"]))
    }
}

/// Kind of a `chat` event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ChatState {
    /// The run is being prepared.
    Status,
    /// Text arrived.
    Delta,
    /// The run is over.
    Final,
    /// The run was stopped.
    Aborted,
    /// The run failed.
    Error,
}

/// Text of a content that is a string or a list of blocks; blocks that are no text are left out.
pub fn text_of(content: &Value) -> String {
    match content {
        Value::String(text) => text.clone(),
        Value::Array(blocks) => blocks
            .iter()
            .filter(|block| block["type"] == "text")
            .filter_map(|block| block["text"].as_str())
            .collect(),
        _ => String::new(),
    }
}

fn text_at(value: &Value, key: &str) -> Option<String> {
    value.get(key)?.as_str().map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn event(frame: Value) -> Event {
        match serde_json::from_value(frame).unwrap() {
            Incoming::Event { event, payload, .. } => Event::read(event, payload),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn question_requested_is_read_with_all_prompts() {
        let read = event(json!({"type":"event","event":"question.requested","seq":1,"payload":{
            "id":"ask_45e3","agentId":"main","sessionKey":"agent:main:x","runId":"r1",
            "createdAtMs":1796094641960i64,"expiresAtMs":1796094701960i64,"status":"pending","new":1,
            "questions":[{"questionId":"target","header":"Target","question":"Where?",
                "options":[{"label":"Staging","description":"safe"},{"label":"Production"}],
                "isOther":true,"later":true}]}}));
        let Event::QuestionRequested(record) = read else {
            panic!("{read:?}");
        };
        assert_eq!(record.status, QuestionStatus::Pending);
        assert_eq!(record.session_key.as_deref(), Some("agent:main:x"));
        assert_eq!(record.questions[0].options[1].label, "Production");
        assert!(record.questions[0].is_other && !record.questions[0].multi_select);
    }

    #[test]
    fn question_resolved_is_read_with_and_without_answers() {
        for (payload, status, answers) in [
            (
                json!({"id":"a","status":"answered","answers":{"answers":{"q":["x","y"]}}}),
                QuestionStatus::Answered,
                Some(vec!["x".to_owned(), "y".to_owned()]),
            ),
            (json!({"id":"a","status":"cancelled"}), QuestionStatus::Cancelled, None),
            (json!({"id":"a","status":"expired"}), QuestionStatus::Expired, None),
        ] {
            let read = Event::read("question.resolved".to_owned(), payload);
            let Event::QuestionResolved(resolved) = read else {
                panic!("{read:?}");
            };
            assert_eq!(resolved.status, status);
            assert_eq!(resolved.answers.map(|a| a.answers["q"].clone()), answers);
        }
    }

    #[test]
    fn tool_frames_come_from_agent_and_session_tool_alike() {
        let payload = json!({"runId":"r","stream":"tool","sessionKey":"s","seq":8,"data":{
            "phase":"start","name":"ask_user","toolCallId":"call_1","args":{"a":1}}});
        for name in ["agent", "session.tool"] {
            let frame = match Event::read(name.to_owned(), payload.clone()) {
                Event::Agent(e) | Event::SessionTool(e) => e.tool().unwrap(),
                other => panic!("{other:?}"),
            };
            assert_eq!(frame.phase, ToolPhase::Start);
            assert_eq!((frame.name.as_str(), &frame.args), ("ask_user", &json!({"a":1})));
        }
    }

    #[test]
    fn chat_final_without_a_message_has_no_text() {
        let base = json!({"runId":"r","sessionKey":"s","seq":6,"state":"final"});
        let Event::Chat(empty) = Event::read("chat".to_owned(), base.clone()) else {
            panic!();
        };
        assert_eq!((empty.state, empty.text()), (ChatState::Final, None));

        let mut with = base;
        with["message"] = json!({"role":"assistant","content":[
            {"type":"text","text":"a"},{"type":"image","text":"no"},{"type":"text","text":"b"}]});
        let Event::Chat(with) = Event::read("chat".to_owned(), with) else {
            panic!();
        };
        assert_eq!(with.text().as_deref(), Some("ab"));
    }

    #[test]
    fn unknown_events_and_unknown_shapes_are_passed_on_raw() {
        for (name, payload) in [
            ("session.message", json!({"x":1})),
            ("question.requested", json!({"id":7})),
            ("chat", json!({"runId":"r","sessionKey":"s","state":"new-state"})),
            ("tick", Value::Null),
        ] {
            assert_eq!(
                Event::read(name.to_owned(), payload.clone()),
                Event::Raw { name: name.to_owned(), payload }
            );
        }
    }

    #[test]
    fn a_frame_of_an_unknown_type_is_no_error() {
        let frame: Incoming = serde_json::from_value(json!({"type":"ping","x":1})).unwrap();
        assert_eq!(frame, Incoming::Other);
    }

    #[test]
    fn rejection_keeps_code_reason_and_pause() {
        let frame = json!({"type":"res","id":"1","ok":false,"error":{"code":"UNAVAILABLE",
            "message":"gateway starting; retry shortly","retryable":true,"retryAfterMs":500,
            "details":{"reason":"startup-sidecars"}}});
        let Incoming::Res { ok: false, error: Some(error), .. } = serde_json::from_value(frame).unwrap()
        else {
            panic!();
        };
        assert_eq!(error.reason(), Some("startup-sidecars"));
        assert_eq!((error.retryable, error.retry_after_ms), (true, Some(500)));
        assert_eq!(error.to_string(), "gateway starting; retry shortly (UNAVAILABLE, startup-sidecars)");
    }

    #[test]
    fn hello_is_read_without_optional_parts() {
        let hello: Hello = serde_json::from_value(json!({"type":"hello-ok","protocol":4,
            "server":{"bootId":"b"},"auth":{"scopes":["operator.read"]}}))
        .unwrap();
        assert_eq!(hello.policy, Policy::default());
        assert_eq!(hello.auth.scopes, ["operator.read"]);
    }
}
