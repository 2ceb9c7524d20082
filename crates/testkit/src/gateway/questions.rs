//! The Gateway's own questions: what one is, which answers it takes, how it ends.

use std::collections::HashSet;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use tokio::sync::watch;

use super::wire::{Rejection, now_ms};

/// One thing that is asked; a question holds one to three.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Prompt {
    pub question_id: String,
    pub header: String,
    pub question: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
    #[serde(default)]
    pub options: Vec<Choice>,
    #[serde(default, skip_serializing_if = "is_false")]
    pub multi_select: bool,
    #[serde(default, skip_serializing_if = "is_false")]
    pub is_other: bool,
    #[serde(default, skip_serializing_if = "is_false")]
    pub is_secret: bool,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Choice {
    pub label: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
}

fn is_false(flag: &bool) -> bool {
    !flag
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Status {
    Pending,
    Answered,
    Cancelled,
    Expired,
}

/// What `question.get` shows.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Record {
    pub id: String,
    pub questions: Vec<Prompt>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub agent_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub session_key: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub run_id: Option<String>,
    pub created_at_ms: u64,
    pub expires_at_ms: u64,
    pub status: Status,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub answers: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resolved_by: Option<String>,
}

/// How a question ends.
#[derive(Debug, Clone)]
pub(super) enum End {
    Answered(Value),
    Cancelled,
    Expired,
}

#[derive(Debug)]
pub(super) struct Question {
    pub record: Record,
    pub resolution_id: Option<String>,
    /// A tool call waits for it, and tells its end after the tool's result.
    pub asked_by_run: bool,
    /// Its end was told to everybody.
    pub told: bool,
    /// Messages that were taken as its answer: their runs end empty when it is told.
    pub answered_by_keys: Vec<String>,
    pub settled: watch::Sender<bool>,
}

impl Question {
    pub fn is_pending(&self) -> bool {
        self.record.status == Status::Pending
    }

    pub fn settle(&mut self, end: End, by: Option<String>, resolution_id: Option<String>) {
        let (status, answers) = match end {
            End::Answered(answers) => (Status::Answered, Some(answers)),
            End::Cancelled => (Status::Cancelled, None),
            End::Expired => (Status::Expired, None),
        };
        self.record.status = status;
        self.record.answers = answers;
        self.record.resolved_by = by;
        self.resolution_id = resolution_id;
        self.settled.send_replace(true);
    }

    /// Result of `question.resolve` and `question.waitAnswer`.
    pub fn outcome(&self, with_resolution_id: bool) -> Value {
        let mut outcome = json!({"status": self.record.status});
        if let Some(answers) = &self.record.answers {
            outcome["answers"] = answers.clone();
        }
        if let Some(id) = self.resolution_id.as_ref().filter(|_| with_resolution_id) {
            outcome["resolutionId"] = id.as_str().into();
        }
        outcome
    }

    /// Payload of `question.resolved`.
    pub fn resolved_event(&self) -> Value {
        let mut event = self.outcome(false);
        event["id"] = self.record.id.as_str().into();
        event
    }

    /// Text and details of the tool result of `ask_user`.
    pub fn tool_result(&self) -> (String, Value) {
        let Some(answers) = &self.record.answers else {
            let details = json!({"status": "no_answer"});
            let text = match self.record.status {
                Status::Cancelled => "The question was cancelled; proceed with best judgment.",
                _ => "No answer arrived; proceed with best judgment.",
            };
            return (format!("{text}\n\n{details:#}"), details);
        };
        let details = json!({"status": "answered", "answers": answers});
        let lines: Vec<String> = self
            .record
            .questions
            .iter()
            .map(|prompt| {
                let values = values_of(&answers["answers"][&prompt.question_id]);
                format!("{}: {}", prompt.header, values.join(", "))
            })
            .collect();
        (format!("{}\n\n{details:#}", lines.join("\n")), details)
    }
}

pub(super) fn new_record(id: String, questions: Vec<Prompt>, timeout_ms: u64) -> Record {
    let created_at_ms = now_ms();
    Record {
        id,
        questions,
        agent_id: None,
        session_key: None,
        run_id: None,
        created_at_ms,
        expires_at_ms: created_at_ms + timeout_ms.max(1),
        status: Status::Pending,
        answers: None,
        resolved_by: None,
    }
}

pub(super) fn not_found(id: &str) -> Rejection {
    Rejection::question("QUESTION_NOT_FOUND", format!("question '{id}' was not found"))
}

pub(super) fn already_terminal(record: &Record) -> Rejection {
    let status = json!(record.status);
    Rejection::question(
        "QUESTION_ALREADY_TERMINAL",
        format!("question '{}' is already {}", record.id, status.as_str().unwrap_or_default()),
    )
}

/// Answers in the Gateway's form (`{"answers":{<id>:[…]}}`), or why they are not taken.
pub(super) fn check_answers(prompts: &[Prompt], answers: &Value) -> Result<Value, Rejection> {
    let refuse = |id: &str, why: &str| {
        Rejection::question("QUESTION_INVALID_ANSWER", format!("question '{id}' {why}"))
    };
    let given = answers["answers"].as_object();
    let unknown = given
        .into_iter()
        .flat_map(Map::keys)
        .find(|id| prompts.iter().all(|prompt| prompt.question_id != **id));
    if let Some(id) = unknown {
        return Err(refuse(id, "is not part of this request"));
    }
    let mut taken = Map::new();
    for prompt in prompts {
        let id = &prompt.question_id;
        let values = values_of(&answers["answers"][id]);
        if values.is_empty() {
            return Err(refuse(id, "requires an answer"));
        }
        if values.iter().any(|value| value.trim().is_empty()) {
            return Err(refuse(id, "contains an empty answer"));
        }
        if !prompt.multi_select && values.len() > 1 {
            return Err(refuse(id, "does not allow multiple answers"));
        }
        let labels: HashSet<&str> = prompt.options.iter().map(|o| o.label.trim()).collect();
        let closed = !labels.is_empty() && !prompt.is_other;
        if closed && values.iter().any(|value| !labels.contains(value.trim())) {
            return Err(refuse(id, "contains an unknown option"));
        }
        let values: Vec<&str> = values.iter().map(|value| value.trim()).collect();
        taken.insert(id.clone(), json!(values));
    }
    Ok(json!({"answers": taken}))
}

/// What a chat message answers: numbers, labels or own words; a form line by line or by `key: value`.
pub(super) fn answers_in_text(prompts: &[Prompt], text: &str) -> Value {
    let mut answers = Map::new();
    if let [prompt] = prompts {
        answers.insert(prompt.question_id.clone(), json!(read(prompt, text)));
        return json!({"answers": answers});
    }
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    let keyed: Vec<(String, &str)> = lines
        .iter()
        .filter_map(|line| line.split_once([':', '=', '-']))
        .map(|(key, value)| (key.trim().to_lowercase(), value.trim()))
        .filter(|(key, value)| !key.is_empty() && !value.is_empty())
        .collect();
    for (at, prompt) in prompts.iter().enumerate() {
        let names = [
            prompt.question_id.to_lowercase(),
            prompt.header.to_lowercase(),
            prompt.question.to_lowercase(),
            (at + 1).to_string(),
        ];
        let answer = names
            .iter()
            .find_map(|name| keyed.iter().rev().find(|(key, _)| key == name))
            .map(|(_, value)| *value)
            .or_else(|| lines.get(at).copied())
            .unwrap_or_default();
        answers.insert(prompt.question_id.clone(), json!(read(prompt, answer)));
    }
    json!({"answers": answers})
}

fn read(prompt: &Prompt, text: &str) -> Vec<String> {
    if !prompt.multi_select {
        return read_one(prompt, text).into_iter().collect();
    }
    if let Some(label) = read_option(prompt, text) {
        return vec![label];
    }
    let mut seen = HashSet::new();
    text.split([',', ';', '\n'])
        .filter_map(|part| read_one(prompt, part))
        .filter(|value| seen.insert(value.clone()))
        .collect()
}

fn read_one(prompt: &Prompt, text: &str) -> Option<String> {
    let own_words = || (prompt.options.is_empty() || prompt.is_other).then(|| text.trim().into());
    read_option(prompt, text).or_else(own_words).filter(|text: &String| !text.is_empty())
}

fn read_option(prompt: &Prompt, text: &str) -> Option<String> {
    let text = text.trim();
    let by_number = text.parse::<usize>().ok().and_then(|number| prompt.options.get(number.checked_sub(1)?));
    by_number
        .or_else(|| {
            let text = text.to_lowercase();
            prompt.options.iter().find(|o| o.label.to_lowercase() == text)
        })
        .map(|option| option.label.clone())
}

fn values_of(values: &Value) -> Vec<String> {
    let values = values.as_array().into_iter().flatten();
    values.map(|value| value.as_str().unwrap_or_default().to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prompt(id: &str, labels: &[&str], multi_select: bool) -> Prompt {
        let options: Vec<Value> = labels.iter().map(|label| json!({"label": label})).collect();
        serde_json::from_value(json!({"questionId": id, "header": id.to_uppercase(),
            "question": "?", "options": options, "multiSelect": multi_select, "isOther": true}))
        .unwrap()
    }

    #[test]
    fn a_message_answers_by_number_label_or_own_words() {
        let one = || vec![prompt("color", &["Red", "Blue"], false)];
        let many = || vec![prompt("color", &["Red", "Blue, dark"], true)];
        let form = || vec![prompt("color", &["Red"], false), prompt("size", &[], false)];
        let cases = [
            (one(), "2", json!({"color": ["Blue"]})),
            (one(), " bLuE ", json!({"color": ["Blue"]})),
            (one(), "7", json!({"color": ["7"]})),
            (one(), "a bit of both", json!({"color": ["a bit of both"]})),
            (one(), " ", json!({"color": []})),
            (many(), "1, 2, 1", json!({"color": ["Red", "Blue, dark"]})),
            (many(), "blue, dark", json!({"color": ["Blue, dark"]})),
            (form(), "1\nL", json!({"color": ["Red"], "size": ["L"]})),
            (form(), "size: L", json!({"color": ["size: L"], "size": ["L"]})),
            (form(), "Red", json!({"color": ["Red"], "size": []})),
        ];
        for (prompts, text, answers) in cases {
            assert_eq!(answers_in_text(&prompts, text)["answers"], answers, "{text}");
        }
    }
}
