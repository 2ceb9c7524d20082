//! Every name on the bus, in one place.

use ask_core::key::{QuestionKey, SessionKey, encode_token};
use ask_core::wire::RunItem;

/// Bucket of the questions' entries, keyed `<gateway>.<session>.<run>.<question>`.
pub const ASK: &str = "ask";
/// Bucket of the sessions, keyed `<gateway>.<session>`.
pub const SESSIONS: &str = "sessions";
/// Bucket of who is there, keyed `<gateway>.<session>.<stream>`.
pub const PRESENCE: &str = "presence";
/// Bucket of the adapters' leases, boot ids and public seal keys, keyed `<gateway>.<what>`.
pub const ADAPTERS: &str = "adapters";
/// Stream of what goes to the gateways.
pub const CHAT: &str = "CHAT";
/// Stream of what the runs put out.
pub const RUNS: &str = "RUNS";
/// Stream of what could not be read.
pub const DEAD: &str = "DEAD";
/// Name and queue group of the routers' service.
pub const ROUTER: &str = "ask-router";
/// The revision of a republished entry, as the server writes it.
pub(crate) const SEQUENCE_HEADER: &str = "Nats-Sequence";

pub(crate) fn bucket_stream(bucket: &str) -> String {
    format!("KV_{bucket}")
}

pub(crate) fn bucket_subject(bucket: &str, key: &str) -> String {
    format!("$KV.{bucket}.{key}")
}

pub(crate) fn reply(key: &QuestionKey) -> String {
    format!("reply.{key}")
}

pub(crate) fn outcome(key: &QuestionKey) -> String {
    format!("outcome.{key}")
}

pub(crate) fn shown(key: &QuestionKey) -> String {
    format!("shown.{key}")
}

pub(crate) fn step(key: &QuestionKey) -> String {
    format!("step.{key}")
}

pub(crate) fn say(session: &SessionKey) -> String {
    format!("say.{session}")
}

pub(crate) fn stop(session: &SessionKey) -> String {
    format!("stop.{session}")
}

pub(crate) fn chat(session: &SessionKey) -> String {
    format!("chat.{session}")
}

pub(crate) fn abort(gateway: &str) -> String {
    format!("abort.{}", encode_token(gateway))
}

pub(crate) fn agents(gateway: &str) -> String {
    format!("agents.{}", encode_token(gateway))
}

pub(crate) fn run(item: &RunItem) -> String {
    format!("run.{}.{}.{}", item.session, encode_token(&item.run), item.what.kind())
}

pub(crate) fn chat_consumer(gateway: &str) -> String {
    format!("adapter-{}", encode_token(gateway).replace('=', "_"))
}
