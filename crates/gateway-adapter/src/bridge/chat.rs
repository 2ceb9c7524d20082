//! Messages to the Gateway: each session in order, sessions side by side.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ask_bus::trace::continue_from;
use ask_bus::{BusError, ChatDelivery};
use ask_core::route::send_by;
use ask_core::session::SendBy;
use ask_core::wire::{Attachment, ChatItem, RunEnd, RunEvent};
use serde_json::{Value, json};
use tokio::time::{interval, sleep};
use tracing::Instrument;

use super::link::Link;
use super::questions::Pause;
use super::reconcile;
use super::run_output::put;
use super::transcript::{self, Search};
use crate::openclaw::calls::{AgentTurn, ChatSend, ChatSent, History, QueueMode};
use crate::openclaw::client::GatewayError;

/// Well below the time after which an item that is not acknowledged comes again.
const STILL_WORKING: Duration = Duration::from_secs(3);
const TRY_AGAIN: Duration = Duration::from_millis(500);
/// How many run ids a connection remembers: far more than one message is ever repeated after.
const REMEMBERED: usize = 1024;

/// Sends the gateway's items as long as the connection stands.
pub(super) async fn deliver(link: &Arc<Link>) {
    let queues = Arc::new(Queues::default());
    loop {
        match link.adapter.bus.chat_items(link.adapter.gateway()).await {
            Ok(mut items) => {
                while let Some(delivery) = items.next().await {
                    queues.add(link, delivery);
                }
            }
            Err(error @ BusError::NotProvisioned { .. }) => tracing::error!(%error, "no message can be sent"),
            Err(error) => tracing::warn!(%error, "CHAT can't be read; trying again"),
        }
        sleep(TRY_AGAIN).await;
    }
}

/// What waits to be sent, by session. A session that is here has a task.
#[derive(Default)]
struct Queues(Mutex<State>);

#[derive(Default)]
struct State {
    waiting: HashMap<String, VecDeque<Arc<ChatDelivery>>>,
    /// The run ids of what waits or is being sent.
    in_hand: HashSet<String>,
    /// The run ids of what this connection has dealt with last, since a repeated message is twice
    /// in `CHAT`.
    dealt_with: VecDeque<String>,
}

impl Queues {
    fn add(self: &Arc<Self>, link: &Arc<Link>, delivery: ChatDelivery) {
        let session = delivery.item.session.session.clone();
        let mut state = self.lock();
        if !state.in_hand.insert(delivery.item.run.clone()) {
            // It came again while it is being dealt with; one acknowledgement is for both.
            return;
        }
        let delivery = Arc::new(delivery);
        if let Some(queue) = state.waiting.get_mut(&session) {
            queue.push_back(delivery);
            return;
        }
        state.waiting.insert(session.clone(), VecDeque::from([delivery]));
        drop(state);
        let (queues, link) = (self.clone(), link.clone());
        tokio::spawn(async move {
            let stop = link.stop.clone();
            stop.run_until_cancelled(Box::pin(queues.work_off(&link, &session))).await;
            // What was not sent goes to the next connection, or to the next replica.
            let left = queues.lock().waiting.remove(&session).unwrap_or_default();
            for delivery in left {
                delivery.later(Duration::ZERO).await;
            }
        });
    }

    async fn work_off(&self, link: &Arc<Link>, session: &str) {
        while let Some(delivery) = self.first(session) {
            let span = tracing::info_span!(
                "process chat",
                otel.kind = "consumer",
                messaging.system = "nats",
                messaging.operation.name = "process",
                messaging.operation.type = "process",
                messaging.destination.template = "chat",
                askbus.session = session,
                askbus.run = %delivery.item.run,
            );
            continue_from(&span, delivery.traceparent.as_deref());
            let may_be_sent = delivery.attempt > 1 || self.dealt_with(&delivery.item.run);
            let send = send(link, &delivery.item, may_be_sent).instrument(span);
            tokio::pin!(send);
            let mut still_working = interval(STILL_WORKING);
            loop {
                tokio::select! {
                    () = &mut send => break,
                    _ = still_working.tick() => self.say_working(session).await,
                }
            }
            if let Err(error) = delivery.done().await {
                tracing::warn!(%error, "a sent message will come again");
            }
            self.sent(session, &delivery.item.run);
        }
    }

    /// The first item of the session; without one the session leaves.
    fn first(&self, session: &str) -> Option<Arc<ChatDelivery>> {
        let mut state = self.lock();
        let first = state.waiting.get(session).and_then(|queue| queue.front().cloned());
        if first.is_none() {
            state.waiting.remove(session);
        }
        first
    }

    fn sent(&self, session: &str, run: &str) {
        let mut state = self.lock();
        state.in_hand.remove(run);
        state.dealt_with.push_back(run.into());
        if state.dealt_with.len() > REMEMBERED {
            state.dealt_with.pop_front();
        }
        if let Some(queue) = state.waiting.get_mut(session) {
            queue.pop_front();
        }
    }

    fn dealt_with(&self, run: &str) -> bool {
        self.lock().dealt_with.iter().any(|known| known == run)
    }

    async fn say_working(&self, session: &str) {
        let waiting: Vec<_> = self.lock().waiting.get(session).into_iter().flatten().cloned().collect();
        for delivery in waiting {
            delivery.working().await;
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Sends one item, until it is sent or never can be. `may_be_sent`: what was tried before may have
/// been carried out, perhaps by a Gateway process that is gone.
async fn send(link: &Arc<Link>, item: &ChatItem, mut may_be_sent: bool) {
    let session = item.session.session.as_str();
    let mut pause = Pause::default();
    loop {
        let stopped = match is_stopped(link, item).await {
            Ok(stopped) => stopped,
            Err(error) => {
                tracing::warn!(%error, "a session was not read; trying again");
                pause.wait().await;
                continue;
            }
        };
        if stopped && !may_be_sent {
            let ended = RunEvent::Ended { how: RunEnd::Aborted, text: None };
            return put(&link.adapter, session, &item.run, 0, ended).await;
        }
        match try_send(link, item, may_be_sent, stopped).await {
            Ok(Sent { what, before }) => {
                put(&link.adapter, session, &item.run, 0, what).await;
                if let Some(history) = before {
                    reconcile::catch_up(link, session, &item.run, None, &history);
                }
                // Stop may have come while it was on its way.
                if let Ok(true) = is_stopped(link, item).await
                    && let Err(error) = link.client.chat_abort(session, Some(&item.run)).await
                {
                    tracing::warn!(%error, "a stopped message was not aborted");
                }
                return;
            }
            Err(error) if error.is_retryable() || error.may_have_happened() => {
                tracing::warn!(run = item.run, %error, "a message was not sent yet; trying again");
                may_be_sent |= error.may_have_happened();
                if let Some(wanted) = error.retry_after() {
                    sleep(wanted).await;
                }
            }
            Err(error) => {
                tracing::error!(run = item.run, %error, "a message can't be sent");
                let failed = RunEvent::Failed { why: error.to_string() };
                return put(&link.adapter, session, &item.run, 0, failed).await;
            }
        }
        pause.wait().await;
    }
}

/// Whether the session was stopped through this message (rule S10).
async fn is_stopped(link: &Link, item: &ChatItem) -> Result<bool, BusError> {
    let session = link.adapter.bus.session(&item.session).await?;
    Ok(session.is_some_and(|session| session.value.is_stopped(item.number)))
}

/// What became of an item.
struct Sent {
    what: RunEvent,
    /// The transcript by which it was sent before: its run may have ended unseen.
    before: Option<History>,
}

async fn try_send(
    link: &Arc<Link>,
    item: &ChatItem,
    may_be_sent: bool,
    stopped: bool,
) -> Result<Sent, GatewayError> {
    let session = item.session.session.as_str();
    let sent = |what| Ok(Sent { what, before: None });
    if may_be_sent || !link.runs.is_known(session) {
        let history = link.client.chat_history(session, super::HISTORY).await?;
        learn_active(link, session, &history);
        // Sent before: the Gateway's own memory of keys ends with its process (rule S11). An item
        // may also be new on the bus and old at the Gateway, when its message was repeated.
        let known = match history.knows(&item.run) {
            true => Some(history),
            // What is new to this adapter is in the newest rows, if anywhere.
            false if !may_be_sent => None,
            false => further_back(link, session, item, &history).await?,
        };
        if let Some(history) = known {
            let into = link.runs.active(session).filter(|run| *run != item.run);
            return Ok(Sent { what: RunEvent::Sent { into }, before: Some(history) });
        }
    }
    // It was not sent before Stop came.
    if stopped {
        return sent(RunEvent::Ended { how: RunEnd::Aborted, text: None });
    }
    let into = link.runs.active(session);
    // Immediately before: a message must not become the answer of a question (rule S6).
    let open = link.adapter.open_entries_of(session);
    let on_record = open.iter().map(|stored| &stored.value);
    if send_by(item.send, link.native.is_open(session), on_record) == SendBy::AgentMethod {
        let turn = AgentTurn {
            session_key: session.into(),
            message: item.text.clone(),
            idempotency_key: item.run.clone(),
            attachments: attachments(&item.attachments),
        };
        link.client.agent(&turn).await?;
        return sent(RunEvent::Sent { into: None });
    }
    let message = ChatSend {
        session_key: session.into(),
        message: item.text.clone(),
        idempotency_key: item.run.clone(),
        queue_mode: Some(QueueMode::Steer),
        attachments: attachments(&item.attachments),
    };
    sent(match link.client.chat_send(&message).await? {
        ChatSent::Run { .. } => RunEvent::Sent { into: into.filter(|run| *run != item.run) },
        ChatSent::Stopped { .. } => RunEvent::Ended { how: RunEnd::Aborted, text: None },
    })
}

/// The part of the transcript before its newest rows that has this message.
async fn further_back(
    link: &Link,
    session: &str,
    item: &ChatItem,
    newest: &History,
) -> Result<Option<History>, GatewayError> {
    let knows = |page: &History| page.knows(&item.run).then(|| page.clone());
    Ok(match transcript::search(&link.client, session, newest.next_offset, knows).await? {
        Search::Found(page) => Some(page),
        Search::Nothing => None,
        Search::NothingInPart => {
            tracing::warn!(
                run = item.run,
                session,
                "a message is taken for not sent: it is not in the last rows"
            );
            None
        }
    })
}

/// What the Gateway says about the runs of a session.
pub(super) fn learn_active(link: &Link, session: &str, history: &History) {
    let mut active = history.session_info.active_run_ids.clone();
    if let Some(run) = &history.in_flight_run
        && !active.contains(&run.run_id)
    {
        active.push(run.run_id.clone());
    }
    link.runs.set_active(session, active);
}

fn attachments(files: &[Attachment]) -> Vec<Value> {
    let kind = |mime: &str| if mime.starts_with("image/") { "image" } else { "file" };
    files
        .iter()
        .map(|file| {
            json!({"type": kind(&file.mime), "mimeType": file.mime, "fileName": file.name, "content": file.data})
        })
        .collect()
}
