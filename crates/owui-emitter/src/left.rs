//! A front end cancelled its call: Stop, unless a new message comes at once.

use std::sync::Arc;

use ask_core::SCHEMA;
use ask_core::key::SessionKey;
use ask_core::wire::{StopRequest, StopResponse};
use tracing::Instrument;

use crate::hub::Event;
use crate::{Emitter, delays};

/// How often Stop is repeated while no router answers.
const MAX_ATTEMPTS: usize = 300;

impl Emitter {
    /// Waits for the grace, then stops the session unless a new message has taken over.
    pub(crate) async fn left(self: Arc<Self>, session: SessionKey, message: String, user: String) {
        let before = self.messages_of(&session).await;
        tokio::time::sleep(self.config.stop_grace).await;
        if self.went_on(&session, &message, before.as_ref()).await {
            tracing::info!(%session, "a cancelled call was followed by a new message: no stop");
            return;
        }
        self.hub.forget_left(&session, &message);
        let request = StopRequest { schema: SCHEMA, session: session.clone(), user };
        let mut delay = delays();
        for _ in 0..MAX_ATTEMPTS {
            let span = tracing::info_span!(
                "send stop",
                otel.kind = "producer",
                messaging.system = "nats",
                messaging.operation.name = "request",
                messaging.operation.type = "send",
            );
            match self.bus.stop(&request).instrument(span).await {
                Ok(StopResponse::Stopped { cancelled, aborted }) => {
                    tracing::info!(%session, cancelled, aborted, "stopped");
                    self.hub.tell(&session, Event::Stopped);
                    return;
                }
                Ok(StopResponse::WrongUser) => {
                    tracing::warn!(%session, "stop refused: its sender does not own the session");
                    return;
                }
                Ok(StopResponse::Retry { why }) => tracing::warn!(%session, why, "not stopped yet"),
                Err(error) => tracing::warn!(%session, %error, "not stopped yet"),
            }
            tokio::select! {
                () = delay.wait() => {}
                () = self.shutdown.cancelled() => break,
            }
            if self.went_on(&session, &message, before.as_ref()).await {
                tracing::info!(%session, "a new message came before the stop: no stop");
                return;
            }
        }
        tracing::error!(%session, "not stopped: no router has answered in time");
    }

    /// Whether another message of the session has come since this one was cancelled.
    async fn went_on(
        &self,
        session: &SessionKey,
        message: &str,
        before: Option<&(u64, Vec<String>)>,
    ) -> bool {
        if self.hub.newest(session).is_some_and(|newest| newest != message) {
            return true;
        }
        // Another replica may have it.
        let Some((count, messages)) = self.messages_of(session).await else { return false };
        match messages.iter().position(|m| m == message) {
            Some(at) => at + 1 < messages.len(),
            None => before.is_some_and(|(before, _)| count > *before),
        }
    }

    /// How many messages a session has had, and its last ones.
    async fn messages_of(&self, session: &SessionKey) -> Option<(u64, Vec<String>)> {
        match self.bus.session(session).await {
            Ok(Some(stored)) => {
                let messages = stored.value.messages.into_iter().map(|m| m.id).collect();
                Some((stored.value.count, messages))
            }
            Ok(None) => None,
            Err(error) => {
                tracing::warn!(%session, %error, "its messages can't be read");
                None
            }
        }
    }
}
