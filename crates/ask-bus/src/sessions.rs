//! The sessions' entries.

use ask_core::key::SessionKey;
use ask_core::session::Session;

use crate::connection::{Bus, Expect};
use crate::effect::Effect;
use crate::error::BusError;
use crate::names::{self, SESSIONS};
use crate::questions::Stored;
use crate::watch::Watch;

impl Bus {
    /// The session's entry now.
    ///
    /// # Errors
    /// While the server can't be reached, or when the entry can't be read.
    pub async fn session(&self, key: &SessionKey) -> Result<Option<Stored<Session>>, BusError> {
        let read = self.read(SESSIONS, &key.to_string()).await?;
        Ok(read.map(|(value, revision)| Stored { value, revision }))
    }

    /// Binds a session, or records how a message was routed: this write is the decision (rule S1).
    /// `revision` is 0 for a session that must not exist yet. Only routers call it.
    ///
    /// # Errors
    /// [`BusError::Conflict`] decides nothing: read again.
    pub async fn write_session(&self, session: &Session, revision: u64) -> Result<u64, BusError> {
        let subject = names::bucket_subject(SESSIONS, &session.key.to_string());
        self.write(Effect::Session, subject, session, Expect::Revision(revision)).await
    }

    /// Follows all sessions.
    pub fn watch_sessions(&self) -> Watch<Session> {
        self.watch(SESSIONS, ">")
    }
}
