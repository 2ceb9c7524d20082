//! `provision`: everything that the services look up, made once.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use ask_bus::seal::OpenKey;
use ask_bus::{Bus, Provisioning};
use zeroize::Zeroizing;

use crate::config::AskctlConfig;
use crate::terminal::say;

/// Files of bearer tokens, for the endpoints of adapter and emitter.
pub const ADAPTER_TOKEN: &str = "adapter.token";
pub const EMITTER_TOKEN: &str = "emitter.token";

/// One thing that is there now, and whether this call made it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Made {
    pub what: String,
    pub existed: bool,
}

/// The private half of a gateway's seal key.
pub fn seal_file(folder: &Path, gateway: &str) -> PathBuf {
    folder.join(format!("seal-{}.key", ask_core::key::encode_token(gateway)))
}

/// Makes what is missing on the bus and in `folder`. Whatever it is interrupted in, the next call
/// completes: what is in a file is kept, and published again.
pub async fn provision(
    bus: &Bus,
    config: &AskctlConfig,
    folder: &Path,
    replace_seal_keys: bool,
) -> Result<Vec<Made>> {
    make_private_folder(folder)?;
    let mut all = Vec::new();
    let on_bus = Provisioning { gateways: config.gateways.clone(), replicas: config.replicas };
    for one in bus.provision(&on_bus).await? {
        all.push(Made { what: one.what, existed: one.existed });
    }
    for gateway in &config.gateways {
        all.extend(seal_key(bus, folder, gateway, replace_seal_keys).await?);
    }
    for name in [ADAPTER_TOKEN, EMITTER_TOKEN] {
        let path = folder.join(name);
        let existed = !create_private(&path, &new_token())?;
        all.push(Made { what: format!("token {}", path.display()), existed });
    }
    Ok(all)
}

async fn seal_key(bus: &Bus, folder: &Path, gateway: &str, replace: bool) -> Result<[Made; 2]> {
    let path = seal_file(folder, gateway);
    let published = bus.seal_key(gateway).await?;
    if let (Some(published), false, false) = (&published, path.exists(), replace) {
        bail!(
            "{} is missing, and the bus holds the public half {} of the seal key of {gateway}: put the file back, \
             or make a new key with --replace-seal-keys (secrets that are sealed to the old one and not handed over \
             yet can't be opened then)",
            path.display(),
            published.key_id
        );
    }
    let (fresh, _) = OpenKey::generate()?;
    let existed = !create_private(&path, &fresh.to_text())?;
    let key = read_seal_key(&path)?.seal_key();
    let known = published.as_ref() == Some(&key);
    if !known {
        bus.write_seal_key(gateway, &key).await?;
    }
    Ok([
        Made { what: format!("seal key {} in {}", key.key_id, path.display()), existed },
        Made { what: format!("its public half on the bus, for {gateway}"), existed: known },
    ])
}

/// Reads the private half of a seal key.
pub fn read_seal_key(path: &Path) -> Result<OpenKey> {
    let text = fs::read_to_string(path).map(Zeroizing::new);
    let text = text.with_context(|| format!("the seal key {} can't be read", path.display()))?;
    OpenKey::from_text(&text).with_context(|| {
        format!("{} holds no seal key; put the right file back, or remove it", path.display())
    })
}

/// Writes a file that only its owner can read, whole or not at all. False when there is one already.
fn create_private(path: &Path, content: &str) -> Result<bool> {
    if path.exists() {
        return Ok(false);
    }
    let failed = || format!("{} can't be written", path.display());
    let folder = path.parent().context("a file needs a folder")?;
    // Such a file has mode 0600 from its first moment.
    let mut file = tempfile::Builder::new().prefix(".new-").tempfile_in(folder).with_context(failed)?;
    file.write_all(content.as_bytes()).with_context(failed)?;
    file.as_file().sync_all().with_context(failed)?;
    match file.persist_noclobber(path) {
        Ok(_) => {}
        // Another provisioning was faster, and its file is as good.
        Err(error) if error.error.kind() == std::io::ErrorKind::AlreadyExists => return Ok(false),
        Err(error) => return Err(error.error).with_context(failed),
    }
    fs::File::open(folder).and_then(|folder| folder.sync_all()).with_context(failed)?;
    Ok(true)
}

/// A folder that only its owner can open; one that is there is left as it is.
pub fn make_private_folder(folder: &Path) -> Result<()> {
    use std::os::unix::fs::DirBuilderExt as _;
    let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(folder);
    made.with_context(|| format!("the folder {} can't be made", folder.display()))
}

/// 244 random bits.
fn new_token() -> Zeroizing<String> {
    let [a, b] = [uuid::Uuid::new_v4(), uuid::Uuid::new_v4()];
    Zeroizing::new(format!("{}{}\n", a.simple(), b.simple()))
}

/// What was made and what was there, a line each.
pub fn print(all: &[Made]) {
    for Made { what, existed } in all {
        say!("{}  {what}", if *existed { "was there" } else { "made     " });
    }
}
