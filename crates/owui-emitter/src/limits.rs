//! How large the parts of a request may be.

use ask_core::key::encode_token;
use axum::http::StatusCode;
use service_kit::http::ApiError;

/// Longest name, in characters.
pub(crate) const MAX_NAME: usize = 200;
/// Longest id, in bytes as it is written on the bus, where several of them make a subject.
pub(crate) const MAX_ID: usize = 400;
/// Longest message, in characters.
pub(crate) const MAX_MESSAGE: usize = 200_000;
/// Most base64 characters of all attachments of a message.
pub(crate) const MAX_ATTACHMENTS: usize = 6_000_000;
/// Most questions in `on_screen`.
pub(crate) const MAX_ON_SCREEN: usize = 64;
/// Largest request body, in bytes.
pub(crate) const MAX_BODY: usize = 8 << 20;

/// A field that breaks its limit.
pub(crate) fn too_long(
    field: impl Into<String>,
    limit: usize,
    value: usize,
    unit: &str,
    way_out: &str,
) -> ApiError {
    let field = field.into();
    let message = format!("`{field}` has {value} {unit}, at most {limit} are taken; {way_out}");
    ApiError::new(StatusCode::UNPROCESSABLE_ENTITY, "too_long", message)
        .field(field)
        .limit(limit)
        .value(value)
}

/// A field that is not what it must be.
pub(crate) fn invalid(field: impl Into<String>, message: impl Into<String>) -> ApiError {
    ApiError::new(StatusCode::UNPROCESSABLE_ENTITY, "invalid", message).field(field)
}

/// Checks an id.
pub(crate) fn check_id(field: &str, id: &str) -> Result<(), ApiError> {
    if id.is_empty() {
        return Err(invalid(field, format!("`{field}` is empty; send its id")));
    }
    match encode_token(id).len() {
        length if length > MAX_ID => {
            Err(too_long(field, MAX_ID, length, "bytes on the bus", "send a shorter one"))
        }
        _ => Ok(()),
    }
}

/// Checks a text's length in characters.
pub(crate) fn check_length(
    field: impl Into<String>,
    text: &str,
    limit: usize,
    way_out: &str,
) -> Result<(), ApiError> {
    // As many bytes as characters at least, so most texts need no counting.
    if text.len() <= limit {
        return Ok(());
    }
    match text.chars().count() {
        length if length > limit => Err(too_long(field, limit, length, "characters", way_out)),
        _ => Ok(()),
    }
}
