//! What front ends report about a question.

use ask_bus::Incoming;
use ask_core::entry::StepKind;
use ask_core::question::clamp;
use ask_core::wire::{ShownEvent, ShownRequest, ShownResponse};
use tracing::Instrument;

use crate::deadlines::Alarm;
use crate::surfaces::STEPS_WITHIN;
use crate::{Router, spans};

/// Longest reason of a front end that is kept, in characters.
const MAX_REASON: usize = 400;

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
        let what = match &request.event {
            ShownEvent::Delivered => StepKind::Delivered { surface, chat: request.chat.clone() },
            ShownEvent::Refused { reason } => {
                StepKind::Refused { surface, reason: clamp(reason, MAX_REASON) }
            }
        };
        if stored.value.steps.iter().any(|s| s.what == what) {
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
