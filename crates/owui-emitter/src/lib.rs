//! owui-emitter: serves `docs/pipe-protocol.md` to Open WebUI's pipe. It shows questions, streams
//! what the agent says, and hands in what people reply and type.
//!
//! It decides nothing and keeps nothing that matters: what a stream needs to go on after a crash
//! is in the cursor that the front end holds, and on the bus.

mod config;
mod cursor;
mod http;
mod hub;
mod left;
mod limits;
mod presence;
mod reply;
mod runs;
mod shown;
mod turn;
mod words;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::Context as _;
use ask_bus::Bus;
use ask_core::wire::Agent;
use axum::serve::ListenerExt as _;
use futures::future::BoxFuture;
use service_kit::Health;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

pub use config::{EmitterConfig, HttpConfig, SERVICE};

use crate::hub::Hub;

/// How long to wait before asking a service again that was away; doubled up to the second.
const RETRY: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));

/// What the tasks of one emitter share.
struct Emitter {
    config: EmitterConfig,
    bus: Bus,
    hub: Hub,
    /// Names this process among the replicas.
    id: String,
    agents: Mutex<Option<(Instant, Vec<Agent>)>>,
    work: mpsc::UnboundedSender<BoxFuture<'static, ()>>,
    shutdown: CancellationToken,
}

/// Runs an emitter until `shutdown`. Open streams then break off without an `end`, so that their
/// front ends go on at another replica.
///
/// # Errors
/// When it can't listen on `emitter.http.listen`.
pub async fn run(
    config: EmitterConfig,
    bus: Bus,
    health: Health,
    shutdown: CancellationToken,
) -> anyhow::Result<()> {
    let listen = config.http.listen;
    let listener = TcpListener::bind(listen)
        .await
        .with_context(|| format!("cannot listen on emitter.http.listen = {listen}"))?;
    serve(listener, config, bus, health, shutdown).await
}

/// Like [`run`], on a listener that is bound already.
///
/// # Errors
/// When the endpoint breaks.
pub async fn serve(
    listener: TcpListener,
    config: EmitterConfig,
    bus: Bus,
    health: Health,
    shutdown: CancellationToken,
) -> anyhow::Result<()> {
    let (work, mut to_do) = mpsc::unbounded_channel();
    let emitter = Arc::new(Emitter {
        config,
        bus: bus.clone(),
        hub: Hub::default(),
        id: uuid::Uuid::new_v4().to_string(),
        agents: Mutex::default(),
        work,
        shutdown: shutdown.clone(),
    });
    tracing::info!(listen = %listener.local_addr()?, "serving front ends");
    // Lines are short and must not wait for each other.
    let listener = listener.tap_io(|connection| {
        let _ = connection.set_nodelay(true);
    });
    let mut endpoint = tokio::spawn(
        axum::serve(listener, http::routes(emitter.clone()))
            .with_graceful_shutdown(shutdown.clone().cancelled_owned())
            .into_future(),
    );
    let mut work = JoinSet::new();
    work.spawn(follow(emitter.clone(), health.clone()));
    work.spawn(watch_connection(bus.clone(), health, shutdown.clone()));
    loop {
        tokio::select! {
            // The endpoint ends by the shutdown too, which is no failure.
            biased;
            () = shutdown.cancelled() => break,
            ended = &mut endpoint => {
                ended.context("the endpoint failed")?.context("the endpoint failed")?;
                anyhow::bail!("the endpoint ended by itself");
            }
            Some(task) = to_do.recv() => drop(work.spawn(task)),
            Some(done) = work.join_next() => log_failure(done),
        }
    }
    // Streams and requests end first; what they leave to do is still done.
    endpoint.await.context("the endpoint failed")?.context("the endpoint failed")?;
    to_do.close();
    while let Some(task) = to_do.recv().await {
        work.spawn(task);
    }
    while let Some(done) = work.join_next().await {
        log_failure(done);
    }
    bus.close().await;
    Ok(())
}

/// Waits for what provisioning makes, then feeds the open streams.
async fn follow(emitter: Arc<Emitter>, health: Health) {
    let feed = async {
        let mut delay = delays();
        loop {
            match emitter.bus.check().await {
                Ok(()) => health.ready("buckets"),
                Err(error) => {
                    health.not_ready("buckets", error.to_string());
                    delay.wait().await;
                    continue;
                }
            }
            match emitter.hub.feed(&emitter, &health).await {
                Ok(()) => return,
                Err(error) => health.not_ready("feeds", error.to_string()),
            }
            delay.wait().await;
        }
    };
    tokio::select! {
        () = emitter.shutdown.cancelled() => {}
        () = feed => {}
    }
}

async fn watch_connection(bus: Bus, health: Health, shutdown: CancellationToken) {
    let mut look = tokio::time::interval(Duration::from_millis(250));
    loop {
        tokio::select! {
            () = shutdown.cancelled() => return,
            _ = look.tick() => match bus.is_connected() {
                true => health.ready("nats"),
                false => health.not_ready("nats", "not connected"),
            },
        }
    }
}

fn log_failure(done: Result<(), tokio::task::JoinError>) {
    if let Err(error) = done {
        tracing::error!(%error, "a task of the emitter failed");
    }
}

impl Emitter {
    /// Does something that outlives the request that called for it; it is waited for at the end.
    fn later(&self, task: impl Future<Output = ()> + Send + 'static) {
        // Fails only when the process is about to end.
        let _ = self.work.send(Box::pin(task));
    }
}

/// Growing waits between attempts, see [`RETRY`].
struct Delays(Duration);

fn delays() -> Delays {
    Delays(RETRY.0)
}

impl Delays {
    async fn wait(&mut self) {
        tokio::time::sleep(self.0).await;
        self.0 = (self.0 * 2).min(RETRY.1);
    }
}

/// A panic of another holder leaves the maps as they were: they stay usable.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
