//! Whose call an MCP call is. The Gateway's MCP client sends no identity, so a call is bound to
//! the tool-call start that the Gateway reports for it, by tool and arguments. It is never guessed.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ask_core::entry::Road;

use crate::adapter::{Adapter, ToolStart};
use crate::calls::TOOL;

/// A call and its start come within this time of each other, in either order.
const WINDOW: Duration = Duration::from_secs(2);

/// Binds the MCP calls that this replica gets.
pub(crate) struct Binding {
    adapter: Arc<Adapter>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Starts that have their call.
    taken: Vec<ToolStart>,
    /// Calls that have no start, as the digest of their arguments and their arrival.
    unbound: Vec<(String, Instant)>,
}

/// Where a call comes from.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// The one start that it can belong to.
    Start(ToolStart),
    /// Several starts, or several calls for one start.
    Ambiguous,
    /// No start came.
    Unknown,
}

impl Binding {
    pub(crate) fn new(adapter: Arc<Adapter>) -> Self {
        Self { adapter, state: Mutex::default() }
    }

    /// Finds the start of a call with these arguments. One of `known`, the session that this
    /// client has spoken for before, is taken as soon as it is there. Of others it takes the whole
    /// window to tell that there is only one.
    pub(crate) async fn origin(&self, digest: &str, known: Option<&str>) -> Origin {
        let mut seen = self.adapter.tool_starts_seen();
        let call = (digest.to_owned(), Instant::now());
        self.with_state(|state| state.unbound.push(call.clone()));
        let until = tokio::time::Instant::from_std(call.1 + WINDOW);
        loop {
            seen.mark_unchanged();
            if let Some(known) = known {
                match self.take(&call, |start| start.session.session == known, |_| true) {
                    Origin::Unknown => {}
                    found => return found,
                }
            }
            match tokio::time::timeout_at(until, seen.changed()).await {
                Ok(Ok(())) => {}
                _ => break,
            }
        }
        let is_only_call =
            |state: &State| state.unbound.iter().filter(|other| other.0 == call.0).count() == 1;
        self.take(&call, |_| true, is_only_call)
    }

    /// Takes the one free start for a call, if the call may have it.
    fn take(
        &self,
        call: &(String, Instant),
        is_candidate: impl Fn(&ToolStart) -> bool,
        may_have: impl Fn(&State) -> bool,
    ) -> Origin {
        let asking = format!("__{TOOL}");
        let starts = self.adapter.tool_starts().into_iter().filter(|start| {
            start.digest.as_deref() == Some(&call.0)
                && start.name.ends_with(&asking)
                && start.at + WINDOW >= call.1
                && is_candidate(start)
                && !self.is_open(start)
        });
        let starts: Vec<ToolStart> = starts.collect();
        self.with_state(|state| {
            let free: Vec<&ToolStart> = starts.iter().filter(|start| !state.taken.contains(start)).collect();
            match free.as_slice() {
                [] => Origin::Unknown,
                [start] if may_have(state) => {
                    state.unbound.retain(|other| other != call);
                    state.taken.push((*start).clone());
                    Origin::Start((*start).clone())
                }
                _ => Origin::Ambiguous,
            }
        })
    }

    /// The start's call is open, perhaps at another replica.
    fn is_open(&self, start: &ToolStart) -> bool {
        self.adapter.open_entries_of(&start.session.session).iter().any(|stored| {
            let entry = &stored.value;
            entry.road == Road::Mcp && entry.key.run == start.run && entry.call == start.call
        })
    }

    fn with_state<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        // Nobody's window reaches back that far.
        state.taken.retain(|start| start.at.elapsed() < 3 * WINDOW);
        state.unbound.retain(|(_, arrived)| arrived.elapsed() < 3 * WINDOW);
        change(&mut state)
    }
}
