//! The section `[router]`: see `config.default.toml` for the meaning of each key.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Deserialize;
use service_kit::Service;

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
    /// Owner of the sessions that have none on record, by gateway.
    #[serde(default)]
    pub operators: BTreeMap<String, String>,
}

fn milliseconds<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
    u64::deserialize(from).map(Duration::from_millis)
}
