//! One connection to the Gateway: challenge, connect, requests and events until it closes.

use std::{
    collections::HashMap,
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use futures::{SinkExt, StreamExt};
use serde::Serialize;
use serde_json::{Value, json};
use tokio::{
    net::TcpStream,
    sync::{mpsc, oneshot},
    task::JoinHandle,
    time::{Instant, sleep_until, timeout},
};
use tokio_tungstenite::{
    MaybeTlsStream, WebSocketStream, client_async_tls_with_config,
    tungstenite::{
        self, Message,
        error::ProtocolError,
        protocol::{CloseFrame, WebSocketConfig, frame::coding::CloseCode},
    },
};
use tokio_util::sync::CancellationToken;

use super::{
    frames::{Event, Hello, Incoming, Outgoing, Rejection},
    identity::{Identity, Signed},
    url::GatewayUrl,
};

/// Name of the setting that holds the Gateway's address, for messages.
pub const SETTING_URL: &str = "adapter.gateway.url";
/// Name of the setting that holds the Gateway's token, for messages.
pub const SETTING_TOKEN: &str = "adapter.gateway.token";

const PROTOCOL: u32 = 4;
const ROLE: &str = "operator";
/// From the TCP connect to the hello; the Gateway itself gives a client 15 s.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(20);
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
/// Events that may wait for the consumer; one more and the connection is given up.
const EVENT_BUFFER: usize = 8192;
const CALL_BUFFER: usize = 256;
const MAX_INCOMING_BYTES: usize = 64 << 20;

/// See runs, history and tool events.
pub const SCOPE_READ: &str = "operator.read";
/// Send messages and stop runs.
pub const SCOPE_WRITE: &str = "operator.write";
/// Receive and answer questions.
pub const SCOPE_QUESTIONS: &str = "operator.questions";
/// Receive and decide approvals; needs a paired device.
pub const SCOPE_APPROVALS: &str = "operator.approvals";
/// Everything; a run may use `secrets` only if its sender holds it.
pub const SCOPE_ADMIN: &str = "operator.admin";

/// Scopes without which askbus can't do its job.
pub const REQUIRED_SCOPES: [&str; 3] = [SCOPE_READ, SCOPE_WRITE, SCOPE_QUESTIONS];

/// What a connection asks for.
#[derive(Clone)]
pub struct Request {
    /// Address.
    pub url: GatewayUrl,
    /// The Gateway's shared token.
    pub token: Option<String>,
    /// Scopes to ask for; without any that is named here the connection is refused.
    pub scopes: Vec<String>,
    /// Name that the Gateway shows for this client.
    pub display_name: String,
}

/// Why no connection came about.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// Nobody answers at the address.
    #[error("gateway {url} can't be reached: {why}")]
    Unreachable {
        /// Address.
        url: GatewayUrl,
        /// Reason of the network.
        why: String,
    },
    /// The Gateway is starting or draining.
    #[error("gateway {url} takes no connections at the moment: {why}")]
    Busy {
        /// Address.
        url: GatewayUrl,
        /// Its reason.
        why: String,
        /// Pause that it asks for.
        retry_after: Option<Duration>,
    },
    /// Something else answers at the address.
    #[error("{url} does not speak the gateway protocol {PROTOCOL}: {why}; check {SETTING_URL}")]
    NotAGateway {
        /// Address.
        url: GatewayUrl,
        /// What it did.
        why: String,
    },
    /// The shared token is missing or wrong.
    #[error("gateway refuses the token: {0}; set {SETTING_TOKEN} to the gateway's own gateway.auth.token")]
    Token(Box<Rejection>),
    /// The token that the Gateway once issued to this device is no longer valid.
    #[error("gateway no longer accepts this device's own token: {0}")]
    DeviceToken(Box<Rejection>),
    /// The Gateway must approve this device first.
    #[error(
        "gateway has not approved this device: run `openclaw devices approve {request_id}` where the gateway runs ({rejection})"
    )]
    NotPaired {
        /// Pairing request.
        request_id: String,
        /// The Gateway's words.
        rejection: Box<Rejection>,
    },
    /// The Gateway wants a device identity and none was sent.
    #[error("gateway asks for its token or a device identity: {0}; set {SETTING_TOKEN}")]
    DeviceNeeded(Box<Rejection>),
    /// Too many failed tries.
    #[error("gateway refuses further tries for now: {rejection}")]
    RateLimited {
        /// The Gateway's words.
        rejection: Box<Rejection>,
        /// Pause that it asks for.
        retry_after: Option<Duration>,
    },
    /// Connected, but with fewer rights than needed.
    #[error("{}", describe_missing(.missing, *.with_device))]
    Scopes {
        /// What was asked for and not granted.
        missing: Vec<String>,
        /// Whether a device identity was sent.
        with_device: bool,
    },
    /// Any other refusal, verbatim.
    #[error("gateway refuses the connection: {0}")]
    Refused(Box<Rejection>),
}

impl ConnectError {
    /// Pause that the Gateway asks for before the next try.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Busy { retry_after, .. } | Self::RateLimited { retry_after, .. } => *retry_after,
            _ => None,
        }
    }

    /// Whether the next try may succeed without anybody doing something.
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Unreachable { .. } | Self::Busy { .. })
    }
}

fn describe_missing(missing: &[String], with_device: bool) -> String {
    let parts: Vec<_> = missing
        .iter()
        .map(|scope| match scope.as_str() {
            SCOPE_READ => format!("{scope} (output and history of runs would not arrive)"),
            SCOPE_WRITE => format!("{scope} (no message could be sent)"),
            SCOPE_QUESTIONS => format!("{scope} (no question could be seen or answered)"),
            SCOPE_APPROVALS => format!("{scope} (no approval could be seen or decided)"),
            SCOPE_ADMIN => format!("{scope} (agents could not ask for stored secrets)"),
            _ => scope.clone(),
        })
        .collect();
    let way_out = if with_device {
        "approve them for this device with `openclaw devices approve`"
    } else {
        "the gateway grants them without a device identity only to clients on its own host"
    };
    format!("gateway does not grant {}: {way_out}", parts.join(", "))
}

/// Why a request has no result.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum GatewayError {
    /// There is no connection: nothing was sent.
    #[error("gateway is not connected: {why}")]
    NotReady {
        /// What the connection waits for.
        why: String,
    },
    /// The connection went away before the answer: it may have been carried out.
    #[error("{method}: connection to the gateway lost before its answer: {why}")]
    Lost {
        /// Method.
        method: String,
        /// How it ended.
        why: Lost,
    },
    /// No answer in time: it may have been carried out.
    #[error("{method}: no answer from the gateway within {} s", after.as_secs())]
    Timeout {
        /// Method.
        method: String,
        /// Time waited.
        after: Duration,
    },
    /// The Gateway would close the connection over a frame of this size: nothing was sent.
    #[error("{method}: request of {size} bytes is over the gateway's limit of {limit}: send less")]
    TooLarge {
        /// Method.
        method: String,
        /// Bytes of the frame.
        size: usize,
        /// Bytes that the Gateway accepts.
        limit: usize,
    },
    /// The Gateway refuses.
    #[error("{method}: {rejection}")]
    Refused {
        /// Method.
        method: String,
        /// Its words.
        rejection: Box<Rejection>,
    },
    /// The result is not shaped as expected; it was carried out.
    #[error("{method}: the gateway's answer can't be read: {why}")]
    Unreadable {
        /// Method.
        method: String,
        /// What is wrong with it.
        why: String,
    },
}

impl GatewayError {
    /// `details.reason` of a refusal, as `QUESTION_NOT_FOUND`.
    pub fn reason(&self) -> Option<&str> {
        match self {
            Self::Refused { rejection, .. } => rejection.reason(),
            _ => None,
        }
    }

    /// Whether the same request may succeed later.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::NotReady { .. } | Self::Lost { .. } | Self::Timeout { .. } => true,
            Self::Refused { rejection, .. } => rejection.retryable || rejection.code == "UNAVAILABLE",
            Self::TooLarge { .. } | Self::Unreadable { .. } => false,
        }
    }

    /// Whether the Gateway may have carried it out.
    pub fn may_have_happened(&self) -> bool {
        matches!(self, Self::Lost { .. } | Self::Timeout { .. } | Self::Unreadable { .. })
    }

    /// Pause that the Gateway asks for.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Refused { rejection, .. } => pause(rejection),
            _ => None,
        }
    }
}

/// How a connection ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Lost {
    /// The Gateway closed it.
    Closed {
        /// WebSocket close code.
        code: u16,
        /// Its words.
        reason: String,
    },
    /// The network broke.
    Broken(String),
    /// Nothing was heard for two ticks.
    Silent(Duration),
    /// Events came faster than they were consumed: some are lost, all must be loaded anew.
    Lagging,
    /// The Gateway left events out: all must be loaded anew.
    Gap {
        /// Number of the first event missed.
        expected: u64,
        /// Number of the event that came.
        got: u64,
    },
    /// This side ended it.
    Stopped,
}

impl fmt::Display for Lost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Closed { code, reason } => {
                let meaning = match code {
                    1000 | 1001 => "closed",
                    1008 if reason.contains("slow consumer") => "events were read too slowly",
                    1008 => "refused",
                    1009 => "a request was too large",
                    1012 => "the gateway restarts",
                    1013 => "the gateway is busy",
                    _ => "closed",
                };
                write!(f, "{meaning} (code {code}")?;
                if !reason.is_empty() {
                    write!(f, ", {reason}")?;
                }
                f.write_str(")")
            }
            Self::Broken(why) => f.write_str(why),
            Self::Silent(after) => write!(f, "nothing heard for {} s", after.as_secs()),
            Self::Lagging => f.write_str("events came faster than they were handled"),
            Self::Gap { expected, got } => {
                write!(f, "event {expected} is missing, {got} came instead")
            }
            Self::Stopped => f.write_str("stopped"),
        }
    }
}

/// A live connection. Clones share it.
#[derive(Clone)]
pub struct Client(Arc<Inner>);

struct Inner {
    hello: Hello,
    calls: mpsc::Sender<Call>,
    last_id: AtomicU64,
    stop: CancellationToken,
}

struct Call {
    id: String,
    method: String,
    frame: String,
    reply: oneshot::Sender<Result<Value, GatewayError>>,
}

/// A connection just made.
pub struct Opened {
    /// Sends requests.
    pub client: Client,
    /// Events in the order of the wire; ends when the connection does.
    pub events: mpsc::Receiver<Event>,
    /// The one task that reads and writes; returns how the connection ended.
    pub task: JoinHandle<Lost>,
}

type Socket = WebSocketStream<MaybeTlsStream<TcpStream>>;

/// Connects and proves the rights; with an identity as a paired device, else as a local client.
pub async fn open(request: &Request, identity: Option<&mut Identity>) -> Result<Opened, ConnectError> {
    let (socket, hello) =
        timeout(HANDSHAKE_TIMEOUT, handshake(request, identity)).await.map_err(|_| {
            ConnectError::Unreachable {
                url: request.url.clone(),
                why: format!("no hello within {} s", HANDSHAKE_TIMEOUT.as_secs()),
            }
        })??;
    let (calls, queue) = mpsc::channel(CALL_BUFFER);
    let (event_sender, events) = mpsc::channel(EVENT_BUFFER);
    let stop = CancellationToken::new();
    let connection = Running {
        socket,
        calls: queue,
        events: event_sender,
        pending: HashMap::new(),
        last_seq: None,
        silence: Duration::from_millis(hello.policy.tick_interval_ms.max(1000)) * 2,
        stop: stop.clone(),
    };
    let task = tokio::spawn(connection.run());
    let client = Client(Arc::new(Inner { hello, calls, last_id: AtomicU64::new(0), stop }));
    Ok(Opened { client, events, task })
}

impl Client {
    /// What the Gateway said at connect.
    pub fn hello(&self) -> &Hello {
        &self.0.hello
    }

    /// Calls a method and waits up to 30 s for its result.
    pub async fn request(&self, method: &str, params: impl Serialize) -> Result<Value, GatewayError> {
        self.request_within(method, params, REQUEST_TIMEOUT).await
    }

    /// Calls a method and waits for its result as long as told.
    pub async fn request_within(
        &self,
        method: &str,
        params: impl Serialize,
        within: Duration,
    ) -> Result<Value, GatewayError> {
        let id = (self.0.last_id.fetch_add(1, Ordering::Relaxed) + 1).to_string();
        let frame = serde_json::to_string(&Outgoing::new(&id, method, params)).map_err(|e| {
            GatewayError::Unreadable {
                method: method.to_owned(),
                why: format!("the request itself is not JSON: {e}"),
            }
        })?;
        let limit = self.0.hello.policy.max_payload;
        if frame.len() > limit {
            return Err(GatewayError::TooLarge { method: method.to_owned(), size: frame.len(), limit });
        }
        let (reply, answer) = oneshot::channel();
        let call = Call { id, method: method.to_owned(), frame, reply };
        let exchange = async {
            if self.0.calls.send(call).await.is_err() {
                return Err(GatewayError::NotReady { why: "the connection was lost".to_owned() });
            }
            answer
                .await
                .unwrap_or_else(|_| Err(GatewayError::NotReady { why: "the connection was lost".to_owned() }))
        };
        timeout(within, exchange)
            .await
            .unwrap_or_else(|_| Err(GatewayError::Timeout { method: method.to_owned(), after: within }))
    }

    /// Ends the connection.
    pub fn close(&self) {
        self.0.stop.cancel();
    }

    /// Whether the connection has ended.
    pub fn is_closed(&self) -> bool {
        self.0.calls.is_closed()
    }
}

/// What the one task of a connection holds.
struct Running {
    socket: Socket,
    calls: mpsc::Receiver<Call>,
    events: mpsc::Sender<Event>,
    pending: HashMap<String, (String, oneshot::Sender<Result<Value, GatewayError>>)>,
    last_seq: Option<u64>,
    silence: Duration,
    stop: CancellationToken,
}

impl Running {
    async fn run(mut self) -> Lost {
        let why = self.until_lost().await;
        // From here on nothing is accepted; what was accepted and not sent was not carried out.
        self.calls.close();
        while let Ok(call) = self.calls.try_recv() {
            let _ = call.reply.send(Err(GatewayError::NotReady { why: why.to_string() }));
        }
        for (_, (method, reply)) in self.pending.drain() {
            let why = why.clone();
            let _ = reply.send(Err(GatewayError::Lost { method, why }));
        }
        let code = match why {
            Lost::Closed { .. } | Lost::Broken(_) => None,
            Lost::Stopped => Some(CloseCode::Normal),
            Lost::Silent(_) | Lost::Lagging | Lost::Gap { .. } => Some(CloseCode::from(4000)),
        };
        if let Some(code) = code {
            let frame = CloseFrame { code, reason: "".into() };
            let _ = timeout(Duration::from_secs(1), self.socket.close(Some(frame))).await;
        }
        why
    }

    async fn until_lost(&mut self) -> Lost {
        let mut heard = Instant::now();
        loop {
            tokio::select! {
                frame = self.socket.next() => {
                    heard = Instant::now();
                    match frame {
                        Some(Ok(Message::Text(text))) => {
                            if let Err(why) = self.received(&text) {
                                return why;
                            }
                        }
                        Some(Ok(Message::Close(frame))) => return closed(frame),
                        Some(Ok(_)) => {}
                        Some(Err(error)) => return Lost::Broken(error.to_string()),
                        None => return Lost::Broken("connection ended without a close".to_owned()),
                    }
                }
                Some(call) = self.calls.recv() => {
                    if let Err(why) = self.send(call).await {
                        return why;
                    }
                }
                () = sleep_until(heard + self.silence) => return Lost::Silent(self.silence),
                () = self.stop.cancelled() => return Lost::Stopped,
            }
        }
    }

    async fn send(&mut self, call: Call) -> Result<(), Lost> {
        if call.reply.is_closed() {
            return Ok(());
        }
        self.pending.insert(call.id, (call.method, call.reply));
        match timeout(WRITE_TIMEOUT, self.socket.send(Message::text(call.frame))).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(Lost::Broken(error.to_string())),
            Err(_) => {
                Err(Lost::Broken(format!("nothing could be written for {} s", WRITE_TIMEOUT.as_secs())))
            }
        }
    }

    fn received(&mut self, text: &str) -> Result<(), Lost> {
        let frame: Incoming = match serde_json::from_str(text) {
            Ok(frame) => frame,
            Err(error) => {
                tracing::warn!(%error, bytes = text.len(), "gateway frame can't be read");
                return Ok(());
            }
        };
        match frame {
            Incoming::Res { id, ok, payload, error } => {
                // Not pending: the caller has given up.
                if let Some((method, reply)) = self.pending.remove(&id) {
                    let _ = reply.send(outcome(method, ok, payload, error));
                }
                Ok(())
            }
            Incoming::Event { event, payload, seq } => {
                self.check_sequence(seq)?;
                if event == "tick" {
                    self.pending.retain(|_, (_, reply)| !reply.is_closed());
                    return Ok(());
                }
                match self.events.try_send(Event::read(event, payload)) {
                    Ok(()) => Ok(()),
                    Err(mpsc::error::TrySendError::Full(_)) => Err(Lost::Lagging),
                    // The consumer is gone: nobody follows this connection any more.
                    Err(mpsc::error::TrySendError::Closed(_)) => Err(Lost::Stopped),
                }
            }
            Incoming::Other => Ok(()),
        }
    }

    /// Events are numbered without gaps on a connection; the Gateway skips numbers it dropped.
    fn check_sequence(&mut self, seq: Option<u64>) -> Result<(), Lost> {
        let Some(got) = seq else { return Ok(()) };
        let before = self.last_seq.replace(got);
        match before.map(|last| last + 1) {
            Some(expected) if got > expected => Err(Lost::Gap { expected, got }),
            _ => Ok(()),
        }
    }
}

fn outcome(
    method: String,
    ok: bool,
    payload: Value,
    error: Option<Rejection>,
) -> Result<Value, GatewayError> {
    match (ok, error) {
        (true, _) => Ok(payload),
        (false, Some(rejection)) => Err(GatewayError::Refused { method, rejection: Box::new(rejection) }),
        (false, None) => {
            Err(GatewayError::Unreadable { method, why: "a refusal without an error".to_owned() })
        }
    }
}

async fn handshake(
    request: &Request,
    mut identity: Option<&mut Identity>,
) -> Result<(Socket, Hello), ConnectError> {
    let url = &request.url;
    let mut socket = upgrade(url).await?;
    let challenge = loop {
        match next_frame(url, &mut socket).await? {
            Incoming::Event { event, payload, .. } if event == "connect.challenge" => {
                break payload;
            }
            Incoming::Event { .. } => {}
            _ => return Err(not_a_gateway(url, "its first frame is no challenge")),
        }
    };
    let params = connect_params(request, identity.as_deref(), &challenge)
        .ok_or_else(|| not_a_gateway(url, "its challenge has no nonce"))?;
    let id = "connect";
    let frame = json!({"type": "req", "id": id, "method": "connect", "params": params});
    socket.send(Message::text(frame.to_string())).await.map_err(|e| unreachable(url, &e))?;
    let payload = loop {
        match next_frame(url, &mut socket).await? {
            Incoming::Res { id: answered, ok, payload, error } if answered == id => match (ok, error) {
                (true, _) => break payload,
                (false, Some(rejection)) => return Err(refusal(url, Box::new(rejection))),
                (false, None) => return Err(not_a_gateway(url, "a refusal without an error")),
            },
            _ => {}
        }
    };
    let hello: Hello = serde_json::from_value(payload)
        .map_err(|e| not_a_gateway(url, &format!("its hello can't be read: {e}")))?;
    if hello.protocol != PROTOCOL {
        return Err(not_a_gateway(url, &format!("it speaks {}", hello.protocol)));
    }
    if let (Some(identity), Some(token)) = (identity.as_deref_mut(), &hello.auth.device_token)
        && let Err(error) = identity.set_device_token(Some(token.clone()))
    {
        // The shared token still works, so this connection is good.
        tracing::warn!(%error, "device token is not kept");
    }
    let missing: Vec<_> =
        request.scopes.iter().filter(|scope| !grants(&hello.auth.scopes, scope)).cloned().collect();
    if missing.is_empty() {
        return Ok((socket, hello));
    }
    let _ = socket.close(None).await;
    Err(ConnectError::Scopes { missing, with_device: identity.is_some() })
}

fn connect_params(request: &Request, identity: Option<&Identity>, challenge: &Value) -> Option<Value> {
    let nonce = challenge["nonce"].as_str()?;
    let platform = std::env::consts::OS;
    // The Gateway keeps a local client's scopes only for these pairs of id and mode, and issues
    // device tokens only to the second.
    let (client_id, client_mode) = match identity {
        None => ("gateway-client", "backend"),
        Some(_) => ("cli", "cli"),
    };
    let device_token = identity.and_then(Identity::device_token);
    let (auth, token) = match (request.token.as_deref(), device_token) {
        (Some(token), _) => (json!({"token": token}), token),
        (None, Some(token)) => (json!({"deviceToken": token}), token),
        (None, None) => (json!({}), ""),
    };
    let mut params = json!({
        "minProtocol": PROTOCOL,
        "maxProtocol": PROTOCOL,
        "client": {
            "id": client_id,
            "mode": client_mode,
            "version": env!("CARGO_PKG_VERSION"),
            "platform": platform,
            "displayName": request.display_name,
        },
        "role": ROLE,
        "scopes": request.scopes,
        "caps": ["tool-events"],
        "auth": auth,
    });
    if request.scopes.iter().any(|scope| scope == SCOPE_APPROVALS) {
        params["caps"] = json!(["tool-events", "approvals"]);
    }
    if let Some(identity) = identity {
        let proof = identity.sign(Signed {
            client_id,
            client_mode,
            platform,
            role: ROLE,
            scopes: &request.scopes,
            signed_at: challenge["ts"].as_i64()?,
            nonce,
            token,
        });
        params["device"] = serde_json::to_value(proof).ok()?;
    }
    Some(params)
}

fn grants(granted: &[String], scope: &str) -> bool {
    granted.iter().any(|g| g == scope || g == SCOPE_ADMIN || (g == SCOPE_WRITE && scope == SCOPE_READ))
}

async fn upgrade(url: &GatewayUrl) -> Result<Socket, ConnectError> {
    if url.is_tls() {
        // Several crypto providers are compiled in, so one must be named; a second naming is no harm.
        let _ = rustls::crypto::ring::default_provider().install_default();
    }
    let stream =
        TcpStream::connect((url.host().as_str(), url.port())).await.map_err(|e| unreachable(url, &e))?;
    let _ = stream.set_nodelay(true);
    let config = WebSocketConfig::default()
        .max_message_size(Some(MAX_INCOMING_BYTES))
        .max_frame_size(Some(MAX_INCOMING_BYTES));
    match client_async_tls_with_config(url.to_string(), stream, Some(config), None).await {
        Ok((socket, _)) => Ok(socket),
        Err(tungstenite::Error::Http(response)) => match response.status().as_u16() {
            429 | 502..=504 => Err(ConnectError::Busy {
                url: url.clone(),
                why: format!("HTTP {}", response.status()),
                retry_after: None,
            }),
            403 => Err(not_a_gateway(
                url,
                "HTTP 403 Forbidden: the gateway may not trust a proxy on the way \
                 (gateway.trustedProxies)",
            )),
            _ => Err(not_a_gateway(url, &format!("HTTP {}", response.status()))),
        },
        Err(
            e
            @ (tungstenite::Error::Io(_) | tungstenite::Error::Protocol(ProtocolError::HandshakeIncomplete)),
        ) => Err(unreachable(url, &e)),
        Err(e) => Err(not_a_gateway(url, &e.to_string())),
    }
}

async fn next_frame(url: &GatewayUrl, socket: &mut Socket) -> Result<Incoming, ConnectError> {
    loop {
        match socket.next().await {
            Some(Ok(Message::Text(text))) => {
                return serde_json::from_str(&text)
                    .map_err(|e| not_a_gateway(url, &format!("its frame can't be read: {e}")));
            }
            Some(Ok(Message::Close(frame))) => {
                return Err(ConnectError::Busy {
                    url: url.clone(),
                    why: closed(frame).to_string(),
                    retry_after: None,
                });
            }
            Some(Ok(_)) => {}
            Some(Err(error)) => return Err(unreachable(url, &error)),
            None => return Err(unreachable(url, &"connection ended without a close")),
        }
    }
}

/// Sorts a refused connect by what somebody has to do about it.
fn refusal(url: &GatewayUrl, rejection: Box<Rejection>) -> ConnectError {
    let code = rejection.detail_code().unwrap_or_default();
    if rejection.code == "UNAVAILABLE" {
        return ConnectError::Busy {
            url: url.clone(),
            why: rejection.to_string(),
            retry_after: pause(&rejection),
        };
    }
    match code {
        "AUTH_RATE_LIMITED" => ConnectError::RateLimited { retry_after: pause(&rejection), rejection },
        "AUTH_TOKEN_MISSING" | "AUTH_TOKEN_MISMATCH" | "AUTH_REQUIRED" | "AUTH_UNAUTHORIZED" => {
            ConnectError::Token(rejection)
        }
        "AUTH_DEVICE_TOKEN_MISMATCH" => ConnectError::DeviceToken(rejection),
        "DEVICE_IDENTITY_REQUIRED" => ConnectError::DeviceNeeded(rejection),
        _ => match rejection.details["requestId"].as_str() {
            Some(id) if code == "PAIRING_REQUIRED" => {
                ConnectError::NotPaired { request_id: id.to_owned(), rejection }
            }
            _ => ConnectError::Refused(rejection),
        },
    }
}

fn pause(rejection: &Rejection) -> Option<Duration> {
    let nested = || rejection.details["retryAfterMs"].as_u64();
    rejection.retry_after_ms.or_else(nested).map(Duration::from_millis)
}

fn unreachable(url: &GatewayUrl, why: &dyn fmt::Display) -> ConnectError {
    ConnectError::Unreachable { url: url.clone(), why: why.to_string() }
}

fn not_a_gateway(url: &GatewayUrl, why: &str) -> ConnectError {
    ConnectError::NotAGateway { url: url.clone(), why: why.to_owned() }
}

fn closed(frame: Option<CloseFrame>) -> Lost {
    match frame {
        Some(frame) => Lost::Closed { code: frame.code.into(), reason: frame.reason.to_string() },
        None => Lost::Closed { code: 1005, reason: String::new() },
    }
}
