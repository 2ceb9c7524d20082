//! What a message makes a scripted agent do, read from the message itself.
//!
//! `CALL <tool> {json}` calls a tool, `SLOW <n>` says n words, one each 500 ms. Several calls in a
//! row are made at once; after `THEN` comes what is done when their results are in. Text around
//! directives is ignored; a part without a directive is said as it is.

use std::time::Duration;

/// Time between two words of `SLOW`.
pub const SLOW_WORD: Duration = Duration::from_millis(500);

/// One call of a tool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Call {
    /// Name of the tool.
    pub tool: String,
    /// The JSON object as it stood in the message.
    pub args: String,
}

/// What is done before the next `THEN`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Tools called at the same time.
    Calls(Vec<Call>),
    /// That many words, slowly.
    Slow(usize),
    /// A text, at once.
    Say(String),
}

/// The steps of a message; none where it holds no directive. Open WebUI's editor makes curly quotes
/// of the straight ones that people type: both are read.
pub fn parse(message: &str) -> Option<Vec<Step>> {
    let message = message.replace(['“', '”'], "\"");
    let mut steps = Vec::new();
    let mut found = false;
    for part in split_at_then(&message) {
        let mut calls = Vec::new();
        let mut slow = None;
        let mut rest = part;
        while let Some((directive, after)) = next_directive(rest) {
            match directive {
                Directive::Call(call) => calls.push(call),
                Directive::Slow(words) => slow = Some(words),
                Directive::Then => {}
            }
            rest = after;
        }
        found |= slow.is_some() || !calls.is_empty();
        if slow.is_none() && calls.is_empty() {
            steps.push(Step::Say(part.trim().to_owned()));
        }
        steps.extend(slow.map(Step::Slow));
        if !calls.is_empty() {
            steps.push(Step::Calls(calls));
        }
    }
    found.then_some(steps)
}

/// The words of `SLOW <n>`.
pub fn slow_words(count: usize) -> impl Iterator<Item = String> {
    (0..count).map(|n| format!("w{n} "))
}

enum Directive {
    Call(Call),
    Slow(usize),
    Then,
}

/// The first directive of a text and what follows it.
fn next_directive(text: &str) -> Option<(Directive, &str)> {
    text.char_indices()
        .filter(|(at, _)| *at == 0 || text[..*at].ends_with(char::is_whitespace))
        .find_map(|(at, _)| directive_at(&text[at..]))
}

fn directive_at(text: &str) -> Option<(Directive, &str)> {
    if let Some(rest) = text.strip_prefix("CALL ") {
        let (tool, rest) = rest.trim_start().split_once(char::is_whitespace)?;
        let rest = rest.trim_start();
        let end = object_end(rest)?;
        let call = Call { tool: tool.to_owned(), args: rest[..end].to_owned() };
        return Some((Directive::Call(call), &rest[end..]));
    }
    if let Some(rest) = text.strip_prefix("SLOW ") {
        let digits = rest.len() - rest.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        let words = rest[..digits].parse().ok()?;
        return Some((Directive::Slow(words), &rest[digits..]));
    }
    let rest = text.strip_prefix("THEN")?;
    (rest.is_empty() || rest.starts_with(char::is_whitespace)).then_some((Directive::Then, rest))
}

fn split_at_then(message: &str) -> Vec<&str> {
    let mut parts = Vec::new();
    let (mut start, mut rest) = (0, message);
    while let Some((directive, after)) = next_directive(rest) {
        if matches!(directive, Directive::Then) {
            let end = message.len() - after.len() - "THEN".len();
            parts.push(&message[start..end]);
            start = message.len() - after.len();
        }
        rest = after;
    }
    parts.push(&message[start..]);
    parts
}

/// Where the JSON object at the start of a text ends, by its balanced braces.
fn object_end(text: &str) -> Option<usize> {
    if !text.starts_with('{') {
        return None;
    }
    let (mut depth, mut quoted, mut escaped) = (0_usize, false, false);
    for (at, c) in text.char_indices() {
        match c {
            _ if escaped => escaped = false,
            '\\' if quoted => escaped = true,
            '"' => quoted = !quoted,
            '{' if !quoted => depth += 1,
            '}' if !quoted => {
                depth -= 1;
                if depth == 0 {
                    return Some(at + 1);
                }
            }
            _ => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(tool: &str, args: &str) -> Call {
        Call { tool: tool.into(), args: args.into() }
    }

    #[test]
    fn messages_become_steps() {
        let cases: Vec<(&str, Option<Vec<Step>>)> = vec![
            ("hello", None),
            ("RECALL x {}", None),
            ("CALL x", None),
            ("CALL x {\"open\":", None),
            ("first THEN second", None),
            ("SLOW 3", Some(vec![Step::Slow(3)])),
            ("CALL ask {“q”: “a”}", Some(vec![Step::Calls(vec![call("ask", "{\"q\": \"a\"}")])])),
            (
                "[Tue] please CALL ask {\"q\":\"a } \\\" THEN {\"} now",
                Some(vec![Step::Calls(vec![call("ask", "{\"q\":\"a } \\\" THEN {\"}")])]),
            ),
            (
                "CALL a {} CALL b {\"x\":{}}\nTHEN CALL c {} THEN SLOW 2 THEN bye ✓",
                Some(vec![
                    Step::Calls(vec![call("a", "{}"), call("b", "{\"x\":{}}")]),
                    Step::Calls(vec![call("c", "{}")]),
                    Step::Slow(2),
                    Step::Say("bye ✓".into()),
                ]),
            ),
        ];
        for (message, steps) in cases {
            assert_eq!(parse(message), steps, "{message}");
        }
    }
}
