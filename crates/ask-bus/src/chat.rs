//! What the routers send to a gateway, and its durable consumer.

use ask_core::wire::ChatItem;
use async_nats::jetstream::consumer::{PullConsumer, pull};
use async_nats::jetstream::{AckKind, Message};
use futures::StreamExt;

use crate::connection::{Bus, Expect, decode};
use crate::effect::{self, Effect, Mutant};
use crate::error::BusError;
use crate::{names, trace};

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
        Ok(ChatItems { bus: self.clone(), messages })
    }
}

/// What goes to one gateway.
pub struct ChatItems {
    bus: Bus,
    messages: pull::Stream,
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
}

impl ChatItems {
    /// The next item. `None` when the consumer broke: get it again.
    pub async fn next(&mut self) -> Option<ChatDelivery> {
        loop {
            let message = match self.messages.next().await? {
                Ok(message) => message,
                Err(error) => {
                    tracing::warn!(%error, "CHAT can't be read");
                    return None;
                }
            };
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
                    return Some(ChatDelivery { item, attempt, traceparent, message });
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
    pub async fn later(&self, delay: std::time::Duration) {
        let _ = effect::have(Effect::ChatLater, self.message.ack_with(AckKind::Nak(Some(delay)))).await;
    }
}
