//! The pending questions as this router knows them from its watch, and the steps that it holds
//! until a write carries them.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ask_bus::Stored;
use ask_core::entry::{Entry, MAX_LISTED, Step, StepKind};
use ask_core::key::{QuestionKey, SessionKey};
use ask_core::limits::AskedBefore;
use ask_core::record::{RECORD_KEPT, was_lost};
use ask_core::surface::Surface;
use ask_core::time::Timestamp;
use tokio::sync::mpsc::UnboundedSender;
use tokio::time::Instant;

use crate::deadlines::{Alarm, Timed};
use crate::presence::PresentStreams;
use crate::{Router, deadlines};

/// Where alarms are set, and how far replicas are apart.
pub(crate) struct AlarmSetting<'a> {
    pub(crate) set: &'a UnboundedSender<Timed>,
    pub(crate) replica: u64,
    pub(crate) stagger: Duration,
}

/// All pending questions.
#[derive(Default)]
pub(crate) struct PendingQuestions(Mutex<Inner>);

#[derive(Default)]
struct Inner {
    questions: HashMap<QuestionKey, Pending>,
    by_session: BTreeMap<SessionKey, BTreeSet<QuestionKey>>,
    /// By the owner of their session, where that was read, in the order in which they were asked.
    by_owner: BTreeMap<String, BTreeSet<(Timestamp, QuestionKey)>>,
    /// Answers that were lost with their gateway, by session, and when each was given.
    lost: BTreeMap<SessionKey, Vec<(Timestamp, QuestionKey)>>,
    /// Steps that are on no record yet, also of questions that are decided.
    steps: HashMap<QuestionKey, Vec<Step>>,
}

struct Pending {
    stored: Stored<Entry>,
    /// When its deadline comes.
    due: Instant,
    /// The owner of its session, once that was read.
    owner: Option<String>,
    /// Surfaces for whose report an alarm is set.
    awaited: BTreeSet<Surface>,
    /// Surfaces that did not report in time; forgotten when nothing else is left.
    unreported: Vec<Surface>,
    /// This router followed presence from the start of the question on, and nobody was there.
    nothing_offered: bool,
}

impl PendingQuestions {
    /// Takes the value of an entry. True for a pending question that was not known. `live` is given
    /// where the value came the moment it was written: then this router's own clock counts from
    /// there, whatever the wall clocks say, and it knows who was there from the start.
    pub(crate) fn apply(
        &self,
        stored: Stored<Entry>,
        alarms: &AlarmSetting<'_>,
        live: Option<&PresentStreams>,
    ) -> bool {
        let mut inner = self.lock();
        let entry = &stored.value;
        let key = entry.key.clone();
        if !entry.is_pending() {
            inner.forget(&key);
            return false;
        }
        if let Some(known) = inner.questions.get_mut(&key) {
            if known.stored.revision < stored.revision {
                known.stored = stored;
            }
            return false;
        }
        let now = if live.is_some() { entry.asked_at } else { Timestamp::now().max(entry.asked_at) };
        let due = Instant::now() + entry.deadline.since(now);
        let alarm = due + deadlines::apart(&key, alarms.replica, alarms.stagger);
        let _ = alarms.set.send((alarm, Alarm::Deadline(key.clone())));
        let nothing_offered =
            live.is_some_and(|present| present.is_followed() && !present.somebody(&entry.key.session_key()));
        inner.by_session.entry(entry.key.session_key()).or_default().insert(key.clone());
        inner.questions.insert(
            key,
            Pending {
                stored,
                due,
                owner: None,
                awaited: BTreeSet::new(),
                unreported: Vec::new(),
                nothing_offered,
            },
        );
        true
    }

    /// The entry of a pending question.
    pub(crate) fn get(&self, key: &QuestionKey) -> Option<Stored<Entry>> {
        self.lock().questions.get(key).map(|p| p.stored.clone())
    }

    /// Whether the deadline of a pending question has come.
    pub(crate) fn is_overdue(&self, key: &QuestionKey) -> bool {
        self.lock().questions.get(key).is_some_and(|p| p.due <= Instant::now())
    }

    /// The pending questions of a session.
    pub(crate) fn of_session(&self, session: &SessionKey) -> Vec<QuestionKey> {
        self.lock().by_session.get(session).into_iter().flatten().cloned().collect()
    }

    /// The sessions that have pending questions.
    pub(crate) fn sessions(&self) -> Vec<SessionKey> {
        self.lock().by_session.keys().cloned().collect()
    }

    /// Remembers an answer that may be given again; true when it was not known.
    pub(crate) fn remember_lost(&self, entry: &Entry, now: Timestamp) -> bool {
        let Some(decision) = entry.decision().filter(|_| was_lost(entry)) else { return false };
        let mut inner = self.lock();
        inner.lost.retain(|_, of_session| {
            of_session.retain(|(at, _)| now.since(*at) <= RECORD_KEPT);
            !of_session.is_empty()
        });
        let of_session = inner.lost.entry(entry.key.session_key()).or_default();
        if now.since(decision.at) > RECORD_KEPT || of_session.iter().any(|(_, key)| *key == entry.key) {
            return false;
        }
        of_session.push((decision.at, entry.key.clone()));
        true
    }

    /// The lost answers of a session.
    pub(crate) fn lost(&self, session: &SessionKey) -> Vec<QuestionKey> {
        self.lock().lost.get(session).into_iter().flatten().map(|(_, key)| key.clone()).collect()
    }

    /// How many pending questions were asked before this one, whose session belongs to `owner`;
    /// of a user at most `most` are counted.
    pub(crate) fn asked_before(&self, entry: &Entry, owner: Option<&str>, most: usize) -> AskedBefore {
        let mut inner = self.lock();
        let own = (entry.asked_at, entry.key.clone());
        let mut before = AskedBefore::default();
        for key in inner.by_session.get(&entry.key.session_key()).into_iter().flatten() {
            let asked_at = inner.questions.get(key).map_or(own.0, |p| p.stored.value.asked_at);
            if (asked_at, key) < (own.0, &own.1) {
                before.session += 1;
                before.run += usize::from(key.run == entry.key.run);
            }
        }
        if let Some(owner) = owner {
            let pending = inner.questions.get_mut(&entry.key);
            let is_known = pending.map(|pending| pending.owner = Some(owner.to_owned())).is_some();
            let of_owner = inner.by_owner.entry(owner.to_owned()).or_default();
            before.user = of_owner.range(..own.clone()).take(most).count();
            if is_known {
                of_owner.insert(own);
            }
        }
        before
    }

    /// Whether this router has evidence that the question was offered to nobody (rule F1).
    pub(crate) fn nothing_offered(&self, key: &QuestionKey) -> bool {
        self.lock().questions.get(key).is_some_and(|p| p.nothing_offered)
    }

    /// Presence was not followed for a while.
    pub(crate) fn all_evidence_lost(&self) {
        self.lock().questions.values_mut().for_each(|p| p.nothing_offered = false);
    }

    /// Somebody is there for the session.
    pub(crate) fn evidence_lost(&self, session: &SessionKey) {
        let mut inner = self.lock();
        let keys: Vec<QuestionKey> = inner.by_session.get(session).into_iter().flatten().cloned().collect();
        for key in keys {
            if let Some(pending) = inner.questions.get_mut(&key) {
                pending.nothing_offered = false;
            }
        }
    }

    /// The surfaces to leave out, and whether some of them only did not report.
    pub(crate) fn tried(&self, key: &QuestionKey) -> (Vec<Surface>, Vec<Surface>) {
        let inner = self.lock();
        let Some(pending) = inner.questions.get(key) else { return Default::default() };
        let held = inner.steps.get(key).into_iter().flatten();
        let refused = pending.stored.value.steps.iter().chain(held).filter_map(|step| match &step.what {
            StepKind::Refused { surface, .. } => Some(*surface),
            _ => None,
        });
        (refused.collect(), pending.unreported.clone())
    }

    /// True when no alarm is set yet for the report of this surface.
    pub(crate) fn await_report(&self, key: &QuestionKey, surface: Surface) -> bool {
        self.lock().questions.get_mut(key).is_some_and(|pending| pending.awaited.insert(surface))
    }

    /// Remembers that a surface did not report in time.
    pub(crate) fn did_not_report(&self, key: &QuestionKey, surface: Surface) {
        if let Some(pending) = self.lock().questions.get_mut(key) {
            pending.awaited.remove(&surface);
            if !pending.unreported.contains(&surface) {
                pending.unreported.push(surface);
            }
        }
    }

    /// Gives the surfaces that did not report another chance.
    pub(crate) fn try_unreported_again(&self, key: &QuestionKey) {
        if let Some(pending) = self.lock().questions.get_mut(key) {
            pending.unreported.clear();
        }
    }

    /// Holds a step until a write carries it. False when it is known.
    pub(crate) fn hold(&self, key: &QuestionKey, what: StepKind) -> bool {
        let mut inner = self.lock();
        let on_record =
            inner.questions.get(key).is_some_and(|p| p.stored.value.steps.iter().any(|s| s.what == what));
        let is_held = inner.steps.get(key).is_some_and(|held| held.iter().any(|s| s.what == what));
        if on_record || is_held {
            return false;
        }
        inner.steps.entry(key.clone()).or_default().push(Step { at: Timestamp::now(), what });
        true
    }

    /// Whether this surface has reported delivery, on record or held here.
    pub(crate) fn was_delivered(&self, key: &QuestionKey, on: Surface) -> bool {
        self.any_step(key, |what| matches!(what, StepKind::Delivered { surface, .. } if *surface == on))
    }

    /// Whether any surface has reported delivery, on record or held here.
    pub(crate) fn was_delivered_anywhere(&self, key: &QuestionKey) -> bool {
        self.any_step(key, |what| matches!(what, StepKind::Delivered { .. }))
    }

    fn any_step(&self, key: &QuestionKey, is: impl Fn(&StepKind) -> bool) -> bool {
        let inner = self.lock();
        let on_record = inner.questions.get(key).into_iter().flat_map(|p| &p.stored.value.steps);
        let held = inner.steps.get(key).into_iter().flatten();
        on_record.chain(held).any(|step| is(&step.what))
    }

    /// The entry with the steps that are held for it.
    pub(crate) fn with_steps(&self, entry: Entry) -> Entry {
        match self.lock().steps.get(&entry.key) {
            Some(steps) => entry.note(steps).unwrap_or(entry),
            None => entry,
        }
    }

    /// These steps are on record now.
    pub(crate) fn recorded(&self, entry: &Entry) {
        let mut inner = self.lock();
        if let Some(held) = inner.steps.get_mut(&entry.key) {
            // What a full list has left out is counted there.
            let is_full = entry.steps.len() >= MAX_LISTED;
            held.retain(|s| !is_full && !entry.steps.iter().any(|r| r.what == s.what));
            if held.is_empty() {
                inner.steps.remove(&entry.key);
            }
        }
    }

    /// The questions for which steps are held.
    pub(crate) fn with_held_steps(&self) -> Vec<QuestionKey> {
        self.lock().steps.keys().cloned().collect()
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn forget(&mut self, key: &QuestionKey) {
        let Some(Pending { stored, owner: Some(owner), .. }) = self.questions.remove(key) else {
            return self.forget_of_session(key);
        };
        if let Some(of_owner) = self.by_owner.get_mut(&owner) {
            of_owner.remove(&(stored.value.asked_at, key.clone()));
            if of_owner.is_empty() {
                self.by_owner.remove(&owner);
            }
        }
        self.forget_of_session(key);
    }

    fn forget_of_session(&mut self, key: &QuestionKey) {
        let session = key.session_key();
        if let Some(keys) = self.by_session.get_mut(&session) {
            keys.remove(key);
            if keys.is_empty() {
                self.by_session.remove(&session);
            }
        }
    }
}

impl Router {
    pub(crate) fn alarms_of(&self) -> AlarmSetting<'_> {
        AlarmSetting { set: &self.alarms, replica: self.replica, stagger: self.config.stagger }
    }

    /// A decision of this router is durable.
    pub(crate) fn decided(&self, entry: &Entry, revision: u64) {
        self.pending.recorded(entry);
        let stored = Stored { value: entry.clone(), revision };
        self.pending.apply(stored, &self.alarms_of(), None);
        crate::spans::human_wait(entry);
    }
}
