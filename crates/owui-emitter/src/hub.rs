//! Dispatch in memory: one feed of questions and one of runs for the whole process.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex};

use ask_bus::{BusError, Change, FeedItem, PresenceChange, RunCursor, RunDelivery, Stored};
use ask_core::entry::Entry;
use ask_core::key::{QuestionKey, SessionKey, decode_token};
use ask_core::wire::ShowStep;
use service_kit::Health;
use tokio::sync::{mpsc, watch};

use crate::{Emitter, lock};

/// How far a stream may fall behind. One that does not keep up breaks off; its front end opens it
/// again where it stopped.
const MAX_BEHIND: usize = 4096;

/// Most questions whose keys are remembered; others are looked up.
const MAX_KEYS: usize = 10_000;

/// What the open streams are told.
#[derive(Debug)]
pub(crate) enum Event {
    /// An item of a run.
    Run(RunDelivery),
    /// `RUNS` has lost its last items: the next one comes after this sequence.
    Rewound(u64),
    /// A question changed.
    Entry(Arc<Stored<Entry>>),
    /// Where to show a question.
    Step(ShowStep),
    /// Something may have been missed.
    ReadAgain,
    /// The front end could not show this question.
    Refused(String),
    /// A newer stream of the session presents it now.
    Superseded,
    /// The session was stopped.
    Stopped,
}

/// What the front end says about its user.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Looking {
    /// The chat is on screen, or its questions are held for somebody who is to come back.
    pub looking: bool,
    /// Another chat is on screen.
    pub other_chat: bool,
}

#[derive(Default)]
pub(crate) struct Hub(Mutex<Inner>);

#[derive(Default)]
struct Inner {
    /// The newest stream of each session.
    streams: HashMap<SessionKey, Open>,
    opened: u64,
    /// Up to where `RUNS` was dispatched; absent until the feeds run.
    dispatched: Option<RunCursor>,
    keys: HashMap<String, QuestionKey>,
    keys_by_age: VecDeque<String>,
    /// The message whose call was cancelled and up to where it had been told, until its successor
    /// takes over.
    left: HashMap<SessionKey, (String, u64)>,
}

struct Open {
    id: u64,
    message: String,
    events: mpsc::Sender<Event>,
    looking: watch::Sender<Looking>,
}

/// A stream's side of its registration.
pub(crate) struct Registration {
    pub id: u64,
    /// From here on `events` has every item of the session.
    pub begins: RunCursor,
    pub events: mpsc::Receiver<Event>,
    pub looking: watch::Receiver<Looking>,
}

impl Hub {
    /// Makes this the session's newest stream; the one before ends. `None` until the feeds run.
    pub(crate) fn register(
        &self,
        session: &SessionKey,
        message: &str,
        looking: Looking,
    ) -> Option<Registration> {
        let mut inner = lock(&self.0);
        let begins = inner.dispatched?;
        inner.opened += 1;
        let id = inner.opened;
        let (send, events) = mpsc::channel(MAX_BEHIND);
        let (told, looking) = watch::channel(looking);
        let open = Open { id, message: message.to_owned(), events: send, looking: told };
        if let Some(old) = inner.streams.insert(session.clone(), open) {
            let _ = old.events.try_send(Event::Superseded);
        }
        Some(Registration { id, begins, events, looking })
    }

    /// Ends a registration. False when a newer stream of the same message goes on.
    pub(crate) fn unregister(&self, session: &SessionKey, id: u64, message: &str) -> bool {
        let mut inner = lock(&self.0);
        match inner.streams.get(session) {
            Some(open) if open.id == id => {
                inner.streams.remove(session);
                true
            }
            Some(open) => open.message != message,
            None => true,
        }
    }

    /// The message of the session's newest stream.
    pub(crate) fn newest(&self, session: &SessionKey) -> Option<String> {
        lock(&self.0).streams.get(session).map(|open| open.message.clone())
    }

    /// The session that has a stream of this message here.
    pub(crate) fn session_of(&self, message: &str) -> Option<SessionKey> {
        let inner = lock(&self.0);
        let mut open = inner.streams.iter().filter(|(_, open)| open.message == message);
        open.next().map(|(session, _)| session.clone())
    }

    /// Passes on who looks; false when the message has no stream here.
    pub(crate) fn looks(&self, session: &SessionKey, message: &str, looking: Looking) -> bool {
        let inner = lock(&self.0);
        match inner.streams.get(session) {
            Some(open) if open.message == message => {
                open.looking.send_if_modified(|now| std::mem::replace(now, looking) != looking);
                true
            }
            _ => false,
        }
    }

    pub(crate) fn key_of(&self, question: &str) -> Option<QuestionKey> {
        lock(&self.0).keys.get(question).cloned()
    }

    /// Tells the session's stream something.
    pub(crate) fn tell(&self, session: &SessionKey, event: Event) {
        lock(&self.0).tell(session, event);
    }

    /// Remembers up to where a message's call had been told when it was cancelled.
    pub(crate) fn left_at(&self, session: &SessionKey, message: &str, sequence: u64) {
        lock(&self.0).left.insert(session.clone(), (message.to_owned(), sequence));
    }

    /// Up to where the call before this message's had been told when it was cancelled, once.
    pub(crate) fn take_left(&self, session: &SessionKey, message: &str) -> Option<u64> {
        let mut inner = lock(&self.0);
        inner.left.get(session).filter(|(left, _)| left != message)?;
        inner.left.remove(session).map(|(_, sequence)| sequence)
    }

    /// Forgets that a message's call was cancelled.
    pub(crate) fn forget_left(&self, session: &SessionKey, message: &str) {
        let mut inner = lock(&self.0);
        if inner.left.get(session).is_some_and(|(left, _)| left == message) {
            inner.left.remove(session);
        }
    }

    /// Subscribes and dispatches; returns only when the connection is closed for good.
    pub(crate) async fn feed(&self, emitter: &Emitter, health: &Health) -> Result<(), BusError> {
        let mut questions = emitter.bus.question_feed().await?;
        let mut runs = emitter.bus.follow_runs().await?;
        let mut presence = emitter.bus.watch_presence();
        lock(&self.0).dispatched = Some(runs.begins);
        health.ready("feeds");
        loop {
            tokio::select! {
                item = questions.next() => match item {
                    Some(item) => self.dispatch(item),
                    None => return Ok(()),
                },
                item = runs.next() => match item {
                    Some(item) => lock(&self.0).dispatch_run(item),
                    None => return Ok(()),
                },
                change = presence.next() => match change {
                    Some(change) => self.heard_of(change, &emitter.id),
                    None => return Ok(()),
                },
            }
        }
    }

    /// Another replica may be told who looks at a stream of ours.
    fn heard_of(&self, change: PresenceChange, own: &str) {
        if let Change::Put { key, value, .. } = change
            && value.emitter != own
            && let Some((session, stream)) = key.rsplit_once('.')
            && let (Ok(session), Some(message)) = (session.parse(), decode_token(stream))
        {
            let looking = Looking { looking: value.looking, other_chat: value.other_chat };
            self.looks(&session, &message, looking);
        }
    }

    fn dispatch(&self, item: FeedItem) {
        let mut inner = lock(&self.0);
        match item {
            FeedItem::Entry(stored) => {
                let session = stored.value.key.session_key();
                if inner.streams.contains_key(&session) {
                    inner.remember(&stored.value.key);
                    inner.tell(&session, Event::Entry(Arc::from(stored)));
                }
            }
            FeedItem::Step(step) => {
                let session = step.key.session_key();
                if inner.streams.contains_key(&session) {
                    inner.remember(&step.key);
                    inner.tell(&session, Event::Step(step));
                }
            }
            FeedItem::ReadAgain => {
                let sessions: Vec<SessionKey> = inner.streams.keys().cloned().collect();
                for session in sessions {
                    inner.tell(&session, Event::ReadAgain);
                }
            }
        }
    }
}

impl Inner {
    fn dispatch_run(&mut self, delivery: RunDelivery) {
        let Some(dispatched) = &mut self.dispatched else { return };
        let rewound = delivery.sequence <= dispatched.sequence;
        dispatched.sequence = delivery.sequence;
        if rewound {
            let sessions: Vec<SessionKey> = self.streams.keys().cloned().collect();
            for session in sessions {
                self.tell(&session, Event::Rewound(delivery.sequence - 1));
            }
        }
        let session = delivery.item.session.clone();
        self.tell(&session, Event::Run(delivery));
    }

    fn tell(&mut self, session: &SessionKey, event: Event) {
        if let Some(open) = self.streams.get(session)
            && open.events.try_send(event).is_err()
        {
            tracing::warn!(%session, "a stream does not keep up; it breaks off");
            self.streams.remove(session);
        }
    }

    fn remember(&mut self, key: &QuestionKey) {
        if self.keys.insert(key.question.clone(), key.clone()).is_some() {
            return;
        }
        self.keys_by_age.push_back(key.question.clone());
        if self.keys_by_age.len() > MAX_KEYS
            && let Some(oldest) = self.keys_by_age.pop_front()
        {
            self.keys.remove(&oldest);
        }
    }
}
