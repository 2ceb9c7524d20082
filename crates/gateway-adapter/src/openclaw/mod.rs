//! Operator client for the OpenClaw Gateway, WebSocket protocol 4.
//!
//! Nothing here knows NATS or a question's life: this is the Gateway as it speaks, typed as far as
//! it is used.
//!
//! - [`url`]: the Gateway's address in every form a person types
//! - [`identity`]: the Ed25519 device identity and its signature
//! - [`frames`]: what travels on the wire
//! - [`client`]: one connection, from challenge to close
//! - [`calls`]: the Gateway methods in use, typed
//! - [`connection`]: connects again for ever

pub mod calls;
pub mod client;
pub mod connection;
pub mod frames;
pub mod identity;
pub mod url;
