//! A random history, made from its seed alone: what the sessions go through, and what breaks when.

use std::time::Duration;

use anyhow::Result;
use ask_bus::Effect;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom as _;
use rand::{Rng as _, SeedableRng as _};
use rustix::process::Signal;
use serde::Serialize;
use testkit::gateway::Fault as GatewayFault;

use crate::history::Part;
use crate::person::{Road, SessionPlan, What};
use crate::world::{ReplicaId, Service, SharedWorld};

/// Effects of programs and of people that no history has.
const NOT_IN_A_HISTORY: [Effect; 4] =
    [Effect::Seal, Effect::DeadDropped, Effect::McpSession, Effect::AnswerAgents];

/// What happens in one history.
#[derive(Debug, Clone, Serialize)]
pub struct Plan {
    /// It follows from this alone.
    pub seed: u64,
    /// Sessions that go on at the same time.
    pub sessions: Vec<SessionPlan>,
    /// A late answer goes to the agent as a message.
    pub late_as_message: bool,
    /// What breaks, and how long after the start, in milliseconds.
    pub breaks: Vec<(u64, Break)>,
}

/// Something that breaks, for so many milliseconds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Break {
    /// `kill -9` of a replica.
    Kill(ReplicaId, u64),
    /// `kill -9` of both.
    KillBoth(Service, u64),
    /// SIGSTOP.
    Freeze(ReplicaId, u64),
    /// `kill -9` of nats-server.
    KillNats(u64),
    /// SIGSTOP of nats-server.
    FreezeNats(u64),
    /// A replica is started again, to abort at this effect.
    CrashAt(ReplicaId, String),
    /// A replica's connection to nats-server is cut.
    CutNats(ReplicaId),
    /// What goes between a replica and nats-server is late.
    DelayNats(ReplicaId, u64),
    /// Responses of nats-server are lost with their connection.
    LoseNats(ReplicaId),
    /// All connections of front ends are cut.
    CutEmitters,
    /// What goes between front ends and emitters is late, and connections overtake each other.
    DelayEmitters(u64),
    /// Responses of the emitters are lost, so that requests come twice.
    LoseEmitters(u64),
    /// Responses of the adapters to the plugin are lost.
    LoseAdapters(u64),
    /// All connections of the plugin are cut.
    CutAdapters,
    /// All connections to the Gateway are cut.
    CutGateway,
    /// The Gateway carries a request out, and its response is lost.
    GatewayLoses(String),
    /// The Gateway responds late.
    GatewayDelays(String, u64),
    /// `kill -9` of the Gateway.
    RestartGateway,
}

impl Plan {
    /// The history of this seed.
    pub fn new(seed: u64) -> Self {
        use What::AskAgain;
        let mut rng = StdRng::seed_from_u64(seed);
        let sessions: Vec<SessionPlan> = (0..rng.random_range(2..=4)).map(|_| session(&mut rng)).collect();
        let mut breaks: Vec<(u64, Break)> =
            (0..rng.random_range(1..=4)).map(|_| (rng.random_range(0..2000), a_break(&mut rng))).collect();
        breaks.sort_by_key(|(at, _)| *at);
        // The server and the Gateway go down once at the most.
        let asks_again = sessions.iter().any(|session| session.does(AskAgain));
        let mut seen = if asks_again { vec!["gateway"] } else { Vec::new() };
        breaks.retain(|(_, one)| {
            let whose = match one {
                Break::KillNats(_) | Break::FreezeNats(_) => "nats",
                Break::RestartGateway => "gateway",
                _ => return true,
            };
            let first = !seen.contains(&whose);
            seen.push(whose);
            first
        });
        Self { seed, sessions, late_as_message: seed.is_multiple_of(2), breaks }
    }

    /// What it is about, in a few words.
    pub fn title(&self) -> String {
        let sessions: Vec<&str> = self.sessions.iter().map(|session| session.name).collect();
        let breaks: Vec<String> = self.breaks.iter().map(|(at, one)| format!("{one} at {at}")).collect();
        let late = if self.late_as_message { "; late answers are sent on" } else { "" };
        format!("{}; {}{late}", sessions.join(", "), breaks.join(", "))
    }
}

impl std::fmt::Display for Break {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let text = serde_json::to_string(self).unwrap_or_default();
        f.write_str(&text.replace(['{', '}', '[', ']', '"'], "").replace([',', ':'], " "))
    }
}

/// How long people take, mostly.
fn soon(rng: &mut StdRng) -> u64 {
    *[0, 20, 100, 400, 900, 1500, 2200].choose(rng).unwrap_or(&0) + rng.random_range(0..30)
}

fn session(rng: &mut StdRng) -> SessionPlan {
    use What::*;
    let road = *[Road::Native, Road::Plugin, Road::Plugin, Road::Native, Road::Secret]
        .choose(rng)
        .unwrap_or(&Road::Plugin);
    let at = soon(rng);
    let near = at + rng.random_range(0..8);
    let gateway = if road == Road::Native { AnswerAtGateway } else { Abort };
    let plan = |name, actions: &[(u64, What)]| SessionPlan::new(name, road, actions);
    match rng.random_range(0..22) {
        0 => plan("choose", &[(at, Choose(1))]),
        1 => plan("words", &[(at, Words)]),
        2 => plan("twice", &[(at, Twice)]),
        3 => plan("decline", &[(at, Decline)]),
        4 => plan("cancel", &[(at, Cancel)]),
        5 => plan("two replies", &[(at, Choose(0)), (near, Choose(2))]),
        6 => plan(
            "three replies",
            &[(at, Choose(0)), (near, Twice), (near + 3, Decline), (at + 600, Choose(1))],
        ),
        7 => plan("stranger", &[(at, Stranger), (near, Choose(1))]),
        8 if road != Road::Secret => plan("typed", &[(at.max(100), Type)]),
        9 if road != Road::Secret => {
            plan("typed and clicked", &[(at.max(100), Type), (at.max(100) + 5, Choose(1))])
        }
        10 => plan("typed blind", &[(at, TypeBlind), (at + 400, Choose(1))]),
        11 => plan("at the gateway too", &[(at, gateway), (near, Choose(1))]),
        12 if road == Road::Native => plan("skipped there", &[(at, SkipAtGateway), (near, Words)]),
        13 => plan("stop", &[(at, Stop)]),
        14 => plan("cut", &[(5, Cut), (at + 100, Choose(1))]),
        15 => {
            let timeout_s = rng.random_range(1..=3);
            // Around the deadline, which for the Gateway's own questions is earlier by a margin.
            let around = timeout_s * 1000 - rng.random_range(0..600);
            plan("at the deadline", &[(around, Choose(1)), (around + 20, Choose(2))]).within(timeout_s)
        }
        16 => plan("expiry", &[]).within(rng.random_range(1..=2)),
        17 => plan("stop typed", &[(at, TypeStop), (near, Choose(1)), (at + 500, TypeBlind)]),
        18 => plan("late", &[(at, Choose(1)), (at + 300, Choose(2)), (at + 320, Words)]),
        19 => {
            // The Gateway's own tool asks one at a time.
            let many = SessionPlan::new("too many", Road::Plugin, &[(at, Choose(1))]);
            SessionPlan { questions: 5, ..many }
        }
        20 if road == Road::Plugin && rng.random_bool(0.5) => plan("asked again", &[(at, AskAgain)]),
        _ if rng.random_bool(0.5) => {
            let two = plan("two at once", &[(at, Choose(1))]);
            let road = if road == Road::Native { Road::Plugin } else { road };
            SessionPlan { questions: 2, road, ..two }
        }
        _ => {
            let words = rng.random_range(1..=2);
            let typed: &[(u64, What)] = &[(50, TypeBlind), (60 + at, TypeBlind), (80 + at, TypeBlind)];
            SessionPlan::new("messages", Road::Nothing(words), typed)
        }
    }
}

fn a_break(rng: &mut StdRng) -> Break {
    let service = *Service::ALL.choose(rng).unwrap_or(&Service::Router);
    let id = (service, rng.random_range(0..2));
    let short = rng.random_range(50..600);
    let methods = ["chat.send", "question.resolve", "question.get", "chat.history", "agent"];
    let method = (*methods.choose(rng).unwrap_or(&"chat.send")).to_owned();
    match rng.random_range(0..22) {
        0..=3 => Break::Kill(id, short),
        4 => Break::KillBoth(service, short),
        5 => Break::Freeze(id, rng.random_range(200..2500)),
        6 => Break::Freeze((Service::Adapter, id.1), 6000),
        7..=8 => Break::KillNats(short),
        9 => Break::FreezeNats(short * 2),
        10..=11 => {
            let effects: Vec<Effect> =
                Effect::ALL.iter().copied().filter(|effect| !NOT_IN_A_HISTORY.contains(effect)).collect();
            let effect = effects.choose(rng).copied().unwrap_or(Effect::Decided);
            let side = if rng.random_bool(0.5) { "before" } else { "after" };
            let id = (crate::matrix::service_of(effect), id.1);
            Break::CrashAt(id, format!("{effect}:{side}:{}", rng.random_range(1..=2)))
        }
        12 => Break::CutNats(id),
        13 => Break::DelayNats(id, rng.random_range(5..120)),
        14 => Break::LoseNats(id),
        15 => Break::CutEmitters,
        16 => Break::DelayEmitters(rng.random_range(5..150)),
        17 => Break::LoseEmitters(rng.random_range(1..4)),
        18 if rng.random_bool(0.5) => Break::CutAdapters,
        18 => Break::LoseAdapters(rng.random_range(1..4)),
        19 => Break::CutGateway,
        20 if rng.random_bool(0.7) => Break::GatewayLoses(method),
        20 => Break::GatewayDelays(method, short * 3),
        _ if rng.random_bool(0.3) => Break::RestartGateway,
        _ => Break::CutGateway,
    }
}

impl Break {
    /// Breaks it, and returns when it is whole again, or soon will be by itself.
    ///
    /// # Errors
    /// Something does not start again.
    pub async fn happen(&self, world: &SharedWorld) -> Result<()> {
        let wait = |ms: u64| {
            let time = Duration::from_millis(ms);
            world.add_outage(time + Duration::from_secs(2));
            tokio::time::sleep(time)
        };
        match self {
            Self::CutNats(id) | Self::LoseNats(id) | Self::DelayNats(id, _) => world.broke(id.0.part()),
            Self::CutEmitters | Self::DelayEmitters(_) | Self::LoseEmitters(_) => world.broke(Part::Emitter),
            Self::LoseAdapters(_) | Self::CutAdapters => world.broke(Part::Adapter),
            Self::CutGateway | Self::GatewayLoses(_) | Self::GatewayDelays(..) => world.broke(Part::Gateway),
            // The world itself knows what it kills or stops.
            _ => {}
        }
        match self {
            Self::Kill(id, down) => {
                world.kill_replica(*id).await?;
                wait(*down).await;
                world.start_replica(*id, None)?;
            }
            Self::KillBoth(service, down) => {
                world.kill_replica((*service, 0)).await?;
                world.kill_replica((*service, 1)).await?;
                wait(*down).await;
                world.start_replica((*service, 0), None)?;
                world.start_replica((*service, 1), None)?;
            }
            Self::Freeze(id, time) => {
                world.signal_replica(*id, Signal::STOP);
                wait(*time).await;
                world.signal_replica(*id, Signal::CONT);
            }
            Self::KillNats(down) => world.restart_nats(Duration::from_millis(*down)).await?,
            Self::FreezeNats(time) => {
                world.signal_nats(Signal::STOP);
                wait(*time).await;
                world.signal_nats(Signal::CONT);
            }
            Self::CrashAt(id, point) => {
                world.add_outage(Duration::from_secs(6));
                world.kill_replica(*id).await?;
                world.start_replica(*id, Some(point))?;
            }
            Self::CutNats(id) => world.nats_proxy(*id).into_iter().for_each(|proxy| proxy.cut()),
            Self::LoseNats(id) => world.nats_proxy(*id).into_iter().for_each(|proxy| proxy.lose_responses(1)),
            Self::DelayNats(id, late) => {
                let delay = |ms| {
                    let proxy = world.nats_proxy(*id).into_iter();
                    proxy.for_each(|proxy| proxy.delay(Duration::from_millis(ms)));
                };
                delay(*late);
                wait(1500).await;
                delay(0);
            }
            Self::CutEmitters => world.emitters.cut(),
            Self::DelayEmitters(late) => {
                world.emitters.delay(Duration::from_millis(*late));
                wait(1500).await;
                world.emitters.delay(Duration::ZERO);
            }
            Self::LoseEmitters(count) => world.emitters.lose_responses(*count),
            Self::LoseAdapters(count) => world.adapters.lose_responses(*count),
            Self::CutAdapters => world.adapters.cut(),
            Self::CutGateway => world.gateway.drop_connections(),
            Self::GatewayLoses(method) => world.gateway.fault(method, GatewayFault::LoseResponse),
            Self::GatewayDelays(method, late) => {
                world.gateway.fault(method, GatewayFault::Delay(Duration::from_millis(*late)));
            }
            Self::RestartGateway => {
                world.kill_gateway();
                world.start_gateway().await?;
            }
        }
        Ok(())
    }
}
