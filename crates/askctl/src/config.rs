//! The section `[askctl]`, and the way to the bus.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use ask_bus::{Bus, BusOptions};
use serde::Deserialize;
use service_kit::config::NatsConfig;
use service_kit::{Config, ConfigError, Service};

pub const SERVICE: Service = Service {
    name: "askctl",
    section: "askctl",
    version: env!("CARGO_PKG_VERSION"),
    defaults: include_str!("../config.default.toml"),
    readiness: &[],
};

/// The section `[askctl]`; `config.default.toml` explains each key.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AskctlConfig {
    pub gateways: Vec<String>,
    pub replicas: usize,
    pub keys_dir: Option<PathBuf>,
    pub monitor_url: String,
    pub jaeger_url: Option<String>,
}

impl AskctlConfig {
    pub fn keys_dir(&self) -> Result<PathBuf> {
        match &self.keys_dir {
            Some(folder) => Ok(folder.clone()),
            None => Ok(state_dir()?.join("keys")),
        }
    }
}

pub fn load(file: Option<&Path>, nats: Option<&str>) -> Result<Config<AskctlConfig>, ConfigError> {
    let mut config = service_kit::config::load::<AskctlConfig>(&SERVICE, file)?;
    if let Some(url) = nats {
        config.nats.url = url.to_owned();
    }
    if config.service.gateways.is_empty() || config.service.gateways.iter().any(String::is_empty) {
        return Err(ConfigError::key("askctl.gateways", "must be a list of at least one name"));
    }
    if ![1, 3, 5].contains(&config.service.replicas) {
        let problem = format!("must be 1, 3 or 5, got: {}", config.service.replicas);
        return Err(ConfigError::key("askctl.replicas", problem));
    }
    Ok(config)
}

/// Connects, or says within seconds that nobody is there.
pub async fn connect(nats: &NatsConfig) -> Result<Bus> {
    let options = bus_options(nats, SERVICE.name);
    let url = options.url.clone();
    let bus = Bus::connect(options).await?;
    if !bus.connected(Duration::from_secs(3)).await {
        bail!(
            "no nats-server takes this connection at {url}; start one with `askctl up`, or name the \
             right one with --nats or its config file with --config"
        );
    }
    Ok(bus)
}

pub fn bus_options(nats: &NatsConfig, name: &str) -> BusOptions {
    BusOptions {
        url: nats.url.clone(),
        name: nats.name.clone().unwrap_or_else(|| name.into()),
        nkey_seed: nats.nkey_seed.as_ref().map(|seed| seed.expose().to_owned()),
        inbox_prefix: None,
        ca_file: nats.tls_ca_file.clone(),
    }
}

/// Where askctl keeps what outlives it.
pub fn state_dir() -> Result<PathBuf> {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let state = set("XDG_STATE_HOME").or_else(|| Some(set("HOME")?.join(".local/state")));
    let state =
        state.context("neither XDG_STATE_HOME nor HOME is set: name a folder with --state or --dir")?;
    Ok(state.join("askbus/askctl"))
}
