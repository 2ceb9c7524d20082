//! The section `[router]`: see `config.default.toml` for the meaning of each key.

use std::collections::BTreeMap;
use std::time::Duration;

use ask_core::limits::Limits;
use serde::Deserialize;
use service_kit::Service;
use service_kit::config::word;

/// How this service presents itself.
pub const SERVICE: Service = Service {
    name: "ask-router",
    section: "router",
    version: env!("CARGO_PKG_VERSION"),
    defaults: include_str!("../config.default.toml"),
    readiness: &["nats", "buckets", "questions"],
};

/// The configuration of a router.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RouterConfig {
    /// Time for a front end to report delivery.
    #[serde(rename = "delivery_within_ms", deserialize_with = "milliseconds")]
    pub delivery_within: Duration,
    /// How long a presence counts without a refresh.
    #[serde(rename = "presence_for_ms", deserialize_with = "milliseconds")]
    pub presence_for: Duration,
    /// Up to how much replicas expire apart.
    #[serde(rename = "stagger_ms", deserialize_with = "milliseconds")]
    pub stagger: Duration,
    /// What becomes of an answer that comes after the decision.
    #[serde(deserialize_with = "word")]
    pub late_replies: LatePolicy,
    /// How many questions may wait at once.
    pub limits: Limits,
    /// Owner of the sessions that have none on record, by gateway.
    #[serde(default)]
    pub operators: BTreeMap<String, String>,
}

impl RouterConfig {
    /// What the default file says.
    ///
    /// # Panics
    /// Never: a test reads that file.
    pub fn defaults() -> Self {
        let config = service_kit::config::load_from(&SERVICE, None, []);
        config.expect("the built-in defaults can be read").service
    }
}

/// What becomes of an answer that comes after the decision; its sender is told who won either way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LatePolicy {
    /// It is listed in the entry, without its content.
    Reject,
    /// It goes to the agent as a message too, unless it is secret.
    SendAsMessage,
}

fn milliseconds<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
    u64::deserialize(from).map(Duration::from_millis)
}
