//! Which runs of a session a stream shows, and what of them is shown: a fold over `RUNS`.

use std::collections::{HashMap, HashSet};

use ask_core::wire::{RunEnd, RunEvent, RunItem};

/// What a run shows.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Shown {
    /// Text of the agent.
    Text(String),
    /// The whole text of a run that began before the fold did; what was not streamed is appended.
    WholeText { run: String, text: String },
    /// The message went into this run; what it showed until now follows.
    Joined(String),
    /// A tool call.
    Tool(RunEvent),
    /// The agent works on it.
    Working,
}

/// How a turn ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Finish {
    Done,
    Stopped,
    Failed(String),
    /// A message went into another run or into a queue, and nothing has followed yet.
    Waiting,
}

#[derive(Debug, Default)]
pub(crate) struct Runs {
    runs: HashMap<String, Run>,
    /// How the last run that had something to say ended.
    finish: Option<Finish>,
}

#[derive(Debug, Default)]
struct Run {
    followed: bool,
    /// Its begin was seen, so `text` is all of its text.
    whole: bool,
    ended: bool,
    text: String,
    seen: HashSet<(&'static str, u64)>,
    /// What it showed before it was followed.
    held: Vec<Shown>,
}

/// More than this is not kept of a run that may never be followed.
const MAX_HELD: usize = 10_000;

impl Runs {
    /// Shows this run; returns what it has shown so far.
    pub(crate) fn follow(&mut self, run: &str) -> Vec<Shown> {
        let run = self.runs.entry(run.to_owned()).or_default();
        run.followed = true;
        std::mem::take(&mut run.held)
    }

    /// The text of a run as far as the fold has seen it.
    pub(crate) fn text_of(&self, run: &str) -> &str {
        self.runs.get(run).map_or("", |run| &run.text)
    }

    /// Takes the next item of the session; returns what is to be shown now.
    pub(crate) fn apply(&mut self, item: &RunItem) -> Vec<Shown> {
        let run = self.runs.entry(item.run.clone()).or_default();
        if item.seq > 0 && !run.seen.insert((item.what.kind(), item.seq)) {
            return Vec::new();
        }
        let mut shown = Vec::new();
        match &item.what {
            RunEvent::Sent { into } => {
                run.whole = true;
                if let Some(into) = into
                    && run.followed
                {
                    let (into, joined) = (into.clone(), Shown::Joined(into.clone()));
                    return std::iter::once(joined).chain(self.follow(&into)).collect();
                }
            }
            RunEvent::Failed { why } => {
                run.ended = true;
                if run.followed {
                    self.finish = Some(Finish::Failed(why.clone()));
                }
                return Vec::new();
            }
            RunEvent::Started => {
                // A run that begins while the stream is open belongs to it: a queued message
                // gets a run with an id of its own.
                run.whole = true;
                run.followed = true;
                shown.append(&mut run.held);
                shown.push(Shown::Working);
            }
            RunEvent::Text { text } => {
                run.text.push_str(text);
                shown.push(Shown::Text(text.clone()));
            }
            RunEvent::Tool { .. } => shown.push(Shown::Tool(item.what.clone())),
            RunEvent::Ended { how, text } => {
                if let Some(text) = text {
                    if run.whole {
                        let rest = not_streamed(&run.text, text);
                        if !rest.is_empty() {
                            shown.push(Shown::Text(rest.clone()));
                        }
                        run.text.push_str(&rest);
                    } else {
                        shown.push(Shown::WholeText { run: item.run.clone(), text: text.clone() });
                    }
                }
                run.ended = true;
                let finish = match how {
                    RunEnd::Done => Some(Finish::Done),
                    RunEnd::Empty => None,
                    RunEnd::Aborted => Some(Finish::Stopped),
                    RunEnd::Error { message } => Some(Finish::Failed(message.clone())),
                };
                if run.followed && finish.is_some() {
                    self.finish = finish;
                }
            }
        }
        let run = self.runs.entry(item.run.clone()).or_default();
        if run.followed {
            return shown;
        }
        if run.held.len() < MAX_HELD {
            run.held.append(&mut shown);
        }
        Vec::new()
    }

    /// How the turn ends, once every run that is shown has ended.
    pub(crate) fn finish(&self) -> Option<Finish> {
        let mut followed = self.runs.values().filter(|run| run.followed).peekable();
        followed.peek()?;
        followed.all(|run| run.ended).then(|| self.finish.clone().unwrap_or(Finish::Waiting))
    }
}

/// The part of a run's whole text that was not streamed. `text` may be the whole text or only its
/// last message.
pub(crate) fn not_streamed(streamed: &str, text: &str) -> String {
    let (done, all) = (streamed.trim_end(), text.trim_end());
    if all.is_empty() || done.ends_with(all) || (!done.is_empty() && all.ends_with(done)) {
        return String::new();
    }
    if done.is_empty() {
        return text.to_owned();
    }
    match overlap(streamed, all).or_else(|| overlap(done, all)) {
        Some(at) => text[at..].to_owned(),
        None if done.contains(all) => String::new(),
        None => format!("\n\n{text}"),
    }
}

/// How much of `text` was streamed last: it begins at the start of what was streamed, or after
/// white space.
fn overlap(streamed: &str, text: &str) -> Option<usize> {
    let begins = |at: usize| {
        let before = &streamed[..streamed.len() - at];
        before.is_empty() || before.ends_with(char::is_whitespace)
    };
    let ends = text.char_indices().map(|(at, _)| at).rev();
    ends.filter(|at| *at > 0).find(|at| streamed.ends_with(&text[..*at]) && begins(*at))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ask_core::key::SessionKey;

    fn item(run: &str, seq: u64, what: RunEvent) -> RunItem {
        RunItem { schema: 1, session: SessionKey::new("g", "s"), run: run.into(), seq, what }
    }

    fn text(text: &str) -> RunEvent {
        RunEvent::Text { text: text.into() }
    }

    fn ended(how: RunEnd, text: Option<&str>) -> RunEvent {
        RunEvent::Ended { how, text: text.map(str::to_owned) }
    }

    fn texts(runs: &mut Runs, items: Vec<RunItem>) -> String {
        let shown = items.iter().flat_map(|item| runs.apply(item)).collect::<Vec<_>>();
        shown.into_iter().filter_map(|s| if let Shown::Text(text) = s { Some(text) } else { None }).collect()
    }

    #[test]
    fn a_turn_of_its_own_shows_its_text_once_and_ends() {
        let mut runs = Runs::default();
        runs.follow("r");
        let items = vec![
            item("r", 0, RunEvent::Sent { into: None }),
            item("r", 0, RunEvent::Started),
            item("r", 1, text("Hel")),
            item("r", 1, text("Hel")),
            item("r", 2, text("lo")),
        ];
        assert_eq!(texts(&mut runs, items), "Hello");
        assert_eq!(runs.finish(), None);
        assert_eq!(texts(&mut runs, vec![item("r", 3, ended(RunEnd::Done, Some("Hello you")))]), " you");
        assert_eq!(runs.finish(), Some(Finish::Done));
    }

    #[test]
    fn a_steered_message_shows_the_run_it_went_into_and_outlives_its_own_empty_end() {
        let mut runs = Runs::default();
        runs.follow("mine");
        let shown = texts(
            &mut runs,
            vec![
                item("active", 5, text("before ")),
                item("mine", 0, RunEvent::Sent { into: Some("active".into()) }),
                item("mine", 1, ended(RunEnd::Empty, None)),
                item("active", 6, text("after")),
            ],
        );
        assert_eq!(shown, "before after");
        assert_eq!(runs.finish(), None);
        let shown = runs.apply(&item("active", 7, ended(RunEnd::Done, Some("much before before after"))));
        let whole = Shown::WholeText { run: "active".into(), text: "much before before after".into() };
        assert_eq!(shown, vec![whole]);
        assert_eq!(runs.finish(), Some(Finish::Done));
    }

    #[test]
    fn a_queued_message_waits_for_the_run_that_follows() {
        let mut runs = Runs::default();
        runs.follow("mine");
        texts(&mut runs, vec![item("mine", 1, ended(RunEnd::Empty, None))]);
        assert_eq!(runs.finish(), Some(Finish::Waiting));
        let fresh = vec![item("fresh", 0, RunEvent::Started), item("fresh", 1, text("late"))];
        assert_eq!(texts(&mut runs, fresh), "late");
        assert_eq!(runs.finish(), None);
    }

    #[test]
    fn a_message_that_could_not_be_sent_ends_the_turn_with_the_reason() {
        let mut runs = Runs::default();
        runs.follow("r");
        runs.apply(&item("r", 0, RunEvent::Failed { why: "no".into() }));
        assert_eq!(runs.finish(), Some(Finish::Failed("no".into())));
    }

    #[test]
    fn only_what_was_not_streamed_of_the_final_text_is_appended() {
        let table = [
            ("", "all of it", "all of it"),
            ("all of it", "all of it", ""),
            ("first\n\nlast", "last", ""),
            ("Hello", "Hello world", " world"),
            ("Hello ", "Hello world", "world"),
            ("part one. Hello", "Hello world", " world"),
            ("one thing", "another", "\n\nanother"),
            ("the data", "another", "\n\nanother"),
            ("say Grüße, bye", "Grüße", ""),
            ("Hel", "Hel\n", ""),
            ("x", "", ""),
        ];
        for (streamed, text, rest) in table {
            assert_eq!(not_streamed(streamed, text), rest, "{streamed:?} {text:?}");
        }
    }
}
