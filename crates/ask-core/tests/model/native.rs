//! The Gateway's own question, which the Gateway decides too: two people reply, routers and
//! adapters come and go, the Gateway answers, expires, aborts, forgets and restarts.

use ask_core::entry::{Entry, Road, Step, StepKind};
use ask_core::native::{
    GatewaySays, InTranscript, decided_by_gateway, forgotten_pending, gateway_reply_id, resolved_by, returned,
};
use ask_core::outcome::{CancelReason, Outcome, Returned};
use ask_core::reply::{Answer, Reply, ReplyContent};
use ask_core::surface::Surface;
use ask_core::take::{Taken, Trust};
use ask_core::wire::ReplyResponse;

use crate::record::{DEADLINE, NOW, Revisions, ask, choice, how, reply, winner, with_content};
use crate::search::{Model, Steps, hash_of, search};

/// A reading of the rules that is weaker than they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Weak {
    SettledIsDelivered,
    SettledIsOverruled,
    ForgottenIsDelivered,
    ForgottenIsOverruled,
    LostRowIsNoAnswer,
    EachTryHasAnIdOfItsOwn,
    ConflictIsLate,
    OnlyWhatIsHeardIsReturned,
    OnlyWhoIsRememberedIsTold,
    AnswerIsCarriedToTheNextQuestion,
}

struct Native {
    crashes: u8,
    weak: Option<Weak>,
    replies: [Reply; 2],
    /// How many of them may come.
    repliers: usize,
}

const TAB: usize = 0;

#[derive(Debug, Clone, Hash)]
struct World {
    gateway: Gateway,
    entry: Revisions,
    /// The emitter remembers that it told the tab "saved".
    tab_remembered: bool,
    people: [Person; 2],
    adapters: [Adapter; 2],
    /// How many crashes and lost responses may still come.
    crashes: u8,
}

#[derive(Debug, Clone, Hash)]
struct Gateway {
    question: AtGateway,
    /// It still holds the question's record.
    holds: bool,
    /// What the asking tool has got.
    agent: Option<Outcome>,
    /// The tool's result is in the transcript.
    written: bool,
    /// That row is no longer in what is read of the transcript.
    row_lost: bool,
    restarted: bool,
    /// The Control UI may still answer, or the run be aborted.
    may_decide: bool,
    /// Another run asks the same.
    asked_again: AtGateway,
}

#[derive(Debug, Clone, Hash, PartialEq, Eq)]
enum AtGateway {
    NotAsked,
    Waits,
    Settled { by: Option<String>, outcome: Outcome },
    LostInRestart,
}

#[derive(Debug, Clone, Hash)]
struct Person {
    told: Told,
    /// An answer of a router that is on its way.
    coming: Option<Told>,
    tries: u8,
}

#[derive(Debug, Clone, Copy, Hash, PartialEq, Eq)]
enum Told {
    NothingReplied,
    Replied,
    Saved,
    Accepted,
    Lost,
    Unconfirmed,
}

#[derive(Debug, Clone, Hash)]
struct Adapter {
    /// It was there when the decision was published.
    heard: bool,
    has: Has,
}

/// What an adapter has learnt and not written yet.
#[derive(Debug, Clone, Hash)]
enum Has {
    Nothing,
    Asked,
    GatewayOutcome(String, ReplyContent),
    AlreadyTerminal,
    Return(Returned),
}

impl Native {
    fn new(crashes: u8, weak: Option<Weak>) -> Self {
        let replies = [reply("tab", Surface::Card, &choice(), 0), reply("cli", Surface::Cli, &choice(), 1)];
        Self { crashes, weak, replies, repliers: 2 }
    }

    fn is(&self, weak: Weak) -> bool {
        self.weak == Some(weak)
    }

    /// What adapters hear is of interest only where it decides something.
    fn hears(&self) -> bool {
        self.is(Weak::OnlyWhatIsHeardIsReturned)
    }

    // The Gateway and its agent.

    fn gateway(&self, world: &World, steps: &mut Steps<World>) {
        let gateway = &world.gateway;
        let with = |change: &dyn Fn(&mut Gateway)| {
            let mut next = world.clone();
            change(&mut next.gateway);
            next
        };
        match &gateway.question {
            AtGateway::NotAsked => {
                let next = with(&|g| g.question = AtGateway::Waits);
                steps.step(format_args!("gateway: a run asks"), next);
            }
            AtGateway::Waits => {
                let next = with(&|g| g.settle(None, Outcome::Expired));
                steps.fault(format_args!("gateway: the question expires"), next);
                if gateway.may_decide {
                    let next = with(&|g| {
                        g.may_decide = false;
                        g.settle(Some("control-ui"), theirs());
                    });
                    steps.fault(format_args!("gateway: answered in its Control UI"), next);
                    let next = with(&|g| {
                        g.may_decide = false;
                        g.settle(None, Outcome::Cancelled { reason: CancelReason::RunEnded });
                    });
                    steps.fault(format_args!("gateway: the run is aborted"), next);
                }
            }
            AtGateway::Settled { .. } if !gateway.written && !gateway.restarted => {
                let next = with(&|g| g.written = true);
                steps.step(format_args!("gateway: writes the tool's result into the transcript"), next);
            }
            AtGateway::Settled { .. } if gateway.holds => {
                let next = with(&|g| g.holds = false);
                steps.step(format_args!("gateway: 15 s pass, the record is forgotten"), next);
            }
            _ => {}
        }
        if gateway.written && !gateway.row_lost {
            let next = with(&|g| g.row_lost = true);
            steps.fault(format_args!("gateway: the result is no longer in what is read of it"), next);
        }
        if !gateway.restarted && gateway.question != AtGateway::NotAsked {
            let next = with(&|g| {
                (g.restarted, g.holds) = (true, false);
                if g.question == AtGateway::Waits {
                    g.question = AtGateway::LostInRestart;
                }
            });
            steps.fault(format_args!("gateway: restarts"), next);
        }
        let carried = self.is(Weak::AnswerIsCarriedToTheNextQuestion);
        if carried && gateway.restarted && gateway.asked_again == AtGateway::NotAsked {
            let next = with(&|g| g.asked_again = AtGateway::Waits);
            steps.fault(format_args!("gateway: another run asks the same"), next);
        }
    }

    // Routers and the people who reply.

    fn routers(&self, world: &World, steps: &mut Steps<World>) {
        let Some(entry) = world.entry.newest() else { return };
        if let Some(expired) = entry.expire(false, DEADLINE) {
            let mut next = world.clone();
            next.decide(expired, self.hears());
            steps.step(format_args!("router: deadline"), next);
        }
        let what = StepKind::Delivered { surface: Surface::Card, chat: None };
        let noted = entry.note(&[Step { at: NOW, what }]);
        if let Some(noted) = noted.filter(|_| entry.returned().is_none()) {
            let mut next = world.clone();
            next.entry.write_newest(noted);
            steps.step(format_args!("router: writes that the question was delivered"), next);
        }
    }

    fn people(&self, world: &World, steps: &mut Steps<World>) {
        if world.crashes > 0 && (world.tab_remembered || world.people[TAB].coming.is_some()) {
            let mut next = World { tab_remembered: false, crashes: world.crashes - 1, ..world.clone() };
            next.people[TAB].coming = None;
            steps.fault(format_args!("emitter: crashes"), next);
        }
        for who in 0..self.repliers {
            self.person(world, who, steps);
        }
    }

    fn person(&self, world: &World, who: usize, steps: &mut Steps<World>) {
        let (person, name) = (&world.people[who], ["tab", "cli"][who]);
        let with = |change: &dyn Fn(&mut Person)| {
            let mut next = world.clone();
            change(&mut next.people[who]);
            next
        };
        if let Some(answer) = person.coming {
            let mut next = with(&|p| {
                p.coming = None;
                if p.told == Told::Replied {
                    p.told = answer;
                }
            });
            if who == TAB && answer == Told::Saved {
                next.tab_remembered = self.is(Weak::OnlyWhoIsRememberedIsTold);
            }
            steps.step(format_args!("{name}: is told {answer:?}"), next);
        }
        match person.told {
            Told::NothingReplied if world.entry.newest().is_some() => {
                steps.fault(format_args!("{name}: replies"), with(&|p| p.told = Told::Replied));
            }
            Told::Replied if person.coming.is_none() => {
                self.take_reply(world, who, steps);
            }
            Told::Saved => {
                let is_told = who != TAB || world.tab_remembered || !self.is(Weak::OnlyWhoIsRememberedIsTold);
                if let Some(word) = world.entry.newest().and_then(|e| last_word(e)).filter(|_| is_told) {
                    steps.step(format_args!("{name}: is told {word:?}"), with(&|p| p.told = word));
                }
            }
            _ => {}
        }
    }

    /// A router takes a reply, by any revision that it may have read.
    fn take_reply(&self, world: &World, who: usize, steps: &mut Steps<World>) {
        let (person, name) = (&world.people[who], ["tab", "cli"][who]);
        let mut reply = self.replies[who].clone();
        if self.is(Weak::EachTryHasAnIdOfItsOwn) {
            reply.id = format!("{name}-{}", person.tries);
        }
        let trust = if who == TAB { Trust::Owner } else { Trust::Anybody };
        for revision in 1..=world.entry.revision() {
            let mut next = world.clone();
            let (written, answer) = match world.entry.at(revision).take(&reply, trust, NOW) {
                Taken::Decide(entry) => {
                    (next.write_decision(revision, *entry, self.hears()), ReplyResponse::Saved)
                }
                Taken::ListLate(entry, answer) => (next.entry.write(revision, *entry), answer),
                Taken::Answer(answer) => (true, answer),
            };
            let answer = match (written, answer) {
                (true, ReplyResponse::Saved) => Told::Saved,
                (true, ReplyResponse::Closed { .. }) => Told::Lost,
                (false, _) if self.is(Weak::ConflictIsLate) => Told::Lost,
                // It reads again.
                _ => continue,
            };
            next.people[who].coming = Some(answer);
            if world.crashes > 0 && next.entry.revision() != world.entry.revision() {
                let mut lost = next.clone();
                lost.crashes -= 1;
                lost.people[who].coming = None;
                lost.people[who].tries += u8::from(self.is(Weak::EachTryHasAnIdOfItsOwn));
                steps.fault(format_args!("router: takes the reply of {name}; the answer is lost"), lost);
            }
            steps.step(format_args!("router: takes the reply of {name} by revision {revision}"), next);
        }
    }

    // Adapters. Both may act at any time: the lease protects nothing.

    fn adapter(&self, world: &World, i: usize, steps: &mut Steps<World>) {
        let adapter = &world.adapters[i];
        if world.crashes > 0 && (adapter.heard || !matches!(adapter.has, Has::Nothing)) {
            let mut next = world.with_adapter(i, Adapter { heard: false, has: Has::Nothing });
            next.crashes -= 1;
            steps.fault(format_args!("adapter {i}: crashes, and forgets {:?}", adapter.has), next);
        }
        let with = |has| world.with_adapter(i, Adapter { has, ..adapter.clone() });
        let gateway = &world.gateway;
        match &adapter.has {
            Has::Nothing => match world.entry.newest() {
                None if gateway.question == AtGateway::Waits => {
                    steps.step(format_args!("adapter {i}: hears of the question"), with(Has::Asked));
                }
                None => {}
                Some(entry) if entry.is_pending() => {
                    if let Some((mut id, content)) = gateway.outcome_for_a_pending_question(entry) {
                        if self.is(Weak::LostRowIsNoAnswer) {
                            id = gateway_reply_id(&entry.key);
                        }
                        let what = format_args!("adapter {i}: learns the Gateway's outcome {content:?}");
                        steps.step(what, with(Has::GatewayOutcome(id, content.clone())));
                    }
                }
                Some(entry) => self.give_back(world, i, entry, steps),
            },
            Has::Asked => {
                let mut next = with(Has::Nothing);
                let created = next.entry.write(0, ask(Road::Native, "q", &choice()));
                steps.step(format_args!("adapter {i}: asks (created: {created})"), next);
            }
            Has::GatewayOutcome(id, content) => {
                let Some(entry) = world.entry.newest() else { return };
                let reply = with_content(id, Surface::Gateway, content.clone());
                let mut next = with(Has::Nothing);
                if let Taken::Decide(decided) = entry.take(&reply, Trust::Anybody, NOW) {
                    next.decide(*decided, self.hears());
                }
                steps.step(format_args!("adapter {i}: hands in the Gateway's outcome"), next);
            }
            Has::AlreadyTerminal => {
                let Some(entry) = world.entry.newest() else { return };
                let says = match &gateway.question {
                    AtGateway::Settled { by, outcome } if gateway.holds => {
                        GatewaySays::Settled { by: by.clone(), outcome: outcome.clone() }
                    }
                    _ => GatewaySays::Forgotten(gateway.transcript(entry)),
                };
                self.learn(world, i, entry, says, steps);
            }
            Has::Return(returned) => {
                let mut next = with(Has::Nothing);
                if let Some(closed) = world.entry.newest().and_then(|e| e.close(returned.clone(), NOW)) {
                    next.entry.write_newest(closed);
                }
                steps.step(format_args!("adapter {i}: closes it as {returned:?}"), next);
            }
        }
    }

    /// Gives a decision back, perhaps once more than needed.
    fn give_back(&self, world: &World, i: usize, entry: &Entry, steps: &mut Steps<World>) {
        let adapter = &world.adapters[i];
        let with = |world: &World, has| world.with_adapter(i, Adapter { has, ..adapter.clone() });
        if self.is(Weak::OnlyWhatIsHeardIsReturned) && !adapter.heard {
            return;
        }
        let is_closed = entry.returned().is_some();
        if let Some(returned) = decided_by_gateway(entry) {
            if !is_closed {
                steps
                    .step(format_args!("adapter {i}: needs no way back"), with(world, Has::Return(returned)));
            }
            return;
        }
        let gateway = &world.gateway;
        if gateway.question == AtGateway::Waits {
            let mut next = world.clone();
            let decision = entry.decision().expect("it is decided");
            next.gateway.settle(Some(&resolved_by(entry)), decision.outcome.clone());
            if world.crashes > 0 {
                let lost = World { crashes: world.crashes - 1, ..next.clone() };
                steps.fault(format_args!("adapter {i}: question.resolve; the response is lost"), lost);
            }
            self.learn(&next, i, entry, GatewaySays::Resolved, steps);
        } else if !is_closed && gateway.holds {
            let next = with(world, Has::AlreadyTerminal);
            steps.step(format_args!("adapter {i}: question.resolve: already terminal"), next);
        } else if !is_closed {
            let says = GatewaySays::Forgotten(gateway.transcript(entry));
            self.learn(world, i, entry, says, steps);
        }
    }

    fn learn(&self, world: &World, i: usize, entry: &Entry, says: GatewaySays, steps: &mut Steps<World>) {
        let mut next = world.clone();
        let no_answer = Outcome::Cancelled { reason: CancelReason::RunEnded };
        let delivered = Returned::Delivered { proof: "weak".into() };
        let overruled = |outcome| Returned::Overruled { by: None, outcome };
        let returned = match (self.weak, &says) {
            (Some(Weak::SettledIsDelivered), GatewaySays::Settled { .. }) => delivered,
            (Some(Weak::SettledIsOverruled), GatewaySays::Settled { outcome, .. }) => {
                overruled(outcome.clone())
            }
            (Some(Weak::ForgottenIsDelivered), GatewaySays::Forgotten(_)) => delivered,
            (Some(Weak::ForgottenIsOverruled), GatewaySays::Forgotten(_)) => overruled(no_answer),
            (Some(Weak::AnswerIsCarriedToTheNextQuestion), GatewaySays::Forgotten(_))
                if world.gateway.asked_again == AtGateway::Waits =>
            {
                let outcome = entry.decision().expect("it is decided").outcome.clone();
                next.gateway.asked_again = AtGateway::Settled { by: None, outcome };
                delivered
            }
            _ => returned(entry, says.clone(), world.gateway.restarted).expect("it is decided"),
        };
        let has = Has::Return(returned);
        let next = next.with_adapter(i, Adapter { has, ..world.adapters[i].clone() });
        steps.step(format_args!("adapter {i}: the Gateway says {says:?}"), next);
    }
}

/// What the Control UI answers.
fn theirs() -> Outcome {
    Outcome::Answered { answers: [("answer".into(), Answer::text("blue"))].into() }
}

/// What a person whose reply was saved is told in the end.
fn last_word(entry: &Entry) -> Option<Told> {
    Some(match entry.returned()? {
        Returned::Delivered { .. } => Told::Accepted,
        Returned::Overruled { .. } => Told::Lost,
        Returned::Unconfirmed { .. } => Told::Unconfirmed,
    })
}

impl Gateway {
    fn settle(&mut self, by: Option<&str>, outcome: Outcome) {
        self.agent = Some(outcome.clone());
        self.question = AtGateway::Settled { by: by.map(str::to_owned), outcome };
    }

    fn transcript(&self, entry: &Entry) -> InTranscript {
        match self.agent.as_ref().filter(|_| self.written && !self.row_lost) {
            None if self.row_lost => InTranscript::NothingInPart,
            None => InTranscript::Nothing,
            Some(Outcome::Answered { answers }) => {
                let ours = entry.decision().map(|d| &d.outcome) == self.agent.as_ref();
                InTranscript::Answers { ours, answers: answers.clone() }
            }
            Some(_) => InTranscript::NoAnswer,
        }
    }

    /// What an adapter hands in for a question that is pending on record, and under which id.
    fn outcome_for_a_pending_question(&self, entry: &Entry) -> Option<(String, ReplyContent)> {
        let content = |outcome: &Outcome| match outcome {
            Outcome::Answered { answers } => ReplyContent::Answers { answers: answers.clone() },
            Outcome::Expired => ReplyContent::Expired,
            _ => ReplyContent::Cancelled { reason: CancelReason::RunEnded },
        };
        match (&self.question, self.holds) {
            (AtGateway::NotAsked | AtGateway::Waits, _) => None,
            (AtGateway::Settled { outcome, .. }, true) => {
                Some((gateway_reply_id(&entry.key), content(outcome)))
            }
            _ => Some(forgotten_pending(&entry.key, self.transcript(entry), self.restarted)),
        }
    }
}

impl World {
    fn decide(&mut self, next: Entry, hear: bool) {
        self.entry.write_newest(next);
        for adapter in self.adapters.iter_mut().filter(|_| hear) {
            adapter.heard = true;
        }
        self.adapters.sort_by_key(hash_of);
    }

    fn write_decision(&mut self, revision: usize, next: Entry, hear: bool) -> bool {
        let fits = self.entry.revision() == revision;
        if fits {
            self.decide(next, hear);
        }
        fits
    }

    /// Adapters that are alike are one: their order means nothing.
    fn with_adapter(&self, i: usize, adapter: Adapter) -> Self {
        let mut next = self.clone();
        next.adapters[i] = adapter;
        next.adapters.sort_by_key(hash_of);
        next
    }

    fn agent_answer(&self) -> Option<&Outcome> {
        self.gateway.agent.as_ref().filter(|outcome| !outcome.is_no_answer())
    }
}

impl Model for Native {
    type State = World;

    fn start(&self) -> World {
        let gateway = Gateway {
            question: AtGateway::NotAsked,
            holds: true,
            agent: None,
            written: false,
            row_lost: false,
            restarted: false,
            may_decide: true,
            asked_again: AtGateway::NotAsked,
        };
        let person = Person { told: Told::NothingReplied, coming: None, tries: 0 };
        let adapter = Adapter { heard: false, has: Has::Nothing };
        World {
            gateway,
            entry: Revisions::default(),
            tab_remembered: false,
            people: [person.clone(), person],
            adapters: [adapter.clone(), adapter],
            crashes: self.crashes,
        }
    }

    fn steps(&self, world: &World, steps: &mut Steps<World>) {
        self.gateway(world, steps);
        self.routers(world, steps);
        self.people(world, steps);
        self.adapter(world, 0, steps);
        if hash_of(&world.adapters[0]) != hash_of(&world.adapters[1]) {
            self.adapter(world, 1, steps);
        }
    }

    fn wrong(&self, world: &World) -> Option<String> {
        let answer = world.agent_answer();
        for (person, reply) in world.people.iter().zip(&self.replies) {
            let ReplyContent::Answers { answers } = &reply.content else { continue };
            let has_mine = answer == Some(&Outcome::Answered { answers: answers.clone() });
            match person.told {
                Told::Accepted if !has_mine => return Some("told accepted, and the agent has it not".into()),
                Told::Lost if has_mine => return Some("told lost, and the agent has it".into()),
                Told::Lost if world.entry.is_pending() => {
                    return Some("told lost while it is pending".into());
                }
                _ => {}
            }
        }
        if matches!(world.gateway.asked_again, AtGateway::Settled { .. }) {
            return Some("an answer went to a run that did not ask".into());
        }
        let entry = world.entry.newest()?;
        let ours = entry.decision().map(|d| &d.outcome).filter(|outcome| !outcome.is_no_answer());
        match entry.returned() {
            Some(Returned::Delivered { .. }) if answer != ours => {
                return Some("returned as delivered, and the agent has something else".into());
            }
            Some(Returned::Overruled { outcome, .. })
                if answer == ours || answer != Some(outcome).filter(|o| !o.is_no_answer()) =>
            {
                return Some("returned as overruled, and the agent has something else".into());
            }
            _ => {}
        }
        world.entry.wrong(|id, outcome| {
            let submitted = self.replies.iter().any(|reply| {
                id.starts_with(&reply.id)
                    && matches!((&reply.content, outcome), (ReplyContent::Answers { answers: a }, Outcome::Answered { answers: b }) if a == b)
            });
            submitted || (id == gateway_reply_id(&entry.key) && answer == Some(outcome))
        })
    }

    fn good_end(&self, world: &World) -> Option<String> {
        let waits = |person: &Person| matches!(person.told, Told::Replied | Told::Saved);
        if matches!(world.gateway.question, AtGateway::NotAsked | AtGateway::Waits)
            || world.people.iter().any(waits)
        {
            return None;
        }
        match world.entry.newest() {
            None => {
                let idle = world.adapters.iter().all(|a| matches!(a.has, Has::Nothing));
                idle.then(|| "over before it was on record".into())
            }
            Some(entry) => {
                entry.returned()?;
                Some(match winner(entry) {
                    Some(by) if by.starts_with("gateway") || by.starts_with("lost") => {
                        format!("{} by the gateway", how(entry))
                    }
                    _ => how(entry),
                })
            }
        }
    }
}

#[test]
fn the_rules_of_native_questions_hold() {
    search(&Native::new(2, None)).holds(
        "native",
        &[
            "answered, delivered",
            "answered, overruled",
            "answered, unconfirmed",
            "answered, delivered by the gateway",
            "cancelled, delivered by the gateway",
            "cancelled, unconfirmed by the gateway",
            "expired, delivered",
            "expired, overruled",
            "expired, unconfirmed",
            "over before it was on record",
        ],
    );
}

fn broken(weak: Weak, property: &str) {
    search(&Native::new(2, Some(weak))).breaks(property);
}

#[test]
fn n1_already_terminal_read_as_delivered_is_found() {
    broken(Weak::SettledIsDelivered, "returned as delivered, and the agent has something else");
}

#[test]
fn n2_already_terminal_read_as_overruled_is_found() {
    broken(Weak::SettledIsOverruled, "returned as overruled, and the agent has something else");
}

#[test]
fn n3_not_found_read_as_delivered_is_found() {
    broken(Weak::ForgottenIsDelivered, "returned as delivered, and the agent has something else");
}

#[test]
fn n4_not_found_read_as_overruled_is_found() {
    broken(Weak::ForgottenIsOverruled, "returned as overruled, and the agent has something else");
}

#[test]
fn n3_n4_a_pending_question_whose_lost_result_is_read_as_no_answer_is_found() {
    broken(Weak::LostRowIsNoAnswer, "returned as delivered, and the agent has something else");
}

#[test]
fn n5_a_reply_with_a_new_id_for_each_try_is_found() {
    broken(Weak::EachTryHasAnIdOfItsOwn, "told lost, and the agent has it");
}

#[test]
fn n6_a_failed_compare_and_set_that_decides_is_found() {
    broken(Weak::ConflictIsLate, "told lost while it is pending");
}

#[test]
fn n7_an_adapter_that_returns_only_what_it_hears_is_found() {
    search(&Native { repliers: 1, ..Native::new(2, Some(Weak::OnlyWhatIsHeardIsReturned)) }).breaks("stuck");
}

#[test]
fn n8_an_emitter_that_tells_only_whom_it_remembers_is_found() {
    search(&Native { repliers: 1, ..Native::new(1, Some(Weak::OnlyWhoIsRememberedIsTold)) }).breaks("stuck");
}

#[test]
fn n9_an_answer_carried_to_the_next_question_is_found() {
    broken(Weak::AnswerIsCarriedToTheNextQuestion, "an answer went to a run that did not ask");
}
