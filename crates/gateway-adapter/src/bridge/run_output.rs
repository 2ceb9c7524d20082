//! What runs put out: from the Gateway's events to `RUNS`, by one task per run.
//!
//! Text comes from the `chat` events alone, which carry all text of a run so far: so a piece that
//! is lost, repeated or rewritten on the way shows by itself.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ask_bus::BusError;
use ask_core::SCHEMA;
use ask_core::entry::Road;
use ask_core::key::SessionKey;
use ask_core::outcome::{CancelReason, Outcome};
use ask_core::question::clamp;
use ask_core::wire::{RunEnd, RunEvent, RunItem, ToolPhase};
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;
use zeroize::Zeroizing;

use super::questions::Pause;
use super::reconcile;
use crate::adapter::{Adapter, DIGEST, args_digest};
use crate::openclaw::frames::{self, ToolFrame};

/// How long text is joined before it goes out.
const JOIN: Duration = Duration::from_millis(30);
/// What may wait for one run's task.
const FACTS: usize = 4096;
/// How long the end of a run may be told after its agent is done.
const UNTOLD: Duration = Duration::from_secs(15);
/// How many ended runs are remembered, so that a straggling event does not begin them anew.
const ENDED: usize = 512;
/// Larger arguments and results of tools are not put out.
const MAX_DATA: usize = 64 * 1024;
/// Longest piece of text in one item, in bytes.
const MAX_PIECE: usize = 128 * 1024;
const MAX_TITLE: usize = 160;
/// What an agent says to say nothing.
const SENTINELS: [&str; 2] = ["NO_REPLY", "ANNOUNCE_SKIP"];
/// A repetition shorter than this is taken for a coincidence.
const MIN_OVERLAP: usize = 16;
const WITHHELD: &str = "The agent's text is not shown: askbus was restarted after a secret was given in this \
                        run, and can't hide it any more. The gateway's own chat has the text.";

/// What is known about a run.
#[derive(Debug)]
pub(super) enum Fact {
    /// It began.
    Started { seq: u64 },
    /// All its text so far.
    Text { seq: u64, whole: String },
    /// More of its text.
    MoreText { seq: u64, text: String, replace: bool },
    /// A line for people about a call.
    Title { call: String, title: String },
    /// A tool call began, went on or ended.
    Tool { seq: u64, tool: Box<ToolFrame> },
    /// It ended; `how` is `None` for an ordinary end. What its calls still ask is cancelled for
    /// `cancels`.
    Ended { seq: u64, how: Option<RunEnd>, text: Option<String>, cancels: CancelReason },
}

impl Fact {
    /// The end of a run as the Gateway tells it.
    pub(super) fn ended(seq: u64, how: Option<RunEnd>, text: Option<String>) -> Self {
        Self::Ended { seq, how, text, cancels: CancelReason::RunEnded }
    }
}

type RunKey = (String, String);

/// The runs of a gateway, as long as this replica works for it.
pub(super) struct Runs {
    adapter: Arc<Adapter>,
    stop: CancellationToken,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    tasks: HashMap<RunKey, mpsc::Sender<Fact>>,
    /// What the Gateway works on, by session.
    active: HashMap<String, Vec<String>>,
    ended: VecDeque<RunKey>,
    /// Sessions whose active runs are known on this connection.
    known: HashSet<String>,
}

impl Runs {
    pub(super) fn new(adapter: Arc<Adapter>, stop: CancellationToken) -> Arc<Self> {
        Arc::new(Self { adapter, stop, inner: Mutex::default() })
    }

    /// Takes a fact about a run into account.
    pub(super) fn feed(self: &Arc<Self>, session: &str, run: &str, fact: Fact) {
        let key: RunKey = (session.into(), run.into());
        let mut inner = self.lock();
        if inner.ended.contains(&key) {
            if !matches!(fact, Fact::Started { .. }) {
                return;
            }
            inner.ended.retain(|ended| *ended != key);
        }
        match &fact {
            Fact::Started { .. } => {
                let active = inner.active.entry(session.into()).or_default();
                if !active.iter().any(|r| r == run) {
                    active.push(run.into());
                }
            }
            Fact::Ended { .. } => {
                if let Some(active) = inner.active.get_mut(session) {
                    active.retain(|r| r != run);
                }
            }
            _ => {}
        }
        let task = inner.tasks.entry(key.clone()).or_insert_with(|| {
            let (sender, facts) = mpsc::channel(FACTS);
            let fresh = matches!(fact, Fact::Started { .. });
            let task = Task::new(self.clone(), key.clone(), fresh);
            tokio::spawn(self.stop.clone().run_until_cancelled_owned(task.run(facts)));
            sender
        });
        // Text that does not fit is in the next piece, which holds it all.
        if let Err(mpsc::error::TrySendError::Full(fact)) = task.try_send(fact)
            && !matches!(fact, Fact::Text { .. } | Fact::Title { .. })
        {
            let task = task.clone();
            tokio::spawn(async move { task.send(fact).await });
        }
    }

    /// The Gateway's agent is done with a run, whose end still has to be told. A run that is hidden
    /// from chats has no other end than this.
    pub(super) fn settled(self: &Arc<Self>, session: &str, run: &str) {
        if let Some(active) = self.lock().active.get_mut(session) {
            active.retain(|r| r != run);
        }
        let (runs, key) = (self.clone(), (session.to_owned(), run.to_owned()));
        let wait = self.stop.clone().run_until_cancelled_owned(async move {
            tokio::time::sleep(UNTOLD).await;
            let is_open = {
                let inner = runs.lock();
                let active = inner.active.get(&key.0).is_some_and(|active| active.contains(&key.1));
                inner.tasks.contains_key(&key) && !active
            };
            if is_open {
                runs.feed(&key.0, &key.1, Fact::ended(0, None, None));
            }
        });
        tokio::spawn(wait);
    }

    /// The run that the Gateway works on in this session.
    pub(super) fn active(&self, session: &str) -> Option<String> {
        self.lock().active.get(session)?.first().cloned()
    }

    /// Whether [`Runs::active`] can be relied on: events tell it only from the connection on.
    pub(super) fn is_known(&self, session: &str) -> bool {
        self.lock().known.contains(session)
    }

    /// What the Gateway itself says about a session.
    pub(super) fn set_active(&self, session: &str, runs: Vec<String>) {
        let mut inner = self.lock();
        inner.known.insert(session.into());
        inner.active.insert(session.into(), runs);
    }

    /// A new connection: events may have been missed.
    pub(super) fn forget_known(&self) {
        self.lock().known.clear();
    }

    /// The runs that have not ended, as far as this replica has followed them.
    pub(super) fn open(&self) -> Vec<RunKey> {
        self.lock().tasks.keys().cloned().collect()
    }

    fn ended(&self, key: &RunKey) {
        let mut inner = self.lock();
        inner.tasks.remove(key);
        if inner.ended.len() == ENDED {
            inner.ended.pop_front();
        }
        inner.ended.push_back(key.clone());
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The task of one run.
struct Task {
    runs: Arc<Runs>,
    key: RunKey,
    session: SessionKey,
    /// What was put out before is known: nothing, or read from `RUNS`.
    is_read: bool,
    started: bool,
    /// All text that came, and all that went out of it, before masking.
    received: Zeroizing<String>,
    said: Zeroizing<String>,
    text_seq: u64,
    tool_seq: u64,
    put_at: Option<Instant>,
    titles: HashMap<String, String>,
    asking: HashSet<String>,
}

impl Task {
    fn new(runs: Arc<Runs>, key: RunKey, fresh: bool) -> Self {
        let session = runs.adapter.session(&key.0);
        Self {
            runs,
            key,
            session,
            is_read: fresh,
            started: false,
            received: Zeroizing::default(),
            said: Zeroizing::default(),
            text_seq: 0,
            tool_seq: 0,
            put_at: None,
            titles: HashMap::new(),
            asking: HashSet::new(),
        }
    }

    async fn run(mut self, mut facts: mpsc::Receiver<Fact>) {
        let mut due: Option<(Instant, u64)> = None;
        loop {
            let fact = tokio::select! {
                biased;
                fact = facts.recv() => fact,
                () = sleep_until(due.map_or_else(Instant::now, |(at, _)| at)), if due.is_some() => {
                    let (_, seq) = due.take().unwrap_or((Instant::now(), 0));
                    self.put_text(seq, false).await;
                    continue;
                }
            };
            let Some(fact) = fact else { return };
            match fact {
                Fact::Started { seq } => {
                    if !std::mem::replace(&mut self.started, true) {
                        self.put(seq, RunEvent::Started).await;
                    }
                }
                Fact::Text { seq, whole } => {
                    self.received = Zeroizing::new(whole);
                    due = self.join(due, seq).await;
                }
                Fact::MoreText { seq, text, replace } => {
                    if replace {
                        self.received.clear();
                    }
                    self.received.push_str(&text);
                    due = self.join(due, seq).await;
                }
                Fact::Title { call, title } => {
                    self.titles.insert(call, title);
                }
                Fact::Tool { seq, tool } => {
                    if let Some((_, seq)) = due.take() {
                        self.put_text(seq, false).await;
                    }
                    if seq > self.tool_seq {
                        self.tool_seq = seq;
                        self.put_tool(seq, *tool).await;
                    }
                }
                Fact::Ended { seq, how, text, cancels } => {
                    self.end(seq, how, text, cancels).await;
                    self.runs.ended(&self.key);
                    return;
                }
            }
        }
    }

    /// Text goes out at once, or joined with what follows; then this is when.
    async fn join(&mut self, due: Option<(Instant, u64)>, seq: u64) -> Option<(Instant, u64)> {
        match self.put_at.map(|at| at + JOIN).filter(|at| *at > Instant::now()) {
            Some(at) => Some((due.map_or(at, |(at, _)| at), seq)),
            None => {
                self.put_text(seq, false).await;
                None
            }
        }
    }

    async fn put_text(&mut self, seq: u64, to_the_end: bool) {
        self.read_before().await;
        if self.is_withheld() {
            return;
        }
        while let Some(text) = self.next_piece(to_the_end) {
            // Two pieces of one event: the second has no number of its own.
            let seq = if seq > self.text_seq { seq } else { 0 };
            self.text_seq = self.text_seq.max(seq);
            self.put(seq, RunEvent::Text { text }).await;
        }
        self.put_at = Some(Instant::now());
    }

    /// The next piece of text, masked; what may become a secret or a sentinel waits.
    fn next_piece(&mut self, to_the_end: bool) -> Option<String> {
        if !to_the_end && may_be_sentinel(&self.received) {
            return None;
        }
        let mask = self.runs.adapter.secrets().mask(&self.key.0, &self.key.1);
        let rest = rest_of(&self.said, &self.received);
        let held_back = if to_the_end { 0 } else { mask.held_back(rest) };
        let mut end = rest.len() - held_back;
        if end > MAX_PIECE {
            end = (0..=MAX_PIECE).rev().find(|at| rest.is_char_boundary(*at)).unwrap_or(end);
            // A value that is cut in two would not be seen.
            let cut = end - mask.held_back(&rest[..end]);
            end = if cut > 0 { cut } else { rest.len() - held_back };
        }
        let piece = &rest[..end];
        if piece.is_empty() {
            return None;
        }
        let shown = mask.text(piece);
        let piece = Zeroizing::new(piece.to_owned());
        self.said.push_str(&piece);
        Some(shown)
    }

    async fn put_tool(&mut self, seq: u64, tool: ToolFrame) {
        let call = tool.tool_call_id.clone();
        let asking = is_asking(&tool.name) || names_asking(&tool.args) || self.asking.contains(&call);
        if asking {
            self.asking.insert(call.clone());
            // The call it is nested in holds the same arguments and result.
            self.asking.extend(tool.parent_tool_call_id.clone());
        }
        if asking && tool.phase == frames::ToolPhase::Result {
            self.hold_secrets().await;
        }
        let mask = self.runs.adapter.secrets().mask(&self.key.0, &self.key.1);
        let (phase, data) = match tool.phase {
            frames::ToolPhase::Start => (ToolPhase::Start, tool.args),
            frames::ToolPhase::Update => (ToolPhase::Update, tool.partial_result),
            frames::ToolPhase::Result => (ToolPhase::End, tool.result),
        };
        let data = match (asking, phase) {
            (true, ToolPhase::Start) => Some(json!({ DIGEST: args_digest(&data) })),
            (true, _) | (false, _) if asking || self.is_withheld() => None,
            _ => Some(data).filter(|d| !d.is_null() && d.to_string().len() <= MAX_DATA).map(|d| mask.data(d)),
        };
        let title = self.titles.get(&call).cloned().or(tool.meta);
        let title = title.map(|title| {
            let line = title.split_whitespace().collect::<Vec<_>>().join(" ");
            clamp(&mask.text(&line), MAX_TITLE)
        });
        let title = title.filter(|title| !title.is_empty() && !self.is_withheld());
        let ok = (phase == ToolPhase::End).then_some(!tool.is_error);
        self.put(seq, RunEvent::Tool { call, name: tool.name, phase, title, data, ok }).await;
    }

    async fn end(&mut self, seq: u64, how: Option<RunEnd>, text: Option<String>, cancels: CancelReason) {
        let text = text.filter(|text| !text.is_empty() && !is_sentinel(text));
        let how = how.unwrap_or(if text.is_some() || self.started || !self.said.is_empty() {
            RunEnd::Done
        } else {
            RunEnd::Empty
        });
        // Nothing was put out for a message that went into another run: nothing to read.
        if how != RunEnd::Empty {
            self.read_before().await;
        }
        match &text {
            Some(text) => self.received = Zeroizing::new(text.clone()),
            None if may_be_sentinel(&self.received) => self.received.clear(),
            None => {}
        }
        self.put_text(seq, true).await;
        let secrets = self.runs.adapter.secrets();
        let mask = secrets.mask(&self.key.0, &self.key.1);
        let text = match self.is_withheld() {
            false => text.map(|text| mask.text(&text)),
            true => text.map(|_| WITHHELD.to_owned()),
        };
        let was_run = how != RunEnd::Empty;
        let how = match how {
            RunEnd::Error { .. } if self.is_withheld() => RunEnd::Error { message: WITHHELD.to_owned() },
            RunEnd::Error { message } => RunEnd::Error { message: mask.text(&message) },
            how => how,
        };
        self.put(seq, RunEvent::Ended { how, text }).await;
        if was_run {
            reconcile::run_ended(&self.runs.adapter, &self.key.0, &self.key.1, cancels);
        }
        secrets.forget(&self.key.0, &self.key.1);
    }

    fn is_withheld(&self) -> bool {
        self.runs.adapter.secrets().lost(&self.key.0, &self.key.1)
    }

    /// Reads what a replica before this one has put out of the run.
    async fn read_before(&mut self) {
        if std::mem::replace(&mut self.is_read, true) {
            return;
        }
        let bus = &self.runs.adapter.bus;
        let mut pause = Pause::default();
        loop {
            match bus.replay_runs(&self.session, 0).await {
                Ok(items) => {
                    let said = items.into_iter().filter(|d| d.item.run == self.key.1);
                    for delivery in said {
                        match delivery.item.what {
                            RunEvent::Text { text } => self.said.push_str(&text),
                            RunEvent::Started => self.started = true,
                            _ => {}
                        }
                    }
                    break;
                }
                Err(error) => tracing::warn!(%error, "RUNS was not read; trying again"),
            }
            pause.wait().await;
        }
        self.hold_secrets().await;
    }

    /// Has all secrets at hand that calls of this run have got by now. What comes from the Gateway
    /// may be ahead of what this replica follows on the bus.
    async fn hold_secrets(&self) {
        let mut pause = Pause::default();
        let entries = loop {
            match self.runs.adapter.bus.questions_of(&self.session).await {
                Ok(entries) => break entries,
                Err(error) => tracing::warn!(%error, "entries were not read; trying again"),
            }
            pause.wait().await;
        };
        for entry in entries.iter().map(|stored| &stored.value).filter(|e| e.key.run == self.key.1) {
            let answered = matches!(entry.decision().map(|d| &d.outcome), Some(Outcome::Answered { .. }));
            if entry.question.is_secret() && answered && entry.road != Road::Native {
                hold_secret(&self.runs.adapter, entry);
            }
        }
    }

    async fn put(&self, seq: u64, what: RunEvent) {
        put(&self.runs.adapter, &self.key.0, &self.key.1, seq, what).await;
    }
}

/// Writes an item of a run; goes on until it is written.
pub(super) async fn put(adapter: &Adapter, session: &str, run: &str, seq: u64, what: RunEvent) {
    let mut item = RunItem { schema: SCHEMA, session: adapter.session(session), run: run.into(), seq, what };
    let mut pause = Pause::default();
    loop {
        match adapter.bus.write_run(&item).await {
            Ok(_) => return,
            Err(BusError::TooLarge { size, limit, .. }) => {
                tracing::error!(run, size, limit, "output of a run is too large for the bus");
                match &mut item.what {
                    RunEvent::Ended { text, .. } if text.is_some() => *text = None,
                    RunEvent::Tool { data, .. } if data.is_some() => *data = None,
                    _ => return,
                }
                continue;
            }
            Err(error) => tracing::warn!(%error, "output of a run was not written; trying again"),
        }
        pause.wait().await;
    }
}

/// Has the value of a call's secret at hand for masking; where that can't be, the run's text is
/// withheld.
pub(super) fn hold_secret(adapter: &Adapter, entry: &ask_core::entry::Entry) {
    if adapter.secrets().holds(&entry.key) {
        return;
    }
    match adapter.open_secret(entry) {
        Ok(Some(_)) => {}
        Ok(None) => adapter.secrets().lose(&entry.key),
        Err(error) => {
            tracing::error!(question = %entry.key, %error, "a secret can't be masked; its run is not shown");
            adapter.secrets().lose(&entry.key);
        }
    }
}

/// The tools whose arguments and results are questions and answers.
pub(super) fn is_asking(name: &str) -> bool {
    matches!(name, "ask_user" | "request_user_input" | "secrets") || name.ends_with("__request_user_input")
}

/// A call of a tool that calls another one, by name.
fn names_asking(args: &Value) -> bool {
    let direct = |name: &str| args[name].as_str().is_some_and(is_asking);
    direct("id") || direct("name") || direct("tool")
}

fn is_sentinel(text: &str) -> bool {
    SENTINELS.contains(&text.trim())
}

fn may_be_sentinel(text: &str) -> bool {
    let text = text.trim();
    !text.is_empty() && SENTINELS.iter().any(|sentinel| sentinel.starts_with(text))
}

/// What of `received` was not said yet. A text that was rewritten has nothing to append: all of it
/// comes with the end of the run.
fn rest_of<'a>(said: &str, received: &'a str) -> &'a str {
    if let Some(rest) = received.strip_prefix(said) {
        return rest;
    }
    // The end of a run comes without the white space at its ends.
    let bare = said.trim();
    if let Some(rest) = received.trim_start().strip_prefix(bare) {
        let gap = &said[said.trim_end().len()..];
        return rest
            .strip_prefix(gap)
            .unwrap_or_else(|| if gap.is_empty() { rest } else { rest.trim_start() });
    }
    if bare.ends_with(received.trim()) {
        return "";
    }
    // Of a very long text the Gateway sends only the end.
    let overlap = said.char_indices().map(|(at, _)| &said[at..]).find(|tail| received.starts_with(tail));
    match overlap {
        Some(tail) if tail.len() >= MIN_OVERLAP => &received[tail.len()..],
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_appended_and_never_doubled() {
        let table = [
            ("", "Hel", "Hel"),
            ("Hel", "Hello", "lo"),
            ("Hello", "Hello", ""),
            ("Hello ", "Hello", ""),
            ("  Hello", "Hello you", " you"),
            ("Hello\n", "Hello\nyou", "you"),
            ("Hello\n\n", "Hello you", "you"),
            // A catch-all at the end repeats the last words, or all.
            ("first. second", "second", ""),
            // Rewritten: nothing to append.
            ("I think", "You know", ""),
            // The window of a very long text moved on.
            ("abcdefghijklmnopqrstuvwxyz", "klmnopqrstuvwxyz and more", " and more"),
            ("ends with an a", "a new text", ""),
        ];
        for (said, received, rest) in table {
            assert_eq!(rest_of(said, received), rest, "{said:?} then {received:?}");
        }
    }

    #[test]
    fn sentinels_are_not_said_nor_their_beginnings() {
        for (text, whole, beginning) in [
            ("NO_REPLY", true, true),
            (" NO_RE", false, true),
            ("NO_REPLY to that", false, false),
            ("", false, false),
        ] {
            assert_eq!((is_sentinel(text), may_be_sentinel(text)), (whole, beginning), "{text}");
        }
    }

    #[test]
    fn asking_tools_are_known_by_every_name() {
        for name in ["ask_user", "request_user_input", "askbus__request_user_input", "secrets"] {
            assert!(is_asking(name), "{name}");
        }
        assert!(!is_asking("read"));
        assert!(names_asking(&json!({"id": "ask_user", "args": {}})));
        assert!(!names_asking(&json!({"question": "ask_user"})));
    }
}
