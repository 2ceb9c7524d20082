//! Trace context in message headers and in entries (W3C).

use async_nats::HeaderMap;
use opentelemetry::Context;
use opentelemetry::propagation::{Extractor, Injector, TextMapPropagator};
use opentelemetry::trace::TraceContextExt;
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt;

const TRACEPARENT: &str = "traceparent";

struct Headers<'a>(&'a mut HeaderMap);

impl Injector for Headers<'_> {
    fn set(&mut self, key: &str, value: String) {
        if !value.is_empty() {
            self.0.insert(key, value.as_str());
        }
    }
}

struct Single<'a>(&'a str);

impl Extractor for Single<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        (key == TRACEPARENT).then_some(self.0)
    }

    fn keys(&self) -> Vec<&str> {
        vec![TRACEPARENT]
    }
}

#[derive(Default)]
struct Captured(Option<String>);

impl Injector for Captured {
    fn set(&mut self, key: &str, value: String) {
        if key == TRACEPARENT {
            self.0 = Some(value);
        }
    }
}

fn propagator() -> opentelemetry_sdk::propagation::TraceContextPropagator {
    opentelemetry_sdk::propagation::TraceContextPropagator::new()
}

/// The current span as `traceparent`; `None` outside a sampled or recorded span.
pub fn current_traceparent() -> Option<String> {
    traceparent_of(&Span::current())
}

/// A span as `traceparent`; `None` when it is not recorded.
pub fn traceparent_of(span: &Span) -> Option<String> {
    let context = span.context();
    let mut captured = Captured::default();
    propagator().inject_context(&context, &mut captured);
    captured.0
}

/// Makes `span` a child of `traceparent`. Call it before the span is entered; where nothing can
/// be read it stays a root.
pub fn continue_from(span: &Span, traceparent: Option<&str>) {
    let Some(traceparent) = traceparent else {
        return;
    };
    let context: Context = propagator().extract_with_context(&Context::new(), &Single(traceparent));
    if context.span().span_context().is_valid() {
        // Only fails where no exporter is configured; then there is nothing to continue.
        let _ = span.set_parent(context);
    }
}

/// The context that a `traceparent` names; `None` where it can't be read.
pub fn context(traceparent: &str) -> Option<Context> {
    let context = propagator().extract_with_context(&Context::new(), &Single(traceparent));
    context.span().span_context().is_valid().then_some(context)
}

/// The trace id of a `traceparent`, 32 hex digits.
pub fn trace_id(traceparent: &str) -> Option<&str> {
    traceparent.split('-').nth(1).filter(|id| id.len() == 32)
}

pub(crate) fn inject(headers: &mut HeaderMap) {
    propagator().inject_context(&Span::current().context(), &mut Headers(headers));
}

pub(crate) fn traceparent_in(headers: Option<&HeaderMap>) -> Option<String> {
    headers?.get(TRACEPARENT).map(|v| v.to_string())
}
