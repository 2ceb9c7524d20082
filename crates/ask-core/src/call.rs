//! The way back of a tool call: what it is told, what proves that it has that, and what is left to
//! do when it does not come back (rules P1 to P6).

use std::time::Duration;

use crate::entry::{Entry, Road, State};
use crate::outcome::{Outcome, Returned, Undeliverable};
use crate::reply::Answer;
use crate::result::{ToolResult, tool_result};
use crate::time::Timestamp;

/// Why a call is gone: the process of its gateway is another one.
pub const GATEWAY_RESTART: &str = "gateway_restart";
/// Why a call is gone: its run is over.
pub const RUN_ENDED: &str = "run_ended";
/// Why a call is gone: its client has cancelled it.
pub const CALLER_CANCELLED: &str = "caller_cancelled";
/// Why a client is done that can't prove what it has.
pub const NO_PROOF: &str = "no_proof";
/// Why an outcome is given up that waited to the retention limit for its call.
pub const EXPIRED: &str = "expired";
/// How long after its response such a client may still connect again, and more.
const RETRY_WINDOW: Duration = Duration::from_secs(60);
/// The retention limit: how long an outcome waits for its call to fetch it.
const KEPT: Duration = Duration::from_secs(24 * 3600);

/// What is left to do about a call that waits for nothing any more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Gone {
    /// Have the question cancelled, then look again.
    CancelFirst,
    /// Close it so.
    Close(Returned),
    /// It is closed.
    Nothing,
}

/// What the call of this entry is told, as often as it asks; `None` while it is pending. A secret
/// that is out of reach is never told as an answer.
pub fn told(entry: &Entry) -> Option<ToolResult> {
    match secret_is_gone(entry) {
        true => tool_result(&without_secret(entry)),
        false => tool_result(entry),
    }
}

/// The entry as a call is told it that can't have the secret.
pub fn without_secret(entry: &Entry) -> Entry {
    let mut entry = entry.clone();
    if let State::Decided { decision } | State::Returned { decision, .. } = &mut entry.state {
        decision.outcome = Outcome::Undeliverable { reason: Undeliverable::ExpiredSecret };
    }
    entry
}

fn secret_is_gone(entry: &Entry) -> bool {
    let Some(Outcome::Answered { answers }) = entry.decision().map(|d| &d.outcome) else {
        return false;
    };
    answers.values().any(|answer| matches!(answer, Answer::Hidden))
}

/// What an acknowledgement proves. `named` is the entry as it was at the revision that the call
/// names; where it had no outcome yet, nothing is proven (rules P1, P2).
pub fn acknowledged(named: &Entry) -> Option<Returned> {
    (!named.is_pending()).then(|| Returned::Delivered { proof: "acknowledged".into() })
}

/// What a tool result in the Gateway's events proves. `secret` is the value of a sealed answer.
pub fn seen_in_result(entry: &Entry, secret: Option<&str>, result: &str) -> Option<Returned> {
    let shown = match secret {
        // The plugin's result holds a handle instead.
        Some(secret) => entry.road == Road::Mcp && has_as_lines(result, secret),
        None => shows(result, &tool_result(entry)?.text, entry.road),
    };
    shown.then(|| Returned::Delivered { proof: "tool_result".into() })
}

/// Whether a result is what its call was told. MCP results come wrapped in lines of the Gateway.
fn shows(result: &str, told: &str, road: Road) -> bool {
    match road {
        Road::Mcp => has_as_lines(result, told),
        _ => result == told,
    }
}

/// Whether `text` makes up whole lines of `result`: a short answer may be in any error message.
fn has_as_lines(result: &str, text: &str) -> bool {
    let text = text.trim();
    !text.is_empty()
        && result.match_indices(text).any(|(at, _)| {
            let (before, after) = (&result[..at], &result[at + text.len()..]);
            (before.is_empty() || before.ends_with('\n'))
                && (after.is_empty() || after.starts_with(['\r', '\n']))
        })
}

/// What is left to do about this entry when its call is known to be gone (rule P3).
pub fn gone(entry: &Entry, why: &str) -> Gone {
    match entry.state {
        State::Pending => Gone::CancelFirst,
        State::Decided { .. } => Gone::Close(Returned::Unconfirmed { why: why.into() }),
        State::Returned { .. } => Gone::Nothing,
    }
}

/// When a decided question is closed without any word of its call, and why. `written`: when this
/// process last wrote the whole response for a client that can't prove receipt; after the time in
/// which it would come again, it has it or has given up. Where nobody knows of a response, outcome
/// and secret wait to the retention limit (rules P5, P6).
pub fn closes_by_itself(entry: &Entry, written: Option<Timestamp>) -> Option<(Timestamp, &'static str)> {
    let State::Decided { decision } = &entry.state else {
        return None;
    };
    let is_unprovable = entry.road == Road::McpAlone;
    match written.filter(|_| is_unprovable) {
        Some(written) => Some((written.plus(RETRY_WINDOW), NO_PROOF)),
        None if is_unprovable || entry.holds_secret() => Some((decision.at.plus(KEPT), EXPIRED)),
        None => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::entry::Verdict;
    use crate::question::{Prompt, Question};
    use crate::reply::{Reply, ReplyContent, Responder, Sealed};
    use crate::surface::Surface;

    fn pending(road: Road, secret: bool) -> Entry {
        let question = Question::new(vec![Prompt { secret, ..Prompt::free_text("Where?") }]).unwrap();
        let key = "g.s.r.q".parse().unwrap();
        Entry::ask(key, road, "t", "c", question, Timestamp(1), Timestamp(9), None).unwrap()
    }

    fn answered(road: Road, secret: bool) -> Entry {
        let by = Responder { user: "alice".into(), name: None, chat: None };
        let sealed = Sealed { key_id: "k".into(), encapsulated: "e".into(), ciphertext: "c".into() };
        let answer = if secret { Answer::Sealed(sealed) } else { Answer::text("here") };
        let content = ReplyContent::Answers { answers: [("answer".into(), answer)].into() };
        let reply = Reply { id: "r1".into(), by, surface: Surface::Card, content };
        let Verdict::Decide(entry) = pending(road, secret).reply(&reply, Timestamp(2)) else { panic!() };
        *entry
    }

    fn delivered(proof: &str) -> Option<Returned> {
        Some(Returned::Delivered { proof: proof.into() })
    }

    #[test]
    fn p1_p2_an_acknowledgement_proves_only_an_outcome() {
        assert_eq!(acknowledged(&pending(Road::Plugin, false)), None);
        assert_eq!(acknowledged(&answered(Road::Plugin, false)), delivered("acknowledged"));
    }

    #[test]
    fn p1_p2_a_tool_result_proves_what_it_shows() {
        let table = [
            (Road::Plugin, false, None, "here", true),
            (Road::Plugin, false, None, "here and more", false),
            (Road::Mcp, false, None, "here", true),
            (Road::Mcp, false, None, "<<<begin>>>\n---\nhere\n<<<end>>>", true),
            (Road::Mcp, false, None, "<<<begin>>>\n---\nthere is no answer here\n<<<end>>>", false),
            (Road::Mcp, false, None, "else", false),
            (Road::Mcp, true, Some("hunter2"), "---\r\nhunter2\r\n<<<end>>>", true),
            (Road::Plugin, true, Some("hunter2"), "hunter2", false),
        ];
        for (road, secret, value, result, proves) in table {
            let seen = seen_in_result(&answered(road, secret), value, result);
            assert_eq!(seen, delivered("tool_result").filter(|_| proves), "{road:?} {result}");
        }
        assert_eq!(seen_in_result(&pending(Road::Plugin, false), None, "here"), None);
    }

    #[test]
    fn p3_a_call_that_is_gone_cancels_what_is_pending_and_closes_what_is_decided() {
        let unconfirmed = Returned::Unconfirmed { why: "run_ended".into() };
        let decided = answered(Road::Plugin, false);
        let closed = decided.close(unconfirmed.clone(), Timestamp(3)).unwrap();
        assert_eq!(gone(&pending(Road::Plugin, false), "run_ended"), Gone::CancelFirst);
        assert_eq!(gone(&decided, "run_ended"), Gone::Close(unconfirmed));
        assert_eq!(gone(&closed, "run_ended"), Gone::Nothing);
    }

    #[test]
    fn p5_a_secret_that_is_out_of_reach_is_never_told_as_an_answer() {
        let decided = answered(Road::Plugin, true);
        assert_eq!(told(&decided).unwrap().secret_prompt.as_deref(), Some("answer"));
        let closed = decided.close(Returned::Unconfirmed { why: "expired".into() }, Timestamp(3)).unwrap();
        assert_eq!(told(&closed), tool_result(&without_secret(&decided)));
        assert_eq!(told(&closed).unwrap().details["reason"], "expired_secret");
        assert_eq!(told(&pending(Road::Plugin, true)), None);
        assert_eq!(told(&answered(Road::Plugin, false)).unwrap().text, "here");
    }

    #[test]
    fn p6_only_what_nobody_can_prove_or_fetch_any_more_is_closed_by_time() {
        let at = |from: u64, kept: Duration| Timestamp(from).plus(kept);
        let written = Some(Timestamp(9));
        let limit = Some((at(2, KEPT), EXPIRED));
        let no_proof = Some((at(9, RETRY_WINDOW), NO_PROOF));
        let table = [
            (answered(Road::Plugin, false), None, None),
            (answered(Road::Mcp, false), None, None),
            (answered(Road::Plugin, true), None, limit),
            (answered(Road::Mcp, true), written, limit),
            // However long it takes the client to fetch it.
            (answered(Road::McpAlone, true), None, limit),
            (answered(Road::McpAlone, false), None, limit),
            (answered(Road::McpAlone, true), written, no_proof),
            (answered(Road::McpAlone, false), written, no_proof),
            (pending(Road::McpAlone, false), written, None),
        ];
        for (entry, written, closes) in table {
            assert_eq!(closes_by_itself(&entry, written), closes, "{:?} {written:?}", entry.road);
        }
    }
}
