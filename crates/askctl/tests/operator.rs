//! What an operator does, on a real nats-server, with the built binary.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Output, Stdio};
use std::time::Duration;

use ask_bus::seal::OpenKey;
use ask_bus::{Bus, BusOptions, RouterRequest};
use ask_core::SCHEMA;
use ask_core::entry::{DecidedBy, Entry, Road, Step, StepKind, Verdict};
use ask_core::key::QuestionKey;
use ask_core::outcome::{CancelReason, Outcome, Returned};
use ask_core::question::{Choice, Prompt, Question};
use ask_core::reply::{Answer, Reply, ReplyContent, Responder};
use ask_core::surface::Surface;
use ask_core::time::Timestamp;
use ask_core::wire::{ReplyRequest, ReplyResponse};
use testkit::nats::{NatsOptions, NatsServer};
use testkit::until;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};

const PATIENCE: Duration = Duration::from_secs(60);

struct Place {
    server: NatsServer,
    folder: tempfile::TempDir,
    bus: Bus,
}

impl Place {
    /// A server with nothing on it.
    async fn empty() -> Self {
        let server = NatsServer::start_with(NatsOptions { fsync: true, ..Default::default() }).await.unwrap();
        let options = BusOptions { url: server.url(), name: "test".into(), ..Default::default() };
        let bus = Bus::connect(options).await.unwrap();
        assert!(bus.connected(PATIENCE).await);
        Self { server, folder: tempfile::tempdir().unwrap(), bus }
    }

    async fn provisioned() -> Self {
        let place = Self::empty().await;
        place.provision(&[]).await;
        place
    }

    fn keys(&self) -> std::path::PathBuf {
        self.folder.path().join("keys")
    }

    async fn provision(&self, more: &[&str]) -> Vec<String> {
        let keys = self.keys();
        let args = [&["provision", "--dir", keys.to_str().unwrap()], more].concat();
        good(&self.askctl(&args, "").await).lines().map(str::to_owned).collect()
    }

    /// Publishes what no part of askbus would.
    async fn publish(&self, subject: &str, payload: &str) {
        let address = self.server.url().replace("nats://", "");
        let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
        let length = payload.len();
        let lines = format!("CONNECT {{}}\r\nPUB {subject} _INBOX.nobody {length}\r\n{payload}\r\nPING\r\n");
        stream.write_all(lines.as_bytes()).await.unwrap();
        let mut said = BufReader::new(stream).lines();
        while said.next_line().await.unwrap().unwrap() != "PONG" {}
    }

    async fn askctl(&self, args: &[&str], input: &str) -> Output {
        let mut child = self.command(args).stdin(Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(input.as_bytes()).await.unwrap();
        tokio::time::timeout(PATIENCE, child.wait_with_output()).await.unwrap().unwrap()
    }

    fn command(&self, args: &[&str]) -> tokio::process::Command {
        let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_askctl"));
        command
            .args(["--nats", &self.server.url()])
            .args(args)
            .env_remove("ASKBUS_CONFIG")
            .env("USER", "olga")
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        command
    }

    async fn ask(&self, id: &str, change: impl Fn(&mut Prompt)) -> QuestionKey {
        let key = QuestionKey {
            gateway: "openclaw".into(),
            session: "agent:main:owui-c1".into(),
            run: "r1".into(),
            question: id.into(),
        };
        let mut prompt = Prompt {
            options: ["Staging", "Production"].map(Choice::label).into(),
            ..Prompt::free_text("Which environment?")
        };
        change(&mut prompt);
        let question = Question::new(vec![prompt]).unwrap();
        let now = Timestamp::now();
        let deadline = now.plus(Duration::from_secs(300));
        let trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        let entry = Entry::ask(
            key.clone(),
            Road::Plugin,
            "request_user_input",
            "call_1",
            question,
            now,
            deadline,
            Some(trace.into()),
        );
        self.bus.write_asked(&entry.unwrap()).await.unwrap();
        key
    }

    async fn entry(&self, key: &QuestionKey) -> Entry {
        self.bus.question(key).await.unwrap().unwrap().value
    }

    /// A router that only decides.
    async fn route(&self) {
        let mut requests = self.bus.serve_router("0.0.0").await.unwrap();
        let bus = self.bus.clone();
        tokio::spawn(async move {
            while let Some(request) = requests.next().await {
                let RouterRequest::Outcome(incoming) = request else { panic!("only outcomes are sent here") };
                incoming.answer(&decide(&bus, &incoming.request).await).await;
            }
        });
    }
}

async fn decide(bus: &Bus, request: &ReplyRequest) -> ReplyResponse {
    let Some(stored) = bus.question(&request.key).await.unwrap() else {
        return ReplyResponse::UnknownQuestion;
    };
    match stored.value.reply(&request.reply, Timestamp::now()) {
        Verdict::Decide(next) => {
            bus.write_decided(&next, stored.revision).await.unwrap();
            ReplyResponse::Saved
        }
        Verdict::Saved => ReplyResponse::Saved,
        Verdict::Invalid(invalid) => ReplyResponse::Invalid { invalid },
        Verdict::Late(_) | Verdict::KnownLate => {
            let decision = stored.value.decision().unwrap();
            let DecidedBy::Reply { responder, surface, .. } = &decision.by else {
                panic!("only replies decide")
            };
            ReplyResponse::Closed {
                outcome: decision.outcome.clone(),
                at: decision.at,
                by: responder.display_name().into(),
                surface: Some(*surface),
                sent_as_message: false,
            }
        }
    }
}

fn out(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn err(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn good(output: &Output) -> String {
    assert!(output.status.success(), "{}{}", out(output), err(output));
    out(output)
}

fn bad(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(1), "{}{}", out(output), err(output));
    err(output)
}

fn secret(prompt: &mut Prompt) {
    prompt.options.clear();
    prompt.secret = true;
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o777
}

#[tokio::test]
async fn provision_makes_everything_once() {
    let place = Place::empty().await;
    let first = place.provision(&[]).await;
    assert!(first.iter().all(|line| line.starts_with("made ")), "{first:#?}");
    place.bus.check().await.unwrap();
    place.bus.check_gateway("openclaw").await.unwrap();

    let files = ["seal-openclaw.key", "adapter.token", "emitter.token"].map(|name| place.keys().join(name));
    let contents = || files.each_ref().map(|file| fs::read_to_string(file).unwrap());
    let made = contents();
    assert!(files.iter().all(|file| mode(file) == 0o600));
    assert_eq!(mode(&place.keys()), 0o700);
    let key = OpenKey::from_text(&made[0]).unwrap();
    assert_eq!(place.bus.seal_key("openclaw").await.unwrap(), Some(key.seal_key()));
    assert!(made[1] != made[2] && made[1].trim().len() == 64);

    let second = place.provision(&[]).await;
    assert_eq!(second.len(), first.len());
    assert!(second.iter().all(|line| line.starts_with("was there ")), "{second:#?}");
    assert_eq!(contents(), made);
}

#[tokio::test]
async fn provision_completes_what_was_interrupted() {
    let place = Place::provisioned().await;
    let fresh = Place::empty().await;
    fs::create_dir(fresh.keys()).unwrap();
    fs::copy(place.keys().join("seal-openclaw.key"), fresh.keys().join("seal-openclaw.key")).unwrap();
    let lines = fresh.provision(&[]).await;
    assert!(lines.iter().any(|line| line.starts_with("was there  seal key")), "{lines:#?}");
    assert!(lines.iter().any(|line| line.starts_with("made       its public half")), "{lines:#?}");
    let published = fresh.bus.seal_key("openclaw").await.unwrap();
    assert_eq!(published, place.bus.seal_key("openclaw").await.unwrap());
}

#[tokio::test]
async fn a_lost_seal_key_is_not_replaced_unasked() {
    let place = Place::provisioned().await;
    let before = place.bus.seal_key("openclaw").await.unwrap().unwrap();
    fs::remove_file(place.keys().join("seal-openclaw.key")).unwrap();
    let keys = place.keys();
    let refused = place.askctl(&["provision", "--dir", keys.to_str().unwrap()], "").await;
    let said = bad(&refused);
    assert!(said.contains(&before.key_id) && said.contains("--replace-seal-keys"), "{said}");
    place.provision(&["--replace-seal-keys"]).await;
    assert_ne!(place.bus.seal_key("openclaw").await.unwrap().unwrap(), before);
}

#[tokio::test]
async fn questions_are_listed_and_shown() {
    let place = Place::provisioned().await;
    assert_eq!(good(&place.askctl(&["ls"], "").await), "no questions yet\n");
    let key = place.ask("3f2a91c07d5be1a4", |_| ()).await;
    let stored = place.bus.question(&key).await.unwrap().unwrap();
    let at = stored.value.asked_at.plus(Duration::from_millis(250));
    let what = StepKind::Delivered { surface: Surface::Card, chat: Some("c1".into()) };
    let shown = stored.value.note(&[Step { at, what }]).unwrap();
    place.bus.write_steps(&shown, stored.revision).await.unwrap();

    let list = good(&place.askctl(&["ls"], "").await);
    let line = list.lines().nth(1).unwrap();
    for part in ["3f2a91c07d5b", "pending", "card", "openclaw/agent:main:owui-c1", "Which environment?"] {
        assert!(line.contains(part), "{part} in {line}");
    }
    let json: serde_json::Value =
        serde_json::from_str(&good(&place.askctl(&["ls", "--json"], "").await)).unwrap();
    assert_eq!(json[0]["id"], "3f2a91c07d5be1a4");
    assert_eq!(json[0]["state"], "pending");

    let shown = good(&place.askctl(&["show", "3f2a"], "").await);
    for part in ["Staging, Production", "asked", "0.250 s  250 ms  delivered  card, chat c1"] {
        assert!(shown.contains(part), "{part} in {shown}");
    }
    assert!(shown.contains("0af7651916cd43dd8448eb211c80319c"), "{shown}");
    let json: serde_json::Value =
        serde_json::from_str(&good(&place.askctl(&["show", &key.to_string(), "--json"], "").await)).unwrap();
    assert_eq!(json["entry"]["steps"][0]["surface"], "card");
    assert_eq!(json["writes"].as_array().unwrap().len(), 2);
    let trace = good(&place.askctl(&["trace", "3f2a"], "").await);
    assert!(trace.starts_with("trace     0af7651916cd43dd8448eb211c80319c\n"), "{trace}");
}

#[tokio::test]
async fn an_id_must_name_one_question() {
    let place = Place::provisioned().await;
    place.ask("aa11", |_| ()).await;
    place.ask("aa12", |_| ()).await;
    place.ask("aa1", |_| ()).await;
    assert!(bad(&place.askctl(&["show", "a"], "").await).contains("can be any of 3 questions"));
    assert!(
        bad(&place.askctl(&["show", "b"], "").await).contains("no question has an id that begins with `b`")
    );
    assert!(good(&place.askctl(&["show", "aa1"], "").await).contains("aa1"));
}

#[tokio::test]
async fn an_operator_answers_in_words_or_by_number_and_only_once() {
    let place = Place::provisioned().await;
    place.route().await;
    let by_number = place.ask("number", |_| ()).await;
    let said = good(&place.askctl(&["answer", "num", "--option", "2"], "").await);
    assert_eq!(said, "saved: number answered \"Production\"\n");
    let by_words = place.ask("words", |prompt| prompt.options.clear()).await;
    good(&place.askctl(&["answer", "words", "--stdin"], "as you like\n").await);

    for (key, answer) in [(&by_number, Answer::option(1)), (&by_words, Answer::text("as you like"))] {
        let decision = place.entry(key).await.decision().unwrap().clone();
        assert_eq!(decision.outcome, Outcome::Answered { answers: [("answer".into(), answer)].into() });
        let DecidedBy::Reply { responder, surface, .. } = decision.by else { panic!("a reply decided") };
        assert_eq!((responder.user.as_str(), surface), ("operator:olga", Surface::Cli));
    }
    let late = bad(&place.askctl(&["cancel", "number"], "").await);
    assert!(
        late.contains("too late: the question was answered \"Production\" by operator:olga on cli"),
        "{late}"
    );

    place.ask("strict", |prompt| prompt.allow_other = false).await;
    let wrong = bad(&place.askctl(&["answer", "strict", "--text", "Moon"], "").await);
    assert!(wrong.contains("Please choose one of: Staging, Production."), "{wrong}");
}

#[tokio::test]
async fn a_secret_is_taken_from_standard_input_alone_and_sealed() {
    let place = Place::provisioned().await;
    place.route().await;
    let key = place.ask("secret", secret).await;
    let refused = bad(&place.askctl(&["answer", "secret", "--text", "hunter2"], "").await);
    assert!(refused.contains("--stdin") && !refused.contains("hunter2"), "{refused}");
    let said = good(&place.askctl(&["answer", "secret", "--stdin"], "hunter2\n").await);
    assert_eq!(said, "saved: secret answered (hidden)\n");

    let stored = place.bus.question(&key).await.unwrap().unwrap();
    let decision = stored.value.decision().unwrap();
    let Outcome::Answered { answers } = &decision.outcome else { panic!("it is answered") };
    let (Answer::Sealed(sealed), DecidedBy::Reply { id, .. }) = (&answers["answer"], &decision.by) else {
        panic!("it is sealed")
    };
    let text = fs::read_to_string(place.keys().join("seal-openclaw.key")).unwrap();
    assert_eq!(*OpenKey::from_text(&text).unwrap().open(sealed, &key, id).unwrap(), "hunter2");
    for args in [&["show", "secret"][..], &["show", "secret", "--json"], &["ls", "--json"]] {
        let shown = good(&place.askctl(args, "").await);
        assert!(!shown.contains("hunter2") && !shown.contains(&sealed.ciphertext), "{shown}");
    }
    let closed = stored.value.close(Returned::Delivered { proof: "acknowledged".into() }, Timestamp::now());
    place.bus.write_returned(&closed.unwrap(), stored.revision, true).await.unwrap();
    let shown = good(&place.askctl(&["show", "secret"], "").await);
    assert!(shown.contains("older ones went out of reach with the secret"), "{shown}");
}

#[tokio::test]
async fn an_operator_cancels() {
    let place = Place::provisioned().await;
    place.route().await;
    let key = place.ask("q", |_| ()).await;
    good(&place.askctl(&["cancel", "q"], "").await);
    let outcome = place.entry(&key).await.decision().unwrap().outcome.clone();
    assert_eq!(outcome, Outcome::Cancelled { reason: CancelReason::Operator });
}

#[tokio::test]
async fn nothing_looks_saved_when_no_router_runs() {
    let place = Place::provisioned().await;
    let key = place.ask("q", |_| ()).await;
    let said = bad(&place.askctl(&["answer", "q", "--option", "1"], "").await);
    assert!(said.contains("not known to be saved") && said.contains("no ask-router answers"), "{said}");
    assert!(place.entry(&key).await.is_pending());
}

#[tokio::test]
async fn doctor_says_what_is_wrong_and_what_to_do() {
    let place = Place::empty().await;
    let keys = place.keys();
    let doctor = ["doctor", "--dir", keys.to_str().unwrap()];
    let empty = place.askctl(&doctor, "").await;
    bad(&empty);
    let text = out(&empty);
    assert!(text.contains("PROBLEM  buckets") && text.contains("-> askctl provision"), "{text}");

    place.provision(&[]).await;
    place.route().await;
    let half = place.askctl(&doctor, "").await;
    bad(&half);
    let text = out(&half);
    for line in [
        "ok       buckets",
        "ok       router     one ask-router",
        "ok       seal key",
        "ok       parked",
        "PROBLEM  adapter",
    ] {
        assert!(text.contains(line), "{line} in {text}");
    }
}

#[tokio::test]
async fn an_absent_server_is_named_with_the_way_out() {
    let nowhere = tokio::process::Command::new(env!("CARGO_BIN_EXE_askctl"))
        .args(["--nats", "nats://127.0.0.1:9", "ls"])
        .env_remove("ASKBUS_CONFIG")
        .output();
    let said = bad(&tokio::time::timeout(PATIENCE, nowhere).await.unwrap().unwrap());
    assert!(said.contains("nats://127.0.0.1:9") && said.contains("askctl up"), "{said}");
}

#[tokio::test]
async fn watch_tells_each_step_once() {
    let place = Place::provisioned().await;
    let mut child = place.command(&["watch"]).spawn().unwrap();
    let mut errors = BufReader::new(child.stderr.take().unwrap()).lines();
    let started = tokio::time::timeout(PATIENCE, errors.next_line()).await.unwrap().unwrap().unwrap();
    assert!(started.starts_with("watching"), "{started}");
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut next =
        async || tokio::time::timeout(PATIENCE, lines.next_line()).await.unwrap().unwrap().unwrap();

    let key = place.ask("q", |_| ()).await;
    let asked = next().await;
    assert!(asked.contains(" asked ") && asked.contains("Which environment?"), "{asked}");
    let stored = place.bus.question(&key).await.unwrap().unwrap();
    let by = Responder { user: "u".into(), name: Some("Alice".into()), chat: None };
    let answers = [("answer".into(), Answer::option(0))].into();
    let reply =
        Reply { id: "r".into(), by, surface: Surface::Card, content: ReplyContent::Answers { answers } };
    let request = ReplyRequest { schema: SCHEMA, key, reply };
    assert_eq!(decide(&place.bus, &request).await, ReplyResponse::Saved);
    assert_eq!(stored.value.key, request.key);
    let decided = next().await;
    assert!(decided.contains("decided    answered \"Staging\" by Alice on card"), "{decided}");
}

#[tokio::test]
async fn what_no_service_could_read_is_listed_and_given_to_its_reader_again() {
    let place = Place::provisioned().await;
    assert!(good(&place.askctl(&["dead", "ls"], "").await).contains("no dead letters"));
    let mut requests = place.bus.serve_router("0.0.0").await.unwrap();
    let reading = tokio::spawn(async move { requests.next().await });
    let address = "say.openclaw.s";
    place.publish(address, "{broken").await;
    until("the dead letter", async || (place.bus.parked().await.ok()? == 1).then_some(())).await;
    let listed = good(&place.askctl(&["dead", "ls"], "").await);
    assert!(listed.contains(address) && listed.contains("key must be a string"), "{listed}");
    assert!(good(&place.askctl(&["dead", "show", "1"], "").await).ends_with("{broken\n"));
    // As unreadable as before: the letter stays, and the new refusal is one more.
    let again = place.askctl(&["dead", "send-again", "1"], "").await;
    assert!(!again.status.success() && bad(&again).contains("stays"), "{again:?}");
    assert_eq!(place.bus.dead_letters().await.unwrap().len(), 2);
    reading.abort();
    // What nobody reads a second time is refused; a bucket's value is still in the bucket.
    place.publish("$KV.ask.g.s.r.q", "{broken").await;
    until("the value", async || place.bus.all_questions().await.ok()).await;
    let mut questions = place.bus.watch_questions(None);
    questions.next().await.unwrap();
    let again = place.askctl(&["dead", "send-again", "3"], "").await;
    assert!(bad(&again).contains("still in the bucket"), "{again:?}");
    good(&place.askctl(&["dead", "drop", "1"], "").await);
    assert!(bad(&place.askctl(&["dead", "drop", "1"], "").await).contains("no dead letter 1"));
}
