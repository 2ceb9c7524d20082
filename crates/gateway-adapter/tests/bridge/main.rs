//! The bridge between a Gateway that speaks protocol v4 over a real WebSocket and a real
//! nats-server with a real router. The tests of `real` run against OpenClaw itself.

mod bench;
mod questions;
mod real;
#[path = "../real_gateway/mod.rs"]
#[allow(dead_code, reason = "shared with the contract tests")]
mod real_gateway;
mod replicas;
mod runs;
