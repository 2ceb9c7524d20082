//! From what a front end hands in to a reply on the bus, and back to what the person is told.

use std::collections::BTreeMap;

use ask_bus::{BusError, SealKey, trace};
use ask_core::SCHEMA;
use ask_core::entry::Entry;
use ask_core::key::QuestionKey;
use ask_core::question::{Invalid, Prompt, Question};
use ask_core::reply::{Answer, MAX_ANSWER, Reply, ReplyContent, Responder, check_answers};
use ask_core::surface::Surface;
use ask_core::text_reply::{self, TextReply};
use ask_core::wire::{ReplyRequest, ReplyResponse};
use serde::{Deserialize, Deserializer};
use tracing::Instrument;
use zeroize::Zeroizing;

use crate::Emitter;

/// An answer as front ends send it: an option, several, or own words.
#[derive(Deserialize)]
pub(crate) struct Given {
    #[serde(default)]
    index: Option<usize>,
    #[serde(default)]
    indexes: Option<Vec<usize>>,
    #[serde(default)]
    text: Option<Words>,
}

/// Own words, which may be a secret: wiped when dropped, and never formatted.
pub(crate) struct Words(Zeroizing<String>);

impl<'de> Deserialize<'de> for Words {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        String::deserialize(from).map(|text| Self(Zeroizing::new(text)))
    }
}

/// Why an answer can't be taken.
pub(crate) enum BadAnswer {
    /// It does not fit the question.
    Invalid(Invalid),
    /// What the person typed is not complete; they are told this.
    Incomplete { prompt: String, why: String },
    /// A secret can't be sealed.
    NoSealKey,
}

impl From<Invalid> for BadAnswer {
    fn from(invalid: Invalid) -> Self {
        Self::Invalid(invalid)
    }
}

/// Reads answers by prompt id. Secrets are sealed here, at once, for this question and reply.
pub(crate) fn answers(
    key: &QuestionKey,
    question: &Question,
    given: BTreeMap<String, Given>,
    surface: Surface,
    reply: &str,
    seal: Option<&SealKey>,
) -> Result<BTreeMap<String, Answer>, BadAnswer> {
    let mut answers = BTreeMap::new();
    for (id, given) in given {
        let Some(prompt) = question.prompt(&id) else {
            let known: Vec<&str> = question.prompts.iter().map(|p| p.id.as_str()).collect();
            let limit = format!("one of the prompts {}", known.join(", "));
            return Err(Invalid::new("answers", limit, id).into());
        };
        let answer = match prompt.secret {
            true => sealed(key, prompt, given, reply, seal)?,
            false => plain(prompt, given, surface)?,
        };
        answers.insert(id, answer);
    }
    check_answers(question, &answers)?;
    Ok(answers)
}

fn sealed(
    key: &QuestionKey,
    prompt: &Prompt,
    given: Given,
    reply: &str,
    seal: Option<&SealKey>,
) -> Result<Answer, BadAnswer> {
    let Given { index: None, indexes: None, text: Some(Words(secret)) } = given else {
        return Err(Invalid::new(&prompt.id, "a text, since it is a secret", "options").into());
    };
    if secret.trim().is_empty() {
        let limit = "a secret that is not blank";
        return Err(Invalid::new(&prompt.id, limit, "only white space").into());
    }
    let length = secret.chars().count();
    if length > MAX_ANSWER {
        let limit = format!("at most {MAX_ANSWER} characters");
        return Err(Invalid::new(&prompt.id, limit, format!("{length} characters")).into());
    }
    let seal = seal.ok_or(BadAnswer::NoSealKey)?;
    seal.seal(&secret, key, reply).map(Answer::Sealed).map_err(|_| BadAnswer::NoSealKey)
}

fn plain(prompt: &Prompt, given: Given, surface: Surface) -> Result<Answer, BadAnswer> {
    let Given { index, indexes, text } = given;
    let text = text.map(|Words(text)| text.to_string());
    let options = match (index, indexes) {
        (Some(index), None) => vec![index],
        (None, Some(indexes)) => indexes,
        (None, None) => Vec::new(),
        (Some(_), Some(_)) => {
            return Err(Invalid::new(&prompt.id, "either `index` or `indexes`", "both").into());
        }
    };
    match text {
        Some(text) if options.is_empty() && !prompt.options.is_empty() => typed(prompt, text, surface),
        other => Ok(Answer::Given { options, other }),
    }
}

/// Own words that are the number or label of an option mean that option.
fn typed(prompt: &Prompt, text: String, surface: Surface) -> Result<Answer, BadAnswer> {
    let alone = Question { prompts: vec![prompt.clone()] };
    match text_reply::parse(&alone, &text) {
        TextReply::Complete(mut answers) => {
            answers.remove(&prompt.id).ok_or_else(|| Invalid::new(&prompt.id, "an answer", "nothing").into())
        }
        // Here the options can only be typed, so a number that fits none is a slip.
        TextReply::Incomplete(why) if matches!(surface, Surface::Durable | Surface::Input) => {
            Err(BadAnswer::Incomplete { prompt: prompt.id.clone(), why })
        }
        TextReply::Incomplete(_) => Ok(Answer::text(text)),
    }
}

impl Emitter {
    /// Hands a reply in; to be repeated with the same reply on any error.
    pub(crate) async fn hand_in(
        &self,
        entry: &Entry,
        id: &str,
        by: Responder,
        surface: Surface,
        content: ReplyContent,
    ) -> Result<ReplyResponse, BusError> {
        let reply = Reply { id: id.to_owned(), by, surface, content };
        let request = ReplyRequest { schema: SCHEMA, key: entry.key.clone(), reply };
        let span = tracing::info_span!(
            "send reply",
            otel.kind = "producer",
            messaging.system = "nats",
            messaging.operation.name = "request",
            messaging.operation.type = "send",
            askbus.question = %entry.key.question,
            askbus.surface = surface.name(),
        );
        trace::continue_from(&span, entry.traceparent.as_deref());
        self.bus.reply(&request).instrument(span).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ask_bus::seal::OpenKey;
    use ask_core::question::Choice;

    fn key() -> QuestionKey {
        "g.s.r.q".parse().unwrap()
    }

    fn colours() -> Question {
        let options = ["Red", "Green"].map(Choice::label).into();
        Question::new(vec![Prompt { options, ..Prompt::free_text("Which?") }]).unwrap()
    }

    fn read(question: &Question, given: serde_json::Value, surface: Surface) -> Result<Answer, String> {
        let given = serde_json::from_value(given).unwrap();
        match answers(&key(), question, given, surface, "r1", None) {
            Ok(answers) => Ok(answers.into_values().next().unwrap()),
            Err(BadAnswer::Invalid(invalid)) => Err(invalid.to_string()),
            Err(BadAnswer::Incomplete { why, .. }) => Err(why),
            Err(BadAnswer::NoSealKey) => Err("no seal key".into()),
        }
    }

    #[test]
    fn an_answer_is_an_option_or_own_words() {
        let table = [
            (serde_json::json!({"answer": {"index": 1}}), Surface::Card, Ok(Answer::option(1))),
            (serde_json::json!({"answer": {"text": "2"}}), Surface::Card, Ok(Answer::option(1))),
            (serde_json::json!({"answer": {"text": "7"}}), Surface::Card, Ok(Answer::text("7"))),
            (serde_json::json!({"answer": {"text": "2"}}), Surface::Durable, Ok(Answer::option(1))),
            (serde_json::json!({"answer": {"text": "mauve"}}), Surface::Durable, Ok(Answer::text("mauve"))),
        ];
        for (given, surface, answer) in table {
            assert_eq!(read(&colours(), given.clone(), surface), answer, "{given} on {surface:?}");
        }
    }

    #[test]
    fn what_does_not_fit_is_named() {
        let table = [
            (serde_json::json!({"answer": {"index": 2}}), "`answer` must be an option from 0 to 1, got: 2"),
            (serde_json::json!({"answer": {}}), "`answer` must be an answer, got: nothing"),
            (serde_json::json!({"x": {"index": 0}}), "`answers` must be one of the prompts answer, got: x"),
            (serde_json::json!({}), "`answer` must be an answer, since it is required, got: nothing"),
            (
                serde_json::json!({"answer": {"text": " "}}),
                "`answer` must be an answer that is not blank, got: only white space",
            ),
        ];
        for (given, why) in table {
            assert_eq!(read(&colours(), given, Surface::Card), Err(why.into()));
        }
        let why = read(&colours(), serde_json::json!({"answer": {"text": "7"}}), Surface::Durable);
        assert!(why.unwrap_err().contains("no option 7"));
    }

    #[test]
    fn a_secret_is_sealed_for_its_question_and_reply_and_no_error_shows_it() {
        let mut question = Question::new(vec![Prompt::free_text("Token?")]).unwrap();
        question.prompts[0].secret = true;
        let (open, seal) = OpenKey::generate().unwrap();
        let given = || serde_json::from_value(serde_json::json!({"answer": {"text": "hunter2"}})).unwrap();
        let sealed = answers(&key(), &question, given(), Surface::Masked, "r1", Some(&seal)).ok().unwrap();
        let Answer::Sealed(sealed) = &sealed["answer"] else { panic!("not sealed") };
        assert_eq!(*open.open(sealed, &key(), "r1").unwrap(), "hunter2");

        let long = "hunter2".repeat(MAX_ANSWER);
        let why = read(&question, serde_json::json!({"answer": {"text": long}}), Surface::Masked);
        assert_eq!(why.unwrap_err(), "`answer` must be at most 32000 characters, got: 224000 characters");
        let why = read(&question, serde_json::json!({"answer": {"text": "hunter2"}}), Surface::Masked);
        assert_eq!(why.unwrap_err(), "no seal key");
    }
}
