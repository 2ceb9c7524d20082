//! The emitter with a real router on a real nats-server; the gateway's side is played by the tests.

use std::time::Duration;

use ask_bus::seal::OpenKey;
use ask_bus::{AdapterRequest, Bus, BusOptions, ChatDelivery, Provisioning};
use ask_core::SCHEMA;
use ask_core::entry::{Entry, Road, StepKind};
use ask_core::key::{QuestionKey, SessionKey, call_question_id};
use ask_core::outcome::{CancelReason, Outcome, Returned};
use ask_core::question::{Choice, Prompt, Question};
use ask_core::reply::{Answer, Reply, ReplyContent, Responder};
use ask_core::surface::Surface;
use ask_core::time::Timestamp;
use ask_core::wire::{AbortResponse, Agent, ReplyRequest, RunEnd, RunEvent, RunItem, ToolPhase};
use ask_router::RouterConfig;
use owui_emitter::{EmitterConfig, HttpConfig};
use serde_json::{Value, json};
use service_kit::config::{LogFormat, TelemetryConfig};
use service_kit::{Health, Redacted, telemetry};
use testkit::front::{Ask, FrontEnd, Turn};
use testkit::nats::NatsServer;
use testkit::otlp::OtlpSink;
use testkit::{WITHIN, until};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

const GATEWAY: &str = "openclaw";
const TOKEN: &str = "front-end-token";
const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const TRACEPARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

struct Setup {
    server: NatsServer,
    bus: Bus,
    router: Option<Running>,
    emitter: Option<Running>,
    url: String,
}

struct Running {
    shutdown: CancellationToken,
    task: JoinHandle<anyhow::Result<()>>,
}

impl Running {
    /// Ends it at once, as a crash would.
    async fn kill(self) {
        self.task.abort();
        let _ = self.task.await;
        // What it has spawned ends with its process.
        self.shutdown.cancel();
    }

    async fn stop(self) {
        self.shutdown.cancel();
        self.task.await.unwrap().unwrap();
    }
}

async fn connect(server: &NatsServer) -> Bus {
    Bus::connect(BusOptions { url: server.url(), name: "test".into(), ..Default::default() }).await.unwrap()
}

impl Setup {
    async fn new() -> Self {
        let mut setup = Self::without_router().await;
        setup.start_router().await;
        setup
    }

    async fn without_router() -> Self {
        let server = NatsServer::start().await.unwrap();
        let bus = connect(&server).await;
        bus.provision(&Provisioning { gateways: vec![GATEWAY.into()], replicas: 1 }).await.unwrap();
        let (url, emitter) = start_emitter(&server, "127.0.0.1:0").await;
        Self { server, bus, router: None, emitter: Some(emitter), url }
    }

    async fn start_router(&mut self) {
        let config = RouterConfig { stagger: Duration::from_millis(20), ..RouterConfig::defaults() };
        let (health, shutdown) = (Health::new(&ask_router::SERVICE), CancellationToken::new());
        let bus = connect(&self.server).await;
        let task = tokio::spawn(ask_router::run(config, bus, health.clone(), shutdown.clone()));
        until("the emitter", async || health.unmet().is_empty().then_some(())).await;
        self.router = Some(Running { shutdown, task });
    }

    /// Kills the emitter and starts it again at the same address.
    async fn restart_emitter(&mut self) {
        self.emitter.take().unwrap().kill().await;
        let address = self.url.trim_start_matches("http://").to_owned();
        self.emitter = Some(start_emitter(&self.server, &address).await.1);
    }

    fn front(&self) -> FrontEnd {
        FrontEnd::new(&self.url, TOKEN)
    }

    /// Serves one abort, as the gateway's adapter.
    async fn abort_run(&self) {
        let mut adapter = self.bus.serve_adapter(GATEWAY).await.unwrap();
        let Some(AdapterRequest::Abort(request)) = adapter.next().await else { panic!("no abort") };
        request.answer(&AbortResponse { aborted: true, error: None }).await;
    }

    /// A turn whose agent asks for a city, with the card on screen.
    async fn asking(&self) -> (Turn, Ask, Entry, SessionKey, String) {
        let mut turn = self.front().say("plan a trip");
        let (ask, (entry, session, run)) = tokio::join!(turn.asked(), async {
            let (session, run) = self.begin().await;
            (self.ask(&session, &run, "c1", cities).await, session, run)
        });
        (turn, ask.unwrap(), entry, session, run)
    }

    /// The next message that goes to the gateway.
    async fn sent(&self) -> ChatDelivery {
        let mut items = self.bus.chat_items(GATEWAY).await.unwrap();
        let item = tokio::time::timeout(WITHIN, items.next()).await.expect("nothing was sent").unwrap();
        item.done().await.unwrap();
        item
    }

    async fn put_out(&self, session: &SessionKey, run: &str, seq: u64, what: RunEvent) {
        let item = RunItem { schema: SCHEMA, session: session.clone(), run: run.into(), seq, what };
        self.bus.write_run(&item).await.unwrap();
    }

    /// The gateway takes a message and begins its run.
    async fn begin(&self) -> (SessionKey, String) {
        let item = self.sent().await.item;
        self.put_out(&item.session, &item.run, 0, RunEvent::Sent { into: None }).await;
        self.put_out(&item.session, &item.run, 0, RunEvent::Started).await;
        (item.session, item.run)
    }

    async fn begin_with(&self, first: &str) -> (SessionKey, String) {
        let (session, run) = self.begin().await;
        self.put_out(&session, &run, 1, text(first)).await;
        (session, run)
    }

    async fn ask(&self, session: &SessionKey, run: &str, call: &str, change: impl Fn(&mut Prompt)) -> Entry {
        let mut prompt = Prompt::free_text("Where to?");
        change(&mut prompt);
        let key = QuestionKey {
            gateway: session.gateway.clone(),
            session: session.session.clone(),
            run: run.into(),
            question: call_question_id(&session.gateway, &session.session, run, call),
        };
        let question = Question::new(vec![prompt]).unwrap();
        let now = Timestamp::now();
        let deadline = now.plus(Duration::from_secs(120));
        let (tool, trace) = ("request_user_input", Some(TRACEPARENT.into()));
        let entry = Entry::ask(key, Road::Plugin, tool, call, question, now, deadline, trace).unwrap();
        self.bus.write_asked(&entry).await.unwrap();
        entry
    }

    async fn entry(&self, entry: &Entry) -> Entry {
        self.bus.question(&entry.key).await.unwrap().unwrap().value
    }

    async fn decided(&self, entry: &Entry) -> Outcome {
        let decided = until("the decision", async || self.entry(entry).await.decision().cloned()).await;
        decided.outcome
    }

    async fn outcome_elsewhere(&self, entry: &Entry, surface: Surface, content: ReplyContent) {
        let by = Responder { user: "bob".into(), name: Some("Bob".into()), chat: None };
        let reply = Reply { id: format!("{surface:?}"), by, surface, content };
        let request = ReplyRequest { schema: SCHEMA, key: entry.key.clone(), reply };
        self.bus.outcome(&request).await.unwrap();
    }
}

async fn start_emitter(server: &NatsServer, listen: &str) -> (String, Running) {
    // The address of a killed emitter is free as soon as its listener is dropped.
    let listener = until("the port", async || TcpListener::bind(listen).await.ok()).await;
    let url = format!("http://{}", listener.local_addr().unwrap());
    let config = EmitterConfig {
        http: HttpConfig { listen: listener.local_addr().unwrap(), token: Redacted::new(TOKEN.into()) },
        gateway: GATEWAY.into(),
        stop_grace: Duration::from_millis(300),
        ping: Duration::from_secs(10),
        presence: Duration::from_millis(500),
    };
    let (health, shutdown) = (Health::new(&owui_emitter::SERVICE), CancellationToken::new());
    let bus = connect(server).await;
    let task = tokio::spawn(owui_emitter::serve(listener, config, bus, health.clone(), shutdown.clone()));
    until("the emitter", async || health.unmet().is_empty().then_some(())).await;
    (url, Running { shutdown, task })
}

fn cities(prompt: &mut Prompt) {
    prompt.options = ["Lisbon", "Oslo", "Kyoto"].map(Choice::label).into();
}

fn text(text: &str) -> RunEvent {
    RunEvent::Text { text: text.into() }
}

fn done(text: &str) -> RunEvent {
    RunEvent::Ended { how: RunEnd::Done, text: Some(text.into()) }
}

fn answered(index: usize) -> Outcome {
    Outcome::Answered { answers: [("answer".into(), Answer::option(index))].into() }
}

#[tokio::test]
async fn a_turn_streams_text_and_tools_and_ends_with_what_was_not_streamed() {
    let setup = Setup::new().await;
    let mut turn = setup.front().say("hello");
    let (_, (session, run)) = tokio::join!(turn.until(|l| l["type"] == "text"), async {
        let (session, run) = setup.begin().await;
        setup.put_out(&session, &run, 1, text("Good ")).await;
        (session, run)
    });
    let tool = RunEvent::Tool {
        call: "c1".into(),
        name: "read".into(),
        phase: ToolPhase::Start,
        title: Some("Reads a file".into()),
        data: Some(json!("not for people")),
        ok: None,
    };
    setup.put_out(&session, &run, 2, tool).await;
    setup.put_out(&session, &run, 3, done("Good morning")).await;
    assert_eq!(turn.end().await.unwrap(), "done");
    assert_eq!(turn.text(), "Good morning");
    let tool = turn.lines().find(|l| l["type"] == "tool").unwrap();
    assert_eq!((&tool["name"], &tool["phase"]), (&json!("read"), &json!("start")));
    assert!(tool.get("data").is_none());
}

#[tokio::test]
async fn a_question_is_asked_answered_and_the_run_goes_on() {
    let setup = Setup::new().await;
    let (mut turn, ask, entry, session, run) = setup.asking().await;
    assert_eq!((ask.surface.as_str(), ask.can_park), ("card", true));
    assert_eq!(ask.prompts[0].options[1].label, "Oslo");
    let answer = turn.reply(&ask, json!({"index": 1})).await.unwrap();
    assert_eq!(answer.result(), "saved");
    assert_eq!(setup.decided(&entry).await, answered(1));
    setup.put_out(&session, &run, 1, done("Off to Oslo")).await;
    assert_eq!(turn.end().await.unwrap(), "done");
    assert_eq!(turn.text(), "Off to Oslo");
    let withdraw = turn.lines().find(|l| l["type"] == "withdraw").unwrap();
    assert_eq!(withdraw["why"], Value::Null, "the chat has answered it itself");
}

#[tokio::test]
async fn a_reply_is_saved_only_after_the_router_wrote_it() {
    let mut setup = Setup::new().await;
    let front = setup.front();
    let mut turn = front.say("plan a trip");
    let (ask, entry) = tokio::join!(turn.asked(), async {
        let (session, run) = setup.begin().await;
        setup.ask(&session, &run, "c1", cities).await
    });
    let ask = ask.unwrap();
    setup.router.take().unwrap().stop().await;
    let decision = json!({"answers": ask.answer(json!({"index": 0}))});
    let refused = front.reply_once("r1", turn.message(), &ask, &decision).await.unwrap();
    assert_eq!((refused.status, refused.result()), (503, "not_saved"));
    assert!(setup.entry(&entry).await.is_pending());
    setup.start_router().await;
    let saved = front.reply_once("r1", turn.message(), &ask, &decision).await.unwrap();
    assert_eq!((saved.status, saved.result()), (200, "saved"));
    assert!(!setup.entry(&entry).await.is_pending());
    let again = front.reply_once("r1", turn.message(), &ask, &decision).await.unwrap();
    assert_eq!(again.result(), "saved", "for every repetition");
}

#[tokio::test]
async fn a_message_waits_for_the_router_and_is_sent_once() {
    let mut setup = Setup::without_router().await;
    let mut turn = setup.front().say("hello");
    let waits = turn.until(|l| l["type"] == "status").await.unwrap();
    assert!(waits["text"].as_str().unwrap().contains("not saved yet"), "{waits}");
    turn.cut();
    setup.start_router().await;
    let (_, (session, run)) = tokio::join!(turn.until(|l| l["type"] == "text"), async {
        let (session, run) = setup.begin().await;
        setup.put_out(&session, &run, 1, text("hi")).await;
        (session, run)
    });
    assert_eq!(setup.bus.session(&session).await.unwrap().unwrap().value.count, 1);
    setup.put_out(&session, &run, 2, done("hi")).await;
    assert_eq!(turn.end().await.unwrap(), "done");
    assert_eq!(turn.text(), "hi");
}

#[tokio::test]
async fn a_stream_that_breaks_continues_without_loss_or_repetition() {
    let mut setup = Setup::new().await;
    let mut turn = setup.front().say("count");
    let (_, (session, run)) = tokio::join!(turn.until(|l| l["type"] == "text"), setup.begin_with("0 "));
    for n in 1..40 {
        setup.put_out(&session, &run, n + 1, text(&format!("{n} "))).await;
        match n {
            10 | 30 => turn.cut(),
            20 => setup.restart_emitter().await,
            _ => drop(turn.until(|l| l["type"] == "text").await.unwrap()),
        }
    }
    let all: String = (0..40).map(|n| format!("{n} ")).collect();
    setup.put_out(&session, &run, 50, done(&format!("{all}end"))).await;
    assert_eq!(turn.end().await.unwrap(), "done");
    assert_eq!(turn.text(), format!("{all}end"));
}

#[tokio::test]
async fn a_question_on_screen_survives_a_restart_of_the_emitter() {
    let mut setup = Setup::new().await;
    let (mut turn, ask, entry, session, run) = setup.asking().await;
    setup.restart_emitter().await;
    let answer = turn.reply(&ask, json!({"index": 2})).await.unwrap();
    assert_eq!(answer.result(), "saved");
    assert_eq!(setup.decided(&entry).await, answered(2));
    setup.put_out(&session, &run, 1, done("Kyoto it is")).await;
    assert_eq!(turn.end().await.unwrap(), "done");
    assert_eq!(turn.text(), "Kyoto it is");
}

#[tokio::test]
async fn a_question_that_was_decided_while_the_stream_was_broken_is_withdrawn() {
    let mut setup = Setup::new().await;
    let mut turn = setup.front().say("plan a trip");
    let (_, (entry, session, run)) = tokio::join!(turn.asked(), async {
        let (session, run) = setup.begin().await;
        (setup.ask(&session, &run, "c1", cities).await, session, run)
    });
    turn.cut();
    setup.emitter.take().unwrap().kill().await;
    let answers = ReplyContent::Answers { answers: [("answer".into(), Answer::option(0))].into() };
    setup.outcome_elsewhere(&entry, Surface::Gateway, answers).await;
    let address = setup.url.trim_start_matches("http://").to_owned();
    setup.emitter = Some(start_emitter(&setup.server, &address).await.1);
    let withdraw = turn.until(|l| l["type"] == "withdraw").await.unwrap();
    assert_eq!(withdraw["why"], "Answered in the Control UI: Lisbon");
    setup.put_out(&session, &run, 1, done("ok")).await;
    assert_eq!(turn.end().await.unwrap(), "done");
}

#[tokio::test]
async fn an_outcome_from_elsewhere_takes_the_question_off_the_screen_and_a_late_reply_hears_who_won() {
    let setup = Setup::new().await;
    let mut turn = setup.front().say("plan a trip");
    let (ask, entry) = tokio::join!(turn.asked(), async {
        let (session, run) = setup.begin().await;
        setup.ask(&session, &run, "c1", cities).await
    });
    let ask = ask.unwrap();
    let answers = ReplyContent::Answers { answers: [("answer".into(), Answer::option(2))].into() };
    setup.outcome_elsewhere(&entry, Surface::Gateway, answers).await;
    let withdraw = turn.until(|l| l["type"] == "withdraw").await.unwrap();
    assert_eq!(withdraw["question"], json!(ask.question));
    assert_eq!(withdraw["why"], "Answered in the Control UI: Kyoto");
    let late = turn.reply(&ask, json!({"index": 0})).await.unwrap();
    assert_eq!((late.status, late.result()), (200, "already_answered"));
    assert_eq!(late.body["by"], "Bob");
    assert_eq!(late.body["message"], "Answered in the Control UI: Kyoto");
}

#[tokio::test]
async fn an_answer_that_the_gateway_overruled_is_told_in_the_chat() {
    let setup = Setup::new().await;
    let (mut turn, ask, entry, session, run) = setup.asking().await;
    turn.reply(&ask, json!({"index": 0})).await.unwrap();
    let stored = setup.bus.question(&entry.key).await.unwrap().unwrap();
    let theirs = Returned::Overruled { by: None, outcome: answered(1) };
    let closed = stored.value.close(theirs, Timestamp::now()).unwrap();
    setup.bus.write_returned(&closed, stored.revision, false).await.unwrap();
    let told = turn.until(|l| l["type"] == "text").await.unwrap();
    assert!(told["text"].as_str().unwrap().contains("Answered in the Control UI: Oslo"), "{told}");
    turn.cut();
    setup.put_out(&session, &run, 1, done("fine")).await;
    turn.end().await.unwrap();
    assert_eq!(turn.text().matches("Oslo").count(), 1, "{}", turn.text());
}

#[tokio::test]
async fn a_run_that_ends_before_it_is_known_who_answered_waits_for_that() {
    let setup = Setup::new().await;
    let (mut turn, ask, entry, session, run) = setup.asking().await;
    turn.reply(&ask, json!({"index": 0})).await.unwrap();
    setup.put_out(&session, &run, 1, done("off to Oslo")).await;
    turn.until(|l| l["type"] == "text").await.unwrap();
    let stored = setup.bus.question(&entry.key).await.unwrap().unwrap();
    let theirs = Returned::Overruled { by: None, outcome: answered(1) };
    let closed = stored.value.close(theirs, Timestamp::now()).unwrap();
    setup.bus.write_returned(&closed, stored.revision, false).await.unwrap();
    assert_eq!(turn.end().await.unwrap(), "done");
    assert!(turn.text().contains("Answered in the Control UI: Oslo"), "{}", turn.text());
}

#[tokio::test]
async fn another_users_reply_is_refused() {
    let setup = Setup::new().await;
    let front = setup.front();
    let mut turn = front.say("plan a trip");
    let (ask, entry) = tokio::join!(turn.asked(), async {
        let (session, run) = setup.begin().await;
        setup.ask(&session, &run, "c1", cities).await
    });
    let ask = ask.unwrap();
    let mallory = front.clone().as_user("mallory", "Mallory");
    let decision = json!({"answers": ask.answer(json!({"index": 0}))});
    let refused = mallory.reply(turn.message(), &ask, &decision).await.unwrap();
    assert_eq!((refused.status, refused.result()), (403, "wrong_user"));
    let elsewhere = front.clone().in_chat(Some("another-chat"));
    let refused = elsewhere.reply(turn.message(), &ask, &decision).await.unwrap();
    assert_eq!((refused.status, refused.result()), (404, "unknown_question"));
    assert!(setup.entry(&entry).await.is_pending());
    let refused = format!("{:#}", mallory.say("hello").end().await.unwrap_err());
    assert!(refused.contains("belongs to another user"), "{refused}");
    assert_eq!(turn.ended(), None, "a stranger takes over no stream");
}

#[tokio::test]
async fn an_answer_that_does_not_fit_names_field_and_limit_and_the_question_stays() {
    let setup = Setup::new().await;
    let mut turn = setup.front().say("plan a trip");
    let (ask, entry) = tokio::join!(turn.asked(), async {
        let (session, run) = setup.begin().await;
        setup.ask(&session, &run, "c1", cities).await
    });
    let ask = ask.unwrap();
    let refused = turn.reply(&ask, json!({"index": 3})).await.unwrap();
    assert_eq!((refused.status, refused.result()), (422, "invalid_answer"));
    let error = &refused.body["error"];
    assert_eq!(error["field"], "answers.answer");
    assert_eq!(error["limit"], "an option from 0 to 2");
    assert_eq!(error["value"], "3");
    assert!(setup.entry(&entry).await.is_pending());
}

#[tokio::test]
async fn a_secret_leaves_the_emitter_only_sealed() {
    let setup = Setup::new().await;
    let (open, seal) = OpenKey::generate().unwrap();
    setup.bus.write_seal_key(GATEWAY, &seal).await.unwrap();
    let front = setup.front();
    let mut turn = front.say("log in");
    let (ask, entry) = tokio::join!(turn.asked(), async {
        let (session, run) = setup.begin().await;
        setup.ask(&session, &run, "c1", |prompt| prompt.secret = true).await
    });
    let ask = ask.unwrap();
    assert_eq!((ask.surface.as_str(), ask.can_park), ("masked", false));
    let decision = json!({"answers": ask.answer(json!({"text": "hunter2 ✓"}))});
    let saved = front.reply_once("r1", turn.message(), &ask, &decision).await.unwrap();
    assert_eq!(saved.result(), "saved");
    let Outcome::Answered { answers } = setup.decided(&entry).await else { panic!("not answered") };
    let Answer::Sealed(sealed) = &answers["answer"] else { panic!("not sealed: {answers:?}") };
    assert_eq!(*open.open(sealed, &entry.key, "r1").unwrap(), "hunter2 ✓");
    assert!(!serde_json::to_string(&answers).unwrap().contains("hunter2"));
}

#[tokio::test]
async fn left_alone_is_stop() {
    let setup = Setup::new().await;
    let mut turn = setup.front().say("plan a trip");
    let (_, entry) = tokio::join!(turn.asked(), async {
        let (session, run) = setup.begin().await;
        setup.ask(&session, &run, "c1", cities).await
    });
    let left = turn.leave().await.unwrap();
    let (left, ()) = tokio::join!(left, setup.abort_run());
    assert_eq!(left.unwrap().status, 200);
    assert_eq!(setup.decided(&entry).await, Outcome::Cancelled { reason: CancelReason::Stop });
}

#[tokio::test]
async fn stop_outlives_an_emitter_that_dies_within_the_grace() {
    let mut setup = Setup::new().await;
    let mut turn = setup.front().say("plan a trip");
    let (_, entry) = tokio::join!(turn.asked(), async {
        let (session, run) = setup.begin().await;
        setup.ask(&session, &run, "c1", cities).await
    });
    let left = turn.leave().await.unwrap();
    setup.restart_emitter().await;
    let (left, ()) = tokio::join!(left, setup.abort_run());
    assert_eq!(left.unwrap().status, 200);
    assert_eq!(setup.decided(&entry).await, Outcome::Cancelled { reason: CancelReason::Stop });
}

#[tokio::test]
async fn left_and_a_new_turn_is_no_stop() {
    let setup = Setup::new().await;
    let front = setup.front();
    let mut turn = front.say("plan a trip");
    let (_, (entry, session, run)) = tokio::join!(turn.asked(), async {
        let (session, run) = setup.begin().await;
        (setup.ask(&session, &run, "c1", cities).await, session, run)
    });
    let left = std::time::Instant::now();
    let leaving = turn.leave().await.unwrap();
    // What nobody was told belongs to the next turn.
    setup.put_out(&session, &run, 1, text("Meanwhile. ")).await;
    let mut next = front.say("Oslo, please");
    let decided = tokio::select! {
        decided = setup.decided(&entry) => decided,
        line = async { loop { next.next().await.unwrap(); } } => line,
    };
    let own_words = Answer::text("Oslo, please");
    assert_eq!(decided, Outcome::Answered { answers: [("answer".into(), own_words)].into() });
    // Past the grace nothing was stopped: the run of the answered question still ends in this turn.
    until("the grace", async || (left.elapsed() > Duration::from_millis(600)).then_some(())).await;
    setup.put_out(&session, &run, 2, done("Meanwhile. Oslo it is")).await;
    assert_eq!(next.end().await.unwrap(), "done");
    assert_eq!(next.text(), "Meanwhile. Oslo it is");
    assert_eq!(leaving.await.unwrap().status, 200);
}

#[tokio::test]
async fn a_dropped_connection_is_not_stop() {
    let setup = Setup::new().await;
    let mut turn = setup.front().say("plan a trip");
    let (_, (entry, session, run)) = tokio::join!(turn.asked(), async {
        let (session, run) = setup.begin().await;
        (setup.ask(&session, &run, "c1", cities).await, session, run)
    });
    turn.cut();
    let cut = std::time::Instant::now();
    until("the grace", async || (cut.elapsed() > Duration::from_millis(900)).then_some(())).await;
    assert!(setup.entry(&entry).await.is_pending());
    setup.put_out(&session, &run, 1, done("done")).await;
    assert_eq!(turn.end().await.unwrap(), "done");
}

#[tokio::test]
async fn a_newer_stream_of_the_session_takes_over() {
    let setup = Setup::new().await;
    let front = setup.front();
    let mut old = front.say("one");
    let (_, (session, run)) = tokio::join!(old.until(|l| l["type"] == "text"), setup.begin_with("first "));
    let mut new = front.say("two");
    let (superseded, ()) = tokio::join!(old.end(), async {
        let steered = tokio::select! {
            item = setup.sent() => item.item,
            never = async { loop { new.next().await.unwrap(); } } => never,
        };
        setup.put_out(&session, &run, 2, text("second ")).await;
        setup.put_out(&session, &steered.run, 0, RunEvent::Sent { into: Some(run.clone()) }).await;
        let empty = RunEvent::Ended { how: RunEnd::Empty, text: None };
        setup.put_out(&session, &steered.run, 1, empty).await;
        setup.put_out(&session, &run, 3, text("third")).await;
        setup.put_out(&session, &run, 4, done("first second third.")).await;
    });
    assert_eq!(superseded.unwrap(), "superseded");
    assert_eq!(new.end().await.unwrap(), "done");
    assert_eq!((old.text(), new.text()), ("first ", "second third."));
}

#[tokio::test]
async fn a_caller_without_dialogs_gets_text_and_the_next_message_answers() {
    let setup = Setup::new().await;
    let front = setup.front().in_chat(None).able_to_show(&["text"]);
    let mut turn = front.say("plan a trip");
    let (end, (entry, session, run)) = tokio::join!(turn.end(), async {
        let (session, run) = setup.begin().await;
        (setup.ask(&session, &run, "c1", cities).await, session, run)
    });
    assert_eq!(end.unwrap(), "asked");
    assert!(turn.text().contains("**Where to?**\n1. Lisbon\n2. Oslo\n3. Kyoto"), "{}", turn.text());
    let delivered = StepKind::Delivered { surface: Surface::Text, chat: None };
    assert!(setup.entry(&entry).await.steps.iter().any(|step| step.what == delivered));
    let mut body = front.message("2");
    body["on_screen"] = Value::Null;
    let mut next = front.open(body);
    let decided = tokio::select! {
        decided = setup.decided(&entry) => decided,
        never = async { loop { next.next().await.unwrap(); } } => never,
    };
    assert_eq!(decided, answered(1));
    setup.put_out(&session, &run, 1, done("Oslo it is")).await;
    assert_eq!(next.end().await.unwrap(), "done");
    assert_eq!(next.text(), "Oslo it is");
}

#[tokio::test]
async fn a_parked_question_is_answered_on_its_durable_card_and_the_missed_text_follows() {
    let mut setup = Setup::new().await;
    let front = setup.front();
    let mut turn = front.say("plan a trip");
    let (card, (entry, session, run)) = tokio::join!(turn.asked(), async {
        let (session, run) = setup.begin().await;
        (setup.ask(&session, &run, "c1", cities).await, session, run)
    });
    assert_eq!(card.unwrap().surface, "card");
    front.presence(turn.message(), &json!({"looking": false, "park": true})).await.unwrap();
    let durable = turn.asked().await.unwrap();
    assert_eq!(durable.surface, "durable");
    turn.cut();
    setup.put_out(&session, &run, 1, text("Meanwhile. ")).await;
    setup.restart_emitter().await;
    let mut next = front.after_card(&durable, "answered", durable.answer(json!({"text": "3"})));
    let decided = tokio::select! {
        decided = setup.decided(&entry) => decided,
        never = async { loop { next.next().await.unwrap(); } } => never,
    };
    assert_eq!(decided, answered(2));
    setup.put_out(&session, &run, 2, done("Meanwhile. Kyoto it is")).await;
    assert_eq!(next.end().await.unwrap(), "done");
    assert_eq!(next.text(), "Meanwhile. Kyoto it is");
}

#[tokio::test]
async fn a_held_question_is_not_parked_while_its_user_looks_at_another_chat() {
    let setup = Setup::new().await;
    let front = setup.front();
    let mut turn = front.say("plan a trip");
    let (card, (session, run)) = tokio::join!(turn.asked(), async {
        let (session, run) = setup.begin().await;
        setup.ask(&session, &run, "c1", cities).await;
        (session, run)
    });
    card.unwrap();
    let held = json!({"looking": false, "other_chat": true, "park": false});
    front.presence(turn.message(), &held).await.unwrap();
    setup.put_out(&session, &run, 1, text("still here")).await;
    turn.until(|l| l["type"] == "text").await.unwrap();
    assert_eq!(turn.lines().filter(|l| l["type"] == "ask").count(), 1);
}

#[tokio::test]
async fn a_surface_that_was_refused_is_followed_by_the_next() {
    let setup = Setup::new().await;
    let front = setup.front();
    let mut turn = front.say("plan a trip");
    let (card, _) = tokio::join!(turn.until(|l| l["type"] == "ask"), async {
        let (session, run) = setup.begin().await;
        setup.ask(&session, &run, "c1", cities).await
    });
    let card = serde_json::from_value(card.unwrap()).unwrap();
    assert_eq!(front.shown(turn.message(), &card, "refused").await.unwrap().status, 204);
    let next = turn.until(|l| l["type"] == "ask").await.unwrap();
    assert_eq!(next["surface"], "durable");
}

#[tokio::test]
async fn another_users_card_answer_shows_and_changes_nothing() {
    let setup = Setup::new().await;
    let front = setup.front();
    let mut turn = front.say("plan a trip");
    let (_, entry) = tokio::join!(turn.asked(), async {
        let (session, run) = setup.begin_with("for alice only").await;
        setup.ask(&session, &run, "c1", cities).await
    });
    front.presence(turn.message(), &json!({"looking": false, "park": true})).await.unwrap();
    let durable = turn.until(|l| l["surface"] == "durable").await.unwrap();
    let durable = serde_json::from_value(durable).unwrap();
    for status in ["again", "answered"] {
        let mut stranger =
            front.clone().as_user("mallory", "Mallory").after_card(&durable, status, json!({}));
        let refused = format!("{:#}", stranger.end().await.unwrap_err());
        assert!(refused.contains("wrong_user"), "{refused}");
        assert_eq!(stranger.text(), "");
    }
    assert!(setup.entry(&entry).await.is_pending());
    assert_eq!(turn.ended(), None, "a stranger takes over no stream");
}

#[tokio::test]
async fn a_card_on_which_nothing_was_chosen_is_asked_again() {
    let setup = Setup::new().await;
    let front = setup.front();
    let mut turn = front.say("plan a trip");
    let (_, entry) = tokio::join!(turn.asked(), async {
        let (session, run) = setup.begin().await;
        setup.ask(&session, &run, "c1", cities).await
    });
    front.presence(turn.message(), &json!({"looking": false, "park": true})).await.unwrap();
    let durable = turn.asked().await.unwrap();
    turn.cut();
    let mut next = front.after_card(&durable, "again", json!({}));
    let again = next.asked().await.unwrap();
    assert_eq!((again.surface.as_str(), &again.question), ("card", &durable.question));
    assert_eq!(next.reply(&again, json!({"index": 0})).await.unwrap().result(), "saved");
    assert_eq!(setup.decided(&entry).await, answered(0));
}

#[tokio::test]
async fn a_correction_keeps_the_question_on_screen() {
    let setup = Setup::new().await;
    let front = setup.front();
    let mut turn = front.say("plan a trip");
    let (_, (entry, session, run)) = tokio::join!(turn.asked(), async {
        let (session, run) = setup.begin().await;
        (setup.ask(&session, &run, "c1", cities).await, session, run)
    });
    let mut next = front.say("7");
    let ask = next.asked().await.unwrap();
    assert!(next.text().contains("There is no option 7"), "{}", next.text());
    assert_eq!(next.reply(&ask, json!({"index": 1})).await.unwrap().result(), "saved");
    assert_eq!(setup.decided(&entry).await, answered(1));
    setup.put_out(&session, &run, 1, done("ok")).await;
    assert_eq!(next.end().await.unwrap(), "done");
}

#[tokio::test]
async fn an_outcome_that_came_while_nothing_was_open_is_told_in_the_next_turn_once() {
    let setup = Setup::new().await;
    let front = setup.front().in_chat(None).able_to_show(&["text"]);
    let mut turn = front.say("plan a trip");
    let (end, (entry, session, run)) = tokio::join!(turn.end(), async {
        let (session, run) = setup.begin().await;
        (setup.ask(&session, &run, "c1", cities).await, session, run)
    });
    assert_eq!(end.unwrap(), "asked");
    let cancelled = ReplyContent::Cancelled { reason: CancelReason::Operator };
    setup.outcome_elsewhere(&entry, Surface::Cli, cancelled).await;
    setup.put_out(&session, &run, 1, done("")).await;
    for told in [1, 0] {
        let mut next = front.say("and now?");
        tokio::join!(next.until(|l| l["type"] == "end"), async {
            let (session, run) = setup.begin().await;
            setup.put_out(&session, &run, 1, done("Well.")).await;
        })
        .0
        .unwrap();
        assert_eq!(next.text().matches("Cancelled by an operator").count(), told, "{}", next.text());
    }
}

#[tokio::test]
async fn a_stop_of_the_emitter_breaks_streams_off_without_an_end() {
    let mut setup = Setup::new().await;
    let mut turn = setup.front().say("hello");
    let (_, (session, run)) = tokio::join!(turn.until(|l| l["type"] == "text"), setup.begin_with("one "));
    setup.emitter.take().unwrap().stop().await;
    setup.put_out(&session, &run, 2, text("two ")).await;
    let address = setup.url.trim_start_matches("http://").to_owned();
    setup.emitter = Some(start_emitter(&setup.server, &address).await.1);
    setup.put_out(&session, &run, 3, done("one two three")).await;
    assert_eq!(turn.end().await.unwrap(), "done");
    assert_eq!(turn.text(), "one two three");
}

#[tokio::test]
async fn a_restart_of_the_bus_loses_neither_text_nor_question() {
    let setup = Setup::new().await;
    let mut turn = setup.front().say("plan a trip");
    let (ask, (entry, session, run)) = tokio::join!(turn.asked(), async {
        let (session, run) = setup.begin_with("one ").await;
        (setup.ask(&session, &run, "c1", cities).await, session, run)
    });
    setup.server.restart().await.unwrap();
    assert_eq!(turn.reply(&ask.unwrap(), json!({"index": 1})).await.unwrap().result(), "saved");
    assert_eq!(setup.decided(&entry).await, answered(1));
    // The last items of RUNS may be lost with the server; the run's whole text makes up for it.
    setup.put_out(&session, &run, 2, text("two ")).await;
    setup.put_out(&session, &run, 3, done("one two three")).await;
    assert_eq!(turn.end().await.unwrap(), "done");
    assert_eq!(turn.text(), "one two three");
}

#[tokio::test]
async fn any_replica_takes_what_concerns_a_stream_of_another() {
    let setup = Setup::new().await;
    let (url, other) = start_emitter(&setup.server, "127.0.0.1:0").await;
    let front = setup.front();
    let elsewhere = front.clone().at(&url);
    let mut turn = front.say("plan a trip");
    let (_, entry) = tokio::join!(turn.asked(), async {
        let (session, run) = setup.begin().await;
        setup.ask(&session, &run, "c1", cities).await
    });
    elsewhere.presence(turn.message(), &json!({"looking": false, "park": true})).await.unwrap();
    let durable = turn.until(|l| l["type"] == "ask").await.unwrap();
    assert_eq!(durable["surface"], "durable");
    let ask = serde_json::from_value(durable).unwrap();
    let decision = json!({"answers": json!({"answer": {"index": 2}})});
    let saved = elsewhere.reply(turn.message(), &ask, &decision).await.unwrap();
    assert_eq!(saved.result(), "saved");
    assert_eq!(setup.decided(&entry).await, answered(2));
    other.stop().await;
}

#[tokio::test]
async fn the_defaults_need_only_a_token() {
    let token = [("ASKBUS__EMITTER__HTTP__TOKEN".to_owned(), "t".to_owned())];
    let config = service_kit::config::load_from::<EmitterConfig>(&owui_emitter::SERVICE, None, token);
    let own = config.unwrap().service;
    assert_eq!((own.http.listen.to_string().as_str(), own.gateway.as_str()), ("127.0.0.1:7802", GATEWAY));
    assert_eq!((own.stop_grace, own.presence), (Duration::from_secs(2), Duration::from_secs(3)));
    let without = service_kit::config::load_from::<EmitterConfig>(&owui_emitter::SERVICE, None, []);
    assert!(without.unwrap_err().to_string().starts_with("emitter.http.token: missing"));
}

#[tokio::test]
async fn the_models_are_the_gateways_agents_and_absent_without_an_adapter() {
    let setup = Setup::new().await;
    let front = setup.front();
    let absent = front.models().await.unwrap();
    assert_eq!((absent.status, absent.result()), (503, "no_gateway"));
    let mut adapter = setup.bus.serve_adapter(GATEWAY).await.unwrap();
    let agents = async {
        let Some(AdapterRequest::Agents(request)) = adapter.next().await else { panic!("no request") };
        request.answer(&vec![Agent { id: "main".into(), name: "Main".into() }]).await;
    };
    let asked = tokio::time::timeout(WITHIN, async { tokio::join!(front.models(), agents) }).await;
    let (models, ()) = asked.expect("the adapter was not asked");
    assert_eq!(models.unwrap().body, json!({"models": [{"id": "openclaw/main", "name": "Main"}]}));
    assert_eq!(front.models().await.unwrap().status, 200, "known for a while");
}

#[tokio::test]
async fn every_span_about_a_question_is_in_its_trace() {
    let sink = OtlpSink::start().await.unwrap();
    let config = TelemetryConfig {
        otlp_endpoint: Some(sink.endpoint()),
        log_format: LogFormat::Text,
        log_filter: "off".into(),
        service_namespace: "test".into(),
        sample_ratio: 1.0,
    };
    // For the whole process: spans of other tests arrive too.
    let telemetry = telemetry::init(&[&owui_emitter::SERVICE, &ask_router::SERVICE], &config).unwrap();
    let setup = Setup::new().await;
    let front = setup.front();
    let mut turn = front.say("plan a trip");
    let (ask, entry) = tokio::join!(turn.asked(), async {
        let (session, run) = setup.begin().await;
        setup.ask(&session, &run, "c1", cities).await
    });
    let ask = ask.unwrap();
    assert_eq!(turn.reply(&ask, json!({"index": 1})).await.unwrap().result(), "saved");
    setup.decided(&entry).await;
    let names = ["process step", "send shown", "send reply"];
    let of_question =
        |span: &&testkit::otlp::Span| span.attributes.get("askbus.question") == Some(&ask.question);
    let spans = sink
        .wait_for(
            |spans| {
                let own = spans.iter().filter(of_question).filter(|span| span.service == "owui-emitter");
                names.iter().all(|name| own.clone().any(|span| span.name == *name))
            },
            WITHIN,
        )
        .await
        .unwrap();
    for span in spans.iter().filter(of_question) {
        assert_eq!(span.trace_id, TRACE, "{}", span.name);
    }
    assert!(spans.iter().any(|span| span.name == "receive turn"));
    telemetry.shutdown().await;
}

#[tokio::test]
async fn input_beyond_its_limits_is_refused_with_field_limit_and_value() {
    let setup = Setup::new().await;
    let front = setup.front();
    let table: Vec<(&str, Value, &str, Value)> = vec![
        ("message", json!("x".repeat(401)), "message", json!(400)),
        ("chat", json!("é".repeat(70)), "chat", json!(400)),
        ("text", json!("x".repeat(200_001)), "text", json!(200_000)),
        ("agent", json!("a:b"), "agent", Value::Null),
        ("after", json!("nonsense"), "after", Value::Null),
        ("text", Value::Null, "text", Value::Null),
        (
            "attachments",
            json!([{"name": "a.png", "mime": "image/png", "data": "A".repeat(6_000_001)}]),
            "attachments",
            json!(6_000_000),
        ),
        ("gateway", json!("nowhere"), "gateway", json!(GATEWAY)),
    ];
    for (field, value, named, limit) in table {
        let mut body = front.message("hello");
        body[field] = value;
        let refused = format!("{:#}", front.open(body).end().await.unwrap_err());
        let error: Value = serde_json::from_str(&refused[refused.find('{').unwrap()..]).unwrap();
        assert_eq!((&error["error"]["field"], &error["error"]["limit"]), (&json!(named), &limit), "{error}");
    }
    let stranger = FrontEnd::new(&setup.url, "wrong").say("hello").end().await.unwrap_err();
    assert!(format!("{stranger:#}").contains("401"), "{stranger:#}");
}
