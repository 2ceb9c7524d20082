//! The process of gateway-adapter.

use std::process::ExitCode;

use ask_bus::{Bus, BusOptions};
use gateway_adapter::{SERVICE, config::AdapterConfig, run};
use service_kit::run_service;

fn main() -> ExitCode {
    run_service::<AdapterConfig, _, _>(&SERVICE, async |frame| {
        let nats = frame.config.nats;
        let options = BusOptions {
            url: nats.url,
            name: nats.name.unwrap_or_else(|| SERVICE.name.into()),
            nkey_seed: nats.nkey_seed.map(|seed| seed.expose().to_owned()),
            inbox_prefix: None,
            ca_file: nats.tls_ca_file,
        };
        let bus = Bus::connect(options).await?;
        run(frame.config.service, bus, frame.health, frame.shutdown).await
    })
}
