//! The nats-server that askctl runs itself: found, started, started again when it dies, stopped.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::process::Process;
use crate::provision::make_private_folder;

const CONFIG: &str = include_str!("../../../deploy/nats/nats-server.conf");
const OLDEST: (u32, u32) = (2, 12);
const READY_WITHIN: Duration = Duration::from_secs(30);
const STOP_WITHIN: Duration = Duration::from_secs(10);

/// A running server; ends when it is dropped.
#[derive(Debug)]
pub struct NatsServer {
    pub url: String,
    stop: CancellationToken,
    supervisor: JoinHandle<()>,
}

/// Where a server listens.
#[derive(Debug, Clone, Copy)]
pub struct Ports {
    pub clients: u16,
    pub monitoring: u16,
}

impl NatsServer {
    /// Starts a server on the shipped configuration with its data in `folder`, and returns when it
    /// takes connections.
    pub async fn start(folder: &Path, ports: Ports) -> Result<Self> {
        make_private_folder(&folder.join("nats/ports"))?;
        let lock = lock(folder)?;
        let binary = find().await?;
        let config = folder.join("nats/nats-server.conf");
        fs::write(&config, CONFIG).with_context(|| format!("{} can't be written", config.display()))?;
        let log = folder.join("nats-server.log");
        let store = folder.join("nats/store");
        let ports_folder = folder.join("nats/ports");
        let mut process = Process::new("nats-server", &binary, &log)?
            .arg("--config")
            .arg(&config)
            .arg("--port")
            .arg(ports.clients.to_string())
            .arg("--http_port")
            .arg(ports.monitoring.to_string())
            .arg("--ports_file_dir")
            .arg(&ports_folder)
            // The server reads the value as configuration text.
            .env("ASKBUS_NATS_STORE", serde_json::to_string(&store)?)
            .holding(lock);
        launch(&mut process, &binary, &ports_folder, ports).await?;
        let stop = CancellationToken::new();
        let supervisor = tokio::spawn(supervise(process, binary, ports_folder, ports, stop.clone()));
        Ok(Self { url: format!("nats://127.0.0.1:{}", ports.clients), stop, supervisor })
    }

    /// Ends it in order.
    pub async fn stop(self) {
        self.stop.cancel();
        if let Err(error) = self.supervisor.await {
            tracing::error!(%error, "nats-server was not stopped in order");
        }
    }
}

async fn launch(process: &mut Process, binary: &Path, folder: &Path, ports: Ports) -> Result<()> {
    process.start()?;
    let name = binary.file_name().unwrap_or_default().to_string_lossy();
    let file = folder.join(format!("{name}_{}.ports", process.id().unwrap_or_default()));
    // A killed server leaves its file, and process ids come again.
    let _ = fs::remove_file(&file);
    let started = process.until(READY_WITHIN, || std::future::ready(listens(&file))).await;
    started.map_err(|error| {
        let taken = error.to_string().contains("address already in use");
        let hint = format!(
            "port {} or {} is taken: use the server there with --nats, or choose another port in nats.url and \
             askctl.monitor_url",
            ports.clients, ports.monitoring
        );
        if taken { error.context(hint) } else { error }
    })
}

/// The server writes this file once it takes connections.
fn listens(file: &Path) -> bool {
    let text = fs::read(file).unwrap_or_default();
    let ports: serde_json::Value = serde_json::from_slice(&text).unwrap_or_default();
    ports["nats"].as_array().is_some_and(|addresses| !addresses.is_empty())
}

/// Starts the server again when it ends by itself.
async fn supervise(
    mut process: Process,
    binary: PathBuf,
    folder: PathBuf,
    ports: Ports,
    stop: CancellationToken,
) {
    loop {
        tokio::select! {
            () = stop.cancelled() => {
                if let Err(error) = process.stop(STOP_WITHIN).await {
                    tracing::error!(%error, "nats-server was not stopped in order");
                }
                return;
            }
            ended = process.ended() => match ended {
                Ok(status) => tracing::warn!(%status, "nats-server ended; starting it again"),
                Err(error) => tracing::warn!(%error, "nats-server does not run; starting it again"),
            },
        }
        let again = async {
            while let Err(error) = launch(&mut process, &binary, &folder, ports).await {
                tracing::error!("nats-server did not start again: {error:#}");
                let _ = process.kill().await;
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
        };
        tokio::select! { () = stop.cancelled() => {} () = again => tracing::info!("nats-server is back") }
    }
}

/// One server a folder, also when an askctl that was killed has left its server behind: that one
/// still holds the lock.
fn lock(folder: &Path) -> Result<fs::File> {
    let path = folder.join("lock");
    let file = fs::OpenOptions::new().create(true).append(true).open(&path);
    let file = file.with_context(|| format!("{} can't be opened", path.display()))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(fs::TryLockError::WouldBlock) => bail!(
            "{} is in use by another `askctl up`, or by the nats-server that a killed one has left behind: end \
             that one, use it with --nats, or choose another folder with --state",
            folder.display()
        ),
        Err(fs::TryLockError::Error(error)) => {
            Err(error).with_context(|| format!("{} can't be locked", path.display()))
        }
    }
}

/// `ASKBUS_NATS_SERVER`, else PATH, else the newest one that `./dev` has put into the cache.
async fn find() -> Result<PathBuf> {
    let named = std::env::var_os("ASKBUS_NATS_SERVER").filter(|path| !path.is_empty()).map(PathBuf::from);
    if let Some(path) = named {
        return match version(&path).await {
            Ok(_) => Ok(path),
            Err(error) => Err(error.context("ASKBUS_NATS_SERVER can't be used")),
        };
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let on_path = std::env::split_paths(&path).map(|folder| folder.join("nats-server"));
    let mut refused = Vec::new();
    for candidate in on_path.chain(cached()).filter(|file| file.is_file()) {
        match version(&candidate).await {
            Ok(_) => return Ok(candidate),
            Err(error) => refused.push(format!("{error:#}")),
        }
    }
    let why = if refused.is_empty() { String::new() } else { format!(" ({})", refused.join("; ")) };
    Err(anyhow!(
        "no nats-server {}.{} or newer on PATH, in ASKBUS_NATS_SERVER or in askbus' cache{why}: install one, run \
         `./dev demo` once, which fetches it, or use a running server with --nats",
        OLDEST.0,
        OLDEST.1
    ))
}

/// Servers in the cache, the newest first.
fn cached() -> Vec<PathBuf> {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let cache = set("XDG_CACHE_HOME").or_else(|| Some(set("HOME")?.join(".cache")));
    let Some(folders) = cache.and_then(|cache| fs::read_dir(cache.join("askbus")).ok()) else {
        return Vec::new();
    };
    let mut found: Vec<PathBuf> = folders
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().starts_with("nats-server-"))
        .flat_map(|entry| ["bin/nats-server", "nats-server"].map(|name| entry.path().join(name)))
        .filter(|file| file.is_file())
        .collect();
    found.sort_by_key(|file| std::cmp::Reverse(file.metadata().and_then(|meta| meta.modified()).ok()));
    found
}

async fn version(binary: &Path) -> Result<String> {
    let output = tokio::process::Command::new(binary).arg("--version").output().await;
    let output = output.with_context(|| format!("{} can't be run", binary.display()))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let version = text.trim().rsplit(' ').next().unwrap_or_default().trim_start_matches('v');
    if !is_new_enough(version) {
        bail!("{} has version `{version}`, needed is {}.{} or newer", binary.display(), OLDEST.0, OLDEST.1);
    }
    Ok(version.to_owned())
}

/// Whether a server of this version can do what the bus needs.
pub fn is_new_enough(version: &str) -> bool {
    let mut parts = version.split(['.', '-']).map_while(|part| part.parse::<u32>().ok());
    matches!((parts.next(), parts.next()), (Some(major), Some(minor)) if (major, minor) >= OLDEST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_by_number() {
        let table =
            [("2.12.0", true), ("2.9.1", false), ("3.0.0-RC.1", true), ("2.11.10", false), ("", false)];
        for (version, enough) in table {
            assert_eq!(is_new_enough(version), enough, "{version}");
        }
    }
}
