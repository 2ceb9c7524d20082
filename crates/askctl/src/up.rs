//! `up`: the three services in one process, with a nats-server of its own.

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail};
use ask_bus::Bus;
use ask_router::RouterConfig;
use gateway_adapter::config::AdapterConfig;
use owui_emitter::EmitterConfig;
use serde::de::DeserializeOwned;
use service_kit::{Config, Health, Service, shutdown, telemetry};
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::config::{AskctlConfig, bus_options, connect, load, state_dir};
use crate::nats_server::{NatsServer, Ports};
use crate::provision::{ADAPTER_TOKEN, EMITTER_TOKEN, make_private_folder, print, provision, seal_file};
use crate::terminal::{say, table};

const DRAIN_LIMIT: Duration = Duration::from_secs(7);
/// After this long it is worth saying what is still missing.
const SOON: Duration = Duration::from_secs(5);

/// Runs until Ctrl-C or SIGTERM.
pub async fn up(file: Option<&Path>, nats: Option<&str>, state: Option<PathBuf>) -> Result<()> {
    let folder = std::path::absolute(state.map_or_else(state_dir, Ok)?)?;
    make_private_folder(&folder)?;
    let own_file = folder.join("askbus.toml");
    let file = match file {
        Some(file) => file,
        None => {
            write_config(&own_file, &folder.join("keys"))?;
            &own_file
        }
    };
    let mut config = load(Some(file), nats)?;
    let services = [&ask_router::SERVICE, &gateway_adapter::SERVICE, &owui_emitter::SERVICE];
    let telemetry = telemetry::init(&services, &config.telemetry)?;
    let stop = shutdown::on_signal().context("cannot listen for signals")?;

    let server = match nats {
        Some(_) => None,
        None => Some(NatsServer::start(&folder, ports(&config)?).await?),
    };
    if let Some(server) = &server {
        config.nats.url.clone_from(&server.url);
    }
    let ran = Box::pin(run(file, &config, &folder, stop.clone())).await;
    stop.cancel();
    if let Some(server) = server {
        server.stop().await;
    }
    telemetry.shutdown().await;
    ran
}

async fn run(
    file: &Path,
    config: &Config<AskctlConfig>,
    folder: &Path,
    stop: CancellationToken,
) -> Result<()> {
    let keys = config.service.keys_dir.clone().unwrap_or_else(|| folder.join("keys"));
    let bus = connect(&config.nats).await?;
    print(&provision(&bus, &config.service, &keys, false).await?);
    bus.close().await;

    let url = &config.nats.url;
    let router = service_config::<RouterConfig>(&ask_router::SERVICE, file, url)?;
    let adapter = service_config::<AdapterConfig>(&gateway_adapter::SERVICE, file, url)?;
    let emitter = service_config::<EmitterConfig>(&owui_emitter::SERVICE, file, url)?;
    let gateway = &adapter.service.gateway;
    let mut addresses = vec![
        ("nats", url.clone()),
        ("gateway", format!("{} at {}", gateway.name, gateway.url)),
        (
            "plugin",
            format!(
                "http://{}, token in {}",
                adapter.service.http.listen,
                keys.join(ADAPTER_TOKEN).display()
            ),
        ),
        (
            "front end",
            format!(
                "http://{}, token in {}",
                emitter.service.http.listen,
                keys.join(EMITTER_TOKEN).display()
            ),
        ),
        ("config", file.display().to_string()),
    ];

    let mut work = JoinSet::new();
    let mut frames = Vec::new();
    for (service, health, address) in [
        start(&ask_router::SERVICE, router, &stop, &mut work, ask_router::run).await?,
        start(&gateway_adapter::SERVICE, adapter, &stop, &mut work, gateway_adapter::run).await?,
        start(&owui_emitter::SERVICE, emitter, &stop, &mut work, owui_emitter::run).await?,
    ] {
        addresses.push((service, format!("http://{address}/readyz")));
        frames.push((service, health));
    }
    let rows: Vec<_> = addresses.into_iter().map(|(name, value)| vec![name.to_owned(), value]).collect();
    say!("askbus runs in this process; Ctrl-C ends it\n{}", table(2, &rows));
    let announcement = tokio::spawn(announce(frames));

    // One that ends before it was asked to takes the others with it.
    let mut result = Ok(());
    while let Some(ended) = work.join_next().await {
        let (service, how) = ended.context("a service was cut off")?;
        let early = !stop.is_cancelled();
        stop.cancel();
        if let Err(error) = how {
            tracing::error!(service, "failed: {error:#}");
            result = result.and(Err(error.context(format!("{service} failed"))));
        } else if early {
            result = result.and(Err(anyhow!("{service} ended by itself")));
        }
    }
    announcement.abort();
    result
}

/// A service's part of the config file, on the server that is used here.
fn service_config<S: DeserializeOwned>(service: &Service, file: &Path, nats: &str) -> Result<Config<S>> {
    let mut config = service_kit::config::load::<S>(service, Some(file))?;
    nats.clone_into(&mut config.nats.url);
    Ok(config)
}

/// Serves a service's health endpoint and starts the service.
async fn start<S, F, Fut>(
    service: &'static Service,
    config: Config<S>,
    stop: &CancellationToken,
    work: &mut JoinSet<(&'static str, Result<()>)>,
    run: F,
) -> Result<(&'static str, Health, SocketAddr)>
where
    S: Send + 'static,
    F: FnOnce(S, Bus, Health, CancellationToken) -> Fut + Send + 'static,
    Fut: Future<Output = Result<()>> + Send + 'static,
{
    let listen = config.health.listen;
    let listener = TcpListener::bind(listen)
        .await
        .with_context(|| format!("cannot listen on {}.health.listen = {listen}", service.section))?;
    let address = listener.local_addr()?;
    let health = Health::new(service);
    tokio::spawn(health.clone().serve(listener, CancellationToken::new()));
    let bus = Bus::connect(bus_options(&config.nats, service.name)).await?;
    let (stop, its_health) = (stop.clone(), health.clone());
    work.spawn(async move {
        let running = Box::pin(run(config.service, bus, its_health, stop.clone()));
        let ended = shutdown::drain(service.name, &stop, DRAIN_LIMIT, running).await;
        (service.name, ended.map_err(anyhow::Error::from).flatten())
    });
    Ok((service.name, health, address))
}

/// Says when everything is ready, and what is missing when that takes long.
async fn announce(frames: Vec<(&'static str, Health)>) {
    let started = tokio::time::Instant::now();
    let mut told = false;
    loop {
        let unmet: Vec<String> = frames
            .iter()
            .flat_map(|(service, health)| {
                health.unmet().into_iter().map(move |(what, why)| format!("  {service}: {what}: {why}"))
            })
            .collect();
        if unmet.is_empty() {
            say!("ready");
            return;
        }
        if !told && started.elapsed() > SOON {
            told = true;
            say!("not ready yet, and still trying:\n{}", unmet.join("\n"));
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// The ports of nats.url and askctl.monitor_url, which must be on this machine.
fn ports(config: &Config<AskctlConfig>) -> Result<Ports> {
    Ok(Ports {
        clients: port("nats.url", &config.nats.url)?,
        monitoring: port("askctl.monitor_url", &config.service.monitor_url)?,
    })
}

fn port(key: &str, url: &str) -> Result<u16> {
    let address = url.split_once("://").map_or(url, |(_, rest)| rest).trim_end_matches('/');
    let port = address
        .rsplit_once(':')
        .filter(|(host, _)| ["127.0.0.1", "localhost"].contains(host))
        .and_then(|(_, port)| port.parse().ok());
    match port {
        Some(port) => Ok(port),
        None => bail!(
            "`{key}` must be an address like 127.0.0.1:4222, where the nats-server of `up` is started, got: {url}; \
             --nats uses a server that runs already"
        ),
    }
}

/// A first configuration for a new folder; one that is there belongs to its user.
fn write_config(file: &Path, keys: &Path) -> Result<()> {
    if file.exists() {
        return Ok(());
    }
    let path = |path: PathBuf| serde_json::Value::from(path.display().to_string()).to_string();
    let text = format!(
        "# Made by `askctl up`, which does not write it again. What is not here has its default:\n\
         # `ask-router --print-defaults`, and the same for the other services, lists every key.\n\n\
         [adapter]\n\
         seal_key.file = {seal}\n\n\
         [adapter.gateway]\n\
         url = \"ws://127.0.0.1:18789\"\n\
         # The Gateway's gateway.auth.token:\n\
         # token.file = \"PATH\"\n\
         identity_file = {identity}\n\n\
         [adapter.http]\n\
         token.file = {adapter}\n\n\
         [emitter.http]\n\
         token.file = {emitter}\n",
        seal = path(seal_file(keys, "openclaw")),
        identity = path(keys.join("identity-openclaw.json")),
        adapter = path(keys.join(ADAPTER_TOKEN)),
        emitter = path(keys.join(EMITTER_TOKEN)),
    );
    fs::write(file, text).with_context(|| format!("{} can't be written", file.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn its_own_server_can_only_be_on_this_machine() {
        assert_eq!(port("nats.url", "nats://127.0.0.1:4222").unwrap(), 4222);
        assert_eq!(port("askctl.monitor_url", "http://localhost:8222/").unwrap(), 8222);
        for elsewhere in ["nats://nats.example:4222", "nats://127.0.0.1", "nats://a:1,nats://b:2"] {
            assert!(port("nats.url", elsewhere).unwrap_err().to_string().contains("--nats"), "{elsewhere}");
        }
    }
}
