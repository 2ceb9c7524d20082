//! The emitter's process.

use std::process::ExitCode;

use ask_bus::{Bus, BusOptions};
use owui_emitter::{EmitterConfig, SERVICE};
use service_kit::run_service;

fn main() -> ExitCode {
    run_service::<EmitterConfig, _, _>(&SERVICE, async |frame| {
        let nats = &frame.config.nats;
        let options = BusOptions {
            url: nats.url.clone(),
            name: nats.name.clone().unwrap_or_else(|| SERVICE.name.into()),
            nkey_seed: nats.nkey_seed.as_ref().map(|s| s.expose().to_owned()),
            ca_file: nats.tls_ca_file.clone(),
            ..Default::default()
        };
        let bus = Bus::connect(options).await?;
        owui_emitter::run(frame.config.service, bus, frame.health, frame.shutdown).await
    })
}
