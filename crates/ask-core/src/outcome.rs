//! How a question ends: the one decision, and what became of it on the way back to its call.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::reply::Answer;

/// The one decision about a question. No variant but `Answered` holds an answer.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "status", rename_all = "snake_case")]
pub enum Outcome {
    /// A responder answered; one answer per prompt id.
    Answered {
        /// What was answered, by prompt id.
        answers: BTreeMap<String, Answer>,
    },
    /// A responder said that they do not want to answer.
    Declined,
    /// Called off.
    Cancelled {
        /// Who or what called it off.
        reason: CancelReason,
    },
    /// The deadline passed.
    Expired,
    /// It could not be put before anybody. It never claims that the user did not answer.
    Undeliverable {
        /// Why not.
        reason: Undeliverable,
    },
}

/// Who or what called a question off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CancelReason {
    /// The person pressed Cancel.
    User,
    /// The person went to another chat.
    ChatSwitch,
    /// The person pressed Stop.
    Stop,
    /// The run ended without waiting for it.
    RunEnded,
    /// The asking call was cancelled by its client.
    Caller,
    /// The gateway lost the question in a restart.
    GatewayRestart,
    /// An operator cancelled it with askctl.
    Operator,
    /// The same question was asked again and took its place.
    Superseded,
}

/// Why a question could not be put before anybody.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Undeliverable {
    /// No front end has ever been bound to the session.
    NoFrontEnd,
    /// The session's front end can't show this kind of question.
    Unsupported,
    /// The deadline passed and nothing was ever offered.
    NeverShown,
    /// Every surface refused it.
    Refused,
    /// The call could belong to several sessions.
    AmbiguousIdentity,
    /// The secret was kept to its limit and is gone.
    ExpiredSecret,
    /// As many questions as may wait at once are waiting already.
    TooManyPending,
}

/// Whether a question reached a surface.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Delivered {
    /// A surface reported it.
    Yes,
    /// There is evidence that nothing was offered (rules F1, F2 of docs/protocol.md).
    No,
    /// Neither.
    Unknown,
}

/// Whether a person saw it. Nothing can prove that nobody did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Seen {
    /// A person reacted to it.
    Yes,
    /// Nothing is known.
    Unknown,
}

/// What became of a decided question on the way back to its call.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "result", rename_all = "snake_case")]
pub enum Returned {
    /// The call has the outcome, and this proves it.
    Delivered {
        /// What proved it, e.g. `acknowledged` or `resolution_id`.
        proof: String,
    },
    /// The Gateway had another outcome first.
    Overruled {
        /// Who decided there, where the Gateway says so.
        by: Option<String>,
        /// What the Gateway decided.
        outcome: Outcome,
    },
    /// It may or may not have arrived; nothing can tell any more.
    Unconfirmed {
        /// Why it can't be told.
        why: String,
    },
}

impl Outcome {
    /// The status as it is written in records, results and labels.
    pub fn status(&self) -> &'static str {
        match self {
            Self::Answered { .. } => "answered",
            Self::Declined => "declined",
            Self::Cancelled { .. } => "cancelled",
            Self::Expired => "expired",
            Self::Undeliverable { .. } => "undeliverable",
        }
    }

    /// True for an outcome that a Gateway can only express as "no answer".
    pub fn is_no_answer(&self) -> bool {
        !matches!(self, Self::Answered { .. })
    }
}
