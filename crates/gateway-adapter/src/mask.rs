//! Keeps the value of a secret out of what its run puts out.

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use ask_core::key::QuestionKey;
use serde_json::Value;
use zeroize::Zeroizing;

/// What stands in a secret's place.
pub(crate) const MASK: &str = "•••";

/// The secrets of running runs, in memory only.
#[derive(Default)]
pub(crate) struct Secrets {
    held: Mutex<HashMap<(String, String), Vec<Held>>>,
    lost: Mutex<HashSet<(String, String)>>,
}

struct Held {
    question: String,
    value: Zeroizing<String>,
}

impl std::fmt::Debug for Secrets {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secrets")
    }
}

impl Secrets {
    /// Masks `value` in the run of this question from now on.
    pub(crate) fn hold(&self, key: &QuestionKey, value: &str) {
        let mut held = self.lock();
        let of_run = held.entry((key.session.clone(), key.run.clone())).or_default();
        if of_run.iter().all(|h| h.question != key.question) {
            let value = Zeroizing::new(value.to_owned());
            of_run.push(Held { question: key.question.clone(), value });
        }
    }

    /// True where the value of this question's secret is at hand.
    pub(crate) fn holds(&self, key: &QuestionKey) -> bool {
        let held = self.lock();
        let of_run = held.get(&(key.session.clone(), key.run.clone()));
        of_run.is_some_and(|secrets| secrets.iter().any(|h| h.question == key.question))
    }

    /// A secret was given in the run of this question, and its value is not at hand.
    pub(crate) fn lose(&self, key: &QuestionKey) {
        let mut lost = self.lost.lock().unwrap_or_else(PoisonError::into_inner);
        lost.insert((key.session.clone(), key.run.clone()));
    }

    /// Whether a secret of this run can't be masked.
    pub(crate) fn lost(&self, session: &str, run: &str) -> bool {
        let lost = self.lost.lock().unwrap_or_else(PoisonError::into_inner);
        lost.contains(&(session.to_owned(), run.to_owned()))
    }

    /// What to mask in this run now.
    pub(crate) fn mask(&self, session: &str, run: &str) -> Mask {
        let held = self.lock();
        let of_run = held.get(&(session.to_owned(), run.to_owned()));
        let mut values: Vec<Zeroizing<String>> = Vec::new();
        for secret in of_run.into_iter().flatten() {
            // A model may drop the white space around a value when it repeats it.
            for value in [secret.value.as_str(), secret.value.trim()] {
                if !value.is_empty() && values.iter().all(|v| v.as_str() != value) {
                    values.push(Zeroizing::new(value.to_owned()));
                }
            }
        }
        // The longest first, so that one that holds another is masked as a whole.
        values.sort_by_key(|value| std::cmp::Reverse(value.len()));
        Mask { values }
    }

    /// Forgets the secrets of a run that has ended.
    pub(crate) fn forget(&self, session: &str, run: &str) {
        let run = (session.to_owned(), run.to_owned());
        self.lost.lock().unwrap_or_else(PoisonError::into_inner).remove(&run);
        self.lock().remove(&run);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<(String, String), Vec<Held>>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The values to mask.
#[derive(Default)]
pub(crate) struct Mask {
    values: Vec<Zeroizing<String>>,
}

impl Mask {
    /// How many bytes at the end of `text` must wait for what comes next, since they may be the
    /// beginning of a value.
    pub(crate) fn held_back(&self, text: &str) -> usize {
        let begins = |value: &Zeroizing<String>| {
            let starts = text.char_indices().rev().map(|(at, _)| &text[at..]);
            starts.take_while(|tail| tail.len() < value.len()).filter(|tail| value.starts_with(tail)).last()
        };
        self.values.iter().filter_map(begins).map(str::len).max().unwrap_or(0)
    }

    /// `text` with every value masked.
    pub(crate) fn text(&self, text: &str) -> String {
        let mut masked = text.to_owned();
        for value in &self.values {
            if masked.contains(value.as_str()) {
                masked = masked.replace(value.as_str(), MASK);
            }
        }
        masked
    }

    /// `data` with every value masked, wherever it stands.
    pub(crate) fn data(&self, data: Value) -> Value {
        if self.values.is_empty() {
            return data;
        }
        match data {
            Value::String(text) => Value::String(self.text(&text)),
            Value::Array(items) => items.into_iter().map(|item| self.data(item)).collect(),
            Value::Object(fields) => {
                fields.into_iter().map(|(name, value)| (self.text(&name), self.data(value))).collect()
            }
            Value::Number(number) => {
                let text = number.to_string();
                let masked = self.text(&text);
                if masked == text { Value::Number(number) } else { Value::String(masked) }
            }
            plain => plain,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn secrets() -> Secrets {
        let secrets = Secrets::default();
        secrets.hold(&"g.s.r.q".parse().unwrap(), " hunter2\n");
        secrets
    }

    #[test]
    fn a_value_is_masked_with_and_without_the_white_space_around_it() {
        let mask = secrets().mask("s", "r");
        assert_eq!(mask.text("it is hunter2."), "it is •••.");
        assert_eq!(mask.text("it is: hunter2\nyes"), "it is:•••yes");
        assert_eq!(
            mask.data(json!({"a": ["hunter2"], "hunter2": 1, "n": 5})),
            json!({"a": ["•••"], "•••": 1, "n": 5})
        );
    }

    #[test]
    fn a_number_that_is_the_secret_is_masked() {
        let secrets = Secrets::default();
        secrets.hold(&"g.s.r.q".parse().unwrap(), "123456");
        assert_eq!(secrets.mask("s", "r").data(json!({"pin": 123456})), json!({"pin": "•••"}));
    }

    #[test]
    fn a_tail_that_may_become_a_value_waits() {
        let mask = secrets().mask("s", "r");
        for (text, waits) in [("it is hun", 4), ("it-is-hunter", 6), ("it is hunx", 0), ("", 0), ("h", 1)] {
            assert_eq!(mask.held_back(text), waits, "{text}");
        }
    }

    #[test]
    fn other_runs_are_not_masked_and_a_run_that_ended_is_forgotten() {
        let secrets = secrets();
        assert_eq!(secrets.mask("s", "other").text("hunter2"), "hunter2");
        assert!(secrets.holds(&"g.s.r.q".parse().unwrap()));
        secrets.forget("s", "r");
        assert!(!secrets.holds(&"g.s.r.q".parse().unwrap()));
        assert_eq!(secrets.mask("s", "r").text("hunter2"), "hunter2");
    }
}
