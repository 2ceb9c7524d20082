//! Keeps a connection to the Gateway, for ever.

use std::{path::PathBuf, time::Duration};

use tokio::{
    sync::{mpsc, watch},
    time::{Instant, sleep},
};
use tokio_util::sync::CancellationToken;

use super::{
    client::{self, Client, ConnectError, GatewayError, Lost, Opened, Request},
    frames::{Event, Hello},
    identity::Identity,
};

const FIRST_PAUSE: Duration = Duration::from_millis(250);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// Between tries that only a person can make succeed. The Gateway locks a client out for five
/// minutes after ten failures in one minute.
const PAUSE_FOR_A_PERSON: Duration = Duration::from_secs(10);
/// A connection that lived this long ends the series of failures.
const STABLE: Duration = Duration::from_secs(10);

/// What to connect to, and as whom.
#[derive(Clone)]
pub struct Options {
    /// Address, token, scopes.
    pub request: Request,
    /// File of the device identity; made when it is first needed.
    pub identity: PathBuf,
}

/// A connection that has just been made. Everything known about the Gateway must be loaded anew:
/// it replays nothing. When `events` ends, the next `Connected` follows.
pub struct Connected {
    /// Requests on this very connection (subscriptions belong to a connection).
    pub client: Client,
    /// What the Gateway said.
    pub hello: Hello,
    /// Changes when the Gateway process was started anew.
    pub boot_id: String,
    /// Events in the order of the wire.
    pub events: mpsc::Receiver<Event>,
}

/// Where the connection stands.
#[derive(Clone)]
pub enum State {
    /// No connection.
    Down {
        /// Why not; for people.
        why: String,
    },
    /// Connected.
    Up(Client),
}

/// Handle to the connection that is kept. Clones share it.
#[derive(Clone)]
pub struct Connection {
    state: watch::Receiver<State>,
}

impl Connection {
    /// Connects, and again whenever the connection is lost, until `stop`. Each connection made is
    /// handed over; the one before has ended by then, so there is never a second reader.
    pub fn start(options: Options, stop: CancellationToken) -> (Self, mpsc::Receiver<Connected>) {
        let (state_sender, state) =
            watch::channel(State::Down { why: "it has not been connected yet".to_owned() });
        let (sender, connections) = mpsc::channel(1);
        tokio::spawn(keep(options, state_sender, sender, stop));
        (Self { state }, connections)
    }

    /// The live connection, or why there is none.
    pub fn client(&self) -> Result<Client, GatewayError> {
        match &*self.state.borrow() {
            State::Up(client) => Ok(client.clone()),
            State::Down { why } => Err(GatewayError::NotReady { why: why.clone() }),
        }
    }

    /// Follows the state, for readiness and waiting.
    pub fn state(&self) -> watch::Receiver<State> {
        self.state.clone()
    }

    /// Waits for a live connection; `None` once stopped.
    pub async fn ready(&self) -> Option<Client> {
        let mut state = self.state.clone();
        let up = state.wait_for(|s| matches!(s, State::Up(_))).await.ok()?;
        match &*up {
            State::Up(client) => Some(client.clone()),
            State::Down { .. } => None,
        }
    }
}

async fn keep(
    options: Options,
    state: watch::Sender<State>,
    connections: mpsc::Sender<Connected>,
    stop: CancellationToken,
) {
    let mut keeper = Keeper {
        with_device: needs_device(&options.request),
        options,
        identity: None,
        last_error: String::new(),
    };
    let mut pause = Pause::default();
    loop {
        let opened = tokio::select! {
            opened = keeper.open() => opened,
            () = stop.cancelled() => break,
        };
        let wait = match opened {
            Ok(opened) => {
                let since = Instant::now();
                keeper.last_error.clear();
                let lost = follow(opened, &state, &connections, &stop).await;
                if stop.is_cancelled() || connections.is_closed() {
                    break;
                }
                tracing::warn!(why = %lost, "connection to the gateway lost");
                let why = format!("connection lost: {lost}");
                state.send_replace(State::Down { why });
                if since.elapsed() >= STABLE {
                    pause = Pause::default();
                }
                pause.next()
            }
            Err(failure) => {
                let why = failure.to_string();
                keeper.report(&why);
                state.send_replace(State::Down { why });
                match failure {
                    Failure::Connect(error) => keeper.after(&error, &mut pause),
                    Failure::Identity(_) => PAUSE_FOR_A_PERSON,
                }
            }
        };
        tokio::select! {
            () = sleep(wait) => {}
            () = stop.cancelled() => break,
        }
    }
    state.send_replace(State::Down { why: "stopped".to_owned() });
}

/// Hands a connection over and waits until it has ended.
async fn follow(
    opened: Opened,
    state: &watch::Sender<State>,
    connections: &mpsc::Sender<Connected>,
    stop: &CancellationToken,
) -> Lost {
    let Opened { client, events, mut task } = opened;
    let hello = client.hello().clone();
    tracing::info!(
        version = hello.server.version,
        boot_id = hello.server.boot_id,
        conn_id = hello.server.conn_id,
        "connected to the gateway"
    );
    state.send_replace(State::Up(client.clone()));
    let connected =
        Connected { client: client.clone(), boot_id: hello.server.boot_id.clone(), hello, events };
    // The consumer may still be busy with the connection before.
    let handed_over = tokio::select! {
        sent = connections.send(connected) => sent.is_ok(),
        () = stop.cancelled() => false,
    };
    if !handed_over {
        client.close();
    }
    let ended = tokio::select! {
        ended = &mut task => ended,
        () = stop.cancelled() => {
            client.close();
            task.await
        }
    };
    ended.unwrap_or_else(|panic| Lost::Broken(panic.to_string()))
}

struct Keeper {
    options: Options,
    /// Whether to connect as a device: from the network, or once the Gateway has shown that it
    /// doesn't take us for a local client.
    with_device: bool,
    identity: Option<Identity>,
    last_error: String,
}

#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error(transparent)]
    Connect(ConnectError),
    #[error(transparent)]
    Identity(super::identity::IdentityError),
}

impl Keeper {
    async fn open(&mut self) -> Result<Opened, Failure> {
        if self.with_device && self.identity.is_none() {
            let identity = Identity::load_or_create(&self.options.identity).map_err(Failure::Identity)?;
            self.identity = Some(identity);
        }
        client::open(&self.options.request, self.identity.as_mut()).await.map_err(Failure::Connect)
    }

    /// Draws the consequence of a failed try; returns how long to wait for the next.
    fn after(&mut self, error: &ConnectError, pause: &mut Pause) -> Duration {
        match error {
            ConnectError::Scopes { .. } | ConnectError::DeviceNeeded(_) if !self.with_device => {
                tracing::info!("the gateway does not treat this as a local client: using a device identity");
                self.with_device = true;
                return pause.next();
            }
            ConnectError::DeviceToken(_) => {
                let forgotten = self.identity.as_mut().map(|i| i.set_device_token(None));
                if let Some(Err(error)) = forgotten {
                    tracing::warn!(%error, "a refused device token is not forgotten");
                }
            }
            _ => {}
        }
        let wait = if error.is_transient() { pause.next() } else { PAUSE_FOR_A_PERSON };
        wait.max(error.retry_after().unwrap_or_default())
    }

    /// A failure that lasts is told once.
    fn report(&mut self, why: &str) {
        if self.last_error == why {
            tracing::debug!(why, "still no connection to the gateway");
        } else {
            tracing::warn!(why, "no connection to the gateway");
            why.clone_into(&mut self.last_error);
        }
    }
}

fn needs_device(request: &Request) -> bool {
    let approvals = |scope: &String| scope == client::SCOPE_APPROVALS;
    !request.url.is_loopback() || request.scopes.iter().any(approvals)
}

/// Pauses that double up to a limit, each shortened at random by up to a half so that many clients
/// of one Gateway don't return together.
#[derive(Default)]
struct Pause {
    failures: u32,
}

impl Pause {
    fn next(&mut self) -> Duration {
        let full = FIRST_PAUSE.saturating_mul(1 << self.failures.min(10)).min(LONGEST_PAUSE);
        self.failures += 1;
        full.mul_f64(rand::random_range(0.5..=1.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_a_limit_with_jitter() {
        let mut pause = Pause::default();
        let mut full = FIRST_PAUSE;
        for _ in 0..40 {
            let next = pause.next();
            assert!(next >= full / 2 && next <= full, "{next:?} of {full:?}");
            full = (full * 2).min(LONGEST_PAUSE);
        }
    }
}
