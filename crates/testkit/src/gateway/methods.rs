//! The methods of the protocol that are served, as far as a client of askbus needs them.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::watch;

use super::questions::{
    End, Prompt, Question, already_terminal, answers_in_text, check_answers, new_record, not_found,
};
use super::runs;
use super::state::{Incoming, KeyState, Sender, State};
use super::wire::{Rejection, check_params, covers, new_id, now_ms, text_content};
use super::{Core, Fault, Request};

pub(super) const NAMES: [&str; 17] = [
    "agent",
    "agent.identity.get",
    "agent.wait",
    "agents.list",
    "chat.abort",
    "chat.history",
    "chat.send",
    "health",
    "models.list",
    "question.get",
    "question.list",
    "question.request",
    "question.resolve",
    "question.waitAnswer",
    "sessions.list",
    "sessions.subscribe",
    "sessions.unsubscribe",
];
pub(super) const EVENTS: [&str; 9] = [
    "agent",
    "chat",
    "connect.challenge",
    "question.requested",
    "question.resolved",
    "session.message",
    "session.tool",
    "shutdown",
    "tick",
];

const CHAT_SEND_OPTIONAL: [&str; 14] = [
    "agentId",
    "sessionId",
    "thinking",
    "fastMode",
    "queueMode",
    "deliver",
    "originatingChannel",
    "originatingTo",
    "originatingAccountId",
    "originatingThreadId",
    "replyToId",
    "attachments",
    "toolBindings",
    "timeoutMs",
];
const AGENT_OPTIONAL: [&str; 7] =
    ["agentId", "sessionId", "thinking", "deliver", "attachments", "timeout", "extraSystemPrompt"];

type Answer = Result<Value, Rejection>;

/// Serves one request. The response is sent before anything else can happen.
pub(super) fn handle(core: &Arc<Core>, connection: u64, frame: Value) {
    if frame["type"] != "req" {
        return;
    }
    let id = frame["id"].clone();
    let method = frame["method"].as_str().unwrap_or_default().to_owned();
    let params = match &frame["params"] {
        Value::Null => json!({}),
        params => params.clone(),
    };
    let mut state = core.state();
    if !state.connections.contains_key(&connection) {
        return;
    }
    state.requests.push(Request { method: method.clone(), params: params.clone() });
    let fault = state.take_fault(&method);
    if let Some(Fault::Refuse(rejection)) = fault {
        respond(&mut state, connection, &id, Err(rejection));
        return;
    }
    if method == "question.waitAnswer" {
        wait_answer(core, &mut state, connection, id, &params);
        return;
    }
    let answer = dispatch(core, &mut state, connection, &id, &method, &params);
    match fault {
        None | Some(Fault::Refuse(_)) => respond(&mut state, connection, &id, answer),
        Some(Fault::LoseResponse) => {
            if let Some(connection) = state.connections.remove(&connection) {
                connection.cut.cancel();
            }
        }
        Some(Fault::Delay(delay)) => {
            let core = core.clone();
            tokio::spawn(async move {
                tokio::time::sleep(delay).await;
                respond(&mut core.state(), connection, &id, answer);
            });
        }
    }
}

fn respond(state: &mut State, connection: u64, id: &Value, answer: Answer) {
    let frame = match answer {
        Ok(payload) => json!({"type": "res", "id": id, "ok": true, "payload": payload}),
        Err(error) => json!({"type": "res", "id": id, "ok": false, "error": error.to_json()}),
    };
    state.send(connection, &frame);
}

fn scope_of(method: &str) -> &'static str {
    match method {
        "chat.send" | "chat.abort" | "agent" | "agent.wait" => "operator.write",
        method if method.starts_with("question.") => "operator.questions",
        method if NAMES.contains(&method) => "operator.read",
        _ => "operator.admin",
    }
}

fn dispatch(
    core: &Arc<Core>,
    state: &mut State,
    connection: u64,
    id: &Value,
    method: &str,
    params: &Value,
) -> Answer {
    let scopes =
        state.connections.get(&connection).map(|connection| connection.scopes.clone()).unwrap_or_default();
    let needed = scope_of(method);
    if !covers(&scopes, needed) {
        return Err(Rejection::missing_scope(needed));
    }
    if state.draining && !matches!(method, "question.get" | "question.resolve") {
        let message = format!("{method} unavailable during gateway restart");
        return Err(Rejection::new("UNAVAILABLE", message));
    }
    let sender = Sender { connection: Some(connection), scopes };
    match method {
        "chat.send" => chat_send(core, state, sender, params),
        "agent" => agent(core, state, sender, id, params),
        "agent.wait" => {
            let run = text(params, "runId");
            let done = state.keys.get(&run) == Some(&KeyState::Done);
            Ok(json!({"runId": run, "status": if done { "ok" } else { "timeout" }}))
        }
        "chat.abort" => chat_abort(state, params),
        "chat.history" => chat_history(state, params),
        "sessions.subscribe" | "sessions.unsubscribe" => {
            let subscribed = method == "sessions.subscribe";
            if let Some(connection) = state.connections.get_mut(&connection) {
                connection.subscribed = subscribed;
            }
            Ok(json!({"subscribed": subscribed}))
        }
        "sessions.list" => {
            let sessions: Vec<Value> =
                state.sessions.iter().map(|(key, session)| session_info(key, session)).collect();
            Ok(json!({"ts": now_ms(), "count": sessions.len(), "sessions": sessions}))
        }
        "agents.list" => {
            let agents: Vec<Value> = core
                .options
                .agents
                .iter()
                .map(|(id, name)| match name {
                    Some(name) => json!({"id": id, "name": name, "identity": {"name": name}}),
                    None => json!({"id": id}),
                })
                .collect();
            Ok(json!({"defaultId": "main", "mainKey": "main", "scope": "per-sender",
                "agents": agents}))
        }
        "agent.identity.get" => {
            let id = params["agentId"].as_str().unwrap_or("main");
            let agent = core.options.agents.iter().find(|(agent, _)| agent == id);
            Ok(match agent.and_then(|(_, name)| name.as_ref()) {
                Some(name) => json!({"agentId": id, "name": name, "nameSource": "agent"}),
                None => json!({"agentId": id, "name": "Assistant", "nameSource": "default"}),
            })
        }
        "models.list" => Ok(json!({"models": [{"id": crate::model::MODEL, "name": "Scripted",
            "provider": "scripted", "available": true, "tags": ["default"]}]})),
        "health" => Ok(json!({"ok": true, "ts": now_ms()})),
        "question.list" => {
            let mut open: Vec<&Question> = state.questions.values().filter(|q| q.is_pending()).collect();
            open.sort_by_key(|question| question.record.created_at_ms);
            let open: Vec<Value> = open.iter().map(|question| json!(question.record)).collect();
            Ok(json!({"questions": open}))
        }
        "question.get" => {
            let question = state.question(&text(params, "id"))?;
            Ok(json!({"question": question.record}))
        }
        "question.resolve" => question_resolve(core, state, params),
        "question.request" => question_request(core, state, params),
        _ => Err(Rejection::invalid(format!("unknown method: {method}"))),
    }
}

fn text(params: &Value, name: &str) -> String {
    params[name].as_str().unwrap_or_default().to_owned()
}

pub(super) fn chat_send(core: &Arc<Core>, state: &mut State, sender: Sender, params: &Value) -> Answer {
    check_params("chat.send", params, &["sessionKey", "message", "idempotencyKey"], &CHAT_SEND_OPTIONAL)?;
    let (session, key) = (text(params, "sessionKey"), text(params, "idempotencyKey"));
    let message = with_text_files(params);
    let started = json!({"runId": key, "status": "started"});
    if let Some(known) = state.keys.get(&key) {
        let status = if *known == KeyState::Done { "ok" } else { "in_flight" };
        return Ok(json!({"runId": key, "status": status}));
    }
    let mode = params["queueMode"].as_str().unwrap_or("steer");
    let incoming = Incoming {
        run_id: key.clone(),
        key: key.clone(),
        text: message.clone(),
        sender,
        by_agent_method: false,
        respond: None,
        collected: false,
    };
    match message.trim() {
        "/stop" | "stop" => {
            state.keys.insert(key, KeyState::Done);
            let aborted = state.abort(&session, None, "stop");
            return Ok(json!({"ok": true, "aborted": aborted.is_some(),
                "runIds": Vec::from_iter(aborted)}));
        }
        "/status" => {
            state.keys.insert(key.clone(), KeyState::Done);
            state.add_user_row(&session, &message, &key, true);
            let answer = "scripted gateway: all is well";
            let content = text_content(answer);
            let row = json!({"role": "assistant", "content": content});
            state.add_row(&session, row, &key, true);
            let message = json!({"role": "assistant", "content": content});
            later(core, state, &session, &key, json!({"state": "final", "message": message}));
            return Ok(started);
        }
        _ => {}
    }

    if mode != "interrupt"
        && let Some(id) = open_in_session(state, &session)
    {
        if has_image(params) {
            // The picture is no answer; it goes on to the run.
            let _ = runs::settle(core, state, &id, End::Cancelled, None, None);
        } else {
            let words = message.strip_prefix("/steer ").unwrap_or(&message);
            take_as_answer(core, state, &id, &incoming, &session, words);
            return Ok(started);
        }
    }

    if state.run(&session).is_none() {
        runs::start(core, state, &session, incoming);
        return Ok(started);
    }
    match mode {
        "interrupt" => {
            state.keys.insert(key.clone(), KeyState::Running);
            state.session(&session).queue.push_front(incoming);
            let interrupted = state.abort(&session, None, "rpc").is_some();
            return Ok(json!({"runId": key, "status": "started",
                "interruptedActiveRun": interrupted}));
        }
        "followup" | "collect" => {
            state.keys.insert(key.clone(), KeyState::Done);
            later(core, state, &session, &key, json!({"state": "final"}));
            queue(&mut state.session(&session).queue, incoming, mode == "collect");
        }
        _ => {
            state.keys.insert(key, KeyState::Running);
            match state.run(&session) {
                Some(run) if !run.aborted => run.steered.push(incoming),
                _ => state.session(&session).queue.push_back(incoming),
            }
        }
    }
    Ok(started)
}

/// Queued messages run later under an id of the Gateway's own; collected ones as one message.
fn queue(queue: &mut VecDeque<Incoming>, mut incoming: Incoming, collect: bool) {
    let numbered = |number: usize, text: &str| format!("---\nQueued #{number}\n{text}");
    if collect {
        if let Some(waiting) = queue.back_mut().filter(|waiting| waiting.collected) {
            let number = waiting.text.matches("---\nQueued #").count() + 1;
            waiting.text.push_str(&format!("\n\n{}", numbered(number, &incoming.text)));
            return;
        }
        let first = numbered(1, &incoming.text);
        incoming.text = format!("[Queued messages while agent was busy]\n\n{first}");
        incoming.collected = true;
    }
    incoming.run_id = new_id();
    queue.push_back(incoming);
}

fn open_in_session(state: &State, session: &str) -> Option<String> {
    let open = state.questions.values().find(|question| {
        question.is_pending()
            && question.record.session_key.as_deref() == Some(session)
            && !question.record.questions.iter().any(|prompt| prompt.is_secret)
    });
    open.map(|question| question.record.id.clone())
}

fn take_as_answer(
    core: &Arc<Core>,
    state: &mut State,
    id: &str,
    incoming: &Incoming,
    session: &str,
    words: &str,
) {
    state.keys.insert(incoming.key.clone(), KeyState::Done);
    let Some(question) = state.questions.get_mut(id) else {
        return;
    };
    let prompts = &question.record.questions;
    match check_answers(prompts, &answers_in_text(prompts, words)) {
        Ok(answers) => {
            question.answered_by_keys.push(incoming.key.clone());
            let _ = runs::settle(core, state, id, End::Answered(answers), None, None);
            state.add_user_row(session, &incoming.text, &incoming.key, true);
        }
        Err(refused) => {
            let message = format!(
                "The answer was not accepted: {}. The question is still open, so reply again \
                 and answer every question by number or question id.",
                refused.message
            );
            let fields = json!({"state": "error", "errorMessage": message});
            later(core, state, session, &incoming.key, fields);
        }
    }
}

/// A `chat` event of a key without a run, after the response.
fn later(core: &Arc<Core>, state: &State, session: &str, key: &str, fields: Value) {
    let (core, life) = (core.clone(), state.life.clone());
    let (session, key) = (session.to_owned(), key.to_owned());
    tokio::spawn(async move {
        let mut state = core.state();
        if !life.is_cancelled() {
            state.chat_event_without_run(&session, &key, &fields);
        }
    });
}

fn attachments(params: &Value) -> impl Iterator<Item = &Value> {
    params["attachments"].as_array().into_iter().flatten()
}

fn has_image(params: &Value) -> bool {
    attachments(params).any(|file| text(file, "mimeType").starts_with("image/"))
}

fn with_text_files(params: &Value) -> String {
    let mut message = text(params, "message");
    for file in attachments(params).filter(|file| !text(file, "mimeType").starts_with("image/")) {
        message.push_str(&format!("\n\n[{}]", text(file, "fileName")));
    }
    message
}

fn agent(core: &Arc<Core>, state: &mut State, sender: Sender, id: &Value, params: &Value) -> Answer {
    check_params("agent", params, &["sessionKey", "message", "idempotencyKey"], &AGENT_OPTIONAL)?;
    let (session, key) = (text(params, "sessionKey"), text(params, "idempotencyKey"));
    if let Some(known) = state.keys.get(&key) {
        let status = if *known == KeyState::Done { "ok" } else { "in_flight" };
        return Ok(json!({"runId": key, "status": status}));
    }
    let agent_id = state.session(&session).agent_id.clone();
    let respond = sender.connection.zip(id.as_str().map(str::to_owned));
    let incoming = Incoming {
        run_id: key.clone(),
        key: key.clone(),
        text: text(params, "message"),
        sender,
        by_agent_method: true,
        respond,
        collected: false,
    };
    if state.run(&session).is_some() {
        state.keys.insert(key.clone(), KeyState::Running);
        state.session(&session).queue.push_back(incoming);
    } else {
        runs::start(core, state, &session, incoming);
    }
    Ok(json!({"runId": key, "sessionKey": session, "agentId": agent_id, "status": "accepted",
        "acceptedAt": now_ms()}))
}

pub(super) fn chat_abort(state: &mut State, params: &Value) -> Answer {
    check_params("chat.abort", params, &["sessionKey"], &["agentId", "runId", "preserveSideRuns"])?;
    let session = text(params, "sessionKey");
    let aborted = state.abort(&session, params["runId"].as_str(), "rpc");
    Ok(json!({"ok": true, "aborted": aborted.is_some(), "runIds": Vec::from_iter(aborted)}))
}

fn session_info(key: &str, session: &super::state::Session) -> Value {
    let running = session.active.as_ref().filter(|run| !run.aborted);
    let runs: Vec<&str> = running.iter().map(|run| &*run.incoming.run_id).collect();
    json!({"key": key, "agentId": session.agent_id, "sessionId": session.session_id,
        "kind": "direct", "hasActiveRun": running.is_some(), "activeRunIds": runs,
        "status": if running.is_some() { "running" } else { "done" },
        "lastRunId": session.last_run_id})
}

fn chat_history(state: &mut State, params: &Value) -> Answer {
    check_params(
        "chat.history",
        params,
        &["sessionKey"],
        &["limit", "offset", "agentId", "sessionId", "maxChars"],
    )?;
    let key = text(params, "sessionKey");
    let Some(session) = state.sessions.get(&key) else {
        return Ok(json!({"sessionKey": key, "messages": [], "hasMore": false,
            "totalMessages": 0}));
    };
    let limit = params["limit"].as_u64().map_or(200, |limit| limit.clamp(1, 1000));
    let offset = usize::try_from(params["offset"].as_u64().unwrap_or(0)).unwrap_or(usize::MAX);
    let end = session.rows.len().saturating_sub(offset);
    let skip = end.saturating_sub(usize::try_from(limit).unwrap_or(200));
    let mut history = json!({"sessionKey": key, "sessionId": session.session_id,
        "messages": session.rows[skip..end], "hasMore": skip > 0,
        "totalMessages": session.rows.len(), "deltaCursor": session.rows.len().to_string(),
        "sessionInfo": session_info(&key, session)});
    if skip > 0 {
        history["nextOffset"] = (session.rows.len() - skip).into();
    }
    if let Some(run) = session.active.as_ref().filter(|run| !run.aborted) {
        history["inFlightRun"] = json!({"runId": run.incoming.run_id, "text": run.text,
            "startedAt": run.started_at, "events": run.events});
    }
    Ok(history)
}

fn question_resolve(core: &Arc<Core>, state: &mut State, params: &Value) -> Answer {
    check_params("question.resolve", params, &["id"], &["answers", "cancel", "resolvedBy", "resolutionId"])?;
    if params["answers"].is_object() == (params["cancel"] == true) {
        return Err(Rejection::invalid("invalid question.resolve params: must match a schema in anyOf"));
    }
    let id = text(params, "id");
    let by = params["resolvedBy"].as_str().map(str::to_owned);
    let resolution_id = params["resolutionId"].as_str().map(str::to_owned);
    resolve(core, state, &id, params.get("answers"), by, resolution_id)
}

/// Answers or, without answers, cancels a question.
pub(super) fn resolve(
    core: &Arc<Core>,
    state: &mut State,
    id: &str,
    answers: Option<&Value>,
    by: Option<String>,
    resolution_id: Option<String>,
) -> Answer {
    let question = state.question(id)?;
    if !question.is_pending() {
        return Err(already_terminal(&question.record));
    }
    let end = match answers {
        Some(answers) => End::Answered(check_answers(&question.record.questions, answers)?),
        None => End::Cancelled,
    };
    runs::settle(core, state, id, end, by, resolution_id)
}

fn question_request(core: &Arc<Core>, state: &mut State, params: &Value) -> Answer {
    check_params(
        "question.request",
        params,
        &["questions"],
        &["id", "agentId", "sessionKey", "runId", "timeoutMs"],
    )?;
    let prompts: Vec<Prompt> = serde_json::from_value(params["questions"].clone())
        .map_err(|error| Rejection::invalid(format!("invalid question.request params: {error}")))?;
    for (at, prompt) in prompts.iter().enumerate() {
        if prompt.is_secret {
            let id = &prompt.question_id;
            return Err(Rejection::invalid(format!(
                "question '{id}': secret questions are not supported yet"
            )));
        }
        if prompt.header.chars().count() > 12 {
            return Err(Rejection::invalid(format!(
                "invalid question.request params: at /questions/{at}/header: must not have more \
                 than 12 characters"
            )));
        }
    }
    let id = params["id"].as_str().map_or_else(new_id, str::to_owned);
    if state.questions.contains_key(&id) {
        let message = format!("question '{id}' already exists");
        return Err(Rejection::question("QUESTION_ID_IN_USE", message));
    }
    let mut record = new_record(id, prompts, params["timeoutMs"].as_u64().unwrap_or(900_000));
    record.session_key = params["sessionKey"].as_str().map(str::to_owned);
    record.run_id = params["runId"].as_str().map(str::to_owned);
    record.agent_id = Some(match &record.session_key {
        Some(session) => super::state::agent_of(session).to_owned(),
        None => "main".to_owned(),
    });
    let answer = json!({"id": record.id, "expiresAtMs": record.expires_at_ms});
    let question = Question {
        record,
        resolution_id: None,
        asked_by_run: false,
        told: false,
        answered_by_keys: Vec::new(),
        settled: watch::Sender::new(false),
    };
    runs::open_question(core, state, question);
    Ok(answer)
}

fn wait_answer(core: &Arc<Core>, state: &mut State, connection: u64, id: Value, params: &Value) {
    let question_id = text(params, "id");
    let may = state
        .connections
        .get(&connection)
        .is_some_and(|connection| covers(&connection.scopes, "operator.questions"));
    let mut settled = match state.question(&question_id) {
        Ok(question) if may => question.settled.subscribe(),
        Ok(_) => {
            let error = Rejection::missing_scope("operator.questions");
            return respond(state, connection, &id, Err(error));
        }
        Err(error) => return respond(state, connection, &id, Err(error)),
    };
    let timeout = params["timeoutMs"].as_u64().map(Duration::from_millis);
    let with_resolution_id = params["includeResolutionId"] == true;
    let core = core.clone();
    tokio::spawn(async move {
        let wait = settled.wait_for(|settled| *settled);
        match timeout {
            Some(timeout) => drop(tokio::time::timeout(timeout, wait).await),
            None => drop(wait.await),
        }
        let mut state = core.state();
        let answer = match state.questions.get(&question_id) {
            Some(question) => Ok(question.outcome(with_resolution_id)),
            None => Err(not_found(&question_id)),
        };
        respond(&mut state, connection, &id, answer);
    });
}
