//! The bridge between a Gateway that speaks protocol v4 over a real WebSocket and a real
//! nats-server with a real router.

mod bench;
mod questions;
mod replicas;
mod runs;
