//! `ls`, `show`, `trace` and `watch`: reading what is on record.

use std::collections::{HashMap, HashSet};

use anyhow::{Result, bail};
use ask_bus::{Bus, FeedItem, Stored, trace};
use ask_core::entry::Entry;
use ask_core::key::QuestionKey;
use ask_core::time::Timestamp;
use serde_json::json;
use tokio_util::sync::CancellationToken;

use crate::config::AskctlConfig;
use crate::terminal::{duration, plain, put, say, table};
use crate::timeline::{self, Row};

/// Closed questions that `ls` shows without `--all`.
const RECENT: usize = 20;
const SHORT_ID: usize = 12;

/// The beginning of a question's id, long enough to name it.
pub fn short_id(key: &QuestionKey) -> String {
    plain(&key.question.chars().take(SHORT_ID).collect::<String>(), SHORT_ID)
}

/// The one question that `name` means: its key, its id, or the beginning of its id.
pub async fn find(bus: &Bus, name: &str) -> Result<Stored<Entry>> {
    if name.contains('.')
        && let Ok(key) = name.parse::<QuestionKey>()
    {
        return match bus.question(&key).await? {
            Some(stored) => Ok(stored),
            None => bail!("there is no question {name}; `askctl ls --all` lists them"),
        };
    }
    let mut all = bus.all_questions().await?;
    let exact = all.iter().filter(|stored| stored.value.key.question == name).count();
    all.retain(|stored| match exact {
        0 => !name.is_empty() && stored.value.key.question.starts_with(name),
        _ => stored.value.key.question == name,
    });
    match all.len() {
        0 => bail!("no question has an id that begins with `{name}`; `askctl ls --all` lists them"),
        1 => Ok(all.remove(0)),
        n => {
            let keys: Vec<String> = all.iter().take(5).map(|s| format!("  {}", s.value.key)).collect();
            bail!(
                "`{name}` can be any of {n} questions; give more of the id, or a whole key:\n{}",
                keys.join("\n")
            )
        }
    }
}

/// Pending questions and the last closed ones, the newest first.
pub async fn ls(bus: &Bus, all: bool, as_json: bool) -> Result<()> {
    let now = Timestamp::now();
    let mut entries: Vec<Entry> = bus.all_questions().await?.into_iter().map(|s| s.value).collect();
    entries.reverse();
    let mut closed = 0;
    entries.retain(|entry| {
        closed += usize::from(!entry.is_pending());
        all || entry.is_pending() || closed <= RECENT
    });
    if as_json {
        let list: Vec<_> = entries.iter().map(|entry| summary(entry, now)).collect();
        say!("{}", serde_json::to_string_pretty(&list)?);
        return Ok(());
    }
    if entries.is_empty() {
        say!("no questions yet");
        return Ok(());
    }
    let mut lines =
        vec![["ID", "AGE", "STATE", "SURFACE", "SESSION", "QUESTION"].map(str::to_owned).to_vec()];
    for entry in &entries {
        lines.push(vec![
            short_id(&entry.key),
            duration(now.since(entry.asked_at)),
            timeline::state(entry),
            timeline::surface(entry).into(),
            plain(&format!("{}/{}", entry.key.gateway, entry.key.session), 48),
            plain(&entry.question.title(), 60),
        ]);
    }
    put(table(0, &lines));
    if !all && closed > RECENT {
        say!("and {} older ones: `askctl ls --all`", closed - RECENT);
    }
    Ok(())
}

/// All that is on record of one question.
pub async fn show(bus: &Bus, config: &AskctlConfig, name: &str, as_json: bool) -> Result<()> {
    let stored = find(bus, name).await?;
    if as_json {
        let history = bus.question_history(&stored.value.key).await?;
        let writes: Vec<_> =
            history.iter().map(|(s, at)| json!({"revision": s.revision, "at": at})).collect();
        let mut value = summary(&stored.value, Timestamp::now());
        value["entry"] = serde_json::to_value(without_sealed(stored.value))?;
        value["revision"] = stored.revision.into();
        value["writes"] = writes.into();
        say!("{}", serde_json::to_string_pretty(&value)?);
        return Ok(());
    }
    put(life(bus, config, &stored).await?);
    Ok(())
}

/// The timeline with the trace that its spans are found by.
pub async fn show_trace(bus: &Bus, config: &AskctlConfig, name: &str) -> Result<()> {
    let stored = find(bus, name).await?;
    say!("trace     {}", trace_of(&stored.value, config));
    put(timeline::render(&stored.value));
    Ok(())
}

/// A question with its details, its timeline and its durable writes, read from the bus.
pub async fn life(bus: &Bus, config: &AskctlConfig, stored: &Stored<Entry>) -> Result<String> {
    let entry = &stored.value;
    let history = bus.question_history(&entry.key).await?;
    let mut text = format!("{}\n", plain(&entry.question.title(), 120));
    let mut details = vec![
        ("id", entry.key.question.clone()),
        ("state", timeline::state(entry)),
        ("session", format!("{}, {}", entry.key.gateway, entry.key.session)),
        ("call", format!("{} {} in run {}", entry.tool, entry.call, entry.key.run)),
        ("trace", trace_of(entry, config)),
    ];
    for prompt in &entry.question.prompts {
        let options: Vec<_> = prompt.options.iter().map(|option| option.label.as_str()).collect();
        if entry.question.prompts.len() > 1 {
            details.push(("prompt", format!("{}: {}", prompt.id, prompt.text)));
        } else if prompt.text.trim() != entry.question.title() {
            details.push(("text", prompt.text.clone()));
        }
        if !options.is_empty() {
            details.push(("options", options.join(", ")));
        }
    }
    details.push(("writes", writes(entry, &history)));
    let rows: Vec<_> =
        details.iter().map(|(name, value)| vec![(*name).into(), plain(value, 1_000)]).collect();
    text.push_str(&table(2, &rows));
    text.push('\n');
    text.push_str(&timeline::render(entry));
    Ok(text)
}

/// Prints what happens, as it happens, until `stop`.
pub async fn watch(bus: &Bus, stop: CancellationToken) -> Result<()> {
    let mut feed = bus.question_feed().await?;
    // What was printed, without times: a step is announced before it is on record.
    let mut printed: HashMap<QuestionKey, HashSet<String>> = HashMap::new();
    let mut print = |key: &QuestionKey, rows: Vec<Row>, silent: bool| {
        let known = printed.entry(key.clone()).or_default();
        for row in rows {
            if known.insert(format!("{} {}", row.step, row.what)) && !silent && !line(key, &row) {
                stop.cancel();
            }
        }
    };
    for stored in bus.all_questions().await? {
        print(&stored.value.key, told(&stored.value), !stored.value.is_pending());
    }
    eprintln!("watching; Ctrl-C ends it");
    loop {
        let item = tokio::select! {
            () = stop.cancelled() => return Ok(()),
            item = feed.next() => item,
        };
        match item {
            Some(FeedItem::Entry(stored)) => print(&stored.value.key, told(&stored.value), false),
            Some(FeedItem::Step(step)) => {
                let what = timeline::surface_words(step.surface, &step.rule);
                print(&step.key, vec![Row { at: Timestamp::now(), step: "surface", what }], false);
            }
            Some(FeedItem::ReadAgain) => match bus.all_questions().await {
                Ok(all) => all.iter().for_each(|s| print(&s.value.key, told(&s.value), false)),
                Err(error) => eprintln!("askctl: {error}; reading again after the next reconnect"),
            },
            None => bail!("the connection to nats is closed"),
        }
    }
}

/// The rows of an entry, the first with what is asked.
fn told(entry: &Entry) -> Vec<Row> {
    let mut rows = timeline::rows(entry);
    for row in rows.iter_mut().filter(|row| row.step == "asked") {
        row.what = format!("{}: {}", row.what, plain(&entry.question.title(), 80));
    }
    rows
}

/// False when nobody reads it any more.
fn line(key: &QuestionKey, row: &Row) -> bool {
    let time = time::OffsetDateTime::from_unix_timestamp_nanos(i128::from(row.at.0) * 1_000_000)
        .map(|time| {
            format!("{:02}:{:02}:{:02}.{:03}Z", time.hour(), time.minute(), time.second(), time.millisecond())
        })
        .unwrap_or_default();
    say!("{time}  {:<SHORT_ID$}  {:<9}  {}", short_id(key), row.step, row.what)
}

fn summary(entry: &Entry, now: Timestamp) -> serde_json::Value {
    json!({
        "id": entry.key.question, "key": entry.key, "gateway": entry.key.gateway,
        "session": entry.key.session, "run": entry.key.run, "state": timeline::state(entry),
        "surface": timeline::surface(entry), "title": entry.question.title(),
        "asked_at": entry.asked_at, "deadline": entry.deadline,
        "age_ms": now.since(entry.asked_at).as_millis() as u64,
        "trace": entry.traceparent.as_deref().and_then(trace::trace_id),
    })
}

/// The sealed bytes are of no use to a reader, and need not travel further.
fn without_sealed(mut entry: Entry) -> Entry {
    use ask_core::entry::State;
    use ask_core::outcome::Outcome;
    use ask_core::reply::Answer;
    if let State::Decided { decision } | State::Returned { decision, .. } = &mut entry.state
        && let Outcome::Answered { answers } = &mut decision.outcome
    {
        for answer in answers.values_mut().filter(|answer| matches!(answer, Answer::Sealed(_))) {
            *answer = Answer::Hidden;
        }
    }
    entry
}

fn trace_of(entry: &Entry, config: &AskctlConfig) -> String {
    let id = entry.traceparent.as_deref().and_then(trace::trace_id);
    match (id, &config.jaeger_url) {
        (None, _) => "none was recorded".into(),
        (Some(id), None) => id.into(),
        (Some(id), Some(jaeger)) => format!("{id}, {}/trace/{id}", jaeger.trim_end_matches('/')),
    }
}

fn writes(entry: &Entry, history: &[(Stored<Entry>, u64)]) -> String {
    let each: Vec<_> = history
        .iter()
        .map(|(stored, at)| {
            format!("{} at {:.3} s", stored.revision, Timestamp(*at).since(entry.asked_at).as_secs_f64())
        })
        .collect();
    let rolled_up = entry.question.is_secret() && entry.returned().is_some() && history.len() == 1;
    let note = if rolled_up { " (older ones went out of reach with the secret)" } else { "" };
    format!("revision {}{note}", each.join(", "))
}
