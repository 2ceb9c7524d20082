use std::fmt;

use serde::de::{self, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use subtle::ConstantTimeEq;
use zeroize::Zeroizing;

/// A secret file larger than this is not a key or token but a mistake.
const MAX_FILE_BYTES: u64 = 64 * 1024;

/// How the problems with a secret begin; a value that has one is never shown with it.
pub(crate) const PROBLEM: &str = "the secret";

/// A secret from the configuration: shown as `[redacted]` wherever it is printed or serialised,
/// and wiped from memory when dropped.
///
/// In a config file it is written as the value itself or, better, as the file that holds it:
/// `token = "…"` or `token.file = "/run/secrets/token"` (as environment variable `…__TOKEN` or
/// `…__TOKEN__FILE`). White space around the content of the file is cut.
#[derive(Clone)]
pub struct Redacted(Zeroizing<String>);

impl Redacted {
    /// Takes the secret over.
    pub fn new(secret: String) -> Self {
        Self(Zeroizing::new(secret))
    }

    /// The secret itself, for the one place that must hand it on.
    pub fn expose(&self) -> &str {
        &self.0
    }

    /// Compares in a time that depends only on the lengths.
    pub fn matches(&self, candidate: &str) -> bool {
        self.0.as_bytes().ct_eq(candidate.as_bytes()).into()
    }

    fn from_file(path: &str) -> Result<Self, String> {
        let cannot = |error| format!("{PROBLEM} file {path} cannot be read: {error}");
        let size = std::fs::metadata(path).map_err(cannot)?.len();
        if size > MAX_FILE_BYTES {
            return Err(format!(
                "{PROBLEM} file {path} has {size} bytes, at most {MAX_FILE_BYTES} are allowed"
            ));
        }
        let content = std::fs::read_to_string(path).map(Zeroizing::new).map_err(cannot)?;
        match content.trim() {
            "" => Err(format!("{PROBLEM} file {path} is empty")),
            secret => Ok(Self::new(secret.to_owned())),
        }
    }
}

impl fmt::Debug for Redacted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[redacted]")
    }
}

impl fmt::Display for Redacted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[redacted]")
    }
}

impl Serialize for Redacted {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str("[redacted]")
    }
}

impl<'de> Deserialize<'de> for Redacted {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ValueOrFile)
    }
}

struct ValueOrFile;

impl ValueOrFile {
    /// Instead of serde's own "invalid type", which prints the value.
    fn unquoted<E: de::Error>() -> Result<Redacted, E> {
        Err(E::custom(format!("{PROBLEM} must be a string in quotes, or file = \"PATH\"")))
    }
}

impl<'de> Visitor<'de> for ValueOrFile {
    type Value = Redacted;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a secret as a string, or file = \"PATH\"")
    }

    fn visit_str<E: de::Error>(self, value: &str) -> Result<Redacted, E> {
        match value {
            "" => Err(E::custom(format!("{PROBLEM} is empty"))),
            secret => Ok(Redacted::new(secret.to_owned())),
        }
    }

    fn visit_bool<E: de::Error>(self, _: bool) -> Result<Redacted, E> {
        Self::unquoted()
    }

    fn visit_i64<E: de::Error>(self, _: i64) -> Result<Redacted, E> {
        Self::unquoted()
    }

    fn visit_u64<E: de::Error>(self, _: u64) -> Result<Redacted, E> {
        Self::unquoted()
    }

    fn visit_f64<E: de::Error>(self, _: f64) -> Result<Redacted, E> {
        Self::unquoted()
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Redacted, A::Error> {
        #[derive(Deserialize)]
        #[serde(field_identifier, rename_all = "lowercase")]
        enum Key {
            File,
        }

        let mut secret = None;
        while let Some(Key::File) = map.next_key()? {
            let path: String = map.next_value()?;
            secret = Some(Redacted::from_file(&path).map_err(de::Error::custom)?);
        }
        secret.ok_or_else(|| de::Error::missing_field("file"))
    }
}
