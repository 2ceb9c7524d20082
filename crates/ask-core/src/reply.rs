//! What a responder hands in.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::outcome::CancelReason;
use crate::question::{Invalid, Prompt, Question};
use crate::surface::Surface;

/// A reply to a question. Its sender made the id and repeats it on every retry (rule N5).
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Reply {
    /// Unique per reply.
    pub id: String,
    /// Who replies.
    pub by: Responder,
    /// Where they replied.
    pub surface: Surface,
    /// What they said.
    pub content: ReplyContent,
}

/// Who replies to a question.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Responder {
    /// The user's id at the front end; for the Gateway the name it gave.
    pub user: String,
    /// A name to show, where there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The chat in which they replied.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chat: Option<String>,
}

impl Responder {
    /// The name to show to people.
    pub fn display_name(&self) -> &str {
        self.name.as_deref().unwrap_or(&self.user)
    }
}

/// What a reply says.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum ReplyContent {
    /// Answers by prompt id.
    Answers {
        /// One for each prompt that is answered.
        answers: BTreeMap<String, Answer>,
    },
    /// The responder does not want to answer.
    Declined,
    /// The question is called off.
    Cancelled {
        /// Why.
        reason: CancelReason,
    },
    /// The Gateway let it expire.
    Expired,
}

/// The answer to one prompt.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// Options by their index, own words, or (for a multi-select) both.
    Given {
        /// Indexes into the prompt's options, in the order chosen.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        options: Vec<usize>,
        /// The responder's own words.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        other: Option<String>,
    },
    /// A secret, readable only by the gateway's adapters.
    Sealed(Sealed),
    /// A secret that the call has, or that is out of reach for another reason.
    Hidden,
}

/// A sealed secret (HPKE, base64 without padding), bound to its question and reply.
#[derive(Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Sealed {
    /// Names the gateway's key it is sealed to.
    pub key_id: String,
    /// The encapsulated key.
    pub encapsulated: String,
    /// The ciphertext with its tag.
    pub ciphertext: String,
}

impl fmt::Debug for Sealed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Sealed({})", self.key_id)
    }
}

impl Answer {
    /// One option.
    pub fn option(index: usize) -> Self {
        Self::Given { options: vec![index], other: None }
    }

    /// Own words.
    pub fn text(text: impl Into<String>) -> Self {
        Self::Given { options: Vec::new(), other: Some(text.into()) }
    }

    /// The answer as the agent gets it: each option's value or else label, then the own words.
    /// Empty for a secret.
    pub fn values(&self, prompt: &Prompt) -> Vec<String> {
        let Self::Given { options, other } = self else {
            return Vec::new();
        };
        let chosen = options.iter().filter_map(|i| prompt.options.get(*i));
        chosen.map(|o| o.value.clone().unwrap_or_else(|| o.label.clone())).chain(other.clone()).collect()
    }

    /// The answer as people read it: labels and own words, `answered (hidden)` for a secret.
    pub fn display(&self, prompt: &Prompt) -> String {
        let Self::Given { options, other } = self else {
            return "answered (hidden)".into();
        };
        let chosen = options.iter().filter_map(|i| prompt.options.get(*i)).map(|o| o.label.clone());
        chosen.chain(other.clone()).collect::<Vec<_>>().join(", ")
    }
}

/// Answers that came too late as a message for the agent; `None` where one of them is secret or
/// does not fit.
pub fn as_message(question: &Question, answers: &BTreeMap<String, Answer>) -> Option<String> {
    check_answers(question, answers).ok()?;
    let each = question.prompts.iter().filter_map(|prompt| Some((prompt, answers.get(&prompt.id)?)));
    let lines = each.map(|(prompt, answer)| match answer {
        Answer::Given { .. } => {
            Some(format!("Late answer to \"{}\": {}", prompt.text.trim(), answer.display(prompt)))
        }
        Answer::Sealed(_) | Answer::Hidden => None,
    });
    lines.collect::<Option<Vec<_>>>().map(|lines| lines.join("\n"))
}

/// Checks answers against their question. Whitespace alone is no answer, a secret must come
/// sealed, and only a multi-select takes several.
///
/// # Errors
/// The first answer that does not fit, by prompt id; a required prompt without an answer.
pub fn check_answers(question: &Question, answers: &BTreeMap<String, Answer>) -> Result<(), Invalid> {
    if let Some(unknown) = answers.keys().find(|id| question.prompt(id).is_none()) {
        let known: Vec<&str> = question.prompts.iter().map(|p| p.id.as_str()).collect();
        return Err(Invalid::new("answers", format!("one of the prompts {}", known.join(", ")), unknown));
    }
    for prompt in &question.prompts {
        match answers.get(&prompt.id) {
            Some(answer) => check_answer(prompt, answer)?,
            None if prompt.required => {
                return Err(Invalid::new(&prompt.id, "an answer, since it is required", "nothing"));
            }
            None => {}
        }
    }
    if answers.is_empty() {
        return Err(Invalid::new("answers", "at least one answer", "nothing"));
    }
    Ok(())
}

fn check_answer(prompt: &Prompt, answer: &Answer) -> Result<(), Invalid> {
    let (options, other) = match (prompt.secret, answer) {
        (true, Answer::Sealed(_)) => return Ok(()),
        (false, Answer::Given { options, other }) => (options, other),
        (true, _) => {
            return Err(Invalid::new(&prompt.id, "a sealed secret", "a plain value (not shown)"));
        }
        (false, _) => {
            return Err(Invalid::new(&prompt.id, "a plain answer", "a sealed secret"));
        }
    };
    if let Some(index) = options.iter().find(|i| **i >= prompt.options.len()) {
        return Err(Invalid::new(
            &prompt.id,
            format!("an option from 0 to {}", prompt.options.len().saturating_sub(1)),
            index,
        ));
    }
    if let Some(text) = other {
        if text.trim().is_empty() {
            return Err(Invalid::new(&prompt.id, "an answer that is not blank", "only white space"));
        }
        let length = text.chars().count();
        if length > MAX_ANSWER {
            return Err(Invalid::new(
                &prompt.id,
                format!("at most {MAX_ANSWER} characters"),
                format!("{length} characters"),
            ));
        }
        if !prompt.allow_other && !prompt.options.is_empty() {
            return Err(Invalid::new(
                &prompt.id,
                "one of the options (own words are not accepted here)",
                text,
            ));
        }
    }
    match options.len() + usize::from(other.is_some()) {
        0 => Err(Invalid::new(&prompt.id, "an answer", "nothing")),
        1 => Ok(()),
        _ if prompt.multiple => Ok(()),
        n => Err(Invalid::new(&prompt.id, "one answer", format!("{n} answers"))),
    }
}

/// The longest own words, in characters.
pub const MAX_ANSWER: usize = 32_000;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::question::Choice;

    #[test]
    fn what_does_not_fit_is_named_with_its_limit() {
        let choices = |change: fn(&mut Prompt)| {
            let mut prompt =
                Prompt { options: ["A", "B"].map(Choice::label).into(), ..Prompt::free_text("q") };
            change(&mut prompt);
            Question::new(vec![prompt]).unwrap()
        };
        let sealed =
            Answer::Sealed(Sealed { key_id: "k".into(), encapsulated: "e".into(), ciphertext: "c".into() });
        let both = Answer::Given { options: vec![0], other: Some("x".into()) };
        let long = Answer::text("x".repeat(MAX_ANSWER + 1));
        let table = [
            (choices(|_| ()), Answer::option(1), None),
            (choices(|p| p.multiple = true), both.clone(), None),
            (choices(|_| ()), both, Some("one answer, got: 2 answers")),
            (choices(|_| ()), Answer::option(2), Some("an option from 0 to 1, got: 2")),
            (choices(|_| ()), Answer::text(" "), Some("an answer that is not blank, got: only white space")),
            (choices(|_| ()), sealed, Some("a plain answer, got: a sealed secret")),
            (choices(|_| ()), long, Some("at most 32000 characters, got: 32001 characters")),
            (
                choices(|p| p.allow_other = false),
                Answer::text("C"),
                Some("one of the options (own words are not accepted here), got: C"),
            ),
        ];
        for (question, answer, refused) in table {
            let checked = check_answers(&question, &[("answer".into(), answer)].into());
            let refused = refused.map(|why| format!("`answer` must be {why}"));
            assert_eq!(checked.err().map(|e| e.to_string()), refused);
        }
    }

    #[test]
    fn only_a_prompt_that_is_not_required_may_stay_open() {
        let named = |id: &str, required| Prompt { id: id.into(), required, ..Prompt::free_text(id) };
        let question = Question::new(vec![named("city", true), named("why", false)]).unwrap();
        let check = |ids: &[&str]| {
            let answers = ids.iter().map(|id| (id.to_string(), Answer::text("x"))).collect();
            check_answers(&question, &answers).err().map(|e| e.field)
        };
        assert_eq!(check(&["city"]), None);
        assert_eq!(check(&["why"]).as_deref(), Some("city"));
        assert_eq!(check(&["city", "when"]).as_deref(), Some("answers"));
    }
}
