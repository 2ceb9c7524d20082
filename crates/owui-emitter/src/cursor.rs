//! The place in a session's output up to which a front end has been told everything.

use ask_bus::RunCursor;
use ask_core::key::{decode_token, encode_token};
use ask_core::time::Timestamp;

/// What a front end sends back to go on where it stopped. As text it is of `[A-Za-z0-9_=-]`, so
/// that it can follow a question's id in the id of a durable card.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Cursor {
    /// When `RUNS` was created.
    pub created: u64,
    /// What is streamed comes after this item of `RUNS`.
    pub start: u64,
    /// The end of `RUNS` when the turn began; later than `start` after a durable card.
    pub opened: u64,
    /// When the turn began, in milliseconds since 1970.
    pub begun: u64,
    /// The last item of `RUNS` that was dealt with.
    pub sequence: u64,
    /// The highest revision of the session's questions that was dealt with.
    pub revision: u64,
    /// How many messages the session had had before this one; absent when not known.
    pub seen: Option<u64>,
    /// What was told as text and must not be told again: a question's id, or `said`.
    pub told: Option<String>,
}

/// In [`Cursor::told`]: what the message was answered with.
pub(crate) const SAID: &str = "said";

impl Cursor {
    /// Where a turn begins.
    pub(crate) fn at(end: RunCursor, now: Timestamp) -> Self {
        let (created, begun, start) = (end.created, now.0, end.sequence);
        Self { created, start, opened: start, begun, sequence: start, revision: 0, seen: None, told: None }
    }

    /// The same place in `RUNS` as it is now: one that was made anew is all new.
    pub(crate) fn in_stream(mut self, created: u64) -> Self {
        if self.created != created {
            (self.created, self.start, self.opened, self.sequence) = (created, 0, 0, 0);
        }
        self
    }

    /// Where the turn begins that follows a durable card with this cursor: it first streams what
    /// the chat has missed of the asking run.
    pub(crate) fn after_card(self, end: RunCursor) -> Self {
        let card = self.in_stream(end.created);
        Self { start: card.sequence, opened: end.sequence, seen: None, told: None, ..card }
    }

    /// Reads what `to_string` wrote; `None` for anything else.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let mut parts = text.splitn(8, '-');
        let mut number = || u64::from_str_radix(parts.next()?, 36).ok();
        let (created, start, opened, begun) = (number()?, number()?, number()?, number()?);
        let (sequence, revision) = (number()?, number()?);
        let seen = match parts.next()? {
            "" => None,
            seen => Some(u64::from_str_radix(seen, 36).ok()?),
        };
        let told = match parts.next() {
            None => None,
            Some(told) => Some(decode_token(told)?),
        };
        Some(Self { created, start, opened, begun, sequence, revision, seen, told })
    }
}

impl std::fmt::Display for Cursor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for number in [self.created, self.start, self.opened, self.begun, self.sequence, self.revision] {
            write!(f, "{}-", base36(number))?;
        }
        f.write_str(&self.seen.map(base36).unwrap_or_default())?;
        self.told.iter().try_for_each(|told| write!(f, "-{}", encode_token(told)))
    }
}

fn base36(mut number: u64) -> String {
    let mut digits = Vec::new();
    loop {
        digits.push(char::from_digit((number % 36) as u32, 36).expect("below 36"));
        number /= 36;
        if number == 0 {
            return digits.iter().rev().collect();
        }
    }
}

/// The id of a durable card: `oc_<question>.<cursor>`.
pub(crate) fn split_call(call: &str) -> Option<(&str, Cursor)> {
    let (question, cursor) = call.strip_prefix("oc_")?.rsplit_once('.')?;
    Some((question, Cursor::parse(cursor)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cursor() -> Cursor {
        Cursor::at(RunCursor { created: 1_796_116_612_345, sequence: 4711 }, Timestamp(1_796_116_700_000))
    }

    #[test]
    fn a_cursor_reads_back() {
        let seen = Cursor { revision: 36, seen: Some(0), ..cursor() };
        let told = Cursor { told: Some("a-b.c:d".into()), ..cursor() };
        for cursor in [cursor(), seen, told] {
            let text = cursor.to_string();
            assert!(text.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_=".contains(&b)), "{text}");
            assert_eq!(Cursor::parse(&text), Some(cursor), "{text}");
        }
    }

    #[test]
    fn what_was_never_written_is_no_cursor() {
        for text in ["", "1", "1-2-3-4-5-6", "1-2-x.-4-5-6-", "1-2--4-5-6-"] {
            assert_eq!(Cursor::parse(text), None, "{text}");
        }
    }

    #[test]
    fn a_durable_cards_id_gives_question_and_cursor_back() {
        let call = format!("oc_ask.1_x.{}", cursor());
        assert_eq!(split_call(&call), Some(("ask.1_x", cursor())));
        assert_eq!(split_call("call_77"), None);
    }
}
