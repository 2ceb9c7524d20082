//! What front ends report about a question.

use ask_bus::Incoming;
use ask_core::entry::{Entry, Step};
use ask_core::time::Timestamp;
use ask_core::wire::{ShownEvent, ShownRequest, ShownResponse};
use tracing::Instrument;

use crate::deadlines::Alarm;
use crate::surfaces::STEPS_WITHIN;
use crate::{Router, spans};

impl Router {
    pub(crate) async fn on_shown(&self, incoming: Incoming<ShownRequest>) {
        let span = spans::request("shown", incoming.traceparent.as_deref());
        async {
            let response = self.note_shown(&incoming.request).await;
            incoming.answer(&response).await;
        }
        .instrument(span)
        .await;
    }

    async fn note_shown(&self, request: &ShownRequest) -> ShownResponse {
        let stored = match self.bus.question(&request.key).await {
            Ok(Some(stored)) => stored,
            Ok(None) => return ShownResponse::UnknownQuestion,
            Err(error) => return ShownResponse::Retry { why: error.to_string() },
        };
        let surface = request.surface;
        let what = request.event.as_step(surface, request.chat.as_deref());
        let is_listed = |entry: &Entry| entry.steps.iter().any(|step| step.what == what);
        let with_it = stored.value.note(&[Step { at: Timestamp::now(), what: what.clone() }]);
        // A full list may have no place for it, however often it is repeated.
        if is_listed(&stored.value) || with_it.is_some_and(|next| !is_listed(&next)) {
            return ShownResponse::Noted { on_record: true };
        }
        let first = self.pending.hold(&request.key, what);
        if request.on_record {
            return match self.put_steps_on_record(&request.key).await {
                Ok(()) => ShownResponse::Noted { on_record: true },
                Err(error) => ShownResponse::Retry { why: error.to_string() },
            };
        }
        if first {
            self.set_alarm(STEPS_WITHIN, Alarm::Steps(request.key.clone()));
            if matches!(request.event, ShownEvent::Refused { .. }) {
                self.show(&request.key).await;
            }
        }
        ShownResponse::Noted { on_record: false }
    }
}
