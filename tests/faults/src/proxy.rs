//! A TCP proxy between two parts, where connections are cut, delayed and broken off.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result};
use rand::Rng as _;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use crate::world::listeners;

/// A running proxy; ends when dropped.
#[derive(Debug)]
pub struct Proxy {
    /// Where it listens.
    pub address: SocketAddr,
    shared: Arc<Shared>,
    serve: tokio::task::JoinHandle<()>,
}

#[derive(Debug)]
struct Shared {
    targets: Vec<SocketAddr>,
    next: AtomicUsize,
    delay_ms: AtomicU64,
    /// So many responses are lost with their connections.
    lose: AtomicU64,
    cuts: watch::Sender<u64>,
}

impl Proxy {
    /// Serves connections to these targets in turn.
    ///
    /// # Errors
    /// No port is free.
    pub async fn start(targets: Vec<SocketAddr>) -> Result<Self> {
        let listener = listeners(1)?.pop().context("a listener")?;
        listener.set_nonblocking(true)?;
        let listener = TcpListener::from_std(listener)?;
        let address = listener.local_addr()?;
        let shared = Arc::new(Shared {
            targets,
            next: AtomicUsize::new(0),
            delay_ms: AtomicU64::new(0),
            lose: AtomicU64::new(0),
            cuts: watch::Sender::new(0),
        });
        let serving = shared.clone();
        let serve = tokio::spawn(async move {
            loop {
                if let Ok((client, _)) = listener.accept().await {
                    tokio::spawn(serving.clone().connection(client));
                }
            }
        });
        Ok(Self { address, shared, serve })
    }

    /// Cuts all connections.
    pub fn cut(&self) {
        self.shared.cuts.send_modify(|n| *n += 1);
    }

    /// Delays each piece by up to this time; connections overtake each other.
    pub fn delay(&self, at_most: Duration) {
        self.shared.delay_ms.store(at_most.as_millis() as u64, Ordering::Relaxed);
    }

    /// The next responses are lost, after what was asked for has been done.
    pub fn lose_responses(&self, count: u64) {
        self.shared.lose.store(count, Ordering::Relaxed);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.serve.abort();
        self.cut();
    }
}

impl Shared {
    async fn connection(self: Arc<Self>, client: TcpStream) {
        let mut cuts = self.cuts.subscribe();
        let Some(server) = self.connect().await else { return };
        let _ = (client.set_nodelay(true), server.set_nodelay(true));
        let (from_client, to_client) = client.into_split();
        let (from_server, to_server) = server.into_split();
        tokio::select! {
            _ = cuts.changed() => {}
            () = self.pump(from_client, to_server, false) => {}
            () = self.pump(from_server, to_client, true) => {}
        }
    }

    async fn connect(&self) -> Option<TcpStream> {
        for _ in 0..self.targets.len() {
            let next = self.next.fetch_add(1, Ordering::Relaxed) % self.targets.len();
            if let Ok(server) = TcpStream::connect(self.targets[next]).await {
                return Some(server);
            }
        }
        None
    }

    /// Carries bytes until either side ends.
    async fn pump(&self, mut from: OwnedReadHalf, mut to: OwnedWriteHalf, is_response: bool) {
        let mut bytes = vec![0; 64 * 1024];
        loop {
            let Ok(count @ 1..) = from.read(&mut bytes).await else { return };
            if is_response
                && self.lose.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1)).is_ok()
            {
                return;
            }
            let delay = self.delay_ms.load(Ordering::Relaxed);
            if delay > 0 {
                let delay = rand::rng().random_range(0..=delay);
                tokio::time::sleep(Duration::from_millis(delay)).await;
            }
            if to.write_all(&bytes[..count]).await.is_err() {
                return;
            }
        }
    }
}
