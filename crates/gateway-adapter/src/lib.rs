//! Carries questions between the OpenClaw Gateway and the bus.

pub mod openclaw;
