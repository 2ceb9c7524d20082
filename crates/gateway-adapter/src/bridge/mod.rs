//! Between the Gateway and the bus: what the one active replica of a gateway does.

mod chat;
mod lease;
mod link;
mod questions;
mod reconcile;
mod requests;
mod returns;
mod run_output;
mod transcript;

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use ask_bus::BusError;
use service_kit::Health;
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::mpsc;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use crate::adapter::Adapter;
use crate::config::GatewayConfig;
use crate::openclaw::client::{REQUIRED_SCOPES, Request};
use crate::openclaw::connection::{Connected, Connection, Options, State};
use crate::openclaw::url::GatewayUrl;
use run_output::Runs;

/// How many rows of a transcript are read at once.
const HISTORY: u32 = 200;
/// How often it is looked at what a Gateway that can't be reached leaves undecided.
const LOOK: Duration = Duration::from_secs(1);

/// How the Gateway is connected to.
///
/// # Errors
/// An address that can't be one.
pub(crate) fn connect_options(gateway: &GatewayConfig) -> anyhow::Result<Options> {
    let url = GatewayUrl::parse(&gateway.url)
        .with_context(|| format!("adapter.gateway.url = {} can't be used", gateway.url))?;
    let mut scopes: Vec<String> = REQUIRED_SCOPES.map(str::to_owned).to_vec();
    for scope in &gateway.extra_scopes {
        if !scopes.contains(scope) {
            scopes.push(scope.clone());
        }
    }
    let request = Request {
        url,
        token: gateway.token.as_ref().map(|token| token.expose().to_owned()),
        scopes,
        display_name: "askbus".into(),
    };
    Ok(Options { request, identity: gateway.identity_file.clone() })
}

/// Runs the bridge until `shutdown`.
pub(crate) async fn run(
    adapter: Arc<Adapter>,
    options: Options,
    health: Health,
    shutdown: CancellationToken,
) {
    let background = async {
        tokio::join!(
            adapter.follow_entries(),
            adapter.follow_tool_starts(&health),
            report_readiness(&adapter, &health)
        )
    };
    tokio::select! {
        _ = background => {}
        () = lead(&adapter, &options, &health, &shutdown) => {}
    }
}

/// Works for the gateway whenever this replica holds the lease; ends with `shutdown`.
async fn lead(adapter: &Arc<Adapter>, options: &Options, health: &Health, shutdown: &CancellationToken) {
    let holder = uuid::Uuid::new_v4().to_string();
    while !shutdown.is_cancelled() {
        // A standby needs no connection to the Gateway to be ready.
        let stands_by = || health.ready("gateway");
        let acquire = lease::acquire(&adapter.bus, adapter.gateway(), &holder, stands_by);
        let acquired = shutdown.run_until_cancelled(acquire).await;
        let Some(mut held) = acquired else {
            return;
        };
        tracing::info!(gateway = adapter.gateway(), "this replica works for the gateway now");
        health.not_ready("gateway", "connecting");
        let stop = shutdown.child_token();
        let ended = {
            let active = active(adapter, options, health, &stop);
            tokio::pin!(active);
            tokio::select! {
                () = &mut active => None,
                () = held.keep() => {
                    stop.cancel();
                    active.await;
                    Some("another replica has the lease")
                }
            }
        };
        match ended {
            Some(why) => tracing::warn!(why, "this replica stands by"),
            None => held.release().await,
        }
    }
}

async fn active(adapter: &Arc<Adapter>, options: &Options, health: &Health, stop: &CancellationToken) {
    let (connection, mut connections) = Connection::start(options.clone(), stop.clone());
    let readiness = async {
        let mut state = connection.state();
        loop {
            match &*state.borrow_and_update() {
                State::Up(_) => health.ready("gateway"),
                State::Down { why } => health.not_ready("gateway", why.clone()),
            }
            if state.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    };
    let work = async {
        adapter.entries_loaded().await;
        tokio::join!(
            hold_secrets(adapter),
            requests::serve(adapter, &connection),
            follow_connections(adapter, &mut connections, stop)
        );
    };
    tokio::select! {
        () = readiness => {}
        () = work => {}
        () = stop.cancelled() => {}
    }
}

/// Works on one connection after the other.
async fn follow_connections(
    adapter: &Arc<Adapter>,
    connections: &mut mpsc::Receiver<Connected>,
    stop: &CancellationToken,
) {
    let runs = Runs::new(adapter.clone(), stop.clone());
    let mut gone_since = Instant::now();
    loop {
        let connected = tokio::select! {
            connected = connections.recv() => connected,
            () = sleep(LOOK) => {
                returns::close_unreachable(adapter, gone_since).await;
                continue;
            }
        };
        let Some(connected) = connected else { return };
        runs.forget_known();
        let before = boot_id(adapter).await;
        let is_new_boot = before.is_some_and(|before| before != connected.boot_id);
        if is_new_boot {
            tracing::warn!(boot_id = connected.boot_id, "the gateway was restarted");
        }
        link::follow(adapter, &runs, connected, is_new_boot, stop.child_token()).await;
        gone_since = Instant::now();
    }
}

async fn boot_id(adapter: &Adapter) -> Option<String> {
    let mut pause = questions::Pause::default();
    loop {
        match adapter.bus.boot_id(adapter.gateway()).await {
            Ok(boot_id) => return boot_id,
            Err(error) => tracing::warn!(%error, "the last boot id was not read; trying again"),
        }
        pause.wait().await;
    }
}

/// Has the values of all secrets at hand that calls of running runs may have, whichever replica
/// serves the call.
async fn hold_secrets(adapter: &Arc<Adapter>) {
    let mut changes = adapter.entry_changes();
    loop {
        for stored in adapter.open_entries() {
            if stored.value.holds_secret() {
                run_output::hold_secret(adapter, &stored.value);
            }
        }
        loop {
            match changes.recv().await {
                Ok(stored) if stored.value.holds_secret() => {
                    run_output::hold_secret(adapter, &stored.value);
                }
                Ok(_) => {}
                Err(RecvError::Lagged(_)) => break,
                Err(RecvError::Closed) => return,
            }
        }
    }
}

/// Reports whether the bus is there, provisioned, and holds the public half of our seal key.
async fn report_readiness(adapter: &Adapter, health: &Health) {
    loop {
        if !adapter.bus.is_connected() {
            health.not_ready("nats", "no connection to the nats server");
            sleep(Duration::from_millis(200)).await;
            continue;
        }
        health.ready("nats");
        match adapter.bus.check().await {
            Ok(()) => health.ready("buckets"),
            Err(error) => health.not_ready("buckets", error.to_string()),
        }
        match seal_key_problem(adapter).await {
            Ok(None) => health.ready("seal_key"),
            Ok(Some(problem)) => health.not_ready("seal_key", problem),
            Err(error) => health.not_ready("seal_key", error.to_string()),
        }
        let pause =
            if health.unmet().is_empty() { Duration::from_secs(5) } else { Duration::from_millis(250) };
        sleep(pause).await;
    }
}

async fn seal_key_problem(adapter: &Adapter) -> Result<Option<String>, BusError> {
    let gateway = adapter.gateway();
    let published = adapter.bus.seal_key(gateway).await?;
    let own = adapter.seal_key().map(|key| key.seal_key());
    Ok(match (published, own) {
        (Some(published), Some(own)) if published == own => None,
        (None, _) => {
            Some(format!("no seal key is published for the gateway {gateway}; run `askctl provision`"))
        }
        (Some(published), None) => Some(format!(
            "adapter.seal_key is not set; it is the private half of the key {} that `askctl provision` made",
            published.key_id
        )),
        (Some(published), Some(own)) => Some(format!(
            "adapter.seal_key is the key {}, and the bus has {}; give this service the file that belongs to it",
            own.key_id, published.key_id
        )),
    })
}
