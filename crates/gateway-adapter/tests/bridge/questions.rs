//! The Gateway's own questions.

use ask_core::entry::{DecidedBy, Road};
use ask_core::outcome::{CancelReason, Outcome, Returned};
use ask_core::reply::{Answer, ReplyContent};
use ask_core::surface::Surface;
use ask_core::wire::ReplyResponse;
use serde_json::json;
use testkit::gateway::{Fault, GatewayOptions};

use crate::bench::{ASK, Bench, OWNER, SESSION, WITHIN, until};

fn delivered(proof: &str) -> Returned {
    Returned::Delivered { proof: proof.into() }
}

fn answered(answer: Answer) -> Outcome {
    Outcome::Answered { answers: [("color".into(), answer)].into() }
}

#[tokio::test]
async fn a_question_of_the_gateway_is_answered_on_the_bus_and_the_agent_has_it() {
    let (bench, _adapter) = Bench::with_adapter().await;
    let run = bench.send(SESSION, ASK).await;
    let asked = bench.question(SESSION, |_| true).await.value;
    assert_eq!((asked.road, asked.tool.as_str(), &asked.key.run), (Road::Native, "ask_user", &run));
    assert!(asked.call.starts_with("call_"), "{}", asked.call);
    assert_eq!(asked.question.prompts[0].options[2].label, "Blue");
    assert_eq!(bench.answer(&asked, Answer::option(2)).await, ReplyResponse::Saved);
    assert_eq!(bench.returned(&asked).await, delivered("resolved"));
    let outcomes = bench.gateway.wait_for(|o| o.len() == 1, WITHIN).await.unwrap();
    assert_eq!(outcomes[0].details["answers"]["answers"]["color"], json!(["Blue"]));
    let record = &bench.gateway.questions()[0];
    let by = record["resolvedBy"].as_str().unwrap();
    assert!(by.contains(OWNER) && by.ends_with("r1"), "{by}");
}

#[tokio::test]
async fn an_answer_given_in_the_gateway_decides_the_question_here() {
    let (bench, _adapter) = Bench::with_adapter().await;
    bench.send(SESSION, ASK).await;
    let asked = bench.question(SESSION, |_| true).await.value;
    bench.gateway.answer_locally(&asked.key.question, &json!({"color": ["mine"]})).unwrap();
    assert_eq!(bench.returned(&asked).await, delivered("decided by the gateway"));
    let closed = bench.question(SESSION, |_| true).await.value;
    let decision = closed.decision().unwrap();
    assert_eq!(decision.outcome, answered(Answer::text("mine")));
    let DecidedBy::Reply { responder, surface, .. } = &decision.by else { panic!("{:?}", decision.by) };
    assert_eq!((responder.user.as_str(), *surface), ("openclaw-control-ui", Surface::Gateway));
}

#[tokio::test]
async fn an_answer_that_the_gateway_had_first_overrules_ours() {
    let bench = Bench::start(GatewayOptions::default()).await;
    let adapter = bench.adapter().await;
    adapter.is_ready().await;
    bench.send(SESSION, ASK).await;
    let asked = bench.question(SESSION, |_| true).await.value;
    drop(adapter);
    bench.gateway.answer_locally(&asked.key.question, &json!({"color": ["Red"]})).unwrap();
    assert_eq!(bench.answer(&asked, Answer::option(2)).await, ReplyResponse::Saved);
    let _adapter = bench.adapter().await;
    let outcome = answered(Answer::option(0));
    let by = Some("openclaw-control-ui".into());
    assert_eq!(bench.returned(&asked).await, Returned::Overruled { by, outcome: outcome.clone() });
    let closed = bench.question(SESSION, |_| true).await.value;
    assert_eq!(closed.shown_outcome(), Some(&outcome));
}

#[tokio::test]
async fn a_lost_response_of_the_gateway_is_proven_by_our_own_id() {
    let (bench, _adapter) = Bench::with_adapter().await;
    bench.send(SESSION, ASK).await;
    let asked = bench.question(SESSION, |_| true).await.value;
    bench.gateway.fault("question.resolve", Fault::LoseResponse);
    bench.answer(&asked, Answer::option(1)).await;
    assert_eq!(bench.returned(&asked).await, delivered("resolution_id"));
    let outcomes = bench.gateway.wait_for(|o| o.len() == 1, WITHIN).await.unwrap();
    assert_eq!(outcomes[0].details["answers"]["answers"]["color"], json!(["Green"]));
}

#[tokio::test]
async fn no_answer_reaches_the_agent_as_no_answer() {
    let (bench, _adapter) = Bench::with_adapter().await;
    bench.send(SESSION, ASK).await;
    let asked = bench.question(SESSION, |_| true).await.value;
    bench.reply(&asked, "r1", ReplyContent::Declined).await;
    assert_eq!(bench.returned(&asked).await, delivered("resolved"));
    let outcomes = bench.gateway.wait_for(|o| o.len() == 1, WITHIN).await.unwrap();
    assert_eq!(outcomes[0].details["status"], "no_answer");
}

#[tokio::test]
async fn stop_in_the_gateway_cancels_the_question_with_its_run() {
    let (bench, _adapter) = Bench::with_adapter().await;
    bench.send(SESSION, ASK).await;
    let asked = bench.question(SESSION, |_| true).await.value;
    bench.gateway.stop_run(SESSION);
    assert_eq!(bench.returned(&asked).await, delivered("decided by the gateway"));
    let closed = bench.question(SESSION, |_| true).await.value;
    let reason = CancelReason::RunEnded;
    assert_eq!(closed.decision().unwrap().outcome, Outcome::Cancelled { reason });
}

#[tokio::test]
async fn a_restart_of_the_gateway_cancels_what_it_has_lost() {
    let (bench, adapter) = Bench::with_adapter().await;
    until("the boot id", async || bench.bus.boot_id("openclaw").await.ok()?).await;
    bench.send(SESSION, ASK).await;
    let pending = bench.question(SESSION, |_| true).await.value;
    bench.send("agent:main:owui-2", ASK).await;
    let decided = bench.question("agent:main:owui-2", |_| true).await.value;
    bench.gateway.kill();
    until("the loss", async || (!adapter.health.unmet().is_empty()).then_some(())).await;
    assert_eq!(bench.answer(&decided, Answer::option(0)).await, ReplyResponse::Saved);
    bench.gateway.start_again().await.unwrap();
    let unconfirmed = Returned::Unconfirmed { why: "gateway_restart".into() };
    assert_eq!(bench.returned(&pending).await, unconfirmed);
    assert_eq!(bench.returned(&decided).await, unconfirmed);
    let closed = bench.question(SESSION, |_| true).await.value;
    let reason = CancelReason::GatewayRestart;
    assert_eq!(closed.decision().unwrap().outcome, Outcome::Cancelled { reason });
    let boot = bench.gateway.boot_id();
    until("the new boot id", async || (bench.bus.boot_id("openclaw").await.ok()?? == boot).then_some(()))
        .await;
}

#[tokio::test]
async fn a_question_outlives_the_adapter_and_is_asked_once() {
    let bench = Bench::start(GatewayOptions::default()).await;
    let adapter = bench.adapter().await;
    adapter.is_ready().await;
    bench.send(SESSION, ASK).await;
    let asked = bench.question(SESSION, |_| true).await;
    drop(adapter);
    bench.answer(&asked.value, Answer::option(2)).await;
    let _adapter = bench.adapter().await;
    assert_eq!(bench.returned(&asked.value).await, delivered("resolved"));
    let outcomes = bench.gateway.wait_for(|o| o.len() == 1, WITHIN).await.unwrap();
    assert_eq!(outcomes[0].details["answers"]["answers"]["color"], json!(["Blue"]));
    let history = bench.bus.question_history(&asked.value.key).await.unwrap();
    let states: Vec<bool> = history.iter().map(|(stored, _)| stored.value.is_pending()).collect();
    assert_eq!(states, [true, false, false], "asked, decided, returned");
}

#[tokio::test]
async fn while_the_gateway_drains_its_questions_are_still_answered() {
    let (bench, _adapter) = Bench::with_adapter().await;
    bench.send(SESSION, ASK).await;
    let asked = bench.question(SESSION, |_| true).await.value;
    bench.gateway.drain();
    bench.answer(&asked, Answer::option(0)).await;
    assert_eq!(bench.returned(&asked).await, delivered("resolved"));
    bench.gateway.wait_for(|o| o.len() == 1, WITHIN).await.unwrap();
}

#[tokio::test]
async fn a_message_while_a_question_waits_does_not_become_its_answer() {
    let (bench, _adapter) = Bench::with_adapter().await;
    let asking = bench.send(SESSION, ASK).await;
    let asked = bench.question(SESSION, |_| true).await.value;
    // Not shown to anybody, so the message is for the agent.
    let run = bench.send(SESSION, "Tell me a joke").await;
    let sent = |requests: Vec<testkit::gateway::Request>| {
        requests.into_iter().find(|r| r.params["idempotencyKey"] == run.as_str()).map(|r| r.method)
    };
    let method = until("the message", async || sent(bench.gateway.requests())).await;
    assert_eq!(method, "agent");
    assert!(bench.question(SESSION, |_| true).await.value.is_pending());
    bench.answer(&asked, Answer::option(0)).await;
    bench.ended(SESSION, &asking).await;
    let joke = bench.ended(SESSION, &run).await;
    assert_eq!(crate::bench::streamed(&joke), "echo: Tell me a joke");
}
