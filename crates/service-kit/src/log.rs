use std::fmt::{self, Write as _};
use std::io::Write as _;
use std::time::SystemTime;

use opentelemetry::trace::TraceContextExt as _;
use serde::Serialize;
use serde_json::{Map, Value};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;
use tracing_subscriber::registry::{LookupSpan, Scope};

use crate::config::LogFormat;

/// Writes each event as one line to standard error, with the fields of the spans around it and
/// the trace id.
pub(crate) struct LogLayer {
    format: LogFormat,
}

impl LogLayer {
    pub(crate) fn new(format: LogFormat) -> Self {
        Self { format }
    }
}

/// Fields by name; the last value of a name wins, so inner spans and the event overrule.
#[derive(Default, Clone)]
struct Fields(Map<String, Value>);

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for LogLayer {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let mut fields = Fields::default();
        attributes.record(&mut fields);
        if let Some(span) = context.span(id) {
            span.extensions_mut().insert(fields);
        }
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: Context<'_, S>) {
        if let Some(span) = context.span(id)
            && let Some(fields) = span.extensions_mut().get_mut::<Fields>()
        {
            values.record(fields);
        }
    }

    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        let mut fields = Fields::default();
        for span in context.event_scope(event).into_iter().flat_map(Scope::from_root) {
            if let Some(of_span) = span.extensions().get::<Fields>() {
                fields.0.extend(of_span.0.clone());
            }
        }
        event.record(&mut fields);
        let message = match fields.0.remove("message") {
            Some(Value::String(message)) if !message.is_empty() => message,
            // Some libraries put what they say into the name alone.
            _ => event.metadata().name().to_owned(),
        };
        let trace = opentelemetry::Context::map_current(|current| {
            let span = current.span();
            let context = span.span_context();
            context.is_valid().then(|| (context.trace_id(), context.span_id()))
        });
        if let Some((trace_id, span_id)) = trace {
            fields.0.insert("trace_id".to_owned(), trace_id.to_string().into());
            fields.0.insert("span_id".to_owned(), span_id.to_string().into());
        }
        let metadata = event.metadata();
        let line = Line {
            timestamp: OffsetDateTime::from(SystemTime::now()).format(&Rfc3339).unwrap_or_default(),
            level: metadata.level().as_str(),
            target: metadata.target(),
            message,
            fields: fields.0,
        };
        let text = match self.format {
            LogFormat::Text => line.text(),
            LogFormat::Json => line.json(),
        };
        // Nowhere to report to if standard error is closed.
        let _ = std::io::stderr().write_all(text.as_bytes());
    }
}

#[derive(Serialize)]
struct Line<'a> {
    timestamp: String,
    level: &'static str,
    target: &'a str,
    message: String,
    #[serde(flatten)]
    fields: Map<String, Value>,
}

impl Line<'_> {
    fn json(self) -> String {
        let mut text = serde_json::to_string(&self).unwrap_or_default();
        text.push('\n');
        text
    }

    fn text(self) -> String {
        let mut text = format!("{} {:>5} {}: ", self.timestamp, self.level, self.target);
        escape(&mut text, &self.message);
        for (name, value) in &self.fields {
            let _ = write!(text, " {name}=");
            match value {
                Value::String(word)
                    if !word.is_empty() && word.chars().all(|c| c.is_ascii_graphic() && c != '"') =>
                {
                    text.push_str(word);
                }
                other => {
                    let _ = write!(text, "{other}");
                }
            }
        }
        text.push('\n');
        text
    }
}

/// Control characters would let a value forge lines.
fn escape(text: &mut String, message: &str) {
    for c in message.chars() {
        if c.is_control() {
            text.extend(c.escape_default());
        } else {
            text.push(c);
        }
    }
}

impl Fields {
    fn set(&mut self, field: &Field, value: impl Into<Value>) {
        let name = match field.name() {
            // These steer the exporter and say nothing to a reader.
            name if name.starts_with("otel.") => return,
            // Every line has its own.
            name @ ("timestamp" | "level" | "target") => format!("field.{name}"),
            name => name.to_owned(),
        };
        self.0.insert(name, value.into());
    }
}

impl Visit for Fields {
    fn record_bool(&mut self, field: &Field, value: bool) {
        self.set(field, value);
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.set(field, value);
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.set(field, value);
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.set(field, value);
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.set(field, value);
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.set(field, format!("{value:?}"));
    }
}
