//! `answer` and `cancel`: what an operator decides.

use std::collections::BTreeMap;
use std::io::{IsTerminal as _, Read as _};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use ask_bus::{Bus, BusError};
use ask_core::SCHEMA;
use ask_core::key::QuestionKey;
use ask_core::outcome::CancelReason;
use ask_core::question::{Prompt, Question};
use ask_core::reply::{Answer, Reply, ReplyContent, Responder};
use ask_core::surface::Surface;
use ask_core::text_reply::{self, TextReply};
use ask_core::wire::{ReplyRequest, ReplyResponse};
use zeroize::Zeroizing;

use crate::questions::{find, short_id};
use crate::terminal::{Unanswered, duration, plain, read_line, say};
use crate::timeline;

/// How often a reply is handed in before the operator hears that it is not saved.
const TRIES: usize = 10;
const PAUSE: Duration = Duration::from_millis(300);

/// What the command line says the answer is.
#[derive(Debug, clap::Args)]
pub struct AnswerArgs {
    /// The question's id, or how it begins
    id: String,
    /// The answer in words; a number or a label chooses an option; one line for each prompt of a form
    #[arg(long, conflicts_with_all = ["option", "stdin"])]
    text: Option<String>,
    /// Number of an option, counted from 1; several where several may be chosen
    #[arg(long, value_name = "N", conflicts_with = "stdin")]
    option: Vec<usize>,
    /// Reads the answer from standard input; a secret is sealed at once
    #[arg(long)]
    stdin: bool,
}

/// Answers a question in the operator's name.
pub async fn answer(bus: &Bus, args: AnswerArgs) -> Result<()> {
    let stored = find(bus, &args.id).await?;
    let (key, question) = (stored.value.key, stored.value.question);
    let id = uuid::Uuid::new_v4().to_string();
    let secret = question.prompts.iter().find(|prompt| prompt.secret);
    let answers = match (secret, args.text, args.option.as_slice()) {
        (Some(_), Some(_), _) => bail!(
            "this answer is a secret, and a command line is read by others: give it on standard input with --stdin"
        ),
        (Some(_), None, [_, ..]) => {
            bail!("this question has no options: its answer is a secret, use --stdin")
        }
        (Some(prompt), None, []) => {
            let secret = if args.stdin {
                read_all()?
            } else {
                needs_terminal()?;
                ask_secret(&question).await?
            };
            let sealed = seal(bus, &key, &id, &secret).await?;
            [(prompt.id.clone(), sealed)].into()
        }
        (None, Some(text), _) => from_text(&question, &text)?,
        (None, None, options @ [_, ..]) => from_options(&question, options)?,
        (None, None, []) if args.stdin => from_text(&question, &read_all()?)?,
        (None, None, []) => {
            needs_terminal()?;
            ask_until_it_fits(&question).await?
        }
    };
    hand_in(bus, &key, &question, id, ReplyContent::Answers { answers }).await
}

/// Calls a question off in the operator's name.
pub async fn cancel(bus: &Bus, id: &str) -> Result<()> {
    let stored = find(bus, id).await?;
    let content = ReplyContent::Cancelled { reason: CancelReason::Operator };
    let id = uuid::Uuid::new_v4().to_string();
    hand_in(bus, &stored.value.key, &stored.value.question, id, content).await
}

/// Seals a secret answer for the question's gateway.
pub async fn seal(bus: &Bus, key: &QuestionKey, reply: &str, secret: &str) -> Result<Answer> {
    if secret.is_empty() {
        bail!("the secret is empty; nothing was sent");
    }
    let Some(seal) = bus.seal_key(&key.gateway).await? else {
        bail!("the gateway {} has no seal key on the bus; run `askctl provision`", key.gateway);
    };
    Ok(Answer::Sealed(seal.seal(secret, key, reply)?))
}

/// Reads words as the answers to a question.
pub fn from_text(question: &Question, text: &str) -> Result<BTreeMap<String, Answer>> {
    match text_reply::parse(question, text) {
        TextReply::Complete(answers) => Ok(answers),
        TextReply::Incomplete(why) => bail!("{why}"),
    }
}

fn from_options(question: &Question, numbers: &[usize]) -> Result<BTreeMap<String, Answer>> {
    let [prompt] = question.prompts.as_slice() else {
        let ids: Vec<_> = question.prompts.iter().map(|p| p.id.as_str()).collect();
        bail!(
            "this question has {} prompts: use --text with a line `PROMPT: ANSWER` for each of {}",
            ids.len(),
            ids.join(", ")
        );
    };
    let wrong = numbers.iter().find(|number| !(1..=prompt.options.len()).contains(number));
    match (wrong, prompt.options.len()) {
        (Some(_), 0) => bail!("this question has no options: use --text"),
        (Some(number), count) => bail!("`--option` must be 1 to {count}, got: {number}"),
        (None, _) => {}
    }
    let options = numbers.iter().map(|number| number - 1).collect();
    Ok([(prompt.id.clone(), Answer::Given { options, other: None })].into())
}

async fn hand_in(
    bus: &Bus,
    key: &QuestionKey,
    question: &Question,
    id: String,
    content: ReplyContent,
) -> Result<()> {
    let said = match &content {
        ReplyContent::Answers { answers } => {
            timeline::outcome(question, &ask_core::outcome::Outcome::Answered { answers: answers.clone() })
        }
        _ => "cancelled (operator)".into(),
    };
    let by = Responder { user: format!("operator:{}", os_user()), name: None, chat: None };
    // The id stays the same on every try, so that a reply whose answer was lost is not a second one.
    let reply = Reply { id, by, surface: Surface::Cli, content };
    let request = ReplyRequest { schema: SCHEMA, key: key.clone(), reply };
    match saved(bus, &request).await? {
        ReplyResponse::Saved => {
            say!("saved: {} {}", short_id(key), plain(&said, 200));
        }
        ReplyResponse::Closed { outcome, at, by, surface, .. } => {
            let ago = duration(ask_core::time::Timestamp::now().since(at));
            let on = surface.map(|surface| format!(" on {}", surface.name())).unwrap_or_default();
            let outcome = plain(&timeline::outcome(question, &outcome), 200);
            bail!(
                "too late: the question was {outcome} by {}{on}, {ago} ago; nothing was changed",
                plain(&by, 80)
            );
        }
        ReplyResponse::Invalid { invalid } => {
            bail!("the answer does not fit, and nothing was changed: {invalid}")
        }
        ReplyResponse::UnknownQuestion => bail!("ask-router knows no question {key}"),
        ReplyResponse::WrongUser => bail!("ask-router takes no answer from {}", request.reply.by.user),
        ReplyResponse::Retry { why } => {
            bail!("not saved: {why}; nothing was changed as far as is known, try again")
        }
    }
    Ok(())
}

/// Hands a reply in, again while nobody could take it.
async fn saved(bus: &Bus, request: &ReplyRequest) -> Result<ReplyResponse> {
    for attempt in 1.. {
        match bus.outcome(request).await {
            Ok(ReplyResponse::Retry { .. }) if attempt < TRIES => {}
            Err(BusError::NoResponders { .. } | BusError::Unavailable { .. }) if attempt < TRIES => {}
            Ok(response) => return Ok(response),
            Err(error) => return Err(error).context("it is not known to be saved"),
        }
        tokio::time::sleep(PAUSE).await;
    }
    unreachable!("the last try returns")
}

/// The question as a person reads it on a terminal.
pub fn as_asked(question: &Question) -> String {
    let mut text = String::new();
    for prompt in &question.prompts {
        if question.prompts.len() > 1 {
            text.push_str(&format!("{}: ", plain(&prompt.id, 60)));
        }
        text.push_str(&format!("{}\n", plain(&prompt.text, 4_000)));
        for (n, option) in prompt.options.iter().enumerate() {
            let description =
                option.description.as_ref().map(|d| format!(": {}", plain(d, 400))).unwrap_or_default();
            text.push_str(&format!("  {}. {}{description}\n", n + 1, plain(&option.label, 400)));
        }
    }
    text
}

/// How the prompt of a terminal asks for it.
pub fn hint(question: &Question) -> &'static str {
    match question.prompts.as_slice() {
        [Prompt { secret: true, .. }] => "secret (not shown)> ",
        [Prompt { options, .. }] if options.is_empty() => "answer> ",
        [Prompt { multiple: true, .. }] => "numbers or labels, with commas between> ",
        [_] => "number, label or own words> ",
        _ => "one line each, `PROMPT: ANSWER`, then an empty line> ",
    }
}

fn needs_terminal() -> Result<()> {
    if !std::io::stdin().is_terminal() {
        bail!("there is no answer: give one with --text or --option, a secret with --stdin");
    }
    Ok(())
}

/// Reads a secret from the terminal without showing it, again while it is blank.
pub async fn ask_secret(question: &Question) -> Result<Zeroizing<String>> {
    eprint!("{}", as_asked(question));
    loop {
        eprint!("{}", hint(question));
        let secret = read_line(true).await?.ok_or(Unanswered("the input ended"))?;
        if !secret.trim().is_empty() {
            return Ok(secret);
        }
        eprintln!("A secret can't be blank.");
    }
}

/// Reads answers from the terminal until they fit.
pub async fn ask_until_it_fits(question: &Question) -> Result<BTreeMap<String, Answer>> {
    eprint!("{}", as_asked(question));
    loop {
        eprint!("{}", hint(question));
        let mut lines = Vec::new();
        loop {
            let line = read_line(false).await?.ok_or(Unanswered("the input ended"))?;
            let last = question.prompts.len() == 1 || line.trim().is_empty();
            lines.push(line.to_string());
            if last {
                break;
            }
        }
        match from_text(question, lines.join("\n").trim()) {
            Ok(answers) => return Ok(answers),
            Err(why) => eprintln!("{why}"),
        }
    }
}

/// All of standard input, without the line break at its end.
fn read_all() -> Result<Zeroizing<String>> {
    let mut text = Zeroizing::new(String::new());
    std::io::stdin().read_to_string(&mut text).context("standard input can't be read as text")?;
    let end = text.trim_end_matches(['\r', '\n']).len();
    text.truncate(end);
    Ok(text)
}

fn os_user() -> String {
    ["USER", "LOGNAME"]
        .iter()
        .find_map(|name| std::env::var(name).ok().filter(|user| !user.is_empty()))
        .unwrap_or_else(|| format!("uid-{}", rustix::process::getuid().as_raw()))
}

#[cfg(test)]
mod tests {
    use ask_core::question::Choice;

    use super::*;

    fn colours(multiple: bool) -> Question {
        let options = ["Red", "Green"].map(Choice::label).into();
        Question::new(vec![Prompt { options, multiple, ..Prompt::free_text("Which colour?") }]).unwrap()
    }

    #[test]
    fn options_are_counted_from_one() {
        let answers = from_options(&colours(true), &[2, 1]).unwrap();
        assert_eq!(answers["answer"], Answer::Given { options: vec![1, 0], other: None });
        let error =
            |question: &Question, numbers: &[usize]| from_options(question, numbers).unwrap_err().to_string();
        assert_eq!(error(&colours(false), &[3]), "`--option` must be 1 to 2, got: 3");
        assert_eq!(error(&colours(false), &[0]), "`--option` must be 1 to 2, got: 0");
        let free = Question::new(vec![Prompt::free_text("Why?")]).unwrap();
        assert_eq!(error(&free, &[1]), "this question has no options: use --text");
    }

    #[test]
    fn a_question_reads_well_on_a_terminal() {
        assert_eq!(as_asked(&colours(false)), "Which colour?\n  1. Red\n  2. Green\n");
    }
}
