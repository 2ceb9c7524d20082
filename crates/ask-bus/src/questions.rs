//! The questions' entries: each write of a life has its name here.

use ask_core::entry::Entry;
use ask_core::key::{QuestionKey, SessionKey};
use ask_core::time::Timestamp;
use ask_core::wire::ShowStep;
use async_nats::Subscriber;
use futures::StreamExt;
use tokio::sync::watch;

use crate::connection::{Bus, Expect, decode, encode};
use crate::effect::{Effect, Mutant};
use crate::error::BusError;
use crate::names::{self, ASK};
use crate::watch::{Change, Watch};

/// A value and its revision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stored<T> {
    /// The value.
    pub value: T,
    /// The revision that a compare-and-set expects.
    pub revision: u64,
}

impl Bus {
    /// First durable write: opens the question. A call that comes again finds its entry, whatever
    /// has become of it.
    ///
    /// # Errors
    /// [`BusError::Unavailable`]: it may or may not be written; ask again with the same key.
    pub async fn write_asked(&self, entry: &Entry) -> Result<Stored<Entry>, BusError> {
        self.check_room(Effect::Asked.name(), entry)?;
        match self.write_entry(Effect::Asked, entry, Expect::Revision(0)).await {
            Ok(revision) => Ok(Stored { value: entry.clone(), revision }),
            Err(BusError::Conflict { key }) => {
                self.question(&entry.key).await?.ok_or(BusError::Conflict { key })
            }
            Err(error) => Err(error),
        }
    }

    /// Second durable write: the one decision. Only routers call it.
    ///
    /// # Errors
    /// [`BusError::Conflict`] decides nothing: read again.
    pub async fn write_decided(&self, entry: &Entry, revision: u64) -> Result<u64, BusError> {
        if Mutant::Ttl.is_on() && Timestamp::now() >= entry.deadline {
            return Ok(revision);
        }
        if Mutant::ToldEarly.is_on() {
            let (bus, entry) = (self.clone(), entry.clone());
            tokio::spawn(async move {
                bus.write_entry(Effect::Decided, &entry, Expect::Revision(revision)).await
            });
            return Ok(revision + 1);
        }
        self.write_entry(Effect::Decided, entry, Expect::Revision(revision)).await
    }

    /// Third durable write: closes the question. The answer's secret, if any, goes out of reach:
    /// all older values of the key are rolled up into this one.
    ///
    /// # Errors
    /// [`BusError::Conflict`]: read again.
    pub async fn write_returned(
        &self,
        entry: &Entry,
        revision: u64,
        held_secret: bool,
    ) -> Result<u64, BusError> {
        let expect =
            if held_secret { Expect::RevisionAndRollUp(revision) } else { Expect::Revision(revision) };
        self.write_entry(Effect::Returned, entry, expect).await
    }

    /// Writes steps that no other write has carried within a second.
    ///
    /// # Errors
    /// [`BusError::Conflict`]: read again.
    pub async fn write_steps(&self, entry: &Entry, revision: u64) -> Result<u64, BusError> {
        self.write_entry(Effect::Steps, entry, Expect::Revision(revision)).await
    }

    /// Lists a late reply.
    ///
    /// # Errors
    /// [`BusError::Conflict`]: read again.
    pub async fn write_late(&self, entry: &Entry, revision: u64) -> Result<u64, BusError> {
        self.write_entry(Effect::Late, entry, Expect::Revision(revision)).await
    }

    /// Marks the answer of a lost call as given to the question that asks the same again.
    ///
    /// # Errors
    /// [`BusError::Conflict`]: read again.
    pub async fn write_given_again(&self, entry: &Entry, revision: u64) -> Result<u64, BusError> {
        self.write_entry(Effect::GivenAgain, entry, Expect::Revision(revision)).await
    }

    /// The entry of a question now.
    ///
    /// # Errors
    /// While the server can't be reached, or when the entry can't be read.
    pub async fn question(&self, key: &QuestionKey) -> Result<Option<Stored<Entry>>, BusError> {
        let read = self.read(ASK, &key.to_string()).await?;
        Ok(read.map(|(value, revision)| Stored { value, revision }))
    }

    /// All entries of a session, oldest first.
    ///
    /// # Errors
    /// While the server can't be reached.
    pub async fn questions_of(&self, session: &SessionKey) -> Result<Vec<Stored<Entry>>, BusError> {
        self.questions(&format!("{session}.>")).await
    }

    /// All entries, oldest first.
    ///
    /// # Errors
    /// While the server can't be reached.
    pub async fn all_questions(&self) -> Result<Vec<Stored<Entry>>, BusError> {
        self.questions(">").await
    }

    async fn questions(&self, filter: &str) -> Result<Vec<Stored<Entry>>, BusError> {
        let read = self.read_all::<Entry>(ASK, filter).await?;
        let mut entries: Vec<_> =
            read.into_iter().map(|(value, revision)| Stored { value, revision }).collect();
        entries.sort_by_key(|e| (e.value.asked_at, e.revision));
        Ok(entries)
    }

    /// Every value that the entry of a question has had, oldest first, as far as the bucket keeps
    /// them, with the time of each write in milliseconds since 1970.
    ///
    /// # Errors
    /// While the server can't be reached.
    pub async fn question_history(&self, key: &QuestionKey) -> Result<Vec<(Stored<Entry>, u64)>, BusError> {
        let failed = |e: String| BusError::unavailable(format!("can't read the history of {key}"), e);
        let bucket = self.jetstream().get_key_value(ASK).await.map_err(|e| failed(e.to_string()))?;
        let mut history = bucket.history(key.to_string()).await.map_err(|e| failed(e.to_string()))?;
        let mut values = Vec::new();
        while let Some(entry) = history.next().await {
            let entry = entry.map_err(|e| failed(e.to_string()))?;
            let value = decode(&entry.key, &entry.value)?;
            let written = (entry.created.unix_timestamp_nanos() / 1_000_000) as u64;
            values.push((Stored { value, revision: entry.revision }, written));
        }
        Ok(values)
    }

    /// Follows the entries of one gateway, or of all, without a gap: for routers and adapters.
    pub fn watch_questions(&self, gateway: Option<&str>) -> Watch<Entry> {
        let filter = gateway.map_or_else(|| ">".into(), |g| format!("{}.>", ask_core::key::encode_token(g)));
        self.watch(ASK, &filter)
    }

    /// Entries as the server republishes them, and the routers' steps: for display, which may
    /// miss something and reads the entries again.
    ///
    /// # Errors
    /// When the subscription can't be made.
    pub async fn question_feed(&self) -> Result<QuestionFeed, BusError> {
        let failed = |e: String| BusError::unavailable("can't subscribe to questions", e);
        let entries = self.client().subscribe("ask.>").await.map_err(|e| failed(e.to_string()))?;
        let steps = self.client().subscribe("step.>").await.map_err(|e| failed(e.to_string()))?;
        self.subscriptions_known().await.map_err(failed)?;
        let mut connections = self.connections();
        connections.mark_unchanged();
        Ok(QuestionFeed { bus: self.clone(), entries, steps, connections })
    }

    /// Tells front ends where to show a question. Not stored: it can be derived again.
    ///
    /// # Errors
    /// When it can't be sent.
    pub async fn publish_step(&self, step: &ShowStep) -> Result<(), BusError> {
        let mut headers = async_nats::HeaderMap::new();
        crate::trace::inject(&mut headers);
        let (subject, payload) = (names::step(&step.key), encode(step));
        let sent = self.send(Effect::Step, subject, headers, payload);
        sent.await.map_err(|e| BusError::unavailable("the step was not sent", e))
    }

    async fn write_entry(&self, effect: Effect, entry: &Entry, expect: Expect<'_>) -> Result<u64, BusError> {
        self.write(effect, names::bucket_subject(ASK, &entry.key.to_string()), entry, expect).await
    }
}

/// What front ends follow.
#[derive(Debug)]
pub struct QuestionFeed {
    bus: Bus,
    entries: Subscriber,
    steps: Subscriber,
    connections: watch::Receiver<u64>,
}

/// One item of a [`QuestionFeed`].
#[derive(Debug)]
pub enum FeedItem {
    /// The value of an entry.
    Entry(Box<Stored<Entry>>),
    /// Where a question is to be shown.
    Step(ShowStep),
    /// Something may have been missed: read the entries again.
    ReadAgain,
}

impl QuestionFeed {
    /// The next item; `None` once the connection is closed for good.
    pub async fn next(&mut self) -> Option<FeedItem> {
        loop {
            let message = tokio::select! {
                changed = self.connections.changed() => return changed.is_ok().then_some(FeedItem::ReadAgain),
                message = self.entries.next() => message?,
                message = self.steps.next() => message?,
            };
            let read = if message.subject.starts_with("step.") {
                decode(&message.subject, &message.payload).map(FeedItem::Step)
            } else {
                let revision = message
                    .headers
                    .as_ref()
                    .and_then(|h| h.get(names::SEQUENCE_HEADER))
                    .and_then(|v| v.as_str().parse().ok());
                decode(&message.subject, &message.payload)
                    .map(|value| FeedItem::Entry(Box::new(Stored { value, revision: revision.unwrap_or(0) })))
            };
            match read {
                Ok(item) => return Some(item),
                Err(error) => {
                    self.bus.park_aside(&message, error.to_string());
                }
            }
        }
    }
}

impl Change<Entry> {
    /// The entry of a put.
    pub fn into_stored(self) -> Option<Stored<Entry>> {
        match self {
            Self::Put { value, revision, .. } => Some(Stored { value: *value, revision }),
            _ => None,
        }
    }
}
