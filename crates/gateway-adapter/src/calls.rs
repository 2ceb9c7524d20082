//! The life of a tool call that asks: opened, waited for, its outcome repeated until the call is
//! known to have it, cancelled by its client. The plugin's endpoint and the MCP server share it.
//!
//! The entry on the bus is the whole state of a call, so any replica can serve it at any time.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ask_bus::seal::SealError;
use ask_bus::trace::traceparent_of;
use ask_bus::{BusError, Stored};
use ask_core::call::{self, Gone};
use ask_core::entry::{Entry, Road};
use ask_core::key::{QuestionKey, SessionKey, call_question_id};
use ask_core::outcome::{CancelReason, Returned};
use ask_core::question::{Invalid, Question};
use ask_core::reply::{Reply, ReplyContent, Responder};
use ask_core::surface::Surface;
use ask_core::time::Timestamp;
use ask_core::wire::{ReplyRequest, ReplyResponse};
use serde_json::Value;
use tokio::net::TcpListener;
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tracing::Instrument as _;
use zeroize::Zeroizing;

use crate::adapter::Adapter;
use crate::{SERVICE, mcp, plugin, trace};

/// The tool that all roads of this module offer.
pub const TOOL: &str = "request_user_input";

/// Longest that a call may ask to wait.
pub(crate) const MAX_TIMEOUT: Duration = Duration::from_secs(24 * 3600);
/// How long the cancel of a call that has not come yet is remembered.
const CANCEL_KEPT: Duration = Duration::from_secs(600);
/// Pause before a question is closed again that could not be closed.
const CLOSE_AGAIN: Duration = Duration::from_secs(5);
/// How long a cancel is tried before its sender is told to repeat it.
const CANCEL_PATIENCE: Duration = Duration::from_secs(8);

/// Serves the calls of plugin and MCP clients until `shutdown`.
///
/// # Errors
/// When the listener fails.
pub(crate) async fn serve(
    adapter: Arc<Adapter>,
    listener: TcpListener,
    shutdown: CancellationToken,
) -> std::io::Result<()> {
    let (written, responses) = mpsc::unbounded_channel();
    let calls = Arc::new(Calls { adapter, cancelled: Mutex::default(), written });
    let overdue = close_overdue(calls.clone(), responses);
    let serve = axum::serve(listener, plugin::routes(calls.clone()).merge(mcp::routes(calls)))
        .with_graceful_shutdown(shutdown.cancelled_owned());
    tokio::select! {
        result = async { serve.await } => result,
        () = overdue => Ok(()),
    }
}

/// What all calls share.
pub(crate) struct Calls {
    pub adapter: Arc<Adapter>,
    /// Calls whose cancel came before they did, and when. Another replica may still open such a
    /// call; the end of its run then cancels it.
    cancelled: Mutex<HashMap<QuestionKey, Instant>>,
    /// Calls whose response was written, for clients that can't say that they have it.
    written: mpsc::UnboundedSender<QuestionKey>,
}

/// A tool call, as its road identifies it.
#[derive(Debug, Clone)]
pub(crate) struct Call {
    pub session: SessionKey,
    pub run: String,
    /// The same for all repetitions of one execution, and for nothing else.
    pub id: String,
    /// The gateway's own id of the call.
    pub tool_call: String,
    pub road: Road,
}

/// What a call asks.
#[derive(Debug)]
pub(crate) struct Asked {
    pub question: Question,
    /// How long it waits.
    pub timeout: Duration,
}

/// Why a call is not opened.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Refused {
    /// The question is too large for the bus.
    #[error("the question has {size} bytes, and at most {limit} can be asked; ask for less at once")]
    TooLarge { size: usize, limit: usize },
    #[error("the call id was used for another question; every call needs an id of its own")]
    Reused,
    #[error("the call was cancelled before it arrived")]
    Cancelled,
    /// Nothing is decided: the client repeats the call.
    #[error("{0}")]
    Bus(BusError),
}

impl From<BusError> for Refused {
    fn from(error: BusError) -> Self {
        match error {
            BusError::TooLarge { size, limit, .. } => Self::TooLarge { size, limit },
            other => Self::Bus(other),
        }
    }
}

/// What a call is told.
#[derive(Debug)]
pub(crate) struct CallResult {
    /// The entry's revision, by which the call acknowledges.
    pub revision: u64,
    pub text: String,
    pub details: Value,
    /// For the call alone; `text` does not hold it.
    pub secret: Option<Zeroizing<String>>,
}

/// What an acknowledgement does.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Acknowledged {
    /// The question is closed, now or earlier.
    Closed,
    Unknown,
    /// The entry had no outcome at the revision that was named; it is at the one given here.
    OtherRevision(u64),
}

impl Call {
    /// Made from session, run and call id alone, as the client sends them.
    pub(crate) fn key(&self) -> QuestionKey {
        let SessionKey { gateway, session } = &self.session;
        QuestionKey {
            gateway: gateway.clone(),
            session: session.clone(),
            run: self.run.clone(),
            question: call_question_id(gateway, session, &self.run, &self.id),
        }
    }
}

impl Calls {
    /// Reads the arguments of a call.
    ///
    /// # Errors
    /// What can't be asked, in words for the model.
    pub(crate) fn read(&self, args: &Value) -> Result<Asked, Invalid> {
        let timeout = timeout(args, self.adapter.config.questions.timeout())?;
        Ok(Asked { question: Question::from_tool_args(args)?, timeout })
    }

    /// Opens the question of a call, or finds it again.
    pub(crate) async fn open(self: &Arc<Self>, call: &Call, asked: &Asked) -> Result<(), Refused> {
        let key = call.key();
        if self.came_cancelled(&key) {
            return Err(Refused::Cancelled);
        }
        let stored = match self.adapter.bus.question(&key).await? {
            Some(stored) => stored,
            None => self.ask(&key, call, asked).await?,
        };
        if stored.value.question != asked.question {
            return Err(Refused::Reused);
        }
        // A cancel that came meanwhile may have found no entry.
        if self.came_cancelled(&key) {
            // Its failure is logged, and it goes on by itself.
            let _ = self.cancel(&key).await;
            return Err(Refused::Cancelled);
        }
        Ok(())
    }

    async fn ask(&self, key: &QuestionKey, call: &Call, asked: &Asked) -> Result<Stored<Entry>, Refused> {
        let began = self.adapter.tool_starts().into_iter().rev().find(|start| {
            start.session == call.session && start.run == call.run && start.call == call.tool_call
        });
        let span = trace::send_ask(key, TOOL, &call.tool_call, began.map(|start| start.at_time));
        let now = Timestamp::now();
        let (deadline, traceparent) = (now.plus(asked.timeout), traceparent_of(&span));
        let (key, question) = (key.clone(), asked.question.clone());
        let entry = Entry::ask(key, call.road, TOOL, &call.tool_call, question, now, deadline, traceparent);
        // The timeout is at least a second.
        let entry = entry.expect("a deadline in the future");
        Ok(self.adapter.bus.write_asked(&entry).instrument(span).await?)
    }

    /// Waits until the question is decided; `None` when this replica stops first.
    pub(crate) async fn decided(&self, key: &QuestionKey) -> Option<Arc<Stored<Entry>>> {
        tokio::select! {
            biased;
            decided = self.adapter.wait_decided(key) => Some(decided),
            () = self.adapter.shutdown.cancelled() => None,
        }
    }

    /// What the call of a decided entry is told; it may be told again and again.
    ///
    /// # Errors
    /// This replica can't open the secret; another one may.
    pub(crate) fn result(&self, decided: &Stored<Entry>) -> Result<CallResult, SealError> {
        let Stored { value: entry, revision } = decided;
        let told = |entry: &Entry, secret| {
            let result = call::told(entry).expect("the entry is decided");
            CallResult { revision: *revision, text: result.text, details: result.details, secret }
        };
        match self.adapter.open_secret(entry) {
            Ok(secret) => Ok(told(entry, secret)),
            Err(error @ SealError::NotAuthentic) => {
                tracing::error!(question = %entry.key, %error, "a secret can't be opened by anybody");
                Ok(told(&call::without_secret(entry), None))
            }
            Err(error) => Err(error),
        }
    }

    /// The call has the outcome of this revision.
    pub(crate) async fn acknowledge(
        &self,
        key: &QuestionKey,
        revision: u64,
    ) -> Result<Acknowledged, BusError> {
        let Some(stored) = self.adapter.bus.question(key).await? else {
            return Ok(Acknowledged::Unknown);
        };
        if stored.value.returned().is_some() {
            return Ok(Acknowledged::Closed);
        }
        // A late reply or a step may have moved the entry on since the outcome was handed over.
        let proof = match stored.revision == revision {
            true => call::acknowledged(&stored.value),
            false => {
                let history = self.adapter.bus.question_history(key).await?;
                let named = history.iter().find(|(then, _)| then.revision == revision);
                named.and_then(|(then, _)| call::acknowledged(&then.value))
            }
        };
        let Some(proof) = proof else {
            return Ok(Acknowledged::OtherRevision(stored.revision));
        };
        self.adapter.close(key, &proof).await?;
        Ok(Acknowledged::Closed)
    }

    /// The whole response was written to the client, which perhaps has not got it.
    pub(crate) fn was_written(&self, key: &QuestionKey) {
        // Nobody listens any more once the process stops.
        let _ = self.written.send(key.clone());
    }

    /// The client waits no longer: a pending question is cancelled, a decided one closed. It goes
    /// on by itself until that is written.
    ///
    /// # Errors
    /// It is not written yet; the client may repeat it.
    pub(crate) async fn cancel(self: &Arc<Self>, key: &QuestionKey) -> Result<(), String> {
        self.remember_cancel(key);
        let (calls, key) = (self.clone(), key.clone());
        let work = tokio::spawn(async move {
            let mut pause = Duration::from_millis(100);
            while let Err(error) = calls.try_cancel(&key).await {
                tracing::warn!(question = %key, %error, "the cancel of a call is not written yet");
                tokio::select! {
                    () = tokio::time::sleep(pause) => {}
                    () = calls.adapter.shutdown.cancelled() => return Err(error),
                }
                pause = (pause * 2).min(Duration::from_secs(5));
            }
            Ok(())
        });
        match tokio::time::timeout(CANCEL_PATIENCE, work).await {
            Ok(Ok(result)) => result,
            _ => Err("no router took it in time".into()),
        }
    }

    async fn try_cancel(&self, key: &QuestionKey) -> Result<(), String> {
        loop {
            let stored = self.adapter.bus.question(key).await.map_err(|e| e.to_string())?;
            let Some(stored) = stored else { return Ok(()) };
            self.forget_cancel(key);
            match call::gone(&stored.value, call::CALLER_CANCELLED) {
                Gone::Nothing => return Ok(()),
                Gone::Close(returned) => {
                    return self.adapter.close(key, &returned).await.map(drop).map_err(|e| e.to_string());
                }
                Gone::CancelFirst => {}
            }
            let by = Responder { user: SERVICE.name.into(), name: None, chat: None };
            let content = ReplyContent::Cancelled { reason: CancelReason::Caller };
            let id = format!("cancel-{}", key.question);
            let reply = Reply { id, by, surface: Surface::Gateway, content };
            let request = ReplyRequest { schema: ask_core::SCHEMA, key: key.clone(), reply };
            match self.adapter.bus.outcome(&request).await {
                Ok(ReplyResponse::Saved | ReplyResponse::Closed { .. }) => {}
                Ok(other) => return Err(format!("the router answered {other:?}")),
                Err(error) => return Err(error.to_string()),
            }
        }
    }

    fn came_cancelled(&self, key: &QuestionKey) -> bool {
        self.cancelled().get(key).is_some_and(|at| at.elapsed() < CANCEL_KEPT)
    }

    fn remember_cancel(&self, key: &QuestionKey) {
        let mut cancelled = self.cancelled();
        cancelled.retain(|_, at| at.elapsed() < CANCEL_KEPT);
        cancelled.insert(key.clone(), Instant::now());
    }

    /// The entry itself says it from now on.
    fn forget_cancel(&self, key: &QuestionKey) {
        self.cancelled().remove(key);
    }

    fn cancelled(&self) -> MutexGuard<'_, HashMap<QuestionKey, Instant>> {
        self.cancelled.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The time that the call may wait: its own `timeout_seconds`, cut to what is allowed.
fn timeout(args: &Value, default: Duration) -> Result<Duration, Invalid> {
    let asked = match args.get("timeout_seconds") {
        None | Some(Value::Null) => return Ok(default),
        Some(asked) => asked,
    };
    let seconds = asked.as_f64().or_else(|| asked.as_str()?.parse().ok()).filter(|s| s.is_finite());
    let limit = || format!("a number of seconds from 1 to {}", MAX_TIMEOUT.as_secs());
    let seconds = seconds.ok_or_else(|| Invalid::new("timeout_seconds", limit(), asked))?;
    Ok(Duration::from_secs_f64(seconds.clamp(1.0, MAX_TIMEOUT.as_secs_f64())))
}

/// Closes decided questions whose outcome nobody will fetch any more, each at its time.
async fn close_overdue(calls: Arc<Calls>, mut responses: mpsc::UnboundedReceiver<QuestionKey>) {
    let mut changes = calls.adapter.entry_changes();
    calls.adapter.entries_loaded().await;
    let mut overdue = Overdue::default();
    let load = |overdue: &mut Overdue| {
        for stored in calls.adapter.open_entries() {
            overdue.learn(&stored.value);
        }
    };
    load(&mut overdue);
    loop {
        let wait = overdue.next().map_or(Duration::MAX, |at| at.since(Timestamp::now()));
        tokio::select! {
            change = changes.recv() => match change {
                Ok(entry) => overdue.learn(&entry.value),
                Err(RecvError::Lagged(_)) => load(&mut overdue),
                Err(RecvError::Closed) => return,
            },
            Some(key) = responses.recv() => {
                if let Some(stored) = calls.adapter.open_entry(&key) {
                    overdue.written.insert(key, Timestamp::now());
                    overdue.learn(&stored.value);
                }
            }
            () = tokio::time::sleep(wait) => {
                let Some(key) = overdue.pop() else { continue };
                let Some(stored) = calls.adapter.open_entry(&key) else { continue };
                let Some(why) = overdue.is_over(&stored.value, Timestamp::now()) else { continue };
                match calls.adapter.close(&key, &Returned::Unconfirmed { why: why.into() }).await {
                    // For a client that has no runs this is the end of one.
                    Ok(_) if stored.value.road == Road::McpAlone => {
                        calls.adapter.secrets().forget(&key.session, &key.run);
                    }
                    Ok(_) => {}
                    Err(error) => {
                        tracing::warn!(question = %key, %error, "not closed yet");
                        overdue.alarms.push(Reverse((Timestamp::now().plus(CLOSE_AGAIN), key)));
                    }
                }
            }
        }
    }
}

/// When to look whether the outcome of a question is still waited for.
#[derive(Default)]
struct Overdue {
    alarms: BinaryHeap<Reverse<(Timestamp, QuestionKey)>>,
    /// When the responses were written of questions that are not closed. Only this process knows
    /// it; another one keeps the question longer.
    written: HashMap<QuestionKey, Timestamp>,
}

impl Overdue {
    fn learn(&mut self, entry: &Entry) {
        if entry.returned().is_some() {
            self.written.remove(&entry.key);
        } else if let Some((at, _)) = self.closes(entry) {
            self.alarms.push(Reverse((at, entry.key.clone())));
        }
    }

    fn closes(&self, entry: &Entry) -> Option<(Timestamp, &'static str)> {
        call::closes_by_itself(entry, self.written.get(&entry.key).copied())
    }

    fn next(&self) -> Option<Timestamp> {
        self.alarms.peek().map(|Reverse((at, _))| *at)
    }

    fn pop(&mut self) -> Option<QuestionKey> {
        self.alarms.pop().map(|Reverse((_, key))| key)
    }

    /// Why the question is to be closed now; another alarm is set where it is too early, since its
    /// response was written again.
    fn is_over(&mut self, entry: &Entry, now: Timestamp) -> Option<&'static str> {
        let (at, why) = self.closes(entry)?;
        if at <= now {
            return Some(why);
        }
        self.learn(entry);
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ask_core::outcome::Undeliverable;
    use ask_core::question::Prompt;

    #[test]
    fn a_client_without_proof_keeps_its_outcome_for_a_minute_after_the_last_response() {
        const MINUTE: u64 = 60_000;
        let question = Question::new(vec![Prompt::free_text("Where?")]).unwrap();
        let key: QuestionKey = "g.s.r.q".parse().unwrap();
        let pending =
            Entry::ask(key.clone(), Road::McpAlone, TOOL, "c", question, Timestamp(0), Timestamp(9), None);
        let decided =
            pending.unwrap().undeliverable(Undeliverable::Refused, "refused", Timestamp(1)).unwrap();
        let mut overdue = Overdue::default();
        overdue.learn(&decided);
        assert_eq!(overdue.is_over(&decided, Timestamp(60 * MINUTE)), None, "nobody has fetched it");
        for written in [60 * MINUTE, 60 * MINUTE + 30_000] {
            overdue.written.insert(key.clone(), Timestamp(written));
            overdue.learn(&decided);
        }
        assert_eq!(overdue.next(), Some(Timestamp(61 * MINUTE)));
        assert_eq!(overdue.pop(), Some(key));
        assert_eq!(overdue.is_over(&decided, Timestamp(61 * MINUTE)), None);
        let last = overdue.next().unwrap();
        assert_eq!(last, Timestamp(61 * MINUTE + 30_000));
        assert_eq!(overdue.is_over(&decided, last), Some(call::NO_PROOF));
        overdue.learn(&decided.close(Returned::Unconfirmed { why: "x".into() }, last).unwrap());
        assert!(overdue.written.is_empty());
    }
}
