//! A scripted model provider with the OpenAI chat completions API.
//!
//! What it answers is scripted by the messages themselves ([`crate::script`]): it calls the tools
//! that the last message with a directive names, and then says what they returned, one line
//! `tool said: …` per result. A message without a directive is answered `echo: <message>`.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use axum::body::Body;
use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use futures::StreamExt;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::script::{self, Call, Step};

/// The only model it offers.
pub const MODEL: &str = "scripted-1";
const REQUESTS_KEPT: usize = 1_000;

/// How the model answers.
#[derive(Debug, Clone, Default)]
pub struct ModelOptions {
    /// Characters per streamed piece of text; a word each where it is not set.
    pub piece: Option<usize>,
}

/// A running provider; stops when dropped.
#[derive(Debug)]
pub struct ScriptedModel {
    address: SocketAddr,
    provider: Arc<Provider>,
    _stop: DropGuard,
}

#[derive(Debug)]
struct Provider {
    options: ModelOptions,
    requests: Mutex<VecDeque<Value>>,
}

impl ScriptedModel {
    /// Starts a provider on a free port of the loopback interface.
    ///
    /// # Errors
    /// No port is free.
    pub async fn start() -> Result<Self> {
        Self::listen("127.0.0.1:0".parse()?, ModelOptions::default()).await
    }

    /// Starts a provider on an address of your choice.
    ///
    /// # Errors
    /// The address is in use.
    pub async fn listen(address: SocketAddr, options: ModelOptions) -> Result<Self> {
        let listener = TcpListener::bind(address)
            .await
            .with_context(|| format!("listen on {address} for the scripted model"))?;
        let address = listener.local_addr()?;
        let provider = Arc::new(Provider { options, requests: Mutex::default() });
        let routes = Router::new()
            .route("/v1/models", get(models))
            .route("/v1/chat/completions", post(complete))
            .route("/log", get(log))
            .with_state(provider.clone());
        let stop = CancellationToken::new();
        let stopped = stop.clone().cancelled_owned();
        tokio::spawn(async move {
            let server = axum::serve(listener, routes).into_future();
            tokio::select! { _ = server => {}, () = stopped => {} }
        });
        Ok(Self { address, provider, _stop: stop.drop_guard() })
    }

    /// Base URL of the API, `http://127.0.0.1:<port>/v1`.
    pub fn url(&self) -> String {
        format!("http://{}/v1", self.address)
    }

    /// Bodies of the last 1,000 completion requests, oldest first; also at `GET /log`.
    pub fn requests(&self) -> Vec<Value> {
        self.provider.requests()
    }
}

impl Provider {
    fn requests(&self) -> Vec<Value> {
        let requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        requests.iter().cloned().collect()
    }

    fn keep(&self, request: Value) {
        let mut requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        if requests.len() == REQUESTS_KEPT {
            requests.pop_front();
        }
        requests.push_back(request);
    }
}

async fn models() -> Json<Value> {
    Json(json!({"object": "list", "data": [{"id": MODEL, "object": "model"}]}))
}

async fn log(State(provider): State<Arc<Provider>>) -> Json<Value> {
    Json(provider.requests().into())
}

async fn complete(State(provider): State<Arc<Provider>>, Json(request): Json<Value>) -> Response {
    provider.keep(request.clone());
    let answer = answer(request["messages"].as_array().map_or(&[], Vec::as_slice));
    let id = format!("chatcmpl-{}", uuid::Uuid::new_v4().simple());
    if request["stream"] == true { stream(&id, answer, provider.options.piece) } else { whole(&id, answer) }
}

/// What the model says, and the tools that it calls after that.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) text: Vec<Text>,
    pub(crate) calls: Vec<Call>,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Text {
    Now(String),
    Slow(usize),
}

/// What comes next in a conversation, given as the API has it.
pub(crate) fn answer(messages: &[Value]) -> Answer {
    let turn = current_turn(messages);
    let scripted = turn.iter().enumerate().rev().find_map(|(at, message)| {
        let is_user = message["role"] == "user";
        let steps = is_user.then(|| script::parse(&content(message))).flatten()?;
        Some((at, steps))
    });
    let Some((at, steps)) = scripted else {
        let said = turn.iter().filter(|message| is_said_by_user(message));
        let said = said.map(content).next_back().unwrap_or_default();
        return Answer { text: vec![Text::Now(format!("echo: {said}"))], calls: vec![] };
    };

    let since = &turn[at + 1..];
    let rounds = since.iter().filter(|message| has_calls(message)).count();
    let mut to_do = steps.into_iter();
    if rounds > 0 {
        let is_call = |step: &Step| matches!(step, Step::Calls(_));
        to_do.by_ref().filter(is_call).nth(rounds - 1);
    }
    let mut next = Answer::default();
    for step in to_do {
        match step {
            Step::Slow(words) => next.text.push(Text::Slow(words)),
            Step::Say(text) => next.text.push(Text::Now(text)),
            Step::Calls(calls) => {
                next.calls = calls;
                return next;
            }
        }
    }
    // The script is done: tell its results, and answer what the user said in between.
    let mut told: Vec<String> = since
        .iter()
        .filter_map(|message| match message["role"].as_str()? {
            "tool" => Some(format!("tool said: {}", content(message))),
            "user" if is_said_by_user(message) => Some(format!("echo: {}", content(message))),
            _ => None,
        })
        .collect();
    if !told.is_empty() {
        if !next.text.is_empty() {
            told.push(String::new());
        }
        next.text.insert(0, Text::Now(told.join("\n")));
    }
    next
}

/// The messages since the last turn ended, with an answer or by an abort.
fn current_turn(messages: &[Value]) -> &[Value] {
    let ended = messages.iter().rposition(|message| {
        let answered = message["role"] == "assistant" && !has_calls(message);
        // This is how OpenClaw fills in for the result of an aborted call.
        let aborted = message["role"] == "tool" && content(message).contains("missing tool result");
        answered || aborted
    });
    &messages[ended.map_or(0, |at| at + 1)..]
}

fn has_calls(message: &Value) -> bool {
    message["tool_calls"].as_array().is_some_and(|calls| !calls.is_empty())
}

/// OpenClaw adds context of its own as a message of the user.
fn is_said_by_user(message: &Value) -> bool {
    message["role"] == "user" && !content(message).starts_with("<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT")
}

fn content(message: &Value) -> String {
    let text: String = match &message["content"] {
        Value::String(text) => text.clone(),
        Value::Array(parts) => parts.iter().filter_map(|part| part["text"].as_str()).collect(),
        _ => String::new(),
    };
    if message["role"] == "user" { as_typed(&text).to_owned() } else { text }
}

/// A user's text without what OpenClaw puts around it: the time before, facts about itself after.
fn as_typed(text: &str) -> &str {
    let text = text.split("\n\nRuntime: agent=").next().unwrap_or(text);
    let Some((time, typed)) = text.strip_prefix('[').and_then(|rest| rest.split_once("] ")) else {
        return text;
    };
    match time.split(' ').collect::<Vec<_>>()[..] {
        [_day, date, hour, _zone] if date.len() == 10 && hour.len() == 5 => typed,
        _ => text,
    }
}

fn call_json(index: usize, call: &Call) -> Value {
    let id = format!("call_{}", &uuid::Uuid::new_v4().simple().to_string()[..12]);
    json!({"index": index, "id": id, "type": "function",
        "function": {"name": call.tool, "arguments": call.args}})
}

fn usage() -> Value {
    json!({"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15})
}

fn whole(id: &str, answer: Answer) -> Response {
    let text: String = answer
        .text
        .iter()
        .flat_map(|text| match text {
            Text::Now(text) => vec![text.clone()],
            Text::Slow(words) => script::slow_words(*words).collect(),
        })
        .collect();
    let mut message = json!({"role": "assistant", "content": text});
    let mut reason = "stop";
    if !answer.calls.is_empty() {
        let calls = answer.calls.iter().enumerate();
        message["tool_calls"] = calls.map(|(at, call)| call_json(at, call)).collect();
        reason = "tool_calls";
    }
    Json(json!({"id": id, "object": "chat.completion", "created": now_s(), "model": MODEL,
        "choices": [{"index": 0, "message": message, "finish_reason": reason}],
        "usage": usage()}))
    .into_response()
}

fn stream(id: &str, answer: Answer, piece: Option<usize>) -> Response {
    let chunk = |choices: Value| {
        let chunk = json!({"id": id, "object": "chat.completion.chunk", "created": now_s(),
            "model": MODEL, "choices": choices});
        format!("data: {chunk}\n\n")
    };
    let delta =
        |delta: Value, reason: Value| chunk(json!([{"index": 0, "delta": delta, "finish_reason": reason}]));
    let at_once = Duration::ZERO;
    let mut events = vec![(at_once, delta(json!({"role": "assistant", "content": ""}), Value::Null))];
    for text in &answer.text {
        match text {
            Text::Now(text) => events.extend(
                pieces(text, piece)
                    .into_iter()
                    .map(|part| (at_once, delta(json!({"content": part}), Value::Null))),
            ),
            Text::Slow(words) => events.extend(
                script::slow_words(*words)
                    .map(|word| (script::SLOW_WORD, delta(json!({"content": word}), Value::Null))),
            ),
        }
    }
    for (at, call) in answer.calls.iter().enumerate() {
        let mut start = call_json(at, call);
        start["function"]["arguments"] = "".into();
        let rest = json!({"index": at, "function": {"arguments": call.args}});
        events.push((at_once, delta(json!({"tool_calls": [start]}), Value::Null)));
        events.push((at_once, delta(json!({"tool_calls": [rest]}), Value::Null)));
    }
    let reason = if answer.calls.is_empty() { "stop" } else { "tool_calls" };
    events.push((at_once, delta(json!({}), reason.into())));
    let end = json!({"id": id, "object": "chat.completion.chunk", "created": now_s(),
        "model": MODEL, "choices": [], "usage": usage()});
    events.push((at_once, format!("data: {end}\n\ndata: [DONE]\n\n")));

    let body = futures::stream::iter(events).then(|(delay, event)| async move {
        if !delay.is_zero() {
            tokio::time::sleep(delay).await;
        }
        Ok::<_, std::convert::Infallible>(event)
    });
    ([(CONTENT_TYPE, "text/event-stream")], Body::from_stream(body)).into_response()
}

/// A text cut into words with their white space, or into pieces of some characters.
fn pieces(text: &str, characters: Option<usize>) -> Vec<String> {
    match characters {
        None => text.split_inclusive(char::is_whitespace).map(str::to_owned).collect(),
        Some(size) => {
            let all: Vec<char> = text.chars().collect();
            all.chunks(size.max(1)).map(|part| part.iter().collect()).collect()
        }
    }
}

fn now_s() -> u64 {
    std::time::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn user(text: &str) -> Value {
        json!({"role": "user", "content": text})
    }

    fn called(tool: &str) -> Value {
        json!({"role": "assistant", "content": null,
            "tool_calls": [{"id": "c", "function": {"name": tool, "arguments": "{}"}}]})
    }

    fn result(text: &str) -> Value {
        json!({"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": text}]})
    }

    fn said(text: &str) -> Value {
        json!({"role": "assistant", "content": text})
    }

    /// Text as said, calls as `!tool`.
    fn shown(messages: &[Value]) -> String {
        let answer = answer(messages);
        let text = answer.text.iter().map(|text| match text {
            Text::Now(text) => text.clone(),
            Text::Slow(words) => format!("<{words} words>"),
        });
        let calls = answer.calls.iter().map(|call| format!("!{}", call.tool));
        text.chain(calls).collect()
    }

    #[test]
    fn the_conversation_decides_what_is_said_next() {
        let context = || user("<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT CALL nothing");
        let cases: Vec<(&str, Vec<Value>)> = vec![
            ("echo: hi", vec![user("hi")]),
            ("echo: hi", vec![user("hi"), context()]),
            (
                "echo: hi\n\nyou",
                vec![user("[Tue 2026-12-01 08:52 UTC] hi\n\nyou\n\nRuntime: agent=main | host=vm")],
            ),
            ("echo: [1] a UTC] b", vec![user("[1] a UTC] b")]),
            ("echo: ", vec![]),
            ("!a", vec![user("CALL a {}"), context()]),
            ("!a!b", vec![user("CALL a {} CALL b {}")]),
            ("tool said: 1", vec![user("CALL a {}"), called("a"), result("1"), context()]),
            (
                "tool said: 1\ntool said: 2",
                vec![user("CALL a {} CALL b {}"), called("a"), result("1"), result("2")],
            ),
            ("!b", vec![user("CALL a {} THEN CALL b {}"), called("a"), result("1")]),
            (
                "tool said: 1\ntool said: 2",
                vec![user("CALL a {} THEN CALL b {}"), called("a"), result("1"), called("b"), result("2")],
            ),
            ("tool said: 1\n<2 words>", vec![user("CALL a {} THEN SLOW 2"), called("a"), result("1")]),
            ("<2 words>!b", vec![user("SLOW 2 THEN CALL b {}")]),
            // steered
            ("tool said: 1\necho: a joke", vec![user("CALL a {}"), called("a"), result("1"), user("a joke")]),
            ("!b", vec![user("CALL a {}"), called("a"), result("1"), user("CALL b {}")]),
            // a turn that ended is over
            ("echo: hi", vec![user("CALL a {}"), called("a"), result("1"), said("tool said: 1"), user("hi")]),
            (
                "echo: hi",
                vec![
                    user("CALL a {} THEN CALL b {}"),
                    called("a"),
                    result("[openclaw] missing tool result"),
                    user("hi"),
                ],
            ),
        ];
        for (expected, messages) in cases {
            assert_eq!(shown(&messages), expected, "{messages:?}");
        }
    }
}
