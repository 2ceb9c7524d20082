//! Errors, parameter checks and small values of the protocol.

use serde_json::{Value, json};

/// An error response.
#[derive(Debug, Clone)]
pub struct Rejection {
    /// Class, such as `INVALID_REQUEST` or `UNAVAILABLE`.
    pub code: String,
    /// What a person reads.
    pub message: String,
    /// Machine-readable reason; null where there is none.
    pub details: Value,
    /// Pause after which the same request may work, in milliseconds.
    pub retry_after_ms: Option<u64>,
}

impl Rejection {
    /// An error with no details that is not worth repeating.
    pub fn new(code: &str, message: impl Into<String>) -> Self {
        Self { code: code.into(), message: message.into(), details: Value::Null, retry_after_ms: None }
    }

    /// What a Gateway says that is still starting.
    pub fn starting() -> Self {
        Self {
            details: json!({"reason": "startup-sidecars"}),
            retry_after_ms: Some(500),
            ..Self::new("UNAVAILABLE", "gateway starting; retry shortly")
        }
    }

    pub(super) fn invalid(message: impl Into<String>) -> Self {
        Self::new("INVALID_REQUEST", message)
    }

    pub(super) fn with_details(mut self, details: Value) -> Self {
        self.details = details;
        self
    }

    pub(super) fn question(reason: &str, message: impl Into<String>) -> Self {
        Self::invalid(message).with_details(json!({"reason": reason}))
    }

    pub(super) fn missing_scope(scope: &str) -> Self {
        Self::new("FORBIDDEN", format!("missing scope: {scope}"))
            .with_details(json!({"code": "MISSING_SCOPE", "missingScope": scope, "requiredScopes": [scope]}))
    }

    pub(super) fn to_json(&self) -> Value {
        let mut error = json!({"code": self.code, "message": self.message});
        if let Some(pause) = self.retry_after_ms {
            error["retryable"] = true.into();
            error["retryAfterMs"] = pause.into();
        }
        if !self.details.is_null() {
            error["details"] = self.details.clone();
        }
        error
    }
}

/// Refuses what a closed parameter object does not allow.
pub(super) fn check_params(
    method: &str,
    params: &Value,
    required: &[&str],
    optional: &[&str],
) -> Result<(), Rejection> {
    let invalid = |why: String| Rejection::invalid(format!("invalid {method} params: {why}"));
    let Some(given) = params.as_object() else {
        return Err(invalid("must be object".into()));
    };
    if let Some(missing) = required.iter().find(|name| !given.contains_key(**name)) {
        return Err(invalid(format!("must have required property '{missing}'")));
    }
    let known = |name: &&String| required.iter().chain(optional).any(|known| known == name);
    match given.keys().find(|name| !known(name)) {
        Some(name) => Err(invalid(format!("at root: unexpected property '{name}'"))),
        None => Ok(()),
    }
}

/// Whether a list of scopes covers one.
pub(super) fn covers(scopes: &[String], needed: &str) -> bool {
    scopes.iter().any(|scope| {
        scope == needed
            || scope == "operator.admin"
            || (scope == "operator.write" && needed == "operator.read")
    })
}

pub(super) fn now_ms() -> u64 {
    let since = std::time::UNIX_EPOCH.elapsed().unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

pub(super) fn new_id() -> String {
    uuid::Uuid::new_v4().to_string()
}

pub(super) fn text_content(text: &str) -> Value {
    json!([{"type": "text", "text": text}])
}
