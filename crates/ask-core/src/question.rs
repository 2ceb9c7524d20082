//! What one call asks: one or more prompts.

use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// Most prompts in a question.
pub const MAX_PROMPTS: usize = 8;
/// Most options in a prompt.
pub const MAX_OPTIONS: usize = 32;
/// Longest prompt text, in characters.
pub const MAX_TEXT: usize = 4_000;
/// Longest label of an option, in characters.
pub const MAX_LABEL: usize = 400;
/// Longest description of an option, in characters.
pub const MAX_DESCRIPTION: usize = 1_000;
/// Longest value of an option, in characters.
pub const MAX_VALUE: usize = 1_000;
/// Longest id of a prompt, in characters.
pub const MAX_PROMPT_ID: usize = 100;
/// How much of a header is shown, in characters.
pub const MAX_HEADER: usize = 48;

/// What one call asks.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Question {
    /// One to [`MAX_PROMPTS`] prompts, with ids that differ.
    pub prompts: Vec<Prompt>,
}

/// One thing to answer.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Prompt {
    /// Unique in the question.
    pub id: String,
    /// A few words above the text; may be empty. Shown by [`Prompt::short_header`].
    #[serde(default)]
    pub header: String,
    /// The question as the person reads it.
    pub text: String,
    /// What to choose from; empty for free text.
    #[serde(default)]
    pub options: Vec<Choice>,
    /// Several options may be chosen.
    #[serde(default)]
    pub multiple: bool,
    /// Own words are accepted beside the options.
    #[serde(default = "yes")]
    pub allow_other: bool,
    /// The answer is confidential.
    #[serde(default)]
    pub secret: bool,
    /// The question is not answered without it.
    #[serde(default = "yes")]
    pub required: bool,
}

/// One option of a prompt.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Choice {
    /// What the person reads, and the answer unless there is a value.
    pub label: String,
    /// A line below the label.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
    /// What the agent gets instead of the label.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<String>,
}

fn yes() -> bool {
    true
}

/// Input that can't be taken: which field, what is allowed, what it was.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize, thiserror::Error)]
pub struct Invalid {
    /// The field, as its sender knows it.
    pub field: String,
    /// What is allowed there.
    pub limit: String,
    /// What it was, shortened.
    pub value: String,
}

impl Invalid {
    /// `field` must be `limit`, and was `value`.
    pub fn new(field: impl Into<String>, limit: impl Into<String>, value: impl fmt::Display) -> Self {
        Self { field: field.into(), limit: limit.into(), value: clamp(&value.to_string(), 200) }
    }
}

impl fmt::Display for Invalid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` must be {}, got: {}", self.field, self.limit, self.value)
    }
}

impl Choice {
    /// An option that is only a label.
    pub fn label(label: impl Into<String>) -> Self {
        Self { label: label.into(), description: None, value: None }
    }
}

impl Prompt {
    /// A free-text prompt with the id `answer`.
    pub fn free_text(text: impl Into<String>) -> Self {
        Self {
            id: "answer".into(),
            header: String::new(),
            text: text.into(),
            options: Vec::new(),
            multiple: false,
            allow_other: true,
            secret: false,
            required: true,
        }
    }

    /// The header as it is shown: at most [`MAX_HEADER`] characters.
    pub fn short_header(&self) -> String {
        clamp(&self.header, MAX_HEADER)
    }
}

impl Question {
    /// A question with the prompts given.
    ///
    /// # Errors
    /// The first limit that a prompt breaks.
    pub fn new(prompts: Vec<Prompt>) -> Result<Self, Invalid> {
        let question = Self { prompts };
        question.check()?;
        Ok(question)
    }

    /// The prompt with this id.
    pub fn prompt(&self, id: &str) -> Option<&Prompt> {
        self.prompts.iter().find(|p| p.id == id)
    }

    /// True when an answer to any of its prompts is confidential.
    pub fn is_secret(&self) -> bool {
        self.prompts.iter().any(|p| p.secret)
    }

    /// One line that tells what is asked.
    pub fn title(&self) -> String {
        let lines = self.prompts.iter().flat_map(|prompt| prompt.text.lines());
        let line = lines.map(str::trim).find(|line| !line.is_empty()).unwrap_or("Question");
        clamp(line, 120)
    }

    /// Reads the arguments of `request_user_input`: `question`, `choices`, `secret`, or several
    /// `questions`; and what models really send instead (`options`, objects or plain strings, a
    /// JSON text of a list, `multiSelect`, missing ids).
    ///
    /// # Errors
    /// The first field that can't be understood or breaks a limit, in words for the model.
    pub fn from_tool_args(args: &Value) -> Result<Self, Invalid> {
        let parsed;
        let args = match args {
            Value::String(text) => {
                parsed = serde_json::from_str::<Value>(text).unwrap_or(Value::Null);
                &parsed
            }
            other => other,
        };
        let Value::Object(fields) = args else {
            return Err(Invalid::new("arguments", "an object with `question`", args));
        };
        let prompts = match fields.get("questions") {
            None | Some(Value::Null) => vec![prompt_from(fields, "", 0)?],
            Some(list) => {
                let list = list_of(list).ok_or_else(|| {
                    Invalid::new("questions", format!("a list of 1 to {MAX_PROMPTS} objects"), list)
                })?;
                let each = list.iter().enumerate().map(|(i, item)| match item {
                    Value::Object(fields) => prompt_from(fields, &format!("questions[{i}]."), i),
                    Value::String(text) => {
                        Ok(Prompt { id: format!("q{}", i + 1), ..Prompt::free_text(text) })
                    }
                    other => Err(Invalid::new(format!("questions[{i}]"), "an object with `question`", other)),
                });
                each.collect::<Result<Vec<_>, _>>()?
            }
        };
        Self::new(prompts)
    }

    fn check(&self) -> Result<(), Invalid> {
        if self.prompts.is_empty() || self.prompts.len() > MAX_PROMPTS {
            return Err(Invalid::new("questions", format!("1 to {MAX_PROMPTS} prompts"), self.prompts.len()));
        }
        for (i, prompt) in self.prompts.iter().enumerate() {
            let field = |name: &str| {
                if self.prompts.len() == 1 { name.into() } else { format!("questions[{i}].{name}") }
            };
            check_length(field("id"), &prompt.id, MAX_PROMPT_ID)?;
            if self.prompts[..i].iter().any(|p| p.id == prompt.id) {
                return Err(Invalid::new(field("id"), "unique in the question", &prompt.id));
            }
            if prompt.text.trim().is_empty() {
                return Err(Invalid::new(field("question"), "text that is not blank", "nothing"));
            }
            check_length(field("question"), &prompt.text, MAX_TEXT)?;
            check_length(field("header"), &prompt.header, MAX_LABEL)?;
            if prompt.options.len() > MAX_OPTIONS {
                return Err(Invalid::new(
                    field("choices"),
                    format!("at most {MAX_OPTIONS} options"),
                    prompt.options.len(),
                ));
            }
            if prompt.secret && !prompt.options.is_empty() {
                return Err(Invalid::new(
                    field("choices"),
                    "empty when `secret` is true (ask for the choice and for the secret in two calls)",
                    format!("{} options", prompt.options.len()),
                ));
            }
            for (n, option) in prompt.options.iter().enumerate() {
                let part = |name: &str| field(&format!("choices[{n}]{name}"));
                if option.label.trim().is_empty() {
                    return Err(Invalid::new(part(""), "a label that is not blank", "nothing"));
                }
                check_length(part(""), &option.label, MAX_LABEL)?;
                let text = |text: &Option<String>| text.clone().unwrap_or_default();
                check_length(part(".description"), &text(&option.description), MAX_DESCRIPTION)?;
                check_length(part(".value"), &text(&option.value), MAX_VALUE)?;
            }
        }
        if self.is_secret() && self.prompts.len() > 1 {
            return Err(Invalid::new(
                "questions",
                "a single prompt when it is secret",
                format!("{} prompts", self.prompts.len()),
            ));
        }
        Ok(())
    }
}

fn check_length(field: String, text: &str, max: usize) -> Result<(), Invalid> {
    let length = text.chars().count();
    if length <= max {
        Ok(())
    } else {
        Err(Invalid::new(field, format!("at most {max} characters"), format!("{length} characters")))
    }
}

fn prompt_from(fields: &Map<String, Value>, at: &str, index: usize) -> Result<Prompt, Invalid> {
    let text = ["question", "text", "prompt", "message"].iter().find_map(|k| fields.get(*k));
    let Some(Value::String(text)) = text else {
        let got = text.map_or("nothing".into(), Value::to_string);
        return Err(Invalid::new(format!("{at}question"), "text", got));
    };
    let options = match ["choices", "options"].iter().find_map(|k| fields.get(*k).map(|v| (k, v))) {
        None | Some((_, Value::Null)) => Vec::new(),
        Some((name, value)) => {
            let list = list_of(value)
                .ok_or_else(|| Invalid::new(format!("{at}{name}"), "a list of texts", value))?;
            let each = list.iter().enumerate().map(|(i, v)| choice_from(v, format!("{at}{name}[{i}]")));
            distinct(each.collect::<Result<Vec<_>, _>>()?)
        }
    };
    let flag = |names: &[&str], default: bool| -> Result<bool, Invalid> {
        match names.iter().find_map(|k| fields.get(*k).map(|v| (k, v))) {
            None | Some((_, Value::Null)) => Ok(default),
            Some((_, Value::Bool(b))) => Ok(*b),
            Some((_, Value::String(s))) if s.eq_ignore_ascii_case("true") => Ok(true),
            Some((_, Value::String(s))) if s.eq_ignore_ascii_case("false") => Ok(false),
            Some((name, other)) => Err(Invalid::new(format!("{at}{name}"), "true or false", other)),
        }
    };
    let word = |name: &str| fields.get(name).and_then(Value::as_str).map(str::trim).filter(|s| !s.is_empty());
    let id = word("id").or(word("questionId")).map_or_else(
        || {
            if at.is_empty() { "answer".into() } else { format!("q{}", index + 1) }
        },
        str::to_owned,
    );
    Ok(Prompt {
        id,
        header: word("header").unwrap_or("").to_owned(),
        text: text.trim().to_owned(),
        options,
        multiple: flag(&["multiple", "multiSelect", "multi_select"], false)?,
        allow_other: flag(&["allow_other", "allowOther", "isOther"], true)?,
        secret: flag(&["secret", "isSecret"], false)?,
        required: flag(&["required"], true)?,
    })
}

fn choice_from(value: &Value, field: String) -> Result<Choice, Invalid> {
    match value {
        Value::String(label) => Ok(Choice::label(label.trim())),
        Value::Number(_) | Value::Bool(_) => Ok(Choice::label(value.to_string())),
        Value::Object(o) => {
            let text =
                |names: &[&str]| names.iter().find_map(|k| o.get(*k)).and_then(Value::as_str).map(str::trim);
            let label = text(&["label", "title", "name", "text"]).or(text(&["value"]));
            Ok(Choice {
                label: label.ok_or_else(|| Invalid::new(field, "an object with `label`", value))?.to_owned(),
                description: text(&["description"]).filter(|d| !d.is_empty()).map(str::to_owned),
                value: text(&["value"]).filter(|v| Some(*v) != label).map(str::to_owned),
            })
        }
        other => Err(Invalid::new(field, "text, or an object with `label`", other)),
    }
}

/// Drops repeated labels (whatever their case): the first one stays.
fn distinct(options: Vec<Choice>) -> Vec<Choice> {
    let mut kept: Vec<Choice> = Vec::with_capacity(options.len());
    for option in options {
        let same = |k: &Choice| k.label.to_lowercase() == option.label.to_lowercase();
        if !kept.iter().any(same) {
            kept.push(option);
        }
    }
    kept
}

/// A list, also when it came as the JSON text of one.
fn list_of(value: &Value) -> Option<Vec<Value>> {
    match value {
        Value::Array(list) => Some(list.clone()),
        Value::String(text) => serde_json::from_str::<Vec<Value>>(text).ok(),
        _ => None,
    }
}

/// The first `max` characters, with an ellipsis where something was cut.
pub fn clamp(text: &str, max: usize) -> String {
    if text.chars().count() <= max {
        return text.to_owned();
    }
    text.chars().take(max.saturating_sub(1)).chain(['…']).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn labels(question: &Question) -> Vec<&str> {
        question.prompts[0].options.iter().map(|o| o.label.as_str()).collect()
    }

    #[test]
    fn a_call_with_the_question_alone_works() {
        let question = Question::from_tool_args(&json!({"question": "Which city?"})).unwrap();
        assert_eq!(question.prompts, vec![Prompt::free_text("Which city?")]);
    }

    #[test]
    fn choices_are_read_in_every_shape_that_models_send() {
        let table = [
            json!({"question": "q", "choices": ["A", "B"]}),
            json!({"question": "q", "options": ["A", "B"]}),
            json!({"question": "q", "choices": "[\"A\",\"B\"]"}),
            json!({"question": "q", "choices": [{"label": "A"}, {"label": "B", "description": ""}]}),
            json!({"question": "q", "choices": [{"value": "A"}, {"name": "B"}]}),
            json!("{\"question\": \"q\", \"choices\": [\"A\", \"B\", \"a\"]}"),
        ];
        for args in table {
            assert_eq!(labels(&Question::from_tool_args(&args).unwrap()), ["A", "B"], "{args}");
        }
    }

    #[test]
    fn what_can_not_be_understood_names_field_limit_and_value() {
        let table = [
            (json!({}), "`question` must be text, got: nothing"),
            (json!({"question": 7}), "`question` must be text, got: 7"),
            (json!({"question": "  "}), "`question` must be text that is not blank, got: nothing"),
            (json!([1]), "`arguments` must be an object with `question`, got: [1]"),
            (json!({"question": "q", "choices": 3}), "`choices` must be a list of texts, got: 3"),
            (
                json!({"question": "q", "choices": [null]}),
                "`choices[0]` must be text, or an object with `label`, got: null",
            ),
            (json!({"question": "q", "secret": "maybe"}), "`secret` must be true or false, got: \"maybe\""),
            (
                json!({"question": "q", "choices": vec!["x"; 0], "questions": []}),
                "`questions` must be 1 to 8 prompts, got: 0",
            ),
        ];
        for (args, message) in table {
            assert_eq!(Question::from_tool_args(&args).unwrap_err().to_string(), message);
        }
        let long = json!({"question": "x".repeat(MAX_TEXT + 1)});
        assert_eq!(
            Question::from_tool_args(&long).unwrap_err().to_string(),
            "`question` must be at most 4000 characters, got: 4001 characters"
        );
    }

    #[test]
    fn a_secret_with_choices_is_refused_with_the_way_out() {
        let error =
            Question::from_tool_args(&json!({"question": "q", "secret": true, "choices": ["a", "b"]}));
        assert!(error.unwrap_err().to_string().contains("in two calls"));
    }

    #[test]
    fn a_header_that_is_too_long_is_kept_and_shown_shorter() {
        let args = json!({"question": "q", "header": "x".repeat(60)});
        let prompt = &Question::from_tool_args(&args).unwrap().prompts[0];
        assert_eq!((prompt.header.len(), prompt.short_header().chars().count()), (60, MAX_HEADER));
    }

    #[test]
    fn only_the_flag_makes_a_question_secret_and_labels_are_trimmed() {
        for text in ["What is the API key / token limit?", "A monkey?"] {
            assert!(!Question::from_tool_args(&json!({"question": text})).unwrap().is_secret(), "{text}");
        }
        assert!(Question::from_tool_args(&json!({"question": "Key?", "secret": true})).unwrap().is_secret());
        let args = json!({"question": "q", "choices": [" A ", "B\t"]});
        let labels = Question::from_tool_args(&args).unwrap().prompts[0].options.clone();
        assert_eq!(labels, ["A", "B"].map(Choice::label));
    }

    #[test]
    fn several_questions_get_ids_that_differ() {
        let args =
            json!({"questions": [{"question": "City?"}, {"question": "Budget?", "id": "budget"}, "Why?"]});
        let question = Question::from_tool_args(&args).unwrap();
        let ids: Vec<&str> = question.prompts.iter().map(|p| p.id.as_str()).collect();
        assert_eq!(ids, ["q1", "budget", "q3"]);
    }

    #[test]
    fn everything_has_a_limit_that_is_named() {
        let one = |choices: Value| json!({"question": "q", "choices": choices});
        let many: Vec<String> = (0..=MAX_OPTIONS).map(|n| n.to_string()).collect();
        let table = [
            (one(json!(many)), "`choices` must be at most 32 options, got: 33"),
            (
                one(json!(["a", "x".repeat(401)])),
                "`choices[1]` must be at most 400 characters, got: 401 characters",
            ),
            (
                one(json!([{"label": "a", "description": "x".repeat(1_001)}])),
                "`choices[0].description` must be at most 1000 characters, got: 1001 characters",
            ),
            (
                one(json!([{"label": "a", "value": "x".repeat(1_001)}])),
                "`choices[0].value` must be at most 1000 characters, got: 1001 characters",
            ),
            (
                json!({"questions": [{"question": "q", "id": "x".repeat(101)}]}),
                "`id` must be at most 100 characters, got: 101 characters",
            ),
            (one(json!(["a", "  "])), "`choices[1]` must be a label that is not blank, got: nothing"),
            (json!({"questions": vec!["q"; 9]}), "`questions` must be 1 to 8 prompts, got: 9"),
            (
                json!({"questions": [{"id": "a", "question": "q"}, {"id": "a", "question": "q"}]}),
                "`questions[1].id` must be unique in the question, got: a",
            ),
            (
                json!({"questions": ["q", {"question": "q", "secret": true}]}),
                "`questions` must be a single prompt when it is secret, got: 2 prompts",
            ),
        ];
        for (args, message) in table {
            assert_eq!(Question::from_tool_args(&args).unwrap_err().to_string(), message);
        }
    }

    #[test]
    fn a_title_is_the_first_line_that_says_something() {
        let title = |text: &str| Question::new(vec![Prompt::free_text(text)]).unwrap().title();
        assert_eq!(title("\n  Deploy?  \nIt takes an hour."), "Deploy?");
        let long = title(&"x".repeat(300));
        assert_eq!((long.chars().count(), long.ends_with('…')), (120, true));
    }
}
