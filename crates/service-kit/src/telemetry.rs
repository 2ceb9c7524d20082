//! Logs on standard error and spans to an OTLP collector.
//!
//! Several services may share one process: each has its own tracer provider and so its own
//! `service.name`. A span belongs to the service named by its field `askbus.service`, else to the
//! one whose crate is its target, else to the first. Shared crates that make spans on behalf of a
//! service (the bus) set that field; it is not exported. Spans are recorded from level info up, of
//! askbus crates only.
//!
//! A span of the past (a wait that is over) is made by hand with [`opentelemetry::global::tracer`]
//! under the service's name.

use std::time::Duration;

use opentelemetry::trace::{SpanBuilder, Tracer, TracerProvider as _};
use opentelemetry::{Context, InstrumentationScope, KeyValue, Value, global};
use opentelemetry_otlp::{RetryPolicy, SpanExporter, WithExportConfig as _, WithTonicConfig as _};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{Sampler, SdkTracer, SdkTracerProvider};
use tracing::Dispatch;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::{EnvFilter, Layer as _, Registry};

use crate::Service;
use crate::config::TelemetryConfig;
use crate::log::LogLayer;

/// The span field that names the service a span belongs to.
pub const SERVICE_FIELD: &str = "askbus.service";

/// How long one export may take; also the bound of a shutdown without a collector.
const EXPORT_TIMEOUT: Duration = Duration::from_secs(2);

/// Why telemetry could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum TelemetryError {
    /// The address of the collector can't be used.
    #[error("telemetry.otlp_endpoint {endpoint}: {reason}")]
    Endpoint {
        /// The configured address.
        endpoint: String,
        /// What the exporter said.
        reason: String,
    },
    /// [`TelemetryConfig::log_filter`] is not a filter.
    #[error("telemetry.log_filter: {0}")]
    Filter(#[from] tracing_subscriber::filter::ParseError),
    /// [`init`] was called twice in one process.
    #[error("telemetry is already set up in this process")]
    Twice,
}

/// Holds the exporters; [`Telemetry::shutdown`] sends what they still hold.
#[derive(Debug)]
#[must_use = "spans are lost unless it is shut down at the end"]
pub struct Telemetry {
    providers: Vec<SdkTracerProvider>,
}

/// Sets up logs and spans of this process for one or more services. Call it once, inside a tokio
/// runtime. Without an endpoint nothing is exported, but trace contexts are made and passed on.
///
/// # Panics
/// `services` is empty, or there is no tokio runtime.
pub fn init(services: &[&Service], config: &TelemetryConfig) -> Result<Telemetry, TelemetryError> {
    let (telemetry, dispatch) = build(services, config)?;
    tracing::dispatcher::set_global_default(dispatch).map_err(|_| TelemetryError::Twice)?;
    let providers = services.iter().map(|service| service.name).zip(telemetry.providers.clone());
    global::set_tracer_provider(Providers(providers.collect()));
    Ok(telemetry)
}

/// Like [`init`], but the caller decides where the dispatch holds (a test: for one future), and the
/// global tracer stays as it is.
///
/// # Panics
/// Like [`init`].
pub fn build(
    services: &[&Service],
    config: &TelemetryConfig,
) -> Result<(Telemetry, Dispatch), TelemetryError> {
    assert!(!services.is_empty(), "telemetry needs the service it is for");
    global::set_text_map_propagator(TraceContextPropagator::new());
    let providers =
        services.iter().map(|service| provider(service, config)).collect::<Result<Vec<_>, _>>()?;
    let owners = services
        .iter()
        .zip(&providers)
        .map(|(service, provider)| Owner {
            name: service.name,
            target: service.target(),
            tracer: provider.tracer("askbus"),
        })
        .collect();

    // A log filter must not decide which spans exist: each layer has a filter of its own. Only our
    // crates make spans; those of libraries would hang between them.
    let mut ours = Targets::new().with_target("ask", LevelFilter::INFO);
    for service in services {
        ours = ours.with_target(service.target(), LevelFilter::INFO);
    }
    let spans = tracing_opentelemetry::layer()
        .with_tracer(ByService(owners))
        .with_location(false)
        .with_threads(false)
        .with_tracked_inactivity(false)
        .with_target(true)
        .with_filter(ours);
    let logs = LogLayer::new(config.log_format).with_filter(EnvFilter::try_new(&config.log_filter)?);
    let dispatch = Dispatch::new(Registry::default().with(spans).with(logs));
    Ok((Telemetry { providers }, dispatch))
}

fn provider(service: &Service, config: &TelemetryConfig) -> Result<SdkTracerProvider, TelemetryError> {
    let resource = Resource::builder()
        .with_service_name(service.name)
        .with_attributes([
            KeyValue::new("service.namespace", config.service_namespace.clone()),
            KeyValue::new("service.version", service.version),
            KeyValue::new("service.instance.id", uuid::Uuid::new_v4().to_string()),
        ])
        .build();
    let sampler = Sampler::ParentBased(Box::new(Sampler::TraceIdRatioBased(config.sample_ratio)));
    let builder = SdkTracerProvider::builder().with_resource(resource).with_sampler(sampler);
    let Some(endpoint) = &config.otlp_endpoint else {
        return Ok(builder.build());
    };
    let exporter = SpanExporter::builder()
        .with_tonic()
        .with_endpoint(endpoint)
        .with_timeout(EXPORT_TIMEOUT)
        // Retries would stretch the shutdown; a collector that is away loses its batch.
        .with_retry_policy(RetryPolicy::disabled())
        .build()
        .map_err(|error| TelemetryError::Endpoint {
            endpoint: endpoint.clone(),
            reason: error.to_string(),
        })?;
    Ok(builder.with_batch_exporter(exporter).build())
}

impl Telemetry {
    /// Sends the spans that are left, for at most two seconds, and ends the exporters.
    pub async fn shutdown(self) {
        let (done, all_done) = tokio::sync::oneshot::channel();
        // Own threads: the export needs the runtime's, and one that hangs must hold nobody.
        std::thread::spawn(move || {
            let ends = self
                .providers
                .into_iter()
                .map(|provider| std::thread::spawn(move || provider.shutdown_with_timeout(EXPORT_TIMEOUT)));
            let results: Vec<_> = ends.collect::<Vec<_>>().into_iter().map(|end| end.join()).collect();
            let _ = done.send(results);
        });
        match tokio::time::timeout(EXPORT_TIMEOUT, all_done).await {
            Ok(Ok(results)) => {
                for error in results.into_iter().flatten().filter_map(Result::err) {
                    tracing::warn!(%error, "the last spans could not be sent");
                }
            }
            _ => tracing::warn!("the last spans could not be sent within {EXPORT_TIMEOUT:?}"),
        }
    }
}

struct Owner {
    name: &'static str,
    target: String,
    tracer: SdkTracer,
}

/// A tracer that gives each span to the service it belongs to.
struct ByService(Vec<Owner>);

impl ByService {
    fn owner(&self, builder: &SpanBuilder) -> &Owner {
        let text = |key: &str| {
            builder.attributes.iter().flatten().find(|attribute| attribute.key.as_str() == key).map(
                |attribute| match &attribute.value {
                    Value::String(text) => text.as_str(),
                    _ => "",
                },
            )
        };
        let by_field =
            text(SERVICE_FIELD).and_then(|service| self.0.iter().find(|owner| owner.name == service));
        let by_target = || {
            let krate = text("target")?.split("::").next()?;
            self.0.iter().find(|owner| owner.target == krate)
        };
        by_field.or_else(by_target).unwrap_or(&self.0[0])
    }
}

impl Tracer for ByService {
    type Span = opentelemetry_sdk::trace::Span;

    fn build_with_context(&self, mut builder: SpanBuilder, parent: &Context) -> Self::Span {
        let tracer = &self.owner(&builder).tracer;
        if let Some(attributes) = &mut builder.attributes {
            attributes.retain(|attribute| {
                !matches!(attribute.key.as_str(), "target") && attribute.key.as_str() != SERVICE_FIELD
            });
        }
        tracer.build_with_context(builder, parent)
    }
}

/// The tracer provider of each service, chosen by the name of the tracer.
struct Providers(Vec<(&'static str, SdkTracerProvider)>);

impl opentelemetry::trace::TracerProvider for Providers {
    type Tracer = SdkTracer;

    fn tracer_with_scope(&self, scope: InstrumentationScope) -> SdkTracer {
        let of_service = self.0.iter().find(|(service, _)| *service == scope.name());
        let (_, provider) = of_service.unwrap_or(&self.0[0]);
        provider.tracer_with_scope(scope)
    }
}
