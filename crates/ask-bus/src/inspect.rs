//! What operators look at: the connection, the server, the services on it.

use std::time::Duration;

use ask_core::key::SessionKey;
use ask_core::wire::ChatItem;
use async_nats::jetstream::consumer::pull::{self, OrderedConfig};
use futures::StreamExt;
use serde::Deserialize;

use crate::connection::{Bus, decode};
use crate::error::BusError;
use crate::names;
use crate::watch::Passing;

/// The server that a connection goes to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Server {
    /// The id of its present process; empty before the first connection.
    pub id: String,
    /// Its version, like `2.12.0`.
    pub version: String,
}

/// One running instance of a NATS micro service.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct ServiceInstance {
    /// The service's name, e.g. `ask-router`.
    pub name: String,
    /// The instance's id.
    pub id: String,
    /// Its version.
    pub version: String,
}

impl Bus {
    /// Waits for the connection; false when there is none `within` this time.
    pub async fn connected(&self, within: Duration) -> bool {
        let mut connections = self.connections();
        let first = connections.wait_for(|count| *count > 0);
        self.is_connected() || tokio::time::timeout(within, first).await.is_ok_and(|ended| ended.is_ok())
    }

    /// The server that this connection goes to.
    pub fn server(&self) -> Server {
        let info = self.client().server_info();
        Server { id: info.server_id, version: info.version }
    }

    /// Checks that the consumer is there through which a gateway's adapter gets its messages.
    ///
    /// # Errors
    /// [`BusError::NotProvisioned`] when it is missing; others while the server can't be reached.
    pub async fn check_gateway(&self, gateway: &str) -> Result<(), BusError> {
        let stream = self.stream(names::CHAT).await?;
        let name = names::chat_consumer(gateway);
        stream
            .get_consumer::<pull::Config>(&name)
            .await
            .map(drop)
            .map_err(|_| BusError::NotProvisioned { what: format!("the consumer {name}") })
    }

    /// How many messages to a gateway have not been acknowledged by its adapter.
    ///
    /// # Errors
    /// [`BusError::NotProvisioned`] when its consumer is missing; others while the server can't be
    /// reached.
    pub async fn unsent(&self, gateway: &str) -> Result<u64, BusError> {
        let stream = self.stream(names::CHAT).await?;
        let name = names::chat_consumer(gateway);
        let consumer = stream
            .get_consumer::<pull::Config>(&name)
            .await
            .map_err(|_| BusError::NotProvisioned { what: format!("the consumer {name}") })?;
        let info = consumer.cached_info();
        Ok(info.num_pending + info.num_ack_pending as u64)
    }

    /// What the routers have sent to a session, in the order of `CHAT`, repetitions too.
    ///
    /// # Errors
    /// While the server can't be reached, or when an item can't be read.
    pub async fn chat_of(&self, session: &SessionKey) -> Result<Vec<ChatItem>, BusError> {
        let broken = |e: String| BusError::unavailable("can't read CHAT", e);
        let stream = self.stream(names::CHAT).await?;
        let config = OrderedConfig { filter_subject: names::chat(session), ..Default::default() };
        let consumer = stream.create_consumer(config).await.map_err(|e| broken(e.to_string()))?;
        let _passing = Passing::new(&stream, &consumer.cached_info().name);
        let mut left = consumer.cached_info().num_pending;
        let mut messages = consumer.messages().await.map_err(|e| broken(e.to_string()))?;
        let mut items = Vec::new();
        while left > 0 {
            let message = messages.next().await.ok_or_else(|| broken("it ended early".into()))?;
            let message = message.map_err(|e| broken(e.to_string()))?;
            left = message.info().map_err(|e| broken(e.to_string()))?.pending;
            items.push(decode(&message.subject, &message.payload)?);
        }
        Ok(items)
    }

    /// How many messages are parked in `DEAD` because they could not be read.
    ///
    /// # Errors
    /// [`BusError::NotProvisioned`] when the stream is missing; others while the server can't be reached.
    pub async fn parked(&self) -> Result<u64, BusError> {
        Ok(self.stream(names::DEAD).await?.cached_info().state.messages)
    }

    /// The micro services that answer a ping `within` this time.
    ///
    /// # Errors
    /// While the server can't be reached.
    pub async fn services(&self, within: Duration) -> Result<Vec<ServiceInstance>, BusError> {
        let failed = |e: String| BusError::unavailable("the services were not asked", e);
        let inbox = self.client().new_inbox();
        let mut answers = self.client().subscribe(inbox.clone()).await.map_err(|e| failed(e.to_string()))?;
        let sent = self.client().publish_with_reply("$SRV.PING", inbox, "".into()).await;
        sent.map_err(|e| failed(e.to_string()))?;
        let mut found = Vec::new();
        let collect = async {
            while let Some(answer) = answers.next().await {
                // Without any service the server itself answers at once.
                if answer.status == Some(async_nats::StatusCode::NO_RESPONDERS) {
                    return;
                }
                if let Ok(instance) = decode(&answer.subject, &answer.payload) {
                    found.push(instance);
                }
            }
        };
        // How many there are is not known, so that all the time is waited.
        let _ = tokio::time::timeout(within, collect).await;
        Ok(found)
    }
}
