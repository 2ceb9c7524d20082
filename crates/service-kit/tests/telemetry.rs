//! Spans on their way to a collector, and what happens when there is none.

use std::time::{Duration, Instant, SystemTime};

use opentelemetry::global;
use opentelemetry::trace::{Span as _, TraceContextExt as _, Tracer as _};
use service_kit::config::{LogFormat, TelemetryConfig};
use service_kit::{Service, telemetry};
use testkit::otlp::{OtlpSink, Span};
use tracing::instrument::WithSubscriber as _;
use tracing::{Instrument as _, info_span};
use tracing_opentelemetry::OpenTelemetrySpanExt as _;

const ROUTER: Service =
    Service { name: "ask-router", section: "router", version: "1.2.3", defaults: "", readiness: &[] };
const EMITTER: Service = Service { name: "owui-emitter", ..ROUTER };

const SOON: Duration = Duration::from_secs(10);

fn config(otlp_endpoint: Option<String>) -> TelemetryConfig {
    TelemetryConfig {
        otlp_endpoint,
        log_format: LogFormat::Text,
        log_filter: "off".to_owned(),
        service_namespace: "askbus-test".to_owned(),
        sample_ratio: 1.0,
    }
}

#[tokio::test]
async fn a_span_arrives_with_its_service_though_logging_is_off() {
    let sink = OtlpSink::start().await.unwrap();
    let (telemetry, dispatch) = telemetry::build(&[&ROUTER], &config(Some(sink.endpoint()))).unwrap();
    async {
        info_span!(target: "ask_router::replies", "process reply", otel.kind = "consumer").in_scope(|| ())
    }
    .with_subscriber(dispatch)
    .await;
    telemetry.shutdown().await;

    let spans = sink.wait_for(|spans| !spans.is_empty(), SOON).await.unwrap();
    assert_eq!((spans[0].service.as_str(), spans[0].name.as_str()), ("ask-router", "process reply"));
    assert_eq!(spans[0].kind, "consumer");
    assert_eq!(spans[0].attributes.keys().collect::<Vec<_>>(), Vec::<&String>::new());
    for resource in ["askbus-test", "1.2.3", "service.instance.id"] {
        assert!(sink.raw_contains(resource), "{resource}");
    }
}

#[tokio::test]
async fn services_in_one_process_keep_their_names_within_one_trace() {
    let sink = OtlpSink::start().await.unwrap();
    let (telemetry, dispatch) =
        telemetry::build(&[&ROUTER, &EMITTER], &config(Some(sink.endpoint()))).unwrap();
    async {
        let send = info_span!(target: "owui_emitter", "send reply");
        async {
            info_span!(target: "ask_bus", "put ask", askbus.service = "owui-emitter").in_scope(|| ());
        }
        .instrument(send.clone())
        .await;
        let process = info_span!(target: "ask_router", "process reply");
        process.set_parent(send.context()).unwrap();
        process.in_scope(|| info_span!(target: "hyper", "not ours").in_scope(|| ()));
    }
    .with_subscriber(dispatch)
    .await;
    telemetry.shutdown().await;

    let spans = sink.wait_for(|spans| spans.len() >= 3, SOON).await.unwrap();
    let mut names: Vec<_> = spans.iter().map(|span| (span.service.as_str(), span.name.as_str())).collect();
    names.sort_unstable();
    let expected =
        [("ask-router", "process reply"), ("owui-emitter", "put ask"), ("owui-emitter", "send reply")];
    assert_eq!(names, expected);
    assert!(spans.iter().all(|span| span.trace_id == spans[0].trace_id));
    assert!(spans.iter().all(|span| span.attributes.is_empty()), "{spans:?}");
}

#[tokio::test]
async fn without_an_endpoint_there_is_a_trace_context_all_the_same() {
    let (telemetry, dispatch) = telemetry::build(&[&ROUTER], &config(None)).unwrap();
    let context =
        async { info_span!(target: "ask_router", "send ask").context() }.with_subscriber(dispatch).await;
    let mut headers = std::collections::HashMap::new();
    global::get_text_map_propagator(|propagator| {
        propagator.inject_context(&context, &mut headers);
    });
    let trace_id = context.span().span_context().trace_id().to_string();
    assert!(headers["traceparent"].starts_with(&format!("00-{trace_id}-")), "{headers:?}");
    telemetry.shutdown().await;
}

/// A collector that accepts connections and never answers is worse than none.
#[tokio::test]
async fn a_collector_that_is_away_or_silent_blocks_nothing() {
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let closed = {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.local_addr().unwrap()
    };
    for address in [silent.local_addr().unwrap(), closed] {
        let endpoint = Some(format!("http://{address}"));
        let (telemetry, dispatch) = telemetry::build(&[&ROUTER, &EMITTER], &config(endpoint)).unwrap();
        let started = Instant::now();
        async {
            for _ in 0..10_000 {
                info_span!(target: "ask_router", "process reply").in_scope(|| ());
            }
        }
        .with_subscriber(dispatch)
        .await;
        let spans_took = started.elapsed();
        // If each batch of 512 waited for its export of two seconds, this would be half a minute.
        assert!(spans_took < Duration::from_secs(15), "10,000 spans took {spans_took:?}");

        let started = Instant::now();
        telemetry.shutdown().await;
        let shutdown_took = started.elapsed();
        // The full queue alone holds four batches.
        assert!(shutdown_took < Duration::from_secs(5), "shutdown took {shutdown_took:?}");
    }
}

/// The only test that may take the process's global dispatch and tracer.
#[tokio::test]
async fn a_span_of_the_past_is_made_with_the_tracer_of_its_service() {
    let sink = OtlpSink::start().await.unwrap();
    let config = config(Some(sink.endpoint()));
    let telemetry = telemetry::init(&[&ROUTER, &EMITTER], &config).unwrap();
    assert!(telemetry::init(&[&ROUTER], &config).is_err(), "a second time in one process");

    let asked = info_span!(target: "ask_router", "process ask").context();
    let asked_at = SystemTime::now() - Duration::from_secs(60);
    global::tracer("owui-emitter")
        .span_builder("human wait")
        .with_start_time(asked_at)
        .start_with_context(&global::tracer("owui-emitter"), &asked)
        .end();
    telemetry.shutdown().await;

    let is_wait = |span: &&Span| span.name == "human wait";
    let spans = sink.wait_for(|spans| spans.iter().any(|s| is_wait(&s)), SOON).await.unwrap();
    let wait = spans.iter().find(is_wait).unwrap();
    assert_eq!(wait.service, "owui-emitter");
    assert_eq!(wait.trace_id, asked.span().span_context().trace_id().to_string());
    assert!(wait.end_ns - wait.start_ns >= 60_000_000_000);
}
