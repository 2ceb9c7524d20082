//! The kept connection against a Gateway that fails in every way it can.

use std::time::Duration;

use futures::{SinkExt, StreamExt};
use gateway_adapter::openclaw::{
    calls::ChatSend,
    client::{self, GatewayError, Lost, REQUIRED_SCOPES, Request},
    connection::{Connected, Connection, Options, State},
    frames::Event,
    identity::Identity,
};
use serde_json::{Value, json};
use tempfile::TempDir;
use testkit::gateway::{Fault, GatewayOptions, Rejection, ScriptedGateway};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::mpsc,
    time::timeout,
};
use tokio_tungstenite::{WebSocketStream, accept_async, tungstenite::Message};
use tokio_util::sync::{CancellationToken, DropGuard};

const PATIENCE: Duration = Duration::from_secs(30);

struct Kept {
    connection: Connection,
    connections: mpsc::Receiver<Connected>,
    folder: TempDir,
    _stop: DropGuard,
}

impl Kept {
    fn start(url: &str, token: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let stop = CancellationToken::new();
        let options = Options { request: request(url, token), identity: folder.path().join("device.json") };
        let (connection, connections) = Connection::start(options, stop.clone());
        Self { connection, connections, folder, _stop: stop.drop_guard() }
    }

    async fn next(&mut self) -> Connected {
        let next = timeout(PATIENCE, self.connections.recv()).await;
        next.expect("a connection in time").unwrap()
    }

    /// Waits until it is down for a reason that holds `part`; returns the reason.
    async fn down(&self, part: &str) -> String {
        let mut state = self.connection.state();
        let is = |state: &State| matches!(state, State::Down { why } if why.contains(part));
        let state = timeout(PATIENCE, state.wait_for(is)).await;
        match &*state.unwrap_or_else(|_| panic!("never down: {part}")).unwrap() {
            State::Down { why } => why.clone(),
            State::Up(_) => unreachable!(),
        }
    }
}

fn request(url: &str, token: &str) -> Request {
    Request {
        url: url.parse().unwrap(),
        token: Some(token.to_owned()),
        scopes: REQUIRED_SCOPES.map(str::to_owned).to_vec(),
        display_name: "test".to_owned(),
    }
}

async fn scripted(options: GatewayOptions) -> ScriptedGateway {
    ScriptedGateway::start(options).await.unwrap()
}

fn message(text: &str) -> ChatSend {
    ChatSend {
        session_key: "agent:main:test".to_owned(),
        message: text.to_owned(),
        idempotency_key: uuid::Uuid::new_v4().to_string(),
        queue_mode: None,
        attachments: vec![],
    }
}

async fn ended(mut connected: Connected) {
    let drained = async { while connected.events.recv().await.is_some() {} };
    timeout(PATIENCE, drained).await.expect("events end");
}

#[tokio::test]
async fn reconnecting_never_makes_a_second_reader() {
    let gateway = scripted(GatewayOptions::default()).await;
    let mut kept = Kept::start(&gateway.url(), gateway.token());
    for _ in 0..5 {
        let connected = kept.next().await;
        assert_eq!(connected.boot_id, gateway.boot_id());
        assert_eq!(gateway.connections(), 1);
        assert!(kept.connection.client().is_ok());
        gateway.drop_connections();
        ended(connected).await;
    }
    kept.next().await;
    assert_eq!(gateway.connections(), 1);
}

#[tokio::test]
async fn requests_while_it_is_down_say_so_and_a_new_process_has_a_new_boot_id() {
    let gateway = scripted(GatewayOptions::default()).await;
    let mut kept = Kept::start(&gateway.url(), gateway.token());
    let first = kept.next().await;
    let boot_id = first.boot_id.clone();
    let stale = first.client.clone();
    gateway.kill();
    ended(first).await;
    kept.down("can't be reached").await;
    let error = kept.connection.client().err().unwrap();
    assert!(matches!(error, GatewayError::NotReady { .. }), "{error:?}");
    assert!(error.is_retryable() && !error.may_have_happened());
    assert!(error.to_string().contains("can't be reached"), "{error}");
    let error = stale.question_list().await.unwrap_err();
    assert!(matches!(error, GatewayError::NotReady { .. }), "{error:?}");

    gateway.start_again().await.unwrap();
    let second = kept.next().await;
    assert_ne!(second.boot_id, boot_id);
    second.client.question_list().await.unwrap();
}

#[tokio::test]
async fn a_lost_answer_may_have_been_carried_out_a_refused_one_was_not() {
    let gateway = scripted(GatewayOptions::default()).await;
    let opened = client::open(&request(&gateway.url(), gateway.token()), None).await.unwrap();
    gateway.fault("chat.send", Fault::Refuse(Rejection::starting()));
    let error = opened.client.chat_send(&message("hi")).await.unwrap_err();
    assert!(error.is_retryable() && !error.may_have_happened());
    assert_eq!(error.retry_after(), Some(Duration::from_millis(500)));

    gateway.fault("chat.send", Fault::LoseResponse);
    let error = opened.client.chat_send(&message("hi")).await.unwrap_err();
    assert!(matches!(error, GatewayError::Lost { .. }), "{error:?}");
    assert!(error.is_retryable() && error.may_have_happened());
    assert!(matches!(opened.task.await.unwrap(), Lost::Broken(_)));
}

#[tokio::test]
async fn a_late_answer_is_no_answer_and_does_no_harm() {
    let gateway = scripted(GatewayOptions::default()).await;
    let opened = client::open(&request(&gateway.url(), gateway.token()), None).await.unwrap();
    let late = Duration::from_millis(200);
    gateway.fault("agents.list", Fault::Delay(late));
    let within = Duration::from_millis(20);
    let error = opened.client.request_within("agents.list", json!({}), within).await.unwrap_err();
    assert!(matches!(error, GatewayError::Timeout { .. }), "{error:?}");
    assert!(error.may_have_happened());
    gateway.fault("question.list", Fault::Delay(late * 2));
    opened.client.question_list().await.unwrap();
}

#[tokio::test]
async fn a_request_over_the_gateways_limit_is_not_sent() {
    let gateway = scripted(GatewayOptions::default()).await;
    let opened = client::open(&request(&gateway.url(), gateway.token()), None).await.unwrap();
    let limit = opened.client.hello().policy.max_payload;
    let error = opened.client.chat_send(&message(&"x".repeat(limit))).await.unwrap_err();
    assert!(matches!(error, GatewayError::TooLarge { .. }), "{error:?}");
    assert!(!error.is_retryable() && !error.may_have_happened());
    opened.client.agents_list().await.unwrap();
}

#[tokio::test]
async fn a_starting_gateway_is_waited_for() {
    let gateway = scripted(GatewayOptions::default()).await;
    for _ in 0..2 {
        gateway.fault("connect", Fault::Refuse(Rejection::starting()));
    }
    let mut kept = Kept::start(&gateway.url(), gateway.token());
    let why = kept.down("gateway starting").await;
    assert!(!why.contains("adapter.gateway"), "{why}");
    kept.next().await;
}

#[tokio::test]
async fn while_it_drains_the_connection_stays_and_then_the_next_one_is_waited_for() {
    let gateway = scripted(GatewayOptions::default()).await;
    let mut kept = Kept::start(&gateway.url(), gateway.token());
    let mut connected = kept.next().await;
    gateway.drain();
    let error = connected.client.question_list().await.unwrap_err();
    assert!(error.is_retryable(), "{error:?}");
    let refused = client::open(&request(&gateway.url(), gateway.token()), None).await;
    let refused = refused.err().unwrap();
    assert!(refused.is_transient(), "{refused:?}");
    gateway.finish_drain();
    let told = async {
        while let Some(event) = connected.events.recv().await {
            if matches!(event, Event::Shutdown { .. }) {
                return;
            }
        }
        panic!("no shutdown event");
    };
    timeout(PATIENCE, told).await.unwrap();
    kept.down("").await;
    gateway.start_again().await.unwrap();
    kept.next().await;
}

#[tokio::test]
async fn a_wrong_token_names_its_setting() {
    let gateway = scripted(GatewayOptions::default()).await;
    let kept = Kept::start(&gateway.url(), "wrong");
    let why = kept.down("token").await;
    assert!(why.contains("set adapter.gateway.token"), "{why}");
    assert!(!kept.folder.path().join("device.json").exists());
}

#[tokio::test]
async fn a_gateway_that_takes_us_for_a_stranger_gets_a_device_identity() {
    let options = GatewayOptions { needs_approval: true, ..GatewayOptions::default() };
    let gateway = scripted(options).await;
    let mut kept = Kept::start(&gateway.url(), gateway.token());
    kept.down("openclaw devices approve ").await;
    gateway.approve_devices();
    let connected = kept.next().await;
    connected.client.question_list().await.unwrap();
    let identity = Identity::load_or_create(&kept.folder.path().join("device.json")).unwrap();
    assert!(identity.device_token().is_some());
}

#[tokio::test]
async fn scopes_that_stay_empty_are_explained() {
    let options = GatewayOptions { empty_scopes: true, ..GatewayOptions::default() };
    let gateway = scripted(options).await;
    let kept = Kept::start(&gateway.url(), gateway.token());
    let why = kept.down("devices approve").await;
    assert!(why.contains("operator.questions (no question could be seen"), "{why}");
}

#[tokio::test]
async fn what_is_no_gateway_is_told_from_a_gateway_that_is_down() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let server = tokio::spawn(async move {
        let app = axum::Router::new().route("/", axum::routing::get(|| async { "hello" }));
        axum::serve(listener, app).await
    });
    let error = client::open(&request(&url, "t"), None).await.err().unwrap();
    assert!(error.to_string().contains("check adapter.gateway.url"), "{error}");
    assert!(!error.is_transient());
    server.abort();
    let _ = server.await;
    let error = client::open(&request(&url, "t"), None).await.err().unwrap();
    assert!(error.is_transient(), "{error:?}");
    assert!(!error.to_string().contains("adapter.gateway"), "{error}");
}

/// A Gateway of which a test writes every frame.
struct Bare(TcpListener);

impl Bare {
    async fn start() -> Self {
        Self(TcpListener::bind("127.0.0.1:0").await.unwrap())
    }

    fn url(&self) -> String {
        self.0.local_addr().unwrap().to_string()
    }

    /// Takes the next connection and greets it.
    async fn accept(&self, tick_ms: u64) -> WebSocketStream<TcpStream> {
        let (stream, _) = timeout(PATIENCE, self.0.accept()).await.unwrap().unwrap();
        let mut socket = accept_async(stream).await.unwrap();
        let challenge = json!({"nonce": "n", "ts": 1});
        event(&mut socket, "connect.challenge", &challenge, None).await;
        let connect: Value = match socket.next().await.unwrap().unwrap() {
            Message::Text(text) => serde_json::from_str(&text).unwrap(),
            other => panic!("{other:?}"),
        };
        let hello = json!({"protocol": 4, "server": {"bootId": "b"},
            "auth": {"scopes": connect["params"]["scopes"]},
            "policy": {"maxPayload": 1000, "tickIntervalMs": tick_ms}});
        send(&mut socket, &json!({"type": "res", "id": connect["id"], "ok": true, "payload": hello})).await;
        socket
    }
}

async fn send(socket: &mut WebSocketStream<TcpStream>, frame: &Value) {
    // The client may have left already.
    let _ = socket.send(Message::text(frame.to_string())).await;
}

async fn event(socket: &mut WebSocketStream<TcpStream>, name: &str, payload: &Value, seq: Option<u64>) {
    let mut frame = json!({"type": "event", "event": name, "payload": payload});
    if let Some(seq) = seq {
        frame["seq"] = json!(seq);
    }
    send(socket, &frame).await;
}

#[tokio::test]
async fn a_consumer_that_lags_gets_a_new_connection_instead_of_a_hole() {
    let gateway = Bare::start().await;
    let mut kept = Kept::start(&gateway.url(), "t");
    let mut socket = gateway.accept(30_000).await;
    let mut slow = kept.next().await;
    for seq in 1..=10_000 {
        event(&mut socket, "noise", &json!({}), Some(seq)).await;
    }
    kept.down("faster than they were handled").await;
    let mut seen = 0;
    while slow.events.recv().await.is_some() {
        seen += 1;
    }
    assert!(seen < 10_000, "what is delivered is in order and without a hole");
    gateway.accept(30_000).await;
    kept.next().await;
}

#[tokio::test]
async fn a_hole_in_the_numbers_ends_the_connection() {
    let gateway = Bare::start().await;
    let mut kept = Kept::start(&gateway.url(), "t");
    let mut socket = gateway.accept(30_000).await;
    let mut connected = kept.next().await;
    event(&mut socket, "one", &json!({}), Some(7)).await;
    event(&mut socket, "untold", &json!({}), None).await;
    event(&mut socket, "two", &json!({}), Some(8)).await;
    event(&mut socket, "four", &json!({}), Some(10)).await;
    let mut names = Vec::new();
    while let Some(event) = connected.events.recv().await {
        match event {
            Event::Raw { name, .. } => names.push(name),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(names, ["one", "untold", "two"]);
    kept.down("event 9 is missing, 10 came instead").await;
}

#[tokio::test]
async fn silence_ends_the_connection_and_ticks_keep_it() {
    let gateway = Bare::start().await;
    let mut kept = Kept::start(&gateway.url(), "t");
    let mut socket = gateway.accept(1000).await;
    let connected = kept.next().await;
    for _ in 0..3 {
        event(&mut socket, "tick", &json!({}), None).await;
    }
    assert!(!connected.client.is_closed());
    ended(connected).await;
    kept.down("nothing heard for 2 s").await;
}

#[tokio::test]
async fn frames_that_can_not_be_read_are_left_out() {
    let gateway = Bare::start().await;
    let mut kept = Kept::start(&gateway.url(), "t");
    let mut socket = gateway.accept(30_000).await;
    let mut connected = kept.next().await;
    socket.send(Message::text("no json")).await.unwrap();
    socket.send(Message::binary(vec![1, 2])).await.unwrap();
    send(&mut socket, &json!({"type": "new", "x": 1})).await;
    send(&mut socket, &json!({"type": "res", "id": "unasked", "ok": true})).await;
    event(&mut socket, "after", &json!({"x": 1}), None).await;
    let next = timeout(PATIENCE, connected.events.recv()).await.unwrap();
    let after = Event::Raw { name: "after".to_owned(), payload: json!({"x": 1}) };
    assert_eq!(next, Some(after));
}

#[tokio::test]
async fn stopping_says_goodbye_and_leaves_nothing_behind() {
    let gateway = scripted(GatewayOptions::default()).await;
    let mut kept = Kept::start(&gateway.url(), gateway.token());
    let connected = kept.next().await;
    let Kept { connection, _stop, .. } = kept;
    drop(_stop);
    ended(connected).await;
    assert!(gateway.until(|g| g.connections() == 0, PATIENCE).await);
    let mut state = connection.state();
    let stopped = |state: &State| matches!(state, State::Down { why } if why == "stopped");
    timeout(PATIENCE, state.wait_for(stopped)).await.unwrap().unwrap();
}
