//! The checker: a pure function over what was recorded.

use std::collections::{BTreeMap, BTreeSet};

use ask_core::entry::{DecidedBy, Decision, Entry, Road, State};
use ask_core::outcome::{CancelReason, Outcome, Returned, Undeliverable};
use ask_core::reply::Answer;
use ask_core::result::tool_result;
use ask_core::session::MessageDecision;
use ask_core::surface::Surface;
use serde::Serialize;
use serde_json::Value;

use crate::history::{Call, Content, History, Life, Part, Row, SessionHistory, Submitted, Written};

/// How long after its deadline a question may still be pending when nothing is away.
const OVERDUE_MS: u64 = 20_000;
/// How long after its deadline a question may still be decided when nothing is away: one write that
/// fails by its timeout (5 s), the pause before the next one (0.5 s), the time by which replicas
/// expire apart (0.1 s), and 2.4 s in which a busy machine may not get to it.
const LATE_MS: u64 = 8_000;
/// How long a router may take to hear what another has decided.
const BEHIND_MS: u64 = 2_000;
/// How far the clocks of the server and of the front ends may differ; they are one machine's.
const CLOCKS_MS: u64 = 2;

/// In which way something is wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// Something did not arrive.
    Lost,
    /// Something happened twice.
    Doubled,
    /// Something went where it does not belong.
    Misrouted,
    /// Somebody was told what is not so.
    Untrue,
}

/// One thing that is wrong.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// In which way.
    pub kind: Kind,
    /// In which session.
    pub session: String,
    /// What.
    pub what: String,
    /// It may only not have happened yet.
    pub heals: bool,
}

/// Everything that is wrong in a history.
pub fn check(history: &History) -> Vec<Finding> {
    let mut all = Vec::new();
    for session in &history.sessions {
        let mut check = Check { history, session, found: Vec::new() };
        check.questions();
        check.calls();
        check.replies();
        check.messages();
        check.late_answers();
        check.order();
        check.stops();
        for what in &session.complaints {
            check.found(Kind::Untrue, false, what.clone());
        }
        for what in &session.waiting {
            check.found(Kind::Lost, true, what.clone());
        }
        all.append(&mut check.found);
    }
    all
}

struct Check<'a> {
    history: &'a History,
    session: &'a SessionHistory,
    found: Vec<Finding>,
}

impl<'a> Check<'a> {
    fn found(&mut self, kind: Kind, heals: bool, what: String) {
        self.found.push(Finding { kind, session: self.session.session.clone(), what, heals });
    }

    fn life(&self, question: &str) -> Option<&'a Life> {
        self.session.lives.iter().find(|life| life.text() == question)
    }

    /// The life of the question with this id.
    fn life_of(&self, id: &str) -> Option<&'a Life> {
        let has_id = |life: &&Life| life.last().is_some_and(|last| last.entry.key.question == id);
        self.session.lives.iter().find(has_id)
    }

    fn restarted(&self) -> bool {
        self.history.gateway_restarted_ms.is_some()
    }

    /// Its runs may have ended before they had everything.
    fn interrupted(&self) -> bool {
        self.session.aborted || self.restarted() || !self.session.stops.is_empty()
    }

    /// The run that asked this may have ended before it had everything.
    fn cut_short(&self, entry: &Entry) -> bool {
        let restarted = self.history.gateway_restarted_ms.is_some_and(|at| entry.asked_at.0 <= at);
        self.session.aborted || restarted || !self.session.stops.is_empty()
    }

    /// Whether something that was broken can have kept the proof from the record.
    fn may_be_unconfirmed(&self, entry: &Entry, why: &str) -> bool {
        let way_back = [Part::Adapter, Part::Nats, Part::Gateway];
        let broken = way_back.iter().any(|part| self.history.broken.contains(part));
        match why {
            "gateway_restart" => self.restarted(),
            "run_ended" | "caller_cancelled" | "question_not_found" | "gateway_unreachable" => {
                broken || self.cut_short(entry)
            }
            _ => false,
        }
    }

    fn questions(&mut self) {
        let mut asked: BTreeMap<&str, usize> = BTreeMap::new();
        for life in &self.session.lives {
            *asked.entry(life.text()).or_default() += 1;
        }
        for (text, count) in asked {
            // A Gateway that was restarted asks again, in a new run.
            if count > 1 && !self.restarted() {
                self.found(Kind::Doubled, false, format!("\"{text}\" was asked {count} times"));
            }
        }
        for text in &self.session.shown {
            if self.life(text).is_none() {
                self.found(Kind::Lost, false, format!("\"{text}\" was shown and is not on record"));
            }
        }
        for life in &self.session.lives {
            self.one_outcome(life);
            if let Some(last) = life.last() {
                self.end_of(life, last);
            }
        }
    }

    /// Every value of an entry has the same decision, or none yet.
    fn one_outcome(&mut self, life: &Life) {
        let text = life.text();
        let mut known: Option<Decision> = None;
        let mut revision = 0;
        let mut returned = 0;
        for written in &life.values {
            if written.revision <= revision {
                self.found(Kind::Doubled, false, format!("\"{text}\" has a revision twice"));
            }
            revision = written.revision;
            returned += usize::from(matches!(written.entry.state, State::Returned { .. }));
            match (&known, written.entry.decision().map(hidden)) {
                (Some(_), None) => {
                    self.found(Kind::Doubled, false, format!("\"{text}\" was decided and is pending again"));
                }
                (Some(then), Some(now)) if *then != now => {
                    let what = format!(
                        "\"{text}\" has two outcomes: {} by {:?}, then {} by {:?}",
                        then.outcome.status(),
                        then.by,
                        now.outcome.status(),
                        now.by
                    );
                    self.found(Kind::Doubled, false, what);
                    known = Some(now);
                }
                (_, now) => known = now,
            }
        }
        // Steps and late replies may be noted after the return.
        let changed = life.values.iter().filter_map(|w| w.entry.returned()).collect::<Vec<_>>();
        if returned > 1 && changed.windows(2).any(|pair| pair[0] != pair[1]) {
            self.found(Kind::Doubled, false, format!("\"{text}\" was returned in two ways"));
        }
    }

    fn end_of(&mut self, life: &Life, last: &Written) {
        let (text, entry) = (life.text(), &last.entry);
        let Some(decision) = entry.decision() else {
            let due = entry.deadline.0 + OVERDUE_MS + self.history.outage_ms;
            let (heals, since) = match self.history.read_ms > due {
                true => (false, "long past its deadline"),
                false => (true, "still"),
            };
            self.found(Kind::Lost, heals, format!("\"{text}\" is pending {since}"));
            return;
        };
        self.decided_by(life, entry, decision);
        match entry.returned() {
            None => self.found(
                Kind::Lost,
                true,
                format!("\"{text}\" is {} and was not returned", decision.outcome.status()),
            ),
            Some(Returned::Delivered { proof }) => {
                self.agent_has(life, &decision.outcome, &format!("returned by proof \"{proof}\""));
            }
            Some(Returned::Overruled { outcome, .. }) => self.agent_has(life, outcome, "overruled"),
            Some(Returned::Unconfirmed { why }) => {
                if !self.may_be_unconfirmed(entry, why) {
                    let what = format!("\"{text}\" is unconfirmed ({why}) though nothing was interrupted");
                    self.found(Kind::Lost, false, what);
                }
                // Nothing proves that the call has it; where it has something, it is this.
                if !self.cut_short(entry) {
                    self.agent_has(life, &decision.outcome, &format!("unconfirmed ({why})"));
                }
            }
        }
    }

    /// The one who decided did submit this.
    fn decided_by(&mut self, life: &Life, entry: &Entry, decision: &Decision) {
        let text = life.text();
        if let Some(when) = self.wrong_time(life, entry, decision) {
            self.found(Kind::Misrouted, false, format!("\"{text}\" is {} {when}", decision.outcome.status()));
        }
        let wrong = match &decision.by {
            DecidedBy::Reply { surface: Surface::Gateway, .. } => {
                self.wrong_by_gateway(text, entry, decision)
            }
            DecidedBy::Reply { id, surface: Surface::Message, .. } => {
                self.wrong_by_message(id, entry, decision)
            }
            DecidedBy::Reply { id, responder, .. } => {
                let submitted = self.session.replies.iter().find(|reply| reply.id == *id);
                match submitted {
                    None => Some(format!("by the reply {id} that nobody sent")),
                    Some(reply) if reply.user != self.session.owner => {
                        Some(format!("by {}, who is not the owner", reply.user))
                    }
                    Some(reply) if responder.user != reply.user || reply.to != entry.key.question => {
                        Some(format!("by a reply of {} to \"{}\"", reply.user, reply.question))
                    }
                    Some(reply) if !says(reply, entry, &decision.outcome) => {
                        Some("and its reply said something else".into())
                    }
                    Some(_) => None,
                }
            }
            DecidedBy::Record { question, .. } => self.wrong_by_record(question, entry, decision),
            DecidedBy::Rule { name } if name == "deadline" => self.wrong_by_deadline(life, decision),
            DecidedBy::Rule { name } if name == "stop" => {
                self.session.stops.is_empty().then(|| "by Stop, which nobody pressed".into())
            }
            DecidedBy::Rule { name } if name == "too_many_pending_in_the_run" => {
                self.wrong_by_limit(entry, decision)
            }
            DecidedBy::Rule { name } => Some(format!("by the rule {name}, for which there was no reason")),
        };
        if let Some(why) = wrong {
            let what = format!("\"{text}\" is {} {why}", decision.outcome.status());
            self.found(Kind::Misrouted, false, what);
        }
    }

    /// Nothing expires early and nothing is decided long after its deadline, by the server's clock
    /// and by the decider's.
    fn wrong_time(&self, life: &Life, entry: &Entry, decision: &Decision) -> Option<String> {
        let written_ms = first_decided(life).map_or(decision.at.0, |written| written.at_ms);
        let (deadline, at) = (entry.deadline.0, decision.at.0);
        if at > written_ms + CLOCKS_MS {
            return Some(format!("{} ms after it was written", at - written_ms));
        }
        let is_by_deadline = matches!(&decision.by, DecidedBy::Rule { name } if name == "deadline");
        let expired = is_by_deadline || decision.outcome == Outcome::Expired;
        if expired && at.min(written_ms + CLOCKS_MS) < deadline {
            return Some("before its deadline".into());
        }
        let late = written_ms > deadline + LATE_MS + self.history.outage_ms;
        late.then(|| format!("long after its deadline ({} ms)", written_ms - deadline))
    }

    /// Rule R1: the same was asked before, answered by its owner, and lost with the Gateway.
    fn wrong_by_record(&self, question: &str, entry: &Entry, decision: &Decision) -> Option<String> {
        let mut firsts = self.session.lives.iter().filter_map(Life::last).map(|written| &written.entry);
        let Some(first) = firsts.find(|first| first.key.question == question) else {
            return Some(format!("from {question}, which is not on record"));
        };
        let lost = matches!(first.returned(), Some(Returned::Unconfirmed { .. }));
        let same = first.question == entry.question
            && first.decision().is_some_and(|then| {
                then.outcome == decision.outcome && matches!(then.by, DecidedBy::Reply { .. })
            });
        let given = first.given_again.as_ref() == Some(&entry.key.to_string());
        match (lost && self.restarted(), same, given) {
            (false, ..) => Some("from the record, though no call was lost".into()),
            (_, false, _) => Some("from the record with another answer or for another question".into()),
            (.., false) => Some("from the record, which has given it to another".into()),
            _ => None,
        }
    }

    /// Rule R2: so many of the same run waited, asked before it.
    fn wrong_by_limit(&self, entry: &Entry, decision: &Decision) -> Option<String> {
        if decision.outcome != (Outcome::Undeliverable { reason: Undeliverable::TooManyPending }) {
            return Some("by a limit".into());
        }
        let others = self.session.lives.iter().filter(|life| {
            let Some(other) = life.last().map(|written| &written.entry) else { return false };
            let until = first_decided(life).map_or(u64::MAX, |written| written.at_ms);
            other.key != entry.key
                && other.key.run == entry.key.run
                && other.asked_at <= entry.asked_at
                && until.saturating_add(BEHIND_MS + self.history.outage_ms) > decision.at.0
        });
        let waited = others.count();
        (waited < self.history.per_run).then(|| format!("as one too many, and {waited} waited"))
    }

    fn wrong_by_gateway(&self, text: &str, entry: &Entry, decision: &Decision) -> Option<String> {
        let local = || self.session.local.iter().filter(|local| local.question == text && local.accepted);
        match &decision.outcome {
            Outcome::Answered { .. } => {
                let values = values(entry, &decision.outcome);
                let given = local().any(|local| local.values.as_ref() == Some(&values));
                // The window that rule S8 leaves open.
                let took = self.session.rows.iter().any(|row| row.aside && values.contains(&row.text));
                (!given && !took)
                    .then(|| format!("by the gateway with {values:?}, which nobody answered there"))
            }
            Outcome::Cancelled { reason: CancelReason::User } => local()
                .all(|local| local.values.is_some())
                .then(|| "by the gateway, where nobody skipped it".into()),
            Outcome::Cancelled { .. } => {
                (!self.cut_short(entry)).then(|| "by the gateway, where nothing was interrupted".into())
            }
            Outcome::Expired => None,
            _ => Some("by the gateway".into()),
        }
    }

    fn wrong_by_message(&self, id: &str, entry: &Entry, decision: &Decision) -> Option<String> {
        let message = id.strip_prefix("message-").unwrap_or_default();
        let Some(said) = self.session.said.iter().find(|said| said.message == message) else {
            return Some(format!("by the message {message} that nobody sent"));
        };
        let values = values(entry, &decision.outcome);
        (values != [said.text.as_str()])
            .then(|| format!("with {values:?} by a message that said \"{}\"", said.text))
    }

    fn wrong_by_deadline(&self, life: &Life, decision: &Decision) -> Option<String> {
        match decision.outcome {
            Outcome::Expired => None,
            Outcome::Undeliverable { reason: Undeliverable::NeverShown } => {
                let shown = self.session.shown.iter().any(|shown| shown == life.text());
                shown.then(|| "as never shown, and it was shown".into())
            }
            _ => Some("by its deadline".into()),
        }
    }

    /// What the agent got is this outcome.
    fn agent_has(&mut self, life: &Life, outcome: &Outcome, how: &str) {
        let (text, Some(last)) = (life.text(), life.last()) else { return };
        let got: Vec<&Call> = self.session.calls.iter().filter(|call| call.question == text).collect();
        let aborted = |call: &&&Call| call.is_error && call.text == "Aborted";
        let Some(call) = got.iter().find(|call| !aborted(call)) else {
            if !self.cut_short(&last.entry) {
                let what = format!("\"{text}\" is {how}, and its call has got nothing");
                self.found(Kind::Lost, true, what);
            }
            return;
        };
        if let Some(why) = self.other_result(call, &last.entry, outcome) {
            self.found(Kind::Misrouted, false, format!("\"{text}\" is {how}, and its call got {why}"));
        }
    }

    fn other_result(&self, call: &Call, entry: &Entry, outcome: &Outcome) -> Option<String> {
        if entry.road == Road::Mcp {
            let told = tool_result(entry).is_some_and(|told| told.text == call.text);
            return (!told).then(|| call.text.clone());
        }
        let status = call.details["status"].as_str().unwrap_or_default();
        let got = || Some(format!("{} {}", call.details, call.text));
        let Outcome::Answered { answers } = outcome else {
            let told = match entry.road {
                Road::Native => "no_answer",
                _ => outcome.status(),
            };
            return (status != told).then(got)?;
        };
        if status != "answered" {
            return got();
        }
        let from_record = match entry.decision().map(|decision| &decision.by) {
            Some(DecidedBy::Record { question, .. }) => Value::from(question.as_str()),
            _ => Value::Null,
        };
        if call.details["from_record"] != from_record {
            return got();
        }
        let prompt = entry.question.prompts.first()?;
        let secret = answers.values().any(|answer| matches!(answer, Answer::Sealed(_) | Answer::Hidden));
        if secret {
            let Some(DecidedBy::Reply { id, .. }) = entry.decision().map(|decision| &decision.by) else {
                return got();
            };
            let sent = self.session.replies.iter().find(|reply| reply.id == *id).map(|reply| &reply.content);
            let same = matches!(sent, Some(Content::Secret(secret)) if call.secret.as_ref() == Some(secret));
            return (!same).then(|| "another secret".into());
        }
        let given = match entry.road {
            Road::Native => &call.details["answers"]["answers"][&prompt.id],
            _ => &call.details["answers"][&prompt.id],
        };
        (*given != Value::from(values(entry, outcome))).then(got)?
    }

    /// Each call got one outcome, of its own question.
    fn calls(&mut self) {
        let mut seen = BTreeSet::new();
        for call in &self.session.calls {
            let text = &call.question;
            if !seen.insert(text) && !self.restarted() {
                self.found(Kind::Doubled, false, format!("the call of \"{text}\" got two results"));
            }
            if call.is_error && call.text == "Aborted" {
                if !self.interrupted() {
                    self.found(Kind::Lost, false, format!("the call of \"{text}\" was aborted by nobody"));
                }
                continue;
            }
            if call.is_error {
                self.found(Kind::Lost, false, format!("the call of \"{text}\" failed: {}", call.text));
            } else if self.life(text).is_none() && call.tool == "request_user_input" {
                let what = format!("the call of \"{text}\" got {} and is not on record", call.details);
                self.found(Kind::Misrouted, false, what);
            }
        }
    }

    fn replies(&mut self) {
        for reply in &self.session.replies {
            let text = &reply.question;
            let life = self.life_of(&reply.to);
            let Some(last) = life.and_then(Life::last) else {
                self.found(Kind::Lost, true, format!("\"{text}\" was replied to and is not on record"));
                continue;
            };
            let winner = last.entry.decision().map(|decision| &decision.by);
            let won = matches!(winner, Some(DecidedBy::Reply { id, .. }) if *id == reply.id);
            let is_owner = reply.user == self.session.owner;
            if reply.told.is_empty() {
                self.found(Kind::Lost, true, format!("{} heard nothing about \"{text}\"", reply.user));
            }
            for told in &reply.told {
                let heard = format!("{} heard \"{}\" about \"{text}\"", reply.user, told.result);
                let untrue = match (told.result.as_str(), is_owner) {
                    ("wrong_user", false) => continue,
                    (_, false) | ("wrong_user", true) => Some(format!("{heard}, as no owner should")),
                    ("saved", true) if !won => Some(format!("{heard}, and the winner is {winner:?}")),
                    ("saved", true) => {
                        let decided = life.and_then(first_decided).map_or(0, |written| written.at_ms);
                        let early = told.at_ms + CLOCKS_MS < decided;
                        early.then(|| format!("{heard} {} ms before it was", decided - told.at_ms))
                    }
                    ("already_answered" | "closed", true) if won => Some(format!("{heard}, and has won")),
                    ("already_answered" | "closed", true) => match (winner, &told.by) {
                        (None, _) => Some(format!("{heard}, and it is pending")),
                        (Some(DecidedBy::Reply { responder, .. }), Some(by))
                            if responder.display_name() != by && last.entry.returned().is_none() =>
                        {
                            Some(format!("{heard} by {by}, and it was {}", responder.display_name()))
                        }
                        _ => None,
                    },
                    (other, true) => Some(format!("{heard} ({} {other})", told.status)),
                };
                if let Some(what) = untrue {
                    self.found(Kind::Untrue, false, what);
                }
                let is_late =
                    is_owner && !won && matches!(told.result.as_str(), "already_answered" | "closed");
                let sent_on =
                    is_late && self.history.late_as_message && matches!(reply.content, Content::Values(_));
                if told.as_message != sent_on {
                    let what = format!("{heard}, and that it went as a message: {}", told.as_message);
                    self.found(Kind::Untrue, false, what);
                }
                if sent_on {
                    self.is_sent_on(&reply.id, text);
                }
            }
        }
    }

    fn messages(&mut self) {
        let routed: Vec<_> = self.session.routed.iter().flat_map(|routed| &routed.messages).collect();
        let stopped_through = self.session.routed.as_ref().map_or(0, |routed| routed.stopped_through);
        let forgotten = self.session.routed.as_ref().map_or(0, |r| r.count - r.messages.len() as u64);
        // What comes too late as an answer may be repeated to the agent as a message of its own.
        let late_keys: Vec<String> = self.sent_on().map(|(_, run)| format!("{run}:user")).collect();
        for said in &self.session.said {
            let at = routed.iter().position(|message| message.id == said.message);
            let has_it = |row: &&Row| row.text.contains(&said.text) && !late_keys.contains(&row.key);
            let rows: Vec<_> = self.session.rows.iter().filter(has_it).collect();
            let read: Vec<_> = rows.iter().filter(|row| !row.aside).collect();
            let taken = self.session.lives.iter().any(|life| {
                let decision = life.last().and_then(|written| written.entry.decision());
                let id = format!("message-{}", said.message);
                matches!(decision.map(|d| &d.by), Some(DecidedBy::Reply { id: by, .. }) if *by == id)
            });
            let text = &said.text;
            let Some(at) = at else {
                if said.heard && forgotten == 0 {
                    self.found(Kind::Lost, true, format!("the message \"{text}\" is not on record"));
                }
                continue;
            };
            if read.len() > 1 {
                self.found(
                    Kind::Doubled,
                    false,
                    format!("the agent got the message \"{text}\" {} times", read.len()),
                );
            }
            if taken && !read.is_empty() {
                let what = format!("the message \"{text}\" is an answer, and the agent got it too");
                self.found(Kind::Misrouted, false, what);
            }
            let number = forgotten + at as u64 + 1;
            let may_be_gone = number <= stopped_through || self.interrupted();
            match &routed[at].decision {
                MessageDecision::Message { run, .. } => {
                    let key = format!("{run}:user");
                    if rows.is_empty() && !may_be_gone {
                        self.found(Kind::Lost, true, format!("the agent has not got the message \"{text}\""));
                    }
                    if rows.iter().any(|row| row.key != key) {
                        self.found(
                            Kind::Doubled,
                            false,
                            format!("the message \"{text}\" went under another key"),
                        );
                    }
                    if taken {
                        let what =
                            format!("the message \"{text}\" is on record as a message, and as an answer");
                        self.found(Kind::Misrouted, false, what);
                    }
                }
                other => {
                    if !rows.is_empty() {
                        let what =
                            format!("the message \"{text}\" was taken as {other:?}, and the agent got it");
                        self.found(Kind::Misrouted, false, what);
                    }
                    if matches!(other, MessageDecision::Late { .. }) && self.history.late_as_message {
                        self.is_sent_on(&format!("message-{}", said.message), text);
                    }
                    if matches!(other, MessageDecision::Answer { .. }) && !taken {
                        // Until it is rewritten to late.
                        let what =
                            format!("the message \"{text}\" is on record as an answer, and did not answer");
                        self.found(Kind::Untrue, true, what);
                    }
                }
            }
        }
    }

    /// The late answers that are on record as messages: whose, and their runs.
    fn sent_on(&self) -> impl Iterator<Item = (&'a str, &'a str)> + use<'a> {
        let routed = self.session.routed.iter().flat_map(|routed| &routed.messages);
        routed.filter_map(|message| match &message.decision {
            MessageDecision::Message { run, .. } => Some((message.id.strip_prefix("late-")?, run.as_str())),
            _ => None,
        })
    }

    fn is_sent_on(&mut self, reply: &str, about: &str) {
        if !self.sent_on().any(|(of, _)| of == reply) {
            let what = format!("the late answer {reply} to \"{about}\" is no message to the agent");
            self.found(Kind::Lost, true, what);
        }
    }

    /// Rule R3: a late answer goes to the agent once where the policy says so; a secret never.
    fn late_answers(&mut self) {
        for (reply, run) in self.sent_on().collect::<Vec<_>>() {
            let submitted = self.session.replies.iter().find(|submitted| submitted.id == reply);
            let said = reply.strip_prefix("message-");
            let said = said.and_then(|id| self.session.said.iter().find(|said| said.message == id));
            let says = match (submitted.map(|submitted| &submitted.content), said) {
                (Some(Content::Values(values)), _) => values.concat(),
                (None, Some(said)) => said.text.clone(),
                (other, _) => {
                    let what = format!("the late reply {reply} went to the agent: {other:?}");
                    self.found(Kind::Misrouted, false, what);
                    continue;
                }
            };
            if !self.history.late_as_message {
                let what = format!("the late answer {reply} went to the agent, and is to be rejected");
                self.found(Kind::Misrouted, false, what);
            }
            let key = format!("{run}:user");
            let rows: Vec<&Row> = self.session.rows.iter().filter(|row| row.key == key).collect();
            match rows[..] {
                [] if self.interrupted() => {}
                [] => self.found(Kind::Lost, true, format!("the agent has not got the late answer {reply}")),
                [row] if row.text.starts_with("Late answer to ") && row.text.contains(&says) => {}
                [row] => {
                    let what = format!(
                        "the late answer {reply} said \"{says}\", and the agent got \"{}\"",
                        row.text
                    );
                    self.found(Kind::Misrouted, false, what);
                }
                _ => {
                    let what = format!("the agent got the late answer {reply} {} times", rows.len());
                    self.found(Kind::Doubled, false, what);
                }
            }
        }
    }

    /// Messages reach the Gateway in the order in which they were handed to its adapter, and they
    /// were handed over in the order in which they were typed.
    fn order(&mut self) {
        let handed = places(self.session.handed.iter().map(String::as_str));
        let sent = firsts(self.session.sends.iter().map(|sent| sent.key.as_str()));
        let text_of = |key: &str| {
            let sent = self.session.sends.iter().find(|sent| sent.key == key);
            sent.map_or(key, |sent| sent.text.as_str()).to_owned()
        };
        let known: Vec<&str> = sent.into_iter().filter(|key| handed.contains_key(key)).collect();
        for pair in known.windows(2).filter(|pair| handed[pair[0]] > handed[pair[1]]) {
            let (first, second) = (text_of(pair[0]), text_of(pair[1]));
            let what = format!("\"{second}\" reached the gateway after \"{first}\", which came later");
            self.found(Kind::Misrouted, false, what);
        }
        let routed: Vec<_> = self.session.routed.iter().flat_map(|routed| &routed.messages).collect();
        let mut last: Option<(usize, &str)> = None;
        for said in &self.session.said {
            let message = routed.iter().find(|message| message.id == said.message);
            let Some(MessageDecision::Message { run, .. }) = message.map(|message| &message.decision) else {
                continue;
            };
            let Some(at) = handed.get(run.as_str()) else { continue };
            if let Some((before, text)) = last.filter(|(before, _)| before > at && !said.hurried) {
                let what = format!("\"{}\" ({at}) was handed over before \"{text}\" ({before})", said.text);
                self.found(Kind::Misrouted, false, what);
            }
            last = Some((*at, &said.text));
        }
    }

    /// Once Stop is confirmed, nothing that was asked before is pending.
    fn stops(&mut self) {
        for stop in &self.session.stops {
            let Some(told_ms) = stop.told_ms else {
                self.found(Kind::Lost, true, "Stop was not confirmed".into());
                continue;
            };
            for life in &self.session.lives {
                let asked = life.values.first().map_or(u64::MAX, |written| written.at_ms);
                let unknown = life.values.first().is_some_and(|first| !first.entry.is_pending());
                let decided = first_decided(life).map_or(u64::MAX, |written| written.at_ms);
                if !unknown && asked < stop.pressed_ms && decided > told_ms + CLOCKS_MS {
                    let what = format!("\"{}\" was pending when Stop was confirmed", life.text());
                    self.found(Kind::Untrue, false, what);
                }
            }
        }
    }
}

/// The value with which it was decided; none where the values before are out of reach.
fn first_decided(life: &Life) -> Option<&Written> {
    life.values.first().filter(|first| first.entry.is_pending())?;
    life.values.iter().find(|written| written.entry.decision().is_some())
}

/// The keys in the order of their first occurrence.
fn firsts<'a>(keys: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let mut seen = BTreeSet::new();
    keys.filter(|key| seen.insert(*key)).collect()
}

fn places<'a>(keys: impl Iterator<Item = &'a str>) -> BTreeMap<&'a str, usize> {
    firsts(keys).into_iter().enumerate().map(|(at, key)| (key, at)).collect()
}

/// The decision as it is after the secret has gone.
fn hidden(decision: &Decision) -> Decision {
    let mut decision = decision.clone();
    if let Outcome::Answered { answers } = &mut decision.outcome {
        for answer in answers.values_mut().filter(|answer| matches!(answer, Answer::Sealed(_))) {
            *answer = Answer::Hidden;
        }
    }
    decision
}

/// The answer to the first prompt, as the agent gets it.
fn values(entry: &Entry, outcome: &Outcome) -> Vec<String> {
    let Outcome::Answered { answers } = outcome else { return Vec::new() };
    let prompt = entry.question.prompts.first();
    prompt.and_then(|prompt| Some(answers.get(&prompt.id)?.values(prompt))).unwrap_or_default()
}

fn says(reply: &Submitted, entry: &Entry, outcome: &Outcome) -> bool {
    match (&reply.content, outcome) {
        (Content::Values(given), Outcome::Answered { .. }) => *given == values(entry, outcome),
        (Content::Secret(_), Outcome::Answered { answers }) => {
            answers.values().all(|answer| matches!(answer, Answer::Sealed(_) | Answer::Hidden))
        }
        (Content::Declined, Outcome::Declined) => true,
        (Content::Cancelled, Outcome::Cancelled { reason: CancelReason::User }) => true,
        _ => false,
    }
}
