//! One world: a nats-server, a scripted Gateway, two replicas of each service as processes, and
//! proxies between them.

use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use ask_bus::{Bus, BusOptions, Mutant};
use ask_core::time::Timestamp;
use rand::Rng as _;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use testkit::gateway::{GatewayOptions, PluginEndpoint, ScriptedGateway};
use testkit::nats::{NatsOptions, NatsServer};
use tokio::process::{Child, Command};
use tokio::time::Instant;

use crate::history::Part;
use crate::proxy::Proxy;

/// Below the range from which the kernel takes ports for outgoing connections, and beside that of
/// testkit: a service that is down keeps its port.
const PORTS: std::ops::Range<u16> = 10_000..20_000;
/// How many questions of a run may wait at once.
pub const PER_RUN: usize = 3;
/// The gateway's name on the bus.
pub const GATEWAY: &str = "openclaw";
const READY_WITHIN: Duration = Duration::from_secs(60);
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// A service that there are two replicas of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Service {
    /// ask-router.
    Router,
    /// gateway-adapter.
    Adapter,
    /// owui-emitter.
    Emitter,
}

impl Service {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Router, Self::Adapter, Self::Emitter];

    /// The name of its program.
    pub fn program(self) -> &'static str {
        match self {
            Self::Router => "ask-router",
            Self::Adapter => "gateway-adapter",
            Self::Emitter => "owui-emitter",
        }
    }

    /// The same as a part that breaks.
    pub fn part(self) -> Part {
        match self {
            Self::Router => Part::Router,
            Self::Adapter => Part::Adapter,
            Self::Emitter => Part::Emitter,
        }
    }
}

/// A replica, e.g. the second router.
pub type ReplicaId = (Service, usize);

/// What a world is made of.
#[derive(Debug, Clone)]
pub struct WorldOptions {
    /// Where the programs of askbus are.
    pub programs: PathBuf,
    /// A folder of its own.
    pub folder: PathBuf,
    /// All processes are this variant of the product.
    pub mutant: Option<Mutant>,
    /// `askctl provision` crashes at this point first.
    pub crash_provision: Option<String>,
    /// A late answer goes to the agent as a message.
    pub late_as_message: bool,
    /// Which services run.
    pub services: &'static [Service],
}

/// A running world; everything ends when it is dropped.
pub struct World {
    /// The server.
    pub nats: NatsServer,
    /// The Gateway.
    pub gateway: ScriptedGateway,
    /// A connection of the harness, past the proxies.
    pub bus: Bus,
    /// In front of both emitters.
    pub emitters: Proxy,
    /// In front of both adapters' HTTP endpoints.
    pub adapters: Proxy,
    /// Bearer token of the emitters.
    pub front_token: String,
    /// Bearer token of the adapters.
    pub adapter_token: String,
    /// Where each adapter listens.
    pub adapter_addresses: Vec<SocketAddr>,
    nats_proxies: Vec<(ReplicaId, Proxy)>,
    provision: PathBuf,
    replicas: Mutex<Vec<Replica>>,
    options: WorldOptions,
    faults: Mutex<Faults>,
}

/// What has happened to the parts of a world.
#[derive(Debug, Default)]
struct Faults {
    /// Crash points that were reached, by what the processes said.
    crashes: usize,
    /// Ends that nobody asked for.
    unexpected: Vec<String>,
    outage: Duration,
    broken: BTreeSet<Part>,
    gateway_restarted_ms: Option<u64>,
}

struct Replica {
    id: ReplicaId,
    config: PathBuf,
    log: PathBuf,
    health: u16,
    child: Option<Child>,
    /// `CRASH_AT` of the present process.
    armed: Option<String>,
}

impl World {
    /// Starts everything, and waits until it is ready.
    ///
    /// # Errors
    /// Something does not start; with the end of its log.
    pub async fn start(options: WorldOptions) -> Result<Self> {
        fs::create_dir_all(&options.folder)?;
        let nats = NatsServer::start_with(NatsOptions { fsync: true, ..Default::default() }).await?;
        let keys = options.folder.join("keys");
        let mut nats_proxies = Vec::new();
        let mut replicas = Vec::new();
        let server: SocketAddr = nats.url().trim_start_matches("nats://").parse()?;
        let provision = options.folder.join("askctl.toml");
        fs::write(
            &provision,
            format!("[nats]\nurl = \"{}\"\n\n[askctl]\nkeys_dir = {keys:?}\n", nats.url()),
        )?;
        if let Some(at) = &options.crash_provision {
            let crashed = askctl(&options, &provision, &["provision"], Some(at)).await?;
            if !aborted(&crashed) {
                bail!("askctl provision ended with {crashed}, and was to crash at {at}");
            }
        }
        let provisioned = askctl(&options, &provision, &["provision"], None).await?;
        if !provisioned.success() {
            bail!("askctl provision ended with {provisioned}; see {}", options.folder.display());
        }
        let token = |name: &str| fs::read_to_string(keys.join(name)).map(|token| token.trim().to_owned());
        let (adapter_token, front_token) = (token("adapter.token")?, token("emitter.token")?);
        let gateway_options = GatewayOptions {
            name: GATEWAY.into(),
            ask_user_at_least: Duration::from_secs(1),
            tools_by_hand: vec!["askbus__request_user_input".into()],
            ..Default::default()
        };
        let gateway = ScriptedGateway::start(gateway_options).await?;
        let ports = free_ports(2 * 3 + 2 * 2)?;
        let (health, http) = ports.split_at(6);
        let (mut next_health, mut next_http) = (health.iter().copied(), http.iter().copied());
        let (mut adapters, mut emitters) = (Vec::new(), Vec::new());
        for &service in options.services {
            for index in 0..2 {
                let id = (service, index);
                let proxy = Proxy::start(vec![server]).await?;
                let health = next_health.next().context("a port for each")?;
                let name = format!("{}-{index}", service.program());
                let nats_section =
                    format!("[nats]\nurl = \"nats://{}\"\nname = \"{name}\"\n\n", proxy.address);
                let quiet = "[telemetry]\nlog_filter = \"info,opentelemetry=off\"\n\n";
                let own = match service {
                    Service::Router => {
                        // The deadlines are of far more questions than a person could be asked.
                        let is_alone = options.services == [Service::Router];
                        let per_run = if is_alone { 1_000_000 } else { PER_RUN };
                        let late = if options.late_as_message { "send_as_message" } else { "reject" };
                        format!(
                            "[router]\nlate_replies = \"{late}\"\n\n\
                             [router.health]\nlisten = \"127.0.0.1:{health}\"\n\n\
                             [router.limits]\nper_run = {per_run}\nper_session = 1000000\nper_user = 1000000\n"
                        )
                    }
                    Service::Adapter => {
                        let listen =
                            SocketAddr::from(([127, 0, 0, 1], next_http.next().context("a port for each")?));
                        adapters.push(listen);
                        format!(
                            "[adapter]\nseal_key.file = {seal:?}\n\n[adapter.health]\nlisten = \"127.0.0.1:{health}\"\n\n\
                             [adapter.gateway]\nname = \"{GATEWAY}\"\nurl = \"{url}\"\ntoken = \"{token}\"\n\
                             identity_file = {identity:?}\n\n[adapter.http]\nlisten = \"{listen}\"\n\
                             token = \"{adapter_token}\"\n\n[adapter.questions]\nnative_margin_ms = 500\n",
                            seal = keys.join(format!("seal-{GATEWAY}.key")),
                            url = gateway.url(),
                            token = gateway.token(),
                            identity = options.folder.join(format!("identity-{index}.json")),
                        )
                    }
                    Service::Emitter => {
                        let listen =
                            SocketAddr::from(([127, 0, 0, 1], next_http.next().context("a port for each")?));
                        emitters.push(listen);
                        format!(
                            "[emitter]\nstop_grace_ms = 400\n\n[emitter.health]\nlisten = \"127.0.0.1:{health}\"\n\n\
                             [emitter.http]\nlisten = \"{listen}\"\ntoken = \"{front_token}\"\n"
                        )
                    }
                };
                let config = options.folder.join(format!("{name}.toml"));
                fs::write(&config, format!("{nats_section}{quiet}{own}"))?;
                let log = options.folder.join(format!("{name}.log"));
                nats_proxies.push((id, proxy));
                replicas.push(Replica { id, config, log, health, child: None, armed: None });
            }
        }
        let adapter_addresses = adapters.clone();
        let (adapters, emitters) = (Proxy::start(adapters).await?, Proxy::start(emitters).await?);
        gateway.set_plugin(PluginEndpoint {
            url: format!("http://{}", adapters.address),
            token: adapter_token.clone(),
            handles: true,
        });
        let bus =
            Bus::connect(BusOptions { url: nats.url(), name: "faults".into(), ..Default::default() }).await?;
        let world = Self {
            nats,
            gateway,
            bus,
            emitters,
            adapters,
            front_token,
            adapter_token,
            adapter_addresses,
            nats_proxies,
            provision,
            replicas: Mutex::new(replicas),
            options,
            faults: Mutex::default(),
        };
        for id in world.ids() {
            world.start_replica(id, None)?;
        }
        world.all_ready().await?;
        Ok(world)
    }

    /// Where the emitters are reached.
    pub fn emitter_url(&self) -> String {
        format!("http://{}", self.emitters.address)
    }

    /// All replicas.
    pub fn ids(&self) -> Vec<ReplicaId> {
        lock(&self.replicas).iter().map(|replica| replica.id).collect()
    }

    /// The proxy between a replica and the server.
    pub fn nats_proxy(&self, id: ReplicaId) -> Option<&Proxy> {
        self.nats_proxies.iter().find(|(of, _)| *of == id).map(|(_, proxy)| proxy)
    }

    /// Starts a replica that does not run.
    ///
    /// # Errors
    /// Its program can't be started.
    pub fn start_replica(&self, id: ReplicaId, crash_at: Option<&str>) -> Result<()> {
        let mut replicas = lock(&self.replicas);
        let replica = find(&mut replicas, id)?;
        if replica.child.is_some() {
            return Ok(());
        }
        let log = || OpenOptions::new().create(true).append(true).open(&replica.log);
        let program = self.options.programs.join(id.0.program());
        let mut command = Command::new(&program);
        command.arg("--config").arg(&replica.config).stdin(Stdio::null()).stdout(log()?).stderr(log()?);
        command.process_group(0).kill_on_drop(true);
        command.env_remove("CRASH_AT").env_remove("ASKBUS_MUTANT");
        if let Some(crash_at) = crash_at {
            command.env("CRASH_AT", crash_at);
        }
        if let Some(mutant) = self.options.mutant {
            command.env("ASKBUS_MUTANT", mutant.name());
        }
        let child = command.spawn().with_context(|| format!("start {}", program.display()))?;
        replica.child = Some(child);
        replica.armed = crash_at.map(str::to_owned);
        Ok(())
    }

    /// `kill -9`; returns when it is gone.
    ///
    /// # Errors
    /// There is no such replica.
    pub async fn kill_replica(&self, id: ReplicaId) -> Result<()> {
        self.broke(id.0.part());
        let child = {
            let mut replicas = lock(&self.replicas);
            let replica = find(&mut replicas, id)?;
            replica.armed = None;
            replica.child.take()
        };
        if let Some(mut child) = child {
            let _ = child.kill().await;
        }
        Ok(())
    }

    /// Sends a signal to a replica, such as SIGSTOP.
    pub fn signal_replica(&self, id: ReplicaId, signal: Signal) {
        self.broke(id.0.part());
        let mut replicas = lock(&self.replicas);
        let pid = find(&mut replicas, id).ok().and_then(|replica| replica.child.as_ref()?.id());
        send(pid, signal);
    }

    /// Sends a signal to nats-server.
    pub fn signal_nats(&self, signal: Signal) {
        self.broke(Part::Nats);
        send(self.nats.id(), signal);
    }

    /// `kill -9` of nats-server, and its start after a while.
    ///
    /// # Errors
    /// It does not start again.
    pub async fn restart_nats(&self, down: Duration) -> Result<()> {
        self.broke(Part::Nats);
        self.add_outage(down + Duration::from_secs(2));
        self.nats.kill();
        tokio::time::sleep(down).await;
        self.nats.start_again().await
    }

    /// Starts again what reached its crash point; what else has ended is a finding.
    ///
    /// # Errors
    /// A program can't be started.
    pub fn tend(&self) -> Result<()> {
        let mut ended = Vec::new();
        for replica in lock(&self.replicas).iter_mut() {
            if let Some(child) = &mut replica.child
                && let Some(status) = child.try_wait()?
            {
                replica.child = None;
                ended.push((replica.id, replica.armed.take(), status));
            }
        }
        for (id, armed, status) in ended {
            self.broke(id.0.part());
            {
                let mut faults = lock(&self.faults);
                if armed.is_some() && aborted(&status) {
                    faults.crashes += 1;
                } else {
                    let name = id.0.program();
                    faults.unexpected.push(format!("{name} {} ended by itself with {status}", id.1));
                }
            }
            self.start_replica(id, None)?;
        }
        Ok(())
    }

    /// How many crash points were reached so far.
    pub fn crashes(&self) -> usize {
        lock(&self.faults).crashes
    }

    /// The ends that nobody asked for, since this was asked before.
    pub fn take_unexpected(&self) -> Vec<String> {
        std::mem::take(&mut lock(&self.faults).unexpected)
    }

    /// What it is made of.
    pub fn options(&self) -> &WorldOptions {
        &self.options
    }

    /// Something is away for this long.
    pub fn add_outage(&self, time: Duration) {
        lock(&self.faults).outage += time;
    }

    /// For how long something was away since this was asked before.
    pub fn outage(&self) -> Duration {
        lock(&self.faults).outage
    }

    /// A part breaks.
    pub fn broke(&self, part: Part) {
        lock(&self.faults).broken.insert(part);
    }

    /// What has broken since this was forgotten.
    pub fn broken(&self) -> BTreeSet<Part> {
        lock(&self.faults).broken.clone()
    }

    /// A new history begins: nothing was away and nothing has broken in it.
    pub fn forget_breaks(&self) {
        self.gateway.forget_faults();
        let mut faults = lock(&self.faults);
        faults.outage = Duration::ZERO;
        faults.broken.clear();
        faults.gateway_restarted_ms = None;
    }

    /// `kill -9` of the Gateway.
    pub fn kill_gateway(&self) {
        self.broke(Part::Gateway);
        self.add_outage(Duration::from_secs(5));
        self.gateway.kill();
    }

    /// Starts the Gateway that was killed.
    ///
    /// # Errors
    /// It does not start again.
    pub async fn start_gateway(&self) -> Result<()> {
        self.gateway.start_again().await?;
        lock(&self.faults).gateway_restarted_ms = Some(Timestamp::now().0);
        Ok(())
    }

    /// When the Gateway was restarted last in this history, in milliseconds since 1970.
    pub fn gateway_restarted_ms(&self) -> Option<u64> {
        lock(&self.faults).gateway_restarted_ms
    }

    /// Runs `askctl`; true when it crashed at `crash_at`, or ended well where there is none.
    ///
    /// # Errors
    /// It can't be started.
    pub async fn askctl(&self, args: &[&str], crash_at: Option<&str>) -> Result<bool> {
        let ended = askctl(&self.options, &self.provision, args, crash_at).await?;
        Ok(if crash_at.is_some() { aborted(&ended) } else { ended.success() })
    }

    /// Replaces processes that still wait for their crash point, and waits until all are ready.
    ///
    /// # Errors
    /// One is not within a minute.
    pub async fn disarm(&self) -> Result<()> {
        self.tend()?;
        let armed: Vec<ReplicaId> =
            lock(&self.replicas).iter().filter(|r| r.armed.is_some()).map(|r| r.id).collect();
        for id in armed {
            self.kill_replica(id).await?;
            self.start_replica(id, None)?;
        }
        self.all_ready().await
    }

    /// Waits until all replicas are ready.
    ///
    /// # Errors
    /// One is not within a minute; with the end of its log.
    pub async fn all_ready(&self) -> Result<()> {
        let http = reqwest::Client::builder().no_proxy().timeout(Duration::from_secs(2)).build()?;
        let give_up = Instant::now() + READY_WITHIN;
        let all: Vec<(String, u16, PathBuf)> = lock(&self.replicas)
            .iter()
            .map(|r| (format!("{} {}", r.id.0.program(), r.id.1), r.health, r.log.clone()))
            .collect();
        for (name, health, log) in all {
            loop {
                self.tend()?;
                let asked = http.get(format!("http://127.0.0.1:{health}/readyz")).send().await;
                let why = match asked {
                    Ok(answer) if answer.status().is_success() => break,
                    Ok(answer) => answer.text().await.unwrap_or_default(),
                    Err(error) => error.to_string(),
                };
                if Instant::now() > give_up {
                    bail!("{name} is not ready within {READY_WITHIN:?}: {why}{}", tail(&log));
                }
                tokio::time::sleep(LOOK_AGAIN).await;
            }
        }
        Ok(())
    }

    /// Publishes raw bytes, as no part of askbus does it.
    ///
    /// # Errors
    /// The server can't be reached.
    pub async fn publish_raw(&self, subject: &str, reply_to: Option<&str>, payload: &str) -> Result<()> {
        use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
        let address = self.nats.url().trim_start_matches("nats://").to_owned();
        let mut server = tokio::net::TcpStream::connect(address).await?;
        let reply_to = reply_to.map(|to| format!("{to} ")).unwrap_or_default();
        let commands = format!(
            "CONNECT {{\"verbose\":false}}\r\nPUB {subject} {reply_to}{}\r\n{payload}\r\nPING\r\n",
            payload.len()
        );
        server.write_all(commands.as_bytes()).await?;
        let mut said = String::new();
        let mut bytes = [0; 4096];
        while !said.contains("PONG") {
            match server.read(&mut bytes).await? {
                0 => bail!("the server closed the connection: {said}"),
                count => said.push_str(&String::from_utf8_lossy(&bytes[..count])),
            }
        }
        Ok(())
    }
}

impl Drop for World {
    fn drop(&mut self) {
        // What is stopped can't end by itself; `kill -9` ends it all the same.
        for replica in lock(&self.replicas).iter_mut() {
            if let Some(child) = &mut replica.child {
                let _ = child.start_kill();
            }
        }
    }
}

async fn askctl(
    options: &WorldOptions,
    config: &Path,
    args: &[&str],
    crash_at: Option<&str>,
) -> Result<std::process::ExitStatus> {
    let log = File::options().create(true).append(true).open(options.folder.join("askctl.log"))?;
    let mut command = Command::new(options.programs.join("askctl"));
    command.arg("--config").arg(config).args(args).stdin(Stdio::null());
    command.stdout(log.try_clone()?).stderr(log).env_remove("CRASH_AT").env_remove("ASKBUS_MUTANT");
    if let Some(crash_at) = crash_at {
        command.env("CRASH_AT", crash_at);
    }
    if let Some(mutant) = options.mutant {
        command.env("ASKBUS_MUTANT", mutant.name());
    }
    command.status().await.context("start askctl")
}

fn aborted(ended: &std::process::ExitStatus) -> bool {
    std::os::unix::process::ExitStatusExt::signal(ended) == Some(6)
}

fn find(replicas: &mut [Replica], id: ReplicaId) -> Result<&mut Replica> {
    let found = replicas.iter_mut().find(|replica| replica.id == id);
    found.with_context(|| format!("there is no {} {}", id.0.program(), id.1))
}

fn send(pid: Option<u32>, signal: Signal) {
    let pid = pid.and_then(|pid| i32::try_from(pid).ok()).and_then(Pid::from_raw);
    if let Some(pid) = pid {
        // An error says that it is gone.
        let _ = kill_process(pid, signal);
    }
}

/// Listeners on ports that no world of this process has had.
pub(crate) fn listeners(count: usize) -> Result<Vec<TcpListener>> {
    static TAKEN: Mutex<BTreeSet<u16>> = Mutex::new(BTreeSet::new());
    let mut held = Vec::new();
    for _ in 0..4000 {
        if held.len() == count {
            return Ok(held);
        }
        let port = rand::rng().random_range(PORTS);
        if lock(&TAKEN).insert(port) {
            held.extend(TcpListener::bind(("127.0.0.1", port)));
        }
    }
    bail!("no free ports in {PORTS:?} on 127.0.0.1")
}

fn free_ports(count: usize) -> Result<Vec<u16>> {
    listeners(count)?.iter().map(|listener| Ok(listener.local_addr()?.port())).collect()
}

/// The end of a log.
pub fn tail(log: &Path) -> String {
    let text = fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().collect();
    let last = lines[lines.len().saturating_sub(12)..].join("\n    ");
    format!("\n  the end of {}:\n    {last}", log.display())
}

/// Shared locks hold plain data, which a panic leaves whole.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A world that several tasks use.
pub type SharedWorld = Arc<World>;

/// A value of JSON as text; empty for anything else.
pub(crate) fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}
