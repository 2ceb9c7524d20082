//! The way back: what the agent gets of a decided question, and the proof that it has it.

use std::time::{Duration, Instant};

use ask_bus::Stored;
use ask_bus::trace::continue_from;
use ask_core::call::seen_in_result;
use ask_core::entry::{Entry, Road};
use ask_core::key::QuestionKey;
use ask_core::native::{self, GatewaySays, InTranscript};
use ask_core::outcome::{Outcome, Returned};
use ask_core::time::Timestamp;
use tracing::Instrument;

use super::link::Link;
use super::questions::{Pause, answers_of, outcome_of};
use super::transcript::Search;
use crate::adapter::Adapter;
use crate::openclaw::calls::Resolution;
use crate::openclaw::client::GatewayError;
use crate::openclaw::frames::{Answers, QUESTION_INVALID_ANSWER, QUESTION_NOT_FOUND, QuestionStatus};

/// How long after the Gateway's expiry an outcome may still be proven: so long it keeps the record.
const PROVABLE: Duration = Duration::from_secs(15);
const UNREACHABLE: &str = "gateway_unreachable";
/// How long a tool result waits for its outcome to be seen here.
const RESULT_GRACE: Duration = Duration::from_secs(2);

/// Gives the decision of a native question to the Gateway, and closes it with what came of it.
pub(super) async fn give_back(link: &Link, decided: &Stored<Entry>) {
    let entry = &decided.value;
    if entry.returned().is_some() {
        return;
    }
    let span = tracing::info_span!(
        "process ask",
        otel.kind = "consumer",
        messaging.system = "nats",
        messaging.operation.name = "process",
        messaging.operation.type = "process",
        messaging.destination.template = "ask",
        askbus.question = %entry.key.question,
        askbus.session = %entry.key.session,
        askbus.run = %entry.key.run,
    );
    continue_from(&span, entry.traceparent.as_deref());
    async {
        let returned = match native::decided_by_gateway(entry) {
            Some(returned) => returned,
            None => resolve(link, entry).await,
        };
        close(&link.adapter, &entry.key, returned).await;
    }
    .instrument(span)
    .await;
}

async fn resolve(link: &Link, entry: &Entry) -> Returned {
    let id = native::resolution_id(entry);
    let by = native::resolved_by(entry);
    let mut pause = Pause::default();
    loop {
        let resolution = match resolution(link, entry) {
            Ok(resolution) => resolution,
            Err(why) => {
                tracing::error!(question = %entry.key, why, "an answer can't be given to the gateway");
                return withdraw(link, entry, &by, &id, why).await;
            }
        };
        let error = match link.client.question_resolve(&entry.key.question, &resolution, &by, &id).await {
            Ok(_) => return returned(link, entry, GatewaySays::Resolved),
            Err(error) => error,
        };
        let failed = match error.reason() {
            Some(QUESTION_NOT_FOUND) => {
                return returned(link, entry, GatewaySays::Forgotten(in_transcript(link, entry).await));
            }
            Some(QUESTION_INVALID_ANSWER) => {
                tracing::error!(question = %entry.key, %error, "the gateway does not take the answer");
                return withdraw(link, entry, &by, &id, &format!("invalid_answer: {error}")).await;
            }
            _ if error.is_retryable() => error,
            // It has its outcome already, or this one is refused for good: its record tells.
            _ => match what_it_has(link, entry).await {
                Ok(Some(says)) => return returned(link, entry, says),
                Ok(None) => {
                    tracing::error!(question = %entry.key, %error, "the gateway refuses the outcome");
                    return withdraw(link, entry, &by, &id, &refusal(&error)).await;
                }
                Err(error) if error.is_retryable() => error,
                Err(error) => return Returned::Unconfirmed { why: refusal(&error) },
            },
        };
        // What a lost connection did, the next one tells.
        if is_past_proof(&link.adapter, entry) && !link.client.is_closed() {
            return Returned::Unconfirmed { why: UNREACHABLE.into() };
        }
        tracing::warn!(question = %entry.key, error = %failed, "not given back yet; trying again");
        pause.wait().await;
    }
}

/// Why nobody can tell what became of an outcome that the Gateway has refused for good.
fn refusal(error: &GatewayError) -> String {
    match error {
        GatewayError::Refused { rejection, .. } => {
            format!("refused by the gateway: {}", rejection.reason().unwrap_or(&rejection.code))
        }
        other => other.to_string(),
    }
}

/// Ends a question whose answer the Gateway can't take, so that its run does not wait in vain.
async fn withdraw(link: &Link, entry: &Entry, by: &str, id: &str, why: &str) -> Returned {
    let mut pause = Pause::default();
    while let Err(error) =
        link.client.question_resolve(&entry.key.question, &Resolution::Cancel, by, id).await
    {
        if matches!(error, GatewayError::Refused { .. }) && !error.is_retryable() {
            break;
        }
        pause.wait().await;
    }
    Returned::Unconfirmed { why: why.into() }
}

fn returned(link: &Link, entry: &Entry, says: GatewaySays) -> Returned {
    native::returned(entry, says, link.is_new_boot).expect("only a decided question is returned")
}

/// The outcome that the Gateway has already; `None` while it waits for one.
async fn what_it_has(link: &Link, entry: &Entry) -> Result<Option<GatewaySays>, GatewayError> {
    match link.client.question_get(&entry.key.question).await {
        Ok(record) if record.status == QuestionStatus::Pending => Ok(None),
        Ok(record) => {
            let outcome = outcome_of(&entry.question, &record);
            Ok(Some(GatewaySays::Settled { by: record.resolved_by, outcome }))
        }
        Err(error) if error.reason() == Some(QUESTION_NOT_FOUND) => {
            Ok(Some(GatewaySays::Forgotten(in_transcript(link, entry).await)))
        }
        Err(error) => Err(error),
    }
}

/// The Gateway holds the question no more: only the tool result in the transcript can tell.
pub(super) async fn in_transcript(link: &Link, entry: &Entry) -> InTranscript {
    match link.result_in_history(entry).await {
        Search::Nothing => InTranscript::Nothing,
        Search::NothingInPart => InTranscript::NothingInPart,
        Search::Found(None) => InTranscript::NoAnswer,
        Search::Found(Some(theirs)) => InTranscript::Answers {
            ours: entry.question.is_secret() || answers(link, entry).is_ok_and(|ours| ours == theirs),
            answers: answers_of(&entry.question, &theirs),
        },
    }
}

fn resolution(link: &Link, entry: &Entry) -> Result<Resolution, &'static str> {
    match entry.decision().map(|d| &d.outcome) {
        Some(Outcome::Answered { .. }) => answers(link, entry).map(Resolution::Answers),
        _ => Ok(Resolution::Cancel),
    }
}

/// The answers as the Gateway takes them: labels and own words by prompt.
fn answers(link: &Link, entry: &Entry) -> Result<Answers, &'static str> {
    let Some(Outcome::Answered { answers }) = entry.decision().map(|d| &d.outcome) else {
        return Ok(Answers::default());
    };
    let secret = link.adapter.open_secret(entry).map_err(|error| {
        tracing::error!(question = %entry.key, %error, "a secret can't be opened");
        "secret_not_readable"
    })?;
    let given = entry.question.prompts.iter().filter_map(|prompt| {
        let answer = answers.get(&prompt.id)?;
        let values = match (&secret, prompt.secret) {
            (Some(secret), true) => vec![secret.as_str().to_owned()],
            _ => answer.values(prompt),
        };
        Some((prompt.id.clone(), values))
    });
    Ok(Answers { answers: given.collect() })
}

/// True once the Gateway can prove nothing about a question any more.
fn is_past_proof(adapter: &Adapter, entry: &Entry) -> bool {
    let expires = entry.deadline.plus(adapter.config.questions.native_margin());
    Timestamp::now() > expires.plus(PROVABLE)
}

/// Closes native questions that were decided and whose Gateway could not be reached in time. It
/// must have been gone for as long, since this machine's clock may be ahead of the Gateway's.
pub(super) async fn close_unreachable(adapter: &Adapter, gone_since: Instant) {
    if gone_since.elapsed() < PROVABLE {
        return;
    }
    for stored in adapter.open_entries() {
        let entry = &stored.value;
        if entry.road == Road::Native && !entry.is_pending() && is_past_proof(adapter, entry) {
            let why = UNREACHABLE.into();
            close(adapter, &entry.key, Returned::Unconfirmed { why }).await;
        }
    }
}

/// A tool result that the Gateway reports proves that its call has the outcome it shows.
pub(super) fn tool_result_seen(
    adapter: &std::sync::Arc<Adapter>,
    session: &str,
    run: &str,
    call: &str,
    text: String,
) {
    let open = adapter.open_entries_of(session);
    let of_call = |entry: &&std::sync::Arc<Stored<Entry>>| {
        let entry = &entry.value;
        matches!(entry.road, Road::Plugin | Road::Mcp) && entry.key.run == run && entry.call == call
    };
    let keys: Vec<QuestionKey> = open.iter().filter(of_call).map(|entry| entry.value.key.clone()).collect();
    if keys.is_empty() {
        return;
    }
    let adapter = adapter.clone();
    tokio::spawn(async move {
        for key in keys {
            let decided = tokio::time::timeout(RESULT_GRACE, adapter.wait_decided(&key)).await;
            let Ok(decided) = decided else { continue };
            let Ok(secret) = adapter.open_secret(&decided.value) else { continue };
            let secret = secret.as_ref().map(|secret| secret.as_str());
            if let Some(proof) = seen_in_result(&decided.value, secret, &text) {
                close(&adapter, &key, proof).await;
            }
        }
    });
}

/// Third durable write; goes on until it is written. Does nothing to a closed question.
pub(super) async fn close(adapter: &Adapter, key: &QuestionKey, returned: Returned) {
    let mut pause = Pause::default();
    while let Err(error) = adapter.close(key, &returned).await {
        tracing::warn!(%error, "a return was not written; trying again");
        pause.wait().await;
    }
}
