//! The section `[adapter]`; `config.default.toml` explains each key.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Deserializer, de};
use service_kit::Redacted;

use crate::calls::MAX_TIMEOUT;

/// The section `[adapter]`.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AdapterConfig {
    /// The private half of the gateway's seal key, as `askctl provision` wrote it.
    pub seal_key: Option<Redacted>,
    /// `[adapter.gateway]`
    pub gateway: GatewayConfig,
    /// `[adapter.http]`
    pub http: HttpConfig,
    /// `[adapter.questions]`
    pub questions: QuestionsConfig,
}

/// Which gateway, and as whom.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GatewayConfig {
    /// Its name on the bus.
    pub name: String,
    /// Its address.
    pub url: String,
    /// Its shared token.
    pub token: Option<Redacted>,
    /// File of the device identity.
    pub identity_file: PathBuf,
    /// Scopes beyond those that are always needed.
    pub extra_scopes: Vec<String>,
}

/// The endpoint for the plugin and for MCP clients.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HttpConfig {
    /// Address and port; port 0 takes a free one.
    pub listen: SocketAddr,
    /// The bearer token that clients must send.
    pub token: Redacted,
    /// Web origins whose pages may speak MCP, beside those of this machine.
    pub origins: Vec<String>,
}

/// How long questions wait.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QuestionsConfig {
    /// Seconds that a call waits where it names no time, from one to a day.
    #[serde(deserialize_with = "timeout")]
    pub timeout_s: u64,
    /// Milliseconds before the Gateway's expiry of its own questions, up to a minute.
    #[serde(deserialize_with = "margin")]
    pub native_margin_ms: u64,
}

impl QuestionsConfig {
    /// How long a call waits where it names no time.
    pub fn timeout(&self) -> Duration {
        Duration::from_secs(self.timeout_s)
    }

    /// How long before the Gateway's own expiry a native question ends here.
    pub fn native_margin(&self) -> Duration {
        Duration::from_millis(self.native_margin_ms)
    }
}

const MAX_MARGIN_MS: u64 = 60_000;

fn timeout<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    match u64::deserialize(deserializer)? {
        seconds if (1..=MAX_TIMEOUT.as_secs()).contains(&seconds) => Ok(seconds),
        _ => Err(de::Error::custom(format!("expected seconds from 1 to {}", MAX_TIMEOUT.as_secs()))),
    }
}

fn margin<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    match u64::deserialize(deserializer)? {
        milliseconds if milliseconds <= MAX_MARGIN_MS => Ok(milliseconds),
        _ => Err(de::Error::custom(format!("expected milliseconds from 0 to {MAX_MARGIN_MS}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_that_no_question_can_wait_is_refused_at_start_with_field_value_and_limit() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("askbus.toml");
        let load = |questions: &str| {
            let text = format!("[adapter.http]\ntoken = \"t\"\n[adapter.questions]\n{questions}\n");
            std::fs::write(&file, text).unwrap();
            let none = std::iter::empty::<(String, String)>();
            service_kit::config::load_from::<AdapterConfig>(&crate::SERVICE, Some(&file), none)
                .map(|config| config.service.questions.timeout_s)
                .map_err(|error| error.to_string())
        };
        for (questions, key, value, limit) in [
            ("timeout_s = 0", "adapter.questions.timeout_s", "`0`", "seconds from 1 to 86400"),
            ("timeout_s = 86401", "adapter.questions.timeout_s", "`86401`", "seconds from 1 to 86400"),
            (
                "native_margin_ms = 60001",
                "adapter.questions.native_margin_ms",
                "`60001`",
                "milliseconds from 0 to 60000",
            ),
        ] {
            let refused = load(questions).unwrap_err();
            assert!([key, value, limit].iter().all(|part| refused.contains(part)), "{refused}");
        }
        assert_eq!(load("timeout_s = 1"), Ok(1));
        assert_eq!(load("timeout_s = 86400"), Ok(86400));
    }
}
