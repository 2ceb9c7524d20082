//! A fault harness: the real services, two of each, and the real nats-server, with scripted
//! Gateways and people, while things crash, break and come twice. What all of them saw is recorded
//! and checked.

pub mod checker;
pub mod deadlines;
pub mod histories;
pub mod history;
pub mod matrix;
mod mcp;
pub mod person;
pub mod plan;
pub mod proxy;
pub mod settle;
pub mod world;
