//! Replies: the compare-and-set from pending that decides a question.

use ask_bus::{BusError, Incoming};
use ask_core::entry::Entry;
use ask_core::key::SessionKey;
use ask_core::question::Invalid;
use ask_core::reply::{Reply, ReplyContent, as_message};
use ask_core::take::{Taken, Trust};
use ask_core::time::Timestamp;
use ask_core::wire::{ReplyRequest, ReplyResponse};
use tracing::Instrument;

use crate::{LatePolicy, Router, spans};

impl Router {
    pub(crate) async fn on_reply(&self, incoming: Incoming<ReplyRequest>, trust: Trust) {
        let operation = if trust == Trust::Owner { "reply" } else { "outcome" };
        let span = spans::request(operation, incoming.traceparent.as_deref());
        span.record("askbus.question", incoming.request.key.question.as_str());
        async {
            let response = self.take_reply(&incoming.request, trust).await.unwrap_or_else(|error| {
                tracing::warn!(%error, "a reply was not written");
                match error {
                    BusError::TooLarge { .. } => {
                        let limit = "short enough for the question's entry (please shorten your answer)";
                        ReplyResponse::Invalid { invalid: Invalid::new("answers", limit, error) }
                    }
                    error => ReplyResponse::Retry { why: error.to_string() },
                }
            });
            tracing::Span::current().record("askbus.result", result_name(&response));
            incoming.answer(&response).await;
        }
        .instrument(span)
        .await;
    }

    /// Takes a reply, as often as it is repeated.
    pub(crate) async fn take_reply(
        &self,
        request: &ReplyRequest,
        trust: Trust,
    ) -> Result<ReplyResponse, BusError> {
        let key = &request.key;
        if trust == Trust::Owner && !self.owns(&key.session_key(), &request.reply.by.user).await? {
            return Ok(ReplyResponse::WrongUser);
        }
        if trust == Trust::Owner && self.pending.is_overdue(key) {
            // A router that was away for long has the reply before it has dealt with the deadline.
            self.expire(key).await;
        }
        let mut known = self.pending.get(key);
        for _ in 0..crate::ATTEMPTS {
            // What the watch gave is good enough for the first try: a failed one decides nothing.
            let stored = match known.take() {
                Some(stored) => stored,
                None => match self.bus.question(key).await? {
                    Some(stored) => stored,
                    None => return Ok(ReplyResponse::UnknownQuestion),
                },
            };
            let written = match stored.value.take(&request.reply, trust, Timestamp::now()) {
                Taken::Answer(response) => {
                    return self.late(&stored.value, &request.reply, trust, response).await;
                }
                Taken::ListLate(next, response) => match self.bus.write_late(&next, stored.revision).await {
                    Ok(_) => return self.late(&stored.value, &request.reply, trust, response).await,
                    Err(error) => Err(error),
                },
                Taken::Decide(next) => {
                    let next = self.pending.with_steps(*next);
                    self.bus.write_decided(&next, stored.revision).await.map(|revision| {
                        self.decided(&next, revision);
                        log_decision(&next, &request.reply);
                        ReplyResponse::Saved
                    })
                }
            };
            match written {
                Err(BusError::Conflict { .. }) => {}
                other => return other,
            }
        }
        Err(BusError::Conflict { key: key.to_string() })
    }

    /// Adds to what the sender of a late reply hears what else becomes of it, as often as it is
    /// repeated.
    async fn late(
        &self,
        entry: &Entry,
        reply: &Reply,
        trust: Trust,
        mut response: ReplyResponse,
    ) -> Result<ReplyResponse, BusError> {
        let ReplyResponse::Closed { sent_as_message, .. } = &mut response else { return Ok(response) };
        let policy = self.config.late_replies;
        if let (ReplyContent::Answers { answers }, Trust::Owner, LatePolicy::SendAsMessage) =
            (&reply.content, trust, policy)
            && let Some(text) = as_message(&entry.question, answers)
        {
            *sent_as_message = self.say_late(&entry.key.session_key(), reply, text).await?;
        }
        Ok(response)
    }

    /// A session belongs to the user it is bound to; where no front end is bound, to the gateway's
    /// operator.
    pub(crate) async fn owns(&self, session: &SessionKey, user: &String) -> Result<bool, BusError> {
        Ok(match self.bus.session(session).await? {
            Some(session) => session.value.owner == *user,
            None => self.config.operators.get(&session.gateway) == Some(user),
        })
    }
}

fn log_decision(entry: &Entry, reply: &Reply) {
    let status = entry.decision().map_or("pending", |d| d.outcome.status());
    tracing::info!(question = %entry.key.question, status, surface = reply.surface.name(), "decided");
}

fn result_name(response: &ReplyResponse) -> &'static str {
    match response {
        ReplyResponse::Saved => "saved",
        ReplyResponse::Closed { .. } => "closed",
        ReplyResponse::WrongUser => "wrong_user",
        ReplyResponse::UnknownQuestion => "unknown_question",
        ReplyResponse::Invalid { .. } => "invalid",
        ReplyResponse::Retry { .. } => "retry",
    }
}
