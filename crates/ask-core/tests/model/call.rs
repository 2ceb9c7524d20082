//! A tool call that asks: its client repeats it with the same id until it has the outcome. Two
//! people reply, routers and adapters come and go, responses get lost, the run is stopped, the
//! client's process restarts.

use ask_core::call::{Gone, acknowledged, closes_by_itself, gone, seen_in_result, told};
use ask_core::entry::{Entry, Road};
use ask_core::native::gateway_reply_id;
use ask_core::outcome::{CancelReason, Outcome, Returned};
use ask_core::question::Question;
use ask_core::reply::{Reply, ReplyContent};
use ask_core::surface::{Audience, Showing, Surface, choose};
use ask_core::take::{Taken, Trust};
use ask_core::wire::ReplyResponse;

use crate::record::{DEADLINE, NOW, Revisions, ask, choice, how, reply, secret, winner, with_content};
use crate::search::{Model, Steps, search};

/// A reading of the rules that is weaker than they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Weak {
    WrittenIsDelivered,
    DeliveredBeforeTheResponse,
    NobodyClosesWhatIsGone,
    AdapterHasATimer,
    SecretKeptForAShortTime,
    UnprovableKeptFromTheDecision,
}

struct Call {
    road: Road,
    question: Question,
    crashes: u8,
    weak: Option<Weak>,
    /// The front end, as the router sees it.
    audience: Audience,
    replies: [Reply; 2],
    /// Properties that other runs are about.
    ignored: &'static [&'static str],
}

#[derive(Debug, Clone, Hash)]
struct World {
    entry: Revisions,
    routers: u8,
    adapters: [bool; 2],
    people: [Told; 2],
    client: Client,
    /// What the asking tool has got.
    agent: Option<Got>,
    /// The Gateway's event with the tool's result is still to come.
    event: bool,
    /// Which adapters remember that they wrote the response.
    written: [bool; 2],
    crashes: u8,
    may_stop: bool,
    may_restart: bool,
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

/// The call, as its client has it.
#[derive(Debug, Clone, Copy, Hash, PartialEq, Eq)]
enum Client {
    /// No request is open.
    Repeats,
    /// This adapter holds the request.
    Waits(usize),
    /// The response was written by the adapter and has not arrived.
    Missed,
    Has {
        acknowledged: bool,
    },
    /// The run is over; nobody waits.
    Gone,
}

#[derive(Debug, Clone, Hash, PartialEq, Eq)]
struct Got {
    text: String,
    /// The secret's reply, for the call alone.
    secret: Option<String>,
    revision: usize,
}

impl Call {
    fn new(road: Road, question: Question, weak: Option<Weak>) -> Self {
        let replies = [reply("tab", Surface::Card, &question, 0), reply("cli", Surface::Cli, &question, 1)];
        let surfaces = [Surface::Card, Surface::Masked, Surface::Durable].into();
        let audience = Audience::Absent { surfaces };
        Self { road, question, crashes: 2, weak, audience, replies, ignored: &[] }
    }

    fn is(&self, weak: Weak) -> bool {
        self.weak == Some(weak)
    }

    fn client(&self, world: &World, steps: &mut Steps<World>) {
        let with = |client| World { client, ..world.clone() };
        match world.client {
            Client::Repeats | Client::Missed => {
                for i in (0..2).filter(|i| world.adapters[*i]) {
                    steps.step(format_args!("client: calls adapter {i}"), with(Client::Waits(i)));
                }
            }
            Client::Has { acknowledged: false } if self.road == Road::Plugin => {
                let next = with(Client::Has { acknowledged: true });
                steps.step(format_args!("client: acknowledges what it has"), next);
            }
            _ => {}
        }
        if world.may_stop && matches!(world.client, Client::Repeats | Client::Missed | Client::Waits(_)) {
            let next = World { may_stop: false, ..with(Client::Gone) };
            steps.fault(format_args!("client: the run is aborted, or the call cancelled"), next);
        }
        let has_all = matches!(world.client, Client::Has { acknowledged: true });
        if world.may_restart && world.client != Client::Gone && !has_all {
            let next = World { may_restart: false, event: false, ..with(Client::Gone) };
            steps.fault(format_args!("client: its process restarts"), next);
        }
    }

    fn routers(&self, world: &World, steps: &mut Steps<World>) {
        if world.routers > 0 && world.crashes > 0 {
            let next = World { routers: world.routers - 1, crashes: world.crashes - 1, ..world.clone() };
            steps.fault(format_args!("router: a replica crashes"), next);
        }
        if world.routers < 2 {
            let next = World { routers: world.routers + 1, ..world.clone() };
            steps.step(format_args!("router: a replica starts"), next);
        }
        let Some(entry) = world.entry.newest().filter(|_| world.routers > 0) else { return };
        let decided = |by: &str, next: Option<Entry>, steps: &mut Steps<World>| {
            if let Some(entry) = next {
                let mut next = world.clone();
                next.entry.write_newest(entry);
                steps.step(format_args!("router: {by}"), next);
            }
        };
        decided("deadline", entry.expire(false, DEADLINE), steps);
        if let (Showing::Undeliverable(reason), rule) =
            choose(&entry.question, self.road, &self.audience, &[])
        {
            decided(rule, entry.undeliverable(reason, rule, NOW), steps);
        }
        for who in 0..2 {
            self.person(world, entry, who, steps);
        }
    }

    fn person(&self, world: &World, entry: &Entry, who: usize, steps: &mut Steps<World>) {
        let name = ["tab", "cli"][who];
        let with = |told| {
            let mut next = world.clone();
            next.people[who] = told;
            next
        };
        match world.people[who] {
            Told::NothingReplied => {
                steps.fault(format_args!("{name}: replies"), with(Told::Replied));
            }
            Told::Replied => {
                let trust = [Trust::Owner, Trust::Anybody][who];
                let (write, answer) = match entry.take(&self.replies[who], trust, NOW) {
                    Taken::Decide(next) => (Some(*next), ReplyResponse::Saved),
                    Taken::ListLate(next, answer) => (Some(*next), answer),
                    Taken::Answer(answer) => (None, answer),
                };
                let is_saved = answer == ReplyResponse::Saved;
                let mut next = with(if is_saved { Told::Saved } else { Told::Lost });
                if let Some(entry) = write {
                    next.entry.write_newest(entry);
                    if world.crashes > 0 {
                        let mut lost = World { crashes: world.crashes - 1, ..next.clone() };
                        lost.people[who] = Told::Replied;
                        steps.fault(format_args!("router: takes {name}'s reply; the answer is lost"), lost);
                    }
                }
                steps.step(format_args!("router: takes {name}'s reply (saved: {is_saved})"), next);
            }
            Told::Saved => {
                let word = match entry.returned() {
                    None => return,
                    Some(Returned::Unconfirmed { .. }) => Told::Unconfirmed,
                    Some(_) => Told::Accepted,
                };
                steps.step(format_args!("{name}: is told {word:?}"), with(word));
            }
            _ => {}
        }
    }

    // Adapters: the entry is the whole state of a call, so any of them serves it at any time.

    fn adapter(&self, world: &World, i: usize, steps: &mut Steps<World>) {
        let holds_request = world.client == Client::Waits(i);
        if !world.adapters[i] {
            let mut next = world.clone();
            next.adapters[i] = true;
            return steps.step(format_args!("adapter {i}: starts"), next);
        }
        if world.crashes > 0 {
            let mut next = World { crashes: world.crashes - 1, ..world.clone() };
            (next.adapters[i], next.written[i]) = (false, false);
            if holds_request {
                next.client = Client::Repeats;
            }
            steps.fault(format_args!("adapter {i}: crashes"), next);
        }
        let Some(entry) = world.entry.newest() else {
            if holds_request {
                let mut next = world.clone();
                next.entry.write_newest(ask(self.road, "q", &self.question));
                steps.step(format_args!("adapter {i}: asks"), next);
            }
            return;
        };
        if holds_request {
            self.respond(world, i, steps);
        }
        if holds_request && entry.is_pending() && self.is(Weak::AdapterHasATimer) {
            let text = told(&entry.expire(false, DEADLINE).expect("it is pending")).expect("it is decided");
            let got = Got { text: text.text, secret: None, revision: world.entry.revision() };
            let client = Client::Has { acknowledged: true };
            let next = World { agent: Some(got), client, ..world.clone() };
            steps.step(format_args!("adapter {i}: its own timer answers"), next);
        }
        for (why, returned) in self.proofs(world, entry, i) {
            close(world, entry, returned, format_args!("adapter {i}: {why}"), steps);
        }
        let is_gone = world.client == Client::Gone && !self.is(Weak::NobodyClosesWhatIsGone);
        match gone(entry, "run_ended") {
            Gone::CancelFirst if is_gone && world.routers > 0 => {
                let content = ReplyContent::Cancelled { reason: CancelReason::RunEnded };
                let reply = with_content(&gateway_reply_id(&entry.key), Surface::Gateway, content);
                if let Taken::Decide(decided) = entry.take(&reply, Trust::Anybody, NOW) {
                    let mut next = world.clone();
                    next.entry.write_newest(*decided);
                    steps.step(format_args!("adapter {i}: the run is over, so it is cancelled"), next);
                }
            }
            Gone::Close(returned) if is_gone => {
                close(world, entry, returned, format_args!("adapter {i}: the call is gone"), steps);
            }
            _ => {}
        }
    }

    /// Writes the response to an open request, by any decided revision.
    fn respond(&self, world: &World, i: usize, steps: &mut Steps<World>) {
        for revision in 1..=world.entry.revision() {
            let Some(result) = told(world.entry.at(revision)) else { continue };
            let secret = result.secret_prompt.and(winner(world.entry.at(revision)).map(str::to_owned));
            let got = Got { text: result.text, secret, revision };
            let client = Client::Has { acknowledged: false };
            let mut next = World { agent: Some(got), client, event: true, ..world.clone() };
            next.written[i] = self.road == Road::McpAlone;
            if self.is(Weak::DeliveredBeforeTheResponse)
                && let Some(entry) = world.entry.newest().filter(|e| e.returned().is_none())
            {
                let returned = Returned::Delivered { proof: "weak".into() };
                return close(world, entry, returned, format_args!("adapter {i}: closes it first"), steps);
            }
            if world.crashes > 0 {
                let crashes = world.crashes - 1;
                let written = next.written;
                let lost = World { crashes, client: Client::Missed, written, ..world.clone() };
                steps.fault(format_args!("adapter {i}: responds by revision {revision}; it is lost"), lost);
            }
            if self.road == Road::McpAlone {
                next.event = false;
            }
            steps.step(format_args!("adapter {i}: responds by revision {revision}"), next);
        }
    }

    /// What an adapter may close the entry with now.
    fn proofs(&self, world: &World, entry: &Entry, i: usize) -> Vec<(&'static str, Returned)> {
        let mut proofs = Vec::new();
        if entry.is_pending() || entry.returned().is_some() {
            return proofs;
        }
        let delivered = || Returned::Delivered { proof: "weak".into() };
        if let (Client::Has { acknowledged: true }, Some(got)) = (world.client, &world.agent) {
            let proof = acknowledged(world.entry.at(got.revision));
            proofs.extend(proof.map(|p| ("an acknowledgement", p)));
        }
        if let Some(got) = world.agent.as_ref().filter(|_| world.event && self.road != Road::McpAlone) {
            // The plugin's result shows a handle, and an MCP result the value itself.
            let shown = got.secret.as_deref().unwrap_or(&got.text);
            let held = entry.holds_secret().then(|| winner(entry).unwrap_or_default());
            let proof = seen_in_result(entry, held, shown);
            proofs.extend(proof.map(|p| ("the event of a tool result", p)));
        }
        if self.is(Weak::WrittenIsDelivered) && matches!(world.client, Client::Missed | Client::Has { .. }) {
            proofs.push(("the response was written", delivered()));
        }
        let written = world.written[i].then_some(NOW);
        // Window and limit are longer than a client goes on: by then it has come again, or is gone.
        let has_gone_on = matches!(world.client, Client::Has { .. } | Client::Gone);
        let is_short = self.is(Weak::SecretKeptForAShortTime) || self.is(Weak::UnprovableKeptFromTheDecision);
        if let Some((_, why)) = closes_by_itself(entry, written).filter(|_| has_gone_on || is_short)
            && (self.road == Road::McpAlone || is_short)
        {
            proofs.push(("no word of the call", Returned::Unconfirmed { why: why.into() }));
        }
        proofs
    }
}

fn close(
    world: &World,
    entry: &Entry,
    returned: Returned,
    what: std::fmt::Arguments<'_>,
    steps: &mut Steps<World>,
) {
    if let Some(closed) = entry.close(returned.clone(), NOW) {
        let mut next = world.clone();
        next.entry.write_newest(closed);
        steps.step(format_args!("{what}: {returned:?}"), next);
    }
}

impl Model for Call {
    type State = World;

    fn start(&self) -> World {
        World {
            entry: Revisions::default(),
            routers: 2,
            adapters: [true; 2],
            people: [Told::NothingReplied; 2],
            client: Client::Repeats,
            agent: None,
            event: false,
            written: [false; 2],
            crashes: self.crashes,
            may_stop: true,
            may_restart: true,
        }
    }

    fn steps(&self, world: &World, steps: &mut Steps<World>) {
        self.client(world, steps);
        self.routers(world, steps);
        self.adapter(world, 0, steps);
        self.adapter(world, 1, steps);
    }

    fn wrong(&self, world: &World) -> Option<String> {
        let entry = world.entry.newest()?;
        // The decision before its secret went out of reach.
        let decided = (1..=world.entry.revision()).map(|r| world.entry.at(r)).find(|e| !e.is_pending());
        let result = decided.and_then(|entry| told(entry));
        let same = |got: &Got| result.as_ref().is_some_and(|result| result.text == got.text);
        let mut wrong = Vec::new();
        for (told, reply) in world.people.iter().zip(&self.replies) {
            let has_mine = winner(entry) == Some(&reply.id) && world.agent.as_ref().is_some_and(same);
            match told {
                Told::Accepted if !has_mine => wrong.push("told accepted, and the call has it not"),
                Told::Lost if winner(entry) == Some(&reply.id) => wrong.push("told lost, and it has won"),
                _ => {}
            }
        }
        if let Some(got) = &world.agent {
            if entry.is_pending() || !same(got) && !got.text.contains("no longer available") {
                wrong.push("the call has another outcome than the record");
            }
            if got.text.contains("no longer available") {
                wrong.push("the secret was out of reach before the call had it");
            }
        }
        if matches!(entry.returned(), Some(Returned::Delivered { .. }))
            && !world.agent.as_ref().is_some_and(same)
        {
            wrong.push("returned as delivered, and the call has it not");
        }
        let wrong = wrong.into_iter().find(|property| !self.ignored.contains(property));
        wrong.map(str::to_owned).or_else(|| {
            world.entry.wrong(|id, outcome| {
                self.replies.iter().any(|reply| {
                    let ReplyContent::Answers { answers } = &reply.content else { return false };
                    reply.id == id && *outcome == Outcome::Answered { answers: answers.clone() }
                })
            })
        })
    }

    fn good_end(&self, world: &World) -> Option<String> {
        let waits = |told: &Told| matches!(told, Told::Replied | Told::Saved);
        if world.people.iter().any(waits) || !matches!(world.client, Client::Has { .. } | Client::Gone) {
            return None;
        }
        match world.entry.newest() {
            None => Some("over before it was asked".into()),
            Some(entry) => entry.returned().map(|_| how(entry)),
        }
    }
}

const ENDS: &[&str] = &[
    "answered, delivered",
    "answered, unconfirmed",
    "cancelled, unconfirmed",
    "expired, delivered",
    "expired, unconfirmed",
    "over before it was asked",
];

#[test]
fn the_rules_of_the_plugins_calls_hold() {
    search(&Call::new(Road::Plugin, choice(), None)).holds("plugin", ENDS);
}

#[test]
fn the_rules_hold_for_a_secret_that_goes_out_of_reach_when_it_is_returned() {
    search(&Call::new(Road::Plugin, secret(), None)).holds("plugin, secret", ENDS);
}

#[test]
fn the_rules_hold_where_only_the_gateways_event_proves_receipt() {
    search(&Call::new(Road::Mcp, choice(), None)).holds("mcp", ENDS);
    search(&Call::new(Road::Mcp, secret(), None)).holds("mcp, secret", ENDS);
}

#[test]
fn the_rules_hold_for_a_client_that_can_prove_nothing() {
    let ends = ["answered, unconfirmed", "cancelled, unconfirmed", "expired, unconfirmed"];
    search(&Call::new(Road::McpAlone, choice(), None)).holds("mcp alone", &ends);
    search(&Call::new(Road::McpAlone, secret(), None)).holds("mcp alone, secret", &ends);
}

#[test]
fn the_rules_hold_where_nobody_can_be_shown_the_question() {
    let nobody = Call { audience: Audience::Nobody, ..Call::new(Road::Plugin, choice(), None) };
    search(&nobody).holds("plugin, nobody", &["undeliverable, delivered", "undeliverable, unconfirmed"]);
}

fn broken(weak: Weak, property: &str) {
    search(&Call::new(Road::Plugin, choice(), Some(weak))).breaks(property);
}

#[test]
fn p1_returned_when_the_response_is_written_is_found() {
    broken(Weak::WrittenIsDelivered, "returned as delivered, and the call has it not");
}

#[test]
fn p2_returned_before_the_response_is_found() {
    broken(Weak::DeliveredBeforeTheResponse, "returned as delivered, and the call has it not");
}

#[test]
fn p3_a_call_that_is_gone_and_that_nobody_closes_is_found() {
    broken(Weak::NobodyClosesWhatIsGone, "stuck");
}

#[test]
fn p4_an_adapter_that_answers_by_its_own_timer_is_found() {
    broken(Weak::AdapterHasATimer, "the call has another outcome than the record");
}

#[test]
fn p5_a_secret_out_of_reach_while_its_response_is_on_the_way_is_found() {
    let mut call = Call::new(Road::Plugin, secret(), Some(Weak::WrittenIsDelivered));
    call.ignored =
        &["returned as delivered, and the call has it not", "told accepted, and the call has it not"];
    search(&call).breaks("the secret was out of reach before the call had it");
}

#[test]
fn p6_a_secret_out_of_reach_after_a_short_time_is_found() {
    let call = Call::new(Road::Plugin, secret(), Some(Weak::SecretKeptForAShortTime));
    search(&call).breaks("the secret was out of reach before the call had it");
}

#[test]
fn p6_a_secret_of_a_client_without_proof_timed_from_its_decision_is_found() {
    let call = Call::new(Road::McpAlone, secret(), Some(Weak::UnprovableKeptFromTheDecision));
    search(&call).breaks("the secret was out of reach before the call had it");
}
