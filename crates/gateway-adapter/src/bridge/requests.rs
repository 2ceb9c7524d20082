//! Requests to the gateway's active adapter: abort a run, list the agents.

use std::sync::Arc;
use std::time::Duration;

use ask_bus::trace::continue_from;
use ask_bus::{AdapterRequest, Incoming};
use ask_core::wire::{AbortRequest, AbortResponse, Agent};
use tokio::time::sleep;
use tracing::Instrument;

use crate::adapter::Adapter;
use crate::openclaw::client::GatewayError;
use crate::openclaw::connection::Connection;

const TRY_AGAIN: Duration = Duration::from_millis(500);

/// Serves requests as long as this replica works for the gateway.
pub(super) async fn serve(adapter: &Arc<Adapter>, connection: &Connection) {
    loop {
        match adapter.bus.serve_adapter(adapter.gateway()).await {
            Ok(mut requests) => {
                while let Some(request) = requests.next().await {
                    let (adapter, connection) = (adapter.clone(), connection.clone());
                    tokio::spawn(async move { answer(&adapter, &connection, request).await });
                }
            }
            Err(error) => tracing::debug!(%error, "requests can't be served yet"),
        }
        sleep(TRY_AGAIN).await;
    }
}

async fn answer(adapter: &Adapter, connection: &Connection, request: AdapterRequest) {
    match request {
        AdapterRequest::Abort(incoming) => {
            let span = tracing::info_span!(
                "process abort",
                otel.kind = "server",
                messaging.system = "nats",
                messaging.operation.name = "process",
                messaging.operation.type = "process",
                messaging.destination.template = "abort",
                askbus.session = %incoming.request.session.session,
            );
            continue_from(&span, incoming.traceparent.as_deref());
            abort(adapter, connection, &incoming).instrument(span).await;
        }
        AdapterRequest::Agents(incoming) => match agents(connection).await {
            Ok(agents) => incoming.answer(&agents).await,
            // No answer is an answer: the asker tries again.
            Err(error) => tracing::warn!(%error, "the agents were not listed"),
        },
    }
}

async fn abort(adapter: &Adapter, connection: &Connection, incoming: &Incoming<AbortRequest>) {
    let session = &incoming.request.session;
    let aborted = if session.gateway == adapter.gateway() {
        async { connection.client()?.chat_abort(&session.session, None).await }
            .await
            .map_err(|e| e.to_string())
    } else {
        Err(format!("this adapter works for the gateway {}, not {}", adapter.gateway(), session.gateway))
    };
    let response = match aborted {
        Ok(aborted) => AbortResponse { aborted: aborted.aborted, error: None },
        Err(error) => AbortResponse { aborted: false, error: Some(error) },
    };
    incoming.answer(&response).await;
}

async fn agents(connection: &Connection) -> Result<Vec<Agent>, GatewayError> {
    let listed = connection.client()?.agents_list().await?;
    let agent = |agent: &crate::openclaw::calls::Agent| Agent {
        id: agent.id.clone(),
        name: agent.label().to_owned(),
    };
    // The one that is used when none is named comes first.
    let (default, others): (Vec<_>, Vec<_>) =
        listed.agents.iter().map(agent).partition(|agent| agent.id == listed.default_id);
    Ok(default.into_iter().chain(others).collect())
}
