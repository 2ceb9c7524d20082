//! Reads typed text as the reply to a question: a number, a label in any case, several of them
//! for a multi-select, a line per prompt for a form, else own words.

use std::collections::BTreeMap;

use crate::question::{Prompt, Question, clamp};
use crate::reply::{Answer, MAX_ANSWER};

/// Longest text that a correction repeats, in characters: it is kept on record.
const MAX_QUOTED: usize = 80;
/// Longest list of labels in a correction, in characters.
const MAX_LISTED_LABELS: usize = 400;

/// What typed text is to a question.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TextReply {
    /// It answers every required prompt.
    Complete(BTreeMap<String, Answer>),
    /// It does not; the person is told this.
    Incomplete(String),
}

/// Reads `text` as the reply to `question`.
pub fn parse(question: &Question, text: &str) -> TextReply {
    let [prompt] = question.prompts.as_slice() else {
        return parse_form(question, text);
    };
    match parse_prompt(prompt, text.trim()) {
        Ok(answer) => TextReply::Complete([(prompt.id.clone(), answer)].into()),
        Err(correction) => TextReply::Incomplete(correction),
    }
}

/// True when any text is a reply to the question, whatever it names.
pub fn takes_any_text(question: &Question) -> bool {
    question.prompts.iter().any(|prompt| prompt.options.is_empty())
}

/// True when the text names an option of a prompt by its label.
pub fn names_an_option(question: &Question, text: &str) -> bool {
    let [prompt] = question.prompts.as_slice() else {
        return false;
    };
    by_label(prompt, text.trim()).is_some()
}

fn parse_form(question: &Question, text: &str) -> TextReply {
    let mut answers = BTreeMap::new();
    let mut unnamed = Vec::new();
    for line in text.lines().map(str::trim).filter(|l| !l.is_empty()) {
        let named = line.split_once(':').and_then(|(name, rest)| {
            let name = name.trim().to_lowercase();
            let meant = |p: &&Prompt| {
                p.id.to_lowercase() == name || (!p.header.is_empty() && p.header.to_lowercase() == name)
            };
            // Of several prompts with this name, the first that has no answer yet.
            let mut prompts = question.prompts.iter().filter(meant);
            let first = prompts.clone().next()?;
            Some((prompts.find(|p| !answers.contains_key(&p.id)).unwrap_or(first), rest.trim()))
        });
        match named {
            Some((prompt, _)) if answers.contains_key(&prompt.id) => {
                return TextReply::Incomplete(format!(
                    "{} is answered twice. Please answer every question once.",
                    name_of(prompt)
                ));
            }
            Some((prompt, "")) if !prompt.required => {}
            Some((prompt, rest)) => match parse_prompt(prompt, rest) {
                Ok(answer) => drop(answers.insert(prompt.id.clone(), answer)),
                Err(correction) => return TextReply::Incomplete(correction),
            },
            None => unnamed.push(line),
        }
    }
    let open: Vec<&Prompt> = question.prompts.iter().filter(|p| !answers.contains_key(&p.id)).collect();
    if unnamed.len() > open.len() {
        return TextReply::Incomplete(format!(
            "There are {} lines for {} questions. Please answer one question a line.",
            unnamed.len(),
            open.len()
        ));
    }
    for (prompt, line) in open.iter().zip(&unnamed) {
        match parse_prompt(prompt, line) {
            Ok(answer) => drop(answers.insert(prompt.id.clone(), answer)),
            Err(correction) => return TextReply::Incomplete(correction),
        }
    }
    let missing: Vec<String> =
        question.prompts.iter().filter(|p| p.required && !answers.contains_key(&p.id)).map(name_of).collect();
    if missing.is_empty() && !answers.is_empty() {
        return TextReply::Complete(answers);
    }
    TextReply::Incomplete(format!(
        "Still missing: {}. Please answer every question, one a line.",
        missing.join(", ")
    ))
}

fn parse_prompt(prompt: &Prompt, text: &str) -> Result<Answer, String> {
    if text.is_empty() {
        return Err(format!("Still missing: {}.", name_of(prompt)));
    }
    if prompt.options.is_empty() {
        return own_words(text).map(Answer::text);
    }
    if let Some(index) = by_label(prompt, text) {
        return Ok(Answer::option(index));
    }
    if prompt.multiple && text.contains(',') {
        return parse_several(prompt, text);
    }
    match number(text) {
        Some(n) if (1..=prompt.options.len()).contains(&n) => Ok(Answer::option(n - 1)),
        Some(n) => Err(format!(
            "There is no option {n}. Please choose from 1 to {}{}.",
            prompt.options.len(),
            or_words(prompt)
        )),
        None if prompt.allow_other => own_words(text).map(Answer::text),
        None => Err(format!("Please choose one of: {}.", labels(prompt))),
    }
}

fn parse_several(prompt: &Prompt, text: &str) -> Result<Answer, String> {
    let (mut options, mut own) = (Vec::new(), Vec::new());
    for part in text.split(',').map(str::trim).filter(|p| !p.is_empty()) {
        match by_label(prompt, part).map(|i| i + 1).or_else(|| number(part)) {
            Some(n) if (1..=prompt.options.len()).contains(&n) => {
                if !options.contains(&(n - 1)) {
                    options.push(n - 1);
                }
            }
            Some(n) => {
                return Err(format!(
                    "There is no option {n}. Please choose from 1 to {}.",
                    prompt.options.len()
                ));
            }
            None if prompt.allow_other => own.push(part),
            None => {
                let part = clamp(part, MAX_QUOTED);
                return Err(format!("\"{part}\" is not an option. Please choose from: {}.", labels(prompt)));
            }
        }
    }
    let other = if own.is_empty() { None } else { Some(own_words(&own.join(", "))?) };
    match options.is_empty() && other.is_none() {
        true => Err(format!("Still missing: {}.", name_of(prompt))),
        false => Ok(Answer::Given { options, other }),
    }
}

fn own_words(text: &str) -> Result<String, String> {
    match text.chars().count() {
        0..=MAX_ANSWER => Ok(text.to_owned()),
        n => Err(format!(
            "The answer has {n} characters, and at most {MAX_ANSWER} can be taken. Please shorten it."
        )),
    }
}

fn by_label(prompt: &Prompt, text: &str) -> Option<usize> {
    let text = text.to_lowercase();
    prompt.options.iter().position(|o| o.label.trim().to_lowercase() == text)
}

/// `2`, `2)`, `2.`, `(2)` and `#2` are numbers; anything longer is words.
fn number(text: &str) -> Option<usize> {
    let digits = text.trim_start_matches(['(', '#']).trim_end_matches([')', '.', ':']).trim();
    (!digits.is_empty() && digits.len() <= 3 && digits.bytes().all(|b| b.is_ascii_digit()))
        .then(|| digits.parse().ok())
        .flatten()
}

fn name_of(prompt: &Prompt) -> String {
    if prompt.header.is_empty() { prompt.id.clone() } else { prompt.short_header() }
}

fn labels(prompt: &Prompt) -> String {
    let all = prompt.options.iter().map(|o| clamp(&o.label, MAX_QUOTED)).collect::<Vec<_>>().join(", ");
    clamp(&all, MAX_LISTED_LABELS)
}

fn or_words(prompt: &Prompt) -> &'static str {
    if prompt.allow_other { " or answer in your own words" } else { "" }
}

/// The question as plain text, with numbered options.
pub fn as_text(question: &Question) -> String {
    let mut text = String::new();
    for (i, prompt) in question.prompts.iter().enumerate() {
        if i > 0 {
            text.push('\n');
        }
        match question.prompts.len() {
            1 => text.push_str(&format!("**{}**\n", prompt.text)),
            _ => text.push_str(&format!("**{}: {}**\n", name_of(prompt), prompt.text)),
        }
        for (n, option) in prompt.options.iter().enumerate() {
            let description = option.description.as_ref().map(|d| format!(" — {d}")).unwrap_or_default();
            text.push_str(&format!("{}. {}{description}\n", n + 1, option.label));
        }
    }
    let hint = match question.prompts.as_slice() {
        [prompt] if prompt.options.is_empty() => "Reply with your answer.",
        [prompt] if prompt.multiple => "Reply with numbers or labels, separated by commas.",
        [prompt] if prompt.allow_other => "Reply with a number, a label or your own words.",
        [_] => "Reply with a number or a label.",
        _ => "Reply with one line for each question.",
    };
    format!("{text}\n_{hint}_")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::question::Choice;
    use proptest::prelude::*;

    fn colours() -> Question {
        let prompt = Prompt {
            options: ["Red", "Green"].map(Choice::label).into(),
            ..Prompt::free_text("Which colour?")
        };
        Question::new(vec![prompt]).unwrap()
    }

    fn form() -> Question {
        let named = |id: &str| Prompt { id: id.into(), ..Prompt::free_text(id) };
        Question::new(vec![named("city"), named("budget")]).unwrap()
    }

    #[test]
    fn lines_for_prompts_of_one_name_go_to_them_in_order_and_never_over_each_other() {
        let named = |id: &str| Prompt { id: id.into(), header: "City".into(), ..Prompt::free_text(id) };
        let question = Question::new(vec![named("from"), named("to")]).unwrap();
        let answers = [("from".into(), Answer::text("Oslo")), ("to".into(), Answer::text("Rome"))].into();
        assert_eq!(parse(&question, "City: Oslo\ncity: Rome"), TextReply::Complete(answers));
        let third = parse(&question, "City: Oslo\ncity: Rome\nCity: Paris");
        assert!(matches!(third, TextReply::Incomplete(why) if why.contains("City is answered twice")));
    }

    #[test]
    fn a_line_without_a_name_is_not_for_the_prompt_without_a_header() {
        let mut question = form();
        question.prompts[1].header = "Money".into();
        let answers = [("city".into(), Answer::text(": Oslo")), ("budget".into(), Answer::text("9"))].into();
        assert_eq!(parse(&question, "Money: 9\n: Oslo"), TextReply::Complete(answers));
    }

    #[test]
    fn a_correction_repeats_little_of_a_long_text() {
        let mut question = colours();
        (question.prompts[0].multiple, question.prompts[0].allow_other) = (true, false);
        question.prompts[0].options =
            (0..32).map(|n| Choice::label(format!("{n}{}", "x".repeat(300)))).collect();
        for text in [format!("{}, y", "long ".repeat(40_000)), "no such".into(), "1, 99".into()] {
            let TextReply::Incomplete(why) = parse(&question, &text) else { panic!("{}", text.len()) };
            assert!(why.chars().count() < 600, "{why}");
        }
    }

    #[test]
    fn a_line_that_leaves_an_optional_prompt_blank_leaves_it_out() {
        let mut question = form();
        question.prompts[1].required = false;
        let answers = [("city".into(), Answer::text("Lisbon"))].into();
        assert_eq!(parse(&question, "city: Lisbon\nbudget:"), TextReply::Complete(answers));
    }

    fn one(question: &Question, text: &str) -> Option<Answer> {
        match parse(question, text) {
            TextReply::Complete(answers) => answers.into_values().next(),
            TextReply::Incomplete(_) => None,
        }
    }

    #[test]
    fn a_typed_reply_to_choices_is_a_number_a_label_or_own_words() {
        let table = [
            ("2", Answer::option(1)),
            ("2)", Answer::option(1)),
            ("2.", Answer::option(1)),
            ("green", Answer::option(1)),
            (" GREEN ", Answer::option(1)),
            ("the second one", Answer::text("the second one")),
            ("blue-ish", Answer::text("blue-ish")),
            ("no", Answer::text("no")),
        ];
        for (text, answer) in table {
            assert_eq!(one(&colours(), text), Some(answer), "{text}");
        }
    }

    #[test]
    fn a_number_out_of_range_is_asked_again() {
        let TextReply::Incomplete(why) = parse(&colours(), "7") else { panic!() };
        assert_eq!(why, "There is no option 7. Please choose from 1 to 2 or answer in your own words.");
    }

    #[test]
    fn own_words_are_refused_where_the_asker_says_so() {
        let mut question = colours();
        question.prompts[0].allow_other = false;
        let TextReply::Incomplete(why) = parse(&question, "blue") else { panic!() };
        assert_eq!(why, "Please choose one of: Red, Green.");
    }

    #[test]
    fn a_multi_select_takes_several_and_a_label_with_a_comma() {
        let mut question = colours();
        question.prompts[0].multiple = true;
        question.prompts[0].options.push(Choice::label("Black, matt"));
        let several = Answer::Given { options: vec![0, 1], other: Some("pink".into()) };
        assert_eq!(one(&question, "1, green, pink, red"), Some(several));
        assert_eq!(one(&question, "black, matt"), Some(Answer::option(2)));
    }

    #[test]
    fn a_number_out_of_range_is_not_among_several_either() {
        let mut question = colours();
        question.prompts[0].multiple = true;
        for (text, n) in [("0, 1", 0), ("1, 3", 3)] {
            let TextReply::Incomplete(why) = parse(&question, text) else { panic!("{text}") };
            assert_eq!(why, format!("There is no option {n}. Please choose from 1 to 2."));
        }
    }

    #[test]
    fn free_text_takes_any_words_and_only_blank_is_none() {
        let question = Question::new(vec![Prompt::free_text("Why?")]).unwrap();
        for text in ["0", "no", "false", "None", "cancel", "2)", "two\nlines"] {
            assert_eq!(one(&question, text), Some(Answer::text(text)), "{text}");
        }
        for text in ["", " \n\t"] {
            assert_eq!(one(&question, text), None, "{text:?}");
        }
    }

    #[test]
    fn words_that_are_too_long_are_asked_for_again() {
        let mut several = colours();
        several.prompts[0].multiple = true;
        let free = Question::new(vec![Prompt::free_text("Why?")]).unwrap();
        for question in [free, colours(), several] {
            let text = "x".repeat(MAX_ANSWER);
            assert_eq!(one(&question, &text), Some(Answer::text(&text)));
            let TextReply::Incomplete(why) = parse(&question, &format!("{text}, y")) else { panic!() };
            assert!(why.contains("32003 characters, and at most 32000"), "{why}");
        }
    }

    #[test]
    fn labels_of_any_script_are_shown_as_they_are_and_matched_in_any_case() {
        let mut question = colours();
        let labels = ["כן, בטח", "ÄPFEL", "赤", "<b>\"bold\" & co</b>"];
        question.prompts[0].options = labels.map(Choice::label).into();
        let shown = as_text(&question);
        for (i, label) in labels.iter().enumerate() {
            assert!(shown.contains(&format!("{}. {label}\n", i + 1)), "{shown}");
            assert_eq!(one(&question, &label.to_lowercase()), Some(Answer::option(i)), "{label}");
        }
    }

    #[test]
    fn the_hint_offers_only_what_is_taken() {
        let mut question = colours();
        assert!(as_text(&question).ends_with("_Reply with a number, a label or your own words._"));
        question.prompts[0].allow_other = false;
        assert!(as_text(&question).ends_with("_Reply with a number or a label._"));
        question.prompts[0].multiple = true;
        assert!(as_text(&question).ends_with("_Reply with numbers or labels, separated by commas._"));
        assert!(as_text(&form()).ends_with("_Reply with one line for each question._"));
    }

    #[test]
    fn a_partial_reply_to_a_form_names_what_is_missing() {
        let TextReply::Incomplete(why) = parse(&form(), "Lisbon") else { panic!() };
        assert!(why.contains("budget") && !why.contains("city"), "{why}");
        let answers =
            [("city".into(), Answer::text("Lisbon")), ("budget".into(), Answer::text("2000"))].into();
        assert_eq!(parse(&form(), "Lisbon\n2000"), TextReply::Complete(answers));
    }

    #[test]
    fn a_form_takes_named_lines_in_any_order() {
        let answers =
            [("city".into(), Answer::text("Lisbon")), ("budget".into(), Answer::text("2000"))].into();
        assert_eq!(parse(&form(), "budget: 2000\ncity: Lisbon"), TextReply::Complete(answers));
    }

    proptest! {
        #[test]
        fn what_is_parsed_always_passes_the_check(text in "\\PC{0,60}", multiple: bool, allow_other: bool) {
            let mut question = colours();
            question.prompts[0].multiple = multiple;
            question.prompts[0].allow_other = allow_other;
            for question in [question, form()] {
                if let TextReply::Complete(answers) = parse(&question, &text) {
                    prop_assert_eq!(crate::reply::check_answers(&question, &answers), Ok(()));
                }
            }
        }
    }
}
