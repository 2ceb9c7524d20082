//! ask-router: decides where a question is shown, what a typed message means, and how each
//! question ends.
//!
//! Every replica follows all questions and serves requests in one queue group. Nothing but a
//! compare-and-set of the entry decides, so any number of replicas may act at once.

mod config;
mod deadlines;
mod messages;
mod pending;
mod presence;
mod replies;
mod shown;
mod spans;
mod stop;
mod surfaces;

use std::sync::Arc;
use std::time::Duration;

use ask_bus::{Bus, BusError, Change, RouterRequest};
use ask_core::entry::Entry;
use ask_core::key::{QuestionKey, SessionKey};
use ask_core::take::Trust;
use ask_core::time::Timestamp;
use service_kit::Health;
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

pub use config::{LatePolicy, RouterConfig, SERVICE};

use crate::deadlines::{Alarm, Alarms, Timed};
use crate::pending::PendingQuestions;
use crate::presence::PresentStreams;

/// How often a compare-and-set is tried again before its requester is asked to. Each failure means
/// that another write of the same key went through.
const ATTEMPTS: usize = 64;
/// How many alarms are dealt with at the same time. Where very many are due at once, what goes beyond
/// this would only time out, and while it waits another replica may decide it.
const ALARMS_AT_ONCE: usize = 128;

/// What the tasks of one router share.
pub(crate) struct Router {
    pub(crate) config: RouterConfig,
    pub(crate) bus: Bus,
    pub(crate) pending: PendingQuestions,
    pub(crate) present: PresentStreams,
    pub(crate) alarms: mpsc::UnboundedSender<Timed>,
    /// Tells this replica from others where replicas are to act one after another.
    pub(crate) replica: u64,
}

/// Runs a router until `shutdown`.
///
/// # Errors
/// When its requests can't be served.
pub async fn run(
    config: RouterConfig,
    bus: Bus,
    health: Health,
    shutdown: CancellationToken,
) -> anyhow::Result<()> {
    if !wait_until_provisioned(&bus, &health, &shutdown).await {
        return Ok(());
    }
    let (alarms, mut due) = Alarms::new();
    let router = Arc::new(Router {
        present: PresentStreams::new(config.presence_for),
        config,
        bus: bus.clone(),
        pending: PendingQuestions::default(),
        alarms,
        replica: std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), std::process::id()),
    });
    let mut presence = bus.watch_presence();
    let mut questions = bus.watch_questions(None);
    // A router that does not know the questions yet decides nothing: their deadlines come first.
    loop {
        tokio::select! {
            () = shutdown.cancelled() => return Ok(()),
            Some(change) = questions.next() => match change {
                Change::Loaded { .. } => break,
                change => drop(router.take_change(change, false)),
            },
        }
    }
    let mut requests = bus.serve_router(SERVICE.version).await?;
    health.ready("questions");
    let turns = Arc::new(Semaphore::new(ALARMS_AT_ONCE));
    let mut is_live = true;
    let mut work = JoinSet::new();
    let mut lapse = tokio::time::interval(Duration::from_secs(1));
    show_all(&router, router.pending.sessions(), &mut work);
    loop {
        tokio::select! {
            () = shutdown.cancelled() => break,
            Some(change) = presence.next() => {
                let revision = change.revision();
                if matches!(change, Change::Loading) {
                    router.pending.all_evidence_lost();
                }
                if let Some(session) = router.present.apply(change) {
                    // At once: a deadline that comes now must not claim that nobody was there. Who has
                    // gone may have been there without this router's having heard of it.
                    router.pending.evidence_lost(&session);
                    show_all(&router, [session], &mut work);
                }
                router.present.has_reached(revision);
            }
            _ = lapse.tick() => {
                show_all(&router, router.present.lapsed(), &mut work);
                watch_connection(&router, &health);
            }
            Some(change) = questions.next() => match change {
                Change::Loading => is_live = false,
                Change::Loaded { .. } => {
                    is_live = true;
                    show_all(&router, router.pending.sessions(), &mut work);
                }
                change => match router.take_change(change, is_live) {
                    // What is loaded is shown when all of it is known.
                    _ if !is_live => {}
                    Some(Taken::Asked(key)) => {
                        let router = router.clone();
                        work.spawn(async move { router.show(&key).await });
                    }
                    Some(Taken::Lost(session)) => show_all(&router, [session], &mut work),
                    None => {}
                }
            },
            Some((alarm, turn)) = async {
                let turn = turns.clone().acquire_owned().await.ok()?;
                Some((due.next().await?, turn))
            } => {
                let router = router.clone();
                work.spawn(async move {
                    router.on_alarm(alarm).await;
                    drop(turn);
                });
            }
            request = requests.next() => match request {
                Some(request) => {
                    let router = router.clone();
                    work.spawn(async move { router.serve(request).await });
                }
                None => anyhow::bail!("the request subscriptions ended"),
            },
            Some(done) = work.join_next() => if let Err(error) = done {
                tracing::error!(%error, "a task of the router failed");
            },
        }
    }
    requests.stop().await;
    while work.join_next().await.is_some() {}
    router.write_all_steps().await;
    bus.close().await;
    Ok(())
}

/// False when the process is to stop first.
async fn wait_until_provisioned(bus: &Bus, health: &Health, shutdown: &CancellationToken) -> bool {
    loop {
        match bus.check().await {
            Ok(()) => {
                health.ready("nats");
                health.ready("buckets");
                return true;
            }
            Err(error @ BusError::NotProvisioned { .. }) => {
                health.ready("nats");
                health.not_ready("buckets", error.to_string());
            }
            Err(error) => health.not_ready("nats", error.to_string()),
        }
        tokio::select! {
            () = shutdown.cancelled() => return false,
            () = tokio::time::sleep(Duration::from_millis(250)) => {}
        }
    }
}

fn watch_connection(router: &Router, health: &Health) {
    match router.bus.is_connected() {
        true => health.ready("nats"),
        false => health.not_ready("nats", "not connected"),
    }
}

fn show_all(router: &Arc<Router>, sessions: impl IntoIterator<Item = SessionKey>, work: &mut JoinSet<()>) {
    for key in sessions.into_iter().flat_map(|session| router.pending.of_session(&session)) {
        let router = router.clone();
        work.spawn(async move { router.show(&key).await });
    }
}

/// What a change of the questions calls for.
enum Taken {
    /// A question that was not known waits.
    Asked(QuestionKey),
    /// An answer was lost with its gateway, and may be given again in this session.
    Lost(SessionKey),
}

impl Router {
    /// Takes a change of the questions. One that is live came the moment it was written.
    fn take_change(&self, change: Change<Entry>, is_live: bool) -> Option<Taken> {
        let stored = change.into_stored()?;
        let key = stored.value.key.clone();
        if self.pending.remember_lost(&stored.value, Timestamp::now()) {
            self.pending.apply(stored, &self.alarms_of(), None);
            return Some(Taken::Lost(key.session_key()));
        }
        let present = is_live.then_some(&self.present);
        self.pending.apply(stored, &self.alarms_of(), present).then_some(Taken::Asked(key))
    }

    async fn serve(&self, request: RouterRequest) {
        match request {
            RouterRequest::Reply(incoming) => self.on_reply(incoming, Trust::Owner).await,
            RouterRequest::Outcome(incoming) => self.on_reply(incoming, Trust::Anybody).await,
            RouterRequest::Say(incoming) => self.on_say(incoming).await,
            RouterRequest::Stop(incoming) => self.on_stop(incoming).await,
            RouterRequest::Shown(incoming) => self.on_shown(incoming).await,
        }
    }

    async fn on_alarm(&self, alarm: Alarm) {
        match alarm {
            Alarm::Deadline(key) => self.expire(&key).await,
            Alarm::Steps(key) => self.write_steps(&key).await,
            Alarm::Undelivered(key, surface) => self.try_next_surface(&key, surface).await,
        }
    }
}
