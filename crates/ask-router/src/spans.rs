//! The router's spans. Each one about a question continues the trace of its entry.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ask_bus::trace;
use ask_core::entry::Entry;
use ask_core::time::Timestamp;
use opentelemetry::KeyValue;
use opentelemetry::trace::{Span as _, Tracer};
use tracing::{Span, field::Empty, info_span};

/// A span around a request of another service.
pub(crate) fn request(operation: &'static str, traceparent: Option<&str>) -> Span {
    let span = info_span!(
        "process",
        otel.name = format!("process {operation}"),
        otel.kind = "consumer",
        "messaging.system" = "nats",
        "messaging.operation.name" = "process",
        "messaging.operation.type" = "process",
        "messaging.destination.template" = operation,
        "askbus.question" = Empty,
        "askbus.rule" = Empty,
        "askbus.result" = Empty,
    );
    trace::continue_from(&span, traceparent);
    span
}

/// A span around something that the router does with a question by itself.
pub(crate) fn question(what: &'static str, rule: &str, entry: &Entry) -> Span {
    let span = info_span!(
        "question",
        otel.name = what,
        "askbus.question" = entry.key.question,
        "askbus.session" = entry.key.session,
        "askbus.run" = entry.key.run,
        "askbus.rule" = rule,
        "askbus.surface" = Empty,
    );
    trace::continue_from(&span, entry.traceparent.as_deref());
    span
}

/// Draws the time in which the question was with the person, once it is over. A span that stays
/// open over the wait would be lost in a crash.
pub(crate) fn human_wait(entry: &Entry) {
    let (Some(wait), Some(decision)) = (entry.human_wait(), entry.decision()) else { return };
    let Some(context) = entry.traceparent.as_deref().and_then(trace::context) else { return };
    let tracer = opentelemetry::global::tracer("ask-router");
    let started = system_time(Timestamp(decision.at.0.saturating_sub(wait.as_millis() as u64)));
    let mut span = tracer
        .span_builder("human wait")
        .with_start_time(started)
        .with_attributes([
            KeyValue::new("askbus.question", entry.key.question.clone()),
            KeyValue::new("askbus.outcome", decision.outcome.status()),
        ])
        .start_with_context(&tracer, &context);
    span.end_with_timestamp(system_time(decision.at));
}

fn system_time(at: Timestamp) -> SystemTime {
    UNIX_EPOCH + Duration::from_millis(at.0)
}
