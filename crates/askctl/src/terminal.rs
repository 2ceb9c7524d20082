//! Text for terminals, and what is typed there.

use std::fmt::{self, Display, Formatter};
use std::io::{BufRead as _, IsTerminal as _, Write as _, stdin, stdout};
use std::time::Duration;

use anyhow::{Context as _, Result};
use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcsetattr};
use zeroize::Zeroizing;

/// Writes a line to standard output, like `println!`, but see [`put`].
macro_rules! say {
    ($($line:tt)*) => { $crate::terminal::put(format_args!("{}\n", format_args!($($line)*))) };
}
pub(crate) use say;

/// Writes to standard output. False when nobody reads it any more, which is no failure here.
pub fn put(text: impl Display) -> bool {
    let mut out = stdout().lock();
    write!(out, "{text}").and_then(|()| out.flush()).is_ok()
}

/// One line of `text`, at most `max` characters, without anything that could steer a terminal:
/// questions and answers come from elsewhere.
pub fn plain(text: &str, max: usize) -> String {
    let steers = |c: char| {
        c.is_control()
            || matches!(c, '\u{200E}' | '\u{200F}' | '\u{202A}'..='\u{202E}' | '\u{2066}'..='\u{2069}')
    };
    let clean: String = text.chars().map(|c| if steers(c) { ' ' } else { c }).collect();
    ask_core::question::clamp(clean.trim(), max)
}

/// A duration as people read it.
pub fn duration(time: Duration) -> String {
    let (ms, s) = (time.as_millis(), time.as_secs());
    match s {
        0 => format!("{ms} ms"),
        1..60 => format!("{:.1} s", time.as_secs_f64()),
        60..3600 => format!("{} min {} s", s / 60, s % 60),
        3600..86_400 => format!("{} h {} min", s / 3600, s % 3600 / 60),
        _ => format!("{} d {} h", s / 86_400, s % 86_400 / 3600),
    }
}

/// Whoever was asked left without an answer: how.
#[derive(Debug)]
pub struct Unanswered(pub &'static str);

impl Display for Unanswered {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "{}; nothing was sent", self.0)
    }
}

impl std::error::Error for Unanswered {}

/// Reads a line from standard input; none at its end. Hidden, the terminal shows nothing of it.
pub async fn read_line(hidden: bool) -> Result<Option<Zeroizing<String>>> {
    let _hidden = if hidden && stdin().is_terminal() { Some(HiddenInput::begin()?) } else { None };
    let read = tokio::task::spawn_blocking(|| {
        let mut line = Zeroizing::new(String::new());
        let length = stdin().lock().read_line(&mut line).context("standard input can't be read as text")?;
        let end = line.trim_end_matches(['\r', '\n']).len();
        line.truncate(end);
        anyhow::Ok((length > 0).then_some(line))
    });
    tokio::select! {
        line = read => line?,
        // Handled here, so that the terminal shows again what is typed.
        _ = tokio::signal::ctrl_c() => Err(Unanswered("interrupted").into()),
    }
}

/// The terminal does not show what is typed until this is dropped.
struct HiddenInput(Termios);

impl HiddenInput {
    fn begin() -> Result<Self> {
        let before = tcgetattr(stdin()).context("the terminal can't be asked to hide what is typed")?;
        let mut hidden = before.clone();
        hidden.local_modes.remove(LocalModes::ECHO);
        hidden.local_modes.insert(LocalModes::ECHONL);
        tcsetattr(stdin(), OptionalActions::Flush, &hidden)
            .context("the terminal can't hide what is typed")?;
        Ok(Self(before))
    }
}

impl Drop for HiddenInput {
    fn drop(&mut self) {
        // A terminal that is gone shows nothing either.
        let _ = tcsetattr(stdin(), OptionalActions::Flush, &self.0);
    }
}

/// Rows in columns, each line indented by `indent`; the last column is as long as it is.
pub fn table(indent: usize, rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text = String::new();
    for row in rows {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
        let line = cells.collect::<Vec<_>>().join("  ");
        text.push_str(format!("{:indent$}{line}", "").trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_from_elsewhere_can_not_steer_the_terminal() {
        assert_eq!(plain("a\u{1b}[2Jb\r\nc\u{202e}d\u{9b}1m", 40), "a [2Jb  c d 1m");
        assert_eq!(plain("  abcdef ", 4), "abc…");
    }

    #[test]
    fn durations_are_readable() {
        let table = [
            (0, "0 ms"),
            (999, "999 ms"),
            (2_340, "2.3 s"),
            (61_000, "1 min 1 s"),
            (7_260_000, "2 h 1 min"),
            (90_000_000, "1 d 1 h"),
        ];
        for (ms, text) in table {
            assert_eq!(duration(Duration::from_millis(ms)), text);
        }
    }

    #[test]
    fn columns_line_up() {
        let rows = [vec!["a".into(), "bb".into()], vec!["ccc".into(), "d".into()]];
        assert_eq!(table(2, &rows), "  a    bb\n  ccc  d\n");
    }
}
