//! Runs of the scripted agent: what they say, which tools they call, how they end.

use std::sync::{Arc, MutexGuard};

use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tokio::sync::{oneshot, watch};
use tokio_util::sync::CancellationToken;

use super::questions::{End, Prompt, Question, new_record};
use super::state::{ActiveRun, Incoming, KeyState, Sender, State, assistant_message, extend};
use super::wire::{covers, new_id, now_ms, text_content};
use super::{Core, ToolOutcome, plugin};
use crate::model::{self, Answer, Text};
use crate::script::{self, Call};

/// Why a run goes no further.
enum Stop {
    Aborted,
    /// The Gateway process it belonged to is gone.
    Dead,
}

/// What a tool gave back.
#[derive(Debug, Default)]
pub(super) struct ToolResult {
    pub text: String,
    pub details: Value,
    pub is_error: bool,
    /// The value behind the handle in `text`.
    pub secret: Option<String>,
    pub attempts: u32,
    /// The Gateway's own question, whose end is told after the result.
    pub question: Option<String>,
}

impl ToolResult {
    pub fn error(text: impl Into<String>) -> Self {
        Self { text: text.into(), details: json!({}), is_error: true, ..Self::default() }
    }
}

struct Run {
    core: Arc<Core>,
    life: CancellationToken,
    abort: CancellationToken,
    session: String,
    run_id: String,
    sender: Sender,
    items: String,
}

/// Starts a run for a message; the session has none.
pub(super) fn start(core: &Arc<Core>, state: &mut State, session: &str, incoming: Incoming) {
    state.keys.insert(incoming.key.clone(), KeyState::Running);
    let run = Run {
        core: core.clone(),
        life: state.life.clone(),
        abort: CancellationToken::new(),
        session: session.to_owned(),
        run_id: incoming.run_id.clone(),
        sender: incoming.sender.clone(),
        items: new_id(),
    };
    state.session(session).active = Some(ActiveRun {
        incoming,
        seq: 0,
        started_at: now_ms(),
        text: String::new(),
        unsent: String::new(),
        chat_sent_at: None,
        events: Vec::new(),
        steered: Vec::new(),
        abort: run.abort.clone(),
        aborted: false,
    });
    let life = state.life.clone();
    tokio::spawn(async move {
        tokio::select! {
            biased;
            () = life.cancelled() => {}
            () = run.drive() => {}
        }
    });
}

impl Run {
    /// The state, as long as this run's Gateway process lives.
    fn alive(&self) -> Result<MutexGuard<'_, State>, Stop> {
        let state = self.core.state();
        if self.life.is_cancelled() {
            return Err(Stop::Dead);
        }
        Ok(state)
    }

    /// The state, as long as the run goes on.
    fn state(&self) -> Result<MutexGuard<'_, State>, Stop> {
        let state = self.alive()?;
        if self.abort.is_cancelled() {
            return Err(Stop::Aborted);
        }
        Ok(state)
    }

    async fn drive(self) {
        if let Err(Stop::Aborted) = self.turns().await
            && let Ok(mut state) = self.alive()
        {
            self.end_aborted(&mut state);
        }
    }

    async fn turns(&self) -> Result<(), Stop> {
        self.begin()?;
        for turn in 1.. {
            let answer = {
                let mut state = self.state()?;
                let model = json!({"phase": "model", "provider": "scripted", "model": model::MODEL});
                state.agent_event(&self.session, "lifecycle", &model);
                let rows = &state.session(&self.session).rows;
                model::answer(&for_model(rows))
            };
            let said = self.say(turn, &answer).await?;
            let calls = self.end_turn(said, answer.calls)?;
            if calls.is_empty() {
                let mut state = self.state()?;
                if !self.inject(&mut state) {
                    self.end(&mut state);
                    return Ok(());
                }
                continue;
            }
            let results = calls.iter().map(|(id, call)| self.call(id, call));
            let results = futures::future::try_join_all(results).await?;
            let mut state = self.state()?;
            for ((id, call), result) in calls.iter().zip(results) {
                let row = json!({"role": "toolResult", "toolCallId": id, "toolName": call.tool,
                    "content": text_content(&result.text), "isError": result.is_error});
                state.add_row(&self.session, row, &self.run_id, false);
            }
            self.inject(&mut state);
        }
        Ok(())
    }

    fn begin(&self) -> Result<(), Stop> {
        let mut state = self.state()?;
        let Some(run) = state.run(&self.session) else {
            return Err(Stop::Dead);
        };
        let (incoming, started_at) = (run.incoming.clone(), run.started_at);
        let by_agent_method = incoming.by_agent_method;
        let start = json!({"phase": "start", "startedAt": started_at});
        if by_agent_method {
            state.agent_event(&self.session, "lifecycle", &start);
        } else {
            state.run_status(&self.session, "preparing_workspace");
            state.run_status(&self.session, "preparing_context");
        }
        state.add_user_row(&self.session, &incoming.text, &incoming.key, false);
        if !by_agent_method {
            state.agent_event(&self.session, "lifecycle", &start);
            state.run_status(&self.session, "starting_model");
        }
        Ok(())
    }

    /// Streams the text of one model turn and returns it.
    async fn say(&self, turn: usize, answer: &Answer) -> Result<String, Stop> {
        let mut said = String::new();
        for text in &answer.text {
            let (delay, pieces) = match text {
                Text::Now(text) => (None, words(text)),
                Text::Slow(count) => {
                    let text: String = script::slow_words(*count).collect();
                    (Some(script::SLOW_WORD), words(text.trim_end()))
                }
            };
            for piece in pieces {
                if let Some(delay) = delay {
                    tokio::select! {
                        () = self.abort.cancelled() => return Err(Stop::Aborted),
                        () = tokio::time::sleep(delay) => {}
                    }
                }
                let is_first = said.is_empty();
                said.push_str(&piece);
                let mut state = self.state()?;
                let item = format!("{}:{turn}", self.items);
                let data = json!({"text": said, "delta": piece, "itemId": item});
                state.agent_event(&self.session, "assistant", &data);
                let goes_on = state.run(&self.session).is_some_and(|run| !run.text.is_empty());
                let between = if is_first && goes_on { "\n\n" } else { "" };
                state.chat_text(&self.session, &format!("{between}{piece}"));
            }
        }
        Ok(said)
    }

    /// Writes what the model said and wants to the transcript; the calls get their ids.
    fn end_turn(&self, said: String, calls: Vec<Call>) -> Result<Vec<(String, Call)>, Stop> {
        let calls: Vec<(String, Call)> = calls
            .into_iter()
            .map(|call| (format!("call_{}", &new_id().replace('-', "")[..12]), call))
            .collect();
        let mut content = Vec::new();
        if !said.is_empty() {
            content.push(json!({"type": "text", "text": said}));
        }
        content.extend(calls.iter().map(
            |(id, call)| json!({"type": "toolCall", "id": id, "name": call.tool, "arguments": args(call)}),
        ));
        let reason = if calls.is_empty() { "stop" } else { "toolUse" };
        let mut state = self.state()?;
        state.agent_event(&self.session, "usage", &json!({"outputTokens": 5}));
        if !calls.is_empty() {
            state.flush_chat(&self.session);
        }
        let row = json!({"role": "assistant", "content": content, "stopReason": reason});
        state.add_row(&self.session, row, &self.run_id, false);
        Ok(calls)
    }

    /// Adds messages that came in between to the conversation; their own runs end empty.
    fn inject(&self, state: &mut State) -> bool {
        let steered =
            state.run(&self.session).map(|run| std::mem::take(&mut run.steered)).unwrap_or_default();
        if !steered.is_empty() {
            state.flush_chat(&self.session);
        }
        for message in &steered {
            state.add_user_row(&self.session, &message.text, &message.key, false);
            self.end_empty(state, message);
        }
        !steered.is_empty()
    }

    fn end_empty(&self, state: &mut State, message: &Incoming) {
        state.keys.insert(message.key.clone(), KeyState::Done);
        let end = json!({"state": "final"});
        state.chat_event_without_run(&self.session, &message.run_id, &end);
    }

    fn end(&self, state: &mut State) {
        let Some(run) = state.run(&self.session) else {
            return;
        };
        let (text, started_at) = (run.text.clone(), run.started_at);
        let mut data = json!({"phase": "finishing", "stopReason": "stop", "aborted": false});
        state.agent_event(&self.session, "lifecycle", &data);
        self.model_is_left(state);
        extend(
            &mut data,
            &json!({"phase": "end", "startedAt": started_at, "endedAt": now_ms(),
                "terminalReply": {"disposition": "visible", "text": text},
                "executionSettled": true}),
        );
        state.agent_event(&self.session, "lifecycle", &data);
        state.flush_chat(&self.session);
        let fields = json!({"state": "final", "stopReason": "stop",
            "message": assistant_message(&text)});
        state.chat_event(&self.session, &fields);
        self.leave(state, "ok", &text);
    }

    fn model_is_left(&self, state: &mut State) {
        let data = json!({"phase": "model", "provider": null, "model": null});
        state.agent_event(&self.session, "lifecycle", &data);
    }

    /// The abort itself told that the run is over; this tells what became of its parts.
    fn end_aborted(&self, state: &mut State) {
        self.model_is_left(state);
        let data = json!({"phase": "error", "error": "This operation was aborted",
            "aborted": true, "stopReason": "aborted", "endedAt": now_ms(),
            "executionSettled": true});
        state.agent_event(&self.session, "lifecycle", &data);
        let cancelled: Vec<String> = state
            .questions
            .values()
            .filter(|question| question.record.run_id.as_ref() == Some(&self.run_id))
            .filter(|question| question.record.answers.is_none())
            .map(|question| question.record.id.clone())
            .collect();
        for id in cancelled {
            tell_and_forget(&self.core, state, &id);
        }
        let steered =
            state.run(&self.session).map(|run| std::mem::take(&mut run.steered)).unwrap_or_default();
        for message in &steered {
            self.end_empty(state, message);
        }
        self.leave(state, "error", "aborted");
    }

    /// Makes room for the next message of the session.
    fn leave(&self, state: &mut State, status: &str, text: &str) {
        let session = state.session(&self.session);
        let Some(run) = session.active.take() else {
            return;
        };
        session.last_run_id = Some(self.run_id.clone());
        let next = session.queue.pop_front();
        state.keys.insert(run.incoming.key, KeyState::Done);
        if let Some((connection, request)) = run.incoming.respond {
            let payload = json!({"runId": self.run_id, "status": status,
                "result": {"payloads": [{"text": text, "mediaUrl": null}]}});
            let frame = json!({"type": "res", "id": request, "ok": true, "payload": payload});
            state.send(connection, &frame);
        }
        if let Some(next) = next {
            start(&self.core, state, &self.session, next);
        }
    }

    async fn call(&self, id: &str, call: &Call) -> Result<ToolResult, Stop> {
        let args = args(call);
        let asked = match &args["question"] {
            Value::String(question) => question.clone(),
            _ => args["questions"][0]["question"].as_str().unwrap_or_default().into(),
        };
        let started_ms = now_ms();
        let mut item = json!({"itemId": format!("tool:{id}"), "toolCallId": id,
            "name": call.tool, "kind": "tool", "phase": "start",
            "title": format!("{} {asked}", title(&call.tool)).trim(), "status": "running",
            "meta": asked, "startedAt": started_ms});
        {
            let mut state = self.state()?;
            state.agent_event(&self.session, "item", &item);
            let start = json!({"phase": "start", "name": call.tool, "toolCallId": id,
                "args": args});
            state.agent_event(&self.session, "tool", &start);
        }
        let result = tokio::select! {
            biased;
            () = self.abort.cancelled() => ToolResult::error("Aborted"),
            result = self.execute(id, call, &args) => result?,
        };
        let mut state = self.alive()?;
        let end = json!({"phase": "result", "name": call.tool, "toolCallId": id, "meta": asked,
            "isError": result.is_error, "result": {"content": text_content(&result.text),
            "details": result.details}});
        state.agent_event(&self.session, "tool", &end);
        let status = if result.is_error { "failed" } else { "completed" };
        extend(&mut item, &json!({"phase": "end", "status": status, "endedAt": now_ms()}));
        state.agent_event(&self.session, "item", &item);
        if let Some(question) = &result.question {
            tell_and_forget(&self.core, &mut state, question);
        }
        state.record_outcome(ToolOutcome {
            session: self.session.clone(),
            run_id: self.run_id.clone(),
            call_id: id.to_owned(),
            tool: call.tool.clone(),
            args,
            text: result.text.clone(),
            details: result.details.clone(),
            is_error: result.is_error,
            secret: result.secret.clone(),
            attempts: result.attempts,
            acknowledged: false,
            started_ms,
            ended_ms: now_ms(),
        });
        Ok(result)
    }

    async fn execute(&self, id: &str, call: &Call, args: &Value) -> Result<ToolResult, Stop> {
        match call.tool.as_str() {
            "ask_user" => self.ask_user(id, args).await,
            "request_user_input" => self.request_user_input(id, args).await,
            tool if self.core.options.tools_by_hand.iter().any(|t| t == tool) => {
                let (done, result) = oneshot::channel();
                self.state()?.by_hand.insert(id.to_owned(), done);
                result.await.map_err(|_| Stop::Dead)
            }
            tool => Ok(ToolResult::error(format!("Tool {tool} not found"))),
        }
    }

    async fn ask_user(&self, call: &str, args: &Value) -> Result<ToolResult, Stop> {
        let prompts = match prompts_of(args) {
            Ok(prompts) => prompts,
            Err(why) => {
                let text = format!(
                    "Validation failed for tool \"ask_user\":\n  - {why}\n\n\
                     Received arguments:\n{args:#}"
                );
                return Ok(ToolResult::error(text));
            }
        };
        if !covers(&self.sender.scopes, "operator.questions") {
            let text = "Session-scoped access requires a verified user profile.";
            return Ok(ToolResult::error(text));
        }
        let least = u64::try_from(self.core.options.ask_user_at_least.as_millis()).unwrap_or(0);
        let wanted = args["timeoutSeconds"].as_f64().unwrap_or(900.0);
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped")]
        let timeout = ((wanted * 1000.0) as u64).clamp(least, 3_600_000);
        let hash = hex::encode(Sha256::digest(format!("{}\0{call}", self.run_id)));
        let id = format!("ask_{}", &hash[..32]);
        let mut record = new_record(id.clone(), prompts, timeout);
        record.session_key = Some(self.session.clone());
        record.run_id = Some(self.run_id.clone());
        let mut settled = {
            let mut state = self.state()?;
            let taken = state.questions.values().any(|open| {
                open.is_pending()
                    && open.asked_by_run
                    && open.record.session_key.as_ref() == Some(&self.session)
            });
            if taken {
                let text = "ask_user already has a pending question for this session";
                return Ok(ToolResult::error(text));
            }
            record.agent_id = Some(state.session(&self.session).agent_id.clone());
            open_question(
                &self.core,
                &mut state,
                Question {
                    record,
                    resolution_id: None,
                    asked_by_run: true,
                    told: false,
                    answered_by_keys: Vec::new(),
                    settled: watch::Sender::new(false),
                },
            )
        };
        let _ = settled.wait_for(|settled| *settled).await;
        let mut state = self.state()?;
        let question = state.question(&id).map_err(|_| Stop::Dead)?;
        let (text, details) = question.tool_result();
        Ok(ToolResult { text, details, question: Some(id), ..ToolResult::default() })
    }

    async fn request_user_input(&self, id: &str, args: &Value) -> Result<ToolResult, Stop> {
        let (endpoint, body) = {
            let mut state = self.state()?;
            let Some(endpoint) = state.plugin.clone() else {
                return Ok(ToolResult::error("Tool request_user_input not found"));
            };
            let waiting = json!({"phase": "update", "name": "request_user_input",
                "toolCallId": id, "partialResult": {
                    "content": text_content("waiting for the user"),
                    "details": {"waiting": true}}});
            state.agent_event(&self.session, "tool", &waiting);
            let session = state.session(&self.session);
            let body = json!({"gateway": self.core.options.name, "sessionKey": self.session,
                "sessionId": session.session_id, "agentId": session.agent_id,
                "runId": self.run_id, "toolCallId": id, "args": args,
                "handles": endpoint.handles});
            (endpoint, body)
        };
        let call = plugin::Execution::new(&self.core, &self.life, endpoint, id, body);
        Ok(call.run().await)
    }
}

/// Opens a question: everybody who may answer is told, and it expires by itself.
pub(super) fn open_question(
    core: &Arc<Core>,
    state: &mut State,
    question: Question,
) -> watch::Receiver<bool> {
    let settled = question.settled.subscribe();
    let id = question.record.id.clone();
    let event = json!(question.record);
    let left = question.record.expires_at_ms.saturating_sub(now_ms());
    state.questions.insert(id.clone(), question);
    state.send_event("question.requested", &event, |_, c| covers(&c.scopes, "operator.questions"));
    let core = core.clone();
    let life = state.life.clone();
    tokio::spawn(async move {
        tokio::select! {
            () = life.cancelled() => {}
            () = tokio::time::sleep(std::time::Duration::from_millis(left)) => {
                let mut state = core.state();
                if !life.is_cancelled() {
                    let _ = settle(&core, &mut state, &id, End::Expired, None, None);
                }
            }
        }
    });
    settled
}

/// Settles a pending question; the first end wins.
pub(super) fn settle(
    core: &Arc<Core>,
    state: &mut State,
    id: &str,
    end: End,
    by: Option<String>,
    resolution_id: Option<String>,
) -> Result<Value, super::Rejection> {
    let question = state.question(id)?;
    if !question.is_pending() {
        return Err(super::questions::already_terminal(&question.record));
    }
    question.settle(end, by, resolution_id);
    let outcome = question.outcome(false);
    if !question.asked_by_run {
        // After the response to whoever settled it.
        let (core, id, life) = (core.clone(), id.to_owned(), state.life.clone());
        tokio::spawn(async move {
            let mut state = core.state();
            if !life.is_cancelled() {
                tell_and_forget(&core, &mut state, &id);
            }
        });
    }
    Ok(outcome)
}

/// Tells a question's end, and drops the record some time later.
fn tell_and_forget(core: &Arc<Core>, state: &mut State, id: &str) {
    state.tell_resolved(id);
    let (core, id, life) = (core.clone(), id.to_owned(), state.life.clone());
    tokio::spawn(async move {
        tokio::time::sleep(core.options.keep_settled).await;
        let mut state = core.state();
        if !life.is_cancelled() {
            state.questions.remove(&id);
            state.changed.send_replace(());
        }
    });
}

fn prompts_of(args: &Value) -> Result<Vec<Prompt>, String> {
    let questions = args["questions"].as_array().map_or(&[][..], Vec::as_slice);
    if questions.is_empty() || questions.len() > 3 {
        return Err("questions: must have 1 to 3 items".into());
    }
    let prompts = questions.iter().enumerate().map(|(at, question)| {
        let count = question["options"].as_array().map_or(0, Vec::len);
        if count < 2 {
            return Err(format!("questions.{at}.options: must not have fewer than 2 items"));
        }
        if count > 4 {
            return Err(format!("questions.{at}.options: must not have more than 4 items"));
        }
        let mut prompt = question.clone();
        prompt["questionId"] = question["id"].clone();
        prompt["isOther"] = true.into();
        let mut prompt: Prompt =
            serde_json::from_value(prompt).map_err(|error| format!("questions.{at}: {error}"))?;
        prompt.header = prompt.header.chars().take(12).collect();
        Ok(prompt)
    });
    prompts.collect()
}

fn args(call: &Call) -> Value {
    serde_json::from_str(&call.args).unwrap_or_else(|_| json!({"_raw": call.args}))
}

/// Words with the white space before them.
fn words(text: &str) -> Vec<String> {
    let mut words: Vec<String> = Vec::new();
    let mut in_word = false;
    for c in text.chars() {
        let starts = c.is_whitespace() && in_word;
        in_word = !c.is_whitespace();
        match words.last_mut() {
            Some(word) if !starts => word.push(c),
            _ => words.push(c.to_string()),
        }
    }
    words
}

/// `ask_user` as it is shown: `Ask User`.
fn title(tool: &str) -> String {
    let words = tool.split('_').map(|word| {
        let mut letters = word.chars();
        let first = letters.next().map(|c| c.to_uppercase().to_string());
        first.unwrap_or_default() + letters.as_str()
    });
    words.collect::<Vec<_>>().join(" ")
}

/// The transcript as a model gets it: results directly after their calls, made-up ones where there
/// is none, and nothing of what went past the model.
fn for_model(rows: &[Value]) -> Vec<Value> {
    let result_of = |id: &Value| {
        let found = rows.iter().find(|row| row["toolCallId"] == *id);
        let missing = "[openclaw] missing tool result in session history".into();
        json!({"role": "tool", "tool_call_id": id,
            "content": found.map_or(missing, |row| row["content"].clone())})
    };
    let mut messages = Vec::new();
    for row in rows.iter().filter(|row| row["__openclaw"]["aside"] != true) {
        match row["role"].as_str() {
            Some("toolResult") => {}
            Some("assistant") => {
                let blocks = row["content"].as_array().map_or(&[][..], Vec::as_slice);
                let text: String = blocks.iter().filter_map(|b| b["text"].as_str()).collect();
                let calls = blocks.iter().filter(|block| block["type"] == "toolCall");
                let calls: Vec<Value> = calls
                    .map(|block| {
                        json!({"id": block["id"], "type": "function", "function": {
                            "name": block["name"], "arguments": block["arguments"].to_string()}})
                    })
                    .collect();
                let results: Vec<Value> = calls.iter().map(|call| result_of(&call["id"])).collect();
                messages.push(json!({"role": "assistant", "content": text, "tool_calls": calls}));
                messages.extend(results);
            }
            _ => messages.push(row.clone()),
        }
    }
    messages
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_keep_every_character() {
        let text = "  a\n\nb c ";
        assert_eq!(words(text), ["  a", "\n\nb", " c", " "]);
        assert_eq!(words(text).concat(), text);
    }
}
