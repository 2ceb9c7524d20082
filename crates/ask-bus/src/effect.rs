//! Every effect that the services have on the bus, by name: what is written, and what is
//! acknowledged. With the feature `crash-points` the process can be made to abort right before or
//! after one (`CRASH_AT=<name>:before|after:<n>`), so that a test can see what a crash there
//! leaves behind.

use std::fmt;

macro_rules! effects {
    ($($(#[$doc:meta])* $variant:ident = $name:literal,)*) => {
        /// A write or an acknowledgement.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum Effect {
            $($(#[$doc])* $variant,)*
        }

        impl Effect {
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$variant,)*];

            /// The name, as in `CRASH_AT`.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)*
                }
            }
        }
    };
}

effects! {
    /// First durable write of a question.
    Asked = "asked",
    /// Second durable write.
    Decided = "decided",
    /// Third durable write.
    Returned = "returned",
    /// Steps that no other write has carried.
    Steps = "steps",
    /// A late reply is listed.
    Late = "late",
    /// The answer of a lost call is given to the question that asks the same again.
    GivenAgain = "given_again",
    /// A session is bound, or a message routed.
    Session = "session",
    /// A message goes to a gateway.
    Chat = "chat",
    /// An item of a run is put out.
    Run = "run",
    /// Who is there.
    Presence = "presence",
    /// Nobody is there any more.
    PresenceClear = "presence_clear",
    /// An adapter takes or renews its lease.
    Lease = "lease",
    /// The gateway process that was seen last.
    Boot = "boot",
    /// For which session an MCP client speaks, or that it speaks no more.
    McpSession = "mcp_session",
    /// The public seal key is published.
    Seal = "seal",
    /// What can't be read is parked.
    Dead = "dead",
    /// A dead letter is dropped.
    DeadDropped = "dead_dropped",
    /// Front ends are told where to show a question.
    Step = "step",
    /// An item of `CHAT` is acknowledged.
    ChatDone = "chat_done",
    /// An item of `CHAT` is to come again.
    ChatLater = "chat_later",
    /// An item of `CHAT` is being worked on.
    ChatWorking = "chat_working",
    /// An unreadable item of `CHAT` is not to come again.
    ChatParked = "chat_parked",
    /// The answer to a front end's reply.
    AnswerReply = "answer_reply",
    /// The answer to an outcome of the gateway or an operator.
    AnswerOutcome = "answer_outcome",
    /// The answer to a message.
    AnswerSay = "answer_say",
    /// The answer to Stop.
    AnswerStop = "answer_stop",
    /// The answer to a report of what was shown.
    AnswerShown = "answer_shown",
    /// The answer to an abort.
    AnswerAbort = "answer_abort",
    /// The answer to the question which agents there are.
    AnswerAgents = "answer_agents",
    /// An unreadable request is refused.
    Refuse = "refuse",
}

impl fmt::Display for Effect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Has an effect. Everything in this crate that changes something goes through here.
pub(crate) async fn have<T, E>(effect: Effect, work: impl Future<Output = Result<T, E>>) -> Result<T, E> {
    #[cfg(feature = "crash-points")]
    crash::before(effect);
    let had = work.await;
    #[cfg(feature = "crash-points")]
    if had.is_ok() {
        crash::after(effect);
    }
    #[cfg(not(feature = "crash-points"))]
    let _ = effect;
    had
}

#[cfg(feature = "crash-points")]
mod crash {
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::Effect;

    struct Crash {
        at: Effect,
        after: bool,
        left: AtomicU64,
    }

    fn crash() -> Option<&'static Crash> {
        static CRASH: OnceLock<Option<Crash>> = OnceLock::new();
        CRASH.get_or_init(|| std::env::var("CRASH_AT").ok().map(|at| parse(&at))).as_ref()
    }

    fn parse(text: &str) -> Crash {
        let parts: Vec<&str> = text.split(':').collect();
        let read = || {
            let [name, side, n] = parts[..] else { return None };
            let at = Effect::ALL.iter().copied().find(|effect| effect.name() == name)?;
            let after = match side {
                "before" => false,
                "after" => true,
                _ => return None,
            };
            Some(Crash { at, after, left: AtomicU64::new(n.parse().ok()?) })
        };
        read().unwrap_or_else(|| panic!("CRASH_AT={text}: must be <name>:before|after:<n>"))
    }

    fn reached(effect: Effect, after: bool) {
        let Some(crash) = crash().filter(|crash| crash.at == effect && crash.after == after) else {
            return;
        };
        if crash.left.fetch_sub(1, Ordering::Relaxed) == 1 {
            eprintln!("crash point {effect} reached");
            std::process::abort();
        }
    }

    pub(super) fn before(effect: Effect) {
        reached(effect, false);
    }

    pub(super) fn after(effect: Effect) {
        reached(effect, true);
    }
}

/// Weakened variants of the product, which the checker of `tests/faults` must find. Only with the
/// feature `crash-points` can `ASKBUS_MUTANT` name one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mutant {
    /// A question's end is left to the time to live of its key.
    Ttl,
    /// A message is acknowledged before it was sent.
    AckFirst,
    /// A decision is written whatever the entry is by now.
    NoRevision,
    /// Each delivery of a message has a key of its own.
    DoubleSend,
    /// A decision is reported before it is durable.
    ToldEarly,
}

impl Mutant {
    /// All of them.
    pub const ALL: &[Self] =
        &[Self::Ttl, Self::AckFirst, Self::NoRevision, Self::DoubleSend, Self::ToldEarly];

    /// The name, as in `ASKBUS_MUTANT`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ttl => "ttl",
            Self::AckFirst => "ack-first",
            Self::NoRevision => "no-revision",
            Self::DoubleSend => "double-send",
            Self::ToldEarly => "told-early",
        }
    }

    /// Whether this process is that mutant.
    pub(crate) fn is_on(self) -> bool {
        #[cfg(feature = "crash-points")]
        return std::env::var("ASKBUS_MUTANT").is_ok_and(|name| name == self.name());
        #[cfg(not(feature = "crash-points"))]
        false
    }
}

/// How long the entry `payload` has until its deadline, as the header `Nats-TTL` has it.
pub(crate) fn seconds_left(payload: &[u8]) -> String {
    let entry: serde_json::Value = serde_json::from_slice(payload).unwrap_or_default();
    let deadline = ask_core::time::Timestamp(entry["deadline"].as_u64().unwrap_or_default());
    format!("{}s", deadline.since(ask_core::time::Timestamp::now()).as_secs().max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Calls of async-nats that reach the server and change something there or wake somebody.
    const SENDS: &[&str] = &[
        ".publish(",
        ".publish_with",
        "double_ack(",
        "ack_with(",
        ".ack()",
        ".respond(",
        ".request_with_headers(",
        ".delete_message(",
        ".purge",
    ];
    /// What has no effect that a crash could leave half done: an echo, a ping, and requests, whose
    /// effect is at their receiver.
    const NONE: &[&str] =
        &["client.publish(inbox.clone(), Bytes::new())", "\"$SRV.PING\"", "client.request_with_headers("];

    #[test]
    fn everything_that_is_sent_has_a_crash_point() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        let mut sent = 0;
        for file in std::fs::read_dir(folder).unwrap() {
            let path = file.unwrap().path();
            if path.file_name().is_some_and(|name| name == "effect.rs") {
                continue;
            }
            let text: String =
                std::fs::read_to_string(&path).unwrap().split_whitespace().collect::<Vec<_>>().join(" ");
            let text = text.replace(" .", ".");
            for statement in text.split(';') {
                let sends = SENDS.iter().any(|send| statement.contains(send));
                if sends && !NONE.iter().any(|none| statement.contains(none)) {
                    sent += 1;
                    let why = "wrap it in effect::have(Effect::…, …)";
                    assert!(statement.contains("effect::have("), "{}: {statement}: {why}", path.display());
                }
            }
        }
        assert!(sent > 5, "the test no longer finds what is sent");
    }

    #[test]
    fn every_effect_has_a_name_of_its_own_and_is_had_somewhere() {
        let mut names: Vec<_> = Effect::ALL.iter().map(|effect| effect.name()).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), Effect::ALL.len());
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        let files = std::fs::read_dir(folder).unwrap().map(|file| file.unwrap().path());
        let others = files.filter(|path| path.file_name().is_some_and(|name| name != "effect.rs"));
        let code: String = others.map(|path| std::fs::read_to_string(path).unwrap()).collect();
        for effect in Effect::ALL {
            assert!(code.contains(&format!("Effect::{effect:?}")), "nothing has the effect {effect}");
        }
    }
}
