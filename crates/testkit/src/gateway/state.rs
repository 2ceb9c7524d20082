//! What the Gateway holds: connections, sessions with their transcripts, runs, questions.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::{oneshot, watch};
use tokio_tungstenite::tungstenite::Message;
use tokio_util::sync::CancellationToken;

use super::questions::{End, Question, not_found};
use super::runs::ToolResult;
use super::wire::{Rejection, covers, new_id, now_ms, text_content};
use super::{Fault, PluginEndpoint, Request, ToolOutcome};

const FRAMES_KEPT: usize = 20_000;
/// Text that comes faster than this is joined into one `chat` event.
const CHAT_EVERY: Duration = Duration::from_millis(150);

#[derive(Debug)]
pub(super) struct State {
    // Of one Gateway process: gone after a restart.
    pub boot_id: String,
    pub life: CancellationToken,
    pub serving: bool,
    pub draining: bool,
    pub connections: BTreeMap<u64, Connection>,
    pub keys: HashMap<String, KeyState>,
    pub questions: BTreeMap<String, Question>,
    // On the Gateway's disk.
    pub sessions: HashMap<String, Session>,
    pub paired: HashMap<String, Device>,
    pub waiting_for_approval: HashMap<String, Device>,
    // Of the test.
    pub plugin: Option<PluginEndpoint>,
    pub faults: Vec<(String, Fault)>,
    pub requests: Vec<Request>,
    pub frames: VecDeque<String>,
    pub next_connection: u64,
    pub outcomes: Vec<ToolOutcome>,
    pub by_hand: HashMap<String, oneshot::Sender<ToolResult>>,
    /// Wakes those who wait for something to happen here.
    pub changed: Arc<watch::Sender<()>>,
}

#[derive(Debug)]
pub(super) struct Connection {
    pub scopes: Vec<String>,
    pub tool_events: bool,
    pub subscribed: bool,
    pub seq: u64,
    pub out: UnboundedSender<Message>,
    /// Ends the connection without a close frame.
    pub cut: CancellationToken,
}

#[derive(Debug, Clone)]
pub(super) struct Device {
    pub id: String,
    pub scopes: Vec<String>,
    pub token: String,
}

/// What the Gateway remembers of an idempotency key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum KeyState {
    Running,
    Done,
}

#[derive(Debug)]
pub(super) struct Session {
    pub session_id: String,
    pub agent_id: String,
    pub rows: Vec<Value>,
    pub active: Option<ActiveRun>,
    pub queue: VecDeque<Incoming>,
    pub last_run_id: Option<String>,
}

/// A message on its way to a run.
#[derive(Debug, Clone)]
pub(super) struct Incoming {
    pub run_id: String,
    pub key: String,
    pub text: String,
    pub sender: Sender,
    /// Came by the method `agent`, which shows less of a run's preparation.
    pub by_agent_method: bool,
    /// A second response to `agent` is due on that connection when the run has ended.
    pub respond: Option<(u64, String)>,
    pub collected: bool,
}

/// Whose authority a run has, and who sees its tool events.
#[derive(Debug, Clone)]
pub(super) struct Sender {
    pub connection: Option<u64>,
    pub scopes: Vec<String>,
}

#[derive(Debug)]
pub(super) struct ActiveRun {
    pub incoming: Incoming,
    pub seq: u64,
    pub started_at: u64,
    /// What it has said, all model turns together.
    pub text: String,
    /// The end of `text` that no `chat` event has carried yet.
    pub unsent: String,
    pub chat_sent_at: Option<Instant>,
    pub events: Vec<Value>,
    pub steered: Vec<Incoming>,
    pub abort: CancellationToken,
    pub aborted: bool,
}

impl State {
    pub fn new(plugin: Option<PluginEndpoint>) -> Self {
        Self {
            boot_id: new_id(),
            life: CancellationToken::new(),
            serving: true,
            draining: false,
            connections: BTreeMap::new(),
            keys: HashMap::new(),
            questions: BTreeMap::new(),
            sessions: HashMap::new(),
            paired: HashMap::new(),
            waiting_for_approval: HashMap::new(),
            plugin,
            faults: Vec::new(),
            requests: Vec::new(),
            frames: VecDeque::new(),
            next_connection: 1,
            outcomes: Vec::new(),
            by_hand: HashMap::new(),
            changed: Arc::default(),
        }
    }

    pub fn take_fault(&mut self, method: &str) -> Option<Fault> {
        let at = self.faults.iter().position(|(of, _)| of == method)?;
        Some(self.faults.remove(at).1)
    }

    pub fn session(&mut self, key: &str) -> &mut Session {
        self.sessions.entry(key.to_owned()).or_insert_with(|| Session {
            session_id: new_id(),
            agent_id: agent_of(key).to_owned(),
            rows: Vec::new(),
            active: None,
            queue: VecDeque::new(),
            last_run_id: None,
        })
    }

    pub fn run(&mut self, session: &str) -> Option<&mut ActiveRun> {
        self.sessions.get_mut(session)?.active.as_mut()
    }

    pub fn question(&mut self, id: &str) -> Result<&mut Question, Rejection> {
        self.questions.get_mut(id).ok_or_else(|| not_found(id))
    }

    /// Frames that are not events; they carry no `seq`.
    pub fn send(&mut self, connection: u64, frame: &Value) {
        let text = frame.to_string();
        self.remember(text.clone());
        if let Some(connection) = self.connections.get(&connection) {
            let _ = connection.out.send(Message::text(text));
        }
    }

    pub fn send_event(&mut self, event: &str, payload: &Value, wanted: impl Fn(u64, &Connection) -> bool) {
        self.remember(json!({"event": event, "payload": payload}).to_string());
        for (id, connection) in &mut self.connections {
            if wanted(*id, connection) {
                connection.seq += 1;
                let frame = json!({"type": "event", "event": event, "payload": payload,
                    "seq": connection.seq});
                let _ = connection.out.send(Message::text(frame.to_string()));
            }
        }
    }

    fn remember(&mut self, frame: String) {
        if self.frames.len() == FRAMES_KEPT {
            self.frames.pop_front();
        }
        self.frames.push_back(frame);
        self.changed.send_replace(());
    }

    pub fn record_outcome(&mut self, outcome: ToolOutcome) {
        self.outcomes.push(outcome);
        self.changed.send_replace(());
    }

    pub fn acknowledged(&mut self, call: &str) {
        let of_call = |outcome: &&mut ToolOutcome| outcome.call_id == call;
        if let Some(outcome) = self.outcomes.iter_mut().find(of_call) {
            outcome.acknowledged = true;
        }
        self.changed.send_replace(());
    }

    /// An `agent` event of the active run; events of the stream `tool` go to the sender, and as
    /// `session.tool` to others that subscribed.
    pub fn agent_event(&mut self, session: &str, stream: &str, data: &Value) {
        self.agent_event_at(session, stream, data, true);
    }

    fn agent_event_at(&mut self, key: &str, stream: &str, data: &Value, advance: bool) {
        let Some(session) = self.sessions.get_mut(key) else {
            return;
        };
        let (session_id, agent_id) = (session.session_id.clone(), session.agent_id.clone());
        let Some(run) = session.active.as_mut() else {
            return;
        };
        run.seq += u64::from(advance);
        let mut event = json!({"runId": run.incoming.run_id, "stream": stream, "data": data,
            "sessionKey": key, "agentId": agent_id, "seq": run.seq, "ts": now_ms()});
        if matches!(stream, "usage" | "item" | "tool") {
            run.events.push(event.clone());
        }
        if stream == "lifecycle" {
            event["sessionId"] = session_id.into();
        }
        if !run.incoming.by_agent_method {
            event["isHeartbeat"] = false.into();
        }
        let sender = run.incoming.sender.connection;
        if stream != "tool" {
            self.send_event("agent", &event, |_, c| covers(&c.scopes, "operator.read"));
            return;
        }
        let is_sender = |id: u64, c: &Connection| Some(id) == sender && c.tool_events;
        self.send_event("agent", &event, is_sender);
        self.send_event("session.tool", &event, |id, c| c.subscribed && !is_sender(id, c));
    }

    /// A `chat` event of the active run, at its current place in the run.
    pub fn chat_event(&mut self, session: &str, fields: &Value) {
        let Some(held) = self.sessions.get(session) else {
            return;
        };
        let Some(run) = held.active.as_ref() else {
            return;
        };
        let mut event = json!({"runId": run.incoming.run_id, "sessionKey": session,
            "agentId": held.agent_id, "seq": run.seq});
        extend(&mut event, fields);
        self.send_event("chat", &event, |_, c| covers(&c.scopes, "operator.read"));
    }

    /// Adds to what the active run has said; `chat` tells it now or joined with what follows.
    pub fn chat_text(&mut self, session: &str, text: &str) {
        let Some(run) = self.run(session) else {
            return;
        };
        run.text.push_str(text);
        run.unsent.push_str(text);
        let due = |sent: Instant| sent.elapsed() >= CHAT_EVERY;
        if run.chat_sent_at.is_none_or(due) {
            self.flush_chat(session);
        }
    }

    /// Tells what the active run has said and `chat` has not told yet.
    pub fn flush_chat(&mut self, session: &str) {
        let Some(run) = self.run(session).filter(|run| !run.unsent.is_empty()) else {
            return;
        };
        run.chat_sent_at = Some(Instant::now());
        let delta = std::mem::take(&mut run.unsent);
        let message = assistant_message(&run.text);
        let fields = json!({"state": "delta", "deltaText": delta, "message": message});
        self.chat_event(session, &fields);
    }

    /// How far a run has got in its preparation: one step, told twice unless nobody waits for
    /// this run by its id.
    pub fn run_status(&mut self, session: &str, phase: &str) {
        let Some(run) = self.run(session) else {
            return;
        };
        run.seq += 1;
        if run.incoming.run_id == run.incoming.key {
            self.chat_event(session, &json!({"state": "status", "phase": phase}));
        }
        self.agent_event_at(session, "run_status", &json!({"phase": phase}), false);
    }

    /// A `chat` event for a key that has no run of its own.
    pub fn chat_event_without_run(&mut self, session: &str, run_id: &str, fields: &Value) {
        let mut event = json!({"runId": run_id, "sessionKey": session, "seq": 1});
        extend(&mut event, fields);
        self.send_event("chat", &event, |_, c| covers(&c.scopes, "operator.read"));
    }

    /// Appends a user's message to the transcript; `aside` keeps it from the model.
    pub fn add_user_row(&mut self, session: &str, text: &str, key: &str, aside: bool) {
        let key = format!("{key}:user");
        let row = json!({"role": "user", "content": text, "idempotencyKey": key});
        self.append(session, row, json!({"idempotencyKey": key, "aside": aside}));
    }

    /// Appends what the agent or a tool says to the transcript; `aside` keeps it from the model.
    pub fn add_row(&mut self, session: &str, row: Value, run_id: &str, aside: bool) {
        self.append(session, row, json!({"runId": run_id, "aside": aside}));
    }

    fn append(&mut self, key: &str, mut row: Value, mut meta: Value) {
        let session = self.session(key);
        let number = session.rows.len() + 1;
        let id = new_id();
        meta["id"] = id.as_str().into();
        meta["seq"] = number.into();
        row["timestamp"] = now_ms().into();
        row["__openclaw"] = meta;
        session.rows.push(row.clone());
        if row["role"] == "toolResult" {
            return;
        }
        let event = json!({"sessionKey": key, "agentId": session.agent_id, "message": row,
            "messageId": id, "messageSeq": number});
        self.send_event("session.message", &event, |_, c| c.subscribed);
    }

    /// Tells what became of a question, and ends the runs of the messages that answered it.
    pub fn tell_resolved(&mut self, id: &str) {
        let Some(question) = self.questions.get_mut(id) else {
            return;
        };
        if std::mem::replace(&mut question.told, true) {
            return;
        }
        let event = question.resolved_event();
        let session = question.record.session_key.clone().unwrap_or_default();
        let keys = std::mem::take(&mut question.answered_by_keys);
        self.send_event("question.resolved", &event, |_, c| covers(&c.scopes, "operator.questions"));
        for key in keys {
            self.chat_event_without_run(&session, &key, &json!({"state": "final"}));
        }
    }

    /// Ends what the active run of a session does, and its questions; the run's own task tells
    /// the rest.
    pub fn abort(&mut self, session: &str, run_id: Option<&str>, reason: &str) -> Option<String> {
        let run = self.run(session)?;
        let id = run.incoming.run_id.clone();
        if run.aborted || run_id.is_some_and(|wanted| wanted != id) {
            return None;
        }
        run.aborted = true;
        run.abort.cancel();
        run.seq += 1;
        let (started_at, text) = (run.started_at, run.text.clone());
        let mut fields = json!({"state": "aborted", "stopReason": reason});
        if !text.is_empty() {
            fields["message"] = assistant_message(&text);
        }
        self.chat_event(session, &fields);
        let end = json!({"phase": "end", "status": "cancelled", "aborted": true,
            "stopReason": reason, "startedAt": started_at, "endedAt": now_ms()});
        self.agent_event_at(session, "lifecycle", &end, false);
        for question in self.questions.values_mut() {
            if question.is_pending() && question.record.run_id.as_ref() == Some(&id) {
                question.settle(End::Cancelled, Some("requester-inactive".into()), None);
            }
        }
        Some(id)
    }
}

pub(super) fn assistant_message(text: &str) -> Value {
    json!({"role": "assistant", "content": text_content(text), "timestamp": now_ms()})
}

pub(super) fn extend(event: &mut Value, fields: &Value) {
    for (name, value) in fields.as_object().into_iter().flatten() {
        event[name] = value.clone();
    }
}

/// `agent:<id>:…`
pub(super) fn agent_of(session: &str) -> &str {
    let mut parts = session.split(':');
    match (parts.next(), parts.next()) {
        (Some("agent"), Some(agent)) if !agent.is_empty() => agent,
        _ => "main",
    }
}
