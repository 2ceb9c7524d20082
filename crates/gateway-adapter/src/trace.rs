//! The spans at both ends of a question's trace.

use std::time::SystemTime;

use ask_bus::trace::continue_from;
use ask_core::entry::Entry;
use ask_core::key::QuestionKey;
use opentelemetry::trace::{Span as _, Tracer as _};
use opentelemetry::{Context, KeyValue, global};
use tracing::Span;

use crate::SERVICE;

/// The span of the write with which a question is opened. Where it is known when the tool call
/// began, that is when the trace begins.
pub(crate) fn send_ask(key: &QuestionKey, tool: &str, call: &str, began: Option<SystemTime>) -> Span {
    let span = tracing::info_span!(
        "send ask",
        otel.kind = "producer",
        messaging.system = "nats",
        messaging.operation.name = "send",
        messaging.operation.type = "send",
        messaging.destination.template = "ask",
        askbus.question = %key.question,
        askbus.session = %key.session,
        askbus.run = %key.run,
        askbus.call = call,
    );
    if let Some(began) = began {
        continue_from(&span, tool_call(key, tool, call, began).as_deref());
    }
    span
}

/// Draws the time from the start of the tool call to its question; returns the `traceparent`.
fn tool_call(key: &QuestionKey, tool: &str, call: &str, began: SystemTime) -> Option<String> {
    let tracer = global::tracer(SERVICE.name);
    let attributes = [
        ("askbus.question", key.question.as_str()),
        ("askbus.session", &key.session),
        ("askbus.run", &key.run),
        ("askbus.call", call),
        ("askbus.tool", tool),
    ];
    let mut span = tracer
        .span_builder("tool call")
        .with_start_time(began)
        .with_attributes(attributes.map(|(name, value)| KeyValue::new(name, value.to_owned())))
        .start_with_context(&tracer, &Context::new());
    span.end();
    let of = span.span_context();
    let flags = of.trace_flags().to_u8();
    of.is_valid().then(|| format!("00-{}-{}-{flags:02x}", of.trace_id(), of.span_id()))
}

/// The span of the write with which a question is closed.
pub(crate) fn settle_ask(entry: &Entry) -> Span {
    let span = tracing::info_span!(
        "settle ask",
        otel.kind = "client",
        messaging.system = "nats",
        messaging.operation.name = "settle",
        messaging.operation.type = "settle",
        messaging.destination.template = "ask",
        askbus.question = %entry.key.question,
        askbus.session = %entry.key.session,
        askbus.run = %entry.key.run,
    );
    continue_from(&span, entry.traceparent.as_deref());
    span
}
