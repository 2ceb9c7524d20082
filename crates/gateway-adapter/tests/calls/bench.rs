//! A bus, a router, and adapters that can be stopped, killed and started again.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::Duration;

use ask_bus::seal::OpenKey;
use ask_bus::{Bus, BusOptions, Provisioning, SealKey, Stored};
use ask_core::SCHEMA;
use ask_core::entry::Entry;
use ask_core::key::SessionKey;
use ask_core::reply::{Answer, Reply, ReplyContent, Responder};
use ask_core::surface::Surface;
use ask_core::wire::{ReplyRequest, ReplyResponse, RunEvent, RunItem, SayRequest, SayResponse, ToolPhase};
use gateway_adapter::adapter::args_digest;
use gateway_adapter::config::{AdapterConfig, GatewayConfig, HttpConfig, QuestionsConfig};
use serde_json::{Value, json};
use service_kit::{Health, Redacted};
use testkit::nats::NatsServer;
use testkit::until;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio_util::sync::CancellationToken;

pub const TOKEN: &str = "adapter-token";
pub const GATEWAY: &str = "g";
pub const SESSION: &str = "agent:main:owui-1";
pub const OWNER: &str = "alice";

pub struct Bench {
    pub server: NatsServer,
    pub bus: Bus,
    seal: SealKey,
    open: String,
    _router: Running,
}

/// A service in a runtime of its own: dropped, it is gone at once, as after a kill.
pub struct Running {
    runtime: Option<Runtime>,
    stop: CancellationToken,
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// An adapter whose endpoint is reachable.
pub struct Adapter {
    pub url: String,
    pub address: SocketAddr,
    running: Running,
}

impl Adapter {
    /// Tells it to stop, as SIGTERM does.
    pub fn stop(&self) {
        self.running.stop.cancel();
    }
}

fn run<F: Future<Output: Send> + Send + 'static>(service: impl FnOnce(CancellationToken) -> F) -> Running {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let stop = CancellationToken::new();
    runtime.spawn(service(stop.clone()));
    Running { runtime: Some(runtime), stop }
}

impl Bench {
    pub async fn start() -> Self {
        let server = NatsServer::start().await.unwrap();
        let bus = connect(server.url()).await;
        bus.provision(&Provisioning { gateways: vec![GATEWAY.into()], replicas: 1 }).await.unwrap();
        let (open, seal) = OpenKey::generate().unwrap();
        bus.write_seal_key(GATEWAY, &seal).await.unwrap();
        let (health, url) = (Health::new(&ask_router::SERVICE), server.url());
        let ready = health.clone();
        let _router = run(|stop| async move {
            let config = ask_router::RouterConfig {
                stagger: Duration::from_millis(20),
                ..ask_router::RouterConfig::defaults()
            };
            ask_router::run(config, connect(url).await, health, stop).await.unwrap();
        });
        until("the router", async || ready.unmet().is_empty().then_some(())).await;
        let bench = Self { server, bus, seal, open: open.to_text().to_string(), _router };
        bench.bind(SESSION).await;
        bench
    }

    /// Starts an adapter on a free port.
    pub async fn adapter(&self) -> Adapter {
        self.adapter_at("127.0.0.1:0".parse().unwrap()).await
    }

    /// Starts an adapter on this address once it is free.
    pub async fn adapter_at(&self, address: SocketAddr) -> Adapter {
        let listener = until("the address", async || std::net::TcpListener::bind(address).ok()).await;
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let (config, url) = (self.config(), self.server.url());
        let health = Health::new(&gateway_adapter::SERVICE);
        let ready = health.clone();
        let running = run(|stop| async move {
            let listener = TcpListener::from_std(listener).unwrap();
            gateway_adapter::serve(config, connect(url).await, health, stop, listener).await.unwrap();
        });
        // There is no Gateway.
        until("the adapter", async || ready.unmet().keys().all(|unmet| *unmet == "gateway").then_some(()))
            .await;
        Adapter { url: format!("http://{address}"), address, running }
    }

    fn config(&self) -> AdapterConfig {
        AdapterConfig {
            seal_key: Some(Redacted::new(self.open.clone())),
            gateway: GatewayConfig {
                name: GATEWAY.into(),
                // Nobody listens there: this road works without the Gateway's own connection.
                url: "ws://127.0.0.1:9".into(),
                token: None,
                identity_file: self.server.store_dir().join("identity.json"),
                extra_scopes: Vec::new(),
            },
            http: HttpConfig {
                listen: "127.0.0.1:0".parse().unwrap(),
                token: Redacted::new(TOKEN.into()),
                origins: vec!["https://tools.example".into()],
            },
            questions: QuestionsConfig { timeout_s: 300, native_margin_ms: 3000 },
        }
    }

    /// Makes [`OWNER`] the owner of a session, by a message.
    pub async fn bind(&self, session: &str) {
        let request = SayRequest {
            schema: SCHEMA,
            session: SessionKey::new(GATEWAY, session),
            message: format!("m-{session}"),
            user: OWNER.into(),
            user_name: None,
            front: "test".into(),
            chat: Some("chat".into()),
            surfaces: BTreeSet::from([Surface::Card, Surface::Masked, Surface::Durable, Surface::Text]),
            text: "hello".into(),
            attachments: Vec::new(),
            on_screen: None,
            seen: None,
            goes_on: false,
        };
        until("the session", async || match self.bus.say(&request).await {
            Ok(SayResponse::Routed { .. }) => Some(()),
            _ => None,
        })
        .await;
    }

    /// Puts the start of a tool call on the bus, as the adapter that works for the Gateway does.
    pub async fn tool_start(&self, session: &str, run: &str, call: &str, args: &Value) {
        let what = RunEvent::Tool {
            call: call.into(),
            name: "askbus__request_user_input".into(),
            phase: ToolPhase::Start,
            title: None,
            data: Some(json!({ "args_sha256": args_digest(args) })),
            ok: None,
        };
        let session = SessionKey::new(GATEWAY, session);
        self.bus
            .write_run(&RunItem { schema: SCHEMA, session, run: run.into(), seq: 1, what })
            .await
            .unwrap();
    }

    /// Waits until a question of the session fulfils a condition.
    pub async fn question(&self, session: &str, condition: impl Fn(&Entry) -> bool) -> Stored<Entry> {
        let session = SessionKey::new(GATEWAY, session);
        until("the question", async || {
            let entries = self.bus.questions_of(&session).await.ok()?;
            entries.into_iter().find(|e| condition(&e.value))
        })
        .await
    }

    /// Waits until the question is closed, and tells as what.
    pub async fn returned(&self, entry: &Entry) -> ask_core::outcome::Returned {
        until("the return", async || self.bus.question(&entry.key).await.ok()??.value.returned().cloned())
            .await
    }

    /// Answers as the session's owner does.
    pub async fn answer(&self, entry: &Entry, answer: Answer) -> ReplyResponse {
        self.bus.reply(&reply(entry, "r1", answer)).await.unwrap()
    }

    /// Answers with a secret.
    pub async fn answer_secret(&self, entry: &Entry, secret: &str) -> ReplyResponse {
        self.answer(entry, self.seal(entry, "r1", secret)).await
    }

    /// A secret as a front end seals it for its reply.
    pub fn seal(&self, entry: &Entry, reply: &str, secret: &str) -> Answer {
        Answer::Sealed(self.seal.seal(secret, &entry.key, reply).unwrap())
    }

    /// Answers as an operator does with askctl.
    pub async fn answer_as_operator(&self, entry: &Entry, answer: Answer) -> ReplyResponse {
        self.bus.outcome(&reply(entry, "o1", answer)).await.unwrap()
    }

    /// All files of the JetStream store that hold `text`.
    pub fn on_disk(&self, text: &str) -> bool {
        fn search(folder: &std::path::Path, text: &[u8]) -> bool {
            std::fs::read_dir(folder).unwrap().flatten().any(|file| match file.path() {
                path if path.is_dir() => search(&path, text),
                path => std::fs::read(path).is_ok_and(|b| b.windows(text.len()).any(|w| w == text)),
            })
        }
        search(&self.server.store_dir(), text.as_bytes())
    }
}

/// A reply of the session's owner.
pub fn reply(entry: &Entry, id: &str, answer: Answer) -> ReplyRequest {
    let by = Responder { user: OWNER.into(), name: None, chat: Some("chat".into()) };
    let prompt = entry.question.prompts[0].id.clone();
    let content = ReplyContent::Answers { answers: [(prompt, answer)].into() };
    let reply = Reply { id: id.into(), by, surface: Surface::Card, content };
    ReplyRequest { schema: SCHEMA, key: entry.key.clone(), reply }
}

async fn connect(url: String) -> Bus {
    Bus::connect(BusOptions { url, name: "test".into(), ..Default::default() }).await.unwrap()
}
