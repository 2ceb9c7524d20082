//! `demo`: a scripted agent asks, a person or a script answers, and what is on record is shown.
//!
//! The Gateway and the front end are testkit's, as processes of their own that speak the real
//! protocols; nats-server and the services are the real ones.

use std::fs;
use std::io::IsTerminal as _;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use ask_bus::{Bus, Stored};
use ask_core::entry::Entry;
use ask_core::outcome::{Outcome, Returned};
use ask_core::question::{Prompt, Question};
use ask_core::reply::Answer;
use rand::Rng as _;
use serde_json::{Value, json};
use service_kit::Config;
use sha2::{Digest as _, Sha256};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::process::{ChildStdin, ChildStdout};
use zeroize::Zeroizing;

use crate::config::{AskctlConfig, connect, load};
use crate::nats_server::{NatsServer, Ports};
use crate::process::{Process, tail};
use crate::provision::{ADAPTER_TOKEN, EMITTER_TOKEN, provision, seal_file};
use crate::reply::{as_asked, ask_secret, ask_until_it_fits, from_text};
use crate::terminal::{Unanswered, duration, plain, put, say};
use crate::{questions, timeline};

/// How long a step may take that needs no person.
const STEP: Duration = Duration::from_secs(60);
/// How long a person may think.
const PERSON: Duration = Duration::from_secs(1800);
const GATEWAY: &str = "openclaw";
const LAST_WORDS: &str = "Thank you, the release is prepared.";

#[derive(Debug, clap::Args)]
pub struct DemoArgs {
    /// A script answers, as it does without a terminal
    #[arg(long)]
    auto: bool,
    /// Runs the services as processes, and kills this one (-9) while each question is on the screen
    #[arg(long, value_name = "SERVICE")]
    kill: Option<Victim>,
}

/// A service that can be killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Victim {
    Router,
    Adapter,
    Emitter,
}

impl Victim {
    fn service(self) -> &'static str {
        match self {
            Self::Router => "ask-router",
            Self::Adapter => "gateway-adapter",
            Self::Emitter => "owui-emitter",
        }
    }
}

/// Runs the demo; an error when any outcome was not returned to the agent.
pub async fn demo(args: DemoArgs) -> Result<()> {
    let stop = service_kit::shutdown::on_signal().context("cannot listen for signals")?;
    let folder = tempfile::Builder::new().prefix("askbus-demo-").tempdir();
    let folder = folder.context("no folder for temporary files")?;
    let mut stage = Stage::default();
    let played = tokio::select! {
        played = Box::pin(play(&mut stage, folder.path(), &args)) => played,
        () = stop.cancelled() => Err(anyhow::anyhow!("interrupted")),
    };
    stage.end().await;
    let Err(error) = played else {
        return Ok(());
    };
    // The person left, so no log says anything about it.
    if stop.is_cancelled() || error.is::<Unanswered>() {
        eprintln!();
        return Err(error);
    }
    let folder = folder.keep();
    let mut logs: Vec<_> = fs::read_dir(&folder)?.flatten().map(|entry| entry.path()).collect();
    logs.retain(|file| file.extension().is_some_and(|ending| ending == "log"));
    logs.sort();
    let tails: String = logs.iter().map(|log| tail(log)).collect();
    Err(error
        .context(format!("the demo failed; what it wrote is in {}{tails}\nwhat failed", folder.display())))
}

/// All that runs.
#[derive(Default)]
struct Stage {
    nats: Option<NatsServer>,
    /// The processes of the services, with the `/readyz` of each service in them.
    services: Vec<(Process, Vec<String>)>,
    gateway: Option<Process>,
    front: Option<Process>,
}

impl Stage {
    async fn end(&mut self) {
        let services = self.services.iter_mut().map(|(process, _)| process);
        for process in self.front.iter_mut().chain(self.gateway.iter_mut()).chain(services) {
            let _ = process.stop(Duration::from_secs(10)).await;
        }
        if let Some(nats) = self.nats.take() {
            nats.stop().await;
        }
    }
}

/// A question as it was on the screen, and what was answered.
struct Asked {
    question: String,
    answer: Given,
}

enum Given {
    /// In words, as people read them.
    Words(String),
    Secret(Zeroizing<String>),
}

async fn play(stage: &mut Stage, folder: &Path, args: &DemoArgs) -> Result<()> {
    let auto = args.auto || !std::io::stdin().is_terminal();
    let ports = free_ports::<8>()?;
    let [clients, monitoring, gateway_port, adapter_http, emitter_http, health @ ..] = ports;
    let keys = folder.join("keys");
    let gateway_token = uuid::Uuid::new_v4().simple().to_string();

    say!("starting nats-server, the three services and a scripted agent");
    let nats = NatsServer::start(folder, Ports { clients, monitoring }).await?;
    let file = folder.join("askbus.toml");
    let text =
        config_text(&nats.url, &keys, &gateway_token, gateway_port, adapter_http, emitter_http, health);
    stage.nats = Some(nats);
    fs::write(&file, text)?;
    let config = load(Some(&file), None)?;
    let bus = connect(&config.nats).await?;
    provision(&bus, &config.service, &keys, false).await?;
    let token = |name: &str| fs::read_to_string(keys.join(name)).map(|token| token.trim().to_owned());

    let testkit = sibling("testkit")?;
    let mut gateway = Process::new("scripted-gateway", &testkit, &folder.join("scripted-gateway.log"))?
        .arg("gateway")
        .arg("--listen")
        .arg(format!("127.0.0.1:{gateway_port}"))
        .arg("--plugin-endpoint")
        .arg(format!("http://127.0.0.1:{adapter_http}"))
        .env("OPENCLAW_GATEWAY_TOKEN", &gateway_token)
        .env("ASKBUS_PLUGIN_TOKEN", token(ADAPTER_TOKEN)?)
        .piped();
    gateway.start()?;
    let mut outcomes = BufReader::new(gateway.stdout().context("its output is a pipe")?).lines();
    stage.gateway = Some(gateway);

    stage.services = services(folder, &file, args.kill, health)?;
    for (process, _) in &mut stage.services {
        process.start()?;
    }
    for (process, urls) in &mut stage.services {
        ready(process, urls).await?;
    }

    let message = message();
    let mut front = Process::new("scripted-front-end", &testkit, &folder.join("scripted-front-end.log"))?
        .arg("front")
        .arg("--emitter")
        .arg(format!("http://127.0.0.1:{emitter_http}"))
        .arg(&message)
        .env("ASKBUS_FRONT_TOKEN", token(EMITTER_TOKEN)?)
        .piped();
    front.start()?;
    let mut screen = Screen {
        lines: BufReader::new(front.stdout().context("its output is a pipe")?).lines(),
        replies: front.stdin().context("its input is a pipe")?,
    };
    stage.front = Some(front);
    say!("\nyou      Prepare the release.");
    let asked = converse(&mut screen, stage, args.kill, auto).await?;
    if asked.len() != 3 {
        bail!("the agent wanted to ask 3 questions, and {} were shown", asked.len());
    }
    let got = step("the agent had all its results", tool_results(&mut outcomes, asked.len())).await??;
    let closed = step("every outcome was on record as returned", all_returned(&bus)).await??;
    verdict(&bus, &config, &asked, &got, &closed, args.kill).await
}

/// The screen of the person.
struct Screen {
    lines: Lines<BufReader<ChildStdout>>,
    replies: ChildStdin,
}

impl Screen {
    /// The next thing that owui-emitter sends; none at the end of the turn.
    async fn next(&mut self) -> Result<Option<Value>> {
        let Some(line) = self.lines.next_line().await? else {
            return Ok(None);
        };
        Ok(Some(serde_json::from_str(&line).with_context(|| format!("the front end printed {line:?}"))?))
    }
}

/// Goes through the turn: shows what comes, and has every question answered.
async fn converse(
    screen: &mut Screen,
    stage: &mut Stage,
    kill: Option<Victim>,
    auto: bool,
) -> Result<Vec<Asked>> {
    let mut asked: Vec<Asked> = Vec::new();
    let mut said = String::new();
    let mut shown: Option<(String, Asked)> = None;
    loop {
        let what = match &shown {
            Some(_) => "the reply was taken",
            None => "the agent asked its next question or ended its turn",
        };
        let Some(line) = step(what, screen.next()).await?? else {
            bail!("the front end ended before the turn did");
        };
        match line["type"].as_str().unwrap_or_default() {
            "text" => said.push_str(line["text"].as_str().unwrap_or_default()),
            "ask" => {
                let id = line["question"].as_str().unwrap_or_default();
                if shown.as_ref().is_some_and(|(open, _)| open == id) {
                    continue;
                }
                let prompts: Vec<Prompt> = serde_json::from_value(line["prompts"].clone())
                    .context("owui-emitter sent a question that can't be read")?;
                let question = Question::new(prompts)?;
                let surface = line["surface"].as_str().unwrap_or_default();
                say!("\nagent    asks ({})", plain(surface, 20));
                if let Some(victim) = kill {
                    kill_and_start_again(stage, victim).await?;
                }
                let (decision, answer) = answer(&question, auto).await?;
                let reply = json!({"question": id, "decision": decision});
                let mut reply = Zeroizing::new(reply.to_string());
                reply.push('\n');
                screen.replies.write_all(reply.as_bytes()).await?;
                shown = Some((id.to_owned(), Asked { question: question.prompts[0].text.clone(), answer }));
            }
            "replied" if line["body"]["result"] == "saved" => {
                say!("         saved");
                asked.extend(shown.take().map(|(_, asked)| asked));
            }
            "replied" => bail!("owui-emitter did not save the reply: {}", line["body"]),
            "end" => {
                said.push_str(line["text"].as_str().unwrap_or_default());
                if line["reason"] != "done" || !said.trim_end().ends_with(LAST_WORDS) {
                    bail!("the turn ended ({}) with other words: {}", line["reason"], plain(&said, 400));
                }
                say!("\nagent    {LAST_WORDS}\n");
                return Ok(asked);
            }
            _ => {}
        }
    }
}

/// Shows a question and gets its answer: as a decision for the emitter, and to compare with later.
async fn answer(question: &Question, auto: bool) -> Result<(Value, Given)> {
    let prompt = &question.prompts[0];
    let think = Duration::from_millis(if auto { 400 } else { 0 });
    if prompt.secret {
        let secret = if auto {
            put(as_asked(question));
            say!("         a script types a secret");
            Zeroizing::new(format!("demo-{}", uuid::Uuid::new_v4().simple()))
        } else {
            in_time(ask_secret(question)).await?
        };
        tokio::time::sleep(think).await;
        let decision = json!({"answers": {&prompt.id: {"text": secret.as_str()}}});
        return Ok((decision, Given::Secret(secret)));
    }
    let answers = if auto {
        put(as_asked(question));
        let text = if prompt.options.is_empty() { "Faster search, and fewer surprises." } else { "2" };
        say!("         a script answers: {text}");
        from_text(question, text)?
    } else {
        in_time(ask_until_it_fits(question)).await?
    };
    tokio::time::sleep(think).await;
    let answer = &answers[&prompt.id];
    let wire = match answer {
        Answer::Given { options, other: None } if options.len() == 1 => json!({"index": options[0]}),
        Answer::Given { options, other: None } => json!({"indexes": options}),
        Answer::Given { other: Some(text), .. } => json!({"text": text}),
        Answer::Sealed(_) | Answer::Hidden => bail!("only a secret is hidden"),
    };
    Ok((json!({"answers": {&prompt.id: wire}}), Given::Words(answer.display(prompt))))
}

async fn in_time<T>(typed: impl Future<Output = Result<T>>) -> Result<T> {
    tokio::time::timeout(PERSON, typed).await.context("no answer was typed within half an hour")?
}

async fn kill_and_start_again(stage: &mut Stage, victim: Victim) -> Result<()> {
    let name = victim.service();
    let running = stage.services.iter_mut().find(|(process, _)| process.name == name);
    let (process, urls) = running.with_context(|| format!("{name} does not run"))?;
    process.kill().await?;
    say!("         {name} is killed (-9) and started again");
    let since = Instant::now();
    process.start()?;
    ready(process, urls).await?;
    say!("         {name} is ready after {}", duration(since.elapsed()));
    Ok(())
}

/// What the agent's calls got, as the scripted Gateway prints it.
async fn tool_results(lines: &mut Lines<BufReader<ChildStdout>>, count: usize) -> Result<Vec<Value>> {
    let mut results = Vec::new();
    while results.len() < count {
        let line = lines.next_line().await?.context("the scripted gateway ended")?;
        results.push(serde_json::from_str(&line)?);
    }
    Ok(results)
}

/// All entries, once each is closed.
async fn all_returned(bus: &Bus) -> Result<Vec<Stored<Entry>>> {
    loop {
        let entries = bus.all_questions().await?;
        if entries.iter().all(|stored| stored.value.returned().is_some()) {
            return Ok(entries);
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Prints the lives and compares: what was answered, what is on record, what the agent got.
async fn verdict(
    bus: &Bus,
    config: &Config<AskctlConfig>,
    asked: &[Asked],
    got: &[Value],
    closed: &[Stored<Entry>],
    kill: Option<Victim>,
) -> Result<()> {
    let mut wrong = Vec::new();
    say!("What NATS has on record:\n");
    for asked in asked {
        let mut of_it =
            closed.iter().filter(|stored| stored.value.question.prompts[0].text == asked.question);
        let (Some(stored), None) = (of_it.next(), of_it.next()) else {
            wrong.push(format!("\"{}\" is not on record exactly once", asked.question));
            continue;
        };
        let life = questions::life(bus, &config.service, stored).await?;
        say!("{life}");
        let results: Vec<_> = got.iter().filter(|result| question_of(result) == asked.question).collect();
        let [result] = results.as_slice() else {
            wrong.push(format!("the agent got {} results for \"{}\"", results.len(), asked.question));
            continue;
        };
        let text = result["text"].as_str().unwrap_or_default();
        let (shown, same) = match &asked.answer {
            // The gateway's own tool adds its record of the question, on lines of their own.
            Given::Words(words) => {
                let first = text.lines().next().unwrap_or_default();
                (format!("\"{}\"", plain(first, 160)), text.contains(words.as_str()))
            }
            Given::Secret(secret) => {
                let same = result["secret_sha256"] == format!("{:x}", Sha256::digest(secret.as_bytes()));
                (format!("the secret (hidden), as \"{}\" in its transcript", plain(text, 80)), same)
            }
        };
        say!("  the agent got {shown}\n");
        if !same || result["is_error"] == true {
            wrong.push(format!("the agent did not get what was answered to \"{}\"", asked.question));
        }
        wrong.extend(
            objection(&stored.value, &asked.answer).map(|why| format!("\"{}\": {why}", asked.question)),
        );
    }
    if closed.len() != asked.len() {
        wrong.push(format!("{} questions were asked, and {} are on record", asked.len(), closed.len()));
    }
    if !wrong.is_empty() {
        bail!("not every outcome was returned to the agent:\n  {}", wrong.join("\n  "));
    }
    let killed = match kill {
        Some(victim) => format!("; {} was killed {} times", victim.service(), asked.len()),
        None => String::new(),
    };
    // The bucket was empty before, so that its last revision counts the writes.
    let writes = closed.iter().map(|stored| stored.revision).max().unwrap_or_default();
    say!("{} questions, {} answers, each returned to the agent once{killed}", asked.len(), got.len());
    say!("{writes} durable writes in all");
    Ok(())
}

/// What is on record that is not as it was answered.
fn objection(entry: &Entry, answer: &Given) -> Option<String> {
    if !matches!(entry.returned(), Some(Returned::Delivered { .. })) {
        return Some(format!("it is {}", timeline::state(entry)));
    }
    let Some(Outcome::Answered { answers }) = entry.shown_outcome() else {
        return Some(format!("it is {}", timeline::state(entry)));
    };
    let prompt = &entry.question.prompts[0];
    match (answer, answers.get(&prompt.id)) {
        (Given::Words(words), Some(given)) if given.display(prompt) == *words => None,
        (Given::Secret(_), Some(Answer::Hidden)) => None,
        _ => Some("the answer on record is another one".into()),
    }
}

/// The question that a tool result is about.
fn question_of(result: &Value) -> &str {
    let args = &result["args"];
    args["question"].as_str().or(args["questions"][0]["question"].as_str()).unwrap_or_default()
}

/// What the person says; the scripted agent makes the calls that it names.
fn message() -> String {
    let choices = json!({"questions": [{
        "id": "target", "header": "Target", "question": "Where should the release go first?",
        "options": [
            {"label": "Staging", "description": "the team's own machines"},
            {"label": "Canary", "description": "one customer in a hundred"},
            {"label": "Everywhere", "description": "all at once"},
        ],
    }]});
    let words = json!({"question": "What should the release notes say?"});
    let secret = json!({"question": "What is the password of the package registry?", "secret": true});
    format!(
        "Prepare the release. CALL ask_user {choices} THEN CALL request_user_input {words} \
         THEN CALL request_user_input {secret} THEN {LAST_WORDS}"
    )
}

/// The services: one process with all of them, or a process each where one is to be killed.
fn services(
    folder: &Path,
    file: &Path,
    kill: Option<Victim>,
    health: [u16; 3],
) -> Result<Vec<(Process, Vec<String>)>> {
    let ready = |port: u16| format!("http://127.0.0.1:{port}/readyz");
    if kill.is_none() {
        let askctl = std::env::current_exe().context("askctl can't find itself")?;
        let nats = load(Some(file), None)?.nats.url;
        let process = Process::new("askctl-up", &askctl, &folder.join("askctl-up.log"))?
            .arg("--config")
            .arg(file)
            .arg("--nats")
            .arg(nats)
            .arg("up")
            .arg("--state")
            .arg(folder);
        return Ok(vec![(process, health.map(ready).to_vec())]);
    }
    let each = ["ask-router", "gateway-adapter", "owui-emitter"].into_iter().zip(health);
    each.map(|(name, port)| {
        let process = Process::new(name, &sibling(name)?, &folder.join(format!("{name}.log")))?;
        Ok((process.arg("--config").arg(file), vec![ready(port)]))
    })
    .collect()
}

async fn ready(process: &mut Process, urls: &[String]) -> Result<()> {
    let client = reqwest::Client::builder().no_proxy().timeout(Duration::from_secs(2)).build()?;
    for url in urls {
        let ask = || async { client.get(url).send().await.is_ok_and(|answer| answer.status().is_success()) };
        process.until(STEP, ask).await?;
    }
    Ok(())
}

/// A program of askbus beside this one.
fn sibling(name: &str) -> Result<PathBuf> {
    let own = std::env::current_exe().context("askctl can't find itself")?;
    let path = own.with_file_name(name);
    if !path.is_file() {
        bail!("{} is missing: `./dev demo` builds everything that the demo needs", path.display());
    }
    Ok(path)
}

async fn step<T>(what: &str, work: impl Future<Output = T>) -> Result<T> {
    let done = tokio::time::timeout(STEP, work).await;
    done.with_context(|| format!("it did not happen within {} s that {what}", STEP.as_secs()))
}

/// Ports that are free now, below those that the kernel gives to outgoing connections: a service
/// that is killed finds its own free again.
fn free_ports<const N: usize>() -> Result<[u16; N]> {
    let mut held = Vec::new();
    for _ in 0..1000 {
        if held.len() == N {
            break;
        }
        held.extend(TcpListener::bind(("127.0.0.1", rand::rng().random_range(20_000..32_000))));
    }
    let ports = held.iter().map(|listener| listener.local_addr().map(|address| address.port()));
    let ports: Vec<u16> = ports.collect::<Result<_, _>>()?;
    ports.try_into().map_err(|_| anyhow::anyhow!("no free ports from 20000 to 32000 on 127.0.0.1"))
}

fn config_text(
    nats_url: &str,
    keys: &Path,
    gateway_token: &str,
    gateway: u16,
    adapter: u16,
    emitter: u16,
    [router_health, adapter_health, emitter_health]: [u16; 3],
) -> String {
    let path = |path: PathBuf| Value::from(path.display().to_string()).to_string();
    format!(
        "[nats]\nurl = \"{nats_url}\"\n\n\
         [askctl]\nkeys_dir = {keys_dir}\n\n\
         [router.health]\nlisten = \"127.0.0.1:{router_health}\"\n\n\
         [adapter]\nseal_key.file = {seal}\n\n\
         [adapter.health]\nlisten = \"127.0.0.1:{adapter_health}\"\n\n\
         [adapter.gateway]\nname = \"{GATEWAY}\"\nurl = \"ws://127.0.0.1:{gateway}\"\n\
         token = \"{gateway_token}\"\nidentity_file = {identity}\n\n\
         [adapter.http]\nlisten = \"127.0.0.1:{adapter}\"\ntoken.file = {adapter_token}\n\n\
         [emitter.health]\nlisten = \"127.0.0.1:{emitter_health}\"\n\n\
         [emitter.http]\nlisten = \"127.0.0.1:{emitter}\"\ntoken.file = {emitter_token}\n",
        keys_dir = path(keys.to_owned()),
        seal = path(seal_file(keys, GATEWAY)),
        identity = path(keys.join("identity.json")),
        adapter_token = path(keys.join(ADAPTER_TOKEN)),
        emitter_token = path(keys.join(EMITTER_TOKEN)),
    )
}
