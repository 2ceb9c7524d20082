//! Who is there for a session: one entry per open stream, refreshed while it is open.

use std::collections::BTreeSet;
use std::sync::Arc;

use ask_bus::BusError;
use ask_core::SCHEMA;
use ask_core::key::SessionKey;
use ask_core::surface::Surface;
use ask_core::wire::Presence;
use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior, interval_at};

use crate::Emitter;
use crate::hub::Looking;

impl Emitter {
    /// Says once who is there. `stream` is the message's id.
    pub(crate) async fn write_presence(
        &self,
        session: &SessionKey,
        stream: &str,
        surfaces: &BTreeSet<Surface>,
        looking: Looking,
    ) -> Result<(), BusError> {
        let Looking { looking, other_chat } = looking;
        let (emitter, surfaces) = (self.id.clone(), surfaces.clone());
        let presence = Presence { schema: SCHEMA, emitter, surfaces, looking, other_chat };
        self.bus.write_presence(session, stream, &presence).await
    }

    /// Repeats who is there after the first time, on each change and every few seconds, until it
    /// is dropped.
    pub(crate) async fn keep_presence(
        self: Arc<Self>,
        session: SessionKey,
        stream: String,
        surfaces: BTreeSet<Surface>,
        mut looking: watch::Receiver<Looking>,
    ) {
        let mut heartbeat = interval_at(Instant::now() + self.config.presence, self.config.presence);
        heartbeat.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = heartbeat.tick() => {}
                changed = looking.changed() => if changed.is_err() {
                    return std::future::pending().await;
                },
            }
            let now = *looking.borrow_and_update();
            if let Err(error) = self.write_presence(&session, &stream, &surfaces, now).await {
                tracing::debug!(%session, %error, "presence was not written; the next heartbeat says it");
            }
        }
    }
}
