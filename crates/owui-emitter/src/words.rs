//! What people are told about the outcome of a question.

use ask_core::entry::{DecidedBy, Entry};
use ask_core::outcome::{CancelReason, Outcome, Returned, Undeliverable};
use ask_core::question::Question;
use ask_core::surface::Surface;

/// One line: what became of a question, by whom.
pub(crate) fn outcome(question: &Question, outcome: &Outcome, by: &str, surface: Option<Surface>) -> String {
    let who = match surface {
        Some(Surface::Gateway) => "in the Control UI".to_owned(),
        Some(Surface::Cli) => "with askctl".to_owned(),
        _ if by.is_empty() => "elsewhere".to_owned(),
        _ => format!("by {by}"),
    };
    match outcome {
        Outcome::Answered { answers } => {
            let given = |question: &Question| {
                let given = question.prompts.iter().filter_map(|p| Some(answers.get(&p.id)?.display(p)));
                given.collect::<Vec<_>>().join("; ")
            };
            match Some(question).filter(|q| !q.is_secret()).map(given).filter(|given| !given.is_empty()) {
                Some(given) => format!("Answered {who}: {given}"),
                None => format!("Answered {who}"),
            }
        }
        Outcome::Declined => format!("Declined {who}"),
        Outcome::Cancelled { reason } => match reason {
            CancelReason::User => format!("Cancelled {who}"),
            CancelReason::ChatSwitch => "Cancelled: you went to another chat".into(),
            CancelReason::Stop => "Cancelled: stopped".into(),
            CancelReason::RunEnded => "Cancelled: the agent's run ended".into(),
            CancelReason::Caller => "Cancelled: the agent no longer waits for it".into(),
            CancelReason::GatewayRestart => "Cancelled: the Gateway was restarted".into(),
            CancelReason::Operator => "Cancelled by an operator".into(),
            CancelReason::Superseded => "Closed: it was asked again".into(),
        },
        Outcome::Expired => "Expired".into(),
        Outcome::Undeliverable { reason } => match reason {
            Undeliverable::ExpiredSecret => "Closed: the secret was kept to its limit and is gone".into(),
            Undeliverable::Unsupported => "Closed: it can't be shown in this chat".into(),
            Undeliverable::TooManyPending => "Closed: too many questions are waiting already".into(),
            _ => "Closed: it could not be shown".into(),
        },
    }
}

/// What the sender of a late reply is told.
pub(crate) fn too_late(
    question: &Question,
    actual: &Outcome,
    by: &str,
    surface: Option<Surface>,
    sent_as_message: bool,
) -> String {
    let what = outcome(question, actual, by, surface);
    match sent_as_message {
        true => format!("{what}. Your answer went to the agent as a message"),
        false => what,
    }
}

/// What a chat is told of a question that was decided elsewhere; `None` while it is pending.
pub(crate) fn decided_elsewhere(entry: &Entry) -> Option<String> {
    let decision = entry.decision()?;
    if let Some(overruled) = overruled(entry) {
        return Some(overruled);
    }
    let (by, surface) = match &decision.by {
        DecidedBy::Reply { responder, surface, .. } => (responder.display_name(), Some(*surface)),
        DecidedBy::Record { responder, .. } => (responder.display_name(), None),
        DecidedBy::Rule { .. } => ("", None),
    };
    Some(outcome(&entry.question, &decision.outcome, by, surface))
}

/// What a chat is told when the Gateway had another outcome first.
pub(crate) fn overruled(entry: &Entry) -> Option<String> {
    let Some(Returned::Overruled { by, outcome: theirs }) = entry.returned() else {
        return None;
    };
    let by = by.as_deref().unwrap_or("");
    Some(outcome(&entry.question, theirs, by, Some(Surface::Gateway)))
}
