//! The MCP server: the tool `request_user_input` over streamable HTTP, for any MCP client.
//!
//! Written by hand, since a call must outlive this process: the answer to `tools/call` is an SSE
//! stream whose event ids carry the question's key and the request's id, so that any replica can
//! go on with it after `GET` with `Last-Event-ID`. No session is kept in memory.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ask_bus::Stored;
use ask_core::entry::{Entry, Road};
use ask_core::key::{QuestionKey, decode_token, encode_token};
use axum::Router;
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Json, Response};
use axum::routing::post;
use serde::Deserialize;
use serde_json::{Value, json};
use service_kit::http::{ApiError, check_bearer, limit_body};

use crate::SERVICE;
use crate::adapter::args_digest;
use crate::binding::{Binding, Origin};
use crate::calls::{Asked, Call, Calls, MAX_TIMEOUT, Refused, TOOL};
use crate::plugin::{MAX_BODY, MAX_ID, with_beats};

/// The revisions of the protocol that are spoken, the newest last.
const REVISIONS: [&str; 3] = ["2025-03-26", "2025-06-18", "2025-11-25"];
/// From this revision on, a stream begins with an event without data.
const PRIMED_SINCE: &str = "2025-11-25";
const SESSION_HEADER: &str = "mcp-session-id";
const REVISION_HEADER: &str = "mcp-protocol-version";
/// After this time a client connects again. Clients try twice, so a restart may take up to 20 s.
const RETRY_MS: u64 = 10_000;
const OPEN_AGAIN: Duration = Duration::from_millis(500);

const PARSE_ERROR: i32 = -32700;
const INVALID_REQUEST: i32 = -32600;
const METHOD_NOT_FOUND: i32 = -32601;
const INVALID_PARAMS: i32 = -32602;

/// The route `/mcp`.
pub(crate) fn routes(calls: Arc<Calls>) -> Router {
    let mcp =
        Mcp { binding: Binding::new(calls.adapter.clone()), calls: calls.clone(), open: Mutex::default() };
    let routes = Router::new()
        .route("/mcp", post(message).get(resume).delete(end_session))
        .layer(middleware::from_fn_with_state(calls, admit))
        .with_state(Arc::new(mcp));
    limit_body(routes, MAX_BODY)
}

/// Lets only bearers of the configured token in, and of web pages only those of known origins: a
/// page that has this machine's name resolved to it would else speak here (DNS rebinding).
async fn admit(State(calls): State<Arc<Calls>>, request: Request, next: Next) -> Response {
    let http = &calls.adapter.config.http;
    if let Some(origin) = request.headers().get(header::ORIGIN) {
        let origin = origin.to_str().unwrap_or("unreadable");
        if !is_allowed(origin, &http.origins) {
            let message = format!("the origin {origin} is not allowed; add it to adapter.http.origins");
            let error = ApiError::new(StatusCode::FORBIDDEN, "unknown_origin", message);
            return refused(&Value::Null, &error);
        }
    }
    match check_bearer(request.headers(), &http.token) {
        Ok(()) => next.run(request).await,
        Err(error) => refused(&Value::Null, &error),
    }
}

fn is_allowed(origin: &str, listed: &[String]) -> bool {
    let host = origin.split_once("://").map_or("", |(_, host)| host);
    let host = match host.strip_prefix('[') {
        Some(v6) => v6.split(']').next(),
        None => host.split(':').next(),
    };
    matches!(host, Some("localhost" | "127.0.0.1" | "::1"))
        || listed.iter().any(|listed| listed.eq_ignore_ascii_case(origin))
}

struct Mcp {
    calls: Arc<Calls>,
    binding: Binding,
    /// The requests that wait here, by client and id, so that they can be cancelled.
    open: Mutex<HashMap<(String, Value), Open>>,
}

struct Open {
    /// Its question, once it is known whose call it is.
    key: Option<QuestionKey>,
    since: Instant,
}

/// A client, by its `mcp-session-id`, which says all that must be known of it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Client {
    id: String,
}

/// Begins the id of a client that belongs to the Gateway.
const OF_GATEWAY: &str = "openclaw-";

impl Client {
    fn new(name: &str) -> Self {
        let prefix = if name.to_lowercase().contains("openclaw") { OF_GATEWAY } else { "" };
        Self { id: format!("{prefix}{}", uuid::Uuid::new_v4()) }
    }

    fn of(headers: &HeaderMap) -> Result<Self, ApiError> {
        let refused =
            |status, code, message: &str| Err(ApiError::new(status, code, message).field(SESSION_HEADER));
        let Some(id) = headers.get(SESSION_HEADER).and_then(|id| id.to_str().ok()) else {
            let message = "the header mcp-session-id is missing; send the one that initialize gave";
            return refused(StatusCode::BAD_REQUEST, "no_session", message);
        };
        match uuid::Uuid::try_parse(id.strip_prefix(OF_GATEWAY).unwrap_or(id)) {
            Ok(_) => Ok(Self { id: id.into() }),
            // By the protocol, a client that gets this initializes again.
            Err(_) => refused(StatusCode::NOT_FOUND, "unknown_session", "no such session; initialize again"),
        }
    }

    fn is_of_gateway(&self) -> bool {
        self.id.starts_with(OF_GATEWAY)
    }

    /// The session of a client that speaks for none of the Gateway's.
    fn own_session(&self) -> String {
        format!("mcp-{}", self.id)
    }
}

#[derive(Deserialize)]
struct Message {
    id: Option<Value>,
    method: Option<String>,
    #[serde(default)]
    params: Value,
}

/// Where the answer to a request belongs; an event's id says it.
#[derive(Debug, Clone, PartialEq)]
struct Place {
    key: QuestionKey,
    request: Value,
}

impl Place {
    /// The id of the first event of the stream, or of the one with the answer.
    fn event_id(&self, answered: bool) -> String {
        let request = encode_token(&self.request.to_string());
        format!("{}.{request}.{}", self.key, u8::from(answered))
    }

    fn from_event_id(id: &str) -> Option<Self> {
        let (rest, _) = id.rsplit_once('.')?;
        let (key, request) = rest.rsplit_once('.')?;
        let request = serde_json::from_str(&decode_token(request)?).ok()?;
        Some(Self { key: key.parse().ok()?, request })
    }
}

async fn message(
    State(mcp): State<Arc<Mcp>>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Response {
    let body = match body {
        Ok(body) => body,
        Err(rejection) => {
            let why =
                format!("the message can't be read; it may have {MAX_BODY} bytes, ask for less at once");
            return failed(rejection.status(), &Value::Null, INVALID_REQUEST, &why);
        }
    };
    let message: Message = match serde_json::from_slice(&body) {
        Ok(message) => message,
        Err(_) => {
            return failed(StatusCode::BAD_REQUEST, &Value::Null, PARSE_ERROR, "not a JSON-RPC message");
        }
    };
    // A response, to a request that this server never sends.
    let Some(method) = message.method.as_deref() else { return StatusCode::ACCEPTED.into_response() };
    let Some(id) = message.id else {
        if method == "notifications/cancelled"
            && let Ok(client) = Client::of(&headers)
        {
            mcp.cancel(&client, &message.params["requestId"]);
        }
        return StatusCode::ACCEPTED.into_response();
    };
    if !(id.is_string() || id.is_number()) || id.as_str().is_some_and(|id| id.len() > MAX_ID) {
        let why = format!("`id` must be a number or text of at most {MAX_ID} bytes");
        return failed(StatusCode::BAD_REQUEST, &Value::Null, INVALID_REQUEST, &why);
    }
    if method == "initialize" {
        return initialize(&id, &message.params);
    }
    let revision = headers.get(REVISION_HEADER).map_or(Ok(REVISIONS[0]), |r| r.to_str()).unwrap_or("");
    if !REVISIONS.contains(&revision) {
        let why = format!("{REVISION_HEADER} must be one of {}, got: {revision}", REVISIONS.join(", "));
        return failed(StatusCode::BAD_REQUEST, &id, INVALID_REQUEST, &why);
    }
    let client = match Client::of(&headers) {
        Ok(client) => client,
        Err(error) => return refused(&id, &error),
    };
    match method {
        "ping" => result(&id, json!({})),
        "tools/list" => result(&id, json!({ "tools": [tool()] })),
        "tools/call" if message.params["name"] == TOOL => {
            mcp.call(client, id, &message.params["arguments"], revision)
        }
        "tools/call" => {
            let why = format!("unknown tool {}; this server has {TOOL}", message.params["name"]);
            failed(StatusCode::OK, &id, INVALID_PARAMS, &why)
        }
        _ => failed(StatusCode::OK, &id, METHOD_NOT_FOUND, &format!("no method {method}")),
    }
}

fn initialize(id: &Value, params: &Value) -> Response {
    let asked = params["protocolVersion"].as_str().unwrap_or_default();
    let newest = REVISIONS[REVISIONS.len() - 1];
    let revision = REVISIONS.into_iter().find(|r| *r == asked).unwrap_or(newest);
    let client = Client::new(params["clientInfo"]["name"].as_str().unwrap_or_default());
    let answer = json!({
        "protocolVersion": revision,
        "capabilities": { "tools": {} },
        "serverInfo": { "name": "askbus", "version": SERVICE.version },
    });
    ([(SESSION_HEADER, client.id)], result(id, answer)).into_response()
}

fn tool() -> Value {
    json!({
        "name": TOOL,
        "description": "Ask the user a question. Returns their answer as a string.",
        "inputSchema": {
            "type": "object",
            "properties": {
                "question": {
                    "type": "string",
                    "description": "The question to ask the user. Clear, specific, one question.",
                },
                "choices": {
                    "type": "array",
                    "items": { "type": "string" },
                    "description": "Optional list of predefined choices. The user can pick one or type a custom answer.",
                },
                "secret": {
                    "type": "boolean",
                    "description": "If true, the input should not be echoed visually. Use for passwords or sensitive values.",
                },
                "multiple": {
                    "type": "boolean",
                    "description": "If true, the user can pick several choices; the answer is then a JSON list.",
                },
                "timeout_seconds": {
                    "type": "number",
                    "minimum": 1,
                    "maximum": MAX_TIMEOUT.as_secs(),
                    "description": "How long to wait for the answer.",
                },
            },
            "required": ["question"],
        },
    })
}

async fn resume(State(mcp): State<Arc<Mcp>>, headers: HeaderMap) -> Response {
    try_resume(&mcp, &headers).await.unwrap_or_else(|error| refused(&Value::Null, &error))
}

async fn try_resume(mcp: &Arc<Mcp>, headers: &HeaderMap) -> Result<Response, ApiError> {
    let Some(last) = headers.get("last-event-id") else {
        // This server says nothing of its own accord.
        return Ok((StatusCode::METHOD_NOT_ALLOWED, [(header::ALLOW, "POST, DELETE")]).into_response());
    };
    let client = Client::of(headers)?;
    let place = last.to_str().ok().and_then(Place::from_event_id);
    let place = place.filter(|place| place.key.gateway == mcp.calls.adapter.gateway());
    let place = place.ok_or_else(|| {
        let message = "last-event-id must be the id of an event of this server";
        ApiError::new(StatusCode::BAD_REQUEST, "bad_event_id", message).field("last-event-id")
    })?;
    if !mcp.may_read(&client, &place.key).await.map_err(Refused::from)? {
        let message = "this stream belongs to another session";
        return Err(ApiError::new(StatusCode::NOT_FOUND, "other_session", message).field("last-event-id"));
    }
    mcp.remember(&client, &place.request, Some(&place.key));
    Ok(mcp.stream(client, Stage::Resume(place)))
}

/// The client has ended its session: its calls wait for nothing any more.
async fn end_session(State(mcp): State<Arc<Mcp>>, headers: HeaderMap) -> Response {
    match try_end_session(&mcp, &headers).await {
        Ok(()) => StatusCode::NO_CONTENT.into_response(),
        Err(error) => refused(&Value::Null, &error),
    }
}

async fn try_end_session(mcp: &Mcp, headers: &HeaderMap) -> Result<(), ApiError> {
    let client = Client::of(headers)?;
    let of_client = mcp.open().keys().filter(|(id, _)| *id == client.id).cloned().collect::<Vec<_>>();
    for (_, request) in of_client {
        mcp.cancel(&client, &request);
    }
    let adapter = &mcp.calls.adapter;
    adapter.bus.clear_mcp_session(adapter.gateway(), &client.id).await.map_err(Refused::from)?;
    Ok(())
}

/// How far the answer to a call is.
enum Stage {
    Bind(Unbound),
    Open {
        call: Call,
        asked: Asked,
        place: Place,
    },
    Resume(Place),
    Wait(Place),
    /// The outcome is on its way; asked for more, the stream has handed it over.
    Answered(Arc<Stored<Entry>>),
    Done,
}

/// A call of which it is not known yet whose it is.
struct Unbound {
    request: Value,
    asked: Asked,
    digest: String,
    /// The stream begins with an event without data.
    primed: bool,
}

impl Mcp {
    fn call(self: &Arc<Self>, client: Client, request: Value, args: &Value, revision: &str) -> Response {
        match self.calls.read(args) {
            Ok(asked) => {
                self.remember(&client, &request, None);
                let (digest, primed) = (args_digest(args), revision >= PRIMED_SINCE);
                self.stream(client, Stage::Bind(Unbound { request, asked, digest, primed }))
            }
            Err(invalid) => result(&request, tool_result(&invalid.to_string(), None, true)),
        }
    }

    fn stream(self: &Arc<Self>, client: Client, stage: Stage) -> Response {
        let (mcp, client) = (self.clone(), Arc::new(client));
        let events = futures::stream::unfold(stage, move |stage| {
            let (mcp, client) = (mcp.clone(), client.clone());
            async move { mcp.step(&client, stage).await }
        });
        let headers = [
            (header::CONTENT_TYPE.as_str(), "text/event-stream".to_owned()),
            (header::CACHE_CONTROL.as_str(), "no-cache".to_owned()),
        ];
        (headers, with_beats(events, b": waiting\n\n")).into_response()
    }

    /// The next event; `None` ends the stream, and a client without its answer comes again.
    async fn step(&self, client: &Client, mut stage: Stage) -> Option<(Bytes, Stage)> {
        loop {
            stage = match stage {
                Stage::Bind(unbound) => return self.begin(client, unbound).await,
                Stage::Open { call, asked, place } => match self.open_question(&call, &asked).await? {
                    Ok(()) => Stage::Wait(place),
                    Err(why) => return Some(self.answer(client, &place, tool_result(&why, None, true))),
                },
                Stage::Resume(place) => match self.is_open(&place.key).await? {
                    true => Stage::Wait(place),
                    false => {
                        let why = "the question was lost before it was shown; ask again";
                        return Some(self.answer(client, &place, tool_result(why, None, true)));
                    }
                },
                Stage::Wait(place) => {
                    let decided = self.calls.decided(&place.key).await?;
                    match self.calls.result(&decided) {
                        Ok(told) => {
                            let secret = told.secret.as_ref().map(|value| value.as_str());
                            // OpenClaw would put the structured content before the answer.
                            let details = Some(told.details).filter(|_| !client.is_of_gateway());
                            let answer = tool_result(secret.unwrap_or(&told.text), details, false);
                            let (event, _) = self.answer(client, &place, answer);
                            return Some((event, Stage::Answered(decided)));
                        }
                        Err(error) => {
                            tracing::error!(question = %place.key, %error, "a secret can't be opened here");
                            return None;
                        }
                    }
                }
                Stage::Answered(decided) => {
                    if decided.value.returned().is_none() {
                        self.calls.was_written(&decided.value.key);
                    }
                    return None;
                }
                Stage::Done => return None,
            }
        }
    }

    /// The first event, which says how to come again. It is sent before the question is written: a
    /// client that loses this process in between asks for it and is told.
    async fn begin(&self, client: &Client, unbound: Unbound) -> Option<(Bytes, Stage)> {
        let Unbound { request, asked, digest, primed } = unbound;
        let bound = self.bind(client, &request, &digest).await?;
        // Cancelled meanwhile.
        self.forget(client, &request)?;
        let call = match bound {
            Ok(call) => call,
            Err(why) => {
                let answer = tool_result(&undeliverable(why), None, false);
                return Some((event(None, &request, &answer), Stage::Done));
            }
        };
        let place = Place { key: call.key(), request };
        self.remember(client, &place.request, Some(&place.key));
        let data = if primed { "data: \n" } else { "" };
        let event = format!("id: {}\nretry: {RETRY_MS}\n{data}\n", place.event_id(false));
        Some((event.into(), Stage::Open { call, asked, place }))
    }

    /// Whose call it is, or why nobody can be asked. `None` when this replica stops.
    async fn bind(
        &self,
        client: &Client,
        request: &Value,
        digest: &str,
    ) -> Option<Result<Call, &'static str>> {
        let adapter = &self.calls.adapter;
        let known = loop {
            match adapter.bus.mcp_session(adapter.gateway(), &client.id).await {
                Ok(known) => break known,
                Err(error) => self.pause(&error).await?,
            }
        };
        let own = client.own_session();
        let origin = match known.as_deref() == Some(&own) {
            true => Origin::Unknown,
            false => self.binding.origin(digest, known.as_deref()).await,
        };
        let call = match origin {
            Origin::Start(start) => Call {
                session: start.session,
                run: start.run,
                // Models repeat the ids of their calls.
                id: format!("{}.{}.{request}", start.call, client.id),
                tool_call: start.call,
                road: Road::Mcp,
            },
            Origin::Ambiguous => {
                return Some(Err("it could come from several sessions that ask the same now"));
            }
            Origin::Unknown if client.is_of_gateway() => {
                return Some(Err("the gateway reported no such tool call, so its session is not known"));
            }
            Origin::Unknown => Call {
                session: adapter.session(&own),
                run: own.clone(),
                id: request.to_string(),
                tool_call: request.as_str().map_or_else(|| request.to_string(), str::to_owned),
                road: Road::McpAlone,
            },
        };
        let session = &call.session.session;
        if known.as_ref() != Some(session) {
            while let Err(error) = adapter.bus.write_mcp_session(adapter.gateway(), &client.id, session).await
            {
                self.pause(&error).await?;
            }
        }
        Some(Ok(call))
    }

    /// Opens the question, as long as it can still be asked; the error is for the model.
    async fn open_question(&self, call: &Call, asked: &Asked) -> Option<Result<(), String>> {
        let began = Instant::now();
        loop {
            match self.calls.open(call, asked).await {
                Ok(()) => return Some(Ok(())),
                Err(Refused::Bus(error)) if began.elapsed() < asked.timeout => self.pause(&error).await?,
                Err(refused) => return Some(Err(refused.to_string())),
            }
        }
    }

    async fn is_open(&self, key: &QuestionKey) -> Option<bool> {
        loop {
            match self.calls.adapter.bus.question(key).await {
                Ok(stored) => return Some(stored.is_some()),
                Err(error) => self.pause(&error).await?,
            }
        }
    }

    /// `None` when this replica stops.
    async fn pause(&self, error: &ask_bus::BusError) -> Option<()> {
        tracing::warn!(%error, "an mcp call waits for the bus");
        let shutdown = &self.calls.adapter.shutdown;
        shutdown.run_until_cancelled(tokio::time::sleep(OPEN_AGAIN)).await
    }

    /// A client reads only what belongs to the session that it speaks for.
    async fn may_read(&self, client: &Client, key: &QuestionKey) -> Result<bool, ask_bus::BusError> {
        let adapter = &self.calls.adapter;
        let known = adapter.bus.mcp_session(adapter.gateway(), &client.id).await?;
        Ok(known.is_some_and(|session| session == key.session))
    }

    fn answer(&self, client: &Client, place: &Place, answer: Value) -> (Bytes, Stage) {
        self.forget(client, &place.request);
        (event(Some(place), &place.request, &answer), Stage::Done)
    }

    /// Cancels the question of a request; a request that is not known here is ignored.
    fn cancel(&self, client: &Client, request: &Value) {
        let Some(key) = self.forget(client, request).and_then(|open| open.key) else { return };
        let calls = self.calls.clone();
        // It repeats and logs by itself.
        tokio::spawn(async move { calls.cancel(&key).await });
    }

    fn remember(&self, client: &Client, request: &Value, key: Option<&QuestionKey>) {
        let mut open = self.open();
        // What was not answered here was answered by another replica, or its client is gone.
        open.retain(|_, open| open.since.elapsed() < MAX_TIMEOUT);
        let waits = Open { key: key.cloned(), since: Instant::now() };
        open.insert((client.id.clone(), request.clone()), waits);
    }

    fn forget(&self, client: &Client, request: &Value) -> Option<Open> {
        self.open().remove(&(client.id.clone(), request.clone()))
    }

    fn open(&self) -> MutexGuard<'_, HashMap<(String, Value), Open>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn tool_result(text: &str, details: Option<Value>, is_error: bool) -> Value {
    let mut result = json!({ "content": [{ "type": "text", "text": text }], "isError": is_error });
    if let Some(details) = details {
        result["structuredContent"] = details;
    }
    result
}

/// As ask-core words it, for a call that has no entry.
fn undeliverable(why: &str) -> String {
    json!({
        "error": "The question could not be shown to the user",
        "status": "undeliverable",
        "reason": "ambiguous_identity",
        "why": why,
    })
    .to_string()
}

fn event(place: Option<&Place>, request: &Value, answer: &Value) -> Bytes {
    let id = place.map(|place| format!("id: {}\n", place.event_id(true))).unwrap_or_default();
    let response = json!({ "jsonrpc": "2.0", "id": request, "result": answer });
    format!("{id}event: message\ndata: {response}\n\n").into()
}

fn result(id: &Value, result: Value) -> Response {
    Json(json!({ "jsonrpc": "2.0", "id": id, "result": result })).into_response()
}

/// A refusal in the protocol's own shape.
fn refused(id: &Value, error: &ApiError) -> Response {
    failed(error.status(), id, INVALID_REQUEST, &error.to_string())
}

fn failed(status: StatusCode, id: &Value, code: i32, message: &str) -> Response {
    let error = json!({ "code": code, "message": message });
    (status, Json(json!({ "jsonrpc": "2.0", "id": id, "error": error }))).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_pages_of_this_machine_and_of_listed_origins_may_speak() {
        let listed = ["https://tools.example".to_owned()];
        for (origin, allowed) in [
            ("http://localhost", true),
            ("http://localhost:3000", true),
            ("https://127.0.0.1:8443", true),
            ("http://[::1]:3000", true),
            ("https://tools.example", true),
            ("https://Tools.example", true),
            ("http://tools.example", false),
            ("https://tools.example.evil.example", false),
            ("http://localhost.evil.example", false),
            ("http://127.0.0.1.evil.example:7801", false),
            ("null", false),
            ("", false),
        ] {
            assert_eq!(is_allowed(origin, &listed), allowed, "{origin}");
        }
    }

    #[test]
    fn an_event_id_carries_key_and_request() {
        for request in [json!(2), json!("a.b=c d")] {
            let key: QuestionKey = "g.agent=3Amain=3Ax.r.q".parse().unwrap();
            let place = Place { key, request };
            assert_eq!(Place::from_event_id(&place.event_id(false)), Some(place.clone()));
            assert_eq!(Place::from_event_id(&place.event_id(true)), Some(place));
        }
        for id in ["", "1", "g.s.r.q", "a.b.c.d.e.f.g"] {
            assert_eq!(Place::from_event_id(id), None, "{id}");
        }
    }
}
