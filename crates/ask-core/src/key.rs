//! Names on the bus: tokens that are valid in subjects and keys, and the key of a question.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// Writes `raw` as one subject token: `[A-Za-z0-9_-]` is kept, every other byte becomes `=HH`.
/// The empty string becomes `=`, which nothing else does.
pub fn encode_token(raw: &str) -> String {
    if raw.is_empty() {
        return "=".into();
    }
    let mut token = String::with_capacity(raw.len());
    for byte in raw.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'_' | b'-' => token.push(byte as char),
            _ => token.push_str(&format!("={byte:02X}")),
        }
    }
    token
}

/// Reads what [`encode_token`] wrote; `None` for anything else.
pub fn decode_token(token: &str) -> Option<String> {
    if token == "=" {
        return Some(String::new());
    }
    let bytes = token.as_bytes();
    let mut raw = Vec::with_capacity(bytes.len());
    let mut i = 0;
    while i < bytes.len() {
        if bytes[i] == b'=' {
            let hex = std::str::from_utf8(bytes.get(i + 1..i + 3)?).ok()?;
            raw.push(u8::from_str_radix(hex, 16).ok()?);
            i += 3;
        } else {
            raw.push(bytes[i]);
            i += 1;
        }
    }
    let raw = String::from_utf8(raw).ok()?;
    (encode_token(&raw) == token).then_some(raw)
}

/// A conversation at a gateway.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct SessionKey {
    /// The gateway's configured name.
    pub gateway: String,
    /// The gateway's own key of the conversation.
    pub session: String,
}

impl SessionKey {
    /// The session `session` at `gateway`.
    pub fn new(gateway: impl Into<String>, session: impl Into<String>) -> Self {
        Self { gateway: gateway.into(), session: session.into() }
    }
}

impl fmt::Display for SessionKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", encode_token(&self.gateway), encode_token(&self.session))
    }
}

impl FromStr for SessionKey {
    type Err = BadKey;

    fn from_str(key: &str) -> Result<Self, BadKey> {
        let [gateway, session] = tokens(key, "<gateway>.<session>")?;
        Ok(Self { gateway, session })
    }
}

/// The key of a question's entry: `<gateway>.<session>.<run>.<question>`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct QuestionKey {
    /// The gateway's configured name.
    pub gateway: String,
    /// The gateway's own key of the conversation.
    pub session: String,
    /// The agent turn in which it was asked.
    pub run: String,
    /// The question's id: the Gateway's own, or [`call_question_id`].
    pub question: String,
}

impl QuestionKey {
    /// The conversation in which the question was asked.
    pub fn session_key(&self) -> SessionKey {
        SessionKey::new(&self.gateway, &self.session)
    }
}

impl fmt::Display for QuestionKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [gateway, session, run, question] =
            [&self.gateway, &self.session, &self.run, &self.question].map(|t| encode_token(t));
        write!(f, "{gateway}.{session}.{run}.{question}")
    }
}

impl FromStr for QuestionKey {
    type Err = BadKey;

    fn from_str(key: &str) -> Result<Self, BadKey> {
        let [gateway, session, run, question] = tokens(key, "<gateway>.<session>.<run>.<question>")?;
        Ok(Self { gateway, session, run, question })
    }
}

impl From<QuestionKey> for String {
    fn from(key: QuestionKey) -> Self {
        key.to_string()
    }
}

impl TryFrom<String> for QuestionKey {
    type Error = BadKey;

    fn try_from(key: String) -> Result<Self, BadKey> {
        key.parse()
    }
}

/// A key that has the wrong number of tokens or a token that [`encode_token`] never writes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("key `{key}` is not of the form {form}")]
pub struct BadKey {
    key: String,
    form: &'static str,
}

fn tokens<const N: usize>(key: &str, form: &'static str) -> Result<[String; N], BadKey> {
    let bad = || BadKey { key: key.into(), form };
    let decoded: Option<Vec<String>> = key.split('.').map(decode_token).collect();
    decoded.ok_or_else(bad)?.try_into().map_err(|_| bad())
}

/// The id of a question asked by a call that has no id at the Gateway: the same call always gives
/// the same id, so that its repetition finds its entry.
pub fn call_question_id(gateway: &str, session: &str, run: &str, call: &str) -> String {
    digest_id(&[gateway, session, run, call])
}

/// The run id (and idempotency key) of a message: the same message always gives the same run.
pub fn message_run_id(session: &SessionKey, message: &str) -> String {
    format!("ab-{}", digest_id(&[&session.gateway, &session.session, message]))
}

/// 32 hex digits of a SHA-256 over the parts, each preceded by its length.
fn digest_id(parts: &[&str]) -> String {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update((part.len() as u64).to_be_bytes());
        hash.update(part.as_bytes());
    }
    hash.finalize().iter().take(16).map(|b| format!("{b:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn tokens_are_readable_and_valid_in_subjects() {
        let table = [
            ("main", "main"),
            ("agent:main:owui-1f", "agent=3Amain=3Aowui-1f"),
            ("a.b*c>d e", "a=2Eb=2Ac=3Ed=20e"),
            ("=", "=3D"),
            ("", "="),
        ];
        for (raw, token) in table {
            assert_eq!(encode_token(raw), token);
            assert_eq!(decode_token(token).as_deref(), Some(raw));
        }
    }

    #[test]
    fn tokens_that_were_never_written_are_refused() {
        for token in ["", "a=3", "=3d", "=41", "a b", "=ZZ", "=FF"] {
            assert_eq!(decode_token(token), None, "{token}");
        }
    }

    #[test]
    fn a_call_keeps_its_id_and_parts_do_not_run_together() {
        assert_eq!(call_question_id("g", "s", "r", "c"), call_question_id("g", "s", "r", "c"));
        assert_ne!(call_question_id("g", "ab", "c", "d"), call_question_id("g", "a", "bc", "d"));
    }

    #[test]
    fn a_message_keeps_its_run_whenever_it_is_sent_again() {
        let session = SessionKey::new("g", "s");
        assert_eq!(message_run_id(&session, "m1"), message_run_id(&session, "m1"));
        assert_ne!(message_run_id(&session, "m1"), message_run_id(&session, "m2"));
        assert_ne!(message_run_id(&session, "m1"), message_run_id(&SessionKey::new("g", "t"), "m1"));
    }

    proptest! {
        #[test]
        fn any_text_survives_a_token(raw in "\\PC*") {
            let token = encode_token(&raw);
            prop_assert!(token.bytes().all(|b| b.is_ascii_alphanumeric() || b"_-=".contains(&b)));
            prop_assert_eq!(decode_token(&token), Some(raw));
        }

        #[test]
        fn any_key_reads_back(gateway in ".*", session in ".*", run in ".*", question in ".*") {
            let key = QuestionKey { gateway, session, run, question };
            prop_assert_eq!(key.to_string().parse::<QuestionKey>(), Ok(key));
        }
    }
}
