//! What the HTTP endpoints of the services share: bearer tokens and one shape of error.

use axum::Json;
use axum::extract::rejection::JsonRejection;
use axum::extract::{FromRequest, Request};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
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
        Self {
            status,
            body: Box::new(Body {
                code,
                message,
                field: None,
                limit: None,
                value: None,
            }),
        }
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

/// Checks `Authorization: Bearer TOKEN` in constant time.
pub fn check_bearer(headers: &HeaderMap, token: &Redacted) -> Result<(), ApiError> {
    let refused = |message| {
        ApiError::new(StatusCode::UNAUTHORIZED, "unauthorized", message).field("authorization")
    };
    let value = headers
        .get(header::AUTHORIZATION)
        .ok_or_else(|| refused("the header authorization is missing, send: Bearer TOKEN"))?;
    let (scheme, candidate) = value
        .to_str()
        .ok()
        .and_then(|text| text.split_once(' '))
        .ok_or_else(|| refused("the header authorization must be: Bearer TOKEN"))?;
    if scheme.eq_ignore_ascii_case("bearer") && token.matches(candidate.trim()) {
        Ok(())
    } else {
        Err(refused("the bearer token is not the configured one"))
    }
}

/// [`axum::Json`] as an extractor whose refusals are an [`ApiError`].
#[derive(Debug, Clone, Copy)]
pub struct ApiJson<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for ApiJson<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &S) -> Result<Self, ApiError> {
        match Json::from_request(request, state).await {
            Ok(Json(body)) => Ok(Self(body)),
            Err(rejection) => Err(rejection.into()),
        }
    }
}

impl From<JsonRejection> for ApiError {
    fn from(rejection: JsonRejection) -> Self {
        let code = match rejection.status() {
            StatusCode::PAYLOAD_TOO_LARGE => "body_too_large",
            StatusCode::UNSUPPORTED_MEDIA_TYPE => "not_json",
            _ => "bad_body",
        };
        Self::new(rejection.status(), code, rejection.body_text()).field("body")
    }
}
