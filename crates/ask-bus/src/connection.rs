//! The connection, and the one place where anything is written or read.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_nats::jetstream::context::PublishErrorKind;
use async_nats::jetstream::{self, stream::Stream};
use async_nats::{Client, ConnectOptions, Event, HeaderMap, RequestErrorKind, header};
use bytes::Bytes;
use futures::StreamExt;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::watch;

use crate::effect::{self, Effect, Mutant};
use crate::error::BusError;
use crate::{names, trace};

/// How long a request to a service may take.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);

/// Longest subject, in bytes. The server closes the connection over a command line of 4096 bytes,
/// which also holds the inbox.
const MAX_SUBJECT: usize = 3_500;

/// How to reach the NATS server.
#[derive(Debug, Clone, Default)]
pub struct BusOptions {
    /// One or more addresses, separated by commas.
    pub url: String,
    /// The connection's name, shown by the server.
    pub name: String,
    /// The seed of the service's nkey.
    pub nkey_seed: Option<String>,
    /// Prefix of the service's inbox, as its permissions name it.
    pub inbox_prefix: Option<String>,
    /// A CA for TLS to the server.
    pub ca_file: Option<PathBuf>,
}

/// A connection to the bus. Cheap to clone.
#[derive(Clone)]
pub struct Bus {
    inner: Arc<Inner>,
}

struct Inner {
    client: Client,
    js: jetstream::Context,
    /// Counts the connections; each one calls for a full load (rule N7).
    connections: watch::Receiver<u64>,
}

impl std::fmt::Debug for Bus {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Bus")
    }
}

impl Bus {
    /// Starts connecting and returns at once; the client connects again for ever.
    ///
    /// # Errors
    /// [`BusError::Connect`] for options that can't work.
    pub async fn connect(options: BusOptions) -> Result<Self, BusError> {
        let failed = |reason: String| BusError::Connect { url: options.url.clone(), reason };
        let (connected, connections) = watch::channel(0_u64);
        let connected = Arc::new(connected);
        let mut connect = ConnectOptions::new()
            .name(&options.name)
            .retry_on_initial_connect()
            .request_timeout(Some(REQUEST_TIMEOUT))
            .reconnect_delay_callback(|attempt| {
                Duration::from_millis(50 * (1 << attempt.min(6)) as u64).min(Duration::from_secs(2))
            })
            .event_callback(move |event| {
                let connected = connected.clone();
                async move {
                    match event {
                        Event::Connected => connected.send_modify(|n| *n += 1),
                        Event::Disconnected => {
                            tracing::warn!("the connection to nats is lost; connecting again")
                        }
                        Event::ServerError(error) => {
                            tracing::error!(%error, "nats refused something")
                        }
                        Event::SlowConsumer(_) => {
                            tracing::warn!("this process reads too slowly from nats; loading again");
                            connected.send_modify(|n| *n += 1);
                        }
                        other => tracing::debug!(event = %other, "nats"),
                    }
                }
            });
        if let Some(seed) = &options.nkey_seed {
            connect = connect.nkey(seed.trim().to_owned());
        }
        if let Some(prefix) = &options.inbox_prefix {
            connect = connect.custom_inbox_prefix(prefix);
        }
        if let Some(ca) = &options.ca_file {
            connect = connect.add_root_certificates(ca.clone()).require_tls(true);
        }
        let servers: Vec<&str> = options.url.split(',').map(str::trim).filter(|s| !s.is_empty()).collect();
        let client = connect.connect(servers).await.map_err(|e| failed(e.to_string()))?;
        let mut js = jetstream::new(client.clone());
        js.set_timeout(REQUEST_TIMEOUT);
        Ok(Self { inner: Arc::new(Inner { client, js, connections }) })
    }

    /// Checks that everything is there that `askctl provision` makes.
    ///
    /// # Errors
    /// [`BusError::NotProvisioned`] naming the first thing that is missing;
    /// [`BusError::Unavailable`] while the server can't be reached.
    pub async fn check(&self) -> Result<(), BusError> {
        let buckets =
            [names::ASK, names::SESSIONS, names::PRESENCE, names::ADAPTERS].map(names::bucket_stream);
        for stream in buckets.iter().map(String::as_str).chain([names::CHAT, names::RUNS, names::DEAD]) {
            self.stream(stream).await?;
        }
        Ok(())
    }

    /// True while the connection stands.
    pub fn is_connected(&self) -> bool {
        self.inner.client.connection_state() == async_nats::connection::State::Connected
    }

    /// Sends what is still buffered and closes.
    pub async fn close(&self) {
        if let Err(error) = self.inner.client.drain().await {
            tracing::warn!(%error, "nats: nothing was drained");
        }
    }

    /// Waits until the server knows every subscription made so far. A flush only writes them, so
    /// that a request from another connection could still find nobody.
    ///
    /// # Errors
    /// When the connection is closed for good.
    pub(crate) async fn subscriptions_known(&self) -> Result<(), String> {
        let client = self.client();
        let inbox = client.new_inbox();
        let mut echo = client.subscribe(inbox.clone()).await.map_err(|e| e.to_string())?;
        loop {
            client.publish(inbox.clone(), Bytes::new()).await.map_err(|e| e.to_string())?;
            match tokio::time::timeout(REQUEST_TIMEOUT, echo.next()).await {
                Ok(Some(_)) => return Ok(()),
                Ok(None) => return Err("the connection is closed".into()),
                Err(_) => tracing::warn!("nats does not answer; asking again"),
            }
        }
    }

    pub(crate) fn client(&self) -> &Client {
        &self.inner.client
    }

    pub(crate) fn jetstream(&self) -> &jetstream::Context {
        &self.inner.js
    }

    pub(crate) fn connections(&self) -> watch::Receiver<u64> {
        self.inner.connections.clone()
    }

    pub(crate) async fn stream(&self, name: &str) -> Result<Stream, BusError> {
        use async_nats::jetstream::context::GetStreamErrorKind::JetStream;
        self.inner.js.get_stream(name).await.map_err(|error| match error.kind() {
            JetStream(e) if e.code() == 404 => {
                BusError::NotProvisioned { what: format!("the stream {name}") }
            }
            _ => BusError::unavailable(format!("can't look up the stream {name}"), error),
        })
    }

    /// Writes `value` durably to `subject` and returns its sequence number. `effect` names
    /// the write.
    pub(crate) async fn write<T: Serialize>(
        &self,
        effect: Effect,
        subject: String,
        value: &T,
        expect: Expect<'_>,
    ) -> Result<u64, BusError> {
        let payload = encode(value);
        self.check_size(effect.name(), &subject, &payload)?;
        let (size, limit) = (payload.len(), self.inner.client.server_info().max_payload);
        let mut headers = HeaderMap::new();
        trace::inject(&mut headers);
        match expect {
            Expect::Nothing => {}
            Expect::Revision(_) if effect == Effect::Decided && Mutant::NoRevision.is_on() => {}
            Expect::Revision(revision) | Expect::RevisionAndRollUp(revision) => {
                headers.insert(header::NATS_EXPECTED_LAST_SUBJECT_SEQUENCE, revision.to_string().as_str());
            }
            Expect::Once(id) => headers.insert(header::NATS_MESSAGE_ID, id),
        }
        if let Expect::RevisionAndRollUp(_) = expect {
            headers.insert(header::NATS_ROLLUP, "sub");
        }
        if effect == Effect::Asked && Mutant::Ttl.is_on() {
            headers.insert("Nats-TTL", effect::seconds_left(&payload).as_str());
        }
        let failed = |error: jetstream::context::PublishError| match error.kind() {
            PublishErrorKind::WrongLastSequence => BusError::Conflict { key: subject.clone() },
            PublishErrorKind::StreamNotFound => {
                BusError::NotProvisioned { what: format!("the stream of {subject}") }
            }
            PublishErrorKind::MaxPayloadExceeded => {
                BusError::TooLarge { what: effect.name().into(), size, limit }
            }
            _ => BusError::unavailable(format!("{effect} was not written"), &error),
        };
        let written = effect::have(effect, async {
            self.inner.js.publish_with_headers(subject.clone(), headers, payload).await?.await
        });
        Ok(written.await.map_err(failed)?.sequence)
    }

    /// Publishes what is not stored.
    pub(crate) async fn send(
        &self,
        effect: Effect,
        subject: String,
        headers: HeaderMap,
        payload: Bytes,
    ) -> Result<(), String> {
        let client = self.client();
        effect::have(effect, async {
            client.publish_with_headers(subject, headers, payload).await.map_err(|e| e.to_string())?;
            // A crash right after it would otherwise be one before it.
            #[cfg(feature = "crash-points")]
            client.flush().await.map_err(|e| e.to_string())?;
            Ok(())
        })
        .await
    }

    /// Reads the last value of a key; `None` where there is none.
    pub(crate) async fn read<T: DeserializeOwned>(
        &self,
        bucket: &str,
        key: &str,
    ) -> Result<Option<(T, u64)>, BusError> {
        use async_nats::jetstream::stream::DirectGetErrorKind::NotFound;
        let stream = self.inner.js.get_stream_no_info(names::bucket_stream(bucket)).await;
        let stream = stream.map_err(|e| BusError::unavailable(format!("can't read {key}"), e))?;
        let subject = names::bucket_subject(bucket, key);
        self.check_size("the request", &subject, &[])?;
        let message = match stream.direct_get_last_for_subject(&subject).await {
            Ok(message) => message,
            Err(error) if error.kind() == NotFound => return Ok(None),
            Err(error) => return Err(BusError::unavailable(format!("can't read {key}"), error)),
        };
        if message.headers.get("KV-Operation").is_some() {
            return Ok(None);
        }
        Ok(Some((decode(&subject, &message.payload)?, message.sequence)))
    }

    /// Marks a key of a bucket as having no value any more.
    pub(crate) async fn clear_key(&self, effect: Effect, bucket: &str, key: &str) -> Result<(), BusError> {
        let mut headers = HeaderMap::new();
        headers.insert("KV-Operation", "DEL");
        let subject = names::bucket_subject(bucket, key);
        let cleared = effect::have(effect, async {
            self.inner.js.publish_with_headers(subject, headers, "".into()).await?.await
        });
        let failed = |e: String| BusError::unavailable(format!("{key} was not cleared in {bucket}"), e);
        cleared.await.map(drop).map_err(|e| failed(e.to_string()))
    }

    /// Sends a request to a service and reads its answer.
    pub(crate) async fn request<Q: Serialize, A: DeserializeOwned>(
        &self,
        service: &'static str,
        subject: String,
        request: &Q,
    ) -> Result<A, BusError> {
        let answer = self.request_raw(service, &subject, encode(request)).await?;
        decode(&subject, &answer)
    }

    /// The same without reading either.
    pub(crate) async fn request_raw(
        &self,
        service: &'static str,
        subject: &str,
        payload: Bytes,
    ) -> Result<Bytes, BusError> {
        self.check_size("the request", subject, &payload)?;
        let mut headers = HeaderMap::new();
        trace::inject(&mut headers);
        let answer =
            self.inner.client.request_with_headers(subject.to_owned(), headers, payload).await.map_err(
                |error| match error.kind() {
                    RequestErrorKind::NoResponders => BusError::NoResponders { service },
                    _ => BusError::unavailable(format!("no answer from {service}"), error),
                },
            )?;
        let refusal = answer.headers.as_ref().and_then(|h| h.get(async_nats::service::NATS_SERVICE_ERROR));
        match refusal {
            Some(why) => Err(BusError::Refused(why.to_string())),
            None => Ok(answer.payload),
        }
    }

    /// A new entry takes at most half of a message, so that there is room for its answer and the
    /// rest of its life.
    pub(crate) fn check_room<T: Serialize>(&self, what: &str, value: &T) -> Result<(), BusError> {
        let (size, limit) = (encode(value).len(), self.inner.client.server_info().max_payload / 2);
        match limit > 0 && size > limit {
            true => Err(BusError::TooLarge { what: what.into(), size, limit }),
            false => Ok(()),
        }
    }

    fn check_size(&self, what: &str, subject: &str, payload: &[u8]) -> Result<(), BusError> {
        if subject.len() > MAX_SUBJECT {
            let what = format!("the subject of {what}");
            return Err(BusError::TooLarge { what, size: subject.len(), limit: MAX_SUBJECT });
        }
        let limit = self.inner.client.server_info().max_payload;
        match limit > 0 && payload.len() > limit {
            true => Err(BusError::TooLarge { what: what.into(), size: payload.len(), limit }),
            false => Ok(()),
        }
    }
}

/// What a write expects.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Expect<'a> {
    Nothing,
    /// The key's last revision; 0 where it must not exist.
    Revision(u64),
    /// The same, and all older values of the key go out of reach with this write.
    RevisionAndRollUp(u64),
    /// Drops a repetition within the stream's window. Saves work and protects nothing.
    Once(&'a str),
}

pub(crate) fn encode<T: Serialize>(value: &T) -> Bytes {
    // Our own types have string keys and no failing serialisers.
    serde_json::to_vec(value).expect("payload types serialise").into()
}

pub(crate) fn decode<T: DeserializeOwned>(subject: &str, payload: &[u8]) -> Result<T, BusError> {
    serde_json::from_slice(payload)
        .map_err(|e| BusError::Unreadable { subject: subject.into(), reason: e.to_string() })
}
