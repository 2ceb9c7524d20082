//! Carries questions between the OpenClaw Gateway and the bus.
//!
//! - [`openclaw`]: the Gateway as it speaks
//! - `bridge`: between the Gateway's events and the bus, by the one active replica of a gateway
//! - `calls`, `plugin`, `mcp`: the endpoint for asking tools, served by every replica
//! - [`adapter`]: what both share

pub mod adapter;
mod binding;
mod bridge;
mod calls;
pub mod config;
mod mask;
mod mcp;
pub mod openclaw;
mod plugin;
mod trace;

use std::sync::Arc;

use anyhow::Context as _;
use ask_bus::Bus;
use service_kit::{Health, Service};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use adapter::Adapter;
use config::AdapterConfig;

/// What the frame must know of this service.
pub const SERVICE: Service = Service {
    name: "gateway-adapter",
    section: "adapter",
    version: env!("CARGO_PKG_VERSION"),
    defaults: include_str!("../config.default.toml"),
    readiness: &["nats", "buckets", "seal_key", "runs", "gateway"],
};

/// Runs the service until `shutdown`.
///
/// # Errors
/// A configuration that can't work, or an address that can't be listened on.
pub async fn run(
    config: AdapterConfig,
    bus: Bus,
    health: Health,
    shutdown: CancellationToken,
) -> anyhow::Result<()> {
    let listen = config.http.listen;
    let listener = TcpListener::bind(listen)
        .await
        .with_context(|| format!("cannot listen on adapter.http.listen = {listen}"))?;
    serve(config, bus, health, shutdown, listener).await
}

/// Like [`run`], on a listener that is bound already.
///
/// # Errors
/// A configuration that can't work.
pub async fn serve(
    config: AdapterConfig,
    bus: Bus,
    health: Health,
    shutdown: CancellationToken,
    listener: TcpListener,
) -> anyhow::Result<()> {
    let gateway = bridge::connect_options(&config.gateway)?;
    let adapter = Arc::new(Adapter::new(config, bus.clone(), shutdown.clone())?);
    tracing::info!(http = %listener.local_addr()?, gateway = adapter.gateway(), "serving");
    let bridge = Box::pin(bridge::run(adapter.clone(), gateway, health, shutdown.clone()));
    let calls = Box::pin(calls::serve(adapter, listener, shutdown));
    let ((), calls) = tokio::join!(bridge, calls);
    bus.close().await;
    calls.context("the endpoint for calls failed")
}
