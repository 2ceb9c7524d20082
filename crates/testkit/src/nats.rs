//! A real nats-server with JetStream in a folder of its own.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use rand::Rng;
use serde::Deserialize;
use tempfile::TempDir;

use crate::PORTS;

const READY_WITHIN: Duration = Duration::from_secs(20);
const LOOK_AGAIN: Duration = Duration::from_millis(10);

/// What differs from a plain server with JetStream.
#[derive(Debug, Clone, Default)]
pub struct NatsOptions {
    /// `sync_interval: always`, as the shipped server config has it: an acknowledged write is on
    /// disk. Off by default, since a killed process loses nothing without it.
    pub fsync: bool,
    /// Lines added to the server's config, such as an `authorization` block.
    pub config: String,
}

/// A running nats-server; killed, and its folder removed, when dropped.
#[derive(Debug)]
pub struct NatsServer {
    folder: TempDir,
    binary: PathBuf,
    port: u16,
    child: Mutex<Option<Child>>,
}

impl NatsServer {
    /// Starts a server with default options and waits until it takes connections.
    ///
    /// # Errors
    /// No nats-server on this machine, or it does not come up within 20 seconds.
    pub async fn start() -> Result<Self> {
        Self::start_with(NatsOptions::default()).await
    }

    /// Starts a server with the given options and waits until it takes connections.
    ///
    /// # Errors
    /// As [`start`](Self::start); the end of the server's log is in the error.
    pub async fn start_with(options: NatsOptions) -> Result<Self> {
        let binary = find_binary()?;
        let folder = tempfile::Builder::new()
            .prefix("askbus-nats-")
            .tempdir()
            .context("make a folder for nats-server")?;
        let mut server = Self { folder, binary, port: 0, child: Mutex::new(None) };
        loop {
            server.port = rand::rng().random_range(PORTS);
            server.write_config(&options)?;
            // Another server may own this port or take it at the same moment: choose again.
            if server.launch().await? {
                return Ok(server);
            }
        }
    }

    /// Address for clients, `nats://127.0.0.1:<port>`; the same over restarts.
    pub fn url(&self) -> String {
        format!("nats://127.0.0.1:{}", self.port)
    }

    /// Where JetStream keeps its files.
    pub fn store_dir(&self) -> PathBuf {
        self.folder.path().join("store")
    }

    /// All that the server has logged.
    pub fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    /// Its process id; none while it is killed.
    pub fn id(&self) -> Option<u32> {
        self.child().as_ref().map(Child::id)
    }

    /// Kills the server (SIGKILL) and waits until it is gone. Nothing happens if it is not running.
    pub fn kill(&self) {
        if let Some(mut child) = self.child().take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Starts a killed server again, with the same port and store.
    ///
    /// # Errors
    /// It runs already, or does not come up within 20 seconds.
    pub async fn start_again(&self) -> Result<()> {
        if self.child().is_some() {
            bail!("nats-server runs already: call kill first");
        }
        let give_up = Instant::now() + READY_WITHIN;
        // A starting server of another test may hold this port for a moment.
        while !self.launch().await? {
            if Instant::now() > give_up {
                bail!("port {} of nats-server was taken by another process", self.port);
            }
            tokio::time::sleep(LOOK_AGAIN).await;
        }
        Ok(())
    }

    /// [`kill`](Self::kill) and [`start_again`](Self::start_again).
    ///
    /// # Errors
    /// It does not come up within 20 seconds.
    pub async fn restart(&self) -> Result<()> {
        self.kill();
        self.start_again().await
    }

    fn child(&self) -> MutexGuard<'_, Option<Child>> {
        self.child.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn write_config(&self, options: &NatsOptions) -> Result<()> {
        let root = self.folder.path();
        let sync = if options.fsync { "sync_interval: always" } else { "" };
        let config = format!(
            "listen: \"127.0.0.1:{}\"\nports_file_dir: {:?}\nlog_file: {:?}\n\
             jetstream {{ store_dir: {:?}\n max_mem: 256M\n max_file: 4G\n {sync} }}\n{}\n",
            self.port,
            root.join("ports"),
            root.join("log"),
            self.store_dir(),
            options.config,
        );
        fs::create_dir_all(root.join("ports"))?;
        fs::write(root.join("nats.conf"), config).context("write the config of nats-server")
    }

    /// True when the server takes connections, false when its port is in use.
    async fn launch(&self) -> Result<bool> {
        let errors = fs::File::create(self.folder.path().join("errors"))?;
        // A killed server leaves its file, and process ids come again. Before the start, since the
        // new server may be quick.
        let folder = self.folder.path().join("ports");
        fs::remove_dir_all(&folder)?;
        fs::create_dir_all(&folder)?;
        let child = Command::new(&self.binary)
            .arg("--config")
            .arg(self.folder.path().join("nats.conf"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(errors)
            .spawn()
            .with_context(|| format!("start {}", self.binary.display()))?;
        let ports = folder.join(format!("{}_{}.ports", file_name(&self.binary), child.id()));
        *self.child() = Some(child);
        let give_up = Instant::now() + READY_WITHIN;
        loop {
            if listens(&ports) {
                return Ok(true);
            }
            let ended = self.child().as_mut().map(Child::try_wait).transpose()?;
            if let Some(status) = ended.flatten() {
                self.kill();
                let said = self.said();
                if said.contains("address already in use") {
                    return Ok(false);
                }
                return Err(anyhow!("nats-server ended with {status}; it said: {said}"));
            }
            if Instant::now() > give_up {
                self.kill();
                return Err(anyhow!(
                    "nats-server took no connections within {READY_WITHIN:?}; it said: {}",
                    self.said()
                ));
            }
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    }

    fn said(&self) -> String {
        let log = self.log();
        let start = log.rfind("Starting nats-server").unwrap_or(0);
        let errors = fs::read_to_string(self.folder.path().join("errors")).unwrap_or_default();
        format!("{}{errors}", &log[start..])
    }
}

impl Drop for NatsServer {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The server writes this file once it takes connections.
fn listens(ports: &Path) -> bool {
    #[derive(Deserialize)]
    struct Ports {
        nats: Vec<String>,
    }
    fs::read(ports)
        .ok()
        .and_then(|text| serde_json::from_slice::<Ports>(&text).ok())
        .is_some_and(|ports| !ports.nats.is_empty())
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// `ASKBUS_NATS_SERVER`, else PATH, else the newest one that `./dev` has put into the cache.
fn find_binary() -> Result<PathBuf> {
    if let Some(path) = std::env::var_os("ASKBUS_NATS_SERVER") {
        let path = PathBuf::from(path);
        if path.is_file() {
            return Ok(path);
        }
        bail!("ASKBUS_NATS_SERVER is {}, which is not a file", path.display());
    }
    let on_path = std::env::var_os("PATH").and_then(|dirs| {
        std::env::split_paths(&dirs).map(|dir| dir.join("nats-server")).find(|file| file.is_file())
    });
    if let Some(path) = on_path {
        return Ok(path);
    }
    let cache = std::env::var_os("XDG_CACHE_HOME")
        .filter(|dir| !dir.is_empty())
        .map(PathBuf::from)
        .or_else(|| std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache")))
        .map(|cache| cache.join("askbus"));
    cache
        .and_then(|cache| fs::read_dir(cache).ok())
        .into_iter()
        .flatten()
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().starts_with("nats-server-"))
        .map(|entry| entry.path().join("nats-server"))
        .filter(|file| file.is_file())
        .max_by_key(|file| file.metadata().and_then(|meta| meta.modified()).ok())
        .context("no nats-server on PATH, in ASKBUS_NATS_SERVER or in the cache: run ./dev test once")
}
