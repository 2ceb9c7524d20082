//! A breadth-first search through all interleavings of a model.
//!
//! States are told apart by a hash of 64 bits, so that only those that are still to be expanded are
//! in memory; with a million states the chance that two share one is below one in ten million.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fmt;
use std::hash::{BuildHasherDefault, DefaultHasher, Hash, Hasher};
use std::time::Instant;

/// More states than any run here should have; memory is bounded by it.
const MAX_STATES: usize = 3_000_000;

/// Processes and network, as states and steps between them.
pub trait Model {
    type State: Hash + fmt::Debug;

    fn start(&self) -> Self::State;

    /// Adds every step that is possible in `state`.
    fn steps(&self, state: &Self::State, steps: &mut Steps<Self::State>);

    /// The safety property that is broken in this state.
    fn wrong(&self, state: &Self::State) -> Option<String>;

    /// Where all that was promised has happened: in which way it ended.
    fn good_end(&self, state: &Self::State) -> Option<String>;
}

/// The steps out of a state.
pub struct Steps<S> {
    next: Vec<(S, bool)>,
    /// Written only for a trace.
    labels: Option<Vec<String>>,
}

impl<S> Steps<S> {
    /// A step that is taken sooner or later.
    pub fn step(&mut self, what: fmt::Arguments<'_>, next: S) {
        self.add(what, next, false);
    }

    /// A step that need never happen: a crash, a loss, what people and the Gateway do of themselves.
    pub fn fault(&mut self, what: fmt::Arguments<'_>, next: S) {
        self.add(what, next, true);
    }

    fn add(&mut self, what: fmt::Arguments<'_>, next: S, fault: bool) {
        self.next.push((next, fault));
        if let Some(labels) = &mut self.labels {
            labels.push(format!("{what}{}", if fault { "  (may happen)" } else { "" }));
        }
    }
}

/// What a search has found.
pub struct Found {
    states: usize,
    steps: usize,
    seconds: f64,
    ends: BTreeMap<String, usize>,
    broken: Option<Broken>,
}

struct Broken {
    what: String,
    trace: Vec<String>,
    state: String,
}

/// Where a state was first reached from, and by which of the steps there.
struct Reached {
    from: u32,
    step: u16,
}

#[derive(Default)]
struct SameHash(u64);

impl Hasher for SameHash {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, _: &[u8]) {
        unreachable!("only hashes are hashed");
    }

    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }
}

/// A hash that is the same in every run.
pub fn hash_of(value: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

/// Looks at every reachable state. Safety: none is wrong. Liveness: from each of them a good end is
/// reached by steps that are no faults, which in a finite graph is the same as "every fair run,
/// once faults stop, ends well"; it excludes deadlocks too.
pub fn search<M: Model>(model: &M) -> Found {
    let began = Instant::now();
    let mut known: HashMap<u64, u32, BuildHasherDefault<SameHash>> = HashMap::default();
    let mut reached = vec![Reached { from: 0, step: 0 }];
    let mut good = Vec::new();
    let mut fair: Vec<(u32, u32)> = Vec::new();
    let mut found = Found { states: 1, steps: 0, seconds: 0.0, ends: BTreeMap::new(), broken: None };
    let start = model.start();
    known.insert(hash_of(&start), 0);
    let mut waiting = VecDeque::from([(0u32, start)]);
    let mut out = Steps { next: Vec::new(), labels: None };
    let mut wrong = None;
    'search: while let Some((number, state)) = waiting.pop_front() {
        if let Some(end) = model.good_end(&state) {
            *found.ends.entry(end).or_default() += 1;
            good.push(number);
        }
        model.steps(&state, &mut out);
        for (step, (next, fault)) in out.next.drain(..).enumerate() {
            found.steps += 1;
            let to = *known.entry(hash_of(&next)).or_insert_with(|| {
                reached.push(Reached { from: number, step: step as u16 });
                reached.len() as u32 - 1
            });
            if !fault && to != number {
                fair.push((to, number));
            }
            if to as usize == found.states {
                found.states += 1;
                assert!(found.states < MAX_STATES, "more than {MAX_STATES} states");
                if let Some(what) = model.wrong(&next) {
                    wrong = Some((to, what));
                    break 'search;
                }
                waiting.push_back((to, next));
            }
        }
    }
    let wrong = wrong.or_else(|| {
        let stuck = first_without_good_end(found.states, &good, fair)?;
        Some((stuck, "stuck: no good end can be reached".to_owned()))
    });
    found.broken = wrong.map(|(number, what)| {
        let (trace, state) = trace(model, &reached, number);
        Broken { what, trace, state: format!("{state:#?}") }
    });
    found.seconds = began.elapsed().as_secs_f64();
    found
}

/// `fair` are the steps backwards: to, from.
fn first_without_good_end(states: usize, good: &[u32], mut fair: Vec<(u32, u32)>) -> Option<u32> {
    fair.sort_unstable();
    let mut ends_well = vec![false; states];
    let mut todo = good.to_vec();
    for number in good {
        ends_well[*number as usize] = true;
    }
    while let Some(to) = todo.pop() {
        let first = fair.partition_point(|(t, _)| *t < to);
        for (_, from) in fair[first..].iter().take_while(|(t, _)| *t == to) {
            if !std::mem::replace(&mut ends_well[*from as usize], true) {
                todo.push(*from);
            }
        }
    }
    ends_well.iter().position(|well| !well).map(|number| number as u32)
}

/// The shortest way to a state, by taking its steps again.
fn trace<M: Model>(model: &M, reached: &[Reached], mut number: u32) -> (Vec<String>, M::State) {
    let mut way = Vec::new();
    while number > 0 {
        let Reached { from, step } = reached[number as usize];
        way.push(step as usize);
        number = from;
    }
    let (mut state, mut labels) = (model.start(), Vec::new());
    for step in way.into_iter().rev() {
        let mut out = Steps { next: Vec::new(), labels: Some(Vec::new()) };
        model.steps(&state, &mut out);
        labels.push(out.labels.unwrap_or_default().swap_remove(step));
        state = out.next.swap_remove(step).0;
    }
    (labels, state)
}

impl Found {
    /// The rules hold, and the model is not empty: it ends in each of these ways.
    pub fn holds(self, name: &str, ends: &[&str]) {
        println!("{self}");
        assert!(self.broken.is_none(), "{name}: {self}");
        for end in ends {
            assert!(self.ends.contains_key(*end), "{name} never ends as `{end}`, only as {:?}", self.ends);
        }
    }

    /// A rule that is weakened breaks this property.
    pub fn breaks(self, property: &str) {
        println!("{self}");
        let broken = self.broken.as_ref().map_or("nothing", |b| b.what.as_str());
        assert!(
            broken.contains(property),
            "expected `{property}` to be found broken, found {broken}: {self}"
        );
    }
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} states, {} steps, {:.1} s", self.states, self.steps, self.seconds)?;
        for (end, count) in &self.ends {
            writeln!(f, "{count:9} ends: {end}")?;
        }
        if let Some(broken) = &self.broken {
            writeln!(f, "broken: {}", broken.what)?;
            for (n, step) in broken.trace.iter().enumerate() {
                writeln!(f, "{:4} {step}", n + 1)?;
            }
            writeln!(f, "{}", broken.state)?;
        }
        Ok(())
    }
}

mod tests {
    use super::*;

    /// Counts to 3, and may fall into a hole.
    struct Count {
        hole: bool,
        wrong_at: u8,
    }

    impl Model for Count {
        type State = u8;

        fn start(&self) -> u8 {
            0
        }

        fn steps(&self, state: &u8, steps: &mut Steps<u8>) {
            if *state < 3 {
                steps.step(format_args!("counts on from {state}"), state + 1);
            }
            if self.hole && *state == 1 {
                steps.fault(format_args!("falls"), 9);
            }
        }

        fn wrong(&self, state: &u8) -> Option<String> {
            (*state == self.wrong_at).then(|| format!("it is {state}"))
        }

        fn good_end(&self, state: &u8) -> Option<String> {
            (*state == 3).then(|| "three".into())
        }
    }

    #[test]
    fn what_can_not_end_well_is_found_with_its_shortest_trace() {
        search(&Count { hole: false, wrong_at: 7 }).holds("counting", &["three"]);
        search(&Count { hole: true, wrong_at: 7 }).breaks("stuck");
        let found = search(&Count { hole: false, wrong_at: 2 });
        let trace = found.broken.as_ref().unwrap().trace.clone();
        assert_eq!(trace, ["counts on from 0", "counts on from 1"]);
        found.breaks("it is 2");
    }
}
