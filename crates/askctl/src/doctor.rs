//! `doctor`: what is wrong with this askbus, and what to do.

use std::path::Path;
use std::time::Duration;

use ask_bus::{Bus, BusError};
use serde_json::Value;
use service_kit::Config;

use crate::config::{AskctlConfig, connect};
use crate::nats_server::is_new_enough;
use crate::provision::{read_seal_key, seal_file};

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
pub async fn doctor(config: &Config<AskctlConfig>, keys: &Path) -> bool {
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
        println!("{word:<8} {name:<10} {what}");
        if let Some(fix) = fix {
            println!("{:<19} -> {fix}", "");
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
    report("router", router(&bus).await);
    for gateway in &config.service.gateways {
        report("adapter", adapter(&bus, gateway).await);
        if provisioned {
            report("seal key", seal_key(&bus, keys, gateway).await);
        }
    }
    well
}

async fn disk(monitor_url: &str, server_id: &str) -> Finding {
    let fix =
        "set askctl.monitor_url to the monitoring address of nats-server (http: in its config)".to_owned();
    let url = format!("{}/varz", monitor_url.trim_end_matches('/'));
    let client = reqwest::Client::builder().no_proxy().timeout(Duration::from_secs(3)).build();
    let read = async { client?.get(&url).send().await?.json::<Value>().await };
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
            format!("{gateway}: no gateway-adapter is connected to it"),
            "start one, and look at its /readyz and log: it says why it is not connected".into(),
        ),
        Err(error) => broken(error),
    }
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
