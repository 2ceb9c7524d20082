//! Configuration: compiled-in documented defaults, then one file, then the environment.
//!
//! One file may serve all services. `[nats]`, `[telemetry]` and `[health]` hold for each of them;
//! a service adds its own section, say `[router]`, in which `[router.nats]`, `[router.telemetry]`
//! and `[router.health]` overrule the common ones for that service alone. Sections of other
//! services are not looked at; a section that nobody has, or a key that the service does not know,
//! is refused.
//!
//! An environment variable is the path of the key: `ASKBUS__ROUTER__HEALTH__LISTEN` is
//! `router.health.listen`. An empty variable counts as not set.

use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use ::config::{FileFormat, Map, Source, Value, ValueKind};
use serde::de::{self, IntoDeserializer};
use serde::{Deserialize, Deserializer, Serialize, de::DeserializeOwned};
use serde_path_to_error::{Path as KeyPath, Segment};

use crate::{Redacted, Service};

/// The sections that hold for every service.
const COMMON: [&str; 3] = ["nats", "telemetry", "health"];

/// All sections that a config file may have.
pub const SECTIONS: [&str; 7] = ["nats", "telemetry", "health", "router", "adapter", "emitter", "askctl"];

/// The documented defaults of the common sections.
pub const COMMON_DEFAULTS: &str = include_str!("../config.default.toml");

const ENV_PREFIX: &str = "ASKBUS__";
const ENV_SEPARATOR: &str = "__";

/// The common sections and the service's own.
#[derive(Debug, Clone, Serialize)]
pub struct Config<S> {
    /// `[nats]`
    pub nats: NatsConfig,
    /// `[telemetry]`
    pub telemetry: TelemetryConfig,
    /// `[health]`
    pub health: HealthConfig,
    /// The section named by [`Service::section`].
    pub service: S,
}

/// How to reach NATS.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NatsConfig {
    /// One or more server addresses, separated by commas; see [`NatsConfig::urls`].
    #[serde(deserialize_with = "nats_url")]
    pub url: String,
    /// Connection name at the server; the service's name if not set.
    pub name: Option<String>,
    /// The seed of the service's nkey.
    pub nkey_seed: Option<Redacted>,
    /// PEM file of the authority that signed the server's certificate; TLS is required when set.
    pub tls_ca_file: Option<PathBuf>,
}

impl NatsConfig {
    /// The server addresses, one by one.
    pub fn urls(&self) -> impl Iterator<Item = &str> {
        self.url.split(',').map(str::trim)
    }
}

/// Logs and traces.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TelemetryConfig {
    /// Where spans go by OTLP/gRPC; nowhere if not set.
    #[serde(default, deserialize_with = "otlp_endpoint")]
    pub otlp_endpoint: Option<String>,
    /// How a log line is written.
    #[serde(deserialize_with = "word")]
    pub log_format: LogFormat,
    /// Which events are logged, in the syntax of `RUST_LOG`. Spans are exported whatever it says.
    #[serde(deserialize_with = "log_filter")]
    pub log_filter: String,
    /// The `service.namespace` of all spans.
    pub service_namespace: String,
    /// The share of traces that is recorded, 0.0 to 1.0; a caller's decision is followed.
    #[serde(deserialize_with = "ratio")]
    pub sample_ratio: f64,
}

/// How a log line is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

/// The endpoint for probes and Prometheus.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HealthConfig {
    /// Address and port; port 0 takes a free one.
    pub listen: SocketAddr,
}

/// Why a configuration was refused. The message names the key, where its value came from, the
/// value unless it may be a secret, and what is allowed.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file could not be read.
    #[error("cannot read the config file {path}: {error}")]
    Read {
        /// The file.
        path: String,
        /// What the system said.
        error: std::io::Error,
    },
    /// The file is no valid TOML.
    #[error("{origin} is not valid TOML: {problem}")]
    Syntax {
        /// The file.
        origin: String,
        /// Line, column and what is wrong there.
        problem: String,
    },
    /// A key is unknown or missing, or its value is not allowed.
    #[error("{key}{origin}: {problem}")]
    Key {
        /// The path of the key, like `telemetry.log_format`.
        key: String,
        /// Where its value came from.
        origin: Origin,
        /// What is wrong and what is allowed.
        problem: String,
    },
}

impl ConfigError {
    /// For checks that a service makes over several keys.
    pub fn key(key: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Key { key: key.into(), origin: Origin::default(), problem: problem.into() }
    }
}

/// Where a value came from; empty when it is in no file and no variable.
#[derive(Debug, Default)]
pub struct Origin(Option<String>);

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Some(origin) => write!(f, " (from {origin})"),
            None => Ok(()),
        }
    }
}

/// Loads the configuration of `service` from its defaults, `file` and the process environment.
pub fn load<S: DeserializeOwned>(service: &Service, file: Option<&Path>) -> Result<Config<S>, ConfigError> {
    let env = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
    load_from(service, file, env)
}

/// Like [`load`], with the environment given.
pub fn load_from<S: DeserializeOwned>(
    service: &Service,
    file: Option<&Path>,
    env: impl IntoIterator<Item = (String, String)>,
) -> Result<Config<S>, ConfigError> {
    let mut layers = vec![
        Layer::parse("the built-in defaults", COMMON_DEFAULTS)?,
        Layer::parse("the built-in defaults", service.defaults)?,
    ];
    if let Some(path) = file {
        let origin = path.display().to_string();
        let text = std::fs::read_to_string(path)
            .map_err(|error| ConfigError::Read { path: origin.clone(), error })?;
        layers.push(Layer::parse(&origin, &text)?);
    }
    layers.push(Layer::environment(env)?);

    let mut builder = ::config::Config::builder();
    for layer in layers {
        builder = builder.add_source(layer.scoped_to(service)?);
    }
    let merged = builder.build().map_err(|error| ConfigError::key("config", error.to_string()))?;
    Ok(Config {
        nats: section(&merged.cache, "nats")?,
        telemetry: section(&merged.cache, "telemetry")?,
        health: section(&merged.cache, "health")?,
        service: section(&merged.cache, service.section)?,
    })
}

/// Deserialises an enum so that an unknown word is answered with the list of the known ones:
/// `#[serde(deserialize_with = "service_kit::config::word")]`.
pub fn word<'de, D: Deserializer<'de>, T: Deserialize<'de>>(deserializer: D) -> Result<T, D::Error> {
    T::deserialize(String::deserialize(deserializer)?.into_deserializer())
}

/// What one source says, not yet narrowed to a service.
#[derive(Debug, Clone)]
struct Layer(Map<String, Value>);

impl Layer {
    fn parse(origin: &str, text: &str) -> Result<Self, ConfigError> {
        let mut table = ::config::File::from_str(text, FileFormat::Toml).collect().map_err(|error| {
            ConfigError::Syntax { origin: origin.to_owned(), problem: syntax_problem(&error) }
        })?;
        for value in table.values_mut() {
            set_origin(value, origin);
        }
        Ok(Self(table))
    }

    fn environment(env: impl IntoIterator<Item = (String, String)>) -> Result<Self, ConfigError> {
        let mut table = Map::new();
        let mut seen: Vec<(Vec<String>, String)> = Vec::new();
        for (name, text) in env {
            let Some(path) = name.strip_prefix(ENV_PREFIX).filter(|_| !text.is_empty()) else {
                continue;
            };
            let keys: Vec<_> = path.to_lowercase().split(ENV_SEPARATOR).map(str::to_owned).collect();
            if let Some((_, other)) =
                seen.iter().find(|(other, _)| keys.starts_with(other) || other.starts_with(&keys))
            {
                return Err(ConfigError::key(
                    keys.join("."),
                    format!("only one of the environment variables {name} and {other} can be set"),
                ));
            }
            let origin = format!("the environment variable {name}");
            let (first, rest) = keys.split_first().expect("split yields at least one part");
            let value = rest.iter().rfold(Value::new(Some(&origin), text), |inner, key| {
                Value::new(Some(&origin), Map::from_iter([(key.clone(), inner)]))
            });
            overlay(&mut table, first.clone(), value);
            seen.push((keys, name));
        }
        Ok(Self(table))
    }

    /// Drops the sections of other services and lets the service's own common tables overrule the
    /// common ones of the same source.
    fn scoped_to(mut self, service: &Service) -> Result<Self, ConfigError> {
        if let Some((key, value)) = self.0.iter().find(|(key, _)| !SECTIONS.contains(&key.as_str())) {
            return Err(ConfigError::Key {
                key: key.clone(),
                origin: Origin(value.origin().map(str::to_owned)),
                problem: format!("unknown section, expected one of {}", SECTIONS.join(", ")),
            });
        }
        self.0.retain(|key, _| COMMON.contains(&key.as_str()) || key == service.section);
        if let Some(Value { kind: ValueKind::Table(own), .. }) = self.0.get_mut(service.section) {
            let overrules: Vec<_> = COMMON.iter().filter_map(|key| own.remove_entry(*key)).collect();
            for (key, value) in overrules {
                overlay(&mut self.0, key, value);
            }
        }
        Ok(self)
    }
}

impl Source for Layer {
    fn clone_into_box(&self) -> Box<dyn Source + Send + Sync> {
        Box::new(self.clone())
    }

    fn collect(&self) -> Result<Map<String, Value>, ::config::ConfigError> {
        Ok(self.0.clone())
    }
}

fn overlay(table: &mut Map<String, Value>, key: String, value: Value) {
    match (table.get_mut(&key).map(|old| &mut old.kind), value) {
        (Some(ValueKind::Table(old)), Value { kind: ValueKind::Table(new), .. }) => {
            for (key, value) in new {
                overlay(old, key, value);
            }
        }
        (_, value) => {
            table.insert(key, value);
        }
    }
}

fn set_origin(value: &mut Value, origin: &str) {
    let origin_string = origin.to_owned();
    let mut kind = std::mem::take(&mut value.kind);
    match &mut kind {
        ValueKind::Table(table) => table.values_mut().for_each(|v| set_origin(v, origin)),
        ValueKind::Array(items) => items.iter_mut().for_each(|v| set_origin(v, origin)),
        _ => {}
    }
    *value = Value::new(Some(&origin_string), kind);
}

fn section<T: DeserializeOwned>(merged: &Value, name: &str) -> Result<T, ConfigError> {
    let value = match &merged.kind {
        ValueKind::Table(sections) => sections.get(name).cloned(),
        _ => None,
    };
    let value = value.unwrap_or_else(|| Value::new(None, Map::<String, Value>::new()));
    if !matches!(value.kind, ValueKind::Table(_)) {
        return Err(ConfigError::Key {
            key: name.to_owned(),
            origin: Origin(value.origin().map(str::to_owned)),
            problem: format!("must be a section, [{name}] with keys below it"),
        });
    }
    serde_path_to_error::deserialize(value.clone()).map_err(|error| {
        let mut place = Place::find(name, &value, error.path());
        let problem = match unwrap(error.into_inner()) {
            ::config::ConfigError::NotFound(field) => {
                place = Place { keys: [place.keys, vec![field]].concat(), ..Place::default() };
                let variable = place.keys.join(ENV_SEPARATOR).to_uppercase();
                format!("missing; set it in the config file or as {ENV_PREFIX}{variable}")
            }
            ::config::ConfigError::Type { unexpected, expected, .. } => {
                format!("{unexpected} is not allowed, expected {expected}")
            }
            other => {
                let problem = other.to_string();
                // An unknown key may be a misspelt secret.
                let secret =
                    problem.starts_with("unknown field") || problem.starts_with(crate::redacted::PROBLEM);
                match place.written.filter(|_| !secret) {
                    Some(written) => format!("`{written}` is not allowed: {problem}"),
                    None => problem,
                }
            }
        };
        ConfigError::Key { key: place.keys.join("."), origin: Origin(place.origin), problem }
    })
}

/// Removes the key paths that the config crate adds to its messages: [`Place`] says it better.
fn unwrap(error: ::config::ConfigError) -> ::config::ConfigError {
    match error {
        ::config::ConfigError::At { error, .. } => unwrap(*error),
        ::config::ConfigError::NotFound(path) => {
            let field = path.rsplit('.').next().unwrap_or_default().to_owned();
            ::config::ConfigError::NotFound(field)
        }
        other => other,
    }
}

/// Where in the configuration an error happened.
#[derive(Default)]
struct Place {
    keys: Vec<String>,
    origin: Option<String>,
    /// What is written there, when it is a single value.
    written: Option<String>,
}

impl Place {
    fn find(section: &str, value: &Value, path: &KeyPath) -> Self {
        let mut keys = vec![section.to_owned()];
        let mut here = Some(value);
        for segment in path {
            match segment {
                Segment::Map { key } => {
                    keys.push(key.clone());
                    here = here.and_then(|value| match &value.kind {
                        ValueKind::Table(table) => table.get(key),
                        _ => None,
                    });
                }
                Segment::Seq { index } => {
                    keys.push(index.to_string());
                    here = here.and_then(|value| match &value.kind {
                        ValueKind::Array(items) => items.get(*index),
                        _ => None,
                    });
                }
                Segment::Enum { .. } | Segment::Unknown => break,
            }
        }
        Self {
            keys,
            origin: here.and_then(Value::origin).map(str::to_owned),
            written: here.and_then(|value| value.clone().into_string().ok()),
        }
    }
}

/// The position and the reason, without the line itself: it may hold a secret.
fn syntax_problem(error: &::config::ConfigError) -> String {
    let text = match error {
        ::config::ConfigError::FileParse { cause, .. } => cause.to_string(),
        other => other.to_string(),
    };
    let quoted =
        |line: &&str| line.trim_start_matches(|c: char| c.is_ascii_digit() || c == ' ').starts_with('|');
    text.lines().filter(|line| !quoted(line)).collect::<Vec<_>>().join(": ")
}

fn nats_url<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    let text = String::deserialize(deserializer)?;
    for url in text.split(',').map(str::trim) {
        if url.contains('@') {
            return Err(de::Error::custom(format!(
                "{} in this address would end up in logs; use nkey_seed",
                crate::redacted::PROBLEM
            )));
        }
        if !["nats://", "tls://"]
            .iter()
            .any(|scheme| url.strip_prefix(scheme).is_some_and(|address| !address.is_empty()))
        {
            return Err(de::Error::custom(
                "expected nats://HOST:PORT or tls://HOST:PORT, several separated by commas",
            ));
        }
    }
    Ok(text)
}

fn otlp_endpoint<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<String>, D::Error> {
    let endpoint = Option::<String>::deserialize(deserializer)?;
    match &endpoint {
        Some(url) if !url.starts_with("http://") => Err(de::Error::custom(
            "expected http://HOST:PORT (OTLP over gRPC without TLS; for TLS run a collector beside)",
        )),
        _ => Ok(endpoint),
    }
}

fn log_filter<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    let filter = String::deserialize(deserializer)?;
    tracing_subscriber::EnvFilter::try_new(&filter).map_err(|error| {
        de::Error::custom(format!("{error}; expected a filter like info,ask_router=debug"))
    })?;
    Ok(filter)
}

fn ratio<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    let ratio = f64::deserialize(deserializer)?;
    if (0.0..=1.0).contains(&ratio) {
        Ok(ratio)
    } else {
        Err(de::Error::custom("expected a number from 0.0 to 1.0"))
    }
}
