//! The device identity that a Gateway pairs with.

use std::{
    fs::{self, DirBuilder, OpenOptions, Permissions},
    io::{self, Write},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use ed25519_dalek::{Signer, SigningKey};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// An Ed25519 key and the device token that the Gateway issued for it, kept in one file (0600).
///
/// The file is made once and survives restarts: a Gateway that approved this device knows it again.
pub struct Identity {
    path: PathBuf,
    key: SigningKey,
    device_id: String,
    device_token: Option<String>,
}

/// The identity's file could not be read or written.
#[derive(Debug, thiserror::Error)]
#[error("device identity {}: cannot {doing}: {source}", path.display())]
pub struct IdentityError {
    path: PathBuf,
    doing: &'static str,
    source: io::Error,
}

/// What a device signature covers, beside the key.
#[derive(Clone, Copy, Debug)]
pub struct Signed<'a> {
    /// `client.id` of the connect request.
    pub client_id: &'a str,
    /// `client.mode` of the connect request.
    pub client_mode: &'a str,
    /// `client.platform` of the connect request.
    pub platform: &'a str,
    /// Role asked for.
    pub role: &'a str,
    /// Scopes asked for, in the order of the request.
    pub scopes: &'a [String],
    /// The challenge's `ts`, milliseconds.
    pub signed_at: i64,
    /// The challenge's nonce.
    pub nonce: &'a str,
    /// Token sent as `auth.token` or `auth.deviceToken`; empty without one.
    pub token: &'a str,
}

/// `device` of the connect request.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DeviceProof {
    /// Hex SHA-256 of the raw public key.
    pub id: String,
    /// Raw public key, base64url.
    pub public_key: String,
    /// Signature of the v3 payload, base64url.
    pub signature: String,
    /// As in the challenge, milliseconds.
    pub signed_at: i64,
    /// As in the challenge.
    pub nonce: String,
}

#[derive(Serialize, Deserialize)]
struct Stored {
    private_key: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    device_token: Option<String>,
}

impl Identity {
    /// Loads the identity, or makes one where there is none.
    ///
    /// An unreadable content is moved aside to `<file>.corrupt-<unix seconds>` and replaced by a new
    /// identity, with a warning: the Gateway must then approve the new device.
    pub fn load_or_create(path: &Path) -> Result<Self, IdentityError> {
        let fail = |doing| move |source| IdentityError { path: path.to_owned(), doing, source };
        match fs::read(path) {
            Ok(bytes) => {
                if let Some(identity) = Self::decode(path, &bytes) {
                    fs::set_permissions(path, Permissions::from_mode(0o600))
                        .map_err(fail("restrict its file to the owner"))?;
                    return Ok(identity);
                }
                let aside = with_suffix(path, &format!("corrupt-{}", unix_seconds()));
                fs::rename(path, &aside).map_err(fail("move its corrupt file aside"))?;
                tracing::warn!(
                    file = %path.display(),
                    kept_as = %aside.display(),
                    "device identity is unreadable: a new one replaces it and needs a new approval at the gateway"
                );
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                if let Some(folder) = path.parent() {
                    DirBuilder::new()
                        .recursive(true)
                        .mode(0o700)
                        .create(folder)
                        .map_err(fail("make its folder"))?;
                }
            }
            Err(e) => return Err(fail("read its file")(e)),
        }
        let key = SigningKey::from_bytes(&rand::random());
        let identity = Self::new(path, key, None);
        let temporary = identity.write_temporary().map_err(fail("write its file"))?;
        // A link never replaces: of two processes that start at once, one makes the identity.
        let linked = fs::hard_link(&temporary, path);
        let _ = fs::remove_file(&temporary);
        match linked {
            Ok(()) => sync_folder(path).map_err(fail("write its file"))?,
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
                return Self::load_or_create(path);
            }
            Err(e) => return Err(fail("create its file")(e)),
        }
        Ok(identity)
    }

    /// Hex SHA-256 of the public key: the id under which the Gateway lists this device.
    pub fn device_id(&self) -> &str {
        &self.device_id
    }

    /// Token that the Gateway issued to this device.
    pub fn device_token(&self) -> Option<&str> {
        self.device_token.as_deref()
    }

    /// Keeps (or forgets) the device token, on disk before it returns.
    pub fn set_device_token(&mut self, token: Option<String>) -> Result<(), IdentityError> {
        if self.device_token == token {
            return Ok(());
        }
        self.device_token = token;
        self.write_temporary()
            .and_then(|temporary| fs::rename(temporary, &self.path))
            .and_then(|()| sync_folder(&self.path))
            .map_err(|source| IdentityError {
                path: self.path.clone(),
                doing: "store the device token in its file",
                source,
            })
    }

    /// Proves to a Gateway that this connect request comes from this device.
    pub fn sign(&self, signed: Signed<'_>) -> DeviceProof {
        let signature = self.key.sign(payload(&self.device_id, signed).as_bytes());
        DeviceProof {
            id: self.device_id.clone(),
            public_key: URL_SAFE_NO_PAD.encode(self.key.verifying_key().as_bytes()),
            signature: URL_SAFE_NO_PAD.encode(signature.to_bytes()),
            signed_at: signed.signed_at,
            nonce: signed.nonce.to_owned(),
        }
    }

    fn new(path: &Path, key: SigningKey, device_token: Option<String>) -> Self {
        Self {
            path: path.to_owned(),
            device_id: hex::encode(Sha256::digest(key.verifying_key().as_bytes())),
            key,
            device_token,
        }
    }

    fn decode(path: &Path, bytes: &[u8]) -> Option<Self> {
        let stored: Stored = serde_json::from_slice(bytes).ok()?;
        let raw = URL_SAFE_NO_PAD.decode(stored.private_key).ok()?;
        let key = SigningKey::from_bytes(&raw.try_into().ok()?);
        Some(Self::new(path, key, stored.device_token))
    }

    fn write_temporary(&self) -> io::Result<PathBuf> {
        let temporary = with_suffix(&self.path, &format!("new-{:016x}", rand::random::<u64>()));
        let stored = Stored {
            private_key: URL_SAFE_NO_PAD.encode(self.key.as_bytes()),
            device_token: self.device_token.clone(),
        };
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary)?;
        file.write_all(&serde_json::to_vec(&stored)?)?;
        file.sync_all()?;
        Ok(temporary)
    }
}

/// The v3 text that is signed.
fn payload(device_id: &str, s: Signed<'_>) -> String {
    let device_family = "";
    [
        "v3",
        device_id,
        s.client_id,
        s.client_mode,
        s.role,
        &s.scopes.join(","),
        &s.signed_at.to_string(),
        s.token,
        s.nonce,
        &s.platform.to_lowercase(),
        device_family,
    ]
    .join("|")
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".");
    name.push(suffix);
    PathBuf::from(name)
}

fn sync_folder(path: &Path) -> io::Result<()> {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => fs::File::open(folder)?.sync_all(),
        _ => Ok(()),
    }
}

fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use ed25519_dalek::{Signature, VerifyingKey};

    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o777
    }

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<_> =
            fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn identity_is_made_once_and_found_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state/device.json");
        let first = Identity::load_or_create(&path).unwrap();
        let second = Identity::load_or_create(&path).unwrap();
        assert_eq!(first.device_id(), second.device_id());
        assert_eq!(first.device_id().len(), 64);
        assert_eq!(mode(&path), 0o600);
        assert_eq!(mode(path.parent().unwrap()), 0o700);
        assert_eq!(names(path.parent().unwrap()), ["device.json"]);
    }

    #[test]
    fn device_token_survives_a_restart_and_can_be_forgotten() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("device.json");
        let mut identity = Identity::load_or_create(&path).unwrap();
        assert_eq!(identity.device_token(), None);
        identity.set_device_token(Some("dt".to_owned())).unwrap();
        let mut again = Identity::load_or_create(&path).unwrap();
        assert_eq!(again.device_token(), Some("dt"));
        assert_eq!(again.device_id(), identity.device_id());
        again.set_device_token(None).unwrap();
        let last = Identity::load_or_create(&path).unwrap();
        assert_eq!(last.device_token(), None);
        assert_eq!(mode(&path), 0o600);
        assert_eq!(names(folder.path()), ["device.json"]);
    }

    #[test]
    fn corrupt_file_is_kept_aside_and_replaced() {
        for content in ["", "{", "{}", r#"{"private_key":"AAAA"}"#] {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("device.json");
            fs::write(&path, content).unwrap();
            let made = Identity::load_or_create(&path).unwrap();
            let again = Identity::load_or_create(&path).unwrap();
            assert_eq!(made.device_id(), again.device_id());
            let names = names(folder.path());
            assert_eq!(names.len(), 2, "{names:?}");
            assert!(names[1].starts_with("device.json.corrupt-"));
            let kept = fs::read_to_string(folder.path().join(&names[1])).unwrap();
            assert_eq!(kept, content);
        }
    }

    #[test]
    fn a_file_others_could_read_is_restricted_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("device.json");
        Identity::load_or_create(&path).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
        Identity::load_or_create(&path).unwrap();
        assert_eq!(mode(&path), 0o600);
    }

    #[test]
    fn a_path_that_cannot_be_read_names_itself() {
        let folder = tempfile::tempdir().unwrap();
        let error = Identity::load_or_create(folder.path()).err().unwrap();
        let text = error.to_string();
        assert!(text.contains(folder.path().to_str().unwrap()), "{text}");
        assert!(text.contains("cannot read its file"), "{text}");
    }

    #[test]
    fn signature_covers_the_v3_payload() {
        let folder = tempfile::tempdir().unwrap();
        let identity = Identity::load_or_create(&folder.path().join("d")).unwrap();
        let scopes = ["operator.read".to_owned(), "operator.write".to_owned()];
        let signed = Signed {
            client_id: "cli",
            client_mode: "cli",
            platform: "Linux",
            role: "operator",
            scopes: &scopes,
            signed_at: 1_796_094_385_436,
            nonce: "n-1",
            token: "tok",
        };
        let id = identity.device_id();
        let text =
            format!("v3|{id}|cli|cli|operator|operator.read,operator.write|1796094385436|tok|n-1|linux|");
        assert_eq!(payload(id, signed), text);

        let proof = identity.sign(signed);
        let raw = URL_SAFE_NO_PAD.decode(&proof.public_key).unwrap();
        assert_eq!(proof.id, hex::encode(Sha256::digest(&raw)));
        let key = VerifyingKey::from_bytes(&raw.try_into().unwrap()).unwrap();
        let signature = URL_SAFE_NO_PAD.decode(&proof.signature).unwrap();
        let signature = Signature::from_slice(&signature).unwrap();
        key.verify_strict(text.as_bytes(), &signature).unwrap();
    }
}
