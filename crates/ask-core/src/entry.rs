//! The entry of a question: its whole life so far, and every transition of it.
//!
//! A transition is a pure function from an entry to the next one. The caller writes the result by
//! compare-and-set; a failed one decides nothing and starts again from what it reads (rule N6).

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::SCHEMA;
use crate::key::QuestionKey;
use crate::native::check_reply;
use crate::outcome::{CancelReason, Delivered, Outcome, Returned, Seen, Undeliverable};
use crate::question::{Invalid, Question};
use crate::record::is_asked_again;
use crate::reply::{Answer, Reply, ReplyContent, Responder};
use crate::surface::Surface;
use crate::time::Timestamp;

/// Most steps and late replies that an entry lists; what comes after is counted.
pub const MAX_LISTED: usize = 24;

/// On which road a question came.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Road {
    /// The Gateway's own question.
    Native,
    /// The plugin's tool call.
    Plugin,
    /// An MCP call bound to a session of the Gateway.
    Mcp,
    /// An MCP call of a client that has no chat.
    McpAlone,
}

/// A question's entry in the bucket `ask`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Entry {
    /// Version of this payload.
    pub schema: u32,
    /// Where the entry lives.
    pub key: QuestionKey,
    /// On which road the question came.
    pub road: Road,
    /// The asking tool's name.
    pub tool: String,
    /// The asking call's id at the gateway; empty where the gateway gives none.
    pub call: String,
    /// What is asked.
    pub question: Question,
    /// When the entry was made.
    pub asked_at: Timestamp,
    /// When the question expires.
    pub deadline: Timestamp,
    /// The W3C trace context that all steps of this life continue.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub traceparent: Option<String>,
    /// How far it is.
    #[serde(flatten)]
    pub state: State,
    /// What happened in between, oldest first, at most [`MAX_LISTED`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub steps: Vec<Step>,
    /// How many steps are not listed.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub steps_left_out: u64,
    /// Replies that came after the decision, at most [`MAX_LISTED`], without their content.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub late: Vec<Late>,
    /// How many replies came after the decision.
    #[serde(default)]
    pub late_count: u64,
    /// The question that got this one's answer from the record, because this call was lost.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub given_again: Option<String>,
}

/// How far a life is.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum State {
    /// Waiting for its one outcome.
    Pending,
    /// Decided; its call does not have the outcome yet.
    Decided {
        /// The one decision.
        decision: Decision,
    },
    /// Closed.
    Returned {
        /// The one decision.
        decision: Decision,
        /// What became of it.
        returned: Returned,
        /// When that was known.
        returned_at: Timestamp,
    },
}

/// The one decision about a question.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Decision {
    /// How it ended.
    pub outcome: Outcome,
    /// When.
    pub at: Timestamp,
    /// Who or what decided.
    pub by: DecidedBy,
    /// Whether it had reached a surface by then.
    pub delivered: Delivered,
    /// Whether a person saw it.
    pub seen: Seen,
}

/// Who or what decided.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DecidedBy {
    /// A reply.
    Reply {
        /// Its id.
        id: String,
        /// Who gave it.
        responder: Responder,
        /// Where.
        surface: Surface,
    },
    /// The answer to the same question, whose call was lost before it had it.
    Record {
        /// That question's id.
        question: String,
        /// Who had answered it.
        responder: Responder,
    },
    /// A rule of the router.
    Rule {
        /// Its name.
        name: String,
    },
}

/// A step between the durable writes.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Step {
    /// When it happened.
    pub at: Timestamp,
    /// What happened.
    #[serde(flatten)]
    pub what: StepKind,
}

/// What happened in a step.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "step", rename_all = "snake_case")]
pub enum StepKind {
    /// The router chose a surface.
    Surface {
        /// Which.
        surface: Surface,
        /// By which rule.
        rule: String,
    },
    /// A front end reported that the question reached a surface.
    Delivered {
        /// Which.
        surface: Surface,
        /// In which chat.
        chat: Option<String>,
    },
    /// A front end shows it once another question is off the screen.
    Waiting {
        /// Where.
        surface: Surface,
    },
    /// A front end could not show it.
    Refused {
        /// Where.
        surface: Surface,
        /// Why.
        reason: String,
    },
    /// A typed message did not complete it.
    Corrected {
        /// What was missing or wrong, as the person was told.
        why: String,
    },
    /// A typed message was taken for its reply.
    Message {
        /// The front end's id of the message.
        message: String,
        /// By which rule.
        rule: String,
    },
}

impl StepKind {
    /// Steps that rules build on: they are listed whatever else was.
    fn is_kept(&self) -> bool {
        !matches!(self, Self::Corrected { .. } | Self::Message { .. })
    }
}

fn is_zero(n: &u64) -> bool {
    *n == 0
}

/// A reply that came after the decision.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Late {
    /// When it came.
    pub at: Timestamp,
    /// Its id.
    pub id: String,
    /// Who sent it.
    pub responder: Responder,
    /// From where.
    pub surface: Surface,
}

/// What a reply does to an entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// It decides: write this entry, then the responder hears "saved".
    Decide(Box<Entry>),
    /// It has decided already, perhaps long ago (rule N5).
    Saved,
    /// Another decision came first: write this entry, which lists it as late, and tell the
    /// responder who won and when.
    Late(Box<Entry>),
    /// It is listed as late already.
    KnownLate,
    /// It is not valid; the question stays as it is.
    Invalid(Invalid),
}

impl Entry {
    /// A new entry.
    ///
    /// # Errors
    /// [`PastDeadline`] where the deadline is not in the future: such a call is never opened.
    #[expect(clippy::too_many_arguments, reason = "every field of a new life is given once, here")]
    pub fn ask(
        key: QuestionKey,
        road: Road,
        tool: &str,
        call: &str,
        question: Question,
        asked_at: Timestamp,
        deadline: Timestamp,
        traceparent: Option<String>,
    ) -> Result<Self, PastDeadline> {
        if deadline <= asked_at {
            return Err(PastDeadline { deadline, now: asked_at });
        }
        Ok(Self {
            schema: SCHEMA,
            key,
            road,
            tool: tool.into(),
            call: call.into(),
            question,
            asked_at,
            deadline,
            traceparent,
            state: State::Pending,
            steps: Vec::new(),
            steps_left_out: 0,
            late: Vec::new(),
            late_count: 0,
            given_again: None,
        })
    }

    /// True until the outcome is decided.
    pub fn is_pending(&self) -> bool {
        self.state == State::Pending
    }

    /// The decision, once there is one.
    pub fn decision(&self) -> Option<&Decision> {
        match &self.state {
            State::Pending => None,
            State::Decided { decision } | State::Returned { decision, .. } => Some(decision),
        }
    }

    /// What became of the decision, once that is known.
    pub fn returned(&self) -> Option<&Returned> {
        match &self.state {
            State::Returned { returned, .. } => Some(returned),
            _ => None,
        }
    }

    /// The outcome that people are shown: the Gateway's where it overruled ours.
    pub fn shown_outcome(&self) -> Option<&Outcome> {
        match &self.state {
            State::Pending => None,
            State::Returned { returned: Returned::Overruled { outcome, .. }, .. } => Some(outcome),
            State::Decided { decision } | State::Returned { decision, .. } => Some(&decision.outcome),
        }
    }

    /// True while a message must not slip past this question at the Gateway: a native question
    /// until it is returned, another one until it is decided (rule S7).
    pub fn takes_messages(&self) -> bool {
        match self.road {
            Road::Native => !matches!(self.state, State::Returned { .. }),
            _ => self.is_pending(),
        }
    }

    /// Whether a surface reported it, as far as the entry says.
    pub fn was_delivered(&self) -> bool {
        self.steps.iter().any(|s| matches!(s.what, StepKind::Delivered { .. }))
    }

    /// Whether it is in the chat itself, where it stays whoever looks.
    pub fn is_in_the_chat(&self) -> bool {
        self.steps
            .iter()
            .any(|s| matches!(s.what, StepKind::Delivered { surface: Surface::Durable | Surface::Text, .. }))
    }

    /// Adds steps that are not on record yet; `None` when there is nothing to add. Allowed after
    /// the decision too, since only the process that holds a step can write it. Where the list is
    /// full, what was shown and delivered takes the place of what is only good to know.
    pub fn note(&self, steps: &[Step]) -> Option<Self> {
        let mut next = self.clone();
        for step in steps {
            if next.steps.iter().any(|s| s.what == step.what) {
                continue;
            }
            if next.steps.len() < MAX_LISTED {
                next.steps.push(step.clone());
                continue;
            }
            next.steps_left_out += 1;
            if step.what.is_kept()
                && let Some(at) = next.steps.iter().position(|s| !s.what.is_kept())
            {
                next.steps.remove(at);
                next.steps.push(step.clone());
            }
        }
        (next != *self).then_some(next)
    }

    /// What a reply does. Whether its sender may reply is checked before (the session's owner, or
    /// the gateway's adapter).
    pub fn reply(&self, reply: &Reply, now: Timestamp) -> Verdict {
        if let Some(decision) = self.decision() {
            return match &decision.by {
                DecidedBy::Reply { id, .. } if *id == reply.id => Verdict::Saved,
                _ => self.late(reply, now),
            };
        }
        let outcome = match &reply.content {
            ReplyContent::Answers { answers } => match check_reply(self, reply, answers) {
                Ok(()) => Outcome::Answered { answers: answers.clone() },
                Err(invalid) => return Verdict::Invalid(invalid),
            },
            ReplyContent::Declined => Outcome::Declined,
            ReplyContent::Cancelled { reason } => Outcome::Cancelled { reason: *reason },
            ReplyContent::Expired => Outcome::Expired,
        };
        let human = matches!(
            (&outcome, reply.surface),
            (
                Outcome::Answered { .. }
                    | Outcome::Declined
                    | Outcome::Cancelled { reason: CancelReason::User },
                _
            )
        );
        let by =
            DecidedBy::Reply { id: reply.id.clone(), responder: reply.by.clone(), surface: reply.surface };
        Verdict::Decide(Box::new(self.decide(outcome, by, human, false, now)))
    }

    fn late(&self, reply: &Reply, now: Timestamp) -> Verdict {
        if self.late.iter().any(|l| l.id == reply.id) {
            return Verdict::KnownLate;
        }
        let mut next = self.clone();
        next.late_count += 1;
        if next.late.len() < MAX_LISTED {
            let (id, responder, surface) = (reply.id.clone(), reply.by.clone(), reply.surface);
            next.late.push(Late { at: now, id, responder, surface });
        }
        Verdict::Late(Box::new(next))
    }

    /// Ends a pending question whose alarm on the monotonic clock went off; a wall clock that was
    /// set back meanwhile does not keep it alive. `None` after the decision.
    pub fn fall_due(&self, nothing_offered: bool, wall_clock: Timestamp) -> Option<Self> {
        self.expire(nothing_offered, wall_clock.max(self.deadline))
    }

    /// Ends a pending question at its deadline; `None` before it or after the decision.
    /// `nothing_offered` is the deciding router's own evidence that no front end was there from
    /// the start (rules F1, F2).
    pub fn expire(&self, nothing_offered: bool, now: Timestamp) -> Option<Self> {
        if !self.is_pending() || now < self.deadline {
            return None;
        }
        let never_shown = nothing_offered && !self.was_delivered() && self.road != Road::Native;
        let outcome = match never_shown {
            true => Outcome::Undeliverable { reason: Undeliverable::NeverShown },
            false => Outcome::Expired,
        };
        let by = DecidedBy::Rule { name: "deadline".into() };
        Some(self.decide(outcome, by, false, nothing_offered, now))
    }

    /// Ends a pending question that nobody can be shown; `None` after the decision.
    pub fn undeliverable(&self, reason: Undeliverable, rule: &str, now: Timestamp) -> Option<Self> {
        let by = DecidedBy::Rule { name: rule.into() };
        self.is_pending().then(|| self.decide(Outcome::Undeliverable { reason }, by, false, true, now))
    }

    /// Marks the answer of this entry as given to `asked`, which asks the same again; `None` where
    /// it may not be given, or was given to another. Written before `asked` is decided, so that two
    /// questions never share one answer.
    pub fn give_again(&self, asked: &Self) -> Option<Self> {
        let given_again = Some(asked.key.to_string());
        is_asked_again(asked, self).then(|| Self { given_again, ..self.clone() })
    }

    /// Answers a pending question with what was marked for it in `first`; `None` where nothing was.
    pub fn answer_from_record(&self, first: &Self, now: Timestamp) -> Option<Self> {
        let decision = first.decision()?;
        let DecidedBy::Reply { responder, .. } = &decision.by else { return None };
        if !is_asked_again(self, first) || first.given_again.is_none() {
            return None;
        }
        let by = DecidedBy::Record { question: first.key.question.clone(), responder: responder.clone() };
        Some(self.decide(decision.outcome.clone(), by, false, false, now))
    }

    /// Calls a pending question off; `None` after the decision.
    pub fn cancel(&self, reason: CancelReason, rule: &str, now: Timestamp) -> Option<Self> {
        let by = DecidedBy::Rule { name: rule.into() };
        self.is_pending().then(|| self.decide(Outcome::Cancelled { reason }, by, false, false, now))
    }

    /// Closes a decided question; `None` while it is pending or when it is closed already. The
    /// sealed secret goes out of reach with this write.
    pub fn close(&self, returned: Returned, now: Timestamp) -> Option<Self> {
        let State::Decided { decision } = &self.state else {
            return None;
        };
        let mut decision = decision.clone();
        hide_secrets(&mut decision.outcome);
        let state = State::Returned { decision, returned, returned_at: now };
        Some(Self { state, ..self.clone() })
    }

    /// True while the entry holds a sealed secret.
    pub fn holds_secret(&self) -> bool {
        let Some(Outcome::Answered { answers }) = self.decision().map(|d| &d.outcome) else {
            return false;
        };
        answers.values().any(|a| matches!(a, Answer::Sealed(_)))
    }

    /// How long the person had it before the decision, where both are known.
    pub fn human_wait(&self) -> Option<Duration> {
        let shown = self.steps.iter().find(|s| matches!(s.what, StepKind::Delivered { .. }))?;
        Some(self.decision()?.at.since(shown.at))
    }

    fn decide(
        &self,
        outcome: Outcome,
        by: DecidedBy,
        human: bool,
        nothing_offered: bool,
        now: Timestamp,
    ) -> Self {
        let seen = if human { Seen::Yes } else { Seen::Unknown };
        let delivered = match (self.was_delivered() || human, nothing_offered) {
            (true, _) => Delivered::Yes,
            (false, true) => Delivered::No,
            (false, false) => Delivered::Unknown,
        };
        let decision = Decision { outcome, at: now, by, delivered, seen };
        Self { state: State::Decided { decision }, ..self.clone() }
    }
}

fn hide_secrets(outcome: &mut Outcome) {
    if let Outcome::Answered { answers } = outcome {
        for answer in answers.values_mut().filter(|a| matches!(a, Answer::Sealed(_))) {
            *answer = Answer::Hidden;
        }
    }
}

/// A call whose deadline is not in the future.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the deadline has passed {} ms ago, so the question is not opened", .now.0.saturating_sub(.deadline.0))]
pub struct PastDeadline {
    /// The deadline.
    pub deadline: Timestamp,
    /// The time it was compared with.
    pub now: Timestamp,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::question::{Choice, Prompt};

    const ASKED: Timestamp = Timestamp(1_000);
    const DEADLINE: Timestamp = Timestamp(301_000);

    fn pending() -> Entry {
        let mut prompt = Prompt::free_text("Where to?");
        prompt.options = ["A", "B"].map(Choice::label).into();
        let question = Question::new(vec![prompt]).unwrap();
        let key = "g.s.r.q".parse().unwrap();
        Entry::ask(key, Road::Plugin, "request_user_input", "c", question, ASKED, DEADLINE, None).unwrap()
    }

    fn reply(id: &str, content: ReplyContent) -> Reply {
        let by = Responder { user: "alice".into(), name: None, chat: None };
        Reply { id: id.into(), by, surface: Surface::Card, content }
    }

    fn answer(id: &str, answer: Answer) -> Reply {
        reply(id, ReplyContent::Answers { answers: [("answer".into(), answer)].into() })
    }

    fn decided(verdict: Verdict) -> Entry {
        let Verdict::Decide(entry) = verdict else { panic!("expected a decision, got {verdict:?}") };
        *entry
    }

    #[test]
    fn a_call_past_its_deadline_is_never_opened() {
        let entry = pending();
        let late = Entry::ask(entry.key, Road::Plugin, "t", "c", entry.question, DEADLINE, DEADLINE, None);
        assert_eq!(late, Err(PastDeadline { deadline: DEADLINE, now: DEADLINE }));
    }

    #[test]
    fn each_reply_decides_its_own_outcome() {
        let answers: std::collections::BTreeMap<_, _> = [("answer".to_string(), Answer::option(1))].into();
        let table = [
            (ReplyContent::Answers { answers: answers.clone() }, Outcome::Answered { answers }, Seen::Yes),
            (ReplyContent::Declined, Outcome::Declined, Seen::Yes),
            (
                ReplyContent::Cancelled { reason: CancelReason::User },
                Outcome::Cancelled { reason: CancelReason::User },
                Seen::Yes,
            ),
            (
                ReplyContent::Cancelled { reason: CancelReason::RunEnded },
                Outcome::Cancelled { reason: CancelReason::RunEnded },
                Seen::Unknown,
            ),
            (ReplyContent::Expired, Outcome::Expired, Seen::Unknown),
        ];
        for (content, outcome, seen) in table {
            let entry = decided(pending().reply(&reply("r1", content), Timestamp(2_000)));
            let decision = entry.decision().unwrap();
            assert_eq!((&decision.outcome, decision.seen), (&outcome, seen));
        }
    }

    #[test]
    fn a_wall_clock_that_was_set_back_keeps_no_question_alive() {
        let hour_before = DEADLINE.minus(Duration::from_secs(3_600));
        let decision = pending().fall_due(false, hour_before).unwrap().decision().unwrap().clone();
        assert_eq!((decision.outcome, decision.at), (Outcome::Expired, DEADLINE));
        assert_eq!(pending().expire(false, hour_before), None);
    }

    #[test]
    fn what_was_delivered_is_listed_however_many_steps_there_are() {
        let corrected = |n: usize| Step { at: ASKED, what: StepKind::Corrected { why: format!("{n}") } };
        let delivered = Step { at: ASKED, what: StepKind::Delivered { surface: Surface::Card, chat: None } };
        let many: Vec<Step> = (0..MAX_LISTED + 3).map(corrected).collect();
        let full = pending().note(&many).unwrap();
        assert_eq!((full.steps.len(), full.steps_left_out), (MAX_LISTED, 3));
        let shown = full.note(std::slice::from_ref(&delivered)).unwrap();
        assert_eq!((shown.steps.len(), shown.steps_left_out), (MAX_LISTED, 4));
        assert!(shown.was_delivered() && shown.steps[0] == corrected(1));
        assert_eq!(shown.note(&[delivered]), None);
    }

    #[test]
    fn n5_a_reply_whose_id_won_is_answered_saved_for_ever() {
        let won = decided(pending().reply(&answer("r1", Answer::option(0)), Timestamp(2_000)));
        assert_eq!(won.reply(&answer("r1", Answer::option(0)), Timestamp(9_000)), Verdict::Saved);
        let closed =
            won.close(Returned::Delivered { proof: "acknowledged".into() }, Timestamp(9_500)).unwrap();
        assert_eq!(closed.reply(&answer("r1", Answer::option(0)), Timestamp(99_000)), Verdict::Saved);
    }

    #[test]
    fn the_first_reply_wins_and_the_second_is_late_once() {
        let won = decided(pending().reply(&answer("r1", Answer::option(0)), Timestamp(2_000)));
        let Verdict::Late(listed) = won.reply(&answer("r2", Answer::option(1)), Timestamp(3_000)) else {
            panic!()
        };
        assert_eq!(listed.decision(), won.decision());
        assert_eq!((listed.late.len(), listed.late_count), (1, 1));
        assert_eq!(listed.reply(&answer("r2", Answer::option(1)), Timestamp(4_000)), Verdict::KnownLate);
    }

    #[test]
    fn late_replies_are_a_capped_list_with_a_counter() {
        let mut entry = decided(pending().reply(&answer("r", Answer::option(0)), Timestamp(2_000)));
        for n in 0..MAX_LISTED + 5 {
            let Verdict::Late(next) =
                entry.reply(&answer(&format!("late{n}"), Answer::option(1)), Timestamp(3_000))
            else {
                panic!()
            };
            entry = *next;
        }
        assert_eq!((entry.late.len(), entry.late_count), (MAX_LISTED, MAX_LISTED as u64 + 5));
    }

    #[test]
    fn a_missing_answer_never_becomes_an_answer() {
        let bad = [
            Answer::text("  \n"),
            Answer::Given { options: vec![], other: None },
            Answer::option(2),
            Answer::Given { options: vec![0, 1], other: None },
            Answer::Hidden,
        ];
        for bad in bad {
            let verdict = pending().reply(&answer("r", bad.clone()), Timestamp(2_000));
            assert!(matches!(verdict, Verdict::Invalid(_)), "{bad:?}");
        }
        let nothing = reply("r", ReplyContent::Answers { answers: Default::default() });
        assert!(matches!(pending().reply(&nothing, Timestamp(2_000)), Verdict::Invalid(_)));
    }

    #[test]
    fn words_that_look_like_nothing_are_real_answers() {
        for text in ["0", "no", "false", "None", "cancel"] {
            let entry = decided(pending().reply(&answer("r", Answer::text(text)), Timestamp(2_000)));
            assert_eq!(entry.decision().unwrap().outcome.status(), "answered");
        }
    }

    #[test]
    fn a_secret_must_come_sealed() {
        let mut entry = pending();
        entry.question.prompts[0].options.clear();
        entry.question.prompts[0].secret = true;
        let Verdict::Invalid(invalid) = entry.reply(&answer("r", Answer::text("hunter2")), Timestamp(2_000))
        else {
            panic!()
        };
        assert!(!invalid.to_string().contains("hunter2"));
    }

    #[test]
    fn it_expires_at_its_deadline_and_not_before() {
        assert_eq!(pending().expire(false, Timestamp(DEADLINE.0 - 1)), None);
        assert_eq!(pending().expire(false, DEADLINE).unwrap().decision().unwrap().outcome, Outcome::Expired);
        let answered = decided(pending().reply(&answer("r", Answer::option(0)), Timestamp(2_000)));
        assert_eq!(answered.expire(false, DEADLINE), None);
    }

    #[test]
    fn f1_not_shown_needs_the_deciding_routers_own_evidence() {
        let shown = pending()
            .note(&[Step {
                at: Timestamp(1_100),
                what: StepKind::Delivered { surface: Surface::Card, chat: None },
            }])
            .unwrap();
        let table = [
            (pending(), false, Outcome::Expired, Delivered::Unknown),
            (pending(), true, Outcome::Undeliverable { reason: Undeliverable::NeverShown }, Delivered::No),
            (shown.clone(), false, Outcome::Expired, Delivered::Yes),
            (shown, true, Outcome::Expired, Delivered::Yes),
        ];
        for (entry, nothing_offered, outcome, delivered) in table {
            let decision = entry.expire(nothing_offered, DEADLINE).unwrap().decision().unwrap().clone();
            assert_eq!((decision.outcome, decision.delivered), (outcome, delivered));
        }
    }

    #[test]
    fn only_a_decided_question_is_closed_and_only_once() {
        let delivered = || Returned::Delivered { proof: "acknowledged".into() };
        assert_eq!(pending().close(delivered(), Timestamp(2_000)), None);
        let won = decided(pending().reply(&answer("r1", Answer::option(0)), Timestamp(2_000)));
        let closed = won.close(delivered(), Timestamp(3_000)).unwrap();
        assert_eq!(closed.close(delivered(), Timestamp(4_000)), None);
    }

    #[test]
    fn closing_puts_a_secret_out_of_reach() {
        let mut entry = pending();
        entry.question.prompts[0].options.clear();
        entry.question.prompts[0].secret = true;
        let sealed =
            crate::reply::Sealed { key_id: "k".into(), encapsulated: "e".into(), ciphertext: "c".into() };
        let won = decided(entry.reply(&answer("r", Answer::Sealed(sealed)), Timestamp(2_000)));
        assert!(won.holds_secret());
        let closed =
            won.close(Returned::Delivered { proof: "acknowledged".into() }, Timestamp(3_000)).unwrap();
        assert!(!closed.holds_secret());
        assert!(!serde_json::to_string(&closed).unwrap().contains("ciphertext"));
    }

    #[test]
    fn s7_a_native_question_takes_messages_until_it_is_returned() {
        let mut entry = pending();
        entry.road = Road::Native;
        let won = decided(entry.reply(&answer("r1", Answer::option(0)), Timestamp(2_000)));
        assert!(won.takes_messages());
        assert!(
            !won.close(Returned::Unconfirmed { why: "x".into() }, Timestamp(3_000)).unwrap().takes_messages()
        );
        let plugin = decided(pending().reply(&answer("r1", Answer::option(0)), Timestamp(2_000)));
        assert!(!plugin.takes_messages());
    }

    #[test]
    fn steps_are_noted_once_also_after_the_decision() {
        let step =
            Step { at: Timestamp(1_100), what: StepKind::Delivered { surface: Surface::Card, chat: None } };
        let again = Step { at: Timestamp(1_900), ..step.clone() };
        let won = decided(pending().reply(&answer("r1", Answer::option(0)), Timestamp(2_000)));
        let noted = won.note(std::slice::from_ref(&step)).unwrap();
        assert_eq!(noted.steps, [step]);
        assert_eq!(noted.note(&[again]), None);
    }

    #[test]
    fn an_entry_reads_back_and_ignores_unknown_fields() {
        let entry = decided(pending().reply(&answer("r1", Answer::option(0)), Timestamp(2_000)));
        let mut json = serde_json::to_value(&entry).unwrap();
        json["from_the_future"] = true.into();
        assert_eq!(serde_json::from_value::<Entry>(json).unwrap(), entry);
    }
}
