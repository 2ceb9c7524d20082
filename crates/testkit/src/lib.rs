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
