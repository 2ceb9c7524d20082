//! The domain of askbus, without I/O: what a question is, how its life goes, where it can be
//! shown, and what a typed message means while one is pending.
//!
//! Every rule is a pure function of the record and of what is passed in; the clock too.

pub mod call;
pub mod entry;
pub mod key;
pub mod limits;
pub mod native;
pub mod outcome;
pub mod question;
pub mod record;
pub mod reply;
pub mod result;
pub mod route;
pub mod session;
pub mod surface;
pub mod take;
pub mod text_reply;
pub mod time;
pub mod wire;

/// Version of every payload that askbus writes to the bus. Unknown fields are ignored, so it
/// rises only when an old reader would misread a new payload.
pub const SCHEMA: u32 = 1;
