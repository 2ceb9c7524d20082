//! The result of an asking call: what the agent is told.

use serde_json::{Map, Value, json};

use crate::entry::{DecidedBy, Entry};
use crate::outcome::{Delivered, Outcome, Undeliverable};
use crate::question::Question;
use crate::reply::Answer;

/// What a call gets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToolResult {
    /// The text for the model.
    pub text: String,
    /// The outcome, for programs; never a secret.
    pub details: Value,
    /// The prompt whose sealed answer replaces `text` for the call alone.
    pub secret_prompt: Option<String>,
}

/// What the call of this entry gets; `None` while it is pending.
pub fn tool_result(entry: &Entry) -> Option<ToolResult> {
    let decision = entry.decision()?;
    let outcome = &decision.outcome;
    let mut details = Map::new();
    details.insert("status".into(), outcome.status().into());
    details.insert("question".into(), entry.key.question.clone().into());
    if let Some(reason) = reason(outcome) {
        details.insert("reason".into(), reason);
    }
    if let DecidedBy::Reply { responder, surface, .. } = &decision.by {
        details.insert("by".into(), responder.display_name().into());
        details.insert("surface".into(), surface.name().into());
    }
    if let DecidedBy::Record { question, responder } = &decision.by {
        details.insert("by".into(), responder.display_name().into());
        details.insert("from_record".into(), question.clone().into());
    }
    details.insert("delivered".into(), json!(decision.delivered));
    let mut secret_prompt = None;
    let text = match outcome {
        Outcome::Answered { answers } => {
            let listed = answers.iter().map(|(id, answer)| (id.clone(), listed(&entry.question, id, answer)));
            details.insert("answers".into(), Value::Object(listed.collect()));
            secret_prompt =
                answers.iter().find(|(_, a)| matches!(a, Answer::Sealed(_))).map(|(id, _)| id.clone());
            answer_text(&entry.question, answers)
        }
        _ => {
            let mut error = Map::new();
            error.insert("error".into(), explanation(outcome, decision.delivered).into());
            error.extend(details.clone());
            Value::Object(error).to_string()
        }
    };
    Some(ToolResult { text, details: Value::Object(details), secret_prompt })
}

fn listed(question: &Question, id: &str, answer: &Answer) -> Value {
    match (answer, question.prompt(id)) {
        (Answer::Given { .. }, Some(prompt)) => answer.values(prompt).into(),
        _ => json!(["answered (hidden)"]),
    }
}

fn answer_text(question: &Question, answers: &std::collections::BTreeMap<String, Answer>) -> String {
    if let [prompt] = question.prompts.as_slice() {
        return answers.get(&prompt.id).map_or_else(String::new, |a| one_text(question, &prompt.id, a));
    }
    let all = question.prompts.iter().filter_map(|p| {
        let answer = answers.get(&p.id)?;
        let multiple = p.multiple && matches!(answer, Answer::Given { .. });
        let value = if multiple { answer.values(p).into() } else { one_text(question, &p.id, answer).into() };
        Some((p.id.clone(), value))
    });
    Value::Object(all.collect()).to_string()
}

fn one_text(question: &Question, id: &str, answer: &Answer) -> String {
    match (answer, question.prompt(id)) {
        (Answer::Given { .. }, Some(prompt)) if prompt.multiple => json!(answer.values(prompt)).to_string(),
        (Answer::Given { .. }, Some(prompt)) => answer.values(prompt).concat(),
        _ => "answered (hidden)".into(),
    }
}

fn reason(outcome: &Outcome) -> Option<Value> {
    match outcome {
        Outcome::Cancelled { reason } => Some(json!(reason)),
        Outcome::Undeliverable { reason } => Some(json!(reason)),
        _ => None,
    }
}

/// Words that never claim more than is known.
fn explanation(outcome: &Outcome, delivered: Delivered) -> &'static str {
    match outcome {
        Outcome::Answered { .. } => "",
        Outcome::Declined => "User declined to answer",
        Outcome::Cancelled { .. } => "The question was cancelled",
        Outcome::Expired if delivered == Delivered::Yes => "User did not respond",
        Outcome::Expired => "No answer came in time; it is not known whether the question was seen",
        Outcome::Undeliverable { reason: Undeliverable::ExpiredSecret } => {
            "The answer was given but is no longer available; ask again"
        }
        Outcome::Undeliverable { reason: Undeliverable::TooManyPending } => {
            "Too many questions are waiting for the user already; wait for their answers before asking more"
        }
        Outcome::Undeliverable { .. } => "The question could not be shown to the user",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::entry::{Road, Step, StepKind, Verdict};
    use crate::outcome::CancelReason;
    use crate::question::{Choice, Prompt};
    use crate::reply::{Reply, ReplyContent, Responder, Sealed};
    use crate::surface::Surface;
    use crate::time::Timestamp;

    fn entry(change: impl Fn(&mut Prompt)) -> Entry {
        let mut prompt =
            Prompt { options: ["A", "B", "C, D"].map(Choice::label).into(), ..Prompt::free_text("q") };
        change(&mut prompt);
        let question = Question::new(vec![prompt]).unwrap();
        let key = "g.s.r.q".parse().unwrap();
        let entry =
            Entry::ask(key, Road::Plugin, "t", "c", question, Timestamp(1), Timestamp(9), None).unwrap();
        entry
            .note(&[Step {
                at: Timestamp(2),
                what: StepKind::Delivered { surface: Surface::Card, chat: None },
            }])
            .unwrap()
    }

    fn answered(entry: &Entry, answer: Answer) -> Entry {
        let by = Responder { user: "alice".into(), name: None, chat: None };
        let content = ReplyContent::Answers { answers: [("answer".into(), answer)].into() };
        let reply = Reply { id: "r".into(), by, surface: Surface::Card, content };
        let Verdict::Decide(entry) = entry.reply(&reply, Timestamp(3)) else { panic!() };
        *entry
    }

    #[test]
    fn an_answer_is_its_label_value_or_own_words() {
        assert_eq!(tool_result(&answered(&entry(|_| ()), Answer::option(1))).unwrap().text, "B");
        assert_eq!(tool_result(&answered(&entry(|_| ()), Answer::text("else"))).unwrap().text, "else");
        let valued = entry(|p| p.options[0].value = Some("a-1".into()));
        assert_eq!(tool_result(&answered(&valued, Answer::option(0))).unwrap().text, "a-1");
    }

    #[test]
    fn a_multi_select_answer_is_a_list_and_never_a_joined_string() {
        let answer = Answer::Given { options: vec![0, 2], other: None };
        let result = tool_result(&answered(&entry(|p| p.multiple = true), answer)).unwrap();
        assert_eq!(result.text, r#"["A","C, D"]"#);
        assert_eq!(result.details["answers"]["answer"], json!(["A", "C, D"]));
    }

    #[test]
    fn a_form_is_answered_by_one_object() {
        let named = |id: &str| Prompt { id: id.into(), required: false, ..Prompt::free_text(id) };
        let mut colours = Prompt { options: ["Red", "Green"].map(Choice::label).into(), ..named("colours") };
        colours.multiple = true;
        let asked = entry(|_| ());
        let question = Question::new(vec![colours, named("city"), named("why")]).unwrap();
        let answers = [("colours".into(), Answer::option(1)), ("city".into(), Answer::text("Lisbon"))].into();
        let by = Responder { user: "alice".into(), name: None, chat: None };
        let reply =
            Reply { id: "r".into(), by, surface: Surface::Form, content: ReplyContent::Answers { answers } };
        let Verdict::Decide(entry) = Entry { question, ..asked }.reply(&reply, Timestamp(3)) else {
            panic!()
        };
        let text = tool_result(&entry).unwrap().text;
        assert_eq!(
            serde_json::from_str::<Value>(&text).unwrap(),
            json!({"colours": ["Green"], "city": "Lisbon"})
        );
    }

    #[test]
    fn no_outcome_without_an_answer_looks_like_one_or_claims_too_much() {
        let never_shown = Entry { steps: Vec::new(), ..entry(|_| ()) };
        let replied = |content| {
            let by = Responder { user: "alice".into(), name: None, chat: None };
            let reply = Reply { id: "r".into(), by, surface: Surface::Card, content };
            let Verdict::Decide(entry) = entry(|_| ()).reply(&reply, Timestamp(3)) else { panic!() };
            *entry
        };
        let table = [
            (replied(ReplyContent::Declined), "User declined to answer"),
            (replied(ReplyContent::Cancelled { reason: CancelReason::User }), "The question was cancelled"),
            (entry(|_| ()).expire(false, Timestamp(9)).unwrap(), "User did not respond"),
            (
                never_shown.expire(false, Timestamp(9)).unwrap(),
                "No answer came in time; it is not known whether the question was seen",
            ),
            (never_shown.expire(true, Timestamp(9)).unwrap(), "The question could not be shown to the user"),
            (
                entry(|_| ()).cancel(CancelReason::Stop, "stop", Timestamp(3)).unwrap(),
                "The question was cancelled",
            ),
        ];
        for (entry, error) in table {
            let text = tool_result(&entry).unwrap().text;
            let json: Value = serde_json::from_str(&text).unwrap();
            assert_eq!(json["error"], error);
            assert!(!text.contains("answered"), "{text}");
        }
    }

    #[test]
    fn a_secret_is_in_neither_text_nor_details() {
        let secret = entry(|p| {
            p.options.clear();
            p.secret = true
        });
        let sealed = Sealed { key_id: "k".into(), encapsulated: "e".into(), ciphertext: "c".into() };
        let result = tool_result(&answered(&secret, Answer::Sealed(sealed))).unwrap();
        assert_eq!(result.text, "answered (hidden)");
        assert_eq!(result.secret_prompt.as_deref(), Some("answer"));
        assert_eq!(result.details["answers"]["answer"], json!(["answered (hidden)"]));
    }
}
