//! Points in time as they are written to the record.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Milliseconds since 1970-01-01 UTC.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, Default)]
#[serde(transparent)]
pub struct Timestamp(pub u64);

impl Timestamp {
    /// The wall clock of this machine. Callers at the edge read it once and pass it in.
    pub fn now() -> Self {
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        Self(since.map_or(0, |d| d.as_millis() as u64))
    }

    /// This time and `by` later.
    pub fn plus(self, by: Duration) -> Self {
        Self(self.0.saturating_add(by.as_millis() as u64))
    }

    /// This time and `by` earlier, never before 1970.
    pub fn minus(self, by: Duration) -> Self {
        Self(self.0.saturating_sub(by.as_millis() as u64))
    }

    /// How long from `earlier` to this time; zero when `earlier` is later.
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_millis(self.0.saturating_sub(earlier.0))
    }
}
