//! The life of a question as its entry tells it.

use ask_core::entry::{DecidedBy, Entry, Road, State, StepKind};
use ask_core::outcome::{Delivered, Outcome, Returned, Seen};
use ask_core::question::Question;
use ask_core::reply::Answer;
use ask_core::surface::Surface;
use ask_core::time::Timestamp;
use serde::Serialize;
use serde_json::Value;

use crate::terminal::{duration, plain, table};

const LONGEST_TEXT: usize = 100;

/// One thing that happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Row {
    pub at: Timestamp,
    pub step: &'static str,
    pub what: String,
}

/// All that the entry says, in order of time.
pub fn rows(entry: &Entry) -> Vec<Row> {
    let mut rows = vec![Row { at: entry.asked_at, step: "asked", what: asked(entry) }];
    for step in &entry.steps {
        let (name, what) = match &step.what {
            StepKind::Surface { surface, rule } => ("surface", surface_words(*surface, rule)),
            StepKind::Delivered { surface, chat } => {
                let chat = chat.as_ref().map(|chat| format!(", chat {chat}")).unwrap_or_default();
                ("delivered", format!("{}{chat}", surface.name()))
            }
            StepKind::Refused { surface, reason } => ("refused", format!("{}: {reason}", surface.name())),
            StepKind::Corrected { why } => ("corrected", why.clone()),
            StepKind::Message { message, rule } => ("message", format!("{message}, by rule {rule}")),
        };
        rows.push(Row { at: step.at, step: name, what: plain(&what, LONGEST_TEXT) });
    }
    if let Some(decision) = entry.decision() {
        let by = match &decision.by {
            DecidedBy::Reply { responder, surface, .. } => {
                format!("by {} on {}", responder.display_name(), surface.name())
            }
            DecidedBy::Record { question, responder } => {
                format!("by {}, from the record of {question}", responder.display_name())
            }
            DecidedBy::Rule { name } => format!("by rule {name}"),
        };
        let known = match (decision.delivered, decision.seen) {
            (_, Seen::Yes) => "",
            (Delivered::Yes, Seen::Unknown) => "; it was delivered",
            (Delivered::No, Seen::Unknown) => "; it was not delivered",
            (Delivered::Unknown, Seen::Unknown) => "; not known whether it was delivered",
        };
        let outcome = outcome(&entry.question, &decision.outcome);
        let what = format!("{} {by}{known}", plain(&outcome, LONGEST_TEXT));
        rows.push(Row { at: decision.at, step: "decided", what: plain(&what, 2 * LONGEST_TEXT) });
    }
    if let State::Returned { returned, returned_at, .. } = &entry.state {
        let what = match returned {
            Returned::Delivered { proof } => format!("the agent has it ({proof})"),
            Returned::Overruled { by, outcome: other } => format!(
                "overruled by {}: {}",
                by.as_deref().unwrap_or("the gateway"),
                outcome(&entry.question, other)
            ),
            Returned::Unconfirmed { why } => format!("not known whether the agent has it: {why}"),
        };
        rows.push(Row { at: *returned_at, step: "returned", what: plain(&what, LONGEST_TEXT) });
    }
    for late in &entry.late {
        let what = format!("a reply by {} on {}", late.responder.display_name(), late.surface.name());
        rows.push(Row { at: late.at, step: "too late", what: plain(&what, LONGEST_TEXT) });
    }
    rows.sort_by_key(|row| row.at);
    rows
}

/// A choice of a surface, in the words of a row.
pub fn surface_words(surface: Surface, rule: &str) -> String {
    plain(&format!("{}, by rule {rule}", surface.name()), LONGEST_TEXT)
}

/// The rows as a table: time since the question was asked, time since the row before, what.
pub fn render(entry: &Entry) -> String {
    let mut lines = vec![["TIME", "AFTER", "STEP", ""].map(str::to_owned).to_vec()];
    let mut before: Option<Timestamp> = None;
    for row in rows(entry) {
        let after = before.map(|before| duration(row.at.since(before))).unwrap_or_default();
        let time = format!("{:.3} s", row.at.since(entry.asked_at).as_secs_f64());
        lines.push(vec![time, after, row.step.into(), row.what]);
        before = Some(row.at);
    }
    let mut text = table(2, &lines);
    let more = entry.late_count.saturating_sub(entry.late.len() as u64);
    if more > 0 {
        text.push_str(&format!("  {more} more replies came too late\n"));
    }
    text
}

/// How far a question is, in a word or two.
pub fn state(entry: &Entry) -> String {
    match &entry.state {
        State::Pending => "pending".into(),
        State::Decided { decision } => format!("{}, returning", decision.outcome.status()),
        State::Returned { decision, returned, .. } => match returned {
            Returned::Delivered { .. } => decision.outcome.status().into(),
            Returned::Overruled { outcome, .. } => format!("overruled, {}", outcome.status()),
            Returned::Unconfirmed { .. } => format!("{}, unconfirmed", decision.outcome.status()),
        },
    }
}

/// Where it is or was shown: the last surface that it reached, else the last one chosen.
pub fn surface(entry: &Entry) -> &'static str {
    let reached = entry.steps.iter().rev().find_map(|step| match &step.what {
        StepKind::Delivered { surface, .. } => Some(surface.name()),
        _ => None,
    });
    let chosen = entry.steps.iter().rev().find_map(|step| match &step.what {
        StepKind::Surface { surface, .. } => Some(surface.name()),
        _ => None,
    });
    reached.or(chosen).unwrap_or("-")
}

/// An outcome with its answers; secrets are never in it.
pub fn outcome(question: &Question, outcome: &Outcome) -> String {
    match outcome {
        Outcome::Answered { answers } => {
            let each = answers.iter().filter_map(|(id, answer)| {
                let shown = match answer {
                    Answer::Given { .. } => format!("\"{}\"", answer.display(question.prompt(id)?)),
                    Answer::Sealed(_) | Answer::Hidden => "(hidden)".into(),
                };
                Some(if question.prompts.len() == 1 { shown } else { format!("{id}: {shown}") })
            });
            format!("answered {}", each.collect::<Vec<_>>().join(", "))
        }
        Outcome::Cancelled { reason } => format!("cancelled ({})", word(reason)),
        Outcome::Undeliverable { reason } => format!("undeliverable ({})", word(reason)),
        Outcome::Declined | Outcome::Expired => outcome.status().into(),
    }
}

pub fn road(road: Road) -> &'static str {
    match road {
        Road::Native => "the gateway's own question",
        Road::Plugin => "plugin",
        Road::Mcp => "mcp",
        Road::McpAlone => "mcp, without a chat",
    }
}

fn asked(entry: &Entry) -> String {
    let kind = match entry.question.prompts.as_slice() {
        [prompt] if prompt.secret => "a secret".into(),
        [prompt] if prompt.options.is_empty() => "free text".into(),
        [prompt] => format!("{} options", prompt.options.len()),
        prompts => format!("{} prompts", prompts.len()),
    };
    let limit = duration(entry.deadline.since(entry.asked_at));
    plain(&format!("by {} ({}), {kind}, within {limit}", entry.tool, road(entry.road)), LONGEST_TEXT)
}

/// The word by which a value is known on the bus.
fn word(value: &impl Serialize) -> String {
    match serde_json::to_value(value) {
        Ok(Value::String(word)) => word,
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use ask_core::entry::{Step, Verdict};
    use ask_core::outcome::{CancelReason, Undeliverable};
    use ask_core::question::{Choice, Prompt};
    use ask_core::reply::{Reply, ReplyContent, Responder, Sealed};

    use super::*;

    fn at(ms: u64) -> Timestamp {
        Timestamp(1_000_000 + ms)
    }

    fn asked(change: impl Fn(&mut Prompt)) -> Entry {
        let mut prompt =
            Prompt { options: ["A", "B"].map(Choice::label).into(), ..Prompt::free_text("Which?") };
        change(&mut prompt);
        let question = Question::new(vec![prompt]).unwrap();
        let key = "g.s.r.q".parse().unwrap();
        let deadline = at(0).plus(Duration::from_secs(300));
        Entry::ask(key, Road::Plugin, "request_user_input", "c", question, at(0), deadline, None).unwrap()
    }

    fn shown(entry: &Entry, surface: Surface) -> Entry {
        let rule = "live_card".to_owned();
        let steps = [
            Step { at: at(4), what: StepKind::Surface { surface, rule } },
            Step { at: at(410), what: StepKind::Delivered { surface, chat: Some("c1".into()) } },
        ];
        entry.note(&steps).unwrap()
    }

    fn reply(entry: &Entry, id: &str, content: ReplyContent, ms: u64) -> Entry {
        let by = Responder { user: "u1".into(), name: Some("Alice".into()), chat: None };
        let reply = Reply { id: id.into(), by, surface: Surface::Card, content };
        match entry.reply(&reply, at(ms)) {
            Verdict::Decide(next) | Verdict::Late(next) => *next,
            other => panic!("{other:?}"),
        }
    }

    fn answer(answer: Answer) -> ReplyContent {
        ReplyContent::Answers { answers: [("answer".into(), answer)].into() }
    }

    #[test]
    fn a_life_is_told_in_order_with_times_and_durations() {
        let entry = shown(&asked(|_| ()), Surface::Card);
        let entry = reply(&entry, "r1", answer(Answer::option(1)), 2_410);
        let entry = reply(&entry, "r2", ReplyContent::Declined, 2_600);
        let entry = entry.close(Returned::Delivered { proof: "acknowledged".into() }, at(2_500)).unwrap();
        let expected = "
  TIME     AFTER   STEP
  0.000 s          asked      by request_user_input (plugin), 2 options, within 5 min 0 s
  0.004 s  4 ms    surface    card, by rule live_card
  0.410 s  406 ms  delivered  card, chat c1
  2.410 s  2.0 s   decided    answered \"B\" by Alice on card
  2.500 s  90 ms   returned   the agent has it (acknowledged)
  2.600 s  100 ms  too late   a reply by Alice on card
";
        assert_eq!(format!("\n{}", render(&entry)), expected);
        assert_eq!((state(&entry).as_str(), surface(&entry)), ("answered", "card"));
    }

    #[test]
    fn every_end_has_its_words() {
        let secret = shown(
            &asked(|p| {
                p.options.clear();
                p.secret = true;
            }),
            Surface::Masked,
        );
        let sealed = Sealed { key_id: "k".into(), encapsulated: "e".into(), ciphertext: "hunter2".into() };
        let secret = reply(&secret, "r1", answer(Answer::Sealed(sealed)), 900);
        let expired = asked(|_| ()).expire(false, at(300_000)).unwrap();
        let nobody = asked(|_| ());
        let nobody = nobody.undeliverable(Undeliverable::NoFrontEnd, "no_front_end_was_ever_bound", at(1));
        let cancelled =
            reply(&asked(|_| ()), "r1", ReplyContent::Cancelled { reason: CancelReason::Operator }, 5);
        let unconfirmed =
            cancelled.close(Returned::Unconfirmed { why: "gateway_unreachable".into() }, at(9)).unwrap();
        let overruled = reply(&asked(|_| ()), "r1", answer(Answer::text("C")), 5);
        let gateway = Outcome::Answered { answers: [("answer".into(), Answer::option(0))].into() };
        let overruled = overruled
            .close(Returned::Overruled { by: Some("control-ui".into()), outcome: gateway }, at(9))
            .unwrap();
        let table = [
            (asked(|_| ()), "pending", ""),
            (secret, "answered, returning", "answered (hidden) by Alice on card"),
            (expired, "expired, returning", "expired by rule deadline; not known whether it was delivered"),
            (
                nobody.unwrap(),
                "undeliverable, returning",
                "undeliverable (no_front_end) by rule no_front_end_was_ever_bound; it was not delivered",
            ),
            (
                cancelled,
                "cancelled, returning",
                "cancelled (operator) by Alice on card; not known whether it was delivered",
            ),
            (
                unconfirmed,
                "cancelled, unconfirmed",
                "not known whether the agent has it: gateway_unreachable",
            ),
            (overruled, "overruled, answered", "overruled by control-ui: answered \"A\""),
        ];
        for (entry, word, last) in table {
            assert_eq!(state(&entry), word);
            assert!(rows(&entry).last().unwrap().what.contains(last), "{}", render(&entry));
        }
    }

    #[test]
    fn what_comes_from_people_can_not_steer_the_terminal() {
        let entry = reply(&asked(|_| ()), "r1", answer(Answer::text("\u{1b}[2Jx")), 5);
        assert!(!render(&entry).contains('\u{1b}'));
    }
}
