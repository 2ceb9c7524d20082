//! What can go wrong on the bus.

use ask_core::key::BadKey;

/// What went wrong on the bus, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum BusError {
    /// The connection could not be set up.
    #[error("can't use nats at {url}: {reason}; check [nats] url and credentials")]
    Connect {
        /// The configured address.
        url: String,
        /// What the client said.
        reason: String,
    },
    /// A stream or bucket is missing. Services never create one: an empty one would look like
    /// lost data.
    #[error("{what} is missing on the nats server; run `askctl provision`")]
    NotProvisioned {
        /// Which.
        what: String,
    },
    /// Somebody else wrote first. Nothing was decided: read again.
    #[error("the entry {key} has changed meanwhile")]
    Conflict {
        /// Which.
        key: String,
    },
    /// No service serves this request now.
    #[error("no {service} answers; is one running?")]
    NoResponders {
        /// Which.
        service: &'static str,
    },
    /// The request was refused as unreadable.
    #[error("the request was refused: {0}")]
    Refused(String),
    /// A payload could not be read.
    #[error("unreadable payload on {subject}: {reason}")]
    Unreadable {
        /// Where it was.
        subject: String,
        /// Why.
        reason: String,
    },
    /// Too large for the server: its `max_payload`, or what it takes as a subject.
    #[error("{what} has {size} bytes, and the nats server takes {limit}")]
    TooLarge {
        /// What.
        what: String,
        /// Its size in bytes.
        size: usize,
        /// The server's limit in bytes.
        limit: usize,
    },
    /// The server did not answer in time or the connection is down. A write may have happened.
    #[error("{what}: {reason}")]
    Unavailable {
        /// What was tried.
        what: String,
        /// What the client said.
        reason: String,
    },
}

impl BusError {
    pub(crate) fn unavailable(what: impl Into<String>, reason: impl ToString) -> Self {
        Self::Unavailable { what: what.into(), reason: reason.to_string() }
    }
}

impl From<BadKey> for BusError {
    fn from(bad: BadKey) -> Self {
        Self::Unreadable { subject: "key".into(), reason: bad.to_string() }
    }
}
