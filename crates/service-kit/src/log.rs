use std::fmt::{self, Write as _};
use std::io::Write as _;
use std::time::SystemTime;

use opentelemetry::trace::TraceContextExt as _;
use serde_json::{Map, Value};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;
use tracing_subscriber::registry::LookupSpan;

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
        for span in context.event_scope(event).into_iter().flatten().collect::<Vec<_>>().iter().rev() {
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
        let now = OffsetDateTime::from(SystemTime::now()).format(&Rfc3339).unwrap_or_default();
        let line = Line {
            now,
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

struct Line<'a> {
    now: String,
    level: &'static str,
    target: &'a str,
    message: String,
    fields: Map<String, Value>,
}

impl Line<'_> {
    fn json(self) -> String {
        let mut object = Map::new();
        object.insert("timestamp".to_owned(), self.now.into());
        object.insert("level".to_owned(), self.level.into());
        object.insert("target".to_owned(), self.target.into());
        object.insert("message".to_owned(), self.message.into());
        for (name, value) in self.fields {
            object.entry(name).or_insert(value);
        }
        let mut text = Value::Object(object).to_string();
        text.push('\n');
        text
    }

    fn text(self) -> String {
        let mut text = format!("{} {:>5} {}: ", self.now, self.level, self.target);
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
        // These steer the exporter and say nothing to a reader.
        if !field.name().starts_with("otel.") {
            self.0.insert(field.name().to_owned(), value.into());
        }
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
