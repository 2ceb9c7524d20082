//! `doctor`: what is wrong with this askbus, and what to do.

use std::path::Path;
use std::time::Duration;

use ask_bus::{Bus, BusError};
use owui_emitter::EmitterConfig;
use serde_json::Value;
use service_kit::Config;

use crate::config::{AskctlConfig, connect};
use crate::nats_server::is_new_enough;
use crate::provision::{read_seal_key, seal_file};
use crate::terminal::say;

/// How one check went.
enum Finding {
    Good(String),
    /// What is wrong, and what to do.
    Bad(String, String),
    /// What can't be told, and how it could be.
    Unknown(String, String),
}

use Finding::{Bad, Good, Unknown};

/// Prints every check; false when something is wrong.
pub async fn doctor(config: &Config<AskctlConfig>, file: Option<&Path>, keys: &Path) -> bool {
    let mut well = true;
    let mut report = |name: &str, finding: Finding| {
        let (word, what, fix) = match finding {
            Good(what) => ("ok", what, None),
            Bad(what, fix) => {
                well = false;
                ("PROBLEM", what, Some(fix))
            }
            Unknown(what, fix) => ("unknown", what, Some(fix)),
        };
        say!("{word:<8} {name:<10} {what}");
        if let Some(fix) = fix {
            say!("{:<19} -> {fix}", "");
        }
    };

    let bus = match connect(&config.nats).await {
        Ok(bus) => bus,
        Err(error) => {
            report("nats", Bad(error.to_string(), "nothing else can be checked before that".into()));
            return false;
        }
    };
    let server = bus.server();
    report("nats", Good(format!("connected to {}", config.nats.url)));
    report(
        "version",
        if is_new_enough(&server.version) {
            Good(server.version.clone())
        } else {
            Bad(server.version.clone(), "install nats-server 2.12 or newer".into())
        },
    );
    report("disk", disk(&config.service.monitor_url, &server.id).await);
    let buckets = match bus.check().await {
        Ok(()) => Good("all buckets and streams are there".into()),
        Err(error) => broken(error),
    };
    let provisioned = matches!(buckets, Good(_));
    report("buckets", buckets);
    if provisioned {
        report("parked", parked(&bus).await);
    }
    report("router", router(&bus).await);
    for gateway in &config.service.gateways {
        report("adapter", adapter(&bus, gateway).await);
        if provisioned {
            report("seal key", seal_key(&bus, keys, gateway).await);
        }
    }
    report("emitter", emitter(file).await);
    well
}

async fn disk(monitor_url: &str, server_id: &str) -> Finding {
    let fix =
        "set askctl.monitor_url to the monitoring address of nats-server (http: in its config)".to_owned();
    let url = format!("{}/varz", monitor_url.trim_end_matches('/'));
    let read = async { http_client()?.get(&url).send().await?.json::<Value>().await };
    match read.await {
        Err(_) => Unknown(format!("nothing answers at {url}"), fix),
        Ok(varz) if varz["server_id"] != server_id => Unknown(format!("{url} is of another server"), fix),
        Ok(varz) if varz["jetstream"]["config"]["sync_always"] == true => {
            Good("an acknowledged write is on disk (sync_interval: always)".into())
        }
        Ok(_) => Bad(
            "an acknowledged write may still be lost in a power cut".into(),
            "put `sync_interval: always` into the jetstream block of the server's config".into(),
        ),
    }
}

async fn router(bus: &Bus) -> Finding {
    match bus.services(Duration::from_millis(500)).await {
        Err(error) => broken(error),
        Ok(all) => match all.iter().filter(|one| one.name == ask_bus::names::ROUTER).count() {
            0 => Bad(
                "no ask-router runs: questions and replies wait".into(),
                "start one: `ask-router`, or everything with `askctl up`".into(),
            ),
            1 => Good("one ask-router".into()),
            n => Good(format!("{n} ask-routers")),
        },
    }
}

async fn adapter(bus: &Bus, gateway: &str) -> Finding {
    if let Err(error) = bus.check_gateway(gateway).await {
        return broken(error);
    }
    match bus.agents(gateway).await {
        Ok(agents) => Good(format!("{gateway}: connected, {} agents", agents.len())),
        Err(BusError::NoResponders { .. }) => Bad(
            format!("{gateway}: no gateway-adapter works for it"),
            "start one: `gateway-adapter`, or everything with `askctl up`".into(),
        ),
        Err(BusError::Unavailable { .. }) => Bad(
            format!("{gateway}: its gateway-adapter is not connected to it"),
            "its log and /readyz say why; adapter.gateway.url and token are what it connects with".into(),
        ),
        Err(error) => broken(error),
    }
}

async fn parked(bus: &Bus) -> Finding {
    match bus.parked().await {
        Ok(0) => Good("nothing unreadable is parked".into()),
        Ok(count) => Unknown(
            format!("{count} unreadable messages are parked in the stream DEAD"),
            "`askctl dead ls` says where they were and why".into(),
        ),
        Err(error) => broken(error),
    }
}

/// The emitter that the config file is for, asked as a front end asks it.
async fn emitter(file: Option<&Path>) -> Finding {
    let config = match service_kit::config::load::<EmitterConfig>(&owui_emitter::SERVICE, file) {
        Ok(config) => config.service.http,
        Err(error) => {
            return Unknown(
                format!("not looked at: {error}"),
                "name the emitter's config file with --config".into(),
            );
        }
    };
    let url = format!("http://{}/v1/models", config.listen);
    let asked = async { http_client()?.get(&url).bearer_auth(config.token.expose()).send().await };
    match asked.await.map(|answer| answer.status().as_u16()) {
        Ok(401 | 403) => {
            Bad(format!("{url} refuses the token of this configuration"), "give both the same token".into())
        }
        Ok(status @ 400..) => {
            Bad(format!("{url} answers {status}"), "look at the emitter's /readyz and log".into())
        }
        Ok(_) => Good(format!("serves front ends at http://{}", config.listen)),
        Err(_) => Unknown(
            format!("nothing answers at {url}"),
            "start one: `owui-emitter`; if it runs elsewhere, run this there".into(),
        ),
    }
}

fn http_client() -> reqwest::Result<reqwest::Client> {
    reqwest::Client::builder().no_proxy().timeout(Duration::from_secs(3)).build()
}

async fn seal_key(bus: &Bus, keys: &Path, gateway: &str) -> Finding {
    let path = seal_file(keys, gateway);
    let published = match bus.seal_key(gateway).await {
        Ok(Some(key)) => key,
        Ok(None) => {
            return Bad(
                format!("{gateway}: none on the bus, so no secret can be sealed"),
                "askctl provision".into(),
            );
        }
        Err(error) => return broken(error),
    };
    if !path.exists() {
        return Unknown(
            format!(
                "{gateway}: {} is on the bus, its private half is not at {}",
                published.key_id,
                path.display()
            ),
            "name the folder with --dir, or run it where the adapter's key is".into(),
        );
    }
    match read_seal_key(&path) {
        Ok(key) if key.seal_key() == published => Good(format!("{gateway}: {} fits", published.key_id)),
        Ok(key) => Bad(
            format!(
                "{gateway}: the bus has {}, and {} holds {}",
                published.key_id,
                path.display(),
                key.seal_key().key_id
            ),
            "`askctl provision` publishes the one in the file".into(),
        ),
        Err(error) => Bad(format!("{gateway}: {error:#}"), "put the right file back".into()),
    }
}

fn broken(error: BusError) -> Finding {
    let fix = match &error {
        BusError::NotProvisioned { .. } => "askctl provision",
        _ => "look at the log of nats-server",
    };
    Bad(error.to_string(), fix.into())
}
