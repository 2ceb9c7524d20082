//! What the routers send to a gateway, and its durable consumer.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use ask_core::wire::ChatItem;
use async_nats::jetstream::consumer::{PullConsumer, pull};
use async_nats::jetstream::{AckKind, Message};
use futures::StreamExt;

use crate::connection::{Bus, Expect, decode};
use crate::effect::{self, Effect, Mutant};
use crate::error::BusError;
use crate::{names, trace};

/// How often it is looked for what was delivered and has not arrived.
const LOOK_FOR_MISSING: Duration = Duration::from_millis(250);

impl Bus {
    /// Hands a message to the gateway's adapter. Repeating it is harmless: its run id is the key
    /// by which the adapter sends it once.
    ///
    /// # Errors
    /// When it can't be written.
    pub async fn write_chat(&self, item: &ChatItem) -> Result<u64, BusError> {
        self.write(Effect::Chat, names::chat(&item.session), item, Expect::Once(&item.run)).await
    }

    /// The gateway's items that are not acknowledged yet, and then the new ones.
    ///
    /// # Errors
    /// [`BusError::NotProvisioned`] for a gateway that was not provisioned.
    pub async fn chat_items(&self, gateway: &str) -> Result<ChatItems, BusError> {
        let stream = self.stream(names::CHAT).await?;
        let name = names::chat_consumer(gateway);
        let consumer: PullConsumer = stream
            .get_consumer(&name)
            .await
            .map_err(|_| BusError::NotProvisioned { what: format!("the consumer {name}") })?;
        let messages = consumer.messages().await.map_err(|e| BusError::unavailable("can't read CHAT", e))?;
        Ok(ChatItems {
            bus: self.clone(),
            consumer,
            messages,
            held: BTreeMap::new(),
            last: None,
            complete: false,
            in_hand: Arc::default(),
        })
    }
}

/// What goes to one gateway, in the order in which it was sent. An item that was delivered and did
/// not arrive comes again some seconds later; what came after it waits until then.
pub struct ChatItems {
    bus: Bus,
    consumer: PullConsumer,
    messages: pull::Stream,
    /// What has arrived, by its place in `CHAT`.
    held: BTreeMap<u64, Message>,
    /// The number of the last delivery: without a gap, nothing is missing.
    last: Option<u64>,
    complete: bool,
    in_hand: Arc<()>,
}

impl std::fmt::Debug for ChatItems {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ChatItems")
    }
}

/// An item that waits for its acknowledgement.
#[derive(Debug)]
pub struct ChatDelivery {
    /// The item.
    pub item: ChatItem,
    /// How often it has been delivered, this time included.
    pub attempt: i64,
    /// The trace that it continues.
    pub traceparent: Option<String>,
    message: Message,
    /// Counts what is in hand.
    _in_hand: Arc<()>,
}

impl ChatItems {
    /// The next item. `None` when the consumer broke: get it again.
    pub async fn next(&mut self) -> Option<ChatDelivery> {
        loop {
            let message = self.next_in_order().await?;
            match decode::<ChatItem>(&message.subject, &message.payload) {
                Ok(mut item) => {
                    let attempt = message.info().map_or(1, |i| i.delivered);
                    if Mutant::AckFirst.is_on() {
                        let _ = effect::have(Effect::ChatDone, message.double_ack()).await;
                    }
                    if Mutant::DoubleSend.is_on() && attempt > 1 {
                        item = ChatItem { run: format!("{}-{attempt}", item.run), ..item };
                    }
                    let traceparent = trace::traceparent_in(message.headers.as_ref());
                    let _in_hand = self.in_hand.clone();
                    return Some(ChatDelivery { item, attempt, traceparent, message, _in_hand });
                }
                Err(error) => {
                    // What could not be parked comes again.
                    if self.bus.park(&message.subject, &error.to_string(), &message.payload).await {
                        let _ = effect::have(Effect::ChatParked, message.ack_with(AckKind::Term)).await;
                    }
                }
            }
        }
    }

    async fn next_in_order(&mut self) -> Option<Message> {
        loop {
            if self.complete
                && let Some((_, message)) = self.held.pop_first()
            {
                return Some(message);
            }
            let waits = !self.held.is_empty();
            tokio::select! {
                message = self.messages.next() => match message? {
                    Ok(message) => {
                        let Ok(info) = message.info() else { continue };
                        let (place, number) = (info.stream_sequence, info.consumer_sequence);
                        self.complete &= self.last.is_some_and(|last| last + 1 == number);
                        self.last = Some(number);
                        self.held.insert(place, message);
                    }
                    Err(error) => {
                        tracing::warn!(%error, "CHAT can't be read");
                        return None;
                    }
                },
                () = tokio::time::sleep(LOOK_FOR_MISSING), if waits => {}
            }
            if !self.complete {
                self.complete = self.nothing_is_missing().await;
            }
        }
    }

    /// Whether all that was delivered and is not acknowledged is here.
    async fn nothing_is_missing(&mut self) -> bool {
        let here = self.held.len() + Arc::strong_count(&self.in_hand) - 1;
        match self.consumer.info().await {
            Ok(info) => info.num_ack_pending <= here,
            Err(error) => {
                tracing::warn!(%error, "it is not known yet whether a message is missing");
                false
            }
        }
    }
}

impl ChatDelivery {
    /// Its effect is done.
    ///
    /// # Errors
    /// When the server did not confirm; it will come again.
    pub async fn done(&self) -> Result<(), BusError> {
        if Mutant::AckFirst.is_on() {
            return Ok(());
        }
        effect::have(Effect::ChatDone, self.message.double_ack())
            .await
            .map_err(|e| BusError::unavailable("an item of CHAT was not acknowledged", e))
    }

    /// Its effect takes longer.
    pub async fn working(&self) {
        let _ = effect::have(Effect::ChatWorking, self.message.ack_with(AckKind::Progress)).await;
    }

    /// Its effect failed for now: bring it again after `delay`.
    pub async fn later(&self, delay: Duration) {
        let _ = effect::have(Effect::ChatLater, self.message.ack_with(AckKind::Nak(Some(delay)))).await;
    }
}
