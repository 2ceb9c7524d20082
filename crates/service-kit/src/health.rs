//! Probes and metrics: `/healthz`, `/readyz` and `/metrics` of one service.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;
use serde_json::json;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::Service;

/// Is the service ready, and what does it count. Clones share their state.
#[derive(Clone, Debug)]
pub struct Health(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    service: &'static str,
    /// Condition to the reason why it is not met; `None` when it is.
    conditions: Mutex<BTreeMap<&'static str, Option<String>>>,
    registry: Mutex<Registry>,
}

impl Health {
    /// Not ready until each condition of [`Service::readiness`] was reported as met.
    pub fn new(service: &Service) -> Self {
        let mut registry = Registry::with_prefix("askbus");
        let labels = vec![("service", service.name), ("version", service.version)];
        registry.register("build", "Which build this is", Info::new(labels));
        let not_yet = |name: &&'static str| (*name, Some("starting".to_owned()));
        Self(Arc::new(Inner {
            service: service.name,
            conditions: Mutex::new(service.readiness.iter().map(not_yet).collect()),
            registry: Mutex::new(registry),
        }))
    }

    /// The condition `name` is met. A name outside [`Service::readiness`] counts from its first
    /// report on.
    pub fn ready(&self, name: &'static str) {
        if lock(&self.0.conditions).insert(name, None) != Some(None) {
            tracing::info!(service = self.0.service, condition = name, "ready");
        }
    }

    /// The condition `name` is not met; `reason` is shown to whoever asks `/readyz`.
    pub fn not_ready(&self, name: &'static str, reason: impl Into<String>) {
        let reason = reason.into();
        let before = lock(&self.0.conditions).insert(name, Some(reason.clone()));
        if before != Some(Some(reason.clone())) {
            tracing::warn!(service = self.0.service, condition = name, reason, "not ready");
        }
    }

    /// From here on `/readyz` says that the service is going down.
    pub fn stopping(&self) {
        lock(&self.0.conditions).insert("running", Some("shutting down".to_owned()));
    }

    /// Each unmet condition with its reason; empty when the service is ready.
    pub fn unmet(&self) -> BTreeMap<&'static str, String> {
        lock(&self.0.conditions).iter().filter_map(|(name, reason)| Some((*name, reason.clone()?))).collect()
    }

    /// The registry behind `/metrics`, with the prefix `askbus`. Register all metrics at the start
    /// and keep the handles: the lock is held for as long as the guard.
    pub fn registry(&self) -> MutexGuard<'_, Registry> {
        lock(&self.0.registry)
    }

    /// Serves the endpoint until `shutdown` is cancelled.
    pub async fn serve(self, listener: TcpListener, shutdown: CancellationToken) -> std::io::Result<()> {
        let app = Router::new()
            .route("/healthz", get(|| async { "ok\n" }))
            .route("/readyz", get(readyz))
            .route("/metrics", get(metrics))
            .with_state(self);
        axum::serve(listener, app).with_graceful_shutdown(shutdown.cancelled_owned()).await
    }
}

async fn readyz(State(health): State<Health>) -> Response {
    let unmet = health.unmet();
    let status = if unmet.is_empty() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let body = json!({ "service": health.0.service, "ready": unmet.is_empty(), "unmet": unmet });
    (status, Json(body)).into_response()
}

async fn metrics(State(health): State<Health>) -> Response {
    let mut text = String::new();
    match encode(&mut text, &health.registry()) {
        Ok(()) => {
            let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
            ([(header::CONTENT_TYPE, kind)], text).into_response()
        }
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

/// A panic of another holder leaves the maps as they were: they stay usable.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
