//! Several adapters of one gateway.

use std::time::{Duration, Instant};

use ask_core::outcome::Returned;
use ask_core::reply::Answer;
use testkit::gateway::GatewayOptions;

use testkit::until;

use crate::bench::{ASK, Bench, SESSION};

#[tokio::test]
async fn one_replica_works_and_the_next_takes_over_within_five_seconds() {
    let bench = Bench::start(GatewayOptions::default()).await;
    let first = bench.adapter().await;
    first.is_ready().await;
    until("the connection", async || (bench.gateway.connections() == 1).then_some(())).await;
    let second = bench.adapter().await;
    second.is_ready().await;
    assert_eq!(bench.gateway.connections(), 1, "a standby has no connection");
    bench.send(SESSION, ASK).await;
    let asked = bench.question(SESSION, |_| true).await.value;
    drop(first);
    let died = Instant::now();
    until("the take-over", async || {
        let epoch = bench.bus.lease("openclaw").await.ok()??.value.epoch;
        (epoch == 2 && bench.gateway.connections() == 1).then_some(())
    })
    .await;
    assert!(died.elapsed() < Duration::from_secs(5), "{:?}", died.elapsed());
    bench.answer(&asked, Answer::option(0)).await;
    assert_eq!(bench.returned(&asked).await, Returned::Delivered { proof: "resolved".into() });
    assert_eq!(bench.gateway.outcomes().len(), 1);
}

#[tokio::test]
async fn a_replica_that_stops_gives_its_work_away_at_once() {
    let (bench, first) = Bench::with_adapter().await;
    let second = bench.adapter().await;
    second.is_ready().await;
    first.stop();
    let stopped = Instant::now();
    until("the take-over", async || {
        let lease = bench.bus.lease("openclaw").await.ok()??.value;
        (lease.epoch == 2 && !lease.holder.is_empty()).then_some(())
    })
    .await;
    assert!(stopped.elapsed() < Duration::from_secs(2), "{:?}", stopped.elapsed());
}
