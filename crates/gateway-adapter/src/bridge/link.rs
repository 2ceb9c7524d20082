//! One connection to the Gateway: its events, handed to those who deal with them.

use std::sync::Arc;

use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::questions::Native;
use super::run_output::{Fact, Runs};
use super::{chat, reconcile, returns};
use crate::adapter::Adapter;
use crate::openclaw::calls::question_id;
use crate::openclaw::client::Client;
use crate::openclaw::connection::Connected;
use crate::openclaw::frames::{AgentEvent, ChatEvent, ChatState, Event, ToolPhase, text_of};
use ask_core::wire::RunEnd;

/// What lives as long as one connection.
pub(super) struct Link {
    pub adapter: Arc<Adapter>,
    pub client: Client,
    pub boot_id: String,
    /// The Gateway process is not the one that was worked for before.
    pub is_new_boot: bool,
    /// The connection has ended, or this replica works no longer for the gateway.
    pub stop: CancellationToken,
    pub native: Native,
    pub runs: Arc<Runs>,
}

/// Works on one connection until it ends.
pub(super) async fn follow(
    adapter: &Arc<Adapter>,
    runs: &Arc<Runs>,
    connected: Connected,
    is_new_boot: bool,
    stop: CancellationToken,
) {
    let Connected { client, boot_id, mut events, .. } = connected;
    let _ended = stop.clone().drop_guard();
    let link = Arc::new(Link {
        adapter: adapter.clone(),
        client,
        boot_id,
        is_new_boot,
        stop: stop.clone(),
        native: Native::default(),
        runs: runs.clone(),
    });
    let work = async {
        tokio::join!(link.take_events(&mut events), async {
            if reconcile::reconcile(&link).await {
                chat::deliver(&link).await;
            }
        });
    };
    tokio::select! {
        // The end of the events is the end of the connection.
        () = work => {}
        () = stop.cancelled() => {}
    }
}

impl Link {
    async fn take_events(self: &Arc<Self>, events: &mut mpsc::Receiver<Event>) {
        while let Some(event) = events.recv().await {
            match event {
                Event::QuestionRequested(record) => self.asked(record),
                Event::QuestionResolved(resolved) => self.native.settled(&resolved.id),
                Event::Agent(event) | Event::SessionTool(event) => self.agent(event),
                Event::Chat(event) => self.chat(event),
                // The connection stays as long as the Gateway keeps it: questions can still be
                // resolved on it.
                Event::Shutdown { reason } => tracing::warn!(reason, "the gateway is about to close"),
                Event::Raw { .. } => {}
            }
        }
        self.stop.cancel();
    }

    fn agent(self: &Arc<Self>, event: AgentEvent) {
        let Some(session) = event.session_key.clone() else {
            return;
        };
        let run = event.run_id.as_str();
        if let Some(life) = event.lifecycle() {
            match life.phase.as_str() {
                "start" => self.runs.feed(&session, run, Fact::Started { seq: event.seq }),
                "end" | "error" => self.runs.settled(&session, run),
                _ => {}
            }
        } else if let Some(tool) = event.tool() {
            match tool.phase {
                ToolPhase::Start => self.native.call_started(run, &tool.tool_call_id, &tool.name),
                ToolPhase::Update => {}
                ToolPhase::Result => {
                    self.native.call_ended(run, &tool.tool_call_id);
                    // A question that the Gateway has settled says so by its tool result first.
                    self.native.settled(&question_id(run, &tool.tool_call_id));
                    let text = text_of(&tool.result["content"]);
                    returns::tool_result_seen(&self.adapter, &session, run, &tool.tool_call_id, text);
                }
            }
            self.runs.feed(&session, run, Fact::Tool { seq: event.seq, tool: Box::new(tool) });
        } else if event.stream == "item"
            && let (Some(call), Some(title)) =
                (event.data["toolCallId"].as_str(), event.data["title"].as_str())
        {
            let fact = Fact::Title { call: call.into(), title: title.into() };
            self.runs.feed(&session, run, fact);
        }
    }

    fn chat(self: &Arc<Self>, event: ChatEvent) {
        let (session, run, seq) = (event.session_key.as_str(), event.run_id.as_str(), event.seq);
        let text = event.text();
        let fact = match event.state {
            ChatState::Status => return,
            ChatState::Delta => match text {
                Some(whole) => Fact::Text { seq, whole },
                None => Fact::MoreText { seq, text: event.delta_text, replace: event.replace },
            },
            ChatState::Final => Fact::ended(seq, None, text),
            ChatState::Aborted => Fact::ended(seq, Some(RunEnd::Aborted), text),
            ChatState::Error => {
                let message = event.error_message.unwrap_or_else(|| "the run failed".into());
                Fact::ended(seq, Some(RunEnd::Error { message }), text)
            }
        };
        self.runs.feed(session, run, fact);
    }
}
