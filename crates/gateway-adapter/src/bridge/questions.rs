//! The Gateway's own questions: each has a task per connection, from the question to its return.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use ask_bus::trace::{continue_from, traceparent_of};
use ask_bus::{BusError, Stored};
use ask_core::SCHEMA;
use ask_core::entry::{Entry, Road};
use ask_core::key::QuestionKey;
use ask_core::native::{forgotten_pending, gateway_reply_id};
use ask_core::outcome::{CancelReason, Outcome};
use ask_core::question::{Choice, Invalid, MAX_HEADER, Prompt, Question, clamp};
use ask_core::reply::{Answer, MAX_ANSWER, Reply, ReplyContent, Responder};
use ask_core::surface::Surface;
use ask_core::time::Timestamp;
use ask_core::wire::{ReplyRequest, ReplyResponse};
use tokio::sync::watch;
use tokio::time::sleep;
use tracing::Instrument;

use super::link::Link;
use super::returns;
use super::transcript::{self, Search};
use crate::adapter::Adapter;
use crate::openclaw::calls::{History, question_id};
use crate::openclaw::frames::{Answers, QUESTION_NOT_FOUND, QuestionRecord, QuestionStatus};
use crate::trace;

/// Stands in a key where the Gateway names no session or no run.
const NONE: &str = "-";
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// Tool-call starts whose question has not come.
const MAX_STARTS: usize = 256;

/// The native questions of one connection.
#[derive(Default)]
pub(super) struct Native {
    live: Mutex<HashMap<String, Live>>,
    starts: Mutex<HashMap<String, Start>>,
}

struct Live {
    session: String,
    /// The Gateway says that it has an outcome.
    settled: watch::Sender<bool>,
}

/// The tool call that a question belongs to.
struct Start {
    call: String,
    tool: String,
    at: SystemTime,
}

impl Native {
    /// A tool call began that may ask.
    pub(super) fn call_started(&self, run: &str, call: &str, tool: &str) {
        let mut starts = lock(&self.starts);
        if starts.len() < MAX_STARTS {
            let start = Start { call: call.into(), tool: tool.into(), at: SystemTime::now() };
            starts.insert(question_id(run, call), start);
        }
    }

    /// A tool call is over, whether it asked or not.
    pub(super) fn call_ended(&self, run: &str, call: &str) {
        lock(&self.starts).remove(&question_id(run, call));
    }

    /// The Gateway says that this question has its outcome.
    pub(super) fn settled(&self, id: &str) {
        if let Some(live) = lock(&self.live).get(id) {
            live.settled.send_replace(true);
        }
    }

    /// True while a message to this session would become an answer (rules S6, S7), as far as this
    /// connection has been told.
    pub(super) fn is_open(&self, session: &str) -> bool {
        lock(&self.live).values().any(|live| live.session == session)
    }

    fn begin(&self, id: &str, session: &str, settled: bool) -> Option<watch::Receiver<bool>> {
        let mut live = lock(&self.live);
        if let Some(known) = live.get(id) {
            known
                .settled
                .send_if_modified(|was| std::mem::replace(was, *was || settled) != (*was || settled));
            return None;
        }
        let (sender, receiver) = watch::channel(settled);
        live.insert(id.into(), Live { session: session.into(), settled: sender });
        Some(receiver)
    }

    fn reopen(&self, id: &str) {
        if let Some(live) = lock(&self.live).get(id) {
            live.settled.send_replace(false);
        }
    }

    fn end(&self, id: &str) {
        lock(&self.live).remove(id);
    }
}

impl Link {
    /// A question of the Gateway that waits: opened, or listed on a new connection.
    pub(super) fn asked(self: &Arc<Self>, record: QuestionRecord) {
        let key = key_of(self.adapter.gateway(), &record);
        let Some(settled) = self.native.begin(&record.id, &key.session, false) else {
            return;
        };
        self.spawn_life(key, Some(record), settled);
    }

    /// A question on record that the Gateway does not list (any more).
    pub(super) fn not_listed(self: &Arc<Self>, entry: &Entry) {
        let key = entry.key.clone();
        if let Some(settled) = self.native.begin(&key.question, &key.session, entry.is_pending()) {
            self.spawn_life(key, None, settled);
        }
    }

    fn spawn_life(
        self: &Arc<Self>,
        key: QuestionKey,
        record: Option<QuestionRecord>,
        settled: watch::Receiver<bool>,
    ) {
        let link = self.clone();
        tokio::spawn(async move {
            let stop = link.stop.clone();
            stop.run_until_cancelled(Box::pin(link.life(&key, record, settled))).await;
            link.native.end(&key.question);
        });
    }

    async fn life(
        self: &Arc<Self>,
        key: &QuestionKey,
        record: Option<QuestionRecord>,
        mut settled: watch::Receiver<bool>,
    ) {
        if let Some(record) = record
            && !self.open(key, &record).await
        {
            // It is left to the Gateway's own surfaces, and no message may become its answer.
            let _ = settled.wait_for(|settled| *settled).await;
            return;
        }
        let decided = loop {
            tokio::select! {
                decided = self.adapter.wait_decided(key) => break decided,
                _ = settled.wait_for(|settled| *settled) => {}
            }
            if self.take_gateway_outcome(key).await {
                break self.adapter.wait_decided(key).await;
            }
            self.native.reopen(&key.question);
        };
        returns::give_back(self, &decided).await;
    }

    /// First durable write. False for a question that can't be asked here.
    async fn open(&self, key: &QuestionKey, record: &QuestionRecord) -> bool {
        let start = lock(&self.native.starts).remove(&record.id);
        let began = start.as_ref().map(|start| start.at);
        let (call, tool) =
            start.map_or_else(|| (String::new(), "ask_user".to_owned()), |start| (start.call, start.tool));
        let question = match question_of(record) {
            Ok(question) => question,
            Err(invalid) => {
                tracing::error!(question = record.id, %invalid, "a question of the gateway can't be asked here");
                return false;
            }
        };
        let whole = record.expires_at_ms.saturating_sub(record.created_at_ms).max(0) as u64;
        let margin = self.adapter.config.questions.native_margin().min(Duration::from_millis(whole / 5));
        let deadline = Timestamp(record.expires_at_ms.max(0) as u64).minus(margin);
        let span = trace::send_ask(key, &tool, &call, began);
        let (now, traceparent) = (Timestamp::now(), traceparent_of(&span));
        let entry = Entry::ask(key.clone(), Road::Native, &tool, &call, question, now, deadline, traceparent);
        let entry = match entry {
            Ok(entry) => entry,
            // It may have been asked before: then its life goes on.
            Err(late) => {
                let known = self.read(key).await.is_some();
                if !known {
                    tracing::info!(question = record.id, %late, "a question of the gateway came too late");
                }
                return known;
            }
        };
        let mut pause = Pause::default();
        loop {
            match self.adapter.bus.write_asked(&entry).instrument(span.clone()).await {
                Ok(_) => return true,
                Err(BusError::TooLarge { size, limit, .. }) => {
                    tracing::error!(question = record.id, size, limit, "a question is too large for the bus");
                    return false;
                }
                Err(error) => tracing::warn!(%error, "a question was not written; trying again"),
            }
            pause.wait().await;
        }
    }

    async fn read(&self, key: &QuestionKey) -> Option<Stored<Entry>> {
        let mut pause = Pause::default();
        loop {
            match self.adapter.bus.question(key).await {
                Ok(read) => return read,
                Err(error) => tracing::warn!(%error, "an entry was not read; trying again"),
            }
            pause.wait().await;
        }
    }

    /// Hands the Gateway's outcome of a pending question to the routers. False when the Gateway
    /// still waits for one.
    async fn take_gateway_outcome(&self, key: &QuestionKey) -> bool {
        let Some(stored) = self.read(key).await else {
            return true;
        };
        if !stored.value.is_pending() {
            return true;
        }
        let mut pause = Pause::default();
        let ((id, content), by) = loop {
            match self.client.question_get(&key.question).await {
                Ok(record) if record.status == QuestionStatus::Pending => return false,
                Ok(record) => {
                    let content = content_of(&stored.value.question, &record);
                    break ((gateway_reply_id(key), content), record.resolved_by);
                }
                Err(error) if error.reason() == Some(QUESTION_NOT_FOUND) => {
                    let found = returns::in_transcript(self, &stored.value).await;
                    break (forgotten_pending(key, found, self.is_new_boot), None);
                }
                Err(error) if !error.is_retryable() => {
                    // The deadline decides it then, and the Gateway's record is asked again.
                    tracing::error!(question = %key, %error, "a question's outcome can't be read");
                    return false;
                }
                Err(error) => tracing::warn!(%error, "a question's outcome was not read; trying again"),
            }
            pause.wait().await;
        };
        let content = self.sealed(&stored.value, content).await;
        hand_in(&self.adapter, &stored.value, id, content, by.as_deref()).await;
        true
    }

    /// The tool result of a question in the transcript: `Found(None)` for one without an answer.
    pub(super) async fn result_in_history(&self, entry: &Entry) -> Search<Option<Answers>> {
        let mut pause = Pause::default();
        let id = |call: &str| question_id(&entry.key.run, call) == entry.key.question;
        let find = |page: &History| {
            let row = page.messages.iter().rev().find(|row| {
                row.role() == "toolResult"
                    && row.tool_call_id().is_some_and(|call| call == entry.call || id(call))
            });
            row.map(|row| answers_in(&row.text()))
        };
        loop {
            match transcript::search(&self.client, &entry.key.session, Some(0), find).await {
                Ok(result) => return result,
                Err(error) if error.is_retryable() => {
                    tracing::warn!(%error, "the transcript was not read; trying again");
                }
                Err(error) => {
                    tracing::error!(question = %entry.key, %error, "the transcript can't be read");
                    return Search::NothingInPart;
                }
            }
            pause.wait().await;
        }
    }

    /// The Gateway's answers as a reply. A secret that was given there is not known here: what is
    /// sealed in its place only says that there is one.
    async fn sealed(&self, entry: &Entry, content: ReplyContent) -> ReplyContent {
        let ReplyContent::Answers { answers: mut reply } = content else { return content };
        let mut pause = Pause::default();
        while entry.question.is_secret() {
            let key = match self.adapter.bus.seal_key(self.adapter.gateway()).await {
                Ok(Some(key)) => key,
                Ok(None) => break,
                Err(error) => {
                    tracing::warn!(%error, "the seal key was not read; trying again");
                    pause.wait().await;
                    continue;
                }
            };
            for answer in reply.values_mut() {
                if let Ok(sealed) = key.seal("stored", &entry.key, &gateway_reply_id(&entry.key)) {
                    *answer = Answer::Sealed(sealed);
                }
            }
            break;
        }
        ReplyContent::Answers { answers: reply }
    }
}

/// Hands an outcome to the routers until one has taken it, or had another one before.
pub(super) async fn hand_in(
    adapter: &Adapter,
    entry: &Entry,
    id: String,
    content: ReplyContent,
    by: Option<&str>,
) {
    let span = tracing::info_span!(
        "send outcome",
        otel.kind = "producer",
        messaging.system = "nats",
        messaging.operation.name = "send",
        messaging.operation.type = "send",
        messaging.destination.template = "outcome",
        askbus.question = %entry.key.question,
    );
    continue_from(&span, entry.traceparent.as_deref());
    let by = Responder { user: by.unwrap_or("gateway").into(), name: None, chat: None };
    let reply = Reply { id, by, surface: Surface::Gateway, content };
    let mut pause = Pause::default();
    loop {
        let request = ReplyRequest { schema: SCHEMA, key: entry.key.clone(), reply: reply.clone() };
        match adapter.bus.outcome(&request).instrument(span.clone()).await {
            Ok(ReplyResponse::Saved | ReplyResponse::Closed { .. } | ReplyResponse::UnknownQuestion) => {
                return;
            }
            // It stays open to its deadline; what is given back then is overruled by the fact.
            Ok(ReplyResponse::Invalid { invalid }) => {
                tracing::error!(question = %entry.key, %invalid, "the gateway's outcome was refused by a router");
                return;
            }
            Ok(other) => tracing::warn!(?other, "the gateway's outcome was not taken; trying again"),
            Err(error) => tracing::warn!(%error, "the gateway's outcome was not handed in; trying again"),
        }
        pause.wait().await;
    }
}

fn key_of(gateway: &str, record: &QuestionRecord) -> QuestionKey {
    QuestionKey {
        gateway: gateway.into(),
        session: record.session_key.clone().unwrap_or_else(|| NONE.into()),
        run: record.run_id.clone().unwrap_or_else(|| NONE.into()),
        question: record.id.clone(),
    }
}

fn question_of(record: &QuestionRecord) -> Result<Question, Invalid> {
    let prompts = record.questions.iter().map(|asked| {
        let mut text = asked.question.clone();
        if let Some(url) = &asked.url {
            text.push_str(&format!("\n{url}"));
        }
        if let Some(store) = &asked.secret_store {
            text.push_str(&format!("\n{}", stored_where(store)));
        }
        Prompt {
            id: asked.question_id.clone(),
            header: clamp(&asked.header, MAX_HEADER),
            text,
            options: asked
                .options
                .iter()
                .map(|option| Choice {
                    label: option.label.clone(),
                    description: option.description.clone().filter(|d| !d.is_empty()),
                    value: None,
                })
                .collect(),
            multiple: asked.multi_select,
            allow_other: asked.is_other || asked.options.is_empty(),
            secret: asked.is_secret,
            required: true,
        }
    });
    Question::new(prompts.collect())
}

/// Where the Gateway keeps a secret, in words for the person who gives it.
fn stored_where(store: &serde_json::Value) -> String {
    let mut text = format!("The gateway stores it as {}", store["name"].as_str().unwrap_or("a secret"));
    let hosts: Vec<&str> =
        store["allowedHosts"].as_array().into_iter().flatten().filter_map(|h| h.as_str()).collect();
    if !hosts.is_empty() {
        text.push_str(&format!(", for use at {}", hosts.join(", ")));
    }
    text.push('.');
    if let Some(reason) = store["reason"].as_str().filter(|reason| !reason.is_empty()) {
        text.push_str(&format!(" Reason: {reason}"));
    }
    text
}

/// The Gateway's answers as ours: an option where the label is one, else own words.
pub(super) fn answers_of(
    question: &Question,
    answers: &Answers,
) -> std::collections::BTreeMap<String, Answer> {
    let of_prompt = |prompt: &Prompt| {
        let values = answers.answers.get(&prompt.id)?;
        if prompt.secret {
            return Some((prompt.id.clone(), Answer::Hidden));
        }
        let (mut options, mut own) = (Vec::new(), Vec::new());
        for value in values {
            match prompt.options.iter().position(|option| option.label.trim() == value.trim()) {
                Some(index) => options.push(index),
                None => own.push(value.as_str()),
            }
        }
        let other = (!own.is_empty()).then(|| clamp(&own.join(", "), MAX_ANSWER));
        Some((prompt.id.clone(), Answer::Given { options, other }))
    };
    question.prompts.iter().filter_map(of_prompt).collect()
}

/// The outcome that the Gateway has, as a reply.
fn content_of(question: &Question, record: &QuestionRecord) -> ReplyContent {
    match outcome_of(question, record) {
        Outcome::Answered { answers } => ReplyContent::Answers { answers },
        Outcome::Expired => ReplyContent::Expired,
        _ => ReplyContent::Cancelled { reason: cancel_reason(record.resolved_by.as_deref()) },
    }
}

/// The outcome that the Gateway has, as people are shown it.
pub(super) fn outcome_of(question: &Question, record: &QuestionRecord) -> Outcome {
    match (record.status, &record.answers) {
        (QuestionStatus::Answered, Some(answers)) => {
            Outcome::Answered { answers: answers_of(question, answers) }
        }
        (QuestionStatus::Expired, _) => Outcome::Expired,
        _ => Outcome::Cancelled { reason: cancel_reason(record.resolved_by.as_deref()) },
    }
}

fn cancel_reason(by: Option<&str>) -> CancelReason {
    match by {
        // The Gateway's own word for a run that is over.
        None | Some("requester-inactive") => CancelReason::RunEnded,
        Some(_) => CancelReason::User,
    }
}

/// The answers in the text of a tool result of `ask_user`, which ends with them as JSON.
fn answers_in(text: &str) -> Option<Answers> {
    let result = text.char_indices().filter(|(_, c)| *c == '{').find_map(|(at, _)| {
        let value: serde_json::Value = serde_json::from_str(text[at..].trim_end()).ok()?;
        value.get("status").is_some().then_some(value)
    })?;
    if result["status"] != "answered" {
        return None;
    }
    serde_json::from_value(result["answers"].clone()).ok()
}

/// Pauses between tries, from 100 ms to two seconds.
pub(super) struct Pause(Duration);

impl Default for Pause {
    fn default() -> Self {
        Self(Duration::from_millis(100))
    }
}

impl Pause {
    pub(super) async fn wait(&mut self) {
        sleep(self.0).await;
        self.0 = (self.0 * 2).min(LONGEST_PAUSE);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn record(questions: serde_json::Value) -> QuestionRecord {
        serde_json::from_value(json!({"id": "ask_1", "questions": questions, "createdAtMs": 1,
            "expiresAtMs": 900_001, "status": "pending", "sessionKey": "agent:main:x"}))
        .unwrap()
    }

    #[test]
    fn a_question_of_the_gateway_reads_as_ours() {
        let record = record(json!([{"questionId": "target", "header": "Target", "question": "Where?",
            "options": [{"label": "A", "description": "a"}, {"label": "B"}], "isOther": true}]));
        let question = question_of(&record).unwrap();
        let prompt = &question.prompts[0];
        assert_eq!((prompt.id.as_str(), prompt.allow_other, prompt.secret), ("target", true, false));
        assert_eq!(prompt.options[0].description.as_deref(), Some("a"));
        assert_eq!(key_of("g", &record).to_string(), "g.agent=3Amain=3Ax.-.ask_1");
    }

    #[test]
    fn a_stored_secret_says_where_it_goes() {
        let record =
            record(json!([{"questionId": "secret_value", "question": "Provide it.", "isSecret": true,
            "secretStore": {"name": "KEY", "allowedHosts": ["a.example"], "reason": "billing"}}]));
        let question = question_of(&record).unwrap();
        assert!(question.is_secret());
        assert_eq!(
            question.prompts[0].text,
            "Provide it.\nThe gateway stores it as KEY, for use at a.example. Reason: billing"
        );
    }

    #[test]
    fn labels_become_options_and_all_else_own_words() {
        let question = question_of(&record(json!([
            {"questionId": "one", "question": "?", "options": [{"label": "A"}, {"label": "B"}], "isOther": true},
            {"questionId": "more", "question": "?", "options": [{"label": "C"}, {"label": "D"}],
             "multiSelect": true, "isOther": true}])))
        .unwrap();
        let answers: Answers =
            serde_json::from_value(json!({"answers": {"one": ["mine"], "more": ["D", "C", "x"]}})).unwrap();
        let read = answers_of(&question, &answers);
        assert_eq!(read["one"], Answer::text("mine"));
        assert_eq!(read["more"], Answer::Given { options: vec![1, 0], other: Some("x".into()) });
    }

    #[test]
    fn a_tool_result_tells_its_answers_or_that_there_are_none() {
        let answered = "Target: {odd}\n\n{\"status\":\"answered\",\"answers\":{\"answers\":{\"t\":[\"P\"]}}}";
        assert_eq!(answers_in(answered).unwrap().answers["t"], ["P"]);
        assert_eq!(answers_in("No answer.\n\n{\n \"status\": \"no_answer\"\n}"), None);
        assert_eq!(answers_in("Aborted"), None);
    }
}
