//! Whether a question was shown: two routers follow who is there and choose the surface, a front
//! end comes, shows it and reports; what a router has heard is in its memory until a write carries
//! it, and any router may decide at the deadline.

use ask_core::entry::{Road, Step, StepKind};
use ask_core::outcome::{Delivered, Outcome, Undeliverable};
use ask_core::surface::{Audience, Showing, Surface, choose};

use crate::record::{DEADLINE, NOW, Revisions, ask, choice, how};
use crate::search::{Model, Steps, search};

/// A reading of the rules that is weaker than they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Weak {
    /// No report of delivery is evidence that nothing was offered, and it is reported once.
    NoReportIsEvidence,
    /// Evidence is what this router has seen, since whenever it runs.
    OwnMemoryIsEvidence,
    /// Delivery is reported once.
    ReportedOnce,
    /// A router does not look whether it has heard of everybody who is there before it decides.
    PresenceLags,
    /// That somebody has gone is no sign that somebody was there.
    GoneIsNoSign,
}

struct Shown {
    crashes: u8,
    weak: Option<Weak>,
}

#[derive(Debug, Clone, Hash)]
struct World {
    entry: Revisions,
    routers: [Option<Router>; 2],
    front: Front,
    /// A person has had the card on screen.
    shown: bool,
    reported: bool,
    crashes: u8,
}

#[derive(Debug, Clone, Hash, Default)]
struct Router {
    /// It knows that the front end is there.
    sees_front: bool,
    /// It has followed who is there since the question was asked, and nobody was.
    nothing_offered: bool,
    /// Somebody came or went, and it has not heard of it.
    unheard: bool,
    /// The report of delivery, until it is on record.
    held: bool,
}

#[derive(Debug, Clone, Hash, PartialEq, Eq)]
enum Front {
    Away,
    There { told_to_show: bool, shows: bool },
}

impl Shown {
    fn is(&self, weak: Weak) -> bool {
        self.weak == Some(weak)
    }

    fn router(&self, world: &World, i: usize, steps: &mut Steps<World>) {
        let with = |router| {
            let mut next = world.clone();
            next.routers[i] = router;
            next
        };
        let there = world.front != Front::Away;
        let Some(router) = &world.routers[i] else {
            // What was before it came it does not know.
            let nothing_offered = self.is(Weak::OwnMemoryIsEvidence) && !there;
            let router = Router { sees_front: there, nothing_offered, ..Router::default() };
            return steps.step(format_args!("router {i}: starts"), with(Some(router)));
        };
        if world.crashes > 0 {
            let next = World { crashes: world.crashes - 1, ..with(None) };
            steps.fault(format_args!("router {i}: crashes"), next);
        }
        if router.unheard {
            // Of one who came and went, only the last is heard.
            let nothing_offered = router.nothing_offered && !there && self.is(Weak::GoneIsNoSign);
            let router = Router { sees_front: there, nothing_offered, unheard: false, ..router.clone() };
            steps.step(format_args!("router {i}: hears who is there: {there}"), with(Some(router)));
        }
        let Some(entry) = world.entry.newest() else { return };
        let what = StepKind::Delivered { surface: Surface::Card, chat: None };
        let held = [Step { at: NOW, what }];
        let held = if router.held { held.as_slice() } else { &[] };
        if let Some(noted) = entry.note(held) {
            let mut next = with(Some(Router { held: false, ..router.clone() }));
            next.entry.write_newest(noted);
            steps.step(format_args!("router {i}: writes the step that it holds"), next);
        }
        let surfaces = [Surface::Card].into();
        let audience = match router.sees_front {
            true => Audience::Present { surfaces, looking: true },
            false => Audience::Absent { surfaces },
        };
        if let (Showing::Show(_), rule) = choose(&entry.question, entry.road, &audience, &[])
            && entry.is_pending()
            && world.front == (Front::There { told_to_show: false, shows: false })
        {
            let next = World { front: Front::There { told_to_show: true, shows: false }, ..world.clone() };
            steps.step(format_args!("router {i}: shows it by {rule}"), next);
        }
        let nothing_offered = match self.is(Weak::NoReportIsEvidence) {
            true => !router.held && !entry.was_delivered(),
            false => router.nothing_offered && (!router.unheard || self.is(Weak::PresenceLags)),
        };
        if let Some(expired) = entry.expire(nothing_offered, DEADLINE) {
            let mut next = with(Some(Router { held: false, ..router.clone() }));
            next.entry.write_newest(expired.note(held).unwrap_or(expired));
            steps.step(format_args!("router {i}: deadline (nothing offered: {nothing_offered})"), next);
        }
    }

    fn front(&self, world: &World, steps: &mut Steps<World>) {
        let with = |front| World { front, ..world.clone() };
        let Front::There { told_to_show, shows } = world.front else {
            let mut next = with(Front::There { told_to_show: false, shows: false });
            next.unheard();
            return steps.fault(format_args!("front end: comes"), next);
        };
        if world.crashes > 0 {
            let mut next = World { crashes: world.crashes - 1, reported: false, ..with(Front::Away) };
            next.unheard();
            steps.fault(format_args!("front end: goes, or its emitter crashes"), next);
        }
        let entry = world.entry.newest().expect("it is asked at the start");
        if told_to_show && !shows && entry.is_pending() {
            let next = World { shown: true, ..with(Front::There { told_to_show, shows: true }) };
            steps.step(format_args!("front end: shows it, and a person sees it"), next);
        }
        let once = self.is(Weak::ReportedOnce) || self.is(Weak::NoReportIsEvidence);
        if shows && !entry.was_delivered() && !(once && world.reported) {
            for i in 0..2 {
                if world.routers[i].as_ref().is_some_and(|router| !router.held) {
                    let mut next = World { reported: true, ..world.clone() };
                    next.routers[i].as_mut().expect("it is up").held = true;
                    steps.step(format_args!("front end: reports delivery to router {i}"), next);
                }
            }
        }
    }
}

impl World {
    fn unheard(&mut self) {
        self.routers.iter_mut().flatten().for_each(|router| router.unheard = true);
    }
}

impl Model for Shown {
    type State = World;

    fn start(&self) -> World {
        let mut entry = Revisions::default();
        entry.write_newest(ask(Road::Plugin, "q", &choice()));
        let router = Router { nothing_offered: true, ..Router::default() };
        World {
            entry,
            routers: [Some(router.clone()), Some(router)],
            front: Front::Away,
            shown: false,
            reported: false,
            crashes: self.crashes,
        }
    }

    fn steps(&self, world: &World, steps: &mut Steps<World>) {
        self.front(world, steps);
        self.router(world, 0, steps);
        self.router(world, 1, steps);
    }

    fn wrong(&self, world: &World) -> Option<String> {
        let decision = world.entry.newest()?.decision()?;
        let never_shown = Outcome::Undeliverable { reason: Undeliverable::NeverShown };
        if world.shown && (decision.outcome == never_shown || decision.delivered == Delivered::No) {
            return Some("the agent is told that it was never shown, and a person saw it".into());
        }
        world.entry.wrong(|_, _| false)
    }

    fn good_end(&self, world: &World) -> Option<String> {
        let entry = world.entry.newest().filter(|e| !e.is_pending())?;
        let on_record = entry.was_delivered();
        let shows = matches!(world.front, Front::There { shows: true, .. });
        let held = world.routers.iter().flatten().any(|router| router.held);
        (on_record || !(shows || held)).then(|| format!("{}, delivered on record: {on_record}", how(entry)))
    }
}

#[test]
fn the_rules_of_what_was_shown_hold() {
    search(&Shown { crashes: 3, weak: None }).holds(
        "shown",
        &[
            "undeliverable, delivered on record: false",
            "expired, delivered on record: false",
            "expired, delivered on record: true",
        ],
    );
}

fn broken(weak: Weak, property: &str) {
    search(&Shown { crashes: 2, weak: Some(weak) }).breaks(property);
}

const NEVER_SHOWN: &str = "told that it was never shown";

#[test]
fn f1_no_report_read_as_evidence_is_found() {
    broken(Weak::NoReportIsEvidence, NEVER_SHOWN);
}

#[test]
fn f2_what_one_router_remembers_read_as_evidence_is_found() {
    broken(Weak::OwnMemoryIsEvidence, NEVER_SHOWN);
}

#[test]
fn f2_a_report_that_is_not_repeated_is_found() {
    broken(Weak::ReportedOnce, "stuck");
}

#[test]
fn f2_a_router_that_decides_before_it_has_heard_who_is_there_is_found() {
    broken(Weak::PresenceLags, NEVER_SHOWN);
}

#[test]
fn f2_a_router_that_hears_only_of_the_going_and_takes_it_for_nobody_is_found() {
    broken(Weak::GoneIsNoSign, NEVER_SHOWN);
}
