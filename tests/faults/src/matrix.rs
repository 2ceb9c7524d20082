//! The matrix: a crash before and after every effect, and of nats-server at every step of a life.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, bail};
use ask_bus::Effect;
use serde_json::json;

use crate::checker::{Finding, Kind};
use crate::histories::play;
use crate::person::{Moment, Road, SessionPlan, What};
use crate::plan::Break;
use crate::settle::Settled;
use crate::world::{Service, SharedWorld, World, WorldOptions, text};

/// One case of the matrix.
#[derive(Debug, Clone)]
pub struct Case {
    /// What it is called.
    pub name: String,
    /// The effect at which processes abort, and which occurrence.
    point: Option<(Effect, &'static str, u32)>,
    /// A late answer goes to the agent as a message.
    pub late_as_message: bool,
    sessions: Vec<SessionPlan>,
}

/// Whose effect it is.
pub fn service_of(effect: Effect) -> Service {
    use Effect::*;
    match effect {
        Asked | Returned | Run | Lease | Boot | McpSession | ChatDone | ChatLater | ChatWorking
        | ChatParked | AnswerAbort | AnswerAgents | Seal => Service::Adapter,
        Presence | PresenceClear => Service::Emitter,
        Decided | Steps | Late | GivenAgain | Session | Chat | Dead | DeadDropped | Step | AnswerReply
        | AnswerOutcome | AnswerSay | AnswerStop | AnswerShown | Refuse => Service::Router,
    }
}

/// Sessions that reach an effect, and after how many of them the process aborts.
fn lives(effect: Effect) -> Vec<(u32, Vec<SessionPlan>)> {
    use What::*;
    let choose = |road| SessionPlan::new("choose", road, &[(50, Choose(1))]);
    let both = || vec![choose(Road::Native), choose(Road::Plugin)];
    let slow = |road| SessionPlan::new("slow", road, &[(1600, Choose(1))]);
    let messages = || {
        SessionPlan::new("messages", Road::Nothing(2), &[(50, TypeBlind), (120, TypeBlind), (400, TypeBlind)])
    };
    let typed = |road| SessionPlan::new("typed", road, &[(100, Type)]);
    let late = |road| SessionPlan::new("late", road, &[(50, Choose(1)), (300, Choose(2))]);
    let expiry = |road| SessionPlan::new("expiry", road, &[]).within(2);
    let stop = |road| SessionPlan::new("stop", road, &[(100, Stop)]);
    let stops = || vec![stop(Road::Plugin), stop(Road::Native)];
    // What is typed after it must not be stopped with it.
    let stop_typed = |road| SessionPlan::new("stop typed", road, &[(100, TypeStop), (400, TypeBlind)]);
    match effect {
        Effect::Asked => vec![(1, both()), (1, vec![choose(Road::Secret)])],
        Effect::Decided => vec![
            (1, both()),
            (1, vec![late(Road::Native), late(Road::Plugin)]),
            (1, vec![expiry(Road::Native), expiry(Road::Plugin)]),
            (1, vec![typed(Road::Plugin)]),
            (1, vec![SessionPlan::new("stop", Road::Plugin, &[(100, Stop)])]),
            (1, vec![stop_typed(Road::Native), stop_typed(Road::Plugin)]),
            (4, vec![SessionPlan { questions: 5, ..slow(Road::Plugin) }]),
        ],
        Effect::AnswerSay => vec![(1, both()), (2, vec![stop_typed(Road::Plugin)])],
        Effect::Returned => vec![
            (1, vec![choose(Road::Native)]),
            (1, vec![choose(Road::Plugin)]),
            (1, vec![choose(Road::Secret)]),
            (
                1,
                vec![SessionPlan::new(
                    "at the gateway",
                    Road::Native,
                    &[(50, AnswerAtGateway), (52, Choose(2))],
                )],
            ),
        ],
        Effect::Steps => vec![(1, vec![slow(Road::Native), slow(Road::Plugin)])],
        Effect::GivenAgain => {
            vec![(1, vec![SessionPlan::new("asked again", Road::Plugin, &[(50, AskAgain)])])]
        }
        Effect::Late => vec![(1, vec![late(Road::Native), late(Road::Plugin)])],
        Effect::Session => vec![
            (1, both()),
            // Of three writes by two routers one makes two.
            (2, vec![typed(Road::Native), typed(Road::Plugin)]),
            (2, vec![messages()]),
        ],
        Effect::Chat => vec![(1, both()), (2, vec![messages()])],
        Effect::Run => vec![(1, both()), (5, both())],
        Effect::AnswerOutcome => {
            vec![(1, vec![SessionPlan::new("at the gateway", Road::Native, &[(50, AnswerAtGateway)])])]
        }
        Effect::AnswerStop => vec![(1, stops())],
        Effect::AnswerAbort => vec![(1, stops()), (1, vec![stop_typed(Road::Plugin)])],
        Effect::Lease => vec![(1, both()), (2, vec![slow(Road::Native), slow(Road::Plugin)])],
        Effect::McpSession => vec![(1, vec![choose(Road::Mcp)])],
        Effect::ChatLater => vec![(1, vec![messages()])],
        Effect::ChatDone | Effect::ChatWorking => vec![(1, both()), (2, vec![messages()])],
        _ => vec![(1, both())],
    }
}

/// All cases.
pub fn cases() -> Vec<Case> {
    let mut all = Vec::new();
    for &effect in Effect::ALL {
        for (n, sessions) in lives(effect) {
            for side in ["before", "after"] {
                let titles: Vec<String> = sessions
                    .iter()
                    .map(|session| format!("{} {}", session.name, road(session.road)))
                    .collect();
                let name = format!("{effect}:{side}:{n} ({})", titles.join(", "));
                let point = Some((effect, side, n));
                let case = Case { name, point, late_as_message: false, sessions: sessions.clone() };
                if matches!(effect, Effect::Late) {
                    let name = format!("{}, sent on", case.name);
                    all.push(Case { name, late_as_message: true, ..case.clone() });
                }
                all.push(case);
            }
        }
    }
    for moment in Moment::ALL {
        for road in [Road::Native, Road::Plugin, Road::Secret] {
            let session = SessionPlan::new("choose", road, &[(50, What::Choose(1))]);
            let session = SessionPlan { kill_nats: Some(moment), ..session };
            let name = format!("nats-server when {} ({})", text(&json!(moment)), self::road(road));
            all.push(Case { name, point: None, late_as_message: false, sessions: vec![session] });
        }
    }
    all
}

fn road(road: Road) -> &'static str {
    match road {
        Road::Native => "native",
        Road::Plugin => "plugin",
        Road::Secret => "secret",
        Road::Mcp => "mcp",
        Road::Nothing(_) => "no question",
    }
}

impl Case {
    /// The crash point that it covers, as `name:side`.
    pub fn covers(&self) -> Option<String> {
        self.point.map(|(effect, side, _)| format!("{effect}:{side}"))
    }

    /// Runs it; a point that is not reached is a finding.
    ///
    /// # Errors
    /// A part of the world does not start again.
    pub async fn run(&self, world: &SharedWorld, tag: &str) -> Result<Settled> {
        world.forget_breaks();
        let Some((effect, side, n)) = self.point else {
            return play(world, tag, &self.sessions, &[]).await;
        };
        let at = format!("{effect}:{side}:{n}");
        if effect == Effect::Seal {
            let folder = world.options().folder.join(tag);
            let options = WorldOptions { folder, crash_provision: Some(at), ..world.options().clone() };
            let world = Arc::new(World::start(options).await?);
            return play(&world, tag, &self.sessions, &[]).await;
        }
        if effect == Effect::DeadDropped {
            let mut settled = play(world, tag, &self.sessions, &[]).await?;
            if let Some(what) = drop_dead_letter(world, &at).await? {
                let session = String::new();
                settled.findings.push(Finding { kind: Kind::Untrue, session, what, heals: false });
            }
            return Ok(settled);
        }
        let service = service_of(effect);
        for index in 0..2 {
            world.kill_replica((service, index)).await?;
            world.start_replica((service, index), Some(&at))?;
        }
        let breaks = match effect {
            // Items wait for a slow response when the connection breaks.
            Effect::ChatLater => vec![
                (0, Break::GatewayDelays("chat.send".into(), 4000)),
                (0, Break::GatewayDelays("chat.send".into(), 4000)),
                (7000, Break::CutGateway),
            ],
            _ => Vec::new(),
        };
        let before = world.crashes();
        let (settled, reached) =
            tokio::join!(play(world, tag, &self.sessions, &breaks), reach(world, effect));
        let mut settled = settled?;
        reached?;
        world.disarm().await?;
        if world.crashes() == before {
            let what = "its crash point was not reached".into();
            settled.findings.push(Finding { kind: Kind::Untrue, session: String::new(), what, heals: false });
        }
        Ok(settled)
    }
}

/// An operator's `askctl dead drop` crashes there, and is repeated; what is wrong then.
async fn drop_dead_letter(world: &World, at: &str) -> Result<Option<String>> {
    world.publish_raw("say.openclaw.nonsense", None, "no JSON").await?;
    let give_up = std::time::Instant::now() + Duration::from_secs(30);
    let letter = loop {
        if let Some(letter) = world.bus.dead_letters().await?.pop() {
            break letter;
        }
        if std::time::Instant::now() > give_up {
            bail!("what can't be read was not parked within 30 s");
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    let number = letter.number.to_string();
    let drop = ["dead", "drop", number.as_str()];
    if !world.askctl(&drop, Some(at)).await? {
        return Ok(Some("its crash point was not reached".into()));
    }
    // Before or after its drop: the letter is there or not, and an operator repeats it.
    let was_there = world.bus.dead_letter(letter.number).await?.is_some();
    let dropped = world.askctl(&drop, None).await?;
    let is_there = world.bus.dead_letter(letter.number).await?.is_some();
    let wrong = is_there || dropped != was_there || was_there != at.contains("before");
    Ok(wrong.then(|| format!("the letter was there: {was_there}; dropped: {dropped}; is there: {is_there}")))
}

/// Makes happen what no session does by itself.
async fn reach(world: &SharedWorld, effect: Effect) -> Result<()> {
    match effect {
        Effect::Dead | Effect::ChatParked => {
            for _ in 0..2 {
                let subject = match effect {
                    Effect::Dead => "say.openclaw.nonsense",
                    _ => "chat.openclaw.nonsense",
                };
                world.publish_raw(subject, None, "no JSON").await?;
                tokio::time::sleep(Duration::from_millis(700)).await;
            }
        }
        Effect::Refuse => {
            for _ in 0..2 {
                world.publish_raw("say.openclaw.nonsense", Some("nobody.listens"), "no JSON").await?;
                tokio::time::sleep(Duration::from_millis(700)).await;
            }
        }
        Effect::AnswerAgents => {
            let http = reqwest::Client::builder().no_proxy().build()?;
            let give_up = std::time::Instant::now() + Duration::from_secs(30);
            loop {
                let asked = http.get(format!("{}/v1/models", world.emitter_url()));
                let asked = asked.bearer_auth(&world.front_token).send().await;
                if asked.is_ok_and(|answer| answer.status().is_success()) {
                    break;
                }
                if std::time::Instant::now() > give_up {
                    bail!("the agents were not listed within 30 s");
                }
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
        _ => {}
    }
    Ok(())
}
