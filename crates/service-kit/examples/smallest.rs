//! The smallest service: says that it is ready, and waits for its end. Its tests run it too.

use std::process::ExitCode;
use std::time::Duration;

use serde::Deserialize;
use service_kit::{Service, run_service};

const SERVICE: Service = Service {
    name: "smallest",
    section: "router",
    version: env!("CARGO_PKG_VERSION"),
    defaults: include_str!("smallest.default.toml"),
    readiness: &["greeting"],
};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Own {
    greeting: String,
    end: End,
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum End {
    Clean,
    Fail,
    Hang,
}

fn main() -> ExitCode {
    run_service::<Own, _, _>(&SERVICE, async |frame| {
        let own = frame.config.service;
        frame.health.ready("greeting");
        tracing::info_span!("hello", greeting = own.greeting).in_scope(|| tracing::info!("up"));
        match own.end {
            End::Clean => frame.shutdown.cancelled().await,
            End::Fail => anyhow::bail!("this end was configured"),
            End::Hang => tokio::time::sleep(Duration::MAX).await,
        }
        Ok(())
    })
}
