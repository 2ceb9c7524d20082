//! What a typed message means: a command, an answer, or a message to the agent.

use std::collections::BTreeMap;

use crate::entry::{Entry, Road};
use crate::reply::Answer;
use crate::session::{MessageDecision, SendBy};
use crate::text_reply::{self, TextReply};

/// A message as the rules see it.
#[derive(Debug, Clone, Copy)]
pub struct Typed<'a> {
    /// Its text.
    pub text: &'a str,
    /// It carries images or files.
    pub attachments: bool,
    /// The ids of the questions on screen when it was typed, where the front end knows.
    pub on_screen: Option<&'a [String]>,
}

/// What a message is taken for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Route {
    /// Stop.
    Stop,
    /// The complete reply to the question at this index.
    Answer(usize, BTreeMap<String, Answer>),
    /// Not a complete reply: the person is told this; the question at this index stays pending.
    Correct(usize, String),
    /// Several questions could be meant: the person is told this.
    AskWhich(String),
    /// A message to the agent.
    Message(SendBy),
    /// Nothing was said; the person is told this.
    Nothing(String),
}

impl Route {
    /// The decision as the session records it. `open` is what the message was routed among, `run`
    /// the run id that it has as a message.
    pub fn decision(&self, open: &[&Entry], run: &str) -> MessageDecision {
        match self {
            Self::Stop => MessageDecision::Stop,
            Self::Answer(index, _) => MessageDecision::Answer { question: open[*index].key.to_string() },
            Self::Correct(_, text) | Self::AskWhich(text) | Self::Nothing(text) => {
                MessageDecision::Clarify { text: text.clone() }
            }
            Self::Message(send) => MessageDecision::Message { run: run.into(), send: *send },
        }
    }
}

/// How a message goes to the Gateway, looked at immediately before it is sent: no native question
/// that is open on record, or of which the adapter's connection was told, may take it as its
/// answer (rules S6, S7).
pub fn send_by<'a>(
    routed: SendBy,
    told_open: bool,
    on_record: impl IntoIterator<Item = &'a Entry>,
) -> SendBy {
    let takes = |entry: &Entry| entry.road == Road::Native && entry.takes_messages();
    match told_open || on_record.into_iter().any(takes) {
        true => SendBy::AgentMethod,
        false => routed,
    }
}

/// Routes a message. `open` are the session's questions that still take messages
/// ([`Entry::takes_messages`]), oldest first. The rule's name comes with the route.
pub fn route(typed: Typed<'_>, open: &[&Entry]) -> (Route, &'static str) {
    let text = typed.text.trim();
    if is_stop(text) {
        return (Route::Stop, "stop_is_a_command");
    }
    let send = send_by(SendBy::ChatSend, false, open.iter().copied());
    if text.is_empty() && !typed.attachments {
        return (Route::Nothing("The message was empty, so nothing was sent.".into()), "empty_message");
    }
    if is_command(text) {
        return (Route::Message(if is_harmless_command(text) { SendBy::ChatSend } else { send }), "command");
    }
    if open.is_empty() {
        return (Route::Message(send), "nothing_pending");
    }
    if text.is_empty() {
        return (Route::Message(send), "image_only_is_no_answer");
    }
    let candidates: Vec<usize> = (0..open.len()).filter(|i| may_take(open[*i], typed.on_screen)).collect();
    match candidates.as_slice() {
        [] if open.iter().all(|e| e.question.is_secret()) => {
            (Route::Message(send), "a_secret_is_never_typed_in_the_chat")
        }
        [] => (Route::Message(send), "pending_but_never_shown"),
        [only] => answer(*only, open[*only], text, "the_one_shown_question"),
        several => {
            let named: Vec<usize> = several
                .iter()
                .copied()
                .filter(|i| text_reply::names_an_option(&open[*i].question, text))
                .collect();
            // A label may just as well be meant for a question that takes any text.
            let is_clear = !several.iter().any(|i| text_reply::takes_any_text(&open[*i].question));
            match named.as_slice() {
                [only] if is_clear => answer(*only, open[*only], text, "the_only_one_with_this_option"),
                _ => (Route::AskWhich(which(open, several)), "several_questions_are_shown"),
            }
        }
    }
}

/// Only a pending question that was on screen takes a message, and never a secret (S4, S5).
fn may_take(entry: &Entry, on_screen: Option<&[String]>) -> bool {
    let shown = match on_screen {
        Some(ids) => ids.contains(&entry.key.question),
        None => entry.was_delivered(),
    };
    entry.is_pending() && shown && !entry.question.is_secret()
}

fn answer(index: usize, entry: &Entry, text: &str, rule: &'static str) -> (Route, &'static str) {
    match text_reply::parse(&entry.question, text) {
        TextReply::Complete(answers) => (Route::Answer(index, answers), rule),
        TextReply::Incomplete(why) => (Route::Correct(index, why), "incomplete_reply"),
    }
}

fn which(open: &[&Entry], several: &[usize]) -> String {
    let titles: Vec<String> = several.iter().map(|i| format!("- {}", open[*i].question.title())).collect();
    format!(
        "{} questions are waiting, so it is not clear which one this answers. Please use their cards.\n{}",
        several.len(),
        titles.join("\n")
    )
}

fn is_stop(text: &str) -> bool {
    matches!(text.to_lowercase().as_str(), "/stop" | "/abort")
}

/// `/name`, alone or before a space, `:` or `@`. A path such as `/etc/hosts` is none, since it may
/// well be an answer.
fn is_command(text: &str) -> bool {
    let Some(rest) = text.strip_prefix('/') else { return false };
    let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_' && c != '-').unwrap_or(rest.len());
    end > 0 && rest[end..].chars().next().is_none_or(|c| c.is_whitespace() || matches!(c, ':' | '@'))
}

/// Commands that the Gateway answers itself and that leave a pending question alone.
fn is_harmless_command(text: &str) -> bool {
    let word = text.split_whitespace().next().unwrap_or("");
    matches!(word, "/status" | "/btw" | "/help")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::entry::{Step, StepKind};
    use crate::question::{Choice, Prompt, Question};
    use crate::surface::Surface;
    use crate::time::Timestamp;

    fn entry(id: &str, road: Road, labels: &[&str], delivered: bool) -> Entry {
        let prompt = Prompt {
            options: labels.iter().copied().map(Choice::label).collect(),
            ..Prompt::free_text(format!("{id}?"))
        };
        let key = format!("g.s.r.{id}").parse().unwrap();
        let question = Question::new(vec![prompt]).unwrap();
        let entry = Entry::ask(key, road, "t", "c", question, Timestamp(1), Timestamp(9), None).unwrap();
        let step =
            Step { at: Timestamp(2), what: StepKind::Delivered { surface: Surface::Card, chat: None } };
        if delivered { entry.note(&[step]).unwrap() } else { entry }
    }

    fn typed(text: &str) -> Typed<'_> {
        Typed { text, attachments: false, on_screen: None }
    }

    fn given(index: usize, answer: Answer) -> Route {
        Route::Answer(index, [("answer".into(), answer)].into())
    }

    #[test]
    fn a_message_is_routed_by_the_first_rule_that_fits() {
        let shown = entry("q1", Road::Plugin, &["Red", "Green"], true);
        let native = entry("q2", Road::Native, &["Red", "Blue"], true);
        let hidden = entry("q3", Road::Plugin, &[], false);
        let native_hidden = entry("q4", Road::Native, &["A", "B"], false);
        use Route::Message;
        use SendBy::*;
        let table: Vec<(&str, Vec<&Entry>, Route, &str)> = vec![
            ("hello", vec![], Message(ChatSend), "nothing_pending"),
            ("/stop", vec![&shown], Route::Stop, "stop_is_a_command"),
            ("/status", vec![&native], Message(ChatSend), "command"),
            ("/steer left", vec![&native], Message(AgentMethod), "command"),
            ("/steer left", vec![&shown], Message(ChatSend), "command"),
            ("2", vec![&shown], given(0, Answer::option(1)), "the_one_shown_question"),
            ("mauve", vec![&native], given(0, Answer::text("mauve")), "the_one_shown_question"),
            ("hello", vec![&hidden], Message(ChatSend), "pending_but_never_shown"),
            ("hello", vec![&native_hidden], Message(AgentMethod), "pending_but_never_shown"),
            ("blue", vec![&shown, &native], given(1, Answer::option(1)), "the_only_one_with_this_option"),
            ("green", vec![&hidden, &shown], given(1, Answer::option(1)), "the_one_shown_question"),
        ];
        for (text, open, route_, rule) in table {
            assert_eq!(route(typed(text), &open), (route_, rule), "{text}");
        }
    }

    #[test]
    fn a_bare_reply_to_several_questions_is_never_guessed() {
        let (q1, q2) = (
            entry("q1", Road::Plugin, &["Red", "Green"], true),
            entry("q2", Road::Plugin, &["Red", "Blue"], true),
        );
        for text in ["1", "red", "whatever"] {
            let (route, rule) = route(typed(text), &[&q1, &q2]);
            assert_eq!(rule, "several_questions_are_shown");
            assert!(matches!(route, Route::AskWhich(why) if why.contains("q1?") && why.contains("q2?")));
        }
    }

    #[test]
    fn a_label_is_no_clear_answer_beside_a_question_that_takes_any_text() {
        let choice = entry("q1", Road::Plugin, &["Red", "Green"], true);
        let text = entry("q2", Road::Plugin, &[], true);
        assert_eq!(route(typed("red"), &[&choice, &text]).1, "several_questions_are_shown");
    }

    #[test]
    fn s4_only_the_questions_on_screen_take_a_message() {
        let q1 = entry("q1", Road::Plugin, &["Red"], true);
        let none: &[String] = &[];
        let seen = Typed { on_screen: Some(none), ..typed("red") };
        assert_eq!(route(seen, &[&q1]), (Route::Message(SendBy::ChatSend), "pending_but_never_shown"));
        let fresh = entry("q2", Road::Plugin, &["Red"], false);
        let ids = ["q2".to_string()];
        let seen = Typed { on_screen: Some(&ids), ..typed("red") };
        assert_eq!(route(seen, &[&q1, &fresh]), (given(1, Answer::option(0)), "the_one_shown_question"));
    }

    #[test]
    fn an_image_alone_or_nothing_at_all_is_no_answer() {
        let q1 = entry("q1", Road::Native, &["Red"], true);
        let image = Typed { attachments: true, ..typed(" ") };
        assert_eq!(route(image, &[&q1]), (Route::Message(SendBy::AgentMethod), "image_only_is_no_answer"));
        assert_eq!(route(typed("  "), &[&q1]).1, "empty_message");
    }

    #[test]
    fn beside_an_image_the_text_is_the_answer() {
        let q1 = entry("q1", Road::Plugin, &["Red"], true);
        let both = Typed { attachments: true, ..typed("red") };
        assert_eq!(route(both, &[&q1]), (given(0, Answer::option(0)), "the_one_shown_question"));
    }

    #[test]
    fn a_command_is_never_an_answer_and_a_path_may_be_one() {
        let q1 = entry("q1", Road::Plugin, &[], true);
        for text in ["/new", "/model openai/gpt", "/think:high", "/queue@bot off"] {
            assert_eq!(route(typed(text), &[&q1]), (Route::Message(SendBy::ChatSend), "command"), "{text}");
        }
        for text in ["/etc/hosts", "/notes.txt", "/", "// no comment"] {
            let answered = (given(0, Answer::text(text)), "the_one_shown_question");
            assert_eq!(route(typed(text), &[&q1]), answered, "{text}");
        }
    }

    #[test]
    fn stop_stops_whatever_waits() {
        let (q1, q2) = (entry("q1", Road::Native, &[], true), entry("q2", Road::Plugin, &[], false));
        for open in [vec![], vec![&q1], vec![&q1, &q2]] {
            for text in ["/stop", " /STOP\n", "/abort"] {
                assert_eq!(route(typed(text), &open), (Route::Stop, "stop_is_a_command"), "{text}");
            }
        }
    }

    #[test]
    fn a_secret_is_never_taken_from_the_chat() {
        let mut q1 = entry("q1", Road::Plugin, &[], true);
        q1.question.prompts[0].secret = true;
        assert_eq!(
            route(typed("hunter2"), &[&q1]),
            (Route::Message(SendBy::ChatSend), "a_secret_is_never_typed_in_the_chat")
        );
    }

    #[test]
    fn s7_a_decided_native_question_still_keeps_chat_send_away() {
        let q1 = entry("q1", Road::Native, &["Red"], true)
            .cancel(crate::outcome::CancelReason::Stop, "stop", Timestamp(3))
            .unwrap();
        assert_eq!(
            route(typed("red"), &[&q1]),
            (Route::Message(SendBy::AgentMethod), "pending_but_never_shown")
        );
    }

    #[test]
    fn an_incomplete_reply_is_corrected_and_the_question_stays() {
        let q1 = entry("q1", Road::Plugin, &["Red", "Green"], true);
        let (route, rule) = route(typed("7"), &[&q1]);
        assert!(matches!(route, Route::Correct(0, _)));
        assert_eq!(rule, "incomplete_reply");
    }

    #[test]
    fn s6_s7_the_last_look_keeps_a_message_from_becoming_an_answer() {
        let native = entry("q1", Road::Native, &[], false);
        let decided = native.cancel(crate::outcome::CancelReason::Stop, "stop", Timestamp(3)).unwrap();
        let returned = crate::outcome::Returned::Unconfirmed { why: "x".into() };
        let closed = decided.close(returned, Timestamp(4)).unwrap();
        let plugin = entry("q2", Road::Plugin, &[], true);
        let table = [
            (SendBy::ChatSend, false, vec![], SendBy::ChatSend),
            (SendBy::ChatSend, false, vec![&plugin, &closed], SendBy::ChatSend),
            (SendBy::ChatSend, false, vec![&plugin, &native], SendBy::AgentMethod),
            (SendBy::ChatSend, false, vec![&decided], SendBy::AgentMethod),
            (SendBy::ChatSend, true, vec![], SendBy::AgentMethod),
            (SendBy::AgentMethod, false, vec![], SendBy::AgentMethod),
        ];
        for (routed, told_open, on_record, sent) in table {
            assert_eq!(send_by(routed, told_open, on_record.clone()), sent, "{told_open} {on_record:?}");
        }
    }
}
