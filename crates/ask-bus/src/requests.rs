//! Requests between the services. They are answered only after the durable write.

use ask_core::wire::{
    AbortRequest, AbortResponse, Agent, ReplyRequest, ReplyResponse, SayRequest, SayResponse, ShownRequest,
    ShownResponse, StopRequest, StopResponse,
};
use async_nats::service::{Service, ServiceExt, endpoint::Endpoint};
use async_nats::{HeaderMap, Subscriber};
use bytes::Bytes;
use futures::StreamExt;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::connection::{Bus, decode, encode};
use crate::effect::{self, Effect};
use crate::error::BusError;
use crate::{names, trace};

impl Bus {
    /// Hands in a front end's reply. Repeat it with the same reply id on any error.
    ///
    /// # Errors
    /// [`BusError::NoResponders`] when no router runs; others as the bus gives them.
    pub async fn reply(&self, request: &ReplyRequest) -> Result<ReplyResponse, BusError> {
        self.request(names::ROUTER, names::reply(&request.key), request).await
    }

    /// Hands in an outcome that is not asked for its owner: the Gateway's, or an operator's.
    ///
    /// # Errors
    /// As [`Bus::reply`].
    pub async fn outcome(&self, request: &ReplyRequest) -> Result<ReplyResponse, BusError> {
        self.request(names::ROUTER, names::outcome(&request.key), request).await
    }

    /// Hands in a message. Repeat it with the same message id on any error.
    ///
    /// # Errors
    /// As [`Bus::reply`].
    pub async fn say(&self, request: &SayRequest) -> Result<SayResponse, BusError> {
        self.request(names::ROUTER, names::say(&request.session), request).await
    }

    /// Hands in Stop.
    ///
    /// # Errors
    /// As [`Bus::reply`].
    pub async fn stop(&self, request: &StopRequest) -> Result<StopResponse, BusError> {
        self.request(names::ROUTER, names::stop(&request.session), request).await
    }

    /// Reports what happened to a question at a front end.
    ///
    /// # Errors
    /// As [`Bus::reply`].
    pub async fn shown(&self, request: &ShownRequest) -> Result<ShownResponse, BusError> {
        self.request(names::ROUTER, names::shown(&request.key), request).await
    }

    /// Asks the gateway's adapter to abort the session's run.
    ///
    /// # Errors
    /// [`BusError::NoResponders`] when no adapter works for this gateway.
    pub async fn abort(&self, request: &AbortRequest) -> Result<AbortResponse, BusError> {
        self.request("gateway-adapter", names::abort(&request.session.gateway), request).await
    }

    /// The gateway's agents.
    ///
    /// # Errors
    /// [`BusError::NoResponders`] when no adapter works for this gateway.
    pub async fn agents(&self, gateway: &str) -> Result<Vec<Agent>, BusError> {
        self.request("gateway-adapter", names::agents(gateway), &()).await
    }

    /// Serves the routers' requests, in one queue group with all other routers, as the NATS micro
    /// service `ask-router`.
    ///
    /// # Errors
    /// When the service can't be registered.
    pub async fn serve_router(&self, version: &str) -> Result<RouterRequests, BusError> {
        let failed = |e: String| BusError::unavailable("ask-router was not registered as a service", e);
        let service = self
            .client()
            .service_builder()
            .queue_group(names::ROUTER)
            .description("decides what becomes of questions and messages")
            .start(names::ROUTER, version);
        let service = service.await.map_err(|e| failed(e.to_string()))?;
        let mut endpoints = Vec::new();
        for name in ["reply", "outcome", "say", "stop", "shown"] {
            let endpoint = service.endpoint_builder().name(name).add(format!("{name}.>")).await;
            endpoints.push(endpoint.map_err(|e| failed(e.to_string()))?);
        }
        self.subscriptions_known().await.map_err(failed)?;
        Ok(RouterRequests { bus: self.clone(), service, endpoints: futures::stream::select_all(endpoints) })
    }

    /// Serves the requests to the gateway's active adapter.
    ///
    /// # Errors
    /// When the subscription can't be made.
    pub async fn serve_adapter(&self, gateway: &str) -> Result<AdapterRequests, BusError> {
        let failed = |e: String| BusError::unavailable("can't subscribe to the adapter's requests", e);
        let mut subscribers = Vec::new();
        for subject in [names::abort(gateway), names::agents(gateway)] {
            let subscriber = self.client().queue_subscribe(subject, "gateway-adapter".into()).await;
            subscribers.push(subscriber.map_err(|e| failed(e.to_string()))?);
        }
        self.subscriptions_known().await.map_err(failed)?;
        Ok(AdapterRequests { bus: self.clone(), subscribers: futures::stream::select_all(subscribers) })
    }
}

/// A request that waits for its answer.
#[derive(Debug)]
pub struct Incoming<Q> {
    /// What is asked.
    pub request: Q,
    /// The trace that it continues.
    pub traceparent: Option<String>,
    bus: Bus,
    reply_to: Option<String>,
    answering: Effect,
}

impl<Q> Incoming<Q> {
    /// Answers.
    pub async fn answer<A: Serialize>(&self, answer: &A) {
        let Some(reply_to) = self.reply_to.clone() else {
            return;
        };
        let mut headers = HeaderMap::new();
        trace::inject(&mut headers);
        if let Err(error) = self.bus.send(self.answering, reply_to, headers, encode(answer)).await {
            tracing::warn!(%error, "an answer was not sent; its sender asks again");
        }
    }
}

/// A request to the routers.
#[derive(Debug)]
pub enum RouterRequest {
    /// A front end's reply.
    Reply(Incoming<ReplyRequest>),
    /// An outcome that is not asked for its owner.
    Outcome(Incoming<ReplyRequest>),
    /// A message.
    Say(Incoming<SayRequest>),
    /// Stop.
    Stop(Incoming<StopRequest>),
    /// What happened to a question at a front end.
    Shown(Incoming<ShownRequest>),
}

/// The requests to the routers.
pub struct RouterRequests {
    bus: Bus,
    service: Service,
    endpoints: futures::stream::SelectAll<Endpoint>,
}

impl std::fmt::Debug for RouterRequests {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("RouterRequests")
    }
}

impl RouterRequests {
    /// The next request; `None` once the service is stopped.
    pub async fn next(&mut self) -> Option<RouterRequest> {
        loop {
            let incoming = self.endpoints.next().await?;
            let message = &incoming.message;
            let (kind, address) = message.subject.split_once('.')?;
            let raw = Raw {
                bus: &self.bus,
                subject: &message.subject,
                payload: &message.payload,
                headers: message.headers.as_ref(),
                reply_to: message.reply.as_ref().map(|r| r.to_string()),
            };
            let read = match kind {
                "reply" => raw
                    .read(address, Effect::AnswerReply, |q: &ReplyRequest| q.key.to_string())
                    .map(RouterRequest::Reply),
                "outcome" => raw
                    .read(address, Effect::AnswerOutcome, |q: &ReplyRequest| q.key.to_string())
                    .map(RouterRequest::Outcome),
                "say" => raw
                    .read(address, Effect::AnswerSay, |q: &SayRequest| q.session.to_string())
                    .map(RouterRequest::Say),
                "stop" => raw
                    .read(address, Effect::AnswerStop, |q: &StopRequest| q.session.to_string())
                    .map(RouterRequest::Stop),
                _ => raw
                    .read(address, Effect::AnswerShown, |q: &ShownRequest| q.key.to_string())
                    .map(RouterRequest::Shown),
            };
            match read {
                Ok(request) => return Some(request),
                Err(error) => {
                    let parked = self.bus.park_aside(message, error.to_string());
                    tokio::spawn(async move {
                        let _ = parked.await;
                        let refusal =
                            async_nats::service::error::Error { status: error.to_string(), code: 400 };
                        let _ = effect::have(Effect::Refuse, incoming.respond(Err(refusal))).await;
                    });
                }
            }
        }
    }

    /// Takes no new requests; what was taken is still answered by its holder.
    pub async fn stop(self) {
        if let Err(error) = self.service.stop().await {
            tracing::warn!(%error, "ask-router was not signed off");
        }
    }
}

struct Raw<'a> {
    bus: &'a Bus,
    subject: &'a str,
    payload: &'a Bytes,
    headers: Option<&'a HeaderMap>,
    reply_to: Option<String>,
}

impl Raw<'_> {
    /// Reads a request. What it says it is about must be what its subject says, since permissions
    /// are given by subject.
    fn read<Q: DeserializeOwned>(
        self,
        address: &str,
        answering: Effect,
        says: impl Fn(&Q) -> String,
    ) -> Result<Incoming<Q>, BusError> {
        let request: Q = decode(self.subject, self.payload)?;
        let about = says(&request);
        if about != address {
            return Err(BusError::Unreadable {
                subject: self.subject.into(),
                reason: format!("it is about {about}"),
            });
        }
        Ok(Incoming {
            request,
            traceparent: trace::traceparent_in(self.headers),
            bus: self.bus.clone(),
            reply_to: self.reply_to,
            answering,
        })
    }
}

/// A request to a gateway's active adapter.
#[derive(Debug)]
pub enum AdapterRequest {
    /// Abort a session's run; answered with [`AbortResponse`].
    Abort(Incoming<AbortRequest>),
    /// List the agents; answered with a list of [`Agent`].
    Agents(Incoming<()>),
}

/// The requests to a gateway's active adapter.
#[derive(Debug)]
pub struct AdapterRequests {
    bus: Bus,
    subscribers: futures::stream::SelectAll<Subscriber>,
}

impl AdapterRequests {
    /// The next request; `None` once the connection is closed for good.
    pub async fn next(&mut self) -> Option<AdapterRequest> {
        loop {
            let message = self.subscribers.next().await?;
            let reply_to = message.reply.as_ref().map(|r| r.to_string());
            let traceparent = trace::traceparent_in(message.headers.as_ref());
            if message.subject.starts_with("agents.") {
                return Some(AdapterRequest::Agents(Incoming {
                    request: (),
                    traceparent,
                    bus: self.bus.clone(),
                    reply_to,
                    answering: Effect::AnswerAgents,
                }));
            }
            match decode(&message.subject, &message.payload) {
                Ok(request) => {
                    return Some(AdapterRequest::Abort(Incoming {
                        request,
                        traceparent,
                        bus: self.bus.clone(),
                        reply_to,
                        answering: Effect::AnswerAbort,
                    }));
                }
                Err(error) => {
                    self.bus.park_aside(&message, error.to_string());
                }
            }
        }
    }
}
