//! The endpoint of the OpenClaw plugin; docs/plugin-protocol.md is its contract.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use ask_core::entry::Road;
use ask_core::question::Invalid;
use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Path, Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use futures::{Stream, StreamExt as _};
use serde::Deserialize;
use serde_json::{Value, json};
use service_kit::http::{ApiError, ApiJson, check_bearer, limit_body};

use crate::calls::{Acknowledged, Call, Calls, Refused};

/// So often something is sent while a person thinks.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// How long a call that can't have its secret here waits before it is sent elsewhere.
const OPEN_AGAIN: Duration = Duration::from_secs(10);

pub(crate) const MAX_BODY: usize = 1 << 20;
/// Longest id, in bytes: four of them must fit into a subject.
pub(crate) const MAX_ID: usize = 400;

/// The routes of `/v1/calls`.
pub(crate) fn routes(calls: Arc<Calls>) -> Router {
    let routes = Router::new()
        .route("/v1/calls/{call}", post(open).delete(cancel))
        .route("/v1/calls/{call}/ack", post(acknowledge))
        .layer(middleware::from_fn_with_state(calls.clone(), authorize))
        .with_state(calls);
    limit_body(routes, MAX_BODY)
}

/// Lets only bearers of the configured token in.
async fn authorize(State(calls): State<Arc<Calls>>, request: Request, next: Next) -> Response {
    match check_bearer(request.headers(), &calls.adapter.config.http.token) {
        Ok(()) => next.run(request).await,
        Err(refused) => refused.into_response(),
    }
}

/// Whose call it is; the same in all three requests.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Caller {
    gateway: Option<String>,
    session_key: String,
    run_id: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Open {
    #[serde(flatten)]
    caller: Caller,
    tool_call_id: String,
    args: Value,
}

#[derive(Deserialize)]
struct Acknowledge {
    #[serde(flatten)]
    caller: Caller,
    revision: u64,
}

impl Caller {
    fn call(self, calls: &Calls, id: String, tool_call: String) -> Result<Call, ApiError> {
        let ours = calls.adapter.gateway();
        if let Some(other) = self.gateway.filter(|gateway| gateway != ours) {
            let message = format!("this adapter serves the gateway {ours}; set the plugin's gateway to it");
            let error = ApiError::new(StatusCode::BAD_REQUEST, "unknown_gateway", message);
            return Err(error.field("gateway").limit(ours).value(other));
        }
        for (field, id) in [
            ("call", &id),
            ("sessionKey", &self.session_key),
            ("runId", &self.run_id),
            ("toolCallId", &tool_call),
        ] {
            check_id(field, id)?;
        }
        let session = calls.adapter.session(&self.session_key);
        Ok(Call { session, run: self.run_id, id, tool_call, road: Road::Plugin })
    }
}

fn check_id(field: &str, id: &str) -> Result<(), ApiError> {
    let refused = |code, message: String| ApiError::new(StatusCode::BAD_REQUEST, code, message).field(field);
    if id.is_empty() {
        return Err(refused("empty", format!("`{field}` is empty")));
    }
    if id.len() > MAX_ID {
        let error = refused("too_long", format!("`{field}` is longer than {MAX_ID} bytes"));
        return Err(error.limit(MAX_ID).value(id.len()));
    }
    Ok(())
}

async fn open(
    State(calls): State<Arc<Calls>>,
    Path(id): Path<String>,
    ApiJson(body): ApiJson<Open>,
) -> Result<Response, ApiError> {
    let call = body.caller.call(&calls, id, body.tool_call_id)?;
    let asked = calls.read(&body.args).map_err(invalid)?;
    calls.open(&call, &asked).await?;
    let key = call.key();
    let wait = async move {
        let object = match calls.decided(&key).await {
            None => retry("gateway-adapter is stopping"),
            Some(decided) => match calls.result(&decided) {
                Ok(result) => {
                    let secret = result.secret.as_ref().map(|value| json!({ "value": value.as_str() }));
                    let mut object = json!({
                        "revision": result.revision,
                        "text": result.text,
                        "isError": false,
                        "details": result.details,
                    });
                    if let Some(secret) = secret {
                        object["secret"] = secret;
                    }
                    object
                }
                Err(error) => {
                    tracing::error!(question = %key, %error, "a secret can't be opened here");
                    let pause = tokio::time::sleep(OPEN_AGAIN);
                    calls.adapter.shutdown.run_until_cancelled(pause).await;
                    retry(&error.to_string())
                }
            },
        };
        Bytes::from(object.to_string())
    };
    let body = with_beats(futures::stream::once(wait), b"\n");
    Ok(([(header::CONTENT_TYPE, "application/json")], body).into_response())
}

/// A body of these parts, and of `beat` where nothing else comes for a while.
pub(crate) fn with_beats(parts: impl Stream<Item = Bytes> + Send + 'static, beat: &'static [u8]) -> Body {
    let beating = futures::stream::unfold(Box::pin(parts), move |mut parts| async move {
        match tokio::time::timeout(KEEP_ALIVE, parts.next()).await {
            Ok(part) => part.map(|part| (Ok::<_, Infallible>(part), parts)),
            Err(_) => Some((Ok(Bytes::from_static(beat)), parts)),
        }
    });
    Body::from_stream(beating)
}

fn retry(reason: &str) -> Value {
    json!({ "retry": true, "reason": reason })
}

async fn acknowledge(
    State(calls): State<Arc<Calls>>,
    Path(id): Path<String>,
    ApiJson(body): ApiJson<Acknowledge>,
) -> Result<StatusCode, ApiError> {
    let call = body.caller.call(&calls, id.clone(), id)?;
    match calls.acknowledge(&call.key(), body.revision).await.map_err(Refused::from)? {
        Acknowledged::Closed => Ok(StatusCode::NO_CONTENT),
        Acknowledged::Unknown => {
            let message = "no such call was opened; sessionKey and runId must be those of its opening";
            Err(ApiError::new(StatusCode::NOT_FOUND, "unknown_call", message))
        }
        Acknowledged::OtherRevision(now) => {
            let message = "the call has no outcome of this revision; acknowledge the one it was given";
            let error = ApiError::new(StatusCode::CONFLICT, "other_revision", message);
            Err(error.field("revision").limit(now).value(body.revision))
        }
    }
}

async fn cancel(
    State(calls): State<Arc<Calls>>,
    Path(id): Path<String>,
    ApiJson(body): ApiJson<Caller>,
) -> Result<StatusCode, ApiError> {
    let call = body.call(&calls, id.clone(), id)?;
    match calls.cancel(&call.key()).await {
        Ok(()) => Ok(StatusCode::NO_CONTENT),
        Err(why) => Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "not_cancelled_yet", why)),
    }
}

fn invalid(invalid: Invalid) -> ApiError {
    let error = ApiError::new(StatusCode::BAD_REQUEST, "invalid_arguments", invalid.to_string());
    error.field(invalid.field).limit(invalid.limit).value(invalid.value)
}

impl From<Refused> for ApiError {
    fn from(refused: Refused) -> Self {
        let message = refused.to_string();
        match refused {
            Refused::TooLarge { size, limit } => ApiError::new(StatusCode::BAD_REQUEST, "too_large", message)
                .field("args")
                .limit(limit)
                .value(size),
            Refused::Reused => ApiError::new(StatusCode::CONFLICT, "call_id_reused", message),
            Refused::Cancelled => ApiError::new(StatusCode::CONFLICT, "call_cancelled", message),
            Refused::Bus(_) => ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "not_saved", message),
        }
    }
}
