//! Who is there, as this router knows it. Whether a presence is still alive is judged by this
//! router's own clock, since the last time it was refreshed.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ask_bus::{Bus, Change, PresenceChange};
use ask_core::key::{SessionKey, decode_token};
use ask_core::surface::{Audience, Surface};
use ask_core::wire::Presence;
use tokio::sync::watch;
use tokio::time::Instant;

/// Missing presence is no evidence for this long after a start or reconnect: emitters need a
/// heartbeat to say that they are there.
const SETTLE: Duration = Duration::from_secs(5);
/// How long the presence that the server has may take to arrive here.
const ARRIVES_WITHIN: Duration = Duration::from_secs(1);

/// The streams that are open, by session.
pub(crate) struct PresentStreams {
    lasts: Duration,
    inner: Mutex<Inner>,
    /// Up to which revision of presence everything is taken.
    reached: watch::Sender<u64>,
    /// When it was last looked whether that is all that the server has, and whether it was.
    looked: tokio::sync::Mutex<Option<(Instant, bool)>>,
}

struct Inner {
    sessions: HashMap<SessionKey, BTreeMap<String, Seen>>,
    /// Since when presence has been followed without a break.
    followed_since: Option<Instant>,
}

struct Seen {
    presence: Presence,
    revision: u64,
    at: Instant,
}

impl PresentStreams {
    pub(crate) fn new(lasts: Duration) -> Self {
        Self {
            lasts,
            inner: Mutex::new(Inner { sessions: HashMap::new(), followed_since: None }),
            reached: watch::Sender::new(0),
            looked: tokio::sync::Mutex::new(None),
        }
    }

    /// Everything up to `revision` is taken, with all that follows from it; `None` while it is
    /// loaded anew.
    pub(crate) fn has_reached(&self, revision: Option<u64>) {
        self.reached.send_modify(|reached| *reached = revision.map_or(0, |revision| revision.max(*reached)));
    }

    /// Waits until all presence that the server has now is taken. False where that is not to be
    /// had soon: then another router may know of somebody (rule F2).
    pub(crate) async fn is_current(&self, bus: &Bus) -> bool {
        let asked = Instant::now();
        let mut looked = self.looked.lock().await;
        // Very many deadlines at once share a look that began after each of them.
        if let Some((at, is_current)) = *looked
            && at >= asked
        {
            return is_current;
        }
        let begins = Instant::now();
        let arrives = async {
            let last = bus.last_presence().await.ok()?;
            self.reached.subscribe().wait_for(|reached| *reached >= last).await.ok().map(drop)
        };
        let is_current = matches!(tokio::time::timeout(ARRIVES_WITHIN, arrives).await, Ok(Some(())));
        *looked = Some((begins, is_current));
        is_current
    }

    /// Takes a change; returns the session whose questions are to be looked at.
    pub(crate) fn apply(&self, change: PresenceChange) -> Option<SessionKey> {
        let mut inner = self.lock();
        match change {
            Change::Loading => {
                inner.followed_since = None;
                None
            }
            Change::Loaded { .. } => {
                inner.followed_since = Some(Instant::now() + SETTLE);
                None
            }
            Change::Put { key, value, revision } => {
                let (session, stream) = split(&key)?;
                let seen = Seen { presence: *value, revision, at: Instant::now() };
                inner.sessions.entry(session.clone()).or_default().insert(stream, seen);
                Some(session)
            }
            Change::Deleted { key, .. } => {
                let (session, stream) = split(&key)?;
                inner.remove(&session, &stream);
                Some(session)
            }
        }
    }

    /// Removes what was not refreshed in time; returns the sessions that this changes.
    pub(crate) fn lapsed(&self) -> BTreeSet<SessionKey> {
        let mut inner = self.lock();
        let mut gone = Vec::new();
        for (session, streams) in &inner.sessions {
            for (stream, seen) in streams {
                if seen.at.elapsed() > self.lasts {
                    gone.push((session.clone(), stream.clone()));
                }
            }
        }
        for (session, stream) in &gone {
            inner.remove(session, stream);
        }
        gone.into_iter().map(|(session, _)| session).collect()
    }

    /// Whether presence is followed without a break, and long enough to be evidence.
    pub(crate) fn is_followed(&self) -> bool {
        self.lock().followed_since.is_some_and(|since| since <= Instant::now())
    }

    /// Whether any stream of the session is open.
    pub(crate) fn somebody(&self, session: &SessionKey) -> bool {
        self.lock().sessions.contains_key(session)
    }

    /// Who could be shown a question of the session; `bound` is what its front end was able to
    /// show when it was last heard of.
    pub(crate) fn audience(&self, session: &SessionKey, bound: Option<&BTreeSet<Surface>>) -> Audience {
        let inner = self.lock();
        let streams = inner.sessions.get(session).into_iter().flat_map(BTreeMap::values);
        // The newest stream presents the session.
        match (streams.max_by_key(|s| (s.presence.looking, s.revision)), bound) {
            (Some(seen), _) => {
                Audience::Present { surfaces: seen.presence.surfaces.clone(), looking: seen.presence.looking }
            }
            (None, Some(surfaces)) => Audience::Absent { surfaces: surfaces.clone() },
            (None, None) => Audience::Nobody,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn remove(&mut self, session: &SessionKey, stream: &str) {
        if let Some(streams) = self.sessions.get_mut(session) {
            streams.remove(stream);
            if streams.is_empty() {
                self.sessions.remove(session);
            }
        }
    }
}

fn split(key: &str) -> Option<(SessionKey, String)> {
    let (session, stream) = key.rsplit_once('.')?;
    Some((session.parse().ok()?, decode_token(stream)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(stream: &str, looking: bool, revision: u64) -> PresenceChange {
        let surfaces = [Surface::Card].into();
        let value = Presence { schema: 1, emitter: "e".into(), surfaces, looking, other_chat: false };
        Change::Put { key: format!("g.s.{stream}"), value: Box::new(value), revision }
    }

    fn session() -> SessionKey {
        SessionKey::new("g", "s")
    }

    #[tokio::test(start_paused = true)]
    async fn a_presence_that_is_not_refreshed_is_gone_by_this_routers_own_clock() {
        let present = PresentStreams::new(Duration::from_secs(15));
        assert_eq!(present.apply(put("m1", true, 1)), Some(session()));
        tokio::time::advance(Duration::from_secs(10)).await;
        present.apply(put("m1", true, 2));
        tokio::time::advance(Duration::from_secs(10)).await;
        assert!(present.lapsed().is_empty());
        tokio::time::advance(Duration::from_secs(6)).await;
        assert_eq!(present.lapsed(), [session()].into());
        assert!(!present.somebody(&session()));
    }

    #[tokio::test(start_paused = true)]
    async fn f2_missing_presence_is_no_evidence_after_a_start_or_reconnect() {
        let present = PresentStreams::new(Duration::from_secs(15));
        assert!(!present.is_followed());
        present.apply(Change::Loaded { revision: 0 });
        assert!(!present.is_followed());
        tokio::time::advance(SETTLE).await;
        assert!(present.is_followed());
        present.apply(Change::Loading);
        assert!(!present.is_followed());
    }

    #[tokio::test(start_paused = true)]
    async fn the_stream_that_is_looked_at_speaks_for_the_session() {
        let present = PresentStreams::new(Duration::from_secs(15));
        assert_eq!(present.audience(&session(), None), Audience::Nobody);
        present.apply(put("m1", true, 1));
        present.apply(put("m2", false, 2));
        assert!(matches!(present.audience(&session(), None), Audience::Present { looking: true, .. }));
        present.apply(Change::Deleted { key: "g.s.m1".into(), revision: 3 });
        assert!(matches!(present.audience(&session(), None), Audience::Present { looking: false, .. }));
    }

    #[tokio::test]
    async fn f2_a_router_that_has_not_heard_of_everybody_yet_knows_nothing_of_them() {
        let server = testkit::nats::NatsServer::start().await.unwrap();
        let options = ask_bus::BusOptions { url: server.url(), name: "test".into(), ..Default::default() };
        let bus = Bus::connect(options).await.unwrap();
        let provisioning = ask_bus::Provisioning { gateways: vec!["g".into()], replicas: 1 };
        bus.provision(&provisioning).await.unwrap();
        let present = PresentStreams::new(Duration::from_secs(15));
        assert!(present.is_current(&bus).await, "nobody was ever there");
        let surfaces = BTreeSet::new();
        let somebody =
            Presence { schema: 1, emitter: "e".into(), surfaces, looking: true, other_chat: false };
        bus.write_presence(&session(), "m1", &somebody).await.unwrap();
        assert!(!present.is_current(&bus).await);
        let arrives = async { present.has_reached(Some(1)) };
        assert!(tokio::join!(present.is_current(&bus), arrives).0);
        present.has_reached(None);
        assert!(!present.is_current(&bus).await);
    }
}
