//! What front ends report about a question, repeated to the routers until it is on record.

use std::sync::Arc;
use std::time::Duration;

use ask_bus::{BusError, trace};
use ask_core::SCHEMA;
use ask_core::entry::{Entry, StepKind};
use ask_core::surface::Surface;
use ask_core::time::Timestamp;
use ask_core::wire::{ShownEvent, ShownRequest, ShownResponse};
use tracing::Instrument;

use crate::{Emitter, delays};

/// A router writes steps by themselves after a second.
const LOOK_AFTER: Duration = Duration::from_millis(1500);

/// How long after its deadline a question's report is still repeated: a router that was away
/// decides it late, and the record is then to say that it was shown.
const REPEAT_AFTER_DEADLINE: Duration = Duration::from_secs(60);

impl Emitter {
    /// Reports what happened to a question and waits until it is on record.
    pub(crate) async fn report_on_record(
        &self,
        entry: &Entry,
        surface: Surface,
        chat: Option<&str>,
        event: ShownEvent,
    ) -> Result<ShownResponse, BusError> {
        self.report(entry, surface, chat, event, true).await
    }

    /// Reports what happened to a question, again and again, until the entry has it or is closed.
    pub(crate) async fn report_until_on_record(
        self: Arc<Self>,
        entry: Entry,
        surface: Surface,
        chat: Option<String>,
        event: ShownEvent,
    ) {
        let give_up = entry.deadline.plus(REPEAT_AFTER_DEADLINE);
        let expected = event.as_step(surface, chat.as_deref());
        let mut delay = delays();
        while Timestamp::now() < give_up {
            match self.report(&entry, surface, chat.as_deref(), event.clone(), false).await {
                Ok(ShownResponse::Noted { on_record: true } | ShownResponse::UnknownQuestion) => return,
                Ok(ShownResponse::Noted { on_record: false }) => {
                    tokio::select! {
                        () = tokio::time::sleep(LOOK_AFTER) => {}
                        // The routers are told; what is left is only to repeat it.
                        () = self.shutdown.cancelled() => return,
                    }
                    match self.bus.question(&entry.key).await {
                        Ok(Some(now)) if is_settled(&now.value, &expected) => return,
                        Ok(None) => return,
                        Ok(Some(_)) | Err(_) => {}
                    }
                }
                Ok(ShownResponse::Retry { .. }) | Err(_) => tokio::select! {
                    () = delay.wait() => {}
                    () = self.shutdown.cancelled() => return,
                },
            }
        }
        tracing::warn!(question = %entry.key.question, "what was shown of it never got on record");
    }

    async fn report(
        &self,
        entry: &Entry,
        surface: Surface,
        chat: Option<&str>,
        event: ShownEvent,
        on_record: bool,
    ) -> Result<ShownResponse, BusError> {
        let (key, chat) = (entry.key.clone(), chat.map(str::to_owned));
        let request = ShownRequest { schema: SCHEMA, key, surface, chat, event, on_record };
        let span = tracing::info_span!(
            "send shown",
            otel.kind = "producer",
            messaging.system = "nats",
            messaging.operation.name = "request",
            messaging.operation.type = "send",
            askbus.question = %entry.key.question,
            askbus.surface = surface.name(),
        );
        trace::continue_from(&span, entry.traceparent.as_deref());
        self.bus.shown(&request).instrument(span).await
    }
}

fn is_settled(entry: &Entry, expected: &StepKind) -> bool {
    entry.returned().is_some() || entry.steps.iter().any(|step| step.what == *expected)
}
