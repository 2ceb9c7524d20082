//! The scripted Gateway, as a client of the protocol sees it.

use std::collections::VecDeque;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ed25519_dalek::{Signer, SigningKey};
use futures::{SinkExt, StreamExt};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use testkit::gateway::{Fault, GatewayOptions, Rejection, ScriptedGateway};
use tokio::net::TcpStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::{MaybeTlsStream, WebSocketStream};

const SOON: Duration = Duration::from_secs(20);
const SESSION: &str = "agent:main:test";
const ASK: &str = r#"CALL ask_user {"questions":[{"id":"color","header":"Color","question":"Which?","options":[{"label":"Red"},{"label":"Blue","description":"cold"}]}]}"#;

struct Client {
    socket: WebSocketStream<MaybeTlsStream<TcpStream>>,
    /// What came and was not looked at yet.
    frames: VecDeque<Value>,
    sent: u32,
}

impl Client {
    async fn open(gateway: &ScriptedGateway) -> (Self, Value) {
        let (socket, _) = tokio_tungstenite::connect_async(gateway.url()).await.unwrap();
        let mut client = Self { socket, frames: VecDeque::new(), sent: 0 };
        let challenge = client.next().await.unwrap();
        assert_eq!(challenge["event"], "connect.challenge");
        (client, challenge["payload"].clone())
    }

    async fn connect(gateway: &ScriptedGateway) -> Self {
        let (mut client, _) = Self::open(gateway).await;
        let hello = client.request("connect", hello(gateway)).await;
        assert_eq!(hello["ok"], true, "{hello}");
        client
    }

    /// The next frame from the wire; none when the connection has ended.
    async fn next(&mut self) -> Option<Value> {
        loop {
            let message = tokio::time::timeout(SOON, self.socket.next()).await.expect("a frame");
            match message? {
                Ok(Message::Text(text)) => return Some(serde_json::from_str(&text).unwrap()),
                Ok(Message::Close(_)) | Err(_) => return None,
                Ok(_) => {}
            }
        }
    }

    async fn send(&mut self, method: &str, params: Value) -> String {
        self.sent += 1;
        let id = self.sent.to_string();
        let frame = json!({"type": "req", "id": id, "method": method, "params": params});
        self.socket.send(Message::text(frame.to_string())).await.unwrap();
        id
    }

    async fn response(&mut self, id: &str) -> Value {
        loop {
            let frame = self.next().await.expect("a response");
            if frame["type"] == "res" && frame["id"] == id {
                return frame;
            }
            self.frames.push_back(frame);
        }
    }

    /// The response; events that came before it stay to be looked at.
    async fn request(&mut self, method: &str, params: Value) -> Value {
        let id = self.send(method, params).await;
        self.response(&id).await
    }

    async fn ok(&mut self, method: &str, params: Value) -> Value {
        let response = self.request(method, params).await;
        assert_eq!(response["ok"], true, "{method}: {response}");
        response["payload"].clone()
    }

    async fn refused(&mut self, method: &str, params: Value) -> Value {
        let response = self.request(method, params).await;
        assert_eq!(response["ok"], false, "{method}: {response}");
        response["error"].clone()
    }

    /// All events up to the first that fits, that one included.
    async fn events_until(&mut self, fits: impl Fn(&Value) -> bool) -> Vec<Value> {
        let mut events = Vec::new();
        loop {
            let frame = match self.frames.pop_front() {
                Some(frame) => frame,
                None => self.next().await.expect("an event"),
            };
            if frame["type"] == "event" {
                events.push(frame.clone());
                if fits(&frame) {
                    return events;
                }
            }
        }
    }

    async fn event(&mut self, fits: impl Fn(&Value) -> bool) -> Value {
        self.events_until(fits).await.pop().unwrap()["payload"].clone()
    }

    async fn asked(&mut self) -> Value {
        self.event(|frame| frame["event"] == "question.requested").await
    }

    async fn said(&mut self, run: &str) -> String {
        let message = self.event(|frame| ends(frame, run)).await["message"].clone();
        message["content"][0]["text"].as_str().unwrap_or("<nothing>").to_owned()
    }

    async fn chat(&mut self, key: &str, message: &str) -> Value {
        let params = json!({"sessionKey": SESSION, "message": message, "idempotencyKey": key});
        self.ok("chat.send", params).await
    }

    async fn chat_with(&mut self, key: &str, message: &str, mode: &str) -> Value {
        let params = json!({"sessionKey": SESSION, "message": message, "idempotencyKey": key,
            "queueMode": mode});
        self.ok("chat.send", params).await
    }
}

fn hello(gateway: &ScriptedGateway) -> Value {
    json!({"minProtocol": 4, "maxProtocol": 4,
        "client": {"id": "gateway-client", "mode": "backend", "version": "1", "platform": "linux"},
        "role": "operator",
        "scopes": ["operator.read", "operator.write", "operator.questions"],
        "caps": ["tool-events"], "auth": {"token": gateway.token()}})
}

fn ends(frame: &Value, run: &str) -> bool {
    let state = frame["payload"]["state"].as_str().unwrap_or_default();
    frame["event"] == "chat"
        && frame["payload"]["runId"] == run
        && ["final", "aborted", "error"].contains(&state)
}

/// What a frame is, in one word.
fn kind(frame: &Value) -> String {
    let payload = &frame["payload"];
    match frame["event"].as_str().unwrap() {
        "chat" => format!("chat {}", payload["state"].as_str().unwrap()),
        "agent" | "session.tool" => {
            let stream = payload["stream"].as_str().unwrap();
            let phase = payload["data"]["phase"].as_str().unwrap_or_default();
            let event = if frame["event"] == "agent" { "" } else { "session." };
            format!("{event}{stream} {phase}").trim().to_owned()
        }
        other => other.to_owned(),
    }
}

fn kinds(frames: &[Value]) -> Vec<String> {
    frames.iter().map(kind).collect()
}

async fn start() -> ScriptedGateway {
    ScriptedGateway::start(GatewayOptions::default()).await.unwrap()
}

#[tokio::test]
async fn refuses_a_connect_as_the_real_one_does() {
    let gateway = start().await;
    let changed = |name: &str, value: Value| {
        let mut hello = hello(&gateway);
        hello[name] = value;
        hello
    };
    let client = |id: &str| json!({"id": id, "mode": "cli", "version": "1", "platform": "linux"});
    let cases = [
        (changed("auth", json!({"token": "no"})), "AUTH_TOKEN_MISMATCH", "token mismatch"),
        (changed("auth", json!({})), "DEVICE_IDENTITY_REQUIRED", "device identity required"),
        (changed("client", client("askbus")), "", "at /client/id"),
        (changed("more", json!(1)), "", "unexpected property 'more'"),
        (changed("maxProtocol", json!(3)), "PROTOCOL_MISMATCH", "protocol mismatch"),
    ];
    for (params, code, message) in cases {
        let (mut client, _) = Client::open(&gateway).await;
        let error = client.refused("connect", params).await;
        assert_eq!(error["details"]["code"].as_str().unwrap_or_default(), code, "{error}");
        assert!(error["message"].as_str().unwrap().contains(message), "{error}");
        assert!(client.next().await.is_none());
    }
    let (mut client, _) = Client::open(&gateway).await;
    let error = client.refused("question.list", json!({})).await;
    assert_eq!(error["message"], "invalid handshake: first request must be connect");
}

#[tokio::test]
async fn a_client_that_is_not_local_has_no_scopes_and_is_not_told() {
    let gateway = start().await;
    let (mut client, _) = Client::open(&gateway).await;
    let mut params = hello(&gateway);
    params["client"]["mode"] = "cli".into();
    let hello = client.ok("connect", params).await;
    assert_eq!(hello["auth"]["scopes"], json!([]));
    let error = client.refused("question.list", json!({})).await;
    assert_eq!(error["code"], "FORBIDDEN");
    assert_eq!(error["details"]["missingScope"], "operator.questions");
}

fn device(key: &SigningKey, params: &Value, challenge: &Value, token: &str) -> Value {
    let public = key.verifying_key().to_bytes();
    let id = hex::encode(Sha256::digest(public));
    let scopes: Vec<&str> =
        params["scopes"].as_array().unwrap().iter().map(|scope| scope.as_str().unwrap()).collect();
    let payload = format!(
        "v3|{id}|{}|{}|operator|{}|{}|{token}|{}|linux|",
        params["client"]["id"].as_str().unwrap(),
        params["client"]["mode"].as_str().unwrap(),
        scopes.join(","),
        challenge["ts"],
        challenge["nonce"].as_str().unwrap(),
    );
    json!({"id": id, "publicKey": URL_SAFE_NO_PAD.encode(public),
        "signature": URL_SAFE_NO_PAD.encode(key.sign(payload.as_bytes()).to_bytes()),
        "signedAt": challenge["ts"], "nonce": challenge["nonce"]})
}

#[tokio::test]
async fn a_device_connects_once_it_is_approved_and_later_by_its_own_token() {
    let gateway =
        ScriptedGateway::start(GatewayOptions { needs_approval: true, ..GatewayOptions::default() })
            .await
            .unwrap();
    let key = SigningKey::from_bytes(&[7; 32]);
    let signed = async |auth: Value| {
        let (mut client, challenge) = Client::open(&gateway).await;
        let mut params = hello(&gateway);
        let token = auth["token"].as_str().or(auth["deviceToken"].as_str()).unwrap().to_owned();
        params["auth"] = auth;
        params["device"] = device(&key, &params, &challenge, &token);
        client.request("connect", params).await
    };
    let by_token = json!({"token": gateway.token()});

    let refused = signed(by_token.clone()).await;
    assert_eq!(refused["error"]["details"]["code"], "PAIRING_REQUIRED");
    assert!(refused["error"]["details"]["requestId"].is_string());
    gateway.approve_devices();
    let hello_ok = signed(by_token).await;
    assert_eq!(hello_ok["payload"]["auth"]["scopes"][0], "operator.read");
    let token = hello_ok["payload"]["auth"]["deviceToken"].clone();
    let again = signed(json!({"deviceToken": token})).await;
    assert_eq!(again["payload"]["auth"]["method"], "device-token");

    let (mut client, challenge) = Client::open(&gateway).await;
    let mut params = hello(&gateway);
    params["device"] = device(&key, &params, &challenge, "another token");
    let error = client.refused("connect", params).await;
    assert_eq!(error["details"]["code"], "DEVICE_AUTH_SIGNATURE_INVALID");
}

#[tokio::test]
async fn a_message_is_echoed_with_the_events_of_a_real_run() {
    let gateway = start().await;
    let mut client = Client::connect(&gateway).await;
    assert_eq!(client.chat("k", "hello there").await, json!({"runId": "k", "status": "started"}));
    let events = client.events_until(|frame| ends(frame, "k")).await;
    let (deltas, others): (Vec<Value>, Vec<Value>) =
        events.iter().cloned().partition(|frame| kind(frame) == "chat delta");
    let deltas: String = deltas.iter().map(|frame| frame["payload"]["deltaText"].as_str().unwrap()).collect();
    assert_eq!(deltas, "echo: hello there");
    assert_eq!(
        kinds(&others),
        [
            "chat status",
            "run_status preparing_workspace",
            "chat status",
            "run_status preparing_context",
            "lifecycle start",
            "chat status",
            "run_status starting_model",
            "lifecycle model",
            "assistant",
            "assistant",
            "assistant",
            "usage",
            "lifecycle finishing",
            "lifecycle model",
            "lifecycle end",
            "chat final",
        ]
    );
    let numbers: Vec<u64> = events.iter().map(|event| event["seq"].as_u64().unwrap()).collect();
    assert!(numbers.windows(2).all(|pair| pair[1] == pair[0] + 1), "{numbers:?}");
    let last = &events.last().unwrap()["payload"];
    assert_eq!(last["message"]["content"][0]["text"], "echo: hello there");

    assert_eq!(client.chat("k", "hello there").await, json!({"runId": "k", "status": "ok"}));
    let history = client.ok("chat.history", json!({"sessionKey": SESSION, "limit": 10})).await;
    let rows = history["messages"].as_array().unwrap();
    assert_eq!(rows.len(), 2);
    assert_eq!(rows[0]["idempotencyKey"], "k:user");
    assert_eq!(rows[1]["__openclaw"]["runId"], "k");
    assert_eq!(history["sessionInfo"]["hasActiveRun"], false);
}

#[tokio::test]
async fn a_native_question_is_answered_by_another_connection() {
    let gateway = start().await;
    let mut sender = Client::connect(&gateway).await;
    let mut other = Client::connect(&gateway).await;
    other.ok("sessions.subscribe", json!({})).await;
    sender.chat("k", ASK).await;
    let question = other.asked().await;
    let id = question["id"].clone();
    let call = other.ok("chat.history", json!({"sessionKey": SESSION})).await["inFlightRun"]
        ["events"][2]["data"]["toolCallId"]
        .as_str()
        .unwrap()
        .to_owned();
    let hash = hex::encode(Sha256::digest(format!("k\0{call}")));
    assert_eq!(id, format!("ask_{}", &hash[..32]));
    assert_eq!(question["questions"][0]["isOther"], true);
    assert_eq!(question["runId"], "k");
    let left = question["expiresAtMs"].as_u64().unwrap() - question["createdAtMs"].as_u64().unwrap();
    assert_eq!(left, 900_000);

    let refusals = [
        (json!({"color": []}), "question 'color' requires an answer"),
        (json!({"nope": ["x"]}), "question 'nope' is not part of this request"),
        (json!({"color": ["a", "b"]}), "question 'color' does not allow multiple answers"),
        (json!({"color": [" "]}), "question 'color' contains an empty answer"),
    ];
    for (answers, message) in refusals {
        let params = json!({"id": id, "answers": {"answers": answers}});
        let error = other.refused("question.resolve", params).await;
        assert_eq!(error["message"], message);
        assert_eq!(error["details"]["reason"], "QUESTION_INVALID_ANSWER");
    }
    let pending = other.ok("question.waitAnswer", json!({"id": id, "timeoutMs": 1})).await;
    assert_eq!(pending, json!({"status": "pending"}));
    let waits = json!({"id": id, "includeResolutionId": true});
    let waiting = sender.send("question.waitAnswer", waits.clone()).await;

    let resolve = json!({"id": id, "answers": {"answers": {"color": ["Blue"]}},
        "resolvedBy": "open-webui:alice", "resolutionId": "r-1"});
    let answered = json!({"status": "answered", "answers": {"answers": {"color": ["Blue"]}}});
    assert_eq!(other.ok("question.resolve", resolve.clone()).await, answered);
    let mut with_id = answered.clone();
    with_id["resolutionId"] = "r-1".into();
    assert_eq!(sender.response(&waiting).await["payload"], with_id);

    let events = other.events_until(|frame| ends(frame, "k")).await;
    let result = events.iter().position(|frame| kind(frame) == "session.tool result").unwrap();
    assert_eq!(kinds(&events[result..=result + 2]), ["session.tool result", "item end", "question.resolved"]);
    let text = events[result]["payload"]["data"]["result"]["content"][0]["text"].clone();
    assert!(text.as_str().unwrap().starts_with("Color: Blue\n\n{\n  \""), "{text}");
    let own = sender.events_until(|frame| ends(frame, "k")).await;
    assert!(kinds(&own).contains(&"tool start".to_owned()));
    assert!(!kinds(&own).contains(&"session.tool start".to_owned()));

    let error = other.refused("question.resolve", resolve).await;
    assert_eq!(error["details"]["reason"], "QUESTION_ALREADY_TERMINAL");
    let record = other.ok("question.get", json!({"id": id})).await["question"].clone();
    assert_eq!(record["resolvedBy"], "open-webui:alice");
    assert_eq!(other.ok("question.list", json!({})).await, json!({"questions": []}));
    let outcomes = gateway.outcomes();
    assert_eq!(outcomes[0].details, answered);
    assert_eq!(outcomes[0].call_id, call);
}

#[tokio::test]
async fn a_settled_question_is_forgotten_after_a_while() {
    let gateway = ScriptedGateway::start(GatewayOptions {
        keep_settled: Duration::from_millis(1),
        ask_user_at_least: Duration::from_millis(1),
        ..GatewayOptions::default()
    })
    .await
    .unwrap();
    let mut client = Client::connect(&gateway).await;
    let soon = ASK.replace("}]}]}", "}]}],\"timeoutSeconds\":0.02}");
    client.chat("k", &soon).await;
    let id = client.asked().await["id"].clone();
    let resolved = client.event(|frame| frame["event"] == "question.resolved").await;
    assert_eq!(resolved, json!({"id": id, "status": "expired"}));
    assert!(gateway.until(|gateway| gateway.questions().is_empty(), SOON).await);
    let error = client.refused("question.get", json!({"id": id})).await;
    assert_eq!(error["details"]["reason"], "QUESTION_NOT_FOUND");
    assert!(gateway.outcomes()[0].text.starts_with("No answer arrived; proceed"));
}

#[tokio::test]
async fn a_message_answers_a_pending_question_whatever_its_queue_mode() {
    for mode in ["steer", "followup", "collect"] {
        let gateway = start().await;
        let mut client = Client::connect(&gateway).await;
        client.chat("k", ASK).await;
        client.asked().await;
        client.chat_with("m", "2", mode).await;
        let events = client.events_until(|frame| ends(frame, "m")).await;
        assert_eq!(kind(&events[events.len() - 2]), "question.resolved");
        assert!(events.last().unwrap()["payload"].get("message").is_none());
        assert!(client.said("k").await.starts_with("tool said: Color: Blue"));
        let keys: Vec<Value> = gateway.transcript(SESSION).iter().map(|r| r["role"].clone()).collect();
        assert!(keys.contains(&json!("toolResult")));
    }
}

#[tokio::test]
async fn a_form_is_not_answered_by_half_a_message() {
    let gateway = start().await;
    let mut client = Client::connect(&gateway).await;
    let form = ASK.replace(
        "}]}]}",
        r#"}]},{"id":"size","header":"Size","question":"Size?","options":[{"label":"S"},{"label":"L"}]}]}"#,
    );
    client.chat("k", &form).await;
    let id = client.asked().await["id"].clone();
    client.chat("m", "Red").await;
    let error = client.event(|frame| ends(frame, "m")).await;
    let message = error["errorMessage"].as_str().unwrap();
    assert!(message.contains("question 'size' requires an answer"), "{message}");
    let record = client.ok("question.get", json!({"id": id})).await["question"].clone();
    assert_eq!(record["status"], "pending");
}

#[tokio::test]
async fn the_agent_method_and_commands_leave_a_question_alone() {
    let gateway = start().await;
    let mut client = Client::connect(&gateway).await;
    client.chat("k", ASK).await;
    let id = client.asked().await["id"].clone();
    let params = json!({"sessionKey": SESSION, "message": "later", "idempotencyKey": "a"});
    let request = client.send("agent", params).await;
    assert_eq!(client.response(&request).await["payload"]["status"], "accepted");
    client.chat("s", "/status").await;
    assert!(client.said("s").await.contains("all is well"));
    assert_eq!(gateway.questions()[0]["status"], "pending");

    client.ok("question.resolve", json!({"id": id, "cancel": true})).await;
    assert!(client.said("k").await.contains("The question was cancelled"));
    let events = client.events_until(|frame| ends(frame, "a")).await;
    assert_eq!(kind(&events[0]), "lifecycle start");
    let done = client.response(&request).await;
    assert_eq!(done["payload"]["result"]["payloads"][0]["text"], "echo: later");
}

#[tokio::test]
async fn an_abort_cancels_the_question_and_leaves_no_result() {
    let gateway = start().await;
    let mut client = Client::connect(&gateway).await;
    client.chat("k", ASK).await;
    let id = client.asked().await["id"].clone();
    let aborted = client.ok("chat.abort", json!({"sessionKey": SESSION, "runId": "k"})).await;
    assert_eq!(aborted, json!({"ok": true, "aborted": true, "runIds": ["k"]}));
    let events = client.events_until(|frame| frame["event"] == "question.resolved").await;
    assert_eq!(
        kinds(&events),
        [
            "chat aborted",
            "lifecycle end",
            "tool result",
            "item end",
            "lifecycle model",
            "lifecycle error",
            "question.resolved"
        ]
    );
    assert_eq!(events[6]["payload"], json!({"id": id, "status": "cancelled"}));
    let record = client.ok("question.get", json!({"id": id})).await["question"].clone();
    assert_eq!(record["resolvedBy"], "requester-inactive");
    let idle = client.ok("chat.abort", json!({"sessionKey": SESSION})).await;
    assert_eq!(idle, json!({"ok": true, "aborted": false, "runIds": []}));
    let roles: Vec<Value> = gateway.transcript(SESSION).iter().map(|r| r["role"].clone()).collect();
    assert_eq!(roles, ["user", "assistant"]);

    client.chat("k2", ASK).await;
    client.asked().await;
    let stopped = client.chat("k3", "/stop").await;
    assert_eq!(stopped, json!({"ok": true, "aborted": true, "runIds": ["k2"]}));
    client.event(|frame| ends(frame, "k2")).await;
    client.chat("k4", "and now").await;
    assert_eq!(client.said("k4").await, "echo: and now");
}

#[tokio::test]
async fn messages_into_a_run_are_steered_queued_collected_or_interrupt_it() {
    let gateway = ScriptedGateway::start(GatewayOptions {
        tools_by_hand: vec!["wait".into()],
        ..GatewayOptions::default()
    })
    .await
    .unwrap();
    let mut client = Client::connect(&gateway).await;
    let waits = async |client: &mut Client, key: &str| {
        client.chat(key, "CALL wait {}").await;
        let started = |frame: &Value| kind(frame) == "tool start";
        let call = client.event(started).await["data"]["toolCallId"].clone();
        let here = |gateway: &ScriptedGateway| !gateway.calls_by_hand().is_empty();
        assert!(gateway.until(here, SOON).await);
        call.as_str().unwrap().to_owned()
    };
    let finish = |call: &str| assert!(gateway.finish_call(call, "done", json!({}), false));

    let call = waits(&mut client, "k").await;
    client.chat("steered", "a joke").await;
    client.chat_with("after", "one", "followup").await;
    assert_eq!(client.said("after").await, "<nothing>");
    finish(&call);
    assert_eq!(client.said("steered").await, "<nothing>");
    assert_eq!(client.said("k").await, "tool said: done\necho: a joke");
    let queued = |frame: &Value| frame["payload"]["state"] == "final";
    let queued = client.event(queued).await;
    assert_eq!(queued["message"]["content"][0]["text"], "echo: one");
    assert_ne!(queued["runId"], "after");

    let call = waits(&mut client, "k2").await;
    client.chat_with("c1", "one", "collect").await;
    client.chat_with("c2", "two", "collect").await;
    finish(&call);
    client.said("k2").await;
    let collected = client.event(|frame| frame["payload"]["state"] == "final").await;
    let text = collected["message"]["content"][0]["text"].as_str().unwrap();
    assert!(text.contains("Queued #1\none\n\n---\nQueued #2\ntwo"), "{text}");

    waits(&mut client, "k3").await;
    let answer = client.chat_with("now", "stop that", "interrupt").await;
    assert_eq!(answer["interruptedActiveRun"], true);
    let ended = client.event(|frame| ends(frame, "k3")).await;
    assert_eq!(ended["state"], "aborted");
    assert_eq!(client.said("now").await, "echo: stop that");
}

#[tokio::test]
async fn calls_run_side_by_side_and_steps_one_after_another() {
    let gateway = start().await;
    let mut client = Client::connect(&gateway).await;
    client.chat("k", &format!("{ASK} CALL nope {{}} THEN {ASK} THEN bye")).await;
    let first = client.asked().await["id"].clone();
    let not_found = gateway.wait_for(|outcomes| outcomes.len() == 1, SOON).await.unwrap();
    assert_eq!(not_found[0].text, "Tool nope not found");
    gateway.answer_locally(first.as_str().unwrap(), &json!({"color": ["Red"]})).unwrap();
    let second = client.asked().await["id"].clone();
    assert_ne!(first, second);
    gateway.answer_locally(second.as_str().unwrap(), &json!({"color": ["my own"]})).unwrap();
    let said = client.said("k").await;
    let answers: Vec<&str> = said.lines().filter(|line| line.starts_with("tool said")).collect();
    assert_eq!(
        answers,
        ["tool said: Color: Red", "tool said: Tool nope not found", "tool said: Color: my own"]
    );
    assert!(said.ends_with("bye"), "{said}");
}

#[tokio::test]
async fn one_session_has_one_question_of_its_own_at_a_time() {
    let gateway = start().await;
    let mut client = Client::connect(&gateway).await;
    client.chat("k", &format!("{ASK} {ASK}")).await;
    client.asked().await;
    let outcomes = gateway.wait_for(|outcomes| outcomes.len() == 1, SOON).await.unwrap();
    assert_eq!(outcomes[0].text, "ask_user already has a pending question for this session");
    assert!(outcomes[0].is_error);
}

#[tokio::test]
async fn a_restart_forgets_questions_and_keys_but_not_the_transcript() {
    let gateway = ScriptedGateway::start(GatewayOptions { asks_again: true, ..GatewayOptions::default() })
        .await
        .unwrap();
    let mut client = Client::connect(&gateway).await;
    client.chat("k0", "hi").await;
    client.said("k0").await;
    client.chat("k", ASK).await;
    let lost = client.asked().await["id"].clone();
    let boot = gateway.boot_id();

    gateway.kill();
    while client.next().await.is_some() {}
    assert!(TcpStream::connect(gateway.url().replace("ws://", "")).await.is_err());
    gateway.start_again().await.unwrap();

    let (mut client, _) = Client::open(&gateway).await;
    let hello = client.ok("connect", hello(&gateway)).await;
    assert_ne!(hello["server"]["bootId"], boot);
    let error = client.refused("question.get", json!({"id": lost})).await;
    assert_eq!(error["details"]["reason"], "QUESTION_NOT_FOUND");
    let history = client.ok("chat.history", json!({"sessionKey": SESSION})).await;
    assert_eq!(history["messages"][0]["idempotencyKey"], "k0:user");
    assert!(gateway.until(|gateway| gateway.questions().len() == 1, SOON).await);
    let again = client.ok("question.list", json!({})).await["questions"][0].clone();
    assert_ne!(again["id"], lost);
    assert_ne!(again["runId"], "k");
    assert_eq!(again["sessionKey"], SESSION);
    let params = json!({"sessionKey": "agent:main:other", "message": "hi", "idempotencyKey": "k0"});
    assert_eq!(client.ok("chat.send", params).await["status"], "started");
}

#[tokio::test]
async fn a_drain_lets_questions_be_answered_and_nobody_in() {
    let gateway = start().await;
    let mut client = Client::connect(&gateway).await;
    client.chat("k", ASK).await;
    let id = client.asked().await["id"].clone();
    gateway.drain();
    assert!(tokio_tungstenite::connect_async(gateway.url()).await.is_err());
    let error = client.refused("question.list", json!({})).await;
    assert_eq!(error["code"], "UNAVAILABLE");
    client.ok("question.resolve", json!({"id": id, "answers": {"answers": {"color": ["Red"]}}})).await;
    assert!(client.said("k").await.starts_with("tool said: Color: Red"));
    gateway.finish_drain();
    client.event(|frame| frame["event"] == "shutdown").await;
    assert!(client.next().await.is_none());
    gateway.start_again().await.unwrap();
    Client::connect(&gateway).await;
}

#[tokio::test]
async fn faults_hit_the_next_request_of_their_method_once() {
    let gateway = start().await;
    gateway.fault("connect", Fault::Refuse(Rejection::starting()));
    let (mut early, _) = Client::open(&gateway).await;
    let error = early.refused("connect", hello(&gateway)).await;
    assert_eq!((&error["retryable"], &error["retryAfterMs"]), (&json!(true), &json!(500)));

    let mut client = Client::connect(&gateway).await;
    gateway.fault("chat.send", Fault::LoseResponse);
    let params = json!({"sessionKey": SESSION, "message": "hi", "idempotencyKey": "k"});
    client.send("chat.send", params.clone()).await;
    while let Some(frame) = client.next().await {
        assert_ne!(frame["type"], "res");
    }
    let mut client = Client::connect(&gateway).await;
    let again = client.ok("chat.send", params).await["status"].clone();
    assert!(again == "ok" || again == "in_flight", "{again}");
    let methods: Vec<String> = gateway.requests().into_iter().map(|r| r.method).collect();
    assert_eq!(methods, ["chat.send", "chat.send"]);

    gateway.drop_connections();
    assert!(client.next().await.is_none());
}

#[tokio::test]
async fn questions_from_outside_are_told_to_everybody() {
    let gateway = start().await;
    let mut client = Client::connect(&gateway).await;
    let name = json!({"questionId": "name", "header": "Name", "question": "?", "options": []});
    let params = json!({"id": "ext", "questions": [name], "sessionKey": SESSION, "timeoutMs": 60_000});
    client.ok("question.request", params.clone()).await;
    assert_eq!(client.asked().await["id"], "ext");
    let error = client.refused("question.request", params).await;
    assert_eq!(error["details"]["reason"], "QUESTION_ID_IN_USE");
    client.ok("question.resolve", json!({"id": "ext", "answers": {"answers": {"name": ["Ann"]}}})).await;
    let resolved = client.event(|frame| frame["event"] == "question.resolved").await;
    assert_eq!(resolved["answers"]["answers"]["name"], json!(["Ann"]));
}
