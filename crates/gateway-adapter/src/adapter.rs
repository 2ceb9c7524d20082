//! What the bridge and the calls share: the bus, the gateway's questions, tool-call starts, secrets.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use ask_bus::seal::{OpenKey, SealError};
use ask_bus::{Bus, BusError, Change, Stored};
use ask_core::entry::{DecidedBy, Entry, State};
use ask_core::key::{QuestionKey, SessionKey};
use ask_core::outcome::{Outcome, Returned};
use ask_core::reply::Answer;
use ask_core::time::Timestamp;
use ask_core::wire::{RunEvent, ToolPhase};
use service_kit::Health;
use sha2::{Digest, Sha256};
use tokio::sync::{broadcast, watch};
use tokio_util::sync::CancellationToken;
use tracing::Instrument as _;
use zeroize::Zeroizing;

use crate::config::AdapterConfig;
use crate::mask::Secrets;
use crate::trace;

/// How long a tool-call start is remembered.
const STARTS_KEPT: Duration = Duration::from_secs(30);
/// Changes that a slow follower may be behind before it reads all entries again.
const CHANGES: usize = 4096;

/// One adapter process.
#[derive(Debug)]
pub struct Adapter {
    /// The bus.
    pub bus: Bus,
    /// The configuration.
    pub config: AdapterConfig,
    /// Cancelled when the process stops.
    pub shutdown: CancellationToken,
    seal: Option<OpenKey>,
    secrets: Secrets,
    entries: Mutex<Entries>,
    changes: broadcast::Sender<Arc<Stored<Entry>>>,
    loaded: watch::Sender<bool>,
    starts: Mutex<VecDeque<ToolStart>>,
    starts_seen: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct Entries {
    /// Those that are not closed.
    open: HashMap<QuestionKey, Arc<Stored<Entry>>>,
    waiting: HashMap<QuestionKey, watch::Sender<Option<Arc<Stored<Entry>>>>>,
}

/// The start of a tool call at this gateway, as every replica sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToolStart {
    /// The session it belongs to.
    pub session: SessionKey,
    /// The run.
    pub run: String,
    /// The call's id at the gateway; not unique.
    pub call: String,
    /// The tool's name as the model sees it.
    pub name: String,
    /// [`args_digest`] of its arguments; only for asking tools.
    pub digest: Option<String>,
    /// When this replica learned of it.
    pub at: Instant,
    /// The same on the wall clock, for traces.
    pub at_time: SystemTime,
}

/// A seal key that can't be read.
#[derive(Debug, thiserror::Error)]
#[error("adapter.seal_key can't be read: {0}")]
pub struct BadSealKey(SealError);

impl Adapter {
    /// A process with nothing loaded yet.
    ///
    /// # Errors
    /// When the configured seal key can't be read.
    pub fn new(config: AdapterConfig, bus: Bus, shutdown: CancellationToken) -> Result<Self, BadSealKey> {
        let seal = config.seal_key.as_ref().map(|key| OpenKey::from_text(key.expose())).transpose();
        Ok(Self {
            bus,
            seal: seal.map_err(BadSealKey)?,
            config,
            shutdown,
            secrets: Secrets::default(),
            entries: Mutex::default(),
            changes: broadcast::Sender::new(CHANGES),
            loaded: watch::Sender::new(false),
            starts: Mutex::default(),
            starts_seen: watch::Sender::new(0),
        })
    }

    /// The gateway's name on the bus.
    pub fn gateway(&self) -> &str {
        &self.config.gateway.name
    }

    /// A session of this gateway.
    pub fn session(&self, session: &str) -> SessionKey {
        SessionKey::new(self.gateway(), session)
    }

    /// Follows the gateway's entries until the process stops; once per process.
    pub(crate) async fn follow_entries(&self) {
        let mut watch = self.bus.watch_questions(Some(self.gateway()));
        while let Some(change) = watch.next().await {
            match change {
                Change::Put { value, revision, .. } => self.learn(Stored { value: *value, revision }),
                Change::Deleted { .. } | Change::Loading => {}
                Change::Loaded { .. } => {
                    self.loaded.send_replace(true);
                }
            }
        }
    }

    /// Takes what was read or written into account. Older values than the known one are ignored.
    pub(crate) fn learn(&self, stored: Stored<Entry>) {
        let stored = Arc::new(stored);
        let key = &stored.value.key;
        {
            let mut entries = lock(&self.entries);
            if entries.open.get(key).is_some_and(|known| known.revision >= stored.revision) {
                return;
            }
            if matches!(stored.value.state, State::Returned { .. }) {
                entries.open.remove(key);
            } else {
                entries.open.insert(key.clone(), stored.clone());
            }
            if let Some(waiting) = entries.waiting.get(key) {
                waiting.send_replace(Some(stored.clone()));
            }
        }
        // Nobody may be listening.
        let _ = self.changes.send(stored);
    }

    /// Every value of the gateway's entries from now on; after a lag, read [`Adapter::open_entries`].
    pub fn entry_changes(&self) -> broadcast::Receiver<Arc<Stored<Entry>>> {
        self.changes.subscribe()
    }

    /// Waits until all entries have been read once.
    pub async fn entries_loaded(&self) {
        // The sender lives as long as `self`.
        let _ = self.loaded.subscribe().wait_for(|loaded| *loaded).await;
    }

    /// The entries that are not closed, as far as they are loaded.
    pub fn open_entries(&self) -> Vec<Arc<Stored<Entry>>> {
        lock(&self.entries).open.values().cloned().collect()
    }

    /// The entry of this question, as long as it is open.
    pub(crate) fn open_entry(&self, key: &QuestionKey) -> Option<Arc<Stored<Entry>>> {
        lock(&self.entries).open.get(key).cloned()
    }

    /// The open entries of one session.
    pub fn open_entries_of(&self, session: &str) -> Vec<Arc<Stored<Entry>>> {
        lock(&self.entries).open.values().filter(|e| e.value.key.session == session).cloned().collect()
    }

    /// Waits until this question is decided, and returns its entry then. While the bus is away it
    /// goes on waiting. A question that was never asked is waited for, too.
    pub async fn wait_decided(&self, key: &QuestionKey) -> Arc<Stored<Entry>> {
        self.wait_for(key, |entry| !entry.is_pending()).await
    }

    /// Waits until the entry of this question fulfils a condition.
    pub async fn wait_for(
        &self,
        key: &QuestionKey,
        condition: impl Fn(&Entry) -> bool,
    ) -> Arc<Stored<Entry>> {
        let mut waiting = Waiting::new(self, key);
        // What was decided before, and perhaps closed, is no change any more.
        match self.bus.question(key).await {
            Ok(Some(stored)) if condition(&stored.value) => return Arc::new(stored),
            Ok(_) => {}
            // The watch loads everything again when the connection is back.
            Err(error) => tracing::warn!(%error, "an entry was not read; waiting for the watch"),
        }
        loop {
            {
                let known = waiting.receiver.borrow_and_update();
                if let Some(stored) = known.as_ref().filter(|stored| condition(&stored.value)) {
                    return stored.clone();
                }
            }
            if waiting.receiver.changed().await.is_err() {
                // Only when the adapter itself is gone.
                std::future::pending::<()>().await;
            }
        }
    }

    /// Third durable write: closes a decided question; does nothing to a pending or a closed one.
    /// False where there was nothing to close.
    ///
    /// # Errors
    /// It may or may not be written; do it again.
    pub(crate) async fn close(&self, key: &QuestionKey, returned: &Returned) -> Result<bool, BusError> {
        loop {
            let Some(stored) = self.bus.question(key).await? else { return Ok(false) };
            let Some(closed) = stored.value.close(returned.clone(), Timestamp::now()) else {
                return Ok(false);
            };
            let held_secret = stored.value.holds_secret();
            let write = self.bus.write_returned(&closed, stored.revision, held_secret);
            match write.instrument(trace::settle_ask(&stored.value)).await {
                Ok(_) => {
                    let result = match returned {
                        Returned::Delivered { .. } => "delivered",
                        Returned::Overruled { .. } => "overruled",
                        Returned::Unconfirmed { .. } => "unconfirmed",
                    };
                    tracing::info!(question = %key.question, result, "returned");
                    return Ok(true);
                }
                Err(BusError::Conflict { .. }) => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Follows `RUNS` for the starts of tool calls until the process stops; once per process.
    pub(crate) async fn follow_tool_starts(&self, health: &Health) {
        loop {
            match self.bus.follow_runs().await {
                Ok(mut feed) => {
                    health.ready("runs");
                    while let Some(delivery) = feed.next().await {
                        let item = delivery.item;
                        if item.session.gateway != self.gateway() {
                            continue;
                        }
                        if let RunEvent::Tool { call, name, phase: ToolPhase::Start, data, .. } = item.what {
                            let digest = data.and_then(|d| Some(d.get(DIGEST)?.as_str()?.to_owned()));
                            let (session, run) = (item.session, item.run);
                            self.started(ToolStart {
                                session,
                                run,
                                call,
                                name,
                                digest,
                                at: Instant::now(),
                                at_time: SystemTime::now(),
                            });
                        }
                    }
                    return;
                }
                Err(error) => {
                    tracing::debug!(%error, "RUNS can't be followed yet");
                    tokio::time::sleep(Duration::from_millis(500)).await;
                }
            }
        }
    }

    fn started(&self, start: ToolStart) {
        {
            let mut starts = lock(&self.starts);
            while starts.front().is_some_and(|start| start.at.elapsed() > STARTS_KEPT) {
                starts.pop_front();
            }
            starts.push_back(start);
        }
        self.starts_seen.send_modify(|n| *n += 1);
    }

    /// The tool calls that started in the last 30 seconds, oldest first.
    pub fn tool_starts(&self) -> Vec<ToolStart> {
        let starts = lock(&self.starts);
        starts.iter().filter(|start| start.at.elapsed() <= STARTS_KEPT).cloned().collect()
    }

    /// Changes with every tool-call start.
    pub fn tool_starts_seen(&self) -> watch::Receiver<u64> {
        self.starts_seen.subscribe()
    }

    /// Opens the sealed answer of a decided entry, and masks its value from now on in what the run
    /// puts out. `None` where there is no sealed answer.
    ///
    /// # Errors
    /// When there is no key for it, or it does not belong to this entry.
    pub fn open_secret(&self, entry: &Entry) -> Result<Option<Zeroizing<String>>, SealError> {
        let Some(decision) = entry.decision() else {
            return Ok(None);
        };
        let (Outcome::Answered { answers }, DecidedBy::Reply { id, .. }) = (&decision.outcome, &decision.by)
        else {
            return Ok(None);
        };
        let sealed = answers.values().find_map(|answer| match answer {
            Answer::Sealed(sealed) => Some(sealed),
            _ => None,
        });
        let Some(sealed) = sealed else {
            return Ok(None);
        };
        let key = self.seal.as_ref().ok_or(SealError::BadKey)?;
        let value = key.open(sealed, &entry.key, id)?;
        self.secrets.hold(&entry.key, &value);
        Ok(Some(value))
    }

    /// The secrets of running runs.
    pub(crate) fn secrets(&self) -> &Secrets {
        &self.secrets
    }

    /// The configured private seal key.
    pub(crate) fn seal_key(&self) -> Option<&OpenKey> {
        self.seal.as_ref()
    }
}

/// Where `RUNS` carries an asking call's digest.
pub(crate) const DIGEST: &str = "args_sha256";

/// A digest of a call's arguments, whatever the order of their fields: by it an MCP call is bound
/// to the tool-call start that the Gateway reports.
pub fn args_digest(args: &serde_json::Value) -> String {
    fn write(value: &serde_json::Value, out: &mut Sha256) {
        match value {
            serde_json::Value::Object(fields) => {
                let mut names: Vec<_> = fields.keys().collect();
                names.sort();
                out.update(b"{");
                for name in names {
                    out.update(serde_json::Value::from(name.as_str()).to_string());
                    out.update(b":");
                    write(&fields[name], out);
                    out.update(b",");
                }
                out.update(b"}");
            }
            serde_json::Value::Array(items) => {
                out.update(b"[");
                for item in items {
                    write(item, out);
                    out.update(b",");
                }
                out.update(b"]");
            }
            plain => out.update(plain.to_string()),
        }
    }
    let mut hash = Sha256::new();
    write(args, &mut hash);
    hex::encode(hash.finalize())
}

/// A place in the list of those who wait for a question.
struct Waiting<'a> {
    adapter: &'a Adapter,
    key: &'a QuestionKey,
    receiver: watch::Receiver<Option<Arc<Stored<Entry>>>>,
}

impl<'a> Waiting<'a> {
    fn new(adapter: &'a Adapter, key: &'a QuestionKey) -> Self {
        let mut entries = lock(&adapter.entries);
        let known = entries.open.get(key).cloned();
        let sender = entries.waiting.entry(key.clone()).or_insert_with(|| watch::Sender::new(known));
        Self { adapter, key, receiver: sender.subscribe() }
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let mut entries = lock(&self.adapter.entries);
        // This receiver is still counted.
        if entries.waiting.get(self.key).is_some_and(|sender| sender.receiver_count() <= 1) {
            entries.waiting.remove(self.key);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
