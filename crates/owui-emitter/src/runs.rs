//! What a stream shows of a session's runs, and when its turn ends: a fold over `RUNS`.

use std::collections::{HashMap, HashSet};

use ask_core::wire::{RunEnd, RunEvent, RunItem};

/// What a run shows.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Shown {
    /// Text of the agent.
    Text(String),
    /// The whole text of a run that began before the fold did; what was not streamed is appended.
    WholeText { run: String, text: String },
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

/// The runs of a session, as far as one turn knows them.
#[derive(Debug, Default)]
pub(crate) struct Runs {
    runs: HashMap<String, Run>,
    /// How the last run that had something to say ended.
    finish: Option<Finish>,
}

#[derive(Debug, Default)]
struct Run {
    /// The turn ends after it.
    awaited: bool,
    /// Its begin was seen, so `text` is all of its text.
    whole: bool,
    ended: bool,
    text: String,
    seen: HashSet<(&'static str, u64)>,
}

impl Runs {
    /// The turn ends after this run, and shows it from the begin of the fold on.
    pub(crate) fn await_run(&mut self, run: &str) {
        self.runs.entry(run.to_owned()).or_default().awaited = true;
    }

    /// The text of a run as far as the fold has seen it.
    pub(crate) fn text_of(&self, run: &str) -> &str {
        self.runs.get(run).map_or("", |run| &run.text)
    }

    /// Takes the next item of the session; returns what is to be shown. `live`: it came after the
    /// turn began. From then on every run of the session belongs to the turn: the one that a
    /// message was steered into, the one that a queued message gets, one that was busy before.
    pub(crate) fn apply(&mut self, item: &RunItem, live: bool) -> Vec<Shown> {
        let run = self.runs.entry(item.run.clone()).or_default();
        if item.seq > 0 && !run.seen.insert((item.what.kind(), item.seq)) {
            return Vec::new();
        }
        run.awaited |= live;
        let mut shown = Vec::new();
        let mut finish = None;
        match &item.what {
            RunEvent::Sent { into } => {
                run.whole = true;
                if let (Some(into), true) = (into, run.awaited) {
                    self.await_run(into);
                }
                return shown;
            }
            RunEvent::Failed { why } => {
                run.ended = true;
                finish = Some(Finish::Failed(why.clone()));
            }
            RunEvent::Started => {
                run.whole = true;
                shown.push(Shown::Working);
            }
            RunEvent::Text { text } => {
                run.text.push_str(text);
                shown.push(Shown::Text(text.clone()));
            }
            RunEvent::Tool { .. } => shown.push(Shown::Tool(item.what.clone())),
            RunEvent::Ended { how, text } => {
                run.ended = true;
                if let Some(text) = text {
                    shown.push(run.end_of_text(&item.run, text));
                }
                finish = match how {
                    RunEnd::Done => Some(Finish::Done),
                    RunEnd::Empty => None,
                    RunEnd::Aborted => Some(Finish::Stopped),
                    RunEnd::Error { message } => Some(Finish::Failed(message.clone())),
                };
            }
        }
        if !run.awaited {
            return Vec::new();
        }
        if finish.is_some() {
            self.finish = finish;
        }
        shown
    }

    /// How the turn ends, once every run that it awaits has ended.
    pub(crate) fn finish(&self) -> Option<Finish> {
        let mut awaited = self.runs.values().filter(|run| run.awaited).peekable();
        awaited.peek()?;
        awaited.all(|run| run.ended).then(|| self.finish.clone().unwrap_or(Finish::Waiting))
    }
}

impl Run {
    fn end_of_text(&mut self, run: &str, text: &str) -> Shown {
        if !self.whole {
            return Shown::WholeText { run: run.to_owned(), text: text.to_owned() };
        }
        let rest = not_streamed(&self.text, text);
        self.text.push_str(&rest);
        Shown::Text(rest)
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
        None if without_space(done).contains(&without_space(all)) => String::new(),
        None => format!("\n\n{text}"),
    }
}

/// The Gateway trims and joins its pieces in more than one way.
fn without_space(text: &str) -> String {
    text.split_whitespace().collect()
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
        let shown = items.iter().flat_map(|item| runs.apply(item, true)).collect::<Vec<_>>();
        shown.into_iter().filter_map(|s| if let Shown::Text(text) = s { Some(text) } else { None }).collect()
    }

    #[test]
    fn a_turn_of_its_own_shows_its_text_once_and_ends() {
        let mut runs = Runs::default();
        runs.await_run("r");
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
        for own_end_comes_first in [false, true] {
            let mut runs = Runs::default();
            runs.await_run("mine");
            let sent = item("mine", 0, RunEvent::Sent { into: Some("active".into()) });
            let empty = item("mine", 1, ended(RunEnd::Empty, None));
            let (first, second) = if own_end_comes_first { (empty, sent) } else { (sent, empty) };
            assert_eq!(texts(&mut runs, vec![first, second, item("active", 6, text("after"))]), "after");
            assert_eq!(runs.finish(), None);
            let end = item("active", 7, ended(RunEnd::Done, Some("before after")));
            let whole = Shown::WholeText { run: "active".into(), text: "before after".into() };
            assert_eq!(runs.apply(&end, true), vec![whole]);
            assert_eq!(runs.finish(), Some(Finish::Done));
        }
    }

    #[test]
    fn a_run_that_was_busy_before_belongs_to_the_turn_that_took_its_stream_over() {
        let mut runs = Runs::default();
        runs.await_run("mine");
        let busy = vec![item("busy", 9, text("still here")), item("busy", 10, ended(RunEnd::Done, None))];
        assert_eq!(texts(&mut runs, busy), "still here");
        assert_eq!(runs.finish(), None, "its own run comes after it");
        texts(
            &mut runs,
            vec![item("mine", 0, RunEvent::Started), item("mine", 1, ended(RunEnd::Done, None))],
        );
        assert_eq!(runs.finish(), Some(Finish::Done));
    }

    #[test]
    fn other_turns_output_is_not_repeated_after_a_card() {
        let mut runs = Runs::default();
        runs.await_run("asking");
        assert_eq!(runs.apply(&item("other", 1, text("shown elsewhere")), false), vec![]);
        assert_eq!(runs.apply(&item("other", 2, ended(RunEnd::Done, None)), false), vec![]);
        let missed = vec![Shown::Text("missed".into())];
        assert_eq!(runs.apply(&item("asking", 3, text("missed")), false), missed);
        assert_eq!(runs.finish(), None);
    }

    #[test]
    fn a_queued_message_waits_for_the_run_that_follows() {
        let mut runs = Runs::default();
        runs.await_run("mine");
        texts(&mut runs, vec![item("mine", 1, ended(RunEnd::Empty, None))]);
        assert_eq!(runs.finish(), Some(Finish::Waiting));
        let fresh = vec![item("fresh", 0, RunEvent::Started), item("fresh", 1, text("late"))];
        assert_eq!(texts(&mut runs, fresh), "late");
        assert_eq!(runs.finish(), None);
    }

    #[test]
    fn a_message_that_could_not_be_sent_ends_the_turn_with_the_reason() {
        let mut runs = Runs::default();
        runs.await_run("r");
        runs.apply(&item("r", 0, RunEvent::Failed { why: "no".into() }), true);
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
            ("Hello\n\nyou", "Hello you", ""),
            ("Hel", "Hel\n", ""),
            ("x", "", ""),
        ];
        for (streamed, text, rest) in table {
            assert_eq!(not_streamed(streamed, text), rest, "{streamed:?} {text:?}");
        }
    }
}
