//! An OTLP/gRPC collector that keeps the spans it gets in memory.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue};
use opentelemetry_proto::tonic::trace::v1::{Span as WireSpan, status::StatusCode};
use serde::Serialize;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;

/// One span as it was received.
#[derive(Debug, Clone, Serialize)]
pub struct Span {
    /// `service.name` of its resource.
    pub service: String,
    /// Its name.
    pub name: String,
    /// Lower-case hex.
    pub trace_id: String,
    /// Lower-case hex.
    pub span_id: String,
    /// Lower-case hex; empty for a root.
    pub parent_span_id: String,
    /// `internal`, `server`, `client`, `producer`, `consumer` or `unspecified`.
    pub kind: String,
    /// Nanoseconds since 1970.
    pub start_ns: u64,
    /// Nanoseconds since 1970.
    pub end_ns: u64,
    /// Values are rendered as text; lists as JSON-like text.
    pub attributes: BTreeMap<String, String>,
    /// Spans of other operations that belong to this one.
    pub links: Vec<Link>,
    /// `unset`, `ok` or `error`.
    pub status: String,
    /// What the status says; often empty.
    pub status_message: String,
}

/// The span that another one points to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Link {
    /// Lower-case hex.
    pub trace_id: String,
    /// Lower-case hex.
    pub span_id: String,
}

/// A running collector; stops when dropped.
#[derive(Debug)]
pub struct OtlpSink {
    address: SocketAddr,
    seen: Arc<watch::Sender<Seen>>,
    _stop: DropGuard,
}

#[derive(Debug, Default)]
struct Seen {
    spans: Vec<Span>,
    dumps: Vec<String>,
}

impl OtlpSink {
    /// Starts a collector on a free port of the loopback interface.
    ///
    /// # Errors
    /// No port is free.
    pub async fn start() -> Result<Self> {
        Self::listen("127.0.0.1:0".parse()?).await
    }

    /// Starts a collector on an address of your choice.
    ///
    /// # Errors
    /// The address is in use.
    pub async fn listen(address: SocketAddr) -> Result<Self> {
        let listener =
            TcpListener::bind(address).await.with_context(|| format!("listen on {address} for spans"))?;
        let address = listener.local_addr()?;
        let seen = Arc::new(watch::Sender::new(Seen::default()));
        let stop = CancellationToken::new();
        let server = Server::builder()
            .add_service(TraceServiceServer::new(Collector(seen.clone())))
            .serve_with_incoming_shutdown(TcpIncoming::from(listener), stop.clone().cancelled_owned());
        tokio::spawn(server);
        Ok(Self { address, seen, _stop: stop.drop_guard() })
    }

    /// What an exporter is given: `http://127.0.0.1:<port>`.
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// All spans received until now, in order of arrival.
    pub fn spans(&self) -> Vec<Span> {
        self.seen.borrow().spans.clone()
    }

    /// Whether a text occurs anywhere in what was received: names, attributes, events, resources.
    pub fn raw_contains(&self, text: &str) -> bool {
        // Dumps escape strings and list bytes as numbers.
        let escaped = format!("{text:?}");
        let bytes = format!("{:?}", text.as_bytes());
        let forms = [text, escaped.trim_matches('"'), bytes.trim_matches(['[', ']'])];
        let seen = self.seen.borrow();
        seen.dumps.iter().any(|dump| forms.iter().any(|form| dump.contains(form)))
    }

    /// Waits until the spans received fulfil a condition, and returns them.
    ///
    /// # Errors
    /// They do not within `timeout`; the error names what was received.
    pub async fn wait_for(
        &self,
        mut condition: impl FnMut(&[Span]) -> bool,
        timeout: Duration,
    ) -> Result<Vec<Span>> {
        let mut changes = self.seen.subscribe();
        let fulfilled = changes.wait_for(|seen| condition(&seen.spans));
        if tokio::time::timeout(timeout, fulfilled).await.is_err() {
            let names: Vec<String> =
                self.spans().iter().map(|span| format!("{}: {}", span.service, span.name)).collect();
            bail!("the spans waited for did not come within {timeout:?}; received {names:?}");
        }
        Ok(self.spans())
    }
}

#[derive(Debug)]
struct Collector(Arc<watch::Sender<Seen>>);

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: tonic::Request<ExportTraceServiceRequest>,
    ) -> Result<tonic::Response<ExportTraceServiceResponse>, tonic::Status> {
        let request = request.into_inner();
        self.0.send_modify(|seen| {
            seen.dumps.push(format!("{request:?}"));
            for resource in request.resource_spans {
                let attributes = resource.resource.unwrap_or_default().attributes;
                let service = texts(attributes).remove("service.name").unwrap_or_default();
                let spans = resource.scope_spans.into_iter().flat_map(|scope| scope.spans);
                seen.spans.extend(spans.map(|span| read(&service, span)));
            }
        });
        Ok(tonic::Response::new(ExportTraceServiceResponse::default()))
    }
}

fn read(service: &str, span: WireSpan) -> Span {
    let kind = span.kind().as_str_name().to_lowercase();
    let status = span.status.unwrap_or_default();
    Span {
        service: service.to_owned(),
        name: span.name,
        trace_id: hex::encode(span.trace_id),
        span_id: hex::encode(span.span_id),
        parent_span_id: hex::encode(span.parent_span_id),
        kind: kind.trim_start_matches("span_kind_").to_owned(),
        start_ns: span.start_time_unix_nano,
        end_ns: span.end_time_unix_nano,
        attributes: texts(span.attributes),
        links: span
            .links
            .into_iter()
            .map(|link| Link { trace_id: hex::encode(link.trace_id), span_id: hex::encode(link.span_id) })
            .collect(),
        status: match status.code() {
            StatusCode::Unset => "unset",
            StatusCode::Ok => "ok",
            StatusCode::Error => "error",
        }
        .to_owned(),
        status_message: status.message,
    }
}

fn texts(attributes: Vec<KeyValue>) -> BTreeMap<String, String> {
    attributes.into_iter().map(|pair| (pair.key, text(pair.value.unwrap_or_default()))).collect()
}

fn text(value: AnyValue) -> String {
    match value.value {
        None => String::new(),
        Some(Value::StringValue(text)) => text,
        Some(Value::BoolValue(flag)) => flag.to_string(),
        Some(Value::IntValue(number)) => number.to_string(),
        Some(Value::DoubleValue(number)) => number.to_string(),
        Some(Value::ArrayValue(list)) => {
            let items: Vec<String> = list.values.into_iter().map(text).collect();
            format!("{items:?}")
        }
        Some(other) => format!("{other:?}"),
    }
}
