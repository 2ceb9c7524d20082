//! Messages to the agent, and what its runs put out.

use ask_core::reply::Answer;
use ask_core::wire::{RunEnd, RunEvent, StopResponse, ToolPhase};
use serde_json::json;
use testkit::gateway::{Fault, GatewayOptions, Rejection};

use testkit::{WITHIN, until};

use crate::bench::{ASK, Bench, SESSION, streamed};

fn ended(what: &RunEvent) -> Option<(&RunEnd, Option<&str>)> {
    match what {
        RunEvent::Ended { how, text } => Some((how, text.as_deref())),
        _ => None,
    }
}

#[tokio::test]
async fn a_turn_streams_its_text_once_and_ends_with_the_whole() {
    let (bench, _adapter) = Bench::with_adapter().await;
    let run = bench.send(SESSION, "hello there, how are you").await;
    let items = bench.ended(SESSION, &run).await;
    let text = "echo: hello there, how are you";
    assert_eq!(streamed(&items), text);
    let last = items.iter().rev().find_map(|item| ended(&item.what)).unwrap();
    assert_eq!(last, (&RunEnd::Done, Some(text)));
    assert!(items.iter().any(|item| item.what == RunEvent::Started));
    assert!(items.iter().any(|item| item.what == RunEvent::Sent { into: None }));
}

#[tokio::test]
async fn a_message_during_a_run_steers_it() {
    let (bench, _adapter) = Bench::with_adapter().await;
    let run = bench.send(SESSION, "SLOW 4").await;
    bench.put_out(SESSION, &run, "text", |what| matches!(what, RunEvent::Text { .. })).await;
    let steering = bench.send(SESSION, "and this").await;
    let sent = |what: &RunEvent| *what == RunEvent::Sent { into: Some(run.clone()) };
    bench.put_out(SESSION, &steering, "the steering", sent).await;
    let items = bench.ended(SESSION, &steering).await;
    assert_eq!(items.iter().find_map(|item| ended(&item.what)).unwrap().0, &RunEnd::Empty);
    let items = bench.ended(SESSION, &run).await;
    assert!(streamed(&items).contains("echo: and this"), "{}", streamed(&items));
}

#[tokio::test]
async fn stop_aborts_the_run() {
    let (bench, _adapter) = Bench::with_adapter().await;
    let run = bench.send(SESSION, "SLOW 100").await;
    bench.put_out(SESSION, &run, "text", |what| matches!(what, RunEvent::Text { .. })).await;
    assert_eq!(bench.stop_session(SESSION).await, StopResponse::Stopped { cancelled: 0, aborted: true });
    let items = bench.ended(SESSION, &run).await;
    assert_eq!(items.iter().find_map(|item| ended(&item.what)).unwrap().0, &RunEnd::Aborted);
}

#[tokio::test]
async fn a_message_whose_response_was_lost_is_not_sent_twice() {
    for restart in [false, true] {
        let (bench, _adapter) = Bench::with_adapter().await;
        bench.gateway.fault("chat.send", Fault::LoseResponse);
        let run = bench.send(SESSION, "hello").await;
        if restart {
            let written =
                |gateway: &testkit::gateway::ScriptedGateway| gateway.transcript(SESSION).len() == 2;
            assert!(bench.gateway.until(written, WITHIN).await);
            bench.gateway.restart().await.unwrap();
        }
        bench.put_out(SESSION, &run, "that it was sent", |what| matches!(what, RunEvent::Sent { .. })).await;
        bench.ended(SESSION, &run).await;
        let rows = bench.gateway.transcript(SESSION);
        assert_eq!(rows.iter().filter(|row| row["role"] == "user").count(), 1, "restart: {restart}");
        assert_eq!(rows.iter().filter(|row| row["role"] == "assistant").count(), 1, "restart: {restart}");
    }
}

#[tokio::test]
async fn s11_a_message_far_back_in_the_transcript_is_not_sent_again() {
    let (bench, adapter) = Bench::with_adapter().await;
    bench.gateway.fault("chat.send", Fault::Delay(WITHIN));
    let run = bench.send(SESSION, "hello").await;
    let is_answered = |gateway: &testkit::gateway::ScriptedGateway| gateway.transcript(SESSION).len() == 2;
    assert!(bench.gateway.until(is_answered, WITHIN).await);
    drop(adapter);
    bench.gateway.add_rows(SESSION, 500);
    bench.gateway.restart().await.unwrap();
    let _adapter = bench.adapter().await;
    let ended = bench.ended(SESSION, &run).await;
    assert_eq!(streamed(&ended), "echo: hello");
    let sent = bench.gateway.requests().into_iter().filter(|request| request.method == "chat.send");
    assert_eq!(sent.count(), 1);
}

#[tokio::test]
async fn what_the_gateway_refuses_for_good_is_told_and_the_next_message_goes_on() {
    let (bench, _adapter) = Bench::with_adapter().await;
    bench.gateway.fault("chat.send", Fault::Refuse(Rejection::starting()));
    bench.gateway.fault("chat.send", Fault::Refuse(Rejection::new("INVALID_REQUEST", "too odd")));
    let run = bench.send(SESSION, "first").await;
    let failed =
        bench.put_out(SESSION, &run, "the failure", |what| matches!(what, RunEvent::Failed { .. })).await;
    let Some(RunEvent::Failed { why }) = failed.last().map(|item| &item.what) else { panic!("{failed:?}") };
    assert!(why.contains("too odd"), "{why}");
    let run = bench.send(SESSION, "second").await;
    assert_eq!(streamed(&bench.ended(SESSION, &run).await), "echo: second");
}

#[tokio::test]
async fn text_goes_on_where_a_dead_adapter_left_it() {
    let bench = Bench::start(GatewayOptions::default()).await;
    let adapter = bench.adapter().await;
    adapter.is_ready().await;
    let run = bench.send(SESSION, "SLOW 16").await;
    bench.put_out(SESSION, &run, "text", |what| matches!(what, RunEvent::Text { .. })).await;
    drop(adapter);
    let _adapter = bench.adapter().await;
    let items = bench.ended(SESSION, &run).await;
    let words: Vec<String> = (0..16).map(|n| format!("w{n}")).collect();
    assert_eq!(streamed(&items), words.join(" "));
}

#[tokio::test]
async fn a_run_that_ends_while_there_is_no_adapter_still_ends_on_the_bus() {
    let bench = Bench::start(GatewayOptions::default()).await;
    let adapter = bench.adapter().await;
    adapter.is_ready().await;
    let run = bench.send(SESSION, "SLOW 3").await;
    bench.put_out(SESSION, &run, "text", |what| matches!(what, RunEvent::Text { .. })).await;
    drop(adapter);
    assert!(bench.gateway.until(|gateway| gateway.transcript(SESSION).len() == 2, WITHIN).await);
    let _adapter = bench.adapter().await;
    let items = bench.ended(SESSION, &run).await;
    assert_eq!(streamed(&items), "w0 w1 w2");
    assert_eq!(items.iter().find_map(|item| ended(&item.what)).unwrap().0, &RunEnd::Done);
}

#[tokio::test]
async fn tool_calls_are_put_out_and_of_asking_tools_only_a_digest() {
    let options = GatewayOptions { tools_by_hand: vec!["read".into()], ..Default::default() };
    let bench = Bench::start(options).await;
    let adapter = bench.adapter().await;
    adapter.is_ready().await;
    let run = bench.send(SESSION, &format!(r#"CALL read {{"path":"a.txt"}} THEN {ASK}"#)).await;
    let call = until("the call", async || bench.gateway.calls_by_hand().pop()).await;
    bench.gateway.finish_call(&call, "its content", json!({}), false);
    let asked = bench.question(SESSION, |_| true).await.value;
    bench.answer(&asked, Answer::option(0)).await;
    let items = bench.ended(SESSION, &run).await;
    let tools: Vec<_> = items
        .iter()
        .filter_map(|item| match &item.what {
            RunEvent::Tool { name, phase, data, ok, .. } => Some((name.as_str(), *phase, data.clone(), *ok)),
            _ => None,
        })
        .collect();
    assert_eq!(tools[0], ("read", ToolPhase::Start, Some(json!({"path": "a.txt"})), None));
    assert_eq!((tools[1].0, tools[1].1, tools[1].3), ("read", ToolPhase::End, Some(true)));
    let fields: Vec<_> = tools[2].2.as_ref().unwrap().as_object().unwrap().keys().collect();
    assert_eq!((tools[2].0, tools[2].1, fields.len()), ("ask_user", ToolPhase::Start, 1));
    assert_eq!((tools[3].0, tools[3].1, &tools[3].2), ("ask_user", ToolPhase::End, &None));
}

#[tokio::test]
async fn the_value_of_a_secret_is_masked_wherever_its_run_repeats_it() {
    let (bench, adapter) = Bench::with_adapter().await;
    bench.plug_in(&adapter, false);
    let run = bench.send(SESSION, r#"CALL request_user_input {"question":"Key?","secret":true}"#).await;
    let asked = bench.question(SESSION, |_| true).await.value;
    bench.answer_secret(&asked, "canary 5521 value").await;
    let items = bench.ended(SESSION, &run).await;
    assert!(bench.gateway.raw_contains("canary 5521 value"), "the agent has repeated it");
    let all = format!("{items:?}");
    assert!(!all.contains("canary 5521 value"), "{all}");
    assert!(streamed(&items).contains("•••"), "{all}");
}

#[tokio::test]
async fn the_agents_are_listed() {
    let (bench, _adapter) = Bench::with_adapter().await;
    let agents = until("the agents", async || bench.bus.agents("openclaw").await.ok()).await;
    let named: Vec<_> = agents.iter().map(|agent| (agent.id.as_str(), agent.name.as_str())).collect();
    assert_eq!(named, [("main", "main"), ("ops", "Ops bot")]);
}

#[tokio::test]
async fn an_adapter_that_does_not_hold_a_secret_shows_nothing_of_its_run() {
    let options = GatewayOptions { tools_by_hand: vec!["hold".into()], ..Default::default() };
    let bench = Bench::start(options).await;
    let adapter = bench.adapter().await;
    adapter.is_ready().await;
    bench.plug_in(&adapter, false);
    let ask = r#"CALL request_user_input {"question":"Key?","secret":true} THEN CALL hold {}"#;
    let run = bench.send(SESSION, ask).await;
    let asked = bench.question(SESSION, |_| true).await.value;
    bench.answer_secret(&asked, "canary 5521 value").await;
    bench.returned(&asked).await;
    let call = until("the call", async || bench.gateway.calls_by_hand().pop()).await;
    drop(adapter);
    let adapter = bench.adapter().await;
    until("the connection", async || (bench.gateway.connections() == 1).then_some(())).await;
    adapter.is_ready().await;
    bench.gateway.finish_call(&call, "done", json!({}), false);
    let items = bench.ended(SESSION, &run).await;
    assert!(bench.gateway.raw_contains("canary 5521 value"), "the agent has repeated it");
    let all = format!("{items:?}");
    assert!(!all.contains("canary"), "{all}");
    let last = items.iter().rev().find_map(|item| ended(&item.what)).unwrap();
    assert!(last.1.unwrap().contains("is not shown"), "{last:?}");
}
