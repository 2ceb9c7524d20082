//! Probes, metrics, and the pieces that HTTP endpoints share.

use axum::Router;
use axum::http::HeaderMap;
use axum::routing::post;
use prometheus_client::metrics::counter::Counter;
use serde::Deserialize;
use serde_json::{Value, json};
use service_kit::http::{ApiError, ApiJson, check_bearer, limit_body};
use service_kit::{Health, Redacted, Service};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

const SERVICE: Service = Service {
    name: "ask-router",
    section: "router",
    version: "1.2.3",
    defaults: "",
    readiness: &["nats", "buckets"],
};

async fn serve(health: &Health) -> (String, CancellationToken) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let shutdown = CancellationToken::new();
    tokio::spawn(health.clone().serve(listener, shutdown.clone()));
    (url, shutdown)
}

async fn get(url: &str, path: &str) -> (u16, String) {
    let response = testkit::http_client().get(format!("{url}{path}")).send().await.unwrap();
    (response.status().as_u16(), response.text().await.unwrap())
}

async fn readyz(url: &str) -> (u16, Value) {
    let (status, text) = get(url, "/readyz").await;
    (status, serde_json::from_str(&text).unwrap())
}

#[tokio::test]
async fn it_is_ready_only_while_every_named_condition_is_met() {
    let health = Health::new(&SERVICE);
    let (url, _) = serve(&health).await;
    let unmet = |unmet: Value| json!({ "service": "ask-router", "ready": false, "unmet": unmet });

    assert_eq!(get(&url, "/healthz").await, (200, "ok\n".to_owned()));
    let starting = unmet(json!({ "nats": "starting", "buckets": "starting" }));
    assert_eq!(readyz(&url).await, (503, starting));

    health.ready("nats");
    health.not_ready("buckets", "bucket ask is missing, run askctl provision");
    let missing = unmet(json!({ "buckets": "bucket ask is missing, run askctl provision" }));
    assert_eq!(readyz(&url).await, (503, missing));

    health.ready("buckets");
    let ready = json!({ "service": "ask-router", "ready": true, "unmet": {} });
    assert_eq!(readyz(&url).await, (200, ready));

    health.not_ready("nats", "connection lost");
    assert_eq!(readyz(&url).await, (503, unmet(json!({ "nats": "connection lost" }))));
    assert_eq!(get(&url, "/healthz").await.0, 200, "not ready is not dead");
}

#[tokio::test]
async fn services_in_one_process_have_their_own_probes_and_metrics() {
    let router = Health::new(&SERVICE);
    let emitter = Health::new(&Service { name: "owui-emitter", ..SERVICE });
    let decided = Counter::<u64>::default();
    router.registry().register("decided", "Questions decided", decided.clone());
    decided.inc();
    let (router_url, router_shutdown) = serve(&router).await;
    let (emitter_url, _) = serve(&emitter).await;

    let (_, of_router) = get(&router_url, "/metrics").await;
    let (_, of_emitter) = get(&emitter_url, "/metrics").await;
    let build = r#"askbus_build_info{service="ask-router",version="1.2.3"} 1"#;
    assert!(of_router.contains(build), "{of_router}");
    assert!(of_router.contains("askbus_decided_total 1"), "{of_router}");
    assert!(of_emitter.contains(r#"service="owui-emitter""#), "{of_emitter}");
    assert!(!of_emitter.contains("decided"), "{of_emitter}");

    router_shutdown.cancel();
    assert_eq!(get(&emitter_url, "/healthz").await.0, 200);
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Body {
    #[serde(rename = "reply")]
    _reply: Reply,
}

#[derive(Deserialize)]
struct Reply {
    #[serde(rename = "text")]
    _text: String,
}

async fn endpoint() -> String {
    async fn reply(headers: HeaderMap, ApiJson(_): ApiJson<Body>) -> Result<(), ApiError> {
        check_bearer(&headers, &Redacted::new("right".to_owned()))
    }
    let app = limit_body(Router::new().route("/reply", post(reply)), 64);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/reply", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, app).await });
    url
}

async fn send(url: &str, authorization: Option<&str>, body: String) -> (u16, Value) {
    let mut request = testkit::http_client().post(url).body(body);
    if let Some(value) = authorization {
        request = request.header("authorization", value);
    }
    let response = request.send().await.unwrap();
    let status = response.status().as_u16();
    (status, response.json::<Value>().await.unwrap_or_default()["error"].clone())
}

#[tokio::test]
async fn only_the_right_bearer_token_passes() {
    let url = endpoint().await;
    let body = || json!({ "reply": { "text": "yes" } }).to_string();
    for right in ["Bearer right", "bearer right"] {
        assert_eq!(send(&url, Some(right), body()).await.0, 200);
    }
    for wrong in [None, Some("Bearer wrong"), Some("Bearer "), Some("right"), Some("Basic right")] {
        let (status, error) = send(&url, wrong, body()).await;
        assert_eq!((status, &error["code"]), (401, &json!("unauthorized")), "{wrong:?}");
        assert_eq!(error["field"], "authorization");
    }
}

#[tokio::test]
async fn a_bad_body_is_refused_with_field_and_limit_but_without_its_values() {
    let url = endpoint().await;
    let cases = [
        (json!({ "reply": { "text": 424_242 } }).to_string(), "reply.text", "expected a string"),
        (json!({ "reply": {} }).to_string(), "reply", "missing field `text`"),
        (json!({ "replyy": {} }).to_string(), "replyy", "unknown field `replyy`"),
        ("{".to_owned(), "body", "EOF while parsing"),
        (String::new(), "body", "EOF while parsing"),
    ];
    for (body, field, message) in cases {
        let (status, error) = send(&url, Some("Bearer right"), body).await;
        assert_eq!((status, &error["code"]), (400, &json!("bad_body")), "{error}");
        assert_eq!(error["field"], field, "{error}");
        assert!(error["message"].as_str().unwrap().contains(message), "{error}");
        assert!(!error.to_string().contains("424242"), "{error}");
    }

    let large = json!({ "reply": { "text": "x".repeat(100) } }).to_string();
    let length = large.len();
    let (status, error) = send(&url, Some("Bearer right"), large).await;
    assert_eq!((status, &error["code"]), (413, &json!("body_too_large")));
    assert_eq!((&error["limit"], &error["value"]), (&json!(64), &json!(length)));
}
