//! A front end cancelled its call: Stop, unless a new message comes at once.

use ask_bus::BusError;
use ask_core::SCHEMA;
use ask_core::key::SessionKey;
use ask_core::wire::{StopRequest, StopResponse};
use tracing::Instrument;

use crate::Emitter;
use crate::hub::Event;

impl Emitter {
    /// Waits for the grace, then stops the session unless a new message has taken over. `seen` is
    /// how many messages the session had had before this one, where the front end knows.
    ///
    /// # Errors
    /// When it is not known to be stopped: the front end repeats it.
    pub(crate) async fn left(
        &self,
        session: &SessionKey,
        message: &str,
        user: String,
        seen: Option<u64>,
    ) -> Result<(), BusError> {
        let before = match seen {
            Some(seen) => Some(seen),
            None => self.bus.session(session).await?.map(|stored| stored.value.count),
        };
        tokio::select! {
            () = tokio::time::sleep(self.config.stop_grace) => {}
            () = self.shutdown.cancelled() => return Err(not_stopped("this emitter ends")),
        }
        if self.went_on(session, message, before).await? {
            tracing::info!(%session, "a cancelled call was followed by a new message: no stop");
            return Ok(());
        }
        self.hub.forget_left(session, message);
        let span = tracing::info_span!(
            "send stop",
            otel.kind = "producer",
            messaging.system = "nats",
            messaging.operation.name = "request",
            messaging.operation.type = "send",
        );
        let request = StopRequest { schema: SCHEMA, session: session.clone(), user };
        match self.bus.stop(&request).instrument(span).await? {
            StopResponse::Stopped { cancelled, aborted } => {
                tracing::info!(%session, cancelled, aborted, "stopped");
                self.hub.tell(session, Event::Stopped);
                Ok(())
            }
            StopResponse::WrongUser => {
                tracing::warn!(%session, "stop refused: its sender does not own the session");
                Ok(())
            }
            StopResponse::Retry { why } => Err(not_stopped(&why)),
        }
    }

    /// Whether another message of the session has come since this one was cancelled.
    async fn went_on(
        &self,
        session: &SessionKey,
        message: &str,
        before: Option<u64>,
    ) -> Result<bool, BusError> {
        if self.hub.newest(session).is_some_and(|newest| newest != message) {
            return Ok(true);
        }
        // Another replica may have it.
        let stored = self.bus.session(session).await?;
        Ok(stored.is_some_and(|stored| stored.value.went_on(message, before)))
    }
}

fn not_stopped(why: &str) -> BusError {
    BusError::Unavailable { what: "the session was not stopped".into(), reason: why.into() }
}
