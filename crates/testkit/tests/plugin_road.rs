//! The tool `request_user_input` of the scripted Gateway against a service that misbehaves.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use testkit::gateway::{GatewayOptions, PluginEndpoint, ScriptedGateway};
use tokio::sync::watch;

const SOON: Duration = Duration::from_secs(20);
const SESSION: &str = "agent:main:test";
const CALL: &str = r#"CALL request_user_input {"question":"Where?","choices":["A","B"]}"#;

/// What the service answers to each POST of a call, in order; the last one for ever.
#[derive(Clone)]
struct Service(Arc<Inner>);

struct Inner {
    answers: Mutex<Vec<Answer>>,
    requests: watch::Sender<Vec<(String, String, Value)>>,
}

#[derive(Clone)]
enum Answer {
    Status(u16, Value),
    /// Line feeds and then nothing, with the connection closed.
    Broken,
    /// Line feeds for ever.
    Thinking,
}

async fn serve(State(service): State<Service>, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let authorized = parts.headers["authorization"] == "Bearer plugin-token";
    let body = axum::body::to_bytes(body, 1 << 20).await.unwrap();
    let body = serde_json::from_slice(&body).unwrap_or_default();
    let path = parts.uri.path().to_owned();
    let is_call = parts.method == "POST" && !path.ends_with("/ack");
    let request = (parts.method.to_string(), path, body);
    service.0.requests.send_modify(|requests| requests.push(request));
    if !authorized {
        return StatusCode::UNAUTHORIZED.into_response();
    }
    if !is_call {
        return StatusCode::NO_CONTENT.into_response();
    }
    let answer = {
        let mut answers = service.0.answers.lock().unwrap();
        if answers.len() > 1 { answers.remove(0) } else { answers[0].clone() }
    };
    match answer {
        Answer::Status(status, body) => {
            let status = StatusCode::from_u16(status).unwrap();
            (status, format!("\n\n{body}")).into_response()
        }
        Answer::Broken => "\n\n".into_response(),
        Answer::Thinking => {
            let feeds = futures::stream::repeat_with(|| Ok::<_, std::io::Error>("\n"));
            let slow = futures::StreamExt::then(feeds, |feed| async move {
                tokio::time::sleep(Duration::from_millis(20)).await;
                feed
            });
            Body::from_stream(slow).into_response()
        }
    }
}

async fn start(answers: Vec<Answer>, handles: bool) -> (ScriptedGateway, Service) {
    let service =
        Service(Arc::new(Inner { answers: Mutex::new(answers), requests: watch::Sender::default() }));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let routes = Router::new().fallback(serve).with_state(service.clone());
    tokio::spawn(axum::serve(listener, routes).into_future());
    let plugin = PluginEndpoint { url, token: "plugin-token".into(), handles };
    let options = GatewayOptions { plugin: Some(plugin), ..GatewayOptions::default() };
    (ScriptedGateway::start(options).await.unwrap(), service)
}

async fn requests(
    service: &Service,
    enough: impl FnMut(&Vec<(String, String, Value)>) -> bool,
) -> Vec<(String, String, Value)> {
    let mut seen = service.0.requests.subscribe();
    let requests = tokio::time::timeout(SOON, seen.wait_for(enough)).await.unwrap().unwrap();
    requests.clone()
}

fn answered() -> Answer {
    Answer::Status(
        200,
        json!({"revision": 17, "text": "B", "isError": false,
            "details": {"status": "answered", "answers": {"answer": ["B"]}}}),
    )
}

#[tokio::test]
async fn a_call_is_repeated_with_its_id_until_it_has_an_outcome_and_acknowledged() {
    let retry = Answer::Status(200, json!({"retry": true, "reason": "stopping"}));
    let (gateway, service) = start(vec![Answer::Broken, retry, answered()], true).await;
    let run = gateway.say(SESSION, CALL).unwrap();
    let outcomes =
        gateway.wait_for(|outcomes| outcomes.iter().any(|outcome| outcome.acknowledged), SOON).await.unwrap();
    assert_eq!((outcomes[0].text.as_str(), outcomes[0].attempts), ("B", 3));
    assert_eq!(outcomes[0].details["answers"]["answer"][0], "B");

    let requests = requests(&service, |requests| requests.len() == 4).await;
    let (method, path, body) = &requests[0];
    assert_eq!(method, "POST");
    assert!(path.starts_with(&format!("/v1/calls/{}.", outcomes[0].call_id)), "{path}");
    assert!(requests[..3].iter().all(|request| request.1 == *path && request.2 == *body));
    assert_eq!(body["runId"], run);
    assert_eq!((&body["gateway"], &body["handles"]), (&json!("openclaw"), &json!(true)));
    assert_eq!(body["sessionKey"], SESSION);
    assert_eq!(body["args"], json!({"question": "Where?", "choices": ["A", "B"]}));
    assert_eq!(requests[3].1, format!("{path}/ack"));
    assert_eq!(requests[3].2["revision"], 17);
    assert_eq!(requests[3].2["runId"], run);
}

#[tokio::test]
async fn an_abort_cancels_the_call() {
    let (gateway, service) = start(vec![Answer::Thinking], true).await;
    gateway.say(SESSION, CALL).unwrap();
    requests(&service, |requests| requests.len() == 1).await;
    gateway.stop_run(SESSION);
    let requests = requests(&service, |requests| requests.len() == 2).await;
    assert_eq!((&*requests[1].0, &requests[1].1), ("DELETE", &requests[0].1));
    assert_eq!(requests[1].2["sessionKey"], SESSION);
    let outcomes = gateway.wait_for(|outcomes| outcomes.len() == 1, SOON).await.unwrap();
    assert_eq!((&*outcomes[0].text, outcomes[0].is_error), ("Aborted", true));
}

#[tokio::test]
async fn a_killed_gateway_cancels_nothing() {
    let (gateway, service) = start(vec![Answer::Thinking, answered()], true).await;
    gateway.say(SESSION, CALL).unwrap();
    requests(&service, |requests| requests.len() == 1).await;
    gateway.restart().await.unwrap();
    gateway.say(SESSION, &format!("again {CALL}")).unwrap();
    gateway.wait_for(|outcomes| outcomes.len() == 1, SOON).await.unwrap();
    let requests = requests(&service, |requests| requests.len() >= 3).await;
    assert!(requests.iter().all(|request| request.0 == "POST"), "{requests:?}");
}

#[tokio::test]
async fn what_can_not_be_asked_is_told_to_the_model() {
    let error =
        |status, message: &str| Answer::Status(status, json!({"error": {"code": "x", "message": message}}));
    for (answer, text) in [
        (error(400, "question: 5000 characters, limit 4000"), "question: 5000 characters, limit 4000"),
        (error(409, "call id reused"), "askbus answered 409: call id reused"),
    ] {
        let (gateway, _service) = start(vec![answer], true).await;
        gateway.say(SESSION, CALL).unwrap();
        let outcomes = gateway.wait_for(|outcomes| outcomes.len() == 1, SOON).await.unwrap();
        assert_eq!((&*outcomes[0].text, outcomes[0].is_error), (text, true));
    }
}

#[tokio::test]
async fn a_secret_reaches_the_agent_and_with_handles_nobody_else() {
    for handles in [true, false] {
        let secret = json!({"revision": 3, "text": "answered (hidden)", "isError": false,
            "details": {"status": "answered"}, "secret": {"value": "hunter2 \"x\""}});
        let (gateway, _service) = start(vec![Answer::Status(200, secret)], handles).await;
        gateway.say(SESSION, CALL).unwrap();
        let outcomes = gateway.wait_for(|outcomes| outcomes.len() == 1, SOON).await.unwrap();
        assert_eq!(outcomes[0].secret.as_deref(), Some("hunter2 \"x\""));
        let ended = |gateway: &ScriptedGateway| gateway.transcript(SESSION).len() == 4;
        assert!(gateway.until(ended, SOON).await);
        assert_eq!(gateway.raw_contains("hunter2 \"x\""), !handles);
        assert_eq!(gateway.raw_contains("[[ask-secret:"), handles);
    }
}
