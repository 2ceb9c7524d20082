//! What the HTTP endpoints of the services share: bearer tokens and one shape of error.

use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{DefaultBodyLimit, FromRequest, Request};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json, Router};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::Redacted;

/// An error as every endpoint answers it:
/// `{"error": {"code", "message", "field"?, "limit"?, "value"?}}`.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{}", body.message)]
pub struct ApiError {
    status: StatusCode,
    body: Box<Body>,
}

#[derive(Debug, Clone, Serialize)]
struct Body {
    code: &'static str,
    message: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    field: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    limit: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    value: Option<Value>,
}

impl ApiError {
    /// `code` is for programs (`too_long`), `message` for people: what is wrong and the way out.
    pub fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        let message = message.into();
        Self { status, body: Box::new(Body { code, message, field: None, limit: None, value: None }) }
    }

    /// Which field of the request is wrong.
    #[must_use]
    pub fn field(mut self, field: impl Into<String>) -> Self {
        self.body.field = Some(field.into());
        self
    }

    /// What would have been allowed.
    #[must_use]
    pub fn limit(mut self, limit: impl Into<Value>) -> Self {
        self.body.limit = Some(limit.into());
        self
    }

    /// What was found instead. Never a secret.
    #[must_use]
    pub fn value(mut self, value: impl Into<Value>) -> Self {
        self.body.value = Some(value.into());
        self
    }

    /// The HTTP status.
    pub fn status(&self) -> StatusCode {
        self.status
    }

    /// The code for programs.
    pub fn code(&self) -> &'static str {
        self.body.code
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        (self.status, Json(serde_json::json!({ "error": self.body }))).into_response()
    }
}

/// The token of `Authorization: Bearer TOKEN`.
pub fn bearer_token(headers: &HeaderMap) -> Result<&str, ApiError> {
    let value = headers
        .get(header::AUTHORIZATION)
        .ok_or_else(|| unauthorized("the header authorization is missing; send: Bearer TOKEN"))?;
    match value.to_str().ok().and_then(|text| text.split_once(' ')) {
        Some((scheme, token)) if scheme.eq_ignore_ascii_case("bearer") => Ok(token.trim()),
        _ => Err(unauthorized("the header authorization must be: Bearer TOKEN")),
    }
}

/// Checks that the bearer token is `expected`, in constant time.
pub fn check_bearer(headers: &HeaderMap, expected: &Redacted) -> Result<(), ApiError> {
    if expected.matches(bearer_token(headers)?) {
        Ok(())
    } else {
        Err(unauthorized("the bearer token is not the configured one"))
    }
}

fn unauthorized(message: &str) -> ApiError {
    ApiError::new(StatusCode::UNAUTHORIZED, "unauthorized", message).field("authorization")
}

#[derive(Clone, Copy)]
struct BodyLimit(usize);

/// Refuses larger request bodies; [`ApiJson`] names the limit.
pub fn limit_body(router: Router, bytes: usize) -> Router {
    router.layer(Extension(BodyLimit(bytes))).layer(DefaultBodyLimit::max(bytes))
}

/// A JSON body whose refusals are an [`ApiError`] that names the field. Unlike [`axum::Json`] it
/// never repeats a value of the body, which may be a secret.
#[derive(Debug, Clone, Copy)]
pub struct ApiJson<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for ApiJson<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &S) -> Result<Self, ApiError> {
        let limit = request.extensions().get::<BodyLimit>().copied();
        let headers = request.headers().clone();
        let body = match Bytes::from_request(request, state).await {
            Ok(body) => body,
            Err(rejection) => return Err(unreadable(&rejection, limit, &headers)),
        };
        let mut json = serde_json::Deserializer::from_slice(&body);
        let parsed = serde_path_to_error::deserialize(&mut json).map_err(|error| {
            let field = match error.path().to_string() {
                path if path == "." || path == "?" => "body".to_owned(),
                path => path,
            };
            ApiError::new(StatusCode::BAD_REQUEST, "bad_body", without_value(error.inner())).field(field)
        })?;
        json.end().map_err(|error| {
            ApiError::new(StatusCode::BAD_REQUEST, "bad_body", error.to_string()).field("body")
        })?;
        Ok(Self(parsed))
    }
}

fn unreadable(rejection: &BytesRejection, limit: Option<BodyLimit>, headers: &HeaderMap) -> ApiError {
    if rejection.status() != StatusCode::PAYLOAD_TOO_LARGE {
        return ApiError::new(rejection.status(), "bad_body", rejection.body_text()).field("body");
    }
    let mut error = ApiError::new(
        StatusCode::PAYLOAD_TOO_LARGE,
        "body_too_large",
        "the request body has too many bytes; send less at once",
    )
    .field("body");
    if let Some(BodyLimit(bytes)) = limit {
        error = error.limit(bytes);
    }
    let length = headers.get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok());
    if let Some(bytes) = length.and_then(|text| text.parse::<u64>().ok()) {
        error = error.value(bytes);
    }
    error
}

/// serde puts the offending value before what it expected.
fn without_value(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let quotes_value =
        ["invalid type", "invalid value", "unknown variant"].iter().any(|kind| text.starts_with(kind));
    match text.rfind("expected ") {
        Some(at) if quotes_value => text[at..].to_owned(),
        _ => text,
    }
}
