//! Lets some sessions come to their end, and checks them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use ask_core::time::Timestamp;

use crate::checker::{Finding, Kind, check};
use crate::history::History;
use crate::person::{GatewaySaw, Person};
use crate::world::{GATEWAY, PER_RUN, SharedWorld};

/// How long everything may take to come to its end once nothing is away any more.
const PATIENCE: Duration = Duration::from_secs(75);
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// What came of some sessions.
#[derive(Debug)]
pub struct Settled {
    /// What is wrong.
    pub findings: Vec<Finding>,
    /// How many lives were checked.
    pub lives: usize,
    /// All that was recorded.
    pub history: History,
}

/// Waits until nothing is under way, and returns what the checker says then.
///
/// # Errors
/// The bus can't be read.
pub async fn settle(world: &SharedWorld, people: &[Arc<Person>]) -> Result<Settled> {
    // A mutant is found by what it leaves undone too, and that takes no longer.
    let patience = if world.options().mutant.is_some() { PATIENCE / 3 } else { PATIENCE };
    let give_up = Instant::now() + patience;
    loop {
        let late = Instant::now() > give_up;
        // Reading it all is no help while people are busy.
        if !late && people.iter().any(|person| person.is_waiting()) {
            tokio::time::sleep(LOOK_AGAIN).await;
            continue;
        }
        match look(world, people).await {
            Ok((findings, _)) if !late && findings.iter().any(|finding| finding.heals) => {}
            Ok(_) => {
                // Nothing is under way any more: only now does everything that is read fit together.
                let (findings, history) = look(world, people).await?;
                people.iter().for_each(|person| person.end());
                let lives = history.sessions.iter().map(|session| session.lives.len()).sum();
                return Ok(Settled { findings, lives, history });
            }
            Err(error) if late => return Err(error),
            Err(_) => {}
        }
        tokio::time::sleep(LOOK_AGAIN).await;
    }
}

async fn look(world: &SharedWorld, people: &[Arc<Person>]) -> Result<(Vec<Finding>, History)> {
    let history = read(world, people).await?;
    let mut findings = check(&history);
    let unsent = world.bus.unsent(GATEWAY).await?;
    if unsent > 0 {
        let what = format!("{unsent} messages to the gateway were not acknowledged");
        findings.push(Finding { kind: Kind::Lost, session: String::new(), what, heals: true });
    }
    Ok((findings, history))
}

async fn read(world: &SharedWorld, people: &[Arc<Person>]) -> Result<History> {
    let mut history = History::default();
    for person in people {
        let saw = GatewaySaw::now(world);
        history.sessions.push(person.history(&saw).await?);
    }
    history.broken = world.broken();
    history.gateway_restarted_ms = world.gateway_restarted_ms();
    history.late_as_message = world.options().late_as_message;
    history.per_run = PER_RUN;
    history.outage_ms = world.outage().as_millis() as u64;
    history.read_ms = Timestamp::now().0;
    Ok(history)
}
