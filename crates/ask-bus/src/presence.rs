//! Who is there. A presence that is not refreshed is gone after some seconds of the reader's own
//! clock; the bucket's age limit only tidies up.

use ask_core::key::SessionKey;
use ask_core::wire::Presence;

use crate::connection::{Bus, Expect};
use crate::effect::Effect;
use crate::error::BusError;
use crate::names::{self, PRESENCE};
use crate::watch::{Change, Watch};

/// A change of who is there.
pub type PresenceChange = Change<Presence>;

impl Bus {
    /// Says who is there for a session on the stream `stream`; repeated every few seconds.
    ///
    /// # Errors
    /// When it can't be written.
    pub async fn write_presence(
        &self,
        session: &SessionKey,
        stream: &str,
        presence: &Presence,
    ) -> Result<(), BusError> {
        let subject = names::bucket_subject(PRESENCE, &presence_key(session, stream));
        self.write(Effect::Presence, subject, presence, Expect::Nothing).await.map(drop)
    }

    /// Says that the stream `stream` of a session has ended.
    ///
    /// # Errors
    /// When it can't be written.
    pub async fn clear_presence(&self, session: &SessionKey, stream: &str) -> Result<(), BusError> {
        self.clear_key(Effect::PresenceClear, PRESENCE, &presence_key(session, stream)).await
    }

    /// The revision of the last change of who is there, as the server has it now.
    ///
    /// # Errors
    /// When it can't be read.
    pub async fn last_presence(&self) -> Result<u64, BusError> {
        let stream = self.stream(&names::bucket_stream(PRESENCE)).await?;
        Ok(stream.cached_info().state.last_sequence)
    }

    /// Follows who is there, keyed `<gateway>.<session>.<stream>`.
    pub fn watch_presence(&self) -> Watch<Presence> {
        self.watch(PRESENCE, ">")
    }
}

fn presence_key(session: &SessionKey, stream: &str) -> String {
    format!("{session}.{}", ask_core::key::encode_token(stream))
}
