//! The real and scripted peers that tests, the demo and the stack run against.
//!
//! Nothing here knows askbus: it depends on none of its crates, and no product crate depends on
//! it. Each part can be started many times in one process.

pub mod nats;
pub mod otlp;
