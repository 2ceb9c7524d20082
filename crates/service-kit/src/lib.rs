#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

pub mod config;
pub mod health;
pub mod http;
mod log;
mod redacted;
mod run;
pub mod shutdown;
pub mod telemetry;

pub use config::{Config, ConfigError};
pub use health::Health;
pub use redacted::Redacted;
pub use run::{EXIT_CONFIG, EXIT_FAILURE, Frame, install_crypto, run_service};
pub use telemetry::Telemetry;

/// What the frame must know of a service; each service declares one as a constant.
///
/// ```
/// pub const SERVICE: service_kit::Service = service_kit::Service {
///     name: "ask-router",
///     section: "router",
///     version: env!("CARGO_PKG_VERSION"),
///     defaults: "[router]\n", // include_str!("../config.default.toml")
///     readiness: &["nats", "buckets"],
/// };
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Service {
    /// The `service.name` of its spans, metrics and log lines. Spans whose target is the crate of
    /// this name (`-` written `_`) are its own.
    pub name: &'static str,
    /// Its section of the config file, one of [`config::SECTIONS`].
    pub section: &'static str,
    /// Reported in spans, build info and `--version`.
    pub version: &'static str,
    /// Its documented default config file: every key of its own section.
    pub defaults: &'static str,
    /// The conditions that must all be met before `/readyz` says so.
    pub readiness: &'static [&'static str],
}

impl Service {
    /// The crate name as it appears in tracing targets.
    pub(crate) fn target(&self) -> String {
        self.name.replace('-', "_")
    }
}
