//! What a new connection calls for: the Gateway replays nothing, so all that is open is held
//! against what it says now. And what the end of a run calls for.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use ask_bus::Stored;
use ask_core::call::{self, Gone};
use ask_core::entry::{Entry, Road};
use ask_core::key::QuestionKey;
use ask_core::native::gateway_reply_id;
use ask_core::outcome::CancelReason;
use ask_core::reply::ReplyContent;
use ask_core::time::Timestamp;
use ask_core::wire::{RunEnd, RunEvent};

use super::link::Link;
use super::questions::{Pause, hand_in};
use super::run_output::Fact;
use super::{chat, returns};
use crate::adapter::Adapter;
use crate::openclaw::calls::History;
use crate::openclaw::client::GatewayError;

/// How long the call of a run that has ended may still acknowledge its outcome.
const ACK_GRACE: Duration = Duration::from_secs(2);

/// Loads everything; false when the connection is of no use.
pub(super) async fn reconcile(link: &Arc<Link>) -> bool {
    let since = Timestamp::now();
    let mut pause = Pause::default();
    loop {
        match load(link, since).await {
            Ok(()) => return true,
            Err(error) if link.client.is_closed() => {
                tracing::debug!(%error, "the connection ended while it was loaded");
                return false;
            }
            Err(error) => tracing::warn!(%error, "the gateway's state was not loaded; trying again"),
        }
        pause.wait().await;
    }
}

async fn load(link: &Arc<Link>, since: Timestamp) -> Result<(), GatewayError> {
    let adapter = &link.adapter;
    link.client.sessions_subscribe().await?;
    let listed = link.client.question_list().await?;
    let ids: BTreeSet<String> = listed.iter().map(|record| record.id.clone()).collect();
    for record in listed {
        link.asked(record);
    }
    let mut gone = Vec::new();
    let mut calls: BTreeMap<String, Vec<Arc<Stored<Entry>>>> = BTreeMap::new();
    for stored in adapter.open_entries() {
        let entry = &stored.value;
        match entry.road {
            Road::Native if !ids.contains(&entry.key.question) => {
                gone.push(entry.key.clone());
                link.not_listed(entry);
            }
            // A call that came meanwhile belongs to a run of this process.
            Road::Plugin | Road::Mcp if entry.asked_at < since => {
                calls.entry(entry.key.session.clone()).or_default().push(stored);
            }
            _ => {}
        }
    }
    let mut runs: BTreeMap<String, BTreeMap<String, Option<String>>> = BTreeMap::new();
    for (session, run) in link.runs.open() {
        runs.entry(session).or_default().insert(run, None);
    }
    for item in not_ended(adapter).await {
        let into = match item.what {
            RunEvent::Sent { into } => into,
            _ => None,
        };
        runs.entry(item.session.session).or_default().entry(item.run).or_insert(into);
    }
    let sessions: BTreeSet<String> = calls.keys().chain(runs.keys()).cloned().collect();
    for session in sessions {
        let history = match link.client.chat_history(&session, super::HISTORY).await {
            Ok(history) => history,
            Err(error) if error.is_retryable() => return Err(error),
            // One session that can't be read holds up no other.
            Err(error) => {
                tracing::error!(session, %error, "a session of the gateway can't be read");
                continue;
            }
        };
        chat::learn_active(link, &session, &history);
        for (run, into) in runs.get(&session).into_iter().flatten() {
            catch_up(link, &session, run, into.as_deref(), &history);
        }
        for stored in calls.remove(&session).unwrap_or_default() {
            if is_active(&history, &stored.value.key.run) {
                continue;
            }
            gone.push(stored.value.key.clone());
            tokio::spawn(call_is_gone(adapter.clone(), stored, link.cancels()));
        }
    }
    remember_boot(link, gone);
    Ok(())
}

/// Remembers the Gateway process once everything that the one before has left is closed: whoever
/// takes over before that still knows that it was lost in a restart.
fn remember_boot(link: &Arc<Link>, gone: Vec<QuestionKey>) {
    let link = link.clone();
    tokio::spawn(async move {
        let stop = link.stop.clone();
        let remember = async {
            for key in gone {
                link.adapter.wait_for(&key, |entry| entry.returned().is_some()).await;
            }
            let mut pause = Pause::default();
            while let Err(error) = link.adapter.bus.write_boot_id(link.adapter.gateway(), &link.boot_id).await
            {
                tracing::warn!(%error, "the gateway's boot id was not written; trying again");
                pause.wait().await;
            }
        };
        stop.run_until_cancelled(remember).await;
    });
}

impl Link {
    /// Why what is gone on this connection is cancelled.
    fn cancels(&self) -> CancelReason {
        match self.is_new_boot {
            true => CancelReason::GatewayRestart,
            false => CancelReason::RunEnded,
        }
    }
}

async fn not_ended(adapter: &Adapter) -> Vec<ask_core::wire::RunItem> {
    let mut pause = Pause::default();
    loop {
        match adapter.bus.runs_not_ended(adapter.gateway()).await {
            Ok(items) => return items,
            Err(error) => tracing::warn!(%error, "RUNS was not read; trying again"),
        }
        pause.wait().await;
    }
}

fn is_active(history: &History, run: &str) -> bool {
    let info = &history.session_info;
    info.active_run_ids.iter().any(|active| active == run)
        || history.in_flight_run.as_ref().is_some_and(|in_flight| in_flight.run_id == run)
        // Something runs, and it is not said what.
        || (info.has_active_run && info.active_run_ids.is_empty() && history.in_flight_run.is_none())
}

/// Puts out what a run has said, or how it ended, while there was no connection.
pub(super) fn catch_up(link: &Arc<Link>, session: &str, run: &str, into: Option<&str>, history: &History) {
    if is_active(history, run) {
        if let Some(in_flight) = history.in_flight_run.as_ref().filter(|in_flight| in_flight.run_id == run)
            && !in_flight.text.is_empty()
        {
            let whole = in_flight.text.clone();
            link.runs.feed(session, run, Fact::Text { seq: 0, whole });
        }
        return;
    }
    let runs_on = history.session_info.has_active_run || history.in_flight_run.is_some();
    if into.is_some_and(|into| is_active(history, into)) {
        return;
    }
    let said: Vec<String> = history
        .messages
        .iter()
        .filter(|row| row.role() == "assistant" && row.run_id() == Some(run))
        .map(|row| row.text())
        .filter(|text| !text.is_empty())
        .collect();
    // A message that waits for the active run has left no trace yet.
    if said.is_empty() && runs_on && !link.is_new_boot {
        return;
    }
    let finished = history.messages.iter().rev().find(|row| row.run_id() == Some(run));
    let finished = finished.is_some_and(|row| row.role() == "assistant" && !row.text().is_empty());
    let how = match (link.is_new_boot && !finished, said.is_empty()) {
        (true, _) => {
            Some(RunEnd::Error { message: "the gateway was restarted and has interrupted this run".into() })
        }
        (false, true) => Some(RunEnd::Empty),
        (false, false) => Some(RunEnd::Done),
    };
    let text = (!said.is_empty()).then(|| said.join("\n\n"));
    let fact = Fact::Ended { seq: 0, how, text, cancels: link.cancels() };
    link.runs.feed(session, run, fact);
}

/// Rule P3: the calls of a run that has ended wait for nothing any more.
pub(super) fn run_ended(adapter: &Arc<Adapter>, session: &str, run: &str, reason: CancelReason) {
    for stored in adapter.open_entries_of(session) {
        let entry = &stored.value;
        if entry.key.run == run && matches!(entry.road, Road::Plugin | Road::Mcp) {
            tokio::spawn(call_is_gone(adapter.clone(), stored, reason));
        }
    }
}

async fn call_is_gone(adapter: Arc<Adapter>, stored: Arc<Stored<Entry>>, reason: CancelReason) {
    let why = match reason {
        CancelReason::GatewayRestart => call::GATEWAY_RESTART,
        _ => call::RUN_ENDED,
    };
    let key = &stored.value.key;
    let work = async {
        let mut entry = stored.value.clone();
        if call::gone(&entry, why) == Gone::CancelFirst {
            let id = gateway_reply_id(key);
            hand_in(&adapter, &entry, id, ReplyContent::Cancelled { reason }, None).await;
            entry = adapter.wait_decided(key).await.value.clone();
        }
        if let Gone::Close(returned) = call::gone(&entry, why) {
            let closed = adapter.wait_for(key, |entry| entry.returned().is_some());
            if tokio::time::timeout(ACK_GRACE, closed).await.is_err() {
                returns::close(&adapter, key, returned).await;
            }
        }
    };
    adapter.shutdown.run_until_cancelled(work).await;
}
