//! The real and scripted peers that tests, the demo and the stack run against.
//!
//! Nothing here knows askbus: it depends on none of its crates, and no product crate depends on
//! it. Each part can be started many times in one process.

pub mod front;
pub mod gateway;
pub mod model;
pub mod nats;
pub mod otlp;
pub mod script;

/// Below the range from which the kernel takes ports for outgoing connections: while a server is
/// down, a reconnecting client can then neither take its port nor connect to itself.
const PORTS: std::ops::Range<u16> = 20_000..32_000;

/// An HTTP client for the parts of this crate and for tests.
///
/// # Panics
/// The platform has no TLS roots.
pub fn http_client() -> reqwest::Client {
    // reqwest is built without a provider of cryptography; another part may have set it already.
    let _ = rustls::crypto::ring::default_provider().install_default();
    // Everything that is talked to here runs on this machine.
    let client = reqwest::Client::builder().no_proxy().build();
    client.expect("an http client without settings")
}

/// How long [`until`] waits. The real Gateway takes 20 s for its first turn on a busy machine.
pub const WITHIN: std::time::Duration = std::time::Duration::from_secs(120);

/// Looks again and again until there is a value.
///
/// # Panics
/// There is none after [`WITHIN`].
pub async fn until<T>(what: &str, look: impl AsyncFn() -> Option<T>) -> T {
    let wait = async {
        loop {
            if let Some(value) = look().await {
                return value;
            }
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    };
    let found = tokio::time::timeout(WITHIN, wait).await;
    found.unwrap_or_else(|_| panic!("{what} did not come within {WITHIN:?}"))
}
