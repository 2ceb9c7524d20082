//! docs/plugin-protocol.md, sentence by sentence.

use std::time::Duration;

use ask_core::entry::{Road, State};
use ask_core::outcome::{CancelReason, Outcome, Returned};
use ask_core::reply::Answer;
use ask_core::time::Timestamp;
use reqwest::{Response, StatusCode};
use serde_json::{Value, json};

use crate::bench::{Adapter, Bench, GATEWAY, SESSION, TOKEN, reply};

const CALL: &str = "call_1.9c1d";

fn body(args: Value) -> Value {
    json!({
        "gateway": GATEWAY, "sessionKey": SESSION, "sessionId": "s1", "agentId": "main",
        "runId": "run-1", "toolCallId": "call_1", "args": args, "handles": true,
    })
}

fn choices() -> Value {
    body(json!({"question": "Where to?", "choices": ["A", "B"]}))
}

async fn send(adapter: &Adapter, method: reqwest::Method, path: &str, body: &Value) -> Response {
    let url = format!("{}/v1/calls/{path}", adapter.url);
    testkit::http_client().request(method, url).bearer_auth(TOKEN).json(body).send().await.unwrap()
}

async fn post(adapter: &Adapter, body: &Value) -> Response {
    send(adapter, reqwest::Method::POST, CALL, body).await
}

async fn acknowledge(adapter: &Adapter, revision: &Value) -> Response {
    let mut body = choices();
    body["revision"] = revision.clone();
    send(adapter, reqwest::Method::POST, &format!("{CALL}/ack"), &body).await
}

async fn delete(adapter: &Adapter) -> StatusCode {
    let mut body = choices();
    body["reason"] = "aborted".into();
    send(adapter, reqwest::Method::DELETE, CALL, &body).await.status()
}

async fn object(response: Response) -> Value {
    assert_eq!(response.status(), 200);
    response.json().await.unwrap()
}

async fn error(response: Response) -> Value {
    response.json::<Value>().await.unwrap()["error"].take()
}

#[tokio::test]
async fn a_call_gets_its_answer_and_is_returned_by_its_acknowledgement_in_three_writes() {
    let bench = Bench::start().await;
    let adapter = bench.adapter().await;
    // The headers come while the person thinks.
    let held = post(&adapter, &choices()).await;
    let asked = bench.question(SESSION, |e| e.is_pending()).await.value;
    assert_eq!(
        (asked.road, asked.tool.as_str(), asked.call.as_str()),
        (Road::Plugin, "request_user_input", "call_1")
    );
    assert_eq!(asked.deadline.since(asked.asked_at), Duration::from_secs(300));
    bench.answer(&asked, Answer::option(1)).await;

    let outcome = object(held).await;
    assert_eq!(outcome["text"], "B");
    assert_eq!(outcome["isError"], false);
    assert_eq!(outcome["details"]["status"], "answered");
    assert_eq!(outcome["details"]["answers"]["answer"], json!(["B"]));
    assert!(outcome.get("secret").is_none());
    let decided = bench.question(SESSION, |e| !e.is_pending()).await;
    assert_eq!(outcome["revision"], decided.revision);
    assert_eq!(decided.value.returned(), None);

    for _ in 0..2 {
        assert_eq!(acknowledge(&adapter, &outcome["revision"]).await.status(), 204);
    }
    let proof = Returned::Delivered { proof: "acknowledged".into() };
    assert_eq!(bench.returned(&asked).await, proof);
    assert_eq!(bench.bus.question_history(&asked.key).await.unwrap().len(), 3);
    let again = object(post(&adapter, &choices()).await).await;
    assert_eq!((&again["text"], &again["details"]), (&outcome["text"], &outcome["details"]));
}

#[tokio::test]
async fn the_outcome_is_repeated_until_it_is_acknowledged() {
    let bench = Bench::start().await;
    let (one, two) = (bench.adapter().await, bench.adapter().await);
    let held = post(&one, &choices()).await;
    let asked = bench.question(SESSION, |e| e.is_pending()).await.value;
    bench.answer(&asked, Answer::text("elsewhere")).await;
    let outcome = object(held).await;
    assert_eq!(object(post(&two, &choices()).await).await, outcome);
    assert_eq!(object(post(&one, &choices()).await).await, outcome);
    assert_eq!(bench.bus.questions_of(&asked.key.session_key()).await.unwrap().len(), 1);
}

#[tokio::test]
async fn an_acknowledgement_must_name_a_revision_that_had_the_outcome() {
    let bench = Bench::start().await;
    let adapter = bench.adapter().await;
    assert_eq!(acknowledge(&adapter, &json!(1)).await.status(), 404);
    let held = post(&adapter, &choices()).await;
    let asked = bench.question(SESSION, |e| e.is_pending()).await;
    let pending = asked.revision;
    let early = acknowledge(&adapter, &json!(pending)).await;
    assert_eq!(early.status(), 409);
    assert_eq!(error(early).await["code"], "other_revision");
    bench.answer(&asked.value, Answer::option(0)).await;
    let outcome = object(held).await;
    assert_eq!(acknowledge(&adapter, &json!(pending)).await.status(), 409);

    // Another reply is listed as late: the entry moves on, the outcome does not.
    bench.bus.reply(&reply(&asked.value, "r2", Answer::option(1))).await.unwrap();
    assert_eq!(bench.question(SESSION, |e| e.late_count == 1).await.value.returned(), None);
    assert_eq!(acknowledge(&adapter, &outcome["revision"]).await.status(), 204);
    assert!(matches!(bench.returned(&asked.value).await, Returned::Delivered { .. }));
}

#[tokio::test]
async fn what_can_not_be_asked_is_refused_in_words_for_the_model() {
    let bench = Bench::start().await;
    let adapter = bench.adapter().await;
    let table = [
        (json!({}), "question"),
        (json!({"question": "q", "choices": 3}), "choices"),
        (json!({"question": "q", "secret": true, "choices": ["a", "b"]}), "choices"),
        (json!({"question": "q", "timeout_seconds": "soon"}), "timeout_seconds"),
    ];
    for (args, field) in table {
        let refused = post(&adapter, &body(args)).await;
        assert_eq!(refused.status(), 400);
        let error = error(refused).await;
        assert_eq!((&error["code"], &error["field"]), (&json!("invalid_arguments"), &json!(field)));
        assert!(error["message"].as_str().unwrap().contains("must be"), "{error}");
    }
    let table = [
        ("gateway", json!("other"), "unknown_gateway"),
        ("runId", json!(""), "empty"),
        ("sessionKey", json!("x".repeat(401)), "too_long"),
        ("runId", json!(null), "bad_body"),
    ];
    for (field, value, code) in table {
        let mut body = choices();
        body[field] = value;
        let error = error(post(&adapter, &body).await).await;
        assert_eq!(error["code"], code, "{error}");
    }
    assert!(bench.bus.all_questions().await.unwrap().is_empty());
}

#[tokio::test]
async fn only_the_configured_token_is_let_in() {
    let bench = Bench::start().await;
    let adapter = bench.adapter().await;
    let client = testkit::http_client();
    let url = format!("{}/v1/calls/{CALL}", adapter.url);
    for request in [client.post(&url), client.post(&url).bearer_auth("guess"), client.delete(&url)] {
        let refused = request.json(&choices()).send().await.unwrap();
        assert_eq!(refused.status(), 401);
        assert_eq!(error(refused).await["field"], "authorization");
    }
    assert!(bench.bus.all_questions().await.unwrap().is_empty());
}

#[tokio::test]
async fn a_call_id_stands_for_one_question() {
    let bench = Bench::start().await;
    let adapter = bench.adapter().await;
    let _held = post(&adapter, &choices()).await;
    let refused = post(&adapter, &body(json!({"question": "And when?"}))).await;
    assert_eq!(refused.status(), 409);
    assert_eq!(error(refused).await["code"], "call_id_reused");
}

#[tokio::test]
async fn a_restart_of_the_adapter_is_invisible_to_the_call() {
    let bench = Bench::start().await;
    let adapter = bench.adapter().await;
    let held = post(&adapter, &choices()).await;
    let asked = bench.question(SESSION, |e| e.is_pending()).await.value;
    let address = adapter.address;
    drop(adapter);
    assert!(held.bytes().await.is_err(), "a cut answer must not look like a whole one");

    let adapter = bench.adapter_at(address).await;
    let held = post(&adapter, &choices()).await;
    bench.answer(&asked, Answer::option(0)).await;
    assert_eq!(object(held).await["text"], "A");
    assert_eq!(bench.bus.all_questions().await.unwrap().len(), 1);
}

#[tokio::test]
async fn a_call_outlives_a_restart_of_nats() {
    let bench = Bench::start().await;
    let adapter = bench.adapter().await;
    let held = post(&adapter, &choices()).await;
    let asked = bench.question(SESSION, |e| e.is_pending()).await.value;
    bench.server.restart().await.unwrap();
    let request = reply(&asked, "r1", Answer::option(1));
    testkit::until("the reply", async || bench.bus.reply(&request).await.ok()).await;
    assert_eq!(object(held).await["text"], "B");
}

#[tokio::test]
async fn a_stopping_adapter_asks_its_calls_to_come_again() {
    let bench = Bench::start().await;
    let adapter = bench.adapter().await;
    let held = post(&adapter, &choices()).await;
    adapter.stop();
    assert_eq!(object(held).await["retry"], true);
    assert!(bench.question(SESSION, |_| true).await.value.is_pending());
}

#[tokio::test]
async fn the_end_of_a_call_cancels_its_pending_question() {
    let bench = Bench::start().await;
    let adapter = bench.adapter().await;
    let held = post(&adapter, &choices()).await;
    let asked = bench.question(SESSION, |e| e.is_pending()).await.value;
    for _ in 0..2 {
        assert_eq!(delete(&adapter).await, 204);
    }
    assert_eq!(bench.returned(&asked).await, Returned::Unconfirmed { why: "caller_cancelled".into() });
    let entry = bench.question(SESSION, |_| true).await.value;
    let caller = Outcome::Cancelled { reason: CancelReason::Caller };
    assert_eq!(entry.decision().unwrap().outcome, caller);
    let outcome = object(held).await;
    assert_eq!(outcome["details"]["reason"], "caller");
    assert!(outcome["text"].as_str().unwrap().contains("cancelled"));
}

#[tokio::test]
async fn the_end_of_a_call_closes_its_decided_question() {
    let bench = Bench::start().await;
    let adapter = bench.adapter().await;
    let _held = post(&adapter, &choices()).await;
    let asked = bench.question(SESSION, |e| e.is_pending()).await.value;
    bench.answer(&asked, Answer::option(0)).await;
    assert_eq!(delete(&adapter).await, 204);
    let entry = bench.question(SESSION, |e| e.returned().is_some()).await.value;
    assert_eq!(entry.decision().unwrap().outcome.status(), "answered");
    assert_eq!(entry.returned(), Some(&Returned::Unconfirmed { why: "caller_cancelled".into() }));
}

#[tokio::test]
async fn a_call_that_comes_after_its_own_cancel_is_never_opened() {
    let bench = Bench::start().await;
    let adapter = bench.adapter().await;
    assert_eq!(delete(&adapter).await, 204);
    let late = post(&adapter, &choices()).await;
    assert_eq!(late.status(), 409);
    assert_eq!(error(late).await["code"], "call_cancelled");
    assert!(bench.bus.all_questions().await.unwrap().is_empty());
}

#[tokio::test]
async fn a_secret_is_only_in_its_own_field_and_out_of_reach_once_the_call_has_it() {
    const SECRET: &str = "hunter2-5521";
    let bench = Bench::start().await;
    let adapter = bench.adapter().await;
    let ask = body(json!({"question": "The password?", "secret": true}));
    let held = post(&adapter, &ask).await;
    let asked = bench.question(SESSION, |e| e.is_pending()).await.value;
    bench.answer_secret(&asked, SECRET).await;

    let mut outcome = object(held).await;
    assert_eq!(outcome["secret"].take()["value"], SECRET);
    assert_eq!(outcome["text"], "answered (hidden)");
    assert!(!outcome.to_string().contains(SECRET));
    // Until it is acknowledged, a call that lost it gets it again.
    assert_eq!(object(post(&adapter, &ask).await).await["secret"]["value"], SECRET);

    assert_eq!(acknowledge(&adapter, &outcome["revision"]).await.status(), 204);
    assert!(matches!(bench.returned(&asked).await, Returned::Delivered { .. }));
    let history = bench.bus.question_history(&asked.key).await.unwrap();
    assert!(history.iter().all(|(then, _)| !then.value.holds_secret()), "{history:?}");
    let gone = object(post(&adapter, &ask).await).await;
    assert!(gone.get("secret").is_none());
    assert_eq!(gone["details"]["reason"], "expired_secret");
    assert!(gone["text"].as_str().unwrap().contains("no longer available"));
    assert!(!bench.on_disk(SECRET));
}

#[tokio::test]
async fn a_secret_that_no_call_fetches_for_a_day_is_put_out_of_reach() {
    let bench = Bench::start().await;
    let one = bench.adapter().await;
    let _held = post(&one, &body(json!({"question": "The password?", "secret": true}))).await;
    let asked = bench.question(SESSION, |e| e.is_pending()).await.value;
    bench.answer_secret(&asked, "hunter2").await;
    let mut decided = bench.question(SESSION, |e| !e.is_pending()).await;
    drop(one);
    let State::Decided { decision } = &mut decided.value.state else { panic!("{decided:?}") };
    decision.at = Timestamp(decision.at.0 - 24 * 3600 * 1000);
    bench.bus.write_decided(&decided.value, decided.revision).await.unwrap();

    let _adapter = bench.adapter().await;
    assert_eq!(bench.returned(&asked).await, Returned::Unconfirmed { why: "expired".into() });
    assert!(!bench.question(SESSION, |_| true).await.value.holds_secret());
}

#[tokio::test]
async fn a_question_that_nobody_answers_ends_at_the_time_that_the_call_named() {
    let bench = Bench::start().await;
    let adapter = bench.adapter().await;
    let outcome = object(post(&adapter, &body(json!({"question": "q", "timeout_seconds": 0.2}))).await).await;
    assert_eq!(outcome["isError"], false);
    let told: Value = serde_json::from_str(outcome["text"].as_str().unwrap()).unwrap();
    assert!(told["error"].as_str().unwrap().len() > 10, "{told}");
    assert_ne!(told["status"], "answered");
    let entry = bench.question(SESSION, |_| true).await.value;
    assert_eq!(entry.deadline.since(entry.asked_at), Duration::from_secs(1));
}

#[tokio::test]
async fn a_session_without_a_front_end_is_told_so_and_not_that_the_user_kept_silent() {
    let bench = Bench::start().await;
    let adapter = bench.adapter().await;
    let mut ask = choices();
    ask["sessionKey"] = "agent:main:cron".into();
    let outcome = object(post(&adapter, &ask).await).await;
    assert_eq!(outcome["details"]["reason"], "no_front_end");
    assert!(outcome["text"].as_str().unwrap().contains("could not be shown"));
}
