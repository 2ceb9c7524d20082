//! The same against the real Gateway, as far as it may differ from the scripted one.

use ask_core::entry::Road;
use ask_core::outcome::{CancelReason, Outcome, Returned};
use ask_core::reply::{Answer, ReplyContent};
use ask_core::wire::{ReplyResponse, RunEnd, RunEvent, StopResponse, ToolPhase};

use testkit::until;

use crate::bench::{ASK, Bench, streamed};
use crate::real_gateway::RealGateway;

fn how(items: &[ask_core::wire::RunItem]) -> RunEnd {
    let end = items.iter().find_map(|item| match &item.what {
        RunEvent::Ended { how, .. } => Some(how.clone()),
        _ => None,
    });
    end.unwrap()
}

async fn ready(bench: &Bench<RealGateway>) -> crate::bench::Adapter {
    let adapter = bench.adapter().await;
    adapter.is_ready().await;
    adapter
}

#[tokio::test]
#[ignore = "needs the real Gateway: ./dev e2e"]
async fn real_questions_are_asked_answered_and_returned() {
    let bench = Bench::real("bridge-questions").await;
    let _adapter = ready(&bench).await;
    let session = "agent:main:owui-q1";
    let run = bench.send(session, ASK).await;
    let asked = bench.question(session, |_| true).await.value;
    assert_eq!((asked.road, &asked.key.run), (Road::Native, &run));
    assert!(!asked.call.is_empty());
    // A message while it waits leaves it alone, and runs afterwards.
    let joke = bench.send(session, "Tell me a joke").await;
    assert_eq!(bench.answer(&asked, Answer::option(2)).await, ReplyResponse::Saved);
    assert_eq!(bench.returned(&asked).await, Returned::Delivered { proof: "resolved".into() });
    let items = bench.ended(session, &run).await;
    assert_eq!(how(&items), RunEnd::Done);
    assert!(streamed(&items).contains("Color: Blue"), "{}", streamed(&items));
    let data = |items: &[ask_core::wire::RunItem]| {
        let ends = items.iter().filter_map(|item| match &item.what {
            RunEvent::Tool { phase: ToolPhase::End, name, data, .. } => Some((name.clone(), data.clone())),
            _ => None,
        });
        ends.collect::<Vec<_>>()
    };
    assert_eq!(data(&items), [("ask_user".into(), None)]);
    let items = bench.ended(session, &joke).await;
    assert!(streamed(&items).contains("Tell me a joke"), "{items:?}");

    let session = "agent:main:owui-q2";
    bench.send(session, ASK).await;
    let asked = bench.question(session, |_| true).await.value;
    bench.reply(&asked, "r2", ReplyContent::Declined).await;
    assert_eq!(bench.returned(&asked).await, Returned::Delivered { proof: "resolved".into() });

    let session = "agent:main:owui-q3";
    let run = bench.send(session, ASK).await;
    let asked = bench.question(session, |_| true).await.value;
    let stopped = bench.stop_session(session).await;
    assert_eq!(stopped, StopResponse::Stopped { cancelled: 1, aborted: true });
    let closed = bench.returned(&asked).await;
    assert!(matches!(closed, Returned::Delivered { .. }), "{closed:?}");
    assert_eq!(how(&bench.ended(session, &run).await), RunEnd::Aborted);
}

#[tokio::test]
#[ignore = "needs the real Gateway: ./dev e2e"]
async fn real_turns_stream_steer_and_outlive_the_adapter() {
    let bench = Bench::real("bridge-turns").await;
    let adapter = ready(&bench).await;
    let session = "agent:main:owui-t1";
    let run = bench.send(session, "hello there").await;
    let items = bench.ended(session, &run).await;
    assert!(streamed(&items).contains("hello there"), "{items:?}");
    assert_eq!(how(&items), RunEnd::Done);

    // Steering.
    let run = bench.send(session, "SLOW 6").await;
    bench.put_out(session, &run, "text", |what| matches!(what, RunEvent::Text { .. })).await;
    let steering = bench.send(session, "and this").await;
    let into = RunEvent::Sent { into: Some(run.clone()) };
    bench.put_out(session, &steering, "the steering", |what| *what == into).await;
    assert_eq!(how(&bench.ended(session, &steering).await), RunEnd::Empty);
    let items = bench.ended(session, &run).await;
    assert!(streamed(&items).contains("and this"), "{items:?}");

    // A new adapter goes on where the dead one stopped.
    let run = bench.send(session, "SLOW 24").await;
    bench.put_out(session, &run, "text", |what| matches!(what, RunEvent::Text { .. })).await;
    drop(adapter);
    let _adapter = bench.adapter().await;
    let items = bench.ended(session, &run).await;
    let words: Vec<String> = (0..24).map(|n| format!("w{n}")).collect();
    assert_eq!(streamed(&items).trim(), words.join(" "));
}

#[tokio::test]
#[ignore = "needs the real Gateway: ./dev e2e"]
async fn a_killed_real_gateway_cancels_its_questions_and_answers_no_message_twice() {
    let mut bench = Bench::real("bridge-kill").await;
    let _adapter = ready(&bench).await;
    until("the boot id", async || bench.bus.boot_id("openclaw").await.ok()?).await;
    let session = "agent:main:owui-k1";
    let run = bench.send(session, ASK).await;
    let asked = bench.question(session, |_| true).await.value;
    bench.gateway.kill_and_restart().await;
    let unconfirmed = Returned::Unconfirmed { why: "gateway_restart".into() };
    assert_eq!(bench.returned(&asked).await, unconfirmed);
    let closed = bench.question(session, |e| e.key == asked.key).await.value;
    let reason = CancelReason::GatewayRestart;
    assert_eq!(closed.decision().unwrap().outcome, Outcome::Cancelled { reason });
    assert!(matches!(how(&bench.ended(session, &run).await), RunEnd::Error { .. }));
}
