//! The scripted front end against an emitter that breaks off, is away, and refuses.

use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use testkit::front::FrontEnd;

#[derive(Clone)]
enum Reaction {
    /// Lines, and then the connection is closed.
    Lines(Vec<Value>),
    Status(u16, Value),
}

#[derive(Clone, Default)]
struct Emitter {
    reactions: Arc<Mutex<Vec<Reaction>>>,
    requests: Arc<Mutex<Vec<(String, Value)>>>,
}

impl Emitter {
    async fn start(reactions: Vec<Reaction>) -> (Self, FrontEnd) {
        let emitter = Self::default();
        *emitter.reactions.lock().unwrap() = reactions;
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/", listener.local_addr().unwrap());
        let routes = Router::new().fallback(react).with_state(emitter.clone());
        tokio::spawn(axum::serve(listener, routes).into_future());
        (emitter, FrontEnd::new(&url, "token"))
    }

    fn requests(&self) -> Vec<(String, Value)> {
        self.requests.lock().unwrap().clone()
    }
}

async fn react(State(emitter): State<Emitter>, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    assert_eq!(parts.headers["authorization"], "Bearer token");
    let body = axum::body::to_bytes(body, 1 << 20).await.unwrap();
    let body = serde_json::from_slice(&body).unwrap_or_default();
    let path = parts.uri.path().to_owned();
    emitter.requests.lock().unwrap().push((path, body));
    match emitter.reactions.lock().unwrap().remove(0) {
        Reaction::Lines(lines) => {
            let lines = lines.into_iter().map(|line| Ok::<_, std::io::Error>(format!("{line}\n")));
            Body::from_stream(futures::stream::iter(lines)).into_response()
        }
        Reaction::Status(status, body) => {
            (StatusCode::from_u16(status).unwrap(), body.to_string()).into_response()
        }
    }
}

fn ask() -> Value {
    json!({"type": "ask", "question": "q1", "surface": "card", "revision": 4, "deadline_ms": 9,
        "title": "Where", "can_park": true, "cursor": "c2",
        "prompts": [{"id": "answer", "text": "Where?", "options": [{"label": "A"}, {"label": "B"}],
            "multiple": false, "allow_other": true, "secret": false, "required": true}]})
}

#[tokio::test]
async fn a_broken_stream_goes_on_where_it_stood() {
    let text = |text: &str, cursor: &str| json!({"type": "text", "text": text, "cursor": cursor});
    let (emitter, front) = Emitter::start(vec![
        Reaction::Status(503, json!({"error": {"code": "not_ready"}})),
        Reaction::Lines(vec![text("a", "c1"), json!({"type": "ping"})]),
        Reaction::Lines(vec![text("b", "c2"), json!({"type": "end", "reason": "done"})]),
    ])
    .await;
    let mut turn = front.say("hello");
    assert_eq!(turn.end().await.unwrap(), "done");
    assert_eq!(turn.text(), "ab");
    assert!(turn.next().await.unwrap().is_none());
    let requests = emitter.requests();
    let after: Vec<&Value> = requests.iter().map(|(_, body)| &body["after"]).collect();
    assert_eq!(after, [&Value::Null, &Value::Null, &json!("c1")]);
    assert!(requests.iter().all(|(_, body)| body["message"] == turn.message()));
    assert_eq!(requests[0].1["text"], "hello");
}

#[tokio::test]
async fn a_question_is_reported_answered_and_off_the_screen() {
    let (emitter, front) = Emitter::start(vec![
        Reaction::Lines(vec![ask()]),
        Reaction::Status(204, Value::Null),
        Reaction::Status(503, json!({"error": {"code": "not_saved"}})),
        Reaction::Status(200, json!({"result": "saved"})),
    ])
    .await;
    let mut turn = front.say("go");
    let ask = turn.asked().await.unwrap();
    assert_eq!(ask.prompts[0].options[1].label, "B");
    assert_eq!(ask.durable_call(), "oc_q1.c2");
    assert_eq!(front.message("now")["on_screen"], json!(["q1"]));
    let saved = turn.reply(&ask, json!({"index": 1})).await.unwrap();
    assert_eq!((saved.status, saved.result()), (200, "saved"));
    assert_eq!(front.message("now")["on_screen"], json!([]));

    let requests = emitter.requests();
    assert_eq!((&*requests[1].0, &requests[1].1["event"]), ("/v1/shown", &json!("delivered")));
    assert_eq!(requests[2], requests[3]);
    assert_eq!(requests[3].1["answers"], json!({"answer": {"index": 1}}));
    assert_eq!(requests[3].1["message"], turn.message());
}

#[tokio::test]
async fn a_refused_turn_says_why() {
    let refusal = json!({"error": {"code": "too_long", "message": "text: limit 100"}});
    let (_emitter, front) = Emitter::start(vec![Reaction::Status(422, refusal)]).await;
    let error = front.say("hello").next().await.unwrap_err();
    assert!(error.to_string().contains("text: limit 100"), "{error}");
}

#[tokio::test]
async fn leaving_and_coming_back_after_a_card_are_told_with_the_cursor() {
    let (emitter, front) = Emitter::start(vec![
        Reaction::Lines(vec![ask(), json!({"type": "end", "reason": "asked"})]),
        Reaction::Status(204, Value::Null),
        Reaction::Status(200, json!({})),
        Reaction::Lines(vec![json!({"type": "end", "reason": "done"})]),
    ])
    .await;
    let mut turn = front.say("go");
    let ask = turn.asked().await.unwrap();
    assert_eq!(turn.leave().await.unwrap().await.unwrap().status, 200);
    let answers = ask.answer(json!({"index": 0}));
    front.after_card(&ask, "answered", answers).end().await.unwrap();
    let requests = emitter.requests();
    assert_eq!((&*requests[2].0, &requests[2].1["cursor"]), ("/v1/left", &json!("c2")));
    let back = &requests[3].1;
    assert_eq!((&back["text"], &back["answer"]["call"]), (&Value::Null, &json!("oc_q1.c2")));
}
