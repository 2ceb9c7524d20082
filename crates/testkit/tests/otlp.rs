//! The span collector, fed through the OTLP client that opentelemetry's own crate generates.

use std::time::Duration;

use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_client::TraceServiceClient;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue};
use opentelemetry_proto::tonic::resource::v1::Resource;
use opentelemetry_proto::tonic::trace::v1::span::{Event, Link, SpanKind};
use opentelemetry_proto::tonic::trace::v1::{ResourceSpans, ScopeSpans, Span};
use testkit::otlp::OtlpSink;

fn pair(key: &str, value: Value) -> KeyValue {
    KeyValue { key: key.into(), value: Some(AnyValue { value: Some(value) }), ..KeyValue::default() }
}

async fn export(sink: &OtlpSink, span: Span) {
    let mut client = TraceServiceClient::connect(sink.endpoint()).await.unwrap();
    let request = ExportTraceServiceRequest {
        resource_spans: vec![ResourceSpans {
            resource: Some(Resource {
                attributes: vec![pair("service.name", Value::StringValue("router".into()))],
                ..Resource::default()
            }),
            scope_spans: vec![ScopeSpans { spans: vec![span], ..ScopeSpans::default() }],
            ..ResourceSpans::default()
        }],
    };
    client.export(request).await.unwrap();
}

#[tokio::test]
async fn keeps_what_a_span_says() {
    let sink = OtlpSink::start().await.unwrap();
    export(
        &sink,
        Span {
            name: "process reply".into(),
            trace_id: vec![0xab; 16],
            span_id: vec![1; 8],
            kind: SpanKind::Consumer as i32,
            start_time_unix_nano: 5,
            end_time_unix_nano: 9,
            attributes: vec![pair("messaging.retries", Value::IntValue(2))],
            links: vec![Link { trace_id: vec![2; 16], span_id: vec![3; 8], ..Link::default() }],
            ..Span::default()
        },
    )
    .await;

    let spans = sink.spans();
    let span = &spans[0];
    assert_eq!((&*span.service, &*span.name), ("router", "process reply"));
    assert_eq!((&*span.kind, &*span.status), ("consumer", "unset"));
    assert_eq!((span.start_ns, span.end_ns), (5, 9));
    assert_eq!(span.trace_id, "ab".repeat(16));
    assert_eq!(span.parent_span_id, "");
    assert_eq!(span.attributes["messaging.retries"], "2");
    assert_eq!(span.links[0].span_id, "03".repeat(8));
}

#[tokio::test]
async fn finds_a_canary_wherever_it_hides() {
    let sink = OtlpSink::start().await.unwrap();
    let event = Event {
        name: "failed".into(),
        attributes: vec![
            pair("text", Value::StringValue("say \"hunter2\"\n now".into())),
            pair("bytes", Value::BytesValue(b"..hunter3..".to_vec())),
        ],
        ..Event::default()
    };
    let span = Span { events: vec![event], ..Span::default() };
    export(&sink, span).await;
    for canary in ["hunter2", "\"hunter2\"\n", "hunter3", "router"] {
        assert!(sink.raw_contains(canary), "{canary}");
    }
    assert!(!sink.raw_contains("hunter4"));
}

#[tokio::test]
async fn a_wait_ends_with_the_span_or_says_what_came() {
    let sink = OtlpSink::start().await.unwrap();
    let named = |name: &str| Span { name: name.into(), ..Span::default() };
    let (_, spans) = tokio::join!(
        export(&sink, named("b")),
        sink.wait_for(|spans| spans.len() == 1, Duration::from_secs(10)),
    );
    assert_eq!(spans.unwrap()[0].name, "b");
    let error = sink.wait_for(|spans| spans.len() == 2, Duration::from_millis(1)).await.unwrap_err();
    assert!(error.to_string().contains("router: b"), "{error}");
}
