//! The bus of askbus: the only crate that names async-nats.
//!
//! Everything that is written goes through one named function here, so that it says in one place
//! what is durable, what it expects and what repeats it harmlessly.

mod adapters;
mod chat;
mod connection;
mod dead;
mod effect;
mod error;
mod inspect;
pub mod names;
mod presence;
mod provision;
mod questions;
mod requests;
mod runs;
pub mod seal;
mod sessions;
pub mod trace;
mod watch;

pub use adapters::{Lease, SealKey};
pub use chat::{ChatDelivery, ChatItems};
pub use connection::{Bus, BusOptions};
pub use dead::{DeadLetter, SentAgain};
pub use effect::{Effect, Mutant};
pub use error::BusError;
pub use inspect::{Server, ServiceInstance};
pub use presence::PresenceChange;
pub use provision::{Provisioned, Provisioning};
pub use questions::{FeedItem, QuestionFeed, Stored};
pub use requests::{AdapterRequest, AdapterRequests, Incoming, RouterRequest, RouterRequests};
pub use runs::{RunCursor, RunDelivery, RunFeed};
pub use watch::{Change, Watch};
