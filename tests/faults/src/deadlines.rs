//! Very many questions that fall due together, while everything is killed.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use ask_bus::{Bus, Change, Stored};
use ask_core::entry::{DecidedBy, Entry, Road};
use ask_core::key::QuestionKey;
use ask_core::outcome::Outcome;
use ask_core::question::{Prompt, Question};
use ask_core::time::Timestamp;
use futures::StreamExt as _;
use serde::Serialize;

use crate::world::{GATEWAY, Service, World, WorldOptions};

/// How many are written at the same time.
const AT_ONCE: usize = 256;
/// So many are asked first, to see how long asking takes here.
const WARM_UP: usize = 2_000;
const DUE: &str = "due";
/// Within this time after the last deadline, all must have expired.
const WITHIN: Duration = Duration::from_secs(60);

/// What came of it.
#[derive(Debug, Default, Serialize)]
pub struct Deadlines {
    /// How many questions fell due within one second.
    pub questions: usize,
    /// How long asking them took, in seconds.
    pub asked_s: f64,
    /// How many had expired when nats-server and both routers were killed.
    pub before_the_kill: usize,
    /// How long after the last deadline the last one expired, in seconds.
    pub expired_s: f64,
    /// How many expired once.
    pub once: usize,
    /// How many were still pending at the end.
    pub pending: usize,
    /// How many were decided twice, early, or otherwise.
    pub wrong: usize,
}

/// Runs it in a world of its own, which has routers alone.
///
/// # Errors
/// A part does not start, or the bus can't be read.
pub async fn run(options: WorldOptions, count: usize) -> Result<Deadlines> {
    let world = World::start(WorldOptions { services: &[Service::Router], ..options }).await?;
    // Routers only slow the asking down.
    for index in 0..2 {
        world.kill_replica((Service::Router, index)).await?;
    }
    let bus = &world.bus;
    let began = Instant::now();
    let far = Timestamp::now().plus(Duration::from_secs(24 * 3600));
    ask(bus, "later", WARM_UP, |_| far).await?;
    // As long as this machine needs, and some more for the routers to load it all.
    let asking = began.elapsed().mul_f64(1.5 * count as f64 / WARM_UP as f64);
    let lead = asking + Duration::from_secs(15) + Duration::from_micros(count as u64 * 150);
    let began = Instant::now();
    let first_due = Timestamp::now().plus(lead);
    eprintln!("faults: asking {count} questions that fall due in {} s", lead.as_secs());
    ask(bus, DUE, count, |n| first_due.plus(Duration::from_millis(n as u64 * 1000 / count as u64))).await?;
    let asked_s = began.elapsed().as_secs_f64();
    for index in 0..2 {
        world.start_replica((Service::Router, index), None)?;
    }
    world.all_ready().await?;
    let left = first_due.since(Timestamp::now());
    eprintln!(
        "faults: asked within {asked_s:.1} s; both routers are ready {:.1} s before",
        left.as_secs_f64()
    );

    // Follow the bucket, as everybody does.
    let mut seen = Seen::new(count);
    let mut watch = bus.watch_questions(None);
    let last_due = first_due.plus(Duration::from_secs(1));
    let give_up = last_due.plus(WITHIN + Duration::from_secs(60));
    let mut killed = None;
    let mut said = Instant::now();
    while seen.decided < count && Timestamp::now() < give_up {
        world.tend()?;
        if said.elapsed() > Duration::from_secs(5) {
            said = Instant::now();
            let late = Timestamp::now().since(last_due).as_secs();
            eprintln!("faults: {} of {count} have expired, {late} s after the last deadline", seen.decided);
        }
        let change = tokio::time::timeout(Duration::from_millis(200), watch.next()).await;
        if let Ok(change) = change {
            match change.context("the watch ended")? {
                Change::Put { value, revision, .. } => seen.note(&Stored { value: *value, revision }),
                Change::Deleted { key, .. } => bail!("{key} was deleted"),
                Change::Loading | Change::Loaded { .. } => {}
            }
        }
        // In the middle: some have expired, and most have not.
        if killed.is_none() && seen.decided >= count / 5 {
            let before = seen.decided;
            eprintln!("faults: {before} have expired; killing nats-server and both routers");
            killed = Some(before);
            for index in 0..2 {
                world.kill_replica((Service::Router, index)).await?;
            }
            world.restart_nats(Duration::from_millis(500)).await?;
            for index in 0..2 {
                world.start_replica((Service::Router, index), None)?;
            }
        }
    }
    // What is on record in the end counts.
    let mut result = Deadlines {
        questions: count,
        asked_s,
        before_the_kill: killed.unwrap_or_default(),
        ..Default::default()
    };
    let mut last = first_due;
    let all = bus.all_questions().await?;
    for Stored { value, .. } in all.into_iter().filter(|stored| stored.value.key.question.starts_with(DUE)) {
        match value.decision() {
            None => result.pending += 1,
            Some(decision) => {
                let by_deadline = matches!(&decision.by, DecidedBy::Rule { name } if name == "deadline");
                let twice = seen.writes(&value.key) > 1;
                if decision.outcome == Outcome::Expired
                    && by_deadline
                    && decision.at >= value.deadline
                    && !twice
                {
                    result.once += 1;
                } else {
                    result.wrong += 1;
                }
                last = last.max(decision.at);
            }
        }
    }
    result.expired_s = last.since(last_due).as_secs_f64();
    Ok(result)
}

impl Deadlines {
    /// Whether it is as it must be.
    pub fn is_good(&self) -> bool {
        self.once == self.questions
            && self.before_the_kill < self.questions
            && self.before_the_kill > 0
            && self.expired_s <= WITHIN.as_secs_f64()
    }
}

/// Which revisions had a decision, by question.
struct Seen {
    decided: usize,
    revisions: std::collections::HashMap<QuestionKey, Vec<u64>>,
}

impl Seen {
    fn new(count: usize) -> Self {
        Self { decided: 0, revisions: std::collections::HashMap::with_capacity(count) }
    }

    fn note(&mut self, stored: &Stored<Entry>) {
        if stored.value.is_pending() {
            return;
        }
        let revisions = self.revisions.entry(stored.value.key.clone()).or_default();
        if revisions.is_empty() {
            self.decided += 1;
        }
        if !revisions.contains(&stored.revision) {
            revisions.push(stored.revision);
        }
    }

    fn writes(&self, key: &QuestionKey) -> usize {
        self.revisions.get(key).map_or(0, Vec::len)
    }
}

async fn ask(bus: &Bus, name: &str, count: usize, due: impl Fn(usize) -> Timestamp) -> Result<()> {
    let ask = |n| {
        let entry = entry(name, n, due(n));
        async move { anyhow::Ok(bus.write_asked(&entry?).await?) }
    };
    let asked = futures::stream::iter(0..count).map(ask).buffer_unordered(AT_ONCE);
    let mut asked = std::pin::pin!(asked);
    while let Some(one) = asked.next().await {
        one?;
    }
    Ok(())
}

fn entry(name: &str, n: usize, deadline: Timestamp) -> Result<Entry> {
    let key = QuestionKey {
        gateway: GATEWAY.into(),
        session: format!("agent:main:{name}-{}", n % 1000),
        run: "run".into(),
        question: format!("{name}-{n}"),
    };
    let question = Question::new(vec![Prompt::free_text("Who is there?")])?;
    // A session without a front end leaves such a question to its Gateway, so that it waits.
    let road = Road::Native;
    Ok(Entry::ask(key, road, "ask_user", "call", question, Timestamp::now(), deadline, None)?)
}
