//! The routes of `docs/pipe-protocol.md`.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use ask_bus::{BusError, Change, Stored};
use ask_core::entry::Entry;
use ask_core::key::SessionKey;
use ask_core::outcome::{CancelReason, Outcome};
use ask_core::question::Invalid;
use ask_core::reply::{ReplyContent, Responder};
use ask_core::surface::Surface;
use ask_core::wire::{Attachment, ReplyResponse, ShownEvent, ShownResponse};
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use bytes::Bytes;
use serde::Deserialize;
use serde_json::json;
use service_kit::http::{ApiError, ApiJson, check_bearer, limit_body};
use tokio::time::Instant;

use crate::cursor::{Cursor, split_call};
use crate::hub::{Event, Looking};
use crate::limits::{
    MAX_ATTACHMENTS, MAX_BODY, MAX_MESSAGE, MAX_NAME, MAX_ON_SCREEN, check_id, check_length, invalid,
    too_long,
};
use crate::reply::{BadAnswer, Given, answers};
use crate::turn::Turn;
use crate::{Emitter, lock, words};

/// How long a list of agents is good for.
const AGENTS_FOR: Duration = Duration::from_secs(5);

pub(crate) fn routes(emitter: Arc<Emitter>) -> Router {
    let router = Router::new()
        .route("/v1/turn", post(turn))
        .route("/v1/shown", post(shown))
        .route("/v1/reply", post(reply))
        .route("/v1/presence", post(presence))
        .route("/v1/left", post(left))
        .route("/v1/models", get(models))
        .layer(middleware::from_fn_with_state(emitter.clone(), only_front_ends))
        .with_state(emitter);
    limit_body(router, MAX_BODY)
}

async fn only_front_ends(
    State(emitter): State<Arc<Emitter>>,
    request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    check_bearer(request.headers(), &emitter.config.http.token)?;
    Ok(next.run(request).await)
}

/// The person at the front end.
#[derive(Deserialize)]
pub(crate) struct User {
    pub id: String,
    #[serde(default)]
    pub name: String,
}

impl User {
    fn check(&self) -> Result<(), ApiError> {
        check_id("user.id", &self.id)?;
        check_length("user.name", &self.name, MAX_NAME, "send a shorter one")
    }

    fn name(&self) -> Option<String> {
        (!self.name.is_empty()).then(|| self.name.clone())
    }
}

/// The body of `POST /v1/turn`.
#[derive(Deserialize)]
pub(crate) struct TurnRequest {
    pub chat: Option<String>,
    pub message: String,
    pub agent: String,
    #[serde(default)]
    pub gateway: Option<String>,
    pub user: User,
    #[serde(default)]
    pub text: Option<String>,
    #[serde(default)]
    pub attachments: Vec<Attachment>,
    #[serde(default)]
    pub on_screen: Option<Vec<String>>,
    /// The person had an answer continued, and typed nothing.
    #[serde(default)]
    pub continues: bool,
    pub front: String,
    pub surfaces: BTreeSet<Surface>,
    #[serde(default)]
    pub looking: bool,
    #[serde(default)]
    pub answer: Option<CardAnswer>,
    #[serde(default)]
    pub after: Option<String>,
}

/// What became of a durable card.
#[derive(Deserialize)]
pub(crate) struct CardAnswer {
    pub call: String,
    pub status: CardStatus,
    #[serde(default)]
    pub answers: BTreeMap<String, Given>,
    #[serde(default)]
    pub reason: Option<String>,
}

#[derive(Deserialize, Clone, Copy, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub(crate) enum CardStatus {
    Answered,
    Declined,
    Cancelled,
    Again,
    Refused,
}

async fn turn(
    State(emitter): State<Arc<Emitter>>,
    ApiJson(request): ApiJson<TurnRequest>,
) -> Result<Response, ApiError> {
    check_turn(&request)?;
    let after = match &request.after {
        Some(after) => Some(Cursor::parse(after).ok_or_else(|| {
            invalid("after", "`after` is no cursor; send the last `cursor` of this turn, or null")
        })?),
        None => None,
    };
    let card = match &request.answer {
        Some(answer) => Some(split_call(&answer.call).ok_or_else(|| {
            invalid(
                "answer.call",
                "`answer.call` is not the id of a durable card of ours: oc_<question>.<cursor>",
            )
        })?),
        None => None,
    };
    let card = card.map(|(question, cursor)| (question.to_owned(), cursor));
    let gateway = gateway_of(&emitter, request.gateway.as_deref()).await?;
    let session = session_key(&gateway, &request.agent, request.chat.as_deref(), &request.user.id);
    // A stranger must neither take over the stream of a chat nor read it.
    let bound = emitter.bus.session(&session).await.map_err(unsaved)?.map(|stored| stored.value);
    if bound.as_ref().is_some_and(|bound| bound.owner != request.user.id) {
        let message = "this chat belongs to another user, so nothing was sent";
        return Err(ApiError::new(StatusCode::FORBIDDEN, "wrong_user", message).field("user.id"));
    }
    let looking = Looking { looking: request.looking, other_chat: false };
    let Some(registration) = emitter.hub.register(&session, &request.message, looking) else {
        return Err(ApiError::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "not_ready",
            "the emitter is not connected to the bus yet; try again",
        ));
    };
    let lines = Turn::start(emitter, request, session, bound.as_ref(), registration, after, card);
    let headers = [(header::CONTENT_TYPE, "application/x-ndjson"), (header::CACHE_CONTROL, "no-store")];
    Ok((headers, Body::from_stream(lines)).into_response())
}

fn check_turn(request: &TurnRequest) -> Result<(), ApiError> {
    request.user.check()?;
    check_id("message", &request.message)?;
    check_id("agent", &request.agent)?;
    check_id("front", &request.front)?;
    if request.agent.contains(':') {
        return Err(invalid("agent", "`agent` has a colon in it; send the agent's id alone"));
    }
    check_chat(request.chat.as_deref())?;
    match (&request.text, &request.answer) {
        (None, None) => return Err(invalid("text", "`text` is missing; it is null only with `answer`")),
        (Some(_), Some(_)) => {
            return Err(invalid("text", "`text` must be null with `answer`: a card's answer is no message"));
        }
        _ => {}
    }
    if let Some(text) = &request.text {
        check_length("text", text, MAX_MESSAGE, "send a shorter message, or a file")?;
    }
    let attached: usize = request.attachments.iter().map(|a| a.data.len()).sum();
    if attached > MAX_ATTACHMENTS {
        let way_out = "send fewer or smaller files";
        return Err(too_long("attachments", MAX_ATTACHMENTS, attached, "base64 characters", way_out));
    }
    for (i, attachment) in request.attachments.iter().enumerate() {
        check_length(format!("attachments[{i}].name"), &attachment.name, MAX_NAME, "send a shorter one")?;
        check_length(format!("attachments[{i}].mime"), &attachment.mime, MAX_NAME, "send a shorter one")?;
    }
    let on_screen = request.on_screen.as_deref().unwrap_or_default();
    if on_screen.len() > MAX_ON_SCREEN {
        let way_out = "send the latest ones";
        return Err(too_long("on_screen", MAX_ON_SCREEN, on_screen.len(), "questions", way_out));
    }
    on_screen.iter().enumerate().try_for_each(|(i, id)| check_id(&format!("on_screen[{i}]"), id))?;
    match &request.answer {
        Some(answer) => {
            check_length("answer.call", &answer.call, 1_000, "send the card's own id")?;
            check_length("answer.reason", answer.reason.as_deref().unwrap_or(""), 1_000, "send less of it")
        }
        None => Ok(()),
    }
}

fn check_chat(chat: Option<&str>) -> Result<(), ApiError> {
    let Some(chat) = chat else { return Ok(()) };
    check_id("chat", chat)?;
    match chat.starts_with("api-") {
        true => Err(invalid("chat", "`chat` begins with `api-`, which names callers without a chat")),
        false => Ok(()),
    }
}

/// The configured gateway, or another one that was provisioned.
async fn gateway_of(emitter: &Emitter, named: Option<&str>) -> Result<String, ApiError> {
    let own = &emitter.config.gateway;
    let Some(named) = named.filter(|named| named != own) else { return Ok(own.clone()) };
    check_id("gateway", named)?;
    match emitter.bus.seal_key(named).await.map_err(unsaved)? {
        Some(_) => Ok(named.to_owned()),
        None => Err(ApiError::new(
            StatusCode::UNPROCESSABLE_ENTITY,
            "unknown_gateway",
            format!("the gateway `{named}` was never provisioned; the default one is `{own}`"),
        )
        .field("gateway")
        .limit(own.clone())
        .value(named)),
    }
}

fn session_key(gateway: &str, agent: &str, chat: Option<&str>, user: &str) -> SessionKey {
    SessionKey::new(gateway, format!("agent:{agent}{}", chat_suffix(chat, user)))
}

fn chat_suffix(chat: Option<&str>, user: &str) -> String {
    match chat {
        Some(chat) => format!(":owui-{chat}"),
        None => format!(":owui-api-{user}"),
    }
}

/// What the requests beside a turn say about it. `agent` and `gateway` may be absent: then the
/// session is looked up.
#[derive(Deserialize)]
pub(crate) struct Ids {
    pub chat: Option<String>,
    pub message: String,
    pub user: User,
    #[serde(default)]
    agent: Option<String>,
    #[serde(default)]
    gateway: Option<String>,
}

impl Ids {
    fn check(&self) -> Result<(), ApiError> {
        self.user.check()?;
        check_id("message", &self.message)?;
        if let Some(agent) = &self.agent {
            check_id("agent", agent)?;
        }
        check_chat(self.chat.as_deref())
    }
}

impl Emitter {
    /// The sessions that these ids may mean: one where that can be told without reading them all.
    async fn sessions_of(&self, ids: &Ids) -> Result<Vec<SessionKey>, BusError> {
        if let Some(agent) = &ids.agent {
            let gateway = ids.gateway.as_deref().unwrap_or(&self.config.gateway);
            return Ok(vec![session_key(gateway, agent, ids.chat.as_deref(), &ids.user.id)]);
        }
        let suffix = chat_suffix(ids.chat.as_deref(), &ids.user.id);
        if let Some(session) = self.hub.session_of(&ids.message)
            && session.session.ends_with(&suffix)
        {
            return Ok(vec![session]);
        }
        let (mut sessions, mut all) = (Vec::new(), self.bus.watch_sessions());
        while let Some(change) = all.next().await {
            match change {
                Change::Put { value, .. } if value.key.session.ends_with(&suffix) => {
                    let of_message = value.messages.iter().any(|m| m.id == ids.message);
                    sessions.push((of_message, value.key));
                }
                Change::Loaded { .. } => break,
                _ => {}
            }
        }
        sessions.sort_by_key(|(of_message, _)| !of_message);
        Ok(sessions.into_iter().map(|(_, session)| session).collect())
    }

    /// The entry of a question of this chat.
    pub(crate) async fn question_of(
        &self,
        ids: &Ids,
        question: &str,
    ) -> Result<Option<Stored<Entry>>, BusError> {
        let suffix = chat_suffix(ids.chat.as_deref(), &ids.user.id);
        if let Some(key) = self.hub.key_of(question).filter(|key| key.session.ends_with(&suffix)) {
            return self.bus.question(&key).await;
        }
        for session in self.sessions_of(ids).await? {
            if let Some(found) = self.question_in(&session, question).await? {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }

    /// The entry of a question of this session.
    pub(crate) async fn question_in(
        &self,
        session: &SessionKey,
        question: &str,
    ) -> Result<Option<Stored<Entry>>, BusError> {
        if let Some(key) = self.hub.key_of(question).filter(|key| key.session_key() == *session) {
            return self.bus.question(&key).await;
        }
        let entries = self.bus.questions_of(session).await?;
        Ok(entries.into_iter().find(|stored| stored.value.key.question == question))
    }
}

/// The body of `POST /v1/shown`.
#[derive(Deserialize)]
struct ShownBody {
    #[serde(flatten)]
    ids: Ids,
    question: String,
    surface: Surface,
    event: Reported,
    #[serde(default)]
    reason: Option<String>,
}

#[derive(Deserialize, Clone, Copy, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
enum Reported {
    Delivered,
    /// It comes when another dialog is closed: neither shown nor refused.
    Waiting,
    Refused,
    Unsupported,
}

async fn shown(
    State(emitter): State<Arc<Emitter>>,
    ApiJson(body): ApiJson<ShownBody>,
) -> Result<StatusCode, ApiError> {
    body.ids.check()?;
    check_id("question", &body.question)?;
    check_length("reason", body.reason.as_deref().unwrap_or(""), 1_000, "send less of it")?;
    let stored = emitter.question_of(&body.ids, &body.question).await.map_err(unsaved)?;
    let entry = stored.ok_or_else(|| unknown_question(&body.question))?.value;
    let event = match body.event {
        Reported::Delivered => ShownEvent::Delivered,
        Reported::Waiting => ShownEvent::Waiting,
        Reported::Refused | Reported::Unsupported => {
            emitter.hub.tell(&entry.key.session_key(), Event::Refused(body.question));
            let reason = body.reason.unwrap_or_else(|| "the front end gave no reason".into());
            ShownEvent::Refused { reason }
        }
    };
    let chat = body.ids.chat;
    // What waits must be known to every router before it goes on to another surface.
    if matches!(body.surface, Surface::Text | Surface::Durable) || body.event == Reported::Waiting {
        let noted = emitter.report_on_record(&entry, body.surface, chat.as_deref(), event).await;
        return match noted.map_err(unsaved)? {
            ShownResponse::Noted { .. } => Ok(StatusCode::NO_CONTENT),
            ShownResponse::UnknownQuestion => Err(unknown_question(&entry.key.question)),
            ShownResponse::Retry { why } => Err(not_saved(why)),
        };
    }
    emitter.later(emitter.clone().report_until_on_record(entry, body.surface, chat, event));
    Ok(StatusCode::NO_CONTENT)
}

/// The body of `POST /v1/reply`.
#[derive(Deserialize)]
struct ReplyBody {
    #[serde(flatten)]
    ids: Ids,
    reply: String,
    question: String,
    surface: Surface,
    #[serde(default)]
    answers: Option<BTreeMap<String, Given>>,
    #[serde(default)]
    declined: bool,
    #[serde(default)]
    cancelled: Option<CancelledBy>,
}

#[derive(Deserialize, Clone, Copy)]
#[serde(rename_all = "snake_case")]
enum CancelledBy {
    User,
    ChatSwitch,
}

async fn reply(
    State(emitter): State<Arc<Emitter>>,
    ApiJson(body): ApiJson<ReplyBody>,
) -> Result<Response, ApiError> {
    body.ids.check()?;
    check_id("reply", &body.reply)?;
    check_id("question", &body.question)?;
    let stored = emitter.question_of(&body.ids, &body.question).await.map_err(unsaved)?;
    let entry = stored.ok_or_else(|| unknown_question(&body.question))?.value;
    let content = match (body.answers, body.declined, body.cancelled) {
        (Some(given), false, None) => {
            let seal = match entry.question.is_secret() {
                true => emitter.bus.seal_key(&entry.key.gateway).await.map_err(unsaved)?,
                false => None,
            };
            let read = answers(&entry.key, &entry.question, given, body.surface, &body.reply, seal.as_ref());
            ReplyContent::Answers { answers: read.map_err(bad_answer)? }
        }
        (None, true, None) => ReplyContent::Declined,
        (None, false, Some(by)) => ReplyContent::Cancelled {
            reason: match by {
                CancelledBy::User => CancelReason::User,
                CancelledBy::ChatSwitch => CancelReason::ChatSwitch,
            },
        },
        _ => {
            let message =
                "a reply has one of `answers`, `\"declined\": true` and `cancelled`; send exactly one";
            return Err(invalid("answers", message));
        }
    };
    let by =
        Responder { user: body.ids.user.id.clone(), name: body.ids.user.name(), chat: body.ids.chat.clone() };
    let response = emitter.hand_in(&entry, &body.reply, by, body.surface, content).await.map_err(unsaved)?;
    match response {
        ReplyResponse::Saved => Ok(Json(json!({"result": "saved"})).into_response()),
        ReplyResponse::Closed { outcome, at, by, surface, sent_as_message } => {
            let message = words::too_late(&entry.question, &outcome, &by, surface, sent_as_message);
            let body = match &outcome {
                Outcome::Answered { .. } => json!({
                    "result": "already_answered", "by": by, "surface": surface, "at_ms": at, "message": message,
                }),
                other => json!({
                    "result": "closed", "outcome": other.status(), "at_ms": at, "message": message,
                }),
            };
            Ok(Json(body).into_response())
        }
        ReplyResponse::WrongUser => Err(ApiError::new(
            StatusCode::FORBIDDEN,
            "wrong_user",
            "this question was asked in another user's chat; only that user can answer it",
        )
        .field("user.id")),
        ReplyResponse::UnknownQuestion => Err(unknown_question(&body.question)),
        ReplyResponse::Invalid { invalid } => Err(invalid_answer(&invalid)),
        ReplyResponse::Retry { why } => Err(not_saved(why)),
    }
}

/// The body of `POST /v1/presence`.
#[derive(Deserialize)]
struct PresenceBody {
    #[serde(flatten)]
    ids: Ids,
    looking: bool,
    #[serde(default)]
    other_chat: bool,
    #[serde(default)]
    park: bool,
}

async fn presence(
    State(emitter): State<Arc<Emitter>>,
    ApiJson(body): ApiJson<PresenceBody>,
) -> Result<StatusCode, ApiError> {
    body.ids.check()?;
    // While a front end holds its live questions for somebody who is to come back, nothing else
    // may be shown for them: that is what `looking` is for.
    let looking = Looking { looking: body.looking || !body.park, other_chat: body.other_chat };
    let message = &body.ids.message;
    for session in emitter.sessions_of(&body.ids).await.map_err(unsaved)? {
        if emitter.hub.looks(&session, message, looking) {
            break;
        }
        // Another replica has the stream, and reads this there.
        if let Some(stored) = emitter.bus.session(&session).await.map_err(unsaved)? {
            let surfaces = &stored.value.surfaces;
            emitter.write_presence(&session, message, surfaces, looking).await.map_err(unsaved)?;
            break;
        }
    }
    Ok(StatusCode::NO_CONTENT)
}

/// The body of `POST /v1/left`.
#[derive(Deserialize)]
struct LeftBody {
    #[serde(flatten)]
    ids: Ids,
    #[serde(default)]
    cursor: Option<String>,
}

async fn left(
    State(emitter): State<Arc<Emitter>>,
    ApiJson(body): ApiJson<LeftBody>,
) -> Result<Response, ApiError> {
    body.ids.check()?;
    let cursor = body.cursor.as_deref().and_then(Cursor::parse);
    let sessions = emitter.sessions_of(&body.ids).await.map_err(unsaved)?;
    // A chat may have sessions with several agents: the first is the one of this message.
    let Some(session) = sessions.into_iter().next() else { return Ok(Json(json!({})).into_response()) };
    if let Some(cursor) = &cursor {
        emitter.hub.left_at(&session, &body.ids.message, cursor.sequence);
    }
    let decided = async move {
        let seen = cursor.and_then(|cursor| cursor.seen);
        let left = emitter.left(&session, &body.ids.message, body.ids.user.id, seen).await;
        left.inspect_err(|error| tracing::warn!(%session, %error, "not stopped; the front end repeats it"))?;
        Ok::<_, BusError>(Bytes::from_static(b"{}"))
    };
    Ok(Body::from_stream(futures::stream::once(decided)).into_response())
}

async fn models(State(emitter): State<Arc<Emitter>>) -> Result<Response, ApiError> {
    let gateway = &emitter.config.gateway;
    let known = lock(&emitter.agents).clone().filter(|(at, _)| at.elapsed() < AGENTS_FOR);
    let agents = match known {
        Some((_, agents)) => agents,
        None => {
            let agents = emitter.bus.agents(gateway).await.map_err(|error| {
                let message = format!("the agents of the gateway `{gateway}` are not known now: {error}");
                ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "no_gateway", message)
            })?;
            *lock(&emitter.agents) = Some((Instant::now(), agents.clone()));
            agents
        }
    };
    let models: Vec<_> = agents
        .iter()
        .map(|agent| json!({"id": format!("{gateway}/{}", agent.id), "name": agent.name}))
        .collect();
    Ok(Json(json!({"models": models})).into_response())
}

fn unknown_question(question: &str) -> ApiError {
    ApiError::new(
        StatusCode::NOT_FOUND,
        "unknown_question",
        "this chat has no such question; it may be older than the bus remembers",
    )
    .field("question")
    .value(question)
}

fn invalid_answer(invalid: &Invalid) -> ApiError {
    ApiError::new(StatusCode::UNPROCESSABLE_ENTITY, "invalid_answer", invalid.to_string())
        .field(format!("answers.{}", invalid.field))
        .limit(invalid.limit.clone())
        .value(invalid.value.clone())
}

fn bad_answer(bad: BadAnswer) -> ApiError {
    match bad {
        BadAnswer::Invalid(invalid) => invalid_answer(&invalid),
        BadAnswer::Incomplete { prompt, why } => {
            ApiError::new(StatusCode::UNPROCESSABLE_ENTITY, "invalid_answer", why)
                .field(format!("answers.{prompt}"))
        }
        BadAnswer::NoSealKey => not_saved(
            "the gateway has no usable seal key, so no secret can be sent; run `askctl provision`".into(),
        ),
    }
}

fn not_saved(why: String) -> ApiError {
    ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "not_saved", why)
}

/// What did not reach the bus. Sending it again is harmless.
fn unsaved(error: BusError) -> ApiError {
    match error {
        BusError::TooLarge { size, limit, .. } => {
            ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "too_large", error.to_string())
                .limit(limit)
                .value(size)
        }
        BusError::Refused(_) => ApiError::new(StatusCode::UNPROCESSABLE_ENTITY, "refused", error.to_string()),
        _ => not_saved(format!("not saved: {error}; send it again")),
    }
}
