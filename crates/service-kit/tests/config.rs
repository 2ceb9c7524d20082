//! Which source wins, and what a refused configuration says.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use service_kit::config::{LogFormat, load_from, word};
use service_kit::{Config, Redacted, Service};

const SERVICE: Service = Service {
    name: "ask-router",
    section: "router",
    version: "1.2.3",
    defaults: r#"
        [router]
        grace_ms = 1000
        mode = "cancel"
        [router.health]
        listen = "127.0.0.1:9101"
    "#,
    readiness: &[],
};

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Own {
    grace_ms: u64,
    #[serde(deserialize_with = "word")]
    mode: Mode,
    token: Option<Redacted>,
    #[serde(default)]
    gateways: std::collections::BTreeMap<String, Gateway>,
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Mode {
    Cancel,
    Park,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Gateway {
    url: String,
    token: Redacted,
}

struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn file(&self, name: &str, text: &str) -> PathBuf {
        let path = self.0.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    }
}

fn env<'a>(pairs: &'a [(&'a str, &'a str)]) -> impl Iterator<Item = (String, String)> + use<'a> {
    pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
}

fn load(file: Option<&Path>, variables: &[(&str, &str)]) -> Result<Config<Own>, String> {
    load_from(&SERVICE, file, env(variables)).map_err(|error| error.to_string())
}

fn load_text(text: &str) -> Result<Config<Own>, String> {
    let folder = Folder::new();
    load(Some(&folder.file("askbus.toml", text)), &[])
        .map_err(|error| error.replace(&format!("{}/", folder.0.path().display()), ""))
}

#[test]
fn defaults_alone_are_a_configuration() {
    let config = load(None, &[]).unwrap();
    assert_eq!(config.nats.urls().collect::<Vec<_>>(), ["nats://127.0.0.1:4222"]);
    assert_eq!(config.telemetry.otlp_endpoint, None);
    assert_eq!(config.telemetry.log_format, LogFormat::Text);
    assert_eq!(config.health.listen.to_string(), "127.0.0.1:9101");
    assert_eq!(config.service.grace_ms, 1000);
    assert_eq!(config.service.mode, Mode::Cancel);
}

#[test]
fn the_file_overrules_defaults_and_the_environment_overrules_the_file() {
    let folder = Folder::new();
    let file = folder.file(
        "askbus.toml",
        "[nats]\nurl = 'nats://a:1, tls://b:2'\n[router]\ngrace_ms = 5\nmode = 'park'\n",
    );
    let config = load(
        Some(&file),
        &[
            ("ASKBUS__ROUTER__GRACE_MS", "7"),
            ("ASKBUS__TELEMETRY__LOG_FORMAT", "json"),
            ("ASKBUS__TELEMETRY__SAMPLE_RATIO", "0.25"),
            ("ASKBUS__ROUTER__MODE", ""),
            ("ASKBUS_HOME", "/not/ours"),
        ],
    )
    .unwrap();
    assert_eq!(config.nats.urls().collect::<Vec<_>>(), ["nats://a:1", "tls://b:2"]);
    assert_eq!(config.service.grace_ms, 7);
    assert_eq!(config.service.mode, Mode::Park, "an empty variable counts as not set");
    assert_eq!(config.telemetry.log_format, LogFormat::Json);
    assert!((config.telemetry.sample_ratio - 0.25).abs() < f64::EPSILON);
}

#[test]
fn a_service_overrules_common_sections_for_itself_and_ignores_other_services() {
    let text = r#"
        [nats]
        url = "tls://nats:4222"
        nkey_seed = "for all"
        [router.nats]
        nkey_seed = "for the router"
        [emitter]
        anything = 1
        [emitter.nats]
        nkey_seed = "for the emitter"
    "#;
    let config = load_text(text).unwrap();
    assert_eq!(config.nats.url, "tls://nats:4222");
    assert_eq!(config.nats.nkey_seed.unwrap().expose(), "for the router");

    let folder = Folder::new();
    let file = folder.file("askbus.toml", text);
    let variable = ("ASKBUS__NATS__NKEY_SEED", "from outside");
    let config = load(Some(&file), &[variable]).unwrap();
    assert_eq!(
        config.nats.nkey_seed.unwrap().expose(),
        "from outside",
        "the later source wins, however general"
    );
}

#[test]
fn the_health_address_of_a_file_overrules_the_services_own_default() {
    let config = load_text("[health]\nlisten = '0.0.0.0:9000'").unwrap();
    assert_eq!(config.health.listen.to_string(), "0.0.0.0:9000");
}

#[test]
fn refusals_name_key_source_value_and_what_is_allowed() {
    let cases = [
        (
            "[router]\ngrace = 1",
            "router.grace (from askbus.toml): unknown field `grace`, \
             expected one of `grace_ms`, `mode`, `token`, `gateways`",
        ),
        (
            "[router.nats]\nurll = 'x'",
            "nats.urll (from askbus.toml): unknown field `urll`, \
             expected one of `url`, `name`, `nkey_seed`, `tls_ca_file`",
        ),
        (
            "[routr]\ngrace_ms = 1",
            "routr (from askbus.toml): unknown section, expected one of \
             nats, telemetry, health, router, adapter, emitter, askctl",
        ),
        (
            "[router]\nmode = 'keep'",
            "router.mode (from askbus.toml): `keep` is not allowed: \
             unknown variant `keep`, expected `cancel` or `park`",
        ),
        (
            "[router]\ngrace_ms = 'soon'",
            "router.grace_ms (from askbus.toml): string \"soon\" is not allowed, \
             expected an integer",
        ),
        (
            "[router.gateways.home]\nurl = 'ws://x'",
            "router.gateways.home.token: missing; set it in the config file or as \
             ASKBUS__ROUTER__GATEWAYS__HOME__TOKEN",
        ),
        (
            "[telemetry]\nsample_ratio = 2.0",
            "telemetry.sample_ratio (from askbus.toml): `2` is not allowed: \
             expected a number from 0.0 to 1.0",
        ),
        (
            "[health]\nlisten = 'everywhere'",
            "health.listen (from askbus.toml): `everywhere` is not allowed: \
             invalid socket address syntax",
        ),
        (
            "[nats]\nurl = 'localhost'",
            "nats.url (from askbus.toml): `localhost` is not allowed: \
             expected nats://HOST:PORT or tls://HOST:PORT, several separated by commas",
        ),
        (
            "[telemetry]\notlp_endpoint = 'https://collector'",
            "telemetry.otlp_endpoint (from askbus.toml): `https://collector` is not allowed: \
             expected http://HOST:PORT (OTLP over gRPC without TLS; \
             for TLS run a collector beside)",
        ),
        ("nats = 'nats://x'", "nats (from askbus.toml): must be a section, [nats] with keys below it"),
    ];
    for (text, expected) in cases {
        assert_eq!(load_text(text).unwrap_err(), expected);
    }
}

#[test]
fn a_refused_variable_is_named() {
    let refused = |variables: &[(&str, &str)]| load(None, variables).unwrap_err();
    assert_eq!(
        refused(&[("ASKBUS__ROUTER__NATS__URL", "localhost")]),
        "nats.url (from the environment variable ASKBUS__ROUTER__NATS__URL): `localhost` is not \
         allowed: expected nats://HOST:PORT or tls://HOST:PORT, several separated by commas"
    );
    assert_eq!(
        refused(&[("ASKBUS__ROUTER__GRACE", "1")]),
        "router.grace (from the environment variable ASKBUS__ROUTER__GRACE): unknown field \
         `grace`, expected one of `grace_ms`, `mode`, `token`, `gateways`"
    );
    assert_eq!(
        refused(&[("ASKBUS__ROUTER__TOKEN__FILE", "t"), ("ASKBUS__ROUTER__TOKEN", "x")]),
        "router.token: only one of the environment variables ASKBUS__ROUTER__TOKEN and \
         ASKBUS__ROUTER__TOKEN__FILE can be set"
    );
}

#[test]
fn a_file_that_is_absent_or_no_toml_is_named_with_the_place() {
    let missing = load(Some(Path::new("/nowhere/askbus.toml")), &[]).unwrap_err();
    assert!(missing.starts_with("cannot read the config file /nowhere/askbus.toml: "), "{missing}");

    let broken = load_text("[router]\ntoken = topsecret\n").unwrap_err();
    assert!(broken.starts_with("askbus.toml is not valid TOML: "), "{broken}");
    assert!(broken.contains("line 2"), "{broken}");
    assert!(!broken.contains("topsecret"), "{broken}");
}

#[test]
fn a_secret_is_the_value_or_the_content_of_a_file() {
    let folder = Folder::new();
    let secret = folder.file("token", "  from the file\n");
    let path = secret.to_str().unwrap();
    let file = folder.file("askbus.toml", "[router]\ntoken = 'inline'");

    let config = load(Some(&file), &[]).unwrap();
    assert_eq!(config.service.token.unwrap().expose(), "inline");
    let config = load(Some(&file), &[("ASKBUS__ROUTER__TOKEN__FILE", path)]).unwrap();
    assert_eq!(config.service.token.unwrap().expose(), "from the file");
}

#[test]
fn a_secret_file_that_is_absent_empty_or_too_large_is_refused() {
    let folder = Folder::new();
    let problem =
        |path: &Path| load(None, &[("ASKBUS__ROUTER__TOKEN__FILE", path.to_str().unwrap())]).unwrap_err();
    let absent = problem(Path::new("/nowhere/token"));
    assert!(absent.contains("the secret file /nowhere/token cannot be read"), "{absent}");
    let empty = problem(&folder.file("empty", "\n"));
    assert!(empty.contains("is empty"), "{empty}");
    let large = problem(&folder.file("large", &"x".repeat(70_000)));
    assert!(large.contains("has 70000 bytes, at most 65536 are allowed"), "{large}");
}

#[test]
fn nothing_prints_a_secret() {
    let config = load_text(
        "[router]\ntoken = 'topsecret'\n[router.gateways.home]\nurl = 'ws://x'\ntoken = 'topsecret'",
    )
    .unwrap();
    assert_eq!(config.service.token.as_ref().unwrap().expose(), "topsecret");
    let token = config.service.token.as_ref().unwrap();
    let prints = [
        format!("{config:?} {config:#?}"),
        format!("{token} {token:?} {token:>40}"),
        serde_json::to_string(&config).unwrap(),
    ];
    for print in prints {
        assert!(print.contains("[redacted]") && !print.contains("topsecret"), "{print}");
    }
}

#[test]
fn no_refusal_prints_a_secret() {
    let texts = [
        "[router]\ntokn = 'topsecret'",
        "[router]\ntoken = ['topsecret']",
        "[router.token]\nfil = 'topsecret'",
        "[router.gateways.home]\ntoken = 'topsecret'",
        "[nats]\nurl = 'nats://user:topsecret@host'",
        "[router]\ntoken = 'topsecret",
    ];
    for text in texts {
        let refusal = load_text(text).unwrap_err();
        assert!(!refusal.contains("topsecret"), "{refusal}");
    }
    for number in ["12345", "123.45"] {
        let refusal = load_text(&format!("[router]\ntoken = {number}")).unwrap_err();
        assert!(refusal.contains("must be a string in quotes"), "{refusal}");
        assert!(!refusal.contains("123"), "{refusal}");
    }
}

#[test]
fn secrets_are_compared_whole() {
    let token = Redacted::new("abc".to_owned());
    assert!(token.matches("abc"));
    for other in ["", "ab", "abcd", "abd"] {
        assert!(!token.matches(other));
    }
}
