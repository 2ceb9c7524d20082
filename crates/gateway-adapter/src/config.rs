//! The section `[adapter]`; `config.default.toml` explains each key.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use serde::Deserialize;
use service_kit::Redacted;

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
}

/// How long questions wait.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QuestionsConfig {
    /// Seconds that a call waits where it names no time.
    pub timeout_s: u64,
    /// Milliseconds before the Gateway's expiry of its own questions.
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
