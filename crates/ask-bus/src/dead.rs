//! `DEAD`: what could not be read, and giving it to its reader again (rule R4).

use ask_core::time::Timestamp;
use async_nats::jetstream::stream::LastRawMessageErrorKind;
use bytes::Bytes;
use futures::StreamExt;
use tokio::task::JoinHandle;

use crate::connection::Bus;
use crate::effect::{self, Effect};
use crate::error::BusError;
use crate::names;

const SUBJECT: &str = "Askbus-Subject";
const REASON: &str = "Askbus-Reason";

/// A message that could not be read.
#[derive(Debug, Clone)]
pub struct DeadLetter {
    /// Its number in `DEAD`.
    pub number: u64,
    /// When it was parked.
    pub at: Timestamp,
    /// Where it had been.
    pub subject: String,
    /// Why it could not be read.
    pub reason: String,
    /// What it holds.
    pub payload: Bytes,
}

/// What became of a dead letter that was sent again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SentAgain {
    /// A service has answered this.
    Answered(String),
    /// It is in its stream again.
    Written,
}

impl Bus {
    /// Parks what could not be read, so that it is neither lost nor in the way. False when even
    /// that failed.
    pub(crate) async fn park(&self, subject: &str, reason: &str, payload: &Bytes) -> bool {
        self.park_with(async_nats::HeaderMap::new(), subject, reason, payload).await
    }

    /// [`Bus::park`] beside its caller, who may be dropped at any moment while it waits for a message.
    pub(crate) fn park_aside(&self, message: &async_nats::Message, reason: String) -> JoinHandle<bool> {
        let (bus, subject, payload) = (self.clone(), message.subject.clone(), message.payload.clone());
        tokio::spawn(async move { bus.park(&subject, &reason, &payload).await })
    }

    /// Parks a value of a bucket, which every reader meets again at each start: once for those that
    /// start together.
    pub(crate) async fn park_value(&self, subject: &str, revision: u64, reason: &str, payload: &Bytes) {
        let mut headers = async_nats::HeaderMap::new();
        headers.insert("Nats-Msg-Id", format!("{subject} {revision}").as_str());
        self.park_with(headers, subject, reason, payload).await;
    }

    async fn park_with(
        &self,
        mut headers: async_nats::HeaderMap,
        subject: &str,
        reason: &str,
        payload: &Bytes,
    ) -> bool {
        tracing::error!(subject, reason, "unreadable; parked in DEAD");
        headers.insert(SUBJECT, subject);
        headers.insert(REASON, reason.replace(['\r', '\n'], " ").as_str());
        let to = format!("dead.{}", subject.trim_start_matches('$'));
        let parked = effect::have(Effect::Dead, async {
            self.jetstream().publish_with_headers(to, headers, payload.clone()).await?.await
        });
        let parked = parked.await;
        if let Err(error) = &parked {
            tracing::error!(subject, %error, "could not be parked in DEAD");
        }
        parked.is_ok()
    }

    /// All dead letters, oldest first.
    ///
    /// # Errors
    /// [`BusError::NotProvisioned`] when the stream is missing; others while the server can't be reached.
    pub async fn dead_letters(&self) -> Result<Vec<DeadLetter>, BusError> {
        let stream = self.stream(names::DEAD).await?;
        let state = &stream.cached_info().state;
        // A stream that never had anything says 0, and there is no letter with that number.
        let numbers = state.first_sequence.max(1)..=state.last_sequence;
        let read = futures::stream::iter(numbers).map(|number| self.dead_letter(number)).buffered(32);
        let letters: Vec<_> = read.collect().await;
        let letters: Result<Vec<_>, _> = letters.into_iter().collect();
        Ok(letters?.into_iter().flatten().collect())
    }

    /// The dead letter with this number; `None` where there is none any more.
    ///
    /// # Errors
    /// As [`Bus::dead_letters`].
    pub async fn dead_letter(&self, number: u64) -> Result<Option<DeadLetter>, BusError> {
        let stream = self.stream(names::DEAD).await?;
        let message = match stream.get_raw_message(number).await {
            Ok(message) => message,
            Err(error) if error.kind() == LastRawMessageErrorKind::NoMessageFound => return Ok(None),
            Err(error) => return Err(BusError::unavailable("DEAD was not read", error)),
        };
        let header = |name: &str| message.headers.get(name).map(ToString::to_string).unwrap_or_default();
        let at = Timestamp((message.time.unix_timestamp_nanos() / 1_000_000) as u64);
        let (subject, reason) = (header(SUBJECT), header(REASON));
        Ok(Some(DeadLetter { number, at, subject, reason, payload: message.payload }))
    }

    /// Gives a dead letter to its reader again. Repeating that is harmless: a reply, a message and
    /// an item of `CHAT` carry the ids by which their repetition is known.
    ///
    /// # Errors
    /// [`BusError::Refused`] by the service, or for what has no reader to give it to; the letter
    /// then stays.
    pub async fn send_again(&self, letter: &DeadLetter) -> Result<SentAgain, BusError> {
        let kind = letter.subject.split('.').next().unwrap_or_default();
        let sent = match kind {
            "stop" => {
                let why = "it would stop what runs now; a Stop belongs to the moment in which it is pressed";
                return Err(BusError::Refused(why.into()));
            }
            "reply" | "outcome" | "say" | "shown" => {
                let answer = self.request_raw(names::ROUTER, &letter.subject, letter.payload.clone()).await?;
                SentAgain::Answered(String::from_utf8_lossy(&answer).into_owned())
            }
            "chat" => {
                let written = effect::have(Effect::Chat, async {
                    self.jetstream().publish(letter.subject.clone(), letter.payload.clone()).await?.await
                });
                written.await.map_err(|e| BusError::unavailable("CHAT was not written", e))?;
                SentAgain::Written
            }
            "$KV" => {
                let why = "its value is still in the bucket, and every start of a service reads it again";
                return Err(BusError::Refused(why.into()));
            }
            _ => return Err(BusError::Refused(format!("nobody takes {kind} a second time"))),
        };
        self.drop_dead_letter(letter.number).await?;
        Ok(sent)
    }

    /// Drops a dead letter for good; false where there is none.
    ///
    /// # Errors
    /// As [`Bus::dead_letters`].
    pub async fn drop_dead_letter(&self, number: u64) -> Result<bool, BusError> {
        if self.dead_letter(number).await?.is_none() {
            return Ok(false);
        }
        let stream = self.stream(names::DEAD).await?;
        let dropped = effect::have(Effect::DeadDropped, stream.delete_message(number)).await;
        dropped.map_err(|e| BusError::unavailable("the dead letter was not dropped", e))
    }
}
