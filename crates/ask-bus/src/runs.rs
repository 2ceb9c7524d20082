//! What the runs put out: written by adapters, replayed and followed by emitters.

use std::collections::{BTreeMap, VecDeque};

use ask_core::key::{SessionKey, encode_token};
use ask_core::wire::{RunEvent, RunItem};
use async_nats::jetstream::consumer::DeliverPolicy;
use async_nats::jetstream::consumer::push::OrderedConfig;
use futures::StreamExt;
use tokio::sync::mpsc;

use crate::connection::{Bus, Expect, decode};
use crate::effect::Effect;
use crate::error::BusError;
use crate::names::{self, RUNS};
use crate::watch::Passing;

/// A place in `RUNS`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct RunCursor {
    /// When the stream was created, in milliseconds since 1970: a cursor of another stream means
    /// nothing.
    pub created: u64,
    /// The last sequence number seen.
    pub sequence: u64,
}

/// One item and its place.
#[derive(Debug, Clone, PartialEq)]
pub struct RunDelivery {
    /// The item.
    pub item: RunItem,
    /// Its sequence number in `RUNS`.
    pub sequence: u64,
}

/// How many items a server may lose in a crash, since `RUNS` is not synced with each write. As
/// many are compared after each reconnect.
const MAY_BE_LOST: usize = 1024;

/// The last items that a feed has delivered: number and time of writing. After a crash of the
/// server the same number may be another item.
#[derive(Debug, Default)]
struct Told(VecDeque<(u64, i128)>);

impl Told {
    /// True for an item that was not delivered yet; it counts as delivered then.
    fn is_new(&mut self, sequence: u64, written: i128) -> bool {
        if self.0.contains(&(sequence, written)) {
            return false;
        }
        self.0.retain(|(told, _)| *told < sequence);
        self.0.push_back((sequence, written));
        if self.0.len() > MAY_BE_LOST {
            self.0.pop_front();
        }
        true
    }
}

/// What the runs put out from now on.
#[derive(Debug)]
pub struct RunFeed {
    deliveries: mpsc::Receiver<RunDelivery>,
    /// Where the feed begins.
    pub begins: RunCursor,
}

impl RunFeed {
    /// The next item; `None` once the process stops.
    pub async fn next(&mut self) -> Option<RunDelivery> {
        self.deliveries.recv().await
    }
}

impl Bus {
    /// Puts out an item of a run.
    ///
    /// # Errors
    /// When it can't be written.
    pub async fn write_run(&self, item: &RunItem) -> Result<u64, BusError> {
        self.write(Effect::Run, names::run(item), item, Expect::Nothing).await
    }

    /// The end of `RUNS` now.
    ///
    /// # Errors
    /// While the server can't be reached.
    pub async fn run_cursor(&self) -> Result<RunCursor, BusError> {
        let stream = self.stream(RUNS).await?;
        let info = stream.cached_info();
        let created = (info.created.unix_timestamp_nanos() / 1_000_000) as u64;
        Ok(RunCursor { created, sequence: info.state.last_sequence })
    }

    /// What the runs of a session have put out after `after`.
    ///
    /// # Errors
    /// While the server can't be reached.
    pub async fn replay_runs(&self, session: &SessionKey, after: u64) -> Result<Vec<RunDelivery>, BusError> {
        let stream = self.stream(RUNS).await?;
        let broken = |e: String| BusError::unavailable("can't replay RUNS", e);
        let consumer = stream
            .create_consumer(self.runs_from(format!("run.{session}.>"), after))
            .await
            .map_err(|e| broken(e.to_string()))?;
        let _passing = Passing::new(&stream, &consumer.cached_info().name);
        let mut left = consumer.cached_info().num_pending;
        let mut messages = consumer.messages().await.map_err(|e| broken(e.to_string()))?;
        let mut items = Vec::with_capacity(left as usize);
        while left > 0 {
            let Some(message) = messages.next().await else {
                return Err(broken("it ended early".into()));
            };
            let message = message.map_err(|e| broken(e.to_string()))?;
            let info = message.info().map_err(|e| broken(e.to_string()))?;
            left = info.pending;
            match decode(&message.subject, &message.payload) {
                Ok(item) => items.push(RunDelivery { item, sequence: info.stream_sequence }),
                Err(error) => {
                    self.park(&message.subject, &error.to_string(), &message.payload).await;
                }
            }
        }
        Ok(items)
    }

    /// The first item of each run of a gateway that began, or whose message was sent, and that has
    /// not ended, as far as `RUNS` goes back.
    ///
    /// # Errors
    /// While the server can't be reached.
    pub async fn runs_not_ended(&self, gateway: &str) -> Result<Vec<RunItem>, BusError> {
        let stream = self.stream(RUNS).await?;
        let broken = |e: String| BusError::unavailable("can't look through RUNS", e);
        let gateway = encode_token(gateway);
        let kinds = ["sent", "started", "failed", "ended"];
        let config = OrderedConfig {
            filter_subjects: kinds.map(|kind| format!("run.{gateway}.*.*.{kind}")).to_vec(),
            ..self.runs_from(String::new(), 0)
        };
        let consumer = stream.create_consumer(config).await.map_err(|e| broken(e.to_string()))?;
        let _passing = Passing::new(&stream, &consumer.cached_info().name);
        let mut left = consumer.cached_info().num_pending;
        let mut messages = consumer.messages().await.map_err(|e| broken(e.to_string()))?;
        let mut open: BTreeMap<(SessionKey, String), RunItem> = BTreeMap::new();
        while left > 0 {
            let message = messages.next().await.ok_or_else(|| broken("it ended early".into()))?;
            let message = message.map_err(|e| broken(e.to_string()))?;
            left = message.info().map_err(|e| broken(e.to_string()))?.pending;
            // What can't be read is parked by those who follow RUNS.
            let Ok(item) = decode::<RunItem>(&message.subject, &message.payload) else {
                continue;
            };
            let run = (item.session.clone(), item.run.clone());
            if matches!(item.what, RunEvent::Ended { .. } | RunEvent::Failed { .. }) {
                open.remove(&run);
            } else {
                open.entry(run).or_insert(item);
            }
        }
        Ok(open.into_values().collect())
    }

    /// Follows all runs from now on, over reconnects, without a gap: one feed per process.
    ///
    /// # Errors
    /// While the server can't be reached.
    pub async fn follow_runs(&self) -> Result<RunFeed, BusError> {
        let begins = self.run_cursor().await?;
        let (send, deliveries) = mpsc::channel(4096);
        let bus = self.clone();
        tokio::spawn(async move {
            let mut told = Told::default();
            while !send.is_closed() {
                if let Err(error) = bus.feed_runs(begins, &mut told, &send).await {
                    tracing::warn!(%error, "the feed of RUNS broke; going on");
                    tokio::time::sleep(std::time::Duration::from_millis(250)).await;
                }
            }
        });
        Ok(RunFeed { deliveries, begins })
    }

    async fn feed_runs(
        &self,
        begins: RunCursor,
        told: &mut Told,
        send: &mpsc::Sender<RunDelivery>,
    ) -> Result<(), BusError> {
        let mut connections = self.connections();
        connections.mark_unchanged();
        let stream = self.stream(RUNS).await?;
        // What was delivered is read again, since it may have been lost in a crash and other items
        // have its numbers now. A stream that is made anew, or that lost more, is all new.
        let after = told.0.front().map_or(begins.sequence, |(first, _)| first - 1);
        let after = if stream.cached_info().state.last_sequence < after { 0 } else { after };
        let broken = |e: String| BusError::unavailable("can't follow RUNS", e);
        let consumer = stream
            .create_consumer(self.runs_from("run.>".into(), after))
            .await
            .map_err(|e| broken(e.to_string()))?;
        let _passing = Passing::new(&stream, &consumer.cached_info().name);
        let mut messages = consumer.messages().await.map_err(|e| broken(e.to_string()))?;
        loop {
            let message = tokio::select! {
                _ = connections.changed() => return Ok(()),
                () = send.closed() => return Ok(()),
                message = messages.next() => match message {
                    Some(message) => message.map_err(|e| broken(e.to_string()))?,
                    None => return Ok(()),
                },
            };
            let info = message.info().map_err(|e| broken(e.to_string()))?;
            let sequence = info.stream_sequence;
            if !told.is_new(sequence, info.published.unix_timestamp_nanos()) {
                continue;
            }
            match decode(&message.subject, &message.payload) {
                Ok(item) => {
                    if send.send(RunDelivery { item, sequence }).await.is_err() {
                        return Ok(());
                    }
                }
                Err(error) => {
                    self.park(&message.subject, &error.to_string(), &message.payload).await;
                }
            }
        }
    }

    fn runs_from(&self, filter_subject: String, after: u64) -> OrderedConfig {
        OrderedConfig {
            deliver_subject: self.client().new_inbox(),
            filter_subject,
            deliver_policy: DeliverPolicy::ByStartSequence { start_sequence: after + 1 },
            ..Default::default()
        }
    }
}
