//! A bus, a router, a Gateway, and adapters that can be stopped, killed and started again.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::Duration;

use ask_bus::seal::OpenKey;
use ask_bus::{Bus, BusOptions, Provisioning, SealKey, Stored};
use ask_core::SCHEMA;
use ask_core::entry::Entry;
use ask_core::key::SessionKey;
use ask_core::outcome::Returned;
use ask_core::reply::{Answer, Reply, ReplyContent, Responder};
use ask_core::session::MessageDecision;
use ask_core::surface::Surface;
use ask_core::wire::{
    ReplyRequest, ReplyResponse, RunEvent, RunItem, SayRequest, SayResponse, StopRequest, StopResponse,
};
use gateway_adapter::config::{AdapterConfig, GatewayConfig, HttpConfig, QuestionsConfig};
use service_kit::{Health, Redacted};
use testkit::gateway::{GatewayOptions, PluginEndpoint, ScriptedGateway};
use testkit::nats::NatsServer;
use testkit::until;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio_util::sync::CancellationToken;

use crate::real_gateway::{self, RealGateway};

pub const GATEWAY: &str = "openclaw";
pub const SESSION: &str = "agent:main:owui-1";
pub const OWNER: &str = "alice";
/// Asks with three choices.
pub const ASK: &str = r#"CALL ask_user {"questions":[{"id":"color","header":"Color","question":"Which color?","options":[{"label":"Red"},{"label":"Green"},{"label":"Blue"}]}]}"#;

pub const TOKEN: &str = "adapter-token";

pub struct Bench<G = ScriptedGateway> {
    pub server: NatsServer,
    pub gateway: G,
    gateway_at: (String, String),
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

/// An adapter and what it says about itself.
pub struct Adapter {
    pub health: Health,
    pub address: SocketAddr,
    running: Running,
}

impl Adapter {
    /// Tells it to stop, as SIGTERM does.
    pub fn stop(&self) {
        self.running.stop.cancel();
    }

    pub async fn is_ready(&self) {
        until("the adapter", async || self.health.unmet().is_empty().then_some(())).await;
    }
}

fn run<F: Future<Output: Send> + Send + 'static>(service: impl FnOnce(CancellationToken) -> F) -> Running {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let stop = CancellationToken::new();
    runtime.spawn(service(stop.clone()));
    Running { runtime: Some(runtime), stop }
}

impl Bench {
    /// Without an adapter.
    pub async fn start(options: GatewayOptions) -> Self {
        let gateway = ScriptedGateway::start(options).await.unwrap();
        let at = (gateway.url(), gateway.token().to_owned());
        Self::around(gateway, at).await
    }

    /// With one adapter that is ready.
    pub async fn with_adapter() -> (Self, Adapter) {
        let bench = Self::start(GatewayOptions::default()).await;
        let adapter = bench.adapter().await;
        adapter.is_ready().await;
        (bench, adapter)
    }

    /// Tells the Gateway's plugin to use this adapter.
    pub fn plug_in(&self, adapter: &Adapter, handles: bool) {
        let url = format!("http://{}", adapter.address);
        self.gateway.set_plugin(PluginEndpoint { url, token: TOKEN.into(), handles });
    }
}

impl Bench<RealGateway> {
    /// Around a real Gateway, without an adapter.
    pub async fn real(name: &str) -> Self {
        let gateway = RealGateway::start(name).await;
        let at = (gateway.url().to_string(), real_gateway::TOKEN.to_owned());
        Self::around(gateway, at).await
    }
}

impl<G> Bench<G> {
    async fn around(gateway: G, gateway_at: (String, String)) -> Self {
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
        Self { server, gateway, gateway_at, bus, seal, open: open.to_text().to_string(), _router }
    }

    /// Starts an adapter.
    pub async fn adapter(&self) -> Adapter {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let (config, url) = (self.config(), self.server.url());
        let health = Health::new(&gateway_adapter::SERVICE);
        let reported = health.clone();
        let running = run(|stop| async move {
            let listener = TcpListener::from_std(listener).unwrap();
            gateway_adapter::serve(config, connect(url).await, health, stop, listener).await.unwrap();
        });
        Adapter { health: reported, address, running }
    }

    fn config(&self) -> AdapterConfig {
        AdapterConfig {
            seal_key: Some(Redacted::new(self.open.clone())),
            gateway: GatewayConfig {
                name: GATEWAY.into(),
                url: self.gateway_at.0.clone(),
                token: Some(Redacted::new(self.gateway_at.1.clone())),
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

    /// Says something as the session's owner; returns how it was routed.
    pub async fn say(&self, session: &str, text: &str) -> MessageDecision {
        let request = SayRequest {
            schema: SCHEMA,
            session: SessionKey::new(GATEWAY, session),
            message: uuid::Uuid::new_v4().to_string(),
            user: OWNER.into(),
            user_name: None,
            front: "test".into(),
            chat: Some("chat".into()),
            surfaces: BTreeSet::from([Surface::Card, Surface::Masked, Surface::Durable]),
            text: text.into(),
            attachments: Vec::new(),
            on_screen: None,
            seen: None,
            goes_on: false,
        };
        match self.bus.say(&request).await.unwrap() {
            SayResponse::Routed { decision, .. } => decision,
            other => panic!("`{text}` was not routed: {other:?}"),
        }
    }

    /// Says something that goes to the agent; returns its run id.
    pub async fn send(&self, session: &str, text: &str) -> String {
        match self.say(session, text).await {
            MessageDecision::Message { run, .. } => run,
            other => panic!("`{text}` went another way: {other:?}"),
        }
    }

    pub async fn stop_session(&self, session: &str) -> StopResponse {
        let session = SessionKey::new(GATEWAY, session);
        self.bus.stop(&StopRequest { schema: SCHEMA, session, user: OWNER.into() }).await.unwrap()
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
    pub async fn returned(&self, entry: &Entry) -> Returned {
        until("the return", async || self.bus.question(&entry.key).await.ok()??.value.returned().cloned())
            .await
    }

    /// Replies as the session's owner.
    pub async fn reply(&self, entry: &Entry, id: &str, content: ReplyContent) -> ReplyResponse {
        let by = Responder { user: OWNER.into(), name: None, chat: Some("chat".into()) };
        let reply = Reply { id: id.into(), by, surface: Surface::Card, content };
        let request = ReplyRequest { schema: SCHEMA, key: entry.key.clone(), reply };
        self.bus.reply(&request).await.unwrap()
    }

    pub async fn answer(&self, entry: &Entry, answer: Answer) -> ReplyResponse {
        let prompt = entry.question.prompts[0].id.clone();
        self.reply(entry, "r1", ReplyContent::Answers { answers: [(prompt, answer)].into() }).await
    }

    pub async fn answer_secret(&self, entry: &Entry, secret: &str) -> ReplyResponse {
        let sealed = self.seal.seal(secret, &entry.key, "r1").unwrap();
        self.answer(entry, Answer::Sealed(sealed)).await
    }

    /// What a run has put out so far.
    pub async fn output(&self, session: &str, run: &str) -> Vec<RunItem> {
        let session = SessionKey::new(GATEWAY, session);
        let items = self.bus.replay_runs(&session, 0).await.unwrap();
        items.into_iter().map(|delivery| delivery.item).filter(|item| item.run == run).collect()
    }

    /// Waits until a run has put out something, and returns all it has put out by then.
    pub async fn put_out(
        &self,
        session: &str,
        run: &str,
        what: &str,
        condition: impl Fn(&RunEvent) -> bool,
    ) -> Vec<RunItem> {
        until(what, async || {
            let items = self.output(session, run).await;
            items.iter().any(|item| condition(&item.what)).then_some(items)
        })
        .await
    }

    /// Waits until a run has ended, and returns all it has put out.
    pub async fn ended(&self, session: &str, run: &str) -> Vec<RunItem> {
        self.put_out(session, run, "the end of the run", |what| matches!(what, RunEvent::Ended { .. })).await
    }
}

/// The text that was streamed, piece by piece.
pub fn streamed(items: &[RunItem]) -> String {
    let text = items.iter().filter_map(|item| match &item.what {
        RunEvent::Text { text } => Some(text.as_str()),
        _ => None,
    });
    text.collect()
}

async fn connect(url: String) -> Bus {
    Bus::connect(BusOptions { url, name: "test".into(), ..Default::default() }).await.unwrap()
}
