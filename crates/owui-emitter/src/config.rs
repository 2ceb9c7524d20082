//! The section `[emitter]`: see `config.default.toml` for the meaning of each key.

use std::net::SocketAddr;
use std::time::Duration;

use serde::Deserialize;
use service_kit::{Redacted, Service};

/// How this service presents itself.
pub const SERVICE: Service = Service {
    name: "owui-emitter",
    section: "emitter",
    version: env!("CARGO_PKG_VERSION"),
    defaults: include_str!("../config.default.toml"),
    readiness: &["nats", "buckets", "feeds"],
};

/// The configuration of an emitter.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EmitterConfig {
    /// Where front ends reach it.
    pub http: HttpConfig,
    /// The gateway that is meant where a request names none.
    pub gateway: String,
    /// How soon after a cancelled call a new message makes it no Stop.
    #[serde(rename = "stop_grace_ms", deserialize_with = "milliseconds")]
    pub stop_grace: Duration,
    /// How often an open stream says that it is alive.
    #[serde(rename = "ping_ms", deserialize_with = "interval")]
    pub ping: Duration,
    /// How often an open stream says who is there.
    #[serde(rename = "presence_ms", deserialize_with = "interval")]
    pub presence: Duration,
}

/// The endpoint for front ends.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HttpConfig {
    /// Address and port; port 0 takes a free one.
    pub listen: SocketAddr,
    /// The bearer token of front ends.
    pub token: Redacted,
}

fn milliseconds<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
    u64::deserialize(from).map(Duration::from_millis)
}

fn interval<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
    match u64::deserialize(from)? {
        0 => Err(serde::de::Error::custom("must be at least 1 millisecond")),
        ms => Ok(Duration::from_millis(ms)),
    }
}
