//! Runs one history, in a world that many histories share one after the other.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;

use crate::checker::{Finding, Kind};
use crate::person::{Person, SessionPlan};
use crate::plan::{Break, Plan};
use crate::settle::{Settled, settle};
use crate::world::SharedWorld;

/// Runs the history of a seed.
///
/// # Errors
/// A part of the world does not start again.
pub async fn run(world: &SharedWorld, plan: &Plan) -> Result<Settled> {
    world.forget_breaks();
    let settled = play(world, &format!("h{}", plan.seed), &plan.sessions, &plan.breaks).await?;
    world.disarm().await?;
    Ok(settled)
}

/// Lets people go through their sessions while things break, and checks what came of it.
///
/// # Errors
/// A part of the world does not start again.
pub async fn play(
    world: &SharedWorld,
    tag: &str,
    sessions: &[SessionPlan],
    breaks: &[(u64, Break)],
) -> Result<Settled> {
    let keeper = tokio::spawn(keep(world.clone()));
    let start = |(n, plan): (usize, &SessionPlan)| Person::start(world, &format!("{tag}s{n}"), plan);
    let people: Vec<Arc<Person>> = sessions.iter().enumerate().map(start).collect();
    let happen = breaks.iter().map(async |(at, one)| {
        tokio::time::sleep(Duration::from_millis(*at)).await;
        one.happen(world).await
    });
    futures::future::try_join_all(happen).await?;
    let settled = settle(world, &people).await;
    keeper.abort();
    let mut settled = settled?;
    world.adapters.lose_responses(0);
    world.emitters.lose_responses(0);
    for id in world.ids() {
        world.nats_proxy(id).into_iter().for_each(|proxy| proxy.lose_responses(0));
    }
    for what in world.take_unexpected() {
        settled.findings.push(Finding { kind: Kind::Lost, session: String::new(), what, heals: false });
    }
    Ok(settled)
}

/// Starts again what crashes.
async fn keep(world: SharedWorld) {
    loop {
        if let Err(error) = world.tend() {
            eprintln!("faults: {error:#}");
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
