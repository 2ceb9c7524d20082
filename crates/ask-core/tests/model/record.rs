//! What the roads have in common: the question's key in the bucket with all its revisions, and the
//! replies that people send.

use std::hash::{Hash, Hasher};
use std::ops::Deref;
use std::rc::Rc;

use ask_core::entry::{DecidedBy, Entry, Road};
use ask_core::outcome::{Outcome, Returned};
use ask_core::question::{Choice, Prompt, Question};
use ask_core::reply::{Answer, Reply, ReplyContent, Responder, Sealed};
use ask_core::surface::Surface;
use ask_core::time::Timestamp;

use crate::search::hash_of;

/// Time stands still in a model: what a clock would bring may come at any moment.
pub const NOW: Timestamp = Timestamp(2_000);
pub const DEADLINE: Timestamp = Timestamp(300_000);

/// A value of the bus: shared by the states that hold it, and hashed once.
#[derive(Debug)]
pub struct Value<T>(Rc<(u64, T)>);

impl<T: Hash> Value<T> {
    pub fn new(value: T) -> Self {
        Self(Rc::new((hash_of(&value), value)))
    }
}

impl<T> Clone for Value<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<T> Hash for Value<T> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.0.0);
    }
}

impl<T> Deref for Value<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0.1
    }
}

/// The revisions of one question, oldest first. A process may have read any of them.
#[derive(Debug, Clone, Hash, Default)]
pub struct Revisions(Vec<Value<Entry>>);

impl Revisions {
    pub fn newest(&self) -> Option<&Value<Entry>> {
        self.0.last()
    }

    pub fn revision(&self) -> usize {
        self.0.len()
    }

    pub fn at(&self, revision: usize) -> &Value<Entry> {
        &self.0[revision - 1]
    }

    pub fn is_pending(&self) -> bool {
        self.newest().is_some_and(|e| e.is_pending())
    }

    /// True from the decision on, also when it is returned.
    pub fn is_decided(&self) -> bool {
        self.newest().is_some_and(|e| !e.is_pending())
    }

    pub fn returned(&self) -> Option<&Returned> {
        self.newest().and_then(|e| e.returned())
    }

    /// Compare-and-set; false when the newest revision is another one.
    #[must_use]
    pub fn write(&mut self, revision: usize, next: Entry) -> bool {
        let fits = self.revision() == revision;
        if fits {
            self.0.push(Value::new(next));
        }
        fits
    }

    /// A compare-and-set that is tried again until it goes through.
    pub fn write_newest(&mut self, next: Entry) {
        self.0.push(Value::new(next));
    }

    /// What no write may ever do, whoever wrote: change a decision or a return, drop what is on
    /// record, answer with what nobody submitted.
    pub fn wrong(&self, submitted: impl Fn(&str, &Outcome) -> bool) -> Option<String> {
        let [.., before, after] = self.0.as_slice() else { return None };
        if before.decision().is_some_and(|d| after.decision().is_none_or(|n| (d.at, &d.by) != (n.at, &n.by)))
        {
            return Some("one outcome: a decision was changed".into());
        }
        if before.returned().is_some() && before.returned() != after.returned() {
            return Some("returned once: a return was changed".into());
        }
        if !after.steps.starts_with(&before.steps) || !after.late.starts_with(&before.late) {
            return Some("nothing is forgotten: a step or a late reply left the record".into());
        }
        match after.decision() {
            Some(decision) if before.is_pending() && !decision.outcome.is_no_answer() => match &decision.by {
                DecidedBy::Reply { id, .. } if submitted(id, &decision.outcome) => None,
                by => Some(format!("answers are submitted: {:?} by {by:?} were not", decision.outcome)),
            },
            _ => None,
        }
    }
}

/// A question with two options.
pub fn choice() -> Question {
    let options = ["red", "green"].map(Choice::label).into();
    Question::new(vec![Prompt { options, ..Prompt::free_text("Which colour?") }]).unwrap()
}

/// Another one, that shares an option with it.
pub fn other_choice() -> Question {
    let options = ["red", "blue"].map(Choice::label).into();
    Question::new(vec![Prompt { options, ..Prompt::free_text("Which wall?") }]).unwrap()
}

/// A question whose answer is confidential.
pub fn secret() -> Question {
    Question::new(vec![Prompt { secret: true, ..Prompt::free_text("Token?") }]).unwrap()
}

/// A question with two prompts.
pub fn form() -> Question {
    let named = |id: &str| Prompt { id: id.into(), ..Prompt::free_text(id) };
    Question::new(vec![named("city"), named("budget")]).unwrap()
}

/// A new entry, as an adapter asks it.
pub fn ask(road: Road, id: &str, question: &Question) -> Entry {
    let key = format!("g.s.run.{id}").parse().unwrap();
    Entry::ask(key, road, "tool", id, question.clone(), Timestamp(1_000), DEADLINE, None).unwrap()
}

/// A reply that fits the question: the option, or a sealed value.
pub fn reply(id: &str, surface: Surface, question: &Question, option: usize) -> Reply {
    let seal = || Sealed { key_id: "k".into(), encapsulated: id.into(), ciphertext: "c".into() };
    let answer = if question.is_secret() { Answer::Sealed(seal()) } else { Answer::option(option) };
    let answers = question.prompts.iter().map(|p| (p.id.clone(), answer.clone())).collect();
    with_content(id, surface, ReplyContent::Answers { answers })
}

pub fn with_content(id: &str, surface: Surface, content: ReplyContent) -> Reply {
    let by = Responder { user: id.into(), name: None, chat: None };
    Reply { id: id.into(), by, surface, content }
}

/// The id of the reply that has decided.
pub fn winner(entry: &Entry) -> Option<&str> {
    match &entry.decision()?.by {
        DecidedBy::Reply { id, .. } => Some(id),
        DecidedBy::Record { .. } | DecidedBy::Rule { .. } => None,
    }
}

/// How a life ended, for the list of good ends.
pub fn how(entry: &Entry) -> String {
    let decided = entry.decision().map_or("pending", |d| d.outcome.status());
    let returned = match entry.returned() {
        None => return decided.into(),
        Some(Returned::Delivered { .. }) => "delivered",
        Some(Returned::Overruled { .. }) => "overruled",
        Some(Returned::Unconfirmed { .. }) => "unconfirmed",
    };
    format!("{decided}, {returned}")
}
