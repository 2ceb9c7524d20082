//! Following a bucket from the last value per key, without a gap.

use std::time::Duration;

use async_nats::jetstream::consumer::DeliverPolicy;
use async_nats::jetstream::consumer::push::OrderedConfig;
use async_nats::jetstream::stream::Stream;
use futures::{StreamExt, TryStreamExt};
use serde::de::DeserializeOwned;
use tokio::sync::mpsc;

use crate::connection::{Bus, decode};
use crate::error::BusError;
use crate::names;

/// One change of a bucket.
#[derive(Debug)]
pub enum Change<T> {
    /// The value of a key now. After a reconnect it may be one that is known already.
    Put {
        /// The key.
        key: String,
        /// Its value.
        value: Box<T>,
        /// Its revision.
        revision: u64,
    },
    /// The key has no value any more.
    Deleted {
        /// The key.
        key: String,
        /// The revision that says so.
        revision: u64,
    },
    /// All keys are sent anew: at the start, and after each reconnect.
    Loading,
    /// All keys have been sent once: after the start, and again after each reconnect.
    Loaded {
        /// Everything up to this revision is known.
        revision: u64,
    },
}

impl<T> Change<T> {
    /// Up to which revision the reader knows the bucket with this change.
    pub fn revision(&self) -> Option<u64> {
        match self {
            Self::Put { revision, .. } | Self::Deleted { revision, .. } | Self::Loaded { revision } => {
                Some(*revision)
            }
            Self::Loading => None,
        }
    }
}

/// How long nothing may come while a bucket is loaded.
const READ_PAUSE: Duration = Duration::from_secs(2);
/// How many keys are read at a time.
const READS_AT_ONCE: usize = 64;

/// The changes of a bucket. Ends only when it is dropped.
#[derive(Debug)]
pub struct Watch<T> {
    changes: mpsc::Receiver<Change<T>>,
}

impl<T> Watch<T> {
    /// The next change; `None` once the process stops.
    pub async fn next(&mut self) -> Option<Change<T>> {
        self.changes.recv().await
    }
}

/// A consumer of one reader. It goes with its reader: by itself the server would keep each one for
/// 30 seconds, and there may be many reads a second.
pub(crate) struct Passing {
    stream: Stream,
    name: String,
}

impl Passing {
    pub(crate) fn new(stream: &Stream, name: &str) -> Self {
        Self { stream: stream.clone(), name: name.into() }
    }
}

impl Drop for Passing {
    fn drop(&mut self) {
        let (stream, name) = (self.stream.clone(), std::mem::take(&mut self.name));
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            // Where it fails, the server tidies up.
            runtime.spawn(async move { stream.delete_consumer(&name).await.map(drop) });
        }
    }
}

impl Bus {
    /// Follows the keys of `bucket` that match `filter` (`>` for all).
    pub(crate) fn watch<T: DeserializeOwned + Send + 'static>(
        &self,
        bucket: &'static str,
        filter: &str,
    ) -> Watch<T> {
        let (send, changes) = mpsc::channel(1024);
        let (bus, filter) = (self.clone(), names::bucket_subject(bucket, filter));
        tokio::spawn(async move {
            while !send.is_closed() {
                if let Err(error) = bus.follow(bucket, &filter, &send).await {
                    tracing::warn!(bucket, %error, "the watch broke; loading again");
                    tokio::time::sleep(Duration::from_millis(250)).await;
                }
            }
        });
        Watch { changes }
    }

    /// Loads and follows until the connection changes or breaks.
    async fn follow<T: DeserializeOwned>(
        &self,
        bucket: &str,
        filter: &str,
        send: &mpsc::Sender<Change<T>>,
    ) -> Result<(), BusError> {
        let mut connections = self.connections();
        connections.mark_unchanged();
        let stream = self.stream(&names::bucket_stream(bucket)).await?;
        let config = OrderedConfig {
            deliver_subject: self.client().new_inbox(),
            filter_subject: filter.into(),
            deliver_policy: DeliverPolicy::LastPerSubject,
            ..Default::default()
        };
        let broken = |e: String| BusError::unavailable(format!("can't follow the bucket {bucket}"), e);
        let consumer = stream.create_consumer(config).await.map_err(|e| broken(e.to_string()))?;
        let _passing = Passing::new(&stream, &consumer.cached_info().name);
        // It was read before the consumer was made, so that all of it is loaded.
        let loaded = || Change::Loaded { revision: stream.cached_info().state.last_sequence };
        // A value that is replaced before it comes is replaced by its successor, which comes too.
        let mut to_load = consumer.cached_info().num_pending;
        let mut announced = to_load;
        let mut messages = consumer.messages().await.map_err(|e| broken(e.to_string()))?;
        if send.send(Change::Loading).await.is_err() || to_load == 0 && send.send(loaded()).await.is_err() {
            return Ok(());
        }
        let prefix = names::bucket_subject(bucket, "");
        loop {
            let message = tokio::select! {
                _ = connections.changed() => return Ok(()),
                () = send.closed() => return Ok(()),
                () = tokio::time::sleep(READ_PAUSE), if to_load > 0 => {
                    if announced > 0 {
                        return Err(broken("nothing more came".into()));
                    }
                    // The server has forgotten a value that was too old by then.
                    to_load = 0;
                    if send.send(loaded()).await.is_err() {
                        return Ok(());
                    }
                    continue;
                }
                message = messages.next() => match message {
                    Some(message) => message.map_err(|e| broken(e.to_string()))?,
                    None => return Ok(()),
                },
            };
            let key = message.subject.strip_prefix(prefix.as_str()).unwrap_or(&message.subject).to_owned();
            let info = message.info().map_err(|e| broken(e.to_string()))?;
            let revision = info.stream_sequence;
            announced = info.pending;
            let deleted = message
                .headers
                .as_ref()
                .is_some_and(|h| h.get("KV-Operation").is_some() || h.get("Nats-Marker-Reason").is_some());
            let change = if deleted {
                Some(Change::Deleted { key, revision })
            } else {
                match decode(&message.subject, &message.payload) {
                    Ok(value) => Some(Change::Put { key, value: Box::new(value), revision }),
                    Err(error) => {
                        let why = error.to_string();
                        self.park_value(&message.subject, revision, &why, &message.payload).await;
                        None
                    }
                }
            };
            if let Some(change) = change
                && send.send(change).await.is_err()
            {
                return Ok(());
            }
            if to_load > 0 {
                to_load -= 1;
                if to_load == 0 && send.send(loaded()).await.is_err() {
                    return Ok(());
                }
            }
        }
    }

    /// The values of all keys that match `filter` now, with their revisions. Each key is read by itself:
    /// a consumer may pass by one that is written while it begins. What can't be read is left out, and
    /// parked by the watches.
    pub(crate) async fn read_all<T: DeserializeOwned>(
        &self,
        bucket: &'static str,
        filter: &str,
    ) -> Result<Vec<(T, u64)>, BusError> {
        let failed = |e: String| BusError::unavailable(format!("can't read the bucket {bucket}"), e);
        let stream = self.stream(&names::bucket_stream(bucket)).await?;
        let prefix = names::bucket_subject(bucket, "");
        let listed = stream.info_with_subjects(names::bucket_subject(bucket, filter)).await;
        let listed: Vec<_> = listed
            .map_err(|e| failed(e.to_string()))?
            .try_collect()
            .await
            .map_err(|e| failed(e.to_string()))?;
        let read = futures::stream::iter(listed).map(|(subject, _)| {
            let key = subject.strip_prefix(prefix.as_str()).unwrap_or(&subject).to_owned();
            async move { self.read::<T>(bucket, &key).await }
        });
        let mut read = read.buffered(READS_AT_ONCE);
        let mut values = Vec::new();
        while let Some(value) = read.next().await {
            match value {
                Ok(value) => values.extend(value),
                Err(error @ BusError::Unreadable { .. }) => tracing::warn!(%error, "left out"),
                Err(error) => return Err(error),
            }
        }
        Ok(values)
    }
}
