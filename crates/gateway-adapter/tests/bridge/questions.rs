//! The Gateway's own questions.

use std::time::Duration;

use ask_core::entry::{DecidedBy, Entry, Road, Verdict};
use ask_core::key::QuestionKey;
use ask_core::outcome::{CancelReason, Outcome, Returned};
use ask_core::question::{Choice, Prompt, Question};
use ask_core::reply::{Answer, Reply, ReplyContent, Responder};
use ask_core::surface::Surface;
use ask_core::time::Timestamp;
use ask_core::wire::{ReplyRequest, ReplyResponse};
use serde_json::json;
use testkit::gateway::{Fault, GatewayOptions, Rejection};

use testkit::{WITHIN, until};

use crate::bench::{ASK, Adapter, Bench, GATEWAY, OWNER, SESSION};

const MINUTE: Duration = Duration::from_secs(60);

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

/// The question that waits at the Gateway, as an adapter has asked it whose clock runs so far ahead
/// that it is long over there; answered.
async fn answered_by_a_clock_that_is_ahead(bench: &Bench) -> Entry {
    let run = bench.gateway.say(SESSION, ASK).unwrap();
    let id =
        until("the question", async || Some(bench.gateway.questions().first()?["id"].as_str()?.to_owned()));
    let key = QuestionKey { gateway: GATEWAY.into(), session: SESSION.into(), run, question: id.await };
    let options = ["Red", "Green", "Blue"].map(Choice::label).into();
    let prompt = Prompt { id: "color".into(), options, ..Prompt::free_text("Which color?") };
    let question = Question::new(vec![prompt]).unwrap();
    let (asked, deadline) = (Timestamp::now().minus(3 * MINUTE), Timestamp::now().minus(MINUTE));
    let entry = Entry::ask(key, Road::Native, "ask_user", "", question, asked, deadline, None).unwrap();
    let by = Responder { user: OWNER.into(), name: None, chat: None };
    let content = ReplyContent::Answers { answers: [("color".into(), Answer::option(2))].into() };
    let reply = Reply { id: "r1".into(), by, surface: Surface::Card, content };
    let Verdict::Decide(decided) = entry.reply(&reply, asked) else { panic!("{entry:?}") };
    bench.bus.write_asked(&decided).await.unwrap();
    *decided
}

#[tokio::test]
async fn an_adapter_whose_clock_is_ahead_gives_a_fresh_answer_back() {
    let bench = Bench::start(GatewayOptions::default()).await;
    let decided = answered_by_a_clock_that_is_ahead(&bench).await;
    let _adapter = bench.adapter().await;
    assert_eq!(bench.returned(&decided).await, delivered("resolved"));
    let outcomes = bench.gateway.wait_for(|o| o.len() == 1, WITHIN).await.unwrap();
    assert_eq!(outcomes[0].details["answers"]["answers"]["color"], json!(["Blue"]));
}

#[tokio::test]
async fn an_adapter_whose_clock_is_ahead_learns_by_the_next_connection_what_the_lost_one_did() {
    let bench = Bench::start(GatewayOptions::default()).await;
    bench.gateway.fault("question.resolve", Fault::LoseResponse);
    let decided = answered_by_a_clock_that_is_ahead(&bench).await;
    let _adapter = bench.adapter().await;
    assert_eq!(bench.returned(&decided).await, delivered("resolution_id"));
}

#[tokio::test]
async fn a_gateway_that_is_not_ready_past_the_proof_leaves_it_unconfirmed() {
    let bench = Bench::start(GatewayOptions::default()).await;
    bench.gateway.fault("question.resolve", Fault::Refuse(Rejection::starting()));
    let decided = answered_by_a_clock_that_is_ahead(&bench).await;
    let _adapter = bench.adapter().await;
    let unconfirmed = Returned::Unconfirmed { why: "gateway_unreachable".into() };
    assert_eq!(bench.returned(&decided).await, unconfirmed);
}

#[tokio::test]
async fn an_outcome_that_the_gateway_refuses_for_good_says_why() {
    let (bench, _adapter) = Bench::with_adapter().await;
    bench.send(SESSION, ASK).await;
    let asked = bench.question(SESSION, |_| true).await.value;
    let details = json!({"reason": "QUESTION_REQUESTER_INACTIVE"});
    let refused = Rejection { details, ..Rejection::new("INVALID_REQUEST", "the run is over") };
    bench.gateway.fault("question.resolve", Fault::Refuse(refused));
    bench.answer(&asked, Answer::option(1)).await;
    let why = "refused by the gateway: QUESTION_REQUESTER_INACTIVE".into();
    assert_eq!(bench.returned(&asked).await, Returned::Unconfirmed { why });
    // Its run does not wait in vain.
    let outcomes = bench.gateway.wait_for(|o| o.len() == 1, WITHIN).await.unwrap();
    assert_eq!(outcomes[0].details["status"], "no_answer");
}

/// A question that was answered at the Gateway and forgotten there while no adapter was there, with
/// so many rows after its result.
async fn answered_and_forgotten(rows: usize) -> (Bench, Entry) {
    let options = GatewayOptions { keep_settled: Duration::from_millis(50), ..Default::default() };
    let bench = Bench::start(options).await;
    let adapter = bench.adapter().await;
    adapter.is_ready().await;
    bench.send(SESSION, ASK).await;
    let asked = bench.question(SESSION, |_| true).await.value;
    drop(adapter);
    bench.gateway.answer_locally(&asked.key.question, &json!({"color": ["Red"]})).unwrap();
    until("the end", async || bench.gateway.questions().is_empty().then_some(())).await;
    let has_result = |row: &serde_json::Value| row["role"] == "toolResult";
    until("the result", async || bench.gateway.transcript(SESSION).iter().any(has_result).then_some(()))
        .await;
    bench.gateway.add_rows(SESSION, rows);
    (bench, asked)
}

#[tokio::test]
async fn n3_n4_an_answer_far_back_in_the_transcript_decides_a_forgotten_question() {
    let (bench, asked) = answered_and_forgotten(1_000).await;
    let _adapter = bench.adapter().await;
    assert_eq!(bench.returned(&asked).await, delivered("decided by the gateway"));
    let closed = bench.question(SESSION, |_| true).await.value;
    assert_eq!(closed.decision().unwrap().outcome, answered(Answer::option(0)));
}

#[tokio::test]
async fn n3_n4_a_forgotten_question_without_its_result_is_unconfirmed_and_never_denied() {
    let (bench, asked) = answered_and_forgotten(6_000).await;
    let _adapter = bench.adapter().await;
    let why = "question_not_found, and only a part of the transcript was read".into();
    assert_eq!(bench.returned(&asked).await, Returned::Unconfirmed { why });
}

#[tokio::test]
async fn what_a_gateway_that_is_gone_did_with_an_outcome_is_unconfirmed() {
    let options = GatewayOptions { ask_user_at_least: Duration::from_secs(2), ..Default::default() };
    let bench = Bench::start(options).await;
    let adapter = bench.adapter().await;
    adapter.is_ready().await;
    let short = ASK.replacen('{', r#"{"timeoutSeconds":2,"#, 1);
    bench.send(SESSION, &short).await;
    let asked = bench.question(SESSION, |_| true).await.value;
    bench.gateway.kill();
    assert_eq!(bench.returned(&asked).await, Returned::Unconfirmed { why: "gateway_unreachable".into() });
    let closed = bench.question(SESSION, |_| true).await.value;
    assert_eq!(closed.decision().unwrap().outcome, Outcome::Expired);
}

#[tokio::test]
async fn a_restart_of_nats_loses_neither_questions_nor_messages() {
    let (bench, _adapter) = Bench::with_adapter().await;
    bench.send(SESSION, ASK).await;
    let asked = bench.question(SESSION, |_| true).await.value;
    bench.server.restart().await.unwrap();
    let saved = until("a router", async || {
        let prompt = asked.question.prompts[0].id.clone();
        let answers = [(prompt, Answer::option(1))].into();
        let by = Responder { user: OWNER.into(), name: None, chat: None };
        let content = ReplyContent::Answers { answers };
        let reply = Reply { id: "r1".into(), by, surface: Surface::Card, content };
        bench.bus.reply(&ReplyRequest { schema: 1, key: asked.key.clone(), reply }).await.ok()
    })
    .await;
    assert_eq!(saved, ReplyResponse::Saved);
    assert_eq!(bench.returned(&asked).await, delivered("resolved"));
    let run = bench.send("agent:main:owui-2", "hello again").await;
    assert_eq!(crate::bench::streamed(&bench.ended("agent:main:owui-2", &run).await), "echo: hello again");
}

/// One request of an MCP client of the Gateway's name; answered by an SSE stream or at once.
async fn mcp(adapter: &Adapter, session: Option<&str>, body: serde_json::Value) -> reqwest::Response {
    let request = testkit::http_client()
        .post(format!("http://{}/mcp", adapter.address))
        .bearer_auth(crate::bench::TOKEN)
        .header("accept", "application/json, text/event-stream")
        .header("mcp-protocol-version", "2025-11-25");
    let request = session.into_iter().fold(request, |request, id| request.header("mcp-session-id", id));
    request.json(&body).send().await.unwrap()
}

#[tokio::test]
async fn the_gateways_tool_result_proves_that_an_mcp_call_has_its_answer() {
    let tool = "askbus__request_user_input";
    let options = GatewayOptions { tools_by_hand: vec![tool.into()], ..Default::default() };
    let bench = Bench::start(options).await;
    let adapter = bench.adapter().await;
    adapter.is_ready().await;
    let initialize = json!({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": {
        "protocolVersion": "2025-11-25", "capabilities": {},
        "clientInfo": {"name": "openclaw-bundle-mcp", "version": "1"}}});
    let begun = mcp(&adapter, None, initialize).await;
    let id = begun.headers()["mcp-session-id"].to_str().unwrap().to_owned();
    let ready = json!({"jsonrpc": "2.0", "method": "notifications/initialized"});
    mcp(&adapter, Some(&id), ready).await;

    let args = json!({"question": "Where to?", "choices": ["A", "B"]});
    let run = bench.send(SESSION, &format!("CALL {tool} {args}")).await;
    let call = until("the call", async || bench.gateway.calls_by_hand().pop()).await;
    let params = json!({"name": "request_user_input", "arguments": args});
    let body = json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params});
    let answer = mcp(&adapter, Some(&id), body).await;
    let asked = bench.question(SESSION, |_| true).await.value;
    assert_eq!((asked.road, &asked.key.run, &asked.call), (Road::Mcp, &run, &call));
    bench.answer(&asked, Answer::option(1)).await;
    let answer = answer.text().await.unwrap();
    assert!(answer.contains(r#""text":"B""#), "{answer}");
    assert_eq!(bench.question(SESSION, |_| true).await.value.returned(), None);
    assert!(bench.gateway.finish_call(&call, "B", json!({}), false));
    assert_eq!(bench.returned(&asked).await, delivered("tool_result"));
}

#[tokio::test]
async fn the_end_of_a_run_cancels_what_its_calls_still_ask() {
    let tool = "by_hand";
    let options = GatewayOptions { tools_by_hand: vec![tool.into()], ..Default::default() };
    let bench = Bench::start(options).await;
    let adapter = bench.adapter().await;
    adapter.is_ready().await;
    // A call of this run whose plugin never says that it is over.
    let run = bench.send(SESSION, &format!("CALL {tool} {{}}")).await;
    until("the call", async || bench.gateway.calls_by_hand().pop()).await;
    let call = json!({"gateway": "openclaw", "sessionKey": SESSION, "runId": run, "toolCallId": "call_x",
        "args": {"question": "Where to?"}});
    let url = format!("http://{}/v1/calls/call_x.1", adapter.address);
    let request = testkit::http_client().post(url).bearer_auth(crate::bench::TOKEN).json(&call);
    let _open = request.send().await.unwrap();
    let asked = bench.question(SESSION, |e| e.road == Road::Plugin).await.value;
    bench.gateway.stop_run(SESSION);
    assert_eq!(bench.returned(&asked).await, Returned::Unconfirmed { why: "run_ended".into() });
    let closed = bench.question(SESSION, |e| e.key == asked.key).await.value;
    let reason = CancelReason::RunEnded;
    assert_eq!(closed.decision().unwrap().outcome, Outcome::Cancelled { reason });
}

async fn asked_by_the_plugin_of_a_known_boot() -> (Bench, Adapter, Entry) {
    let (bench, adapter) = Bench::with_adapter().await;
    until("the boot id", async || bench.bus.boot_id("openclaw").await.ok()?).await;
    bench.plug_in(&adapter, true);
    bench.send(SESSION, r#"CALL request_user_input {"question":"Where to?"}"#).await;
    let asked = bench.question(SESSION, |_| true).await.value;
    (bench, adapter, asked)
}

#[tokio::test]
async fn a_restart_is_remembered_only_when_the_calls_it_has_lost_are_closed() {
    let (bench, _adapter, asked) = asked_by_the_plugin_of_a_known_boot().await;
    bench.gateway.kill();
    assert_eq!(bench.answer(&asked, Answer::text("Oslo")).await, ReplyResponse::Saved);
    bench.gateway.start_again().await.unwrap();
    let boot = bench.gateway.boot_id();
    until("the new boot id", async || (bench.bus.boot_id("openclaw").await.ok()?? == boot).then_some(()))
        .await;
    // An adapter that begins now would take it for the end of a run.
    let closed = bench.bus.question(&asked.key).await.unwrap().unwrap().value;
    assert_eq!(closed.returned(), Some(&Returned::Unconfirmed { why: "gateway_restart".into() }));
}

#[tokio::test]
async fn a_restart_of_the_gateway_cancels_the_calls_of_its_plugin() {
    let (bench, _adapter, asked) = asked_by_the_plugin_of_a_known_boot().await;
    bench.gateway.restart().await.unwrap();
    assert_eq!(bench.returned(&asked).await, Returned::Unconfirmed { why: "gateway_restart".into() });
    let closed = bench.question(SESSION, |_| true).await.value;
    let reason = CancelReason::GatewayRestart;
    assert_eq!(closed.decision().unwrap().outcome, Outcome::Cancelled { reason });
}
