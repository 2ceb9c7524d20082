//! A scripted OpenClaw Gateway: a server of protocol version 4 over a real WebSocket.
//!
//! Frames, their order and the errors follow what OpenClaw 2026.9.6 was seen to send. Its agent
//! does what messages say ([`crate::script`]): `CALL ask_user {…}` asks a native question,
//! `CALL request_user_input {…}` calls askbus as OpenClaw's plugin does.

mod connect;
mod methods;
mod plugin;
mod questions;
mod runs;
mod state;
mod wire;

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rand::Rng;
use serde::Serialize;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_tungstenite::tungstenite::Message;

pub use wire::Rejection;

use crate::PORTS;
use runs::ToolResult;
use state::{Incoming, Sender, State};

/// What a scripted Gateway is like.
#[derive(Debug, Clone)]
pub struct GatewayOptions {
    /// Address to serve; a free port of the loopback interface where it is not set.
    pub listen: Option<SocketAddr>,
    /// The shared token that clients send.
    pub token: String,
    /// The name that its plugin gives as `gateway`.
    pub name: String,
    /// Where its plugin finds askbus; also [`ScriptedGateway::set_plugin`].
    pub plugin: Option<PluginEndpoint>,
    /// Ids of its agents, with their names where they have one.
    pub agents: Vec<(String, Option<String>)>,
    /// Tools whose results the test gives with [`ScriptedGateway::finish_call`].
    pub tools_by_hand: Vec<String>,
    /// Every connection gets an empty list of scopes, as silently as the real one does it.
    pub empty_scopes: bool,
    /// As seen from another host: a device must be approved, and a token alone gives no scopes.
    pub needs_approval: bool,
    /// After a restart, an interrupted agent makes the same calls again in a new run.
    pub asks_again: bool,
    /// The shortest time that `ask_user` waits, whatever its `timeoutSeconds` says.
    pub ask_user_at_least: Duration,
    /// How long a settled question can still be read.
    pub keep_settled: Duration,
    /// Time between two `tick` events.
    pub tick: Duration,
}

impl Default for GatewayOptions {
    fn default() -> Self {
        Self {
            listen: None,
            token: "scripted-gateway-token".into(),
            name: "openclaw".into(),
            plugin: None,
            agents: vec![("main".into(), None), ("ops".into(), Some("Ops bot".into()))],
            tools_by_hand: Vec::new(),
            empty_scopes: false,
            needs_approval: false,
            asks_again: false,
            ask_user_at_least: Duration::from_secs(30),
            keep_settled: Duration::from_secs(15),
            tick: Duration::from_secs(30),
        }
    }
}

/// Where the plugin finds askbus.
#[derive(Debug, Clone)]
pub struct PluginEndpoint {
    /// Without a slash at its end, such as `http://127.0.0.1:8700`.
    pub url: String,
    /// Bearer token.
    pub token: String,
    /// The plugin keeps secrets out of the transcript by handles.
    pub handles: bool,
}

/// What goes wrong with the next request of a method.
#[derive(Debug, Clone)]
pub enum Fault {
    /// It is served, but the connection is cut instead of the response.
    LoseResponse,
    /// It is served at once, but the response takes that long.
    Delay(Duration),
    /// It is not served. The only fault that `connect` can have.
    Refuse(Rejection),
}

/// A request that a client made after its `connect`.
#[derive(Debug, Clone, Serialize)]
pub struct Request {
    /// Method, such as `chat.send`.
    pub method: String,
    /// Parameters as they were sent.
    pub params: Value,
}

/// What a tool call of the agent got.
#[derive(Debug, Clone, Serialize)]
pub struct ToolOutcome {
    /// Session key.
    pub session: String,
    /// Run id.
    pub run_id: String,
    /// Tool call id.
    pub call_id: String,
    /// Name of the tool.
    pub tool: String,
    /// Its arguments.
    pub args: Value,
    /// Text of the result, as it is in the transcript; `Aborted` for an aborted run.
    pub text: String,
    /// Details of the result.
    pub details: Value,
    /// Whether the result is an error.
    pub is_error: bool,
    /// The value that the agent got behind a handle or a masked answer.
    #[serde(skip)]
    pub secret: Option<String>,
    /// HTTP requests that a call of `request_user_input` took.
    pub attempts: u32,
    /// The other side has accepted the acknowledgement of `request_user_input`.
    pub acknowledged: bool,
    /// Milliseconds since 1970.
    pub started_ms: u64,
    /// Milliseconds since 1970.
    pub ended_ms: u64,
}

#[derive(Debug)]
struct Core {
    options: GatewayOptions,
    http: reqwest::Client,
    state: Mutex<State>,
}

impl Core {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A running Gateway; stops when dropped.
#[derive(Debug)]
pub struct ScriptedGateway {
    core: Arc<Core>,
    address: SocketAddr,
    changed: Arc<watch::Sender<()>>,
}

impl ScriptedGateway {
    /// Starts a Gateway.
    ///
    /// # Errors
    /// Its address is in use.
    pub async fn start(options: GatewayOptions) -> Result<Self> {
        let listener = match options.listen {
            Some(address) => TcpListener::bind(address)
                .await
                .with_context(|| format!("listen on {address} for the scripted gateway"))?,
            None => listen_anywhere().await?,
        };
        let state = State::new(options.plugin.clone());
        let (changed, life) = (state.changed.clone(), state.life.clone());
        let core = Arc::new(Core { options, http: crate::http_client(), state: Mutex::new(state) });
        let address = listener.local_addr()?;
        tokio::spawn(connect::serve(core.clone(), listener, life));
        Ok(Self { core, address, changed })
    }

    /// `ws://127.0.0.1:<port>`; the same over restarts.
    pub fn url(&self) -> String {
        format!("ws://{}", self.address)
    }

    /// The shared token.
    pub fn token(&self) -> &str {
        &self.core.options.token
    }

    /// Id of the present Gateway process.
    pub fn boot_id(&self) -> String {
        self.core.state().boot_id.clone()
    }

    /// Tells the plugin where askbus is, from the next call on.
    pub fn set_plugin(&self, endpoint: PluginEndpoint) {
        self.core.state().plugin = Some(endpoint);
    }

    /// How many clients are connected.
    pub fn connections(&self) -> usize {
        self.core.state().connections.len()
    }

    /// Cuts all connections without a close frame; runs and questions go on.
    pub fn drop_connections(&self) {
        let mut state = self.core.state();
        for connection in state.connections.values() {
            connection.cut.cancel();
        }
        state.connections.clear();
        state.changed.send_replace(());
    }

    /// Ends the Gateway process as `kill -9` does: questions, runs and the memory of idempotency
    /// keys are gone, transcripts and pairings stay.
    pub fn kill(&self) {
        let mut state = self.core.state();
        state.life.cancel();
        state.serving = false;
        for connection in state.connections.values() {
            connection.cut.cancel();
        }
        state.connections.clear();
        state.changed.send_replace(());
    }

    /// Starts a killed Gateway again, at the same address, with a new boot id.
    ///
    /// # Errors
    /// It runs already, or another process has taken its address.
    pub async fn start_again(&self) -> Result<()> {
        if self.core.state().serving {
            bail!("the scripted gateway runs already: call kill first");
        }
        let listener = tokio::time::timeout(Duration::from_secs(10), async {
            loop {
                // The listener of the killed one may take a moment to go.
                match TcpListener::bind(self.address).await {
                    Ok(listener) => return listener,
                    Err(_) => tokio::time::sleep(Duration::from_millis(5)).await,
                }
            }
        })
        .await
        .with_context(|| format!("{} was taken by another process", self.address))?;
        let mut state = self.core.state();
        let fresh = State::new(None);
        state.boot_id = fresh.boot_id;
        state.life = fresh.life;
        state.serving = true;
        state.draining = false;
        state.keys.clear();
        state.questions.clear();
        state.by_hand.clear();
        let mut interrupted = Vec::new();
        for (key, session) in &mut state.sessions {
            session.queue.clear();
            if let Some(run) = session.active.take() {
                interrupted.push((key.clone(), run.incoming));
            }
        }
        if self.core.options.asks_again {
            for (session, incoming) in interrupted {
                let text = format!(
                    "[System] Your previous turn was interrupted by a gateway restart. Continue \
                     from the existing transcript: {}",
                    incoming.text
                );
                let run_id = wire::new_id();
                let again = Incoming { key: run_id.clone(), run_id, text, ..incoming };
                runs::start(&self.core, &mut state, &session, again);
            }
        }
        let serve = connect::serve(self.core.clone(), listener, state.life.clone());
        tokio::spawn(serve);
        Ok(())
    }

    /// [`kill`](Self::kill) and [`start_again`](Self::start_again).
    ///
    /// # Errors
    /// Another process has taken its address.
    pub async fn restart(&self) -> Result<()> {
        if self.core.state().serving {
            self.kill();
        }
        self.start_again().await
    }

    /// Begins to stop as SIGTERM does: no new connection, on the present ones only questions can
    /// still be read and resolved. [`finish_drain`](Self::finish_drain) ends it.
    pub fn drain(&self) {
        self.core.state().draining = true;
    }

    /// Ends a drain: clients are told with `shutdown`, and closed with 1012.
    pub fn finish_drain(&self) {
        let mut state = self.core.state();
        let payload = json!({"reason": "gateway stopping"});
        state.send_event("shutdown", &payload, |_, _| true);
        for connection in state.connections.values() {
            let close = connect::close(1012, "service restart");
            let _ = connection.out.send(Message::Close(Some(close)));
        }
        state.serving = false;
        // Connections end by their close frames; everything else ends now.
        let changed = state.changed.clone();
        let life = state.life.clone();
        drop(state);
        let core = self.core.clone();
        tokio::spawn(async move {
            let mut changes = changed.subscribe();
            while !core.state().connections.is_empty() && changes.changed().await.is_ok() {}
            life.cancel();
        });
    }

    /// Lets devices that were refused connect.
    pub fn approve_devices(&self) {
        let mut state = self.core.state();
        let waiting = std::mem::take(&mut state.waiting_for_approval);
        for device in waiting.into_values() {
            state.paired.insert(device.id.clone(), device);
        }
    }

    /// A person at the Gateway's own Control UI sends a message; returns the run id.
    ///
    /// # Errors
    /// What `chat.send` refuses.
    pub fn say(&self, session: &str, message: &str) -> Result<String> {
        let key = wire::new_id();
        let params = json!({"sessionKey": session, "message": message, "idempotencyKey": key});
        let sender = Sender { connection: None, scopes: vec!["operator.admin".into()] };
        let mut state = self.core.state();
        methods::chat_send(&self.core, &mut state, sender, &params)
            .map_err(|refused| anyhow::anyhow!(refused.message))?;
        Ok(key)
    }

    /// A person at the Control UI stops the run of a session.
    pub fn stop_run(&self, session: &str) {
        let _ = methods::chat_abort(&mut self.core.state(), &json!({"sessionKey": session}));
    }

    /// A person at the Control UI answers a question: values by prompt id, as in
    /// `json!({"color": ["Red"]})`.
    ///
    /// # Errors
    /// What `question.resolve` refuses.
    pub fn answer_locally(&self, question: &str, answers: &Value) -> Result<(), Rejection> {
        self.settle_locally(question, Some(json!({"answers": answers})))
    }

    /// A person at the Control UI skips a question.
    ///
    /// # Errors
    /// What `question.resolve` refuses.
    pub fn skip_locally(&self, question: &str) -> Result<(), Rejection> {
        self.settle_locally(question, None)
    }

    fn settle_locally(&self, question: &str, answers: Option<Value>) -> Result<(), Rejection> {
        let mut state = self.core.state();
        let by = Some("openclaw-control-ui".to_owned());
        methods::resolve(&self.core, &mut state, question, answers.as_ref(), by, None).map(|_| ())
    }

    /// Records of all native questions that can be read, oldest first.
    pub fn questions(&self) -> Vec<Value> {
        let state = self.core.state();
        let mut records: Vec<_> = state.questions.values().map(|q| &q.record).collect();
        records.sort_by_key(|record| record.created_at_ms);
        records.into_iter().map(|record| json!(record)).collect()
    }

    /// Call ids of tools by hand that wait for their result.
    pub fn calls_by_hand(&self) -> Vec<String> {
        self.core.state().by_hand.keys().cloned().collect()
    }

    /// Gives a tool by hand its result. False where no such call waits.
    pub fn finish_call(&self, call_id: &str, text: &str, details: Value, is_error: bool) -> bool {
        let waiting = self.core.state().by_hand.remove(call_id);
        waiting.is_some_and(|call| {
            let result = ToolResult { text: text.into(), details, is_error, ..ToolResult::default() };
            call.send(result).is_ok()
        })
    }

    /// Makes something go wrong with the next request of a method; several are taken in order.
    pub fn fault(&self, method: &str, fault: Fault) {
        self.core.state().faults.push((method.to_owned(), fault));
    }

    /// Nothing goes wrong that has not gone wrong yet.
    pub fn forget_faults(&self) {
        self.core.state().faults.clear();
    }

    /// All requests served so far, of all clients and boots.
    pub fn requests(&self) -> Vec<Request> {
        self.core.state().requests.clone()
    }

    /// Transcript of a session, as `chat.history` has it.
    pub fn transcript(&self, session: &str) -> Vec<Value> {
        let state = self.core.state();
        let session = state.sessions.get(session);
        session.map(|session| session.rows.clone()).unwrap_or_default()
    }

    /// Appends rows to a transcript that no run has written.
    pub fn add_rows(&self, session: &str, count: usize) {
        let mut state = self.core.state();
        for _ in 0..count {
            let row = json!({"role": "user", "content": [{"type": "text", "text": "row"}]});
            state.add_row(session, row, "another", true);
        }
    }

    /// Whether a text is in any transcript or in the last 20,000 frames sent.
    pub fn raw_contains(&self, text: &str) -> bool {
        let json = Value::from(text).to_string();
        let needle = json.trim_matches('"');
        let state = self.core.state();
        let mut rows = state.sessions.values().flat_map(|session| &session.rows);
        state.frames.iter().any(|frame| frame.contains(needle))
            || rows.any(|row| row.to_string().contains(needle))
    }

    /// What the agent's tool calls got, in order of their ends.
    pub fn outcomes(&self) -> Vec<ToolOutcome> {
        self.core.state().outcomes.clone()
    }

    /// Waits until the outcomes fulfil a condition, and returns them.
    ///
    /// # Errors
    /// They do not within `timeout`; the error shows them.
    pub async fn wait_for(
        &self,
        mut condition: impl FnMut(&[ToolOutcome]) -> bool,
        timeout: Duration,
    ) -> Result<Vec<ToolOutcome>> {
        if self.until(|gateway| condition(&gateway.outcomes()), timeout).await {
            return Ok(self.outcomes());
        }
        let outcomes = self.outcomes();
        bail!("the outcomes waited for did not come within {timeout:?}; there are {outcomes:#?}")
    }

    /// Waits until a condition holds; false if it does not within `timeout`. It is looked at
    /// whenever something happens in the Gateway.
    pub async fn until(&self, mut condition: impl FnMut(&Self) -> bool, timeout: Duration) -> bool {
        let mut changes = self.changed.subscribe();
        let holds = async {
            while !condition(self) {
                if changes.changed().await.is_err() {
                    return false;
                }
            }
            true
        };
        tokio::time::timeout(timeout, holds).await.unwrap_or(false)
    }
}

impl Drop for ScriptedGateway {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A listener on a port that no outgoing connection can take while the Gateway is down.
async fn listen_anywhere() -> Result<TcpListener> {
    for _ in 0..100 {
        let port = rand::rng().random_range(PORTS);
        if let Ok(listener) = TcpListener::bind(("127.0.0.1", port)).await {
            return Ok(listener);
        }
    }
    bail!("found no free port in {PORTS:?} for the scripted gateway")
}
