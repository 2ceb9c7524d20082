//! Typed messages: what each is taken for, and its way to the Gateway. Questions come up at any
//! moment, messages are typed by several people and repeated until they are answered, two routers
//! and two adapters die between any two effects, the Gateway restarts.

use ask_core::call::{Gone, acknowledged, gone};
use ask_core::entry::{Entry, Road, Step, StepKind};
use ask_core::key::SessionKey;
use ask_core::native::{GatewaySays, decided_by_gateway, gateway_reply_id, resolved_by, returned};
use ask_core::outcome::{CancelReason, Outcome, Returned};
use ask_core::question::Question;
use ask_core::reply::{Answer, ReplyContent};
use ask_core::route::{Typed, route, send_by};
use ask_core::session::{Effect, Known, MessageDecision, RoutedMessage, SendBy, Session};
use ask_core::surface::Surface;
use ask_core::take::{Taken, Trust};
use ask_core::wire::{ReplyResponse, SayRequest};

use crate::record::{
    DEADLINE, NOW, Revisions, Value, ask, choice, form, how, other_choice, winner, with_content,
};
use crate::search::{Model, Steps, hash_of, search};

/// A reading of the rules that is weaker than they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Weak {
    /// Effect first, then the session's write.
    EffectFirst,
    /// A retry is answered from the record and redoes nothing.
    NothingIsRedone,
    /// The session keeps its last message only, and nobody says what they have seen.
    OnlyTheLastIsKept,
    /// As above, but the sender says how many messages it has seen: rule S3 itself.
    OnlyTheLastIsKeptAndSeenIsSaid,
    /// What was on screen is what this router has heard of.
    RouterMemory,
    /// The adapter does not look before it sends.
    SentWithoutALook,
    /// A native question is over when it is decided.
    OverWhenDecided,
    /// What would be taken as an answer is held back until the question is over.
    Held(StopBy),
    /// A new Gateway process gets again what was not acknowledged.
    SentAgainWithoutALook,
    /// A repeated message, which is twice in `CHAT`, is new where its item is.
    RepeatedItemIsNew,
    /// A Stop does nothing once another message came after it, whether it was done or not.
    StopIsOverWithTheNextMessage,
    /// What comes after a Stop does not wait for its end.
    StopIsNotAwaited,
}

/// How a typed Stop reaches the Gateway.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StopBy {
    ItsOwnRoad,
    Chat,
    ChatAfterTheQuestion,
}

struct Say {
    road: Road,
    questions: Vec<Question>,
    texts: Vec<&'static str>,
    /// How many replicas there are.
    routers: usize,
    adapters: usize,
    crashes: u8,
    restarts: bool,
    /// One front end sends all messages: the next one after the answer to the last.
    one_front: bool,
    /// Routers may have read any earlier revision of a question.
    old_reads: bool,
    /// The call of the first message is cancelled at some moment: Stop, or "Send now".
    leaves: bool,
    weak: Option<Weak>,
    ignored: &'static [&'static str],
    ids: Vec<String>,
}

#[derive(Debug, Clone, Hash)]
struct World {
    asked: Vec<Asked>,
    session: Value<Session>,
    session_revision: u32,
    chat: Vec<Item>,
    acknowledged: usize,
    people: Vec<Person>,
    routers: Vec<Router>,
    adapters: Vec<Adapter>,
    gateway: Gateway,
    left: Left,
    crashes: u8,
    /// A property that was broken by a step.
    wrong: Option<&'static str>,
}

/// A question, at the Gateway and on record.
#[derive(Debug, Clone, Hash)]
struct Asked {
    entry: Revisions,
    at_gateway: AtGateway,
    shown: bool,
}

#[derive(Debug, Clone, Hash, PartialEq, Eq)]
enum AtGateway {
    NotAsked,
    Waits,
    Settled { by: Option<String>, outcome: Outcome },
    Lost,
}

#[derive(Debug, Clone, Hash)]
struct Gateway {
    /// Of each message: how often it was carried out, and whether that was aborted.
    carried_out: Vec<u8>,
    aborted: Vec<bool>,
    /// The keys that this process knows.
    keys: Vec<bool>,
    /// The run was aborted, and asks nothing any more.
    run_is_over: bool,
    /// A message that a native question took for its answer.
    took: Option<usize>,
    may_restart: bool,
}

/// An item of `CHAT`.
#[derive(Debug, Clone, Hash)]
struct Item {
    message: usize,
    send: SendBy,
    number: u64,
    tried: bool,
    held_back: bool,
    is_stop: bool,
}

#[derive(Debug, Clone, Hash)]
struct Person {
    said: Said,
    on_screen: Vec<usize>,
    seen: u64,
}

#[derive(Debug, Clone, Hash, PartialEq, Eq)]
enum Said {
    Nothing,
    Typed,
    Told(MessageDecision),
    Refused,
}

#[derive(Debug, Clone, Hash)]
struct Router {
    job: Job,
    /// It has heard that the first question was delivered.
    heard: bool,
}

#[derive(Debug, Clone, Hash)]
enum Job {
    None,
    Write { message: usize, read: u32, routed: RoutedMessage },
    Effect { message: usize, session: Value<Session> },
    Rewrite { message: usize },
    Stop { message: usize, through: u64, stage: usize },
    Answer { message: usize, decision: MessageDecision },
}

#[derive(Debug, Clone, Hash)]
struct Adapter {
    /// It has looked into the transcript on this connection.
    looked: bool,
    /// The messages that it has dealt with on this connection.
    dealt_with: Vec<usize>,
    sends: Sends,
}

#[derive(Debug, Clone, Copy, Hash, PartialEq, Eq)]
enum Sends {
    Nothing,
    /// It has looked, and sends now.
    Checked(usize, SendBy),
    Sent(usize),
}

/// The call of the first message, cancelled by its front end.
#[derive(Debug, Clone, Copy, Hash, PartialEq, Eq)]
enum Left {
    No,
    Grace { before: u64 },
    Stops { through: u64, stage: usize },
    Stopped,
    WentOn,
}

impl Say {
    fn new(road: Road, questions: Vec<Question>, texts: Vec<&'static str>) -> Self {
        let ids = (0..questions.len()).map(|q| format!("q{q}")).collect();
        Self {
            road,
            questions,
            texts,
            routers: 2,
            adapters: 2,
            crashes: 1,
            restarts: false,
            one_front: false,
            old_reads: false,
            leaves: false,
            weak: None,
            ignored: &[],
            ids,
        }
    }

    fn is(&self, weak: Weak) -> bool {
        self.weak == Some(weak)
    }

    fn forgets(&self) -> bool {
        self.is(Weak::OnlyTheLastIsKept) || self.is(Weak::OnlyTheLastIsKeptAndSeenIsSaid)
    }

    fn stop_by(&self) -> StopBy {
        match self.weak {
            Some(Weak::Held(by)) => by,
            _ => StopBy::ItsOwnRoad,
        }
    }

    fn request(&self, person: &Person, message: usize) -> SayRequest {
        SayRequest {
            schema: ask_core::SCHEMA,
            session: SessionKey::new("g", "s"),
            message: format!("m{message}"),
            user: "alice".into(),
            user_name: None,
            front: "test".into(),
            chat: None,
            surfaces: Default::default(),
            text: self.texts[message].into(),
            attachments: Vec::new(),
            on_screen: Some(person.on_screen.iter().map(|q| self.ids[*q].clone()).collect()),
            seen: Some(person.seen),
            goes_on: false,
        }
    }

    // What happens outside of askbus, and the way back of an answer in two steps.

    fn outside(&self, world: &World, steps: &mut Steps<World>) {
        for (q, asked) in world.asked.iter().enumerate() {
            let with = |change: &dyn Fn(&mut Asked)| {
                let mut next = world.clone();
                change(&mut next.asked[q]);
                next
            };
            let entry = asked.entry.newest();
            if asked.at_gateway == AtGateway::NotAsked && !world.gateway.run_is_over {
                let mut next = with(&|a| a.at_gateway = AtGateway::Waits);
                if self.road != Road::Native {
                    next.asked[q].entry.write_newest(ask(self.road, &self.ids[q], &self.questions[q]));
                }
                steps.fault(format_args!("run: asks q{q}"), next);
            }
            if asked.at_gateway == AtGateway::Waits && entry.is_none() {
                let entry = ask(self.road, &self.ids[q], &self.questions[q]);
                let next = with(&|a| a.entry.write_newest(entry.clone()));
                steps.step(format_args!("adapter: puts q{q} on record"), next);
            }
            let Some(entry) = entry else { continue };
            if entry.is_pending() && !asked.shown {
                steps.step(format_args!("emitter: shows q{q}"), with(&|a| a.shown = true));
            }
            if let Some(expired) = entry.expire(false, DEADLINE) {
                let next = with(&|a| a.entry.write_newest(expired.clone()));
                let what = format_args!("router: the deadline of q{q}");
                // With Stop in the model all is to end well without it.
                if self.weak.is_some_and(|weak| matches!(weak, Weak::Held(_))) {
                    steps.fault(what, next);
                } else {
                    steps.step(what, next);
                }
            }
            self.way_back(world, q, entry, steps);
        }
        if world.gateway.may_restart {
            let mut next = world.clone();
            next.gateway.may_restart = false;
            next.gateway.keys.fill(false);
            for asked in next.asked.iter_mut().filter(|a| a.at_gateway == AtGateway::Waits) {
                asked.at_gateway = AtGateway::Lost;
            }
            for adapter in &mut next.adapters {
                (adapter.looked, adapter.dealt_with) = (false, Vec::new());
                if matches!(adapter.sends, Sends::Checked(..)) {
                    adapter.sends = Sends::Nothing;
                }
            }
            steps.fault(format_args!("gateway: restarts"), next);
        }
    }

    fn way_back(&self, world: &World, q: usize, entry: &Entry, steps: &mut Steps<World>) {
        let asked = &world.asked[q];
        let write = |entry: Entry| {
            let mut next = world.clone();
            next.asked[q].entry.write_newest(entry);
            next
        };
        let hand_in = |content| {
            let reply = with_content(&gateway_reply_id(&entry.key), Surface::Gateway, content);
            match entry.take(&reply, Trust::Anybody, NOW) {
                Taken::Decide(next) => Some(write(*next)),
                _ => None,
            }
        };
        if entry.is_pending() {
            let content = match (&asked.at_gateway, self.road) {
                (AtGateway::Settled { outcome: Outcome::Answered { answers }, .. }, _) => {
                    ReplyContent::Answers { answers: answers.clone() }
                }
                (AtGateway::Settled { .. }, _) => ReplyContent::Cancelled { reason: CancelReason::RunEnded },
                (AtGateway::Lost, _) => ReplyContent::Cancelled { reason: CancelReason::GatewayRestart },
                _ => return,
            };
            if let Some(next) = hand_in(content) {
                steps.step(format_args!("adapter: hands in what the Gateway has of q{q}"), next);
            }
            return;
        }
        let Some(decision) = entry.decision().filter(|_| entry.returned().is_none()) else { return };
        let how = match &asked.at_gateway {
            AtGateway::Waits => {
                let mut next = world.clone();
                let by = Some(resolved_by(entry));
                next.asked[q].at_gateway = AtGateway::Settled { by, outcome: decision.outcome.clone() };
                if self.road != Road::Native {
                    let closed = acknowledged(entry).and_then(|returned| entry.close(returned, NOW));
                    next.asked[q].entry.write_newest(closed.expect("it is decided"));
                }
                return steps.step(format_args!("adapter: gives the decision of q{q} to the agent"), next);
            }
            _ if self.road == Road::Native && decided_by_gateway(entry).is_some() => {
                decided_by_gateway(entry)
            }
            AtGateway::Settled { by, outcome } if self.road == Road::Native => {
                let (by, outcome) = (by.clone(), outcome.clone());
                returned(entry, GatewaySays::Settled { by, outcome }, false)
            }
            _ => match gone(entry, "run_ended") {
                Gone::Close(returned) => Some(returned),
                _ => None,
            },
        };
        if let Some(closed) = how.and_then(|returned| entry.close(returned, NOW)) {
            steps.step(format_args!("adapter: closes q{q}"), write(closed));
        }
    }

    fn people(&self, world: &World, steps: &mut Steps<World>) {
        for (message, person) in world.people.iter().enumerate() {
            // "Send now" cancels the call of the first message, and then sends the next.
            let is_first = message == 0 || matches!(world.people[message - 1].said, Said::Told(_));
            let may_type =
                (!self.one_front || is_first) && (!self.leaves || message == 0 || world.left != Left::No);
            if person.said == Said::Nothing && may_type {
                let mut next = world.clone();
                let on_screen = |q: &usize| world.asked[*q].shown && world.asked[*q].entry.is_pending();
                next.people[message] = Person {
                    said: Said::Typed,
                    on_screen: (0..world.asked.len()).filter(on_screen).collect(),
                    seen: if self.forgets() { world.session.count } else { 0 },
                };
                steps.fault(format_args!("user: types m{message} `{}`", self.texts[message]), next);
            }
        }
        if self.leaves && world.left == Left::No && matches!(world.people[0].said, Said::Told(_)) {
            let left = Left::Grace { before: world.session.count };
            steps.fault(format_args!("pipe: the call of m0 is cancelled"), World { left, ..world.clone() });
        }
    }

    /// The emitter's `left`: Stop, unless another message has come by the end of the grace.
    fn left(&self, world: &World, steps: &mut Steps<World>) {
        match world.left {
            Left::Grace { before } => {
                let went_on = world.session.went_on("m0", Some(before));
                let through = world.session.count;
                let left = if went_on { Left::WentOn } else { Left::Stops { through, stage: 0 } };
                let next = World { left, ..world.clone() };
                steps.step(format_args!("emitter: the grace is over (went on: {went_on})"), next);
            }
            Left::Stops { through, stage } => {
                let mut next = world.clone();
                next.stop_stage(through, stage);
                next.left = match stage == world.asked.len() + 2 {
                    true => Left::Stopped,
                    false => Left::Stops { through, stage: stage + 1 },
                };
                steps.step(format_args!("router: stops, {}", world.stage_name(stage)), next);
            }
            _ => {}
        }
    }

    // Routers.

    fn router(&self, world: &World, i: usize, steps: &mut Steps<World>) {
        let router = &world.routers[i];
        let job = |job| world.with_router(i, Router { job, ..router.clone() });
        if world.crashes > 0 && (router.heard || !matches!(router.job, Job::None)) {
            let mut next = world.with_router(i, Router { job: Job::None, heard: false });
            next.crashes -= 1;
            steps.fault(format_args!("router {i}: crashes"), next);
        }
        if self.is(Weak::RouterMemory) && world.asked[0].shown {
            let entry = world.asked[0].entry.newest().expect("it is shown");
            let nobody_heard = world.routers.iter().all(|r| !r.heard) && !entry.was_delivered();
            if nobody_heard {
                let next = world.with_router(i, Router { heard: true, ..router.clone() });
                steps.step(format_args!("emitter: reports delivery to router {i}"), next);
            }
            if let Some(noted) = entry.note(&heard(router)) {
                let mut next = world.clone();
                next.asked[0].entry.write_newest(noted);
                steps.step(format_args!("router {i}: writes that it was delivered"), next);
            }
        }
        match &router.job {
            Job::None => {
                for (message, person) in world.people.iter().enumerate() {
                    if person.said == Said::Typed {
                        self.say(world, i, message, person, steps);
                    }
                }
            }
            Job::Write { message, read, routed } => {
                if world.session_revision != *read {
                    let what = format_args!("router {i}: the write of m{message} fails; it reads again");
                    return steps.step(what, job(Job::None));
                }
                let mut session = world.session.routed(routed.clone());
                if self.forgets() {
                    session.messages.drain(..session.messages.len() - 1);
                }
                let mut next = world.clone();
                next.write_session(session);
                let then = match self.is(Weak::EffectFirst) {
                    true => Job::Answer { message: *message, decision: routed.decision.clone() },
                    false => Job::Effect { message: *message, session: next.session.clone() },
                };
                let next = next.with_router(i, Router { job: then, ..router.clone() });
                steps.step(format_args!("router {i}: m{message} is routed by {}", routed.rule), next);
            }
            Job::Effect { message, session } => self.effect(world, i, *message, session, steps),
            Job::Rewrite { message } => {
                let mut next = world.clone();
                next.change_session(|session| session.answer_was_late(&format!("m{message}")));
                let decision = late(world, *message);
                let answer = Job::Answer { message: *message, decision };
                let next = next.with_router(i, Router { job: answer, ..router.clone() });
                steps.step(format_args!("router {i}: rewrites m{message} to late"), next);
            }
            Job::Stop { message, through, stage } => {
                let mut next = world.clone();
                next.stop_stage(*through, *stage);
                let then = match *stage == world.asked.len() + 2 {
                    true => Job::Effect { message: *message, session: next.session.clone() },
                    false => Job::Stop { message: *message, through: *through, stage: stage + 1 },
                };
                let next = next.with_router(i, Router { job: then, ..router.clone() });
                steps.step(format_args!("router {i}: stops, {}", world.stage_name(*stage)), next);
            }
            Job::Answer { message, decision } => {
                let mut next = job(Job::None);
                if world.people[*message].said == Said::Typed {
                    next.people[*message].said = Said::Told(decision.clone());
                }
                steps.step(format_args!("router {i}: answers m{message}: {decision:?}"), next);
            }
        }
    }

    /// Takes a message: known already, or to be decided.
    fn say(&self, world: &World, i: usize, message: usize, person: &Person, steps: &mut Steps<World>) {
        let request = self.request(person, message);
        let with = |job| world.with_router(i, Router { job, ..world.routers[i].clone() });
        let seen = request.seen.filter(|_| !self.is(Weak::OnlyTheLastIsKept));
        match world.session.known(&request.message, seen) {
            Known::TooOld => {
                let mut next = world.clone();
                next.people[message].said = Said::Refused;
                return steps.step(format_args!("router {i}: m{message} is too old"), next);
            }
            Known::Routed(routed) => {
                let job = match self.is(Weak::NothingIsRedone) {
                    true => Job::Answer { message, decision: routed.decision.clone() },
                    false => Job::Effect { message, session: world.session.clone() },
                };
                return steps.step(format_args!("router {i}: m{message} is on record"), with(job));
            }
            Known::New => {}
        }
        for (read, is_newest) in self.reads(world) {
            let entries: Vec<Entry> = read
                .iter()
                .map(|entry| match self.is(Weak::RouterMemory) {
                    true => entry.note(&heard(&world.routers[i])).unwrap_or_else(|| Entry::clone(entry)),
                    false => Entry::clone(entry),
                })
                .collect();
            let takes = |entry: &&Entry| match self.is(Weak::OverWhenDecided) {
                true => entry.is_pending(),
                false => entry.takes_messages(),
            };
            let open: Vec<&Entry> = entries.iter().filter(takes).collect();
            let on_screen = request.on_screen.as_deref().filter(|_| !self.is(Weak::RouterMemory));
            let (route, rule) = route(Typed { text: &request.text, attachments: false, on_screen }, &open);
            let decision = route.decision(&open, &format!("run-m{message}"));
            let mut next = world.clone();
            next.wrong = next.wrong.or(self.routed_wrong(world, person, message, &decision, is_newest));
            let routed = RoutedMessage { id: request.message.clone(), at: NOW, decision, rule: rule.into() };
            let job = match self.is(Weak::EffectFirst) {
                true => Job::Effect { message, session: Value::new(world.session.routed(routed)) },
                false => Job::Write { message, read: world.session_revision, routed },
            };
            let next = next.with_router(i, Router { job, ..world.routers[i].clone() });
            let old = if is_newest { "" } else { " by an old revision" };
            steps.step(format_args!("router {i}: decides m{message} by {rule}{old}"), next);
        }
    }

    /// What a router may have read of the questions, and whether it is the newest.
    fn reads(&self, world: &World) -> Vec<(Vec<Value<Entry>>, bool)> {
        let newest = world.asked.iter().filter_map(|a| a.entry.newest().cloned()).collect();
        let mut reads = vec![(newest, true)];
        if let ([asked], true) = (world.asked.as_slice(), self.old_reads) {
            for revision in 0..asked.entry.revision() {
                let read = if revision == 0 { Vec::new() } else { vec![asked.entry.at(revision).clone()] };
                reads.push((read, false));
            }
        }
        reads
    }

    fn routed_wrong(
        &self,
        world: &World,
        person: &Person,
        message: usize,
        decision: &MessageDecision,
        is_newest: bool,
    ) -> Option<&'static str> {
        let waits: Vec<usize> =
            person.on_screen.iter().copied().filter(|q| world.asked[*q].entry.is_pending()).collect();
        let is_stop = self.texts[message] == "/stop";
        match (decision, waits.as_slice()) {
            (MessageDecision::Answer { question }, _) => {
                let was_on_screen = person.on_screen.iter().any(|q| question.ends_with(&self.ids[*q]));
                let guessed = waits.len() > 1 && self.texts[message] == "red";
                match (was_on_screen, guessed) {
                    (false, _) => Some("typed before the question was on screen, and taken as its answer"),
                    (true, true) => Some("one of several questions was guessed"),
                    _ => None,
                }
            }
            (MessageDecision::Message { .. }, [_, ..]) if is_newest && !is_stop => {
                Some("typed under a question, and not taken as its answer")
            }
            _ => None,
        }
    }

    fn effect(
        &self,
        world: &World,
        i: usize,
        message: usize,
        session: &Value<Session>,
        steps: &mut Steps<World>,
    ) {
        let id = format!("m{message}");
        let Some(routed) = session.messages.iter().find(|m| m.id == id) else { return };
        let answer = Job::Answer { message, decision: routed.decision.clone() };
        let answer = match self.is(Weak::EffectFirst) {
            true => Job::Write { message, read: world.session_revision, routed: routed.clone() },
            false => answer,
        };
        let with = |world: &World, job| world.with_router(i, Router { job, ..world.routers[i].clone() });
        let put = |send, number, is_stop| {
            let mut next = with(world, answer.clone());
            let item = Item { message, send, number, tried: false, held_back: false, is_stop };
            next.chat.push(item);
            next
        };
        let is_over = self.is(Weak::StopIsOverWithTheNextMessage)
            && routed.decision == MessageDecision::Stop
            && session.messages.back() != Some(routed);
        let effect = if is_over { Effect::Nothing } else { session.effect(routed) };
        if !matches!(effect, Effect::Stop { .. } | Effect::Nothing)
            && self.stop_by() == StopBy::ItsOwnRoad
            && !self.is(Weak::StopIsNotAwaited)
            && let Some(through) = session.owed_stop(&id)
        {
            let next = with(world, Job::Stop { message, through, stage: 0 });
            return steps
                .step(format_args!("router {i}: m{message} comes after a Stop that is not done"), next);
        }
        match effect {
            Effect::Send { send, number, .. } => {
                steps.step(format_args!("router {i}: puts m{message} into CHAT"), put(send, number, false));
            }
            Effect::Reply { question } => {
                let q = self.ids.iter().position(|id| question.ends_with(id)).expect("its question");
                let entry = world.asked[q].entry.newest().expect("it is on record");
                let Some(reply) = self.request(&world.people[message], message).as_reply(&entry.question)
                else {
                    return;
                };
                let mut next = world.clone();
                let said = match entry.take(&reply, Trust::Owner, NOW) {
                    Taken::Decide(decided) => {
                        next.asked[q].entry.write_newest(*decided);
                        ReplyResponse::Saved
                    }
                    Taken::ListLate(listed, said) => {
                        next.asked[q].entry.write_newest(*listed);
                        said
                    }
                    Taken::Answer(said) => said,
                };
                let job = match (said, &routed.decision) {
                    (ReplyResponse::Saved, _) => answer,
                    (_, MessageDecision::Answer { .. }) => Job::Rewrite { message },
                    (_, decision) => Job::Answer { message, decision: decision.clone() },
                };
                steps.step(format_args!("router {i}: m{message} as the reply to q{q}"), with(&next, job));
            }
            Effect::Stop { through } => {
                let next = match self.stop_by() {
                    StopBy::ItsOwnRoad => with(world, Job::Stop { message, through, stage: 0 }),
                    StopBy::Chat => put(SendBy::ChatSend, through, true),
                    StopBy::ChatAfterTheQuestion => {
                        let mut next = put(SendBy::ChatSend, through, true);
                        next.stop_stage(through, 1);
                        next
                    }
                };
                steps.step(format_args!("router {i}: m{message} is a Stop"), next);
            }
            Effect::Nothing => {
                steps.step(format_args!("router {i}: nothing to do for m{message}"), with(world, answer))
            }
        }
    }

    // Adapters, which both work off `CHAT`.

    fn adapter(&self, world: &World, i: usize, steps: &mut Steps<World>) {
        let adapter = &world.adapters[i];
        if world.crashes > 0 && (adapter.looked || adapter.sends != Sends::Nothing) {
            let mut next = world
                .with_adapter(i, Adapter { looked: false, dealt_with: Vec::new(), sends: Sends::Nothing });
            next.crashes -= 1;
            steps.fault(format_args!("adapter {i}: crashes ({:?})", adapter.sends), next);
        }
        let with = |world: &World, sends| world.with_adapter(i, Adapter { sends, ..adapter.clone() });
        match adapter.sends {
            Sends::Nothing => {
                if let Some(item) = world.chat.get(world.acknowledged) {
                    self.check(world, i, item, steps);
                }
            }
            Sends::Checked(at, by) => {
                let mut next = with(world, Sends::Sent(at));
                let what = next.carry_out(at, by, self.road);
                let message = world.chat[at].message;
                steps.step(format_args!("adapter {i}: sends m{message} by {by:?}: {what}"), next);
            }
            Sends::Sent(at) => {
                let item = &world.chat[at];
                let mut dealt_with = adapter.dealt_with.clone();
                if self.restarts && !dealt_with.contains(&item.message) {
                    dealt_with.push(item.message);
                }
                let adapter = Adapter { sends: Sends::Nothing, dealt_with, ..adapter.clone() };
                let mut next = world.with_adapter(i, adapter);
                next.acknowledged = next.acknowledged.max(at + 1);
                let carried_out = world.gateway.carried_out[item.message] > 0;
                let stopped = carried_out && world.session.is_stopped(item.number);
                if stopped {
                    next.gateway.aborted[item.message] = true;
                }
                let what = if stopped { "aborts it, since it was stopped, and " } else { "" };
                steps.step(format_args!("adapter {i}: {what}acknowledges m{}", item.message), next);
            }
        }
    }

    /// The last look at the first item that is not acknowledged.
    fn check(&self, world: &World, i: usize, item: &Item, steps: &mut Steps<World>) {
        let (at, message) = (world.acknowledged, item.message);
        let adapter = &world.adapters[i];
        let mut tried = world.clone();
        tried.chat[at].tried = true;
        let with = |sends| tried.with_adapter(i, Adapter { sends, looked: true, ..adapter.clone() });
        if item.is_stop {
            return steps.step(
                format_args!("adapter {i}: takes the Stop from CHAT"),
                with(Sends::Checked(at, item.send)),
            );
        }
        let repeated = adapter.dealt_with.contains(&message) && !self.is(Weak::RepeatedItemIsNew);
        let may_be_sent = item.tried || repeated;
        let looks = (may_be_sent || !adapter.looked) && !self.is(Weak::SentAgainWithoutALook);
        if looks && world.gateway.carried_out[message] > 0 {
            let what = format_args!("adapter {i}: m{message} is in the transcript");
            return steps.step(what, with(Sends::Sent(at)));
        }
        if world.session.is_stopped(item.number) {
            let mut next = with(Sends::Sent(at));
            next.chat[at].held_back = true;
            let what = format_args!("adapter {i}: m{message} was stopped before it was sent");
            return steps.step(what, next);
        }
        let told_open = self.road == Road::Native
            && !self.is(Weak::OverWhenDecided)
            && world.asked.iter().any(|a| a.at_gateway == AtGateway::Waits);
        let on_record = world.asked.iter().filter_map(|a| a.entry.newest()).map(|entry| &**entry);
        let by = match self.weak {
            Some(Weak::SentWithoutALook) => item.send,
            Some(Weak::OverWhenDecided) => {
                send_by(item.send, told_open, on_record.filter(|entry| entry.is_pending()))
            }
            _ => send_by(item.send, told_open, on_record),
        };
        if matches!(self.weak, Some(Weak::Held(_))) && by == SendBy::AgentMethod {
            // It may have been routed under a question that is over by now.
            let over = world.asked.iter().all(|a| {
                a.at_gateway != AtGateway::Waits && a.entry.newest().is_none_or(|e| !e.takes_messages())
            });
            if !over {
                return;
            }
        }
        steps.step(
            format_args!("adapter {i}: looks before it sends m{message}: {by:?}"),
            with(Sends::Checked(at, by)),
        );
    }
}

fn heard(router: &Router) -> Vec<Step> {
    let what = StepKind::Delivered { surface: Surface::Card, chat: None };
    if router.heard { vec![Step { at: NOW, what }] } else { Vec::new() }
}

fn late(world: &World, message: usize) -> MessageDecision {
    let id = format!("m{message}");
    let routed = world.session.messages.iter().find(|m| m.id == id);
    match routed.map(|m| m.decision.clone()) {
        Some(MessageDecision::Answer { question } | MessageDecision::Late { question }) => {
            MessageDecision::Late { question }
        }
        other => other.unwrap_or(MessageDecision::Stop),
    }
}

impl World {
    fn stage_name(&self, stage: usize) -> &'static str {
        match stage {
            0 => "what was not sent is held back",
            _ if stage <= self.asked.len() => "a question is cancelled",
            _ if stage == self.asked.len() + 1 => "the Gateway aborts",
            _ => "it is done",
        }
    }

    fn number_of(&self, message: usize) -> u64 {
        let id = format!("m{message}");
        let after = self.session.messages.iter().rev().take_while(|m| m.id != id).count() as u64;
        self.session.count - after
    }

    fn write_session(&mut self, session: Session) {
        self.session = Value::new(session);
        self.session_revision += 1;
    }

    fn change_session(&mut self, change: impl Fn(&Session) -> Option<Session>) {
        if let Some(session) = change(&self.session) {
            self.write_session(session);
        }
    }

    /// One effect of Stop.
    fn stop_stage(&mut self, through: u64, stage: usize) {
        match stage {
            0 => self.change_session(|session| session.stopped(through)),
            // Questions before the abort, as the router does it.
            _ if stage <= self.asked.len() => {
                let entry = &mut self.asked[stage - 1].entry;
                let cancelled = entry.newest().and_then(|e| e.cancel(CancelReason::Stop, "stop", NOW));
                if let Some(cancelled) = cancelled {
                    entry.write_newest(cancelled);
                }
            }
            _ if stage == self.asked.len() + 1 => {
                let later = |message: usize| {
                    self.gateway.carried_out[message] > 0 && self.number_of(message) > through
                };
                if (0..self.people.len()).any(later) {
                    self.wrong = self.wrong.or(Some(ENDED_LATER));
                }
                self.abort();
            }
            _ => self.change_session(|session| session.stop_was_done(through)),
        }
    }

    /// The Gateway aborts the run of the session, and all that waits for it.
    fn abort(&mut self) {
        self.gateway.run_is_over = true;
        for (message, times) in self.gateway.carried_out.iter().enumerate() {
            self.gateway.aborted[message] |= *times > 0;
        }
        for asked in self.asked.iter_mut().filter(|a| a.at_gateway == AtGateway::Waits) {
            let outcome = Outcome::Cancelled { reason: CancelReason::RunEnded };
            asked.at_gateway = AtGateway::Settled { by: None, outcome };
        }
    }

    /// What the Gateway does with a message.
    fn carry_out(&mut self, at: usize, by: SendBy, road: Road) -> &'static str {
        let (message, is_stop) = (self.chat[at].message, self.chat[at].is_stop);
        let earlier = self.chat[..at].iter().map(|item| (item.message, item.held_back));
        let out_of_order = earlier.filter(|(m, held_back)| {
            !held_back && self.gateway.carried_out[*m] == 0 && self.gateway.took != Some(*m)
        });
        if out_of_order.count() > 0 {
            self.wrong = self.wrong.or(Some("a message overtook an earlier one"));
        }
        if std::mem::replace(&mut self.gateway.keys[message], true) {
            return "a known key";
        }
        if is_stop {
            self.gateway.carried_out[message] += 1;
            self.abort();
            return "aborts";
        }
        let waits = |asked: &&mut Asked| asked.at_gateway == AtGateway::Waits;
        let native = road == Road::Native && by == SendBy::ChatSend;
        if let Some(asked) = self.asked.iter_mut().find(waits).filter(|_| native) {
            let wrong = match asked.entry.is_decided() {
                true => "a message overtook the decided answer at the Gateway",
                false => "a message was sent while a native question was open",
            };
            self.wrong = self.wrong.or(Some(wrong));
            let answers = [("answer".into(), Answer::text("taken"))].into();
            let outcome = Outcome::Answered { answers };
            asked.at_gateway = AtGateway::Settled { by: None, outcome };
            self.gateway.took = Some(message);
            return "the question takes it as its answer";
        }
        self.gateway.carried_out[message] += 1;
        "carried out"
    }

    fn with_router(&self, i: usize, router: Router) -> Self {
        let mut next = self.clone();
        next.routers[i] = router;
        next.routers.sort_by_key(hash_of);
        next
    }

    fn with_adapter(&self, i: usize, adapter: Adapter) -> Self {
        let mut next = self.clone();
        next.adapters[i] = adapter;
        next.adapters.sort_by_key(hash_of);
        next
    }
}

impl Model for Say {
    type State = World;

    fn start(&self) -> World {
        let asked = Asked { entry: Revisions::default(), at_gateway: AtGateway::NotAsked, shown: false };
        let person = Person { said: Said::Nothing, on_screen: Vec::new(), seen: 0 };
        let router = Router { job: Job::None, heard: false };
        let adapter = Adapter { looked: false, dealt_with: Vec::new(), sends: Sends::Nothing };
        let messages = self.texts.len();
        let session = Session {
            schema: ask_core::SCHEMA,
            key: SessionKey::new("g", "s"),
            owner: "alice".into(),
            front: "test".into(),
            chat: None,
            surfaces: Default::default(),
            bound_at: NOW,
            count: 0,
            stopped_through: 0,
            stop_done: 0,
            messages: Default::default(),
        };
        World {
            asked: vec![asked; self.questions.len()],
            session: Value::new(session),
            session_revision: 0,
            chat: Vec::new(),
            acknowledged: 0,
            people: vec![person; messages],
            routers: vec![router; self.routers],
            adapters: vec![adapter; self.adapters],
            gateway: Gateway {
                carried_out: vec![0; messages],
                aborted: vec![false; messages],
                keys: vec![false; messages],
                run_is_over: false,
                took: None,
                may_restart: self.restarts,
            },
            left: Left::No,
            crashes: self.crashes,
            wrong: None,
        }
    }

    fn steps(&self, world: &World, steps: &mut Steps<World>) {
        self.outside(world, steps);
        self.people(world, steps);
        self.left(world, steps);
        // Replicas that are alike do the same.
        for i in 0..self.routers {
            if i == 0 || hash_of(&world.routers[i]) != hash_of(&world.routers[i - 1]) {
                self.router(world, i, steps);
            }
        }
        for i in 0..self.adapters {
            if i == 0 || hash_of(&world.adapters[i]) != hash_of(&world.adapters[i - 1]) {
                self.adapter(world, i, steps);
            }
        }
    }

    fn wrong(&self, world: &World) -> Option<String> {
        let mut wrong: Vec<&str> = world.wrong.into_iter().collect();
        for (message, person) in world.people.iter().enumerate() {
            let reply = format!("message-m{message}");
            let won = world.asked.iter().any(|a| a.entry.newest().and_then(|e| winner(e)) == Some(&reply));
            let carried_out = world.gateway.carried_out[message];
            let sent = carried_out > 0 || world.chat.iter().any(|item| item.message == message);
            if won && sent {
                wrong.push("a message is both an answer and a message to the agent");
            }
            if carried_out > 1 {
                wrong.push("a message was carried out twice");
            }
            match &person.said {
                Said::Told(MessageDecision::Answer { .. }) if !won => {
                    wrong.push("told that it is the answer, and it is not");
                }
                Said::Told(MessageDecision::Stop) if self.stop_by() == StopBy::ItsOwnRoad => {
                    // Only where it is not forgotten by now.
                    let is_kept = world.session.messages.iter().any(|m| m.id == format!("m{message}"));
                    if is_kept && !world.session.is_stopped(world.number_of(message)) {
                        wrong.push("told that it is stopped, and it is not");
                    }
                }
                Said::Told(MessageDecision::Late { .. }) if won || sent => {
                    wrong.push("told that it was late, and it took effect");
                }
                _ => {}
            }
        }
        for asked in &world.asked {
            if let Some(Returned::Delivered { .. }) = asked.entry.returned() {
                let ours = asked.entry.newest()?.decision().map(|d| &d.outcome);
                let got = match &asked.at_gateway {
                    AtGateway::Settled { outcome, .. } => Some(outcome),
                    _ => None,
                };
                let answer = |o: Option<&Outcome>| o.filter(|o| !o.is_no_answer()).cloned();
                if answer(ours) != answer(got) {
                    wrong.push("returned as delivered, and the agent has something else");
                }
            }
        }
        let found = wrong.into_iter().find(|property| !self.ignored.contains(property));
        found.map(str::to_owned).or_else(|| {
            world.asked.iter().enumerate().find_map(|(q, asked)| {
                asked.entry.wrong(|id, outcome| {
                    let mine = (0..self.texts.len()).any(|message| {
                        let request = self.request(&world.people[message], message);
                        let reply = request.as_reply(&self.questions[q]);
                        reply.is_some_and(|reply| {
                            matches!((&reply.content, outcome), (ReplyContent::Answers { answers: a }, Outcome::Answered { answers: b }) if a == b) && reply.id == id
                        })
                    });
                    mine || id == format!("gateway-q{q}") && world.gateway.took.is_some()
                })
            })
        })
    }

    fn good_end(&self, world: &World) -> Option<String> {
        let open = |a: &Asked| match a.entry.newest() {
            None => a.at_gateway == AtGateway::Waits,
            Some(entry) => entry.returned().is_none(),
        };
        let holds = matches!(self.weak, Some(Weak::Held(_)));
        if holds && world.people.last().is_some_and(|p| p.said == Said::Nothing) {
            return Some("nobody said stop".into());
        }
        let stopping = matches!(world.left, Left::Grace { .. } | Left::Stops { .. });
        let is_typed = world.people.iter().any(|p| p.said == Said::Typed);
        if world.asked.iter().any(open) || is_typed || stopping || world.acknowledged < world.chat.len() {
            return None;
        }
        let mut ends = Vec::new();
        for (message, person) in world.people.iter().enumerate() {
            let (times, aborted) = (world.gateway.carried_out[message], world.gateway.aborted[message]);
            let item = world.chat.iter().find(|item| item.message == message);
            let stopped = item.is_some_and(|item| world.session.is_stopped(item.number));
            let took = world.gateway.took == Some(message);
            ends.push(match (&person.said, item) {
                (Said::Nothing, _) => "not typed",
                (Said::Refused, _) => "refused",
                (Said::Told(MessageDecision::Message { .. }), Some(item)) => {
                    match (item.held_back, times, stopped, aborted) {
                        _ if took => "taken by the gateway",
                        (true, 0, true, _) => "held back",
                        (_, 1, true, true) => "aborted",
                        (false, 1, false, false) => "sent",
                        (false, 1, false, true) => "sent and aborted",
                        _ => return None,
                    }
                }
                (Said::Told(MessageDecision::Message { .. }), None) => return None,
                (Said::Told(MessageDecision::Answer { .. }), _) => "answer",
                (Said::Told(MessageDecision::Late { .. }), _) => "late",
                (Said::Told(MessageDecision::Clarify { .. }), _) => "asked again",
                (Said::Told(MessageDecision::Stop), _) => "stop",
                (Said::Typed, _) => return None,
            });
        }
        let questions = world.asked.iter().map(|a| a.entry.newest().map_or("not asked".into(), |e| how(e)));
        Some(format!("{} ({})", ends.join(" + "), questions.collect::<Vec<_>>().join(" + ")))
    }
}

/// Two routers that do the same Stop may do so with a message between them.
const ENDED_LATER: &str = "a Stop ended what came after it";

/// The Gateway's own window, which no rule here closes (rule S8).
const WINDOW: &[&str] = &[
    "a message was sent while a native question was open",
    "a message overtook the decided answer at the Gateway",
    ENDED_LATER,
];

fn native(texts: &[&'static str]) -> Say {
    Say { ignored: WINDOW, ..Say::new(Road::Native, vec![choice()], texts.to_vec()) }
}

fn plugin(texts: &[&'static str]) -> Say {
    Say { ignored: &[ENDED_LATER], ..Say::new(Road::Plugin, vec![choice()], texts.to_vec()) }
}

#[test]
fn the_rules_of_messages_hold_while_a_call_asks() {
    search(&Say { crashes: 2, ..plugin(&["red"]) }).holds(
        "say, plugin, one message",
        &["answer (answered, delivered)", "late (expired, delivered)", "sent (expired, delivered)"],
    );
    search(&Say { adapters: 1, ..plugin(&["red", "green"]) }).holds(
        "say, plugin, two messages",
        &[
            "answer + late (answered, delivered)",
            "answer + sent (answered, delivered)",
            "sent + sent (expired, delivered)",
            "sent + sent (not asked)",
        ],
    );
}

#[test]
fn the_rules_of_messages_hold_while_the_gateway_asks() {
    search(&Say { crashes: 2, ..native(&["red"]) }).holds(
        "say, native, one message",
        &["answer (answered, delivered)", "late (expired, delivered)", "sent (expired, delivered)"],
    );
    search(&Say { adapters: 1, crashes: 0, ..native(&["red", "green"]) }).holds(
        "say, native, two messages",
        &["answer + late (answered, delivered)", "sent + answer (answered, delivered)"],
    );
}

#[test]
fn the_rules_hold_when_routers_read_old_revisions() {
    let old = Say { old_reads: true, ..native(&["red"]) };
    search(&old).holds("say, old revisions", &["answer (answered, delivered)", "sent (expired, delivered)"]);
}

#[test]
fn the_rules_hold_when_the_gateway_restarts() {
    let restarts = Say { restarts: true, crashes: 2, ..native(&["red"]) };
    search(&restarts).holds(
        "say, restart",
        &["answer (answered, unconfirmed)", "sent (cancelled, unconfirmed)", "answer (answered, delivered)"],
    );
}

#[test]
fn two_questions_at_once_are_answered_without_a_guess() {
    let questions = vec![choice(), other_choice()];
    let say = Say::new(Road::Plugin, questions, vec!["red", "blue"]);
    search(&Say { routers: 1, adapters: 1, crashes: 0, ..say }).holds(
        "say, two questions",
        &[
            "asked again + answer (expired, delivered + answered, delivered)",
            "answer + answer (answered, delivered + answered, delivered)",
        ],
    );
}

#[test]
fn a_form_is_answered_by_a_whole_reply_only() {
    let say = Say::new(Road::Plugin, vec![form()], vec!["Lisbon", "Lisbon\n2000"]);
    search(&Say { adapters: 1, crashes: 0, ..say }).holds(
        "say, form",
        &["asked again + answer (answered, delivered)", "asked again + sent (expired, delivered)"],
    );
}

#[test]
fn stop_ends_what_waits_and_what_was_said_before_it() {
    search(&Say { adapters: 1, one_front: true, ..plugin(&["hello", "/stop"]) }).holds(
        "say, stop, crashes",
        &[
            "held back + stop (not asked)",
            "aborted + stop (not asked)",
            "aborted + stop (cancelled, unconfirmed)",
        ],
    );
    search(&Say { crashes: 0, one_front: true, ..native(&["red", "/stop"]) }).holds(
        "say, stop, two adapters",
        &["answer + stop (answered, delivered)", "aborted + stop (cancelled, delivered)"],
    );
}

/// A known window: nothing fences an adapter at the Gateway, so one that had looked before Stop may
/// send after it, and die before it looks again.
#[test]
fn s10_an_adapter_that_sends_after_stop_and_dies_is_the_window_that_stays_open() {
    search(&Say { routers: 1, ..plugin(&["hello", "/stop"]) }).breaks("stuck");
}

#[test]
fn a_cancelled_call_is_stop_unless_another_message_comes_within_the_grace() {
    let leaves = Say { leaves: true, routers: 1, adapters: 1, ..plugin(&["hello", "green"]) };
    search(&leaves)
        .holds("say, left", &["sent + answer (answered, delivered)", "aborted + not typed (not asked)"]);
}

fn broken(weak: Weak, say: Say, property: &str) {
    search(&Say { weak: Some(weak), ..say }).breaks(property);
}

#[test]
fn s1_the_effect_before_the_sessions_write_is_found() {
    broken(Weak::EffectFirst, plugin(&["red"]), "both an answer and a message");
}

#[test]
fn s2_a_retry_that_redoes_nothing_is_found() {
    broken(Weak::NothingIsRedone, plugin(&["red"]), "it is the answer, and it is not");
}

#[test]
fn s3_a_session_that_keeps_only_its_last_message_is_found() {
    broken(
        Weak::OnlyTheLastIsKept,
        Say { adapters: 1, ..plugin(&["red", "green"]) },
        "both an answer and a message",
    );
}

#[test]
fn s3_a_short_memory_is_harmless_when_the_sender_says_what_it_has_seen() {
    let weak = Some(Weak::OnlyTheLastIsKeptAndSeenIsSaid);
    search(&Say { weak, adapters: 1, crashes: 0, ..plugin(&["red", "green"]) })
        .holds("s3", &["refused + sent (not asked)"]);
}

#[test]
fn s4_what_is_on_screen_by_a_routers_memory_is_found() {
    let mut say = plugin(&["red"]);
    say.ignored = &["typed before the question was on screen, and taken as its answer"];
    broken(Weak::RouterMemory, say, "typed under a question, and not taken as its answer");
}

#[test]
fn s5_what_came_on_screen_later_by_a_routers_memory_is_found() {
    let mut say = plugin(&["red"]);
    say.ignored = &["typed under a question, and not taken as its answer"];
    broken(Weak::RouterMemory, say, "typed before the question was on screen, and taken as its answer");
}

#[test]
fn s6_an_adapter_that_does_not_look_before_it_sends_is_found() {
    let say = Say { ignored: &[], crashes: 0, ..native(&["red"]) };
    broken(Weak::SentWithoutALook, say, "sent while a native question was open");
}

#[test]
fn s7_a_native_question_that_is_over_when_decided_is_found() {
    let mut say = Say { crashes: 0, ..native(&["red", "green"]) };
    say.ignored = &["a message was sent while a native question was open"];
    broken(Weak::OverWhenDecided, say, "overtook the decided answer");
}

/// All rules are kept, and the window inside the Gateway is still there: docs/protocol.md says so.
#[test]
fn s8_the_window_inside_the_gateway_stays_open() {
    let say = Say { ignored: &[], crashes: 0, ..native(&["red"]) };
    search(&say).breaks("sent while a native question was open");
}

#[test]
fn s9_a_stop_that_waits_behind_messages_is_found() {
    let say = Say { routers: 1, adapters: 1, crashes: 0, ..native(&["hello", "/stop"]) };
    broken(Weak::Held(StopBy::Chat), say, "stuck");
}

#[test]
fn s10_a_stop_that_sends_what_was_held_before_it_is_found() {
    let say = Say { routers: 1, adapters: 1, crashes: 0, ..native(&["hello", "/stop"]) };
    broken(Weak::Held(StopBy::ChatAfterTheQuestion), say, "stuck");
}

#[test]
fn s9_s10_messages_that_are_held_do_no_harm_when_stop_has_its_own_road() {
    let weak = Some(Weak::Held(StopBy::ItsOwnRoad));
    let say = Say { weak, adapters: 1, crashes: 0, ..native(&["hello", "/stop"]) };
    search(&say).holds("say, held", &["held back + stop (cancelled, delivered)"]);
}

#[test]
fn s2_a_stop_that_dies_halfway_is_finished_before_another_message_takes_effect() {
    let weak = Some(Weak::Held(StopBy::ItsOwnRoad));
    let say = Say { weak, routers: 1, adapters: 1, ..native(&["hello", "/stop"]) };
    search(&say).holds("say, stop, halfway", &["sent + stop (not asked)"]);
    let say = Say { ignored: &[], routers: 1, adapters: 1, ..plugin(&["hello", "/stop"]) };
    search(&say).holds("say, stop, one router", &["aborted + stop (not asked)", "sent + stop (not asked)"]);
}

/// A known window: nothing fences a router at the Gateway either.
#[test]
fn s2_two_routers_that_finish_the_same_stop_are_the_window_that_stays_open() {
    let say = Say { ignored: &[], adapters: 1, ..plugin(&["hello", "/stop"]) };
    search(&say).breaks(ENDED_LATER);
}

#[test]
fn s2_a_message_that_does_not_await_the_stop_before_it_is_found() {
    let say = Say { ignored: &[], routers: 1, adapters: 1, ..plugin(&["hello", "/stop"]) };
    broken(Weak::StopIsNotAwaited, say, ENDED_LATER);
}

#[test]
fn s11_what_was_not_acknowledged_sent_again_to_a_new_process_is_found() {
    let say = Say { restarts: true, questions: vec![], ids: vec![], ..plugin(&["hello"]) };
    broken(Weak::SentAgainWithoutALook, say, "a message was carried out twice");
}

#[test]
fn s11_a_message_that_is_twice_in_chat_and_taken_for_new_is_found() {
    let say = Say { restarts: true, questions: vec![], ids: vec![], ..plugin(&["hello"]) };
    broken(Weak::RepeatedItemIsNew, say, "a message was carried out twice");
}

#[test]
fn s2_a_stop_that_is_never_done_since_a_message_came_after_it_is_found() {
    let say = Say { adapters: 1, ..plugin(&["hello", "/stop"]) };
    broken(Weak::StopIsOverWithTheNextMessage, say, "told that it is stopped, and it is not");
}
