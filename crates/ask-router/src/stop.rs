//! Stop: cancels a session's questions, holds back what was not sent yet, aborts the run. It has
//! its own road and never waits behind messages (S9, S10).

use ask_bus::{BusError, Incoming};
use ask_core::SCHEMA;
use ask_core::key::SessionKey;
use ask_core::outcome::CancelReason;
use ask_core::time::Timestamp;
use ask_core::wire::{AbortRequest, AbortResponse, StopRequest, StopResponse};
use tracing::Instrument;

use crate::{Router, spans};

impl Router {
    pub(crate) async fn on_stop(&self, incoming: Incoming<StopRequest>) {
        let span = spans::request("stop", incoming.traceparent.as_deref());
        async {
            let request = &incoming.request;
            let response = match self.owns(&request.session, &request.user).await {
                Ok(false) => Ok(StopResponse::WrongUser),
                Ok(true) => self.stop_session(&request.session, None).await,
                Err(error) => Err(error),
            };
            let response = response.unwrap_or_else(|error| StopResponse::Retry { why: error.to_string() });
            incoming.answer(&response).await;
        }
        .instrument(span)
        .await;
    }

    /// Stops what was said up to message `through`, or so far, as often as it is repeated.
    pub(crate) async fn stop_session(
        &self,
        session: &SessionKey,
        through: Option<u64>,
    ) -> Result<StopResponse, BusError> {
        let stored = self.bus.session(session).await?;
        let (said, done) = stored.map_or((0, 0), |s| (s.value.count, s.value.stop_done));
        // What runs in a session in which all that was said is stopped came by itself.
        let anew = through.is_none() && done >= said;
        let through = through.unwrap_or(said);
        // Where another router finishes the same Stop, what comes later may have begun.
        let is_over =
            async || Ok::<_, BusError>(!anew && self.is_stopped_to_the_end(session, through).await?);
        self.change_session(session, |session| session.stopped(through)).await?;
        let mut cancelled = 0;
        if is_over().await? {
            return Ok(StopResponse::Stopped { cancelled, aborted: true });
        }
        for stored in self.bus.questions_of(session).await? {
            let stopped = self
                .decide(&stored.value.key, |entry| entry.cancel(CancelReason::Stop, "stop", Timestamp::now()))
                .await?;
            cancelled += u64::from(stopped);
        }
        if is_over().await? {
            return Ok(StopResponse::Stopped { cancelled, aborted: true });
        }
        let abort = AbortRequest { schema: SCHEMA, session: session.clone() };
        let why = match self.bus.abort(&abort).await {
            Ok(AbortResponse { aborted, error: None }) => {
                self.change_session(session, |session| session.stop_was_done(through)).await?;
                return Ok(StopResponse::Stopped { cancelled, aborted });
            }
            Ok(AbortResponse { error: Some(error), .. }) => error,
            Err(error) => error.to_string(),
        };
        // The run may go on, so this is not "stopped" yet; everything so far can be repeated.
        Ok(StopResponse::Retry { why: format!("the run was not aborted: {why}") })
    }

    async fn is_stopped_to_the_end(&self, session: &SessionKey, through: u64) -> Result<bool, BusError> {
        let stored = self.bus.session(session).await?;
        Ok(stored.is_some_and(|session| session.value.stop_was_done(through).is_none()))
    }
}
