//! The router on a real nats-server.

use std::collections::BTreeSet;
use std::time::Duration;

use ask_bus::{AdapterRequest, Bus, BusOptions, FeedItem, Provisioning, QuestionFeed};
use ask_core::SCHEMA;
use ask_core::entry::{DecidedBy, Entry, Road, StepKind};
use ask_core::key::{QuestionKey, SessionKey, call_question_id};
use ask_core::limits::Limits;
use ask_core::outcome::{CancelReason, Delivered, Outcome, Returned, Undeliverable};
use ask_core::question::{Choice, Prompt, Question};
use ask_core::reply::{Answer, Reply, ReplyContent, Responder};
use ask_core::result::tool_result;
use ask_core::session::{MessageDecision, RoutedMessage, SendBy};
use ask_core::surface::Surface;
use ask_core::time::Timestamp;
use ask_core::wire::*;
use ask_router::{LatePolicy, RouterConfig, SERVICE};
use service_kit::Health;
use testkit::nats::NatsServer;
use testkit::{WITHIN, until};
use tokio::task::{JoinHandle, JoinSet};
use tokio_util::sync::CancellationToken;

struct Setup {
    server: NatsServer,
    bus: Bus,
    routers: Vec<(CancellationToken, JoinHandle<anyhow::Result<()>>)>,
}

async fn connect(server: &NatsServer) -> Bus {
    Bus::connect(BusOptions { url: server.url(), name: "test".into(), ..Default::default() }).await.unwrap()
}

impl Setup {
    async fn new() -> Self {
        Self::with(|_| ()).await
    }

    async fn with(change: impl FnOnce(&mut RouterConfig)) -> Self {
        let server = NatsServer::start().await.unwrap();
        let bus = connect(&server).await;
        bus.provision(&Provisioning { gateways: vec!["g".into()], replicas: 1 }).await.unwrap();
        let mut setup = Self { server, bus, routers: Vec::new() };
        setup.start_router_with(change).await;
        setup
    }

    async fn start_router(&mut self) {
        self.start_router_with(|_| ()).await;
    }

    async fn start_router_with(&mut self, change: impl FnOnce(&mut RouterConfig)) {
        let mut config = RouterConfig {
            delivery_within: Duration::from_millis(1500),
            stagger: Duration::from_millis(20),
            ..RouterConfig::defaults()
        };
        change(&mut config);
        let (health, shutdown) = (Health::new(&SERVICE), CancellationToken::new());
        let bus = connect(&self.server).await;
        let running = tokio::spawn(ask_router::run(config, bus, health.clone(), shutdown.clone()));
        until("the router", async || health.unmet().is_empty().then_some(())).await;
        self.routers.push((shutdown, running));
    }

    /// Ends a router at once, as a crash would: whatever it held in memory is gone.
    async fn kill_routers(&mut self) {
        for (_, running) in self.routers.drain(..) {
            running.abort();
            let _ = running.await;
        }
    }

    async fn ask(&self, call: &str, change: impl Fn(&mut Entry)) -> Entry {
        let mut entry = entry(call);
        change(&mut entry);
        self.bus.write_asked(&entry).await.unwrap();
        entry
    }

    /// Binds the session to alice with a message that starts a turn.
    async fn bind(&self) {
        let response = self.say("m0", "alice", "hello").await;
        assert!(matches!(response, SayResponse::Routed { .. }), "{response:?}");
    }

    async fn say(&self, message: &str, user: &str, text: &str) -> SayResponse {
        self.bus.say(&say(message, user, text)).await.unwrap()
    }

    async fn look(&self, looking: bool) {
        self.look_with(looking, surfaces()).await;
    }

    async fn look_with(&self, looking: bool, surfaces: BTreeSet<Surface>) {
        let presence = Presence { schema: SCHEMA, emitter: "e".into(), surfaces, looking, other_chat: false };
        self.bus.write_presence(&session(), "m0", &presence).await.unwrap();
    }

    async fn reply(&self, key: &QuestionKey, id: &str, user: &str, answer: Answer) -> ReplyResponse {
        self.bus.reply(&reply(key, id, user, answer)).await.unwrap()
    }

    async fn delivered(&self, key: &QuestionKey, on_record: bool) -> ShownResponse {
        let request = ShownRequest {
            schema: SCHEMA,
            key: key.clone(),
            surface: Surface::Card,
            chat: Some("chat".into()),
            event: ShownEvent::Delivered,
            on_record,
        };
        self.bus.shown(&request).await.unwrap()
    }

    async fn entry(&self, key: &QuestionKey) -> Entry {
        self.bus.question(key).await.unwrap().unwrap().value
    }

    async fn decided(&self, key: &QuestionKey) -> Entry {
        until("the decision", async || Some(self.entry(key).await).filter(|e| !e.is_pending())).await
    }

    async fn writes(&self, key: &QuestionKey) -> usize {
        self.bus.question_history(key).await.unwrap().len()
    }
}

async fn next_step(feed: &mut QuestionFeed) -> ShowStep {
    let wait = async {
        loop {
            if let FeedItem::Step(step) = feed.next().await.unwrap() {
                return step;
            }
        }
    };
    tokio::time::timeout(WITHIN, wait).await.expect("no step came in time")
}

fn entry(call: &str) -> Entry {
    let mut prompt = Prompt::free_text("Where to?");
    prompt.options = ["Lisbon", "Oslo", "Kyoto"].map(Choice::label).into();
    let key = QuestionKey {
        gateway: "g".into(),
        session: "s".into(),
        run: "r".into(),
        question: call_question_id("g", "s", "r", call),
    };
    let now = Timestamp::now();
    let question = Question::new(vec![prompt]).unwrap();
    let deadline = now.plus(Duration::from_secs(60));
    Entry::ask(key, Road::Plugin, "request_user_input", call, question, now, deadline, None).unwrap()
}

fn unlimited(config: &mut RouterConfig) {
    config.limits = Limits { per_run: 1_000, per_session: 1_000, per_user: 1_000 };
}

fn session() -> SessionKey {
    SessionKey::new("g", "s")
}

fn surfaces() -> BTreeSet<Surface> {
    [Surface::Card, Surface::Form, Surface::Masked, Surface::Durable, Surface::Text].into()
}

fn say(message: &str, user: &str, text: &str) -> SayRequest {
    SayRequest {
        schema: SCHEMA,
        session: session(),
        message: message.into(),
        user: user.into(),
        user_name: None,
        front: "openwebui".into(),
        chat: Some("chat".into()),
        surfaces: surfaces(),
        text: text.into(),
        attachments: Vec::new(),
        on_screen: None,
        seen: None,
        goes_on: false,
    }
}

fn reply(key: &QuestionKey, id: &str, user: &str, answer: Answer) -> ReplyRequest {
    let by = Responder { user: user.into(), name: None, chat: Some("chat".into()) };
    let content = ReplyContent::Answers { answers: [("answer".into(), answer)].into() };
    let reply = Reply { id: id.into(), by, surface: Surface::Card, content };
    ReplyRequest { schema: SCHEMA, key: key.clone(), reply }
}

fn outcome(entry: &Entry) -> &Outcome {
    &entry.decision().unwrap().outcome
}

#[tokio::test]
async fn a_life_at_machine_speed_takes_three_durable_writes() {
    let setup = Setup::new().await;
    setup.bind().await;
    setup.look(true).await;
    let mut feed = setup.bus.question_feed().await.unwrap();
    let asked = setup.ask("c1", |_| ()).await;
    next_step(&mut feed).await;
    assert_eq!(setup.delivered(&asked.key, false).await, ShownResponse::Noted { on_record: false });
    assert_eq!(setup.reply(&asked.key, "r1", "alice", Answer::option(1)).await, ReplyResponse::Saved);
    let decided = setup.bus.question(&asked.key).await.unwrap().unwrap();
    let closed =
        decided.value.close(Returned::Delivered { proof: "acknowledged".into() }, Timestamp::now()).unwrap();
    setup.bus.write_returned(&closed, decided.revision, false).await.unwrap();
    // The steps in between went along with the decision.
    let steps: Vec<&StepKind> = closed.steps.iter().map(|s| &s.what).collect();
    assert!(matches!(steps[..], [StepKind::Surface { .. }, StepKind::Delivered { .. }]), "{steps:?}");
    assert_eq!(closed.decision().unwrap().delivered, Delivered::Yes);
    // A second question whose steps are on record shows that nothing more was due for the first.
    let slow = setup.ask("c2", |_| ()).await;
    setup.delivered(&slow.key, false).await;
    until("the delivery", async || setup.entry(&slow.key).await.was_delivered().then_some(())).await;
    assert_eq!(setup.writes(&asked.key).await, 3);
    assert_eq!(setup.writes(&slow.key).await, 2);
}

#[tokio::test]
async fn steps_that_last_over_a_second_are_one_write_more() {
    let setup = Setup::new().await;
    setup.bind().await;
    setup.look(true).await;
    let asked = setup.ask("c1", |_| ()).await;
    setup.delivered(&asked.key, false).await;
    until("the delivery", async || setup.entry(&asked.key).await.was_delivered().then_some(())).await;
    setup.reply(&asked.key, "r1", "alice", Answer::option(1)).await;
    assert_eq!(setup.writes(&asked.key).await, 3, "asked, steps, decided");
}

#[tokio::test]
async fn a_question_is_shown_where_the_front_end_says_it_can() {
    let setup = Setup::new().await;
    setup.bind().await;
    let mut feed = setup.bus.question_feed().await.unwrap();
    let asked = setup.ask("c1", |_| ()).await;
    setup.look(true).await;
    let step = next_step(&mut feed).await;
    assert_eq!((step.key, step.surface, step.rule.as_str()), (asked.key, Surface::Card, "live_card"));
    setup.look(false).await;
    assert_eq!(next_step(&mut feed).await.surface, Surface::Durable);
}

#[tokio::test]
async fn a_surface_that_does_not_report_is_followed_by_the_next() {
    let setup = Setup::new().await;
    setup.bind().await;
    setup.look(true).await;
    let mut feed = setup.bus.question_feed().await.unwrap();
    let asked = setup.ask("c1", |_| ()).await;
    let surfaces = [next_step(&mut feed).await.surface, next_step(&mut feed).await.surface];
    assert_eq!(surfaces, [Surface::Card, Surface::Durable]);
    assert!(setup.entry(&asked.key).await.is_pending());
}

#[tokio::test]
async fn a_question_that_waits_for_its_place_on_the_screen_is_sent_to_no_other_surface() {
    let mut setup = Setup::new().await;
    setup.start_router().await;
    setup.bind().await;
    setup.look(true).await;
    let mut feed = setup.bus.question_feed().await.unwrap();
    let waits = setup.ask("c1", |_| ()).await;
    let (key, surface, event) = (waits.key.clone(), Surface::Card, ShownEvent::Waiting);
    let waiting = ShownRequest { schema: SCHEMA, key, surface, chat: None, event, on_record: true };
    assert_eq!(setup.bus.shown(&waiting).await.unwrap(), ShownResponse::Noted { on_record: true });
    // Another one, of which nothing is reported, goes on to its next surface meanwhile.
    let other = setup.ask("c2", |_| ()).await;
    let mut surfaces_of_waits = BTreeSet::new();
    loop {
        let step = next_step(&mut feed).await;
        if step.key == waits.key {
            surfaces_of_waits.insert(step.surface);
        } else if step.key == other.key && step.surface != Surface::Card {
            break;
        }
    }
    assert_eq!(surfaces_of_waits, [Surface::Card].into());
}

#[tokio::test]
async fn a_surface_that_does_not_report_is_followed_by_the_next_also_after_a_restart() {
    let mut setup = Setup::new().await;
    setup.bind().await;
    setup.look(true).await;
    let mut feed = setup.bus.question_feed().await.unwrap();
    let asked = setup.ask("c1", |_| ()).await;
    assert_eq!(next_step(&mut feed).await.surface, Surface::Card);
    // The card is on record as chosen, and nobody but the next router awaits its report.
    until("the step on record", async || (setup.writes(&asked.key).await == 2).then_some(())).await;
    setup.kill_routers().await;
    setup.start_router().await;
    while next_step(&mut feed).await.surface != Surface::Durable {}
}

#[tokio::test]
async fn surfaces_that_did_not_report_are_tried_in_turn_again_and_again() {
    let setup = Setup::new().await;
    setup.bind().await;
    setup.look(true).await;
    let mut feed = setup.bus.question_feed().await.unwrap();
    setup.ask("c1", |_| ()).await;
    let mut seen = Vec::new();
    while seen.iter().filter(|surface| **surface == Surface::Card).count() < 3 {
        let surface = next_step(&mut feed).await.surface;
        if seen.last() != Some(&surface) {
            seen.push(surface);
        }
    }
}

#[tokio::test]
async fn attachments_beside_an_answer_are_not_dropped_without_a_word() {
    let setup = Setup::new().await;
    setup.bind().await;
    let asked = setup.ask("c1", |_| ()).await;
    setup.delivered(&asked.key, true).await;
    let attachment = Attachment { name: "a.png".into(), mime: "image/png".into(), data: "AA==".into() };
    let message = SayRequest { attachments: vec![attachment], ..say("m1", "alice", "oslo") };
    let response = setup.bus.say(&message).await.unwrap();
    let SayResponse::Routed { decision: MessageDecision::Answer { .. }, note: Some(note), .. } = response
    else {
        panic!("{response:?}")
    };
    assert!(note.contains("no attachments"), "{note}");
    assert_eq!(outcome(&setup.decided(&asked.key).await).status(), "answered");
}

#[tokio::test]
async fn a_session_without_a_front_end_gets_undeliverable_at_once() {
    let setup = Setup::new().await;
    let asked = setup.ask("c1", |_| ()).await;
    let reason = Undeliverable::NoFrontEnd;
    assert_eq!(*outcome(&setup.decided(&asked.key).await), Outcome::Undeliverable { reason });
}

#[tokio::test]
async fn a_native_question_of_an_unbound_session_is_left_to_the_gateway() {
    let setup = Setup::new().await;
    let native = setup.ask("c1", |e| e.road = Road::Native).await;
    // The plugin's question behind it is decided, so the native one has been looked at.
    let plugin = setup.ask("c2", |_| ()).await;
    setup.decided(&plugin.key).await;
    assert!(setup.entry(&native.key).await.is_pending());
}

#[tokio::test]
async fn of_two_replies_the_first_wins_and_the_second_is_told_who_won() {
    let setup = Setup::new().await;
    setup.bind().await;
    let asked = setup.ask("c1", |_| ()).await;
    assert_eq!(setup.reply(&asked.key, "r1", "alice", Answer::option(0)).await, ReplyResponse::Saved);
    let second = setup.reply(&asked.key, "r2", "alice", Answer::option(1)).await;
    let ReplyResponse::Closed { by, surface, outcome, at, .. } = second else { panic!("{second:?}") };
    assert_eq!((by.as_str(), surface, outcome.status()), ("alice", Some(Surface::Card), "answered"));
    assert_eq!(at, setup.entry(&asked.key).await.decision().unwrap().at);
    assert_eq!(setup.reply(&asked.key, "r1", "alice", Answer::option(0)).await, ReplyResponse::Saved);
    assert_eq!(setup.entry(&asked.key).await.late_count, 1);
}

#[tokio::test]
async fn a_reply_of_another_user_is_refused_and_decides_nothing() {
    let setup = Setup::new().await;
    setup.bind().await;
    let asked = setup.ask("c1", |_| ()).await;
    assert_eq!(setup.reply(&asked.key, "r1", "mallory", Answer::option(0)).await, ReplyResponse::WrongUser);
    assert!(setup.entry(&asked.key).await.is_pending());
    let response = setup.say("m1", "mallory", "1").await;
    assert_eq!(response, SayResponse::WrongUser);
}

#[tokio::test]
async fn an_answer_that_does_not_fit_is_refused_and_the_question_stays() {
    let setup = Setup::new().await;
    setup.bind().await;
    let asked = setup.ask("c1", |_| ()).await;
    let response = setup.reply(&asked.key, "r1", "alice", Answer::option(7)).await;
    let ReplyResponse::Invalid { invalid } = response else { panic!("{response:?}") };
    assert_eq!(invalid.to_string(), "`answer` must be an option from 0 to 2, got: 7");
    assert!(setup.entry(&asked.key).await.is_pending());
}

#[tokio::test]
async fn a_front_end_can_not_pass_for_the_gateway() {
    let setup = Setup::new().await;
    setup.bind().await;
    let asked = setup.ask("c1", |_| ()).await;
    let mut request = reply(&asked.key, "gateway-1", "alice", Answer::option(0));
    request.reply.surface = Surface::Gateway;
    assert!(matches!(setup.bus.reply(&request).await.unwrap(), ReplyResponse::Invalid { .. }));
    assert!(setup.entry(&asked.key).await.is_pending());
}

#[tokio::test]
async fn a_repeated_stop_leaves_alone_what_came_after_it() {
    let setup = Setup::new().await;
    setup.bind().await;
    let stop = say("m1", "alice", "/stop");
    let mut adapter = setup.bus.serve_adapter("g").await.unwrap();
    let serve = async {
        let Some(AdapterRequest::Abort(abort)) = adapter.next().await else { panic!("no abort came") };
        abort.answer(&AbortResponse { aborted: true, error: None }).await;
    };
    let (first, ()) = tokio::join!(setup.bus.say(&stop), serve);
    assert!(matches!(first.unwrap(), SayResponse::Routed { decision: MessageDecision::Stop, .. }));
    setup.say("m2", "alice", "go on").await;
    let asked = setup.ask("c1", |_| ()).await;
    let again = setup.bus.say(&stop).await.unwrap();
    assert!(matches!(again, SayResponse::Routed { decision: MessageDecision::Stop, .. }));
    assert!(setup.entry(&asked.key).await.is_pending());
    assert_eq!(setup.bus.session(&session()).await.unwrap().unwrap().value.stopped_through, 2);
}

#[tokio::test]
async fn s2_a_stop_that_died_is_finished_before_the_next_message_has_any_effect() {
    let setup = Setup::new().await;
    setup.bind().await;
    let asked = setup.ask("c1", |_| ()).await;
    // A router has put the Stop on record, and died.
    let stored = setup.bus.session(&session()).await.unwrap().unwrap();
    let (id, decision) = ("m1".to_owned(), MessageDecision::Stop);
    let stop = RoutedMessage { id, at: Timestamp::now(), decision, rule: "stop_is_a_command".into() };
    setup.bus.write_session(&stored.value.routed(stop), stored.revision).await.unwrap();
    let not_yet = setup.say("m2", "alice", "go on").await;
    assert!(matches!(not_yet, SayResponse::Retry { .. }), "nobody aborted the run: {not_yet:?}");
    let mut adapter = setup.bus.serve_adapter("g").await.unwrap();
    let serve = async {
        let Some(AdapterRequest::Abort(abort)) = adapter.next().await else { panic!("no abort came") };
        abort.answer(&AbortResponse { aborted: true, error: None }).await;
    };
    let message = say("m2", "alice", "go on");
    let (said, ()) = tokio::join!(setup.bus.say(&message), serve);
    assert!(matches!(said.unwrap(), SayResponse::Routed { decision: MessageDecision::Message { .. }, .. }));
    let reason = CancelReason::Stop;
    assert_eq!(*outcome(&setup.entry(&asked.key).await), Outcome::Cancelled { reason });
    let session = setup.bus.session(&session()).await.unwrap().unwrap().value;
    assert_eq!((session.stopped_through, session.stop_done), (2, 2));
    // Its sender repeats it: there is nobody to abort anything, and nothing is.
    let again = setup.say("m1", "alice", "/stop").await;
    assert!(matches!(again, SayResponse::Routed { decision: MessageDecision::Stop, .. }), "{again:?}");
}

#[tokio::test]
async fn a_session_without_a_front_end_is_stopped_by_its_operator_alone() {
    let operator = |config: &mut RouterConfig| drop(config.operators.insert("g".into(), "olga".into()));
    let setup = Setup::with(operator).await;
    let asked = setup.ask("c1", |e| e.road = Road::Native).await;
    let stop = |user: &str| StopRequest { schema: SCHEMA, session: session(), user: user.into() };
    assert_eq!(setup.bus.stop(&stop("mallory")).await.unwrap(), StopResponse::WrongUser);
    assert!(setup.entry(&asked.key).await.is_pending());
    assert_ne!(setup.bus.stop(&stop("olga")).await.unwrap(), StopResponse::WrongUser);
    assert!(!setup.entry(&asked.key).await.is_pending());
}

#[tokio::test]
async fn a_router_whose_wall_clock_is_ahead_expires_nothing_early() {
    let setup = Setup::new().await;
    setup.bind().await;
    // To this router it was asked an hour ago, and had a minute.
    let asked_at = Timestamp::now().minus(Duration::from_secs(3_600));
    let asked = setup
        .ask("c1", |e| (e.asked_at, e.deadline) = (asked_at, asked_at.plus(Duration::from_secs(60))))
        .await;
    let soon = Timestamp::now().plus(Duration::from_millis(700));
    let other = setup.ask("c2", |e| e.deadline = soon).await;
    setup.decided(&other.key).await;
    assert!(setup.entry(&asked.key).await.is_pending());
    assert_eq!(setup.reply(&asked.key, "r1", "alice", Answer::option(0)).await, ReplyResponse::Saved);
}

#[tokio::test]
async fn what_a_person_has_seen_stays_answerable_when_its_surface_fails_later() {
    let setup = Setup::new().await;
    setup.bind().await;
    setup.look_with(true, [Surface::Card].into()).await;
    let asked = setup.ask("c1", |_| ()).await;
    setup.delivered(&asked.key, true).await;
    let event = ShownEvent::Refused { reason: "x".repeat(9_000) };
    let (key, surface) = (asked.key.clone(), Surface::Card);
    let failed = ShownRequest { schema: SCHEMA, key, surface, chat: None, event, on_record: true };
    setup.bus.shown(&failed).await.unwrap();
    let steps = setup.entry(&asked.key).await.steps;
    let is_short = |step: &StepKind| matches!(step, StepKind::Refused { reason, .. } if reason.len() < 500);
    assert!(steps.iter().any(|step| is_short(&step.what)), "{steps:?}");
    assert_eq!(setup.reply(&asked.key, "r1", "alice", Answer::option(0)).await, ReplyResponse::Saved);
}

async fn fell_due_while_no_router_ran() -> (Setup, Entry) {
    let mut setup = Setup::new().await;
    setup.bind().await;
    setup.kill_routers().await;
    let deadline = Timestamp::now().plus(Duration::from_millis(1));
    let asked = setup.ask("c1", |e| e.deadline = deadline).await;
    until("the deadline", async || (Timestamp::now() > deadline).then_some(())).await;
    (setup, asked)
}

#[tokio::test]
async fn a_click_on_what_fell_due_while_no_router_ran_is_late() {
    let (mut setup, asked) = fell_due_while_no_router_ran().await;
    let request = reply(&asked.key, "r1", "alice", Answer::option(0));
    let bus = setup.bus.clone();
    // It is there the moment that the router takes replies.
    let click = until("a router", async || bus.reply(&request).await.ok());
    let (late, ()) = tokio::join!(click, setup.start_router());
    assert!(matches!(late, ReplyResponse::Closed { outcome: Outcome::Expired, .. }), "{late:?}");
}

#[tokio::test]
async fn an_outcome_of_the_gateway_needs_no_owner() {
    let setup = Setup::new().await;
    let asked = setup.ask("c1", |e| e.road = Road::Native).await;
    let mut request = reply(&asked.key, "gateway-1", "control-ui", Answer::option(2));
    request.reply.surface = Surface::Gateway;
    assert_eq!(setup.bus.outcome(&request).await.unwrap(), ReplyResponse::Saved);
    let mut late = reply(&asked.key, "gateway-2", "control-ui", Answer::option(1));
    late.reply.surface = Surface::Gateway;
    assert!(matches!(setup.bus.outcome(&late).await.unwrap(), ReplyResponse::Closed { .. }));
    assert_eq!(setup.entry(&asked.key).await.late_count, 0);
}

#[tokio::test]
async fn exactly_one_of_many_racing_replies_wins_with_several_routers() {
    let mut setup = Setup::new().await;
    setup.start_router().await;
    setup.start_router().await;
    setup.bind().await;
    let asked = setup.ask("c1", |_| ()).await;
    let racers = (0..30).map(|n| {
        let (bus, request) =
            (setup.bus.clone(), reply(&asked.key, &format!("r{n}"), "alice", Answer::option(n % 3)));
        tokio::spawn(async move { bus.reply(&request).await.unwrap() })
    });
    let mut saved = 0;
    for racer in racers.collect::<Vec<_>>() {
        saved += usize::from(racer.await.unwrap() == ReplyResponse::Saved);
    }
    assert_eq!(saved, 1);
    assert_eq!(setup.entry(&asked.key).await.late_count, 29);
}

#[tokio::test]
async fn it_expires_at_its_deadline() {
    let mut setup = Setup::new().await;
    setup.bind().await;
    let deadline = Timestamp::now().plus(Duration::from_millis(700));
    let asked = setup.ask("c1", |e| e.deadline = deadline).await;
    let decided = setup.decided(&asked.key).await;
    assert_eq!(*outcome(&decided), Outcome::Expired);
    let late = decided.decision().unwrap().at.since(deadline);
    assert!(decided.decision().unwrap().at >= deadline && late < Duration::from_secs(5), "{late:?} late");
    // Who answers after that is told so, also by a router that knows nothing but the entry.
    setup.kill_routers().await;
    setup.start_router().await;
    let late = setup.reply(&asked.key, "r1", "alice", Answer::option(0)).await;
    let ReplyResponse::Closed { outcome, at, by, surface: None, .. } = late else { panic!("{late:?}") };
    assert_eq!((outcome, by.as_str()), (Outcome::Expired, "deadline"));
    assert_eq!(at, decided.decision().unwrap().at);
    assert_eq!(setup.entry(&asked.key).await.late_count, 1);
}

#[tokio::test]
async fn far_more_questions_than_are_decided_at_a_time_expire_once_each() {
    let mut setup = Setup::with(unlimited).await;
    setup.start_router_with(unlimited).await;
    let due = Timestamp::now().plus(Duration::from_secs(5));
    let mut asked = Vec::new();
    for n in 0..400 {
        let native = |entry: &mut Entry| (entry.road, entry.deadline) = (Road::Native, due);
        asked.push(setup.ask(&format!("c{n}"), native).await);
    }
    for entry in asked {
        assert_eq!(outcome(&setup.decided(&entry.key).await), &Outcome::Expired);
        assert_eq!(setup.writes(&entry.key).await, 2);
    }
}

#[tokio::test]
async fn what_fell_due_while_no_router_ran_expires_at_the_next_start() {
    let (mut setup, asked) = fell_due_while_no_router_ran().await;
    setup.start_router().await;
    assert_eq!(*outcome(&setup.decided(&asked.key).await), Outcome::Expired);
}

#[tokio::test]
async fn a_message_with_nothing_pending_goes_to_the_gateway_once() {
    let setup = Setup::new().await;
    for _ in 0..3 {
        let response = setup.say("m1", "alice", "hello").await;
        let SayResponse::Routed { decision: MessageDecision::Message { send, .. }, rule, count, .. } =
            response
        else {
            panic!("{response:?}")
        };
        assert_eq!((send, rule.as_str(), count), (SendBy::ChatSend, "nothing_pending", 1));
    }
    let mut items = setup.bus.chat_items("g").await.unwrap();
    let first = items.next().await.unwrap();
    assert_eq!((first.item.text.as_str(), first.item.number), ("hello", 1));
    first.done().await.unwrap();
    setup.say("m2", "alice", "again").await;
    assert_eq!(items.next().await.unwrap().item.text, "again");
}

#[tokio::test]
async fn a_message_answers_the_question_that_was_on_screen() {
    let setup = Setup::new().await;
    setup.bind().await;
    let asked = setup.ask("c1", |_| ()).await;
    assert_eq!(setup.delivered(&asked.key, true).await, ShownResponse::Noted { on_record: true });
    let response = setup.say("m1", "alice", "oslo").await;
    let question = asked.key.to_string();
    assert!(
        matches!(&response, SayResponse::Routed { decision: MessageDecision::Answer { question: q }, .. } if *q == question),
        "{response:?}"
    );
    let decided = setup.entry(&asked.key).await;
    let answers = [("answer".to_string(), Answer::option(1))].into();
    assert_eq!(*outcome(&decided), Outcome::Answered { answers });
    let by_rule = StepKind::Message { message: "m1".into(), rule: "the_one_shown_question".into() };
    assert!(decided.steps.iter().any(|step| step.what == by_rule), "{:?}", decided.steps);
    assert_eq!(setup.say("m1", "alice", "oslo").await, response, "a retry gets the same");
}

#[tokio::test]
async fn having_an_answer_continued_is_no_answer_whatever_waits() {
    let setup = Setup::new().await;
    setup.bind().await;
    let asked = setup.ask("c1", |_| ()).await;
    let (key, surface, event) = (asked.key.clone(), Surface::Text, ShownEvent::Delivered);
    let as_text = ShownRequest { schema: SCHEMA, key, surface, chat: None, event, on_record: true };
    setup.bus.shown(&as_text).await.unwrap();
    let request = SayRequest { goes_on: true, ..say("m1", "alice", "Continue.") };
    let said = setup.bus.say(&request).await.unwrap();
    assert!(
        matches!(&said, SayResponse::Routed { decision: MessageDecision::Message { .. }, .. }),
        "{said:?}"
    );
    assert!(setup.entry(&asked.key).await.is_pending());
}

#[tokio::test]
async fn a_question_that_was_never_shown_takes_no_message() {
    let setup = Setup::new().await;
    setup.bind().await;
    let asked = setup.ask("c1", |_| ()).await;
    let response = setup.say("m1", "alice", "oslo").await;
    assert!(matches!(response, SayResponse::Routed { decision: MessageDecision::Message { .. }, .. }));
    assert!(setup.entry(&asked.key).await.is_pending());
}

#[tokio::test]
async fn a_plain_message_never_goes_by_chat_send_while_a_native_question_is_open() {
    let setup = Setup::new().await;
    setup.bind().await;
    setup.ask("c1", |e| e.road = Road::Native).await;
    let response = setup.say("m1", "alice", "what is the weather").await;
    let SayResponse::Routed { decision: MessageDecision::Message { send, .. }, .. } = response else {
        panic!()
    };
    assert_eq!(send, SendBy::AgentMethod);
}

#[tokio::test]
async fn s2_an_answer_whose_question_was_decided_by_another_is_rewritten_to_late() {
    let mut setup = Setup::new().await;
    setup.bind().await;
    let asked = setup.ask("c1", |_| ()).await;
    setup.delivered(&asked.key, true).await;
    // A router died between the two writes: the session says "answer", the question is open.
    let stored = setup.bus.session(&session()).await.unwrap().unwrap();
    let message = ask_core::session::RoutedMessage {
        id: "m1".into(),
        at: Timestamp::now(),
        decision: MessageDecision::Answer { question: asked.key.to_string() },
        rule: "the_one_shown_question".into(),
    };
    setup.bus.write_session(&stored.value.routed(message), stored.revision).await.unwrap();
    setup.kill_routers().await;
    setup.start_router().await;
    assert_eq!(setup.reply(&asked.key, "r1", "alice", Answer::option(0)).await, ReplyResponse::Saved);
    let response = setup.say("m1", "alice", "oslo").await;
    let SayResponse::Routed { decision: MessageDecision::Late { .. }, note: Some(note), .. } = response
    else {
        panic!("{response:?}")
    };
    assert_eq!(note, "The question was answered already, by alice.");
    let stored = setup.bus.session(&session()).await.unwrap().unwrap().value;
    assert!(matches!(stored.messages.back().unwrap().decision, MessageDecision::Late { .. }));
}

#[tokio::test]
async fn stop_cancels_the_questions_and_holds_back_what_was_not_sent() {
    let setup = Setup::new().await;
    setup.bind().await;
    let asked = setup.ask("c1", |_| ()).await;
    let stop = StopRequest { schema: SCHEMA, session: session(), user: "alice".into() };
    let other = StopRequest { user: "mallory".into(), ..stop.clone() };
    assert_eq!(setup.bus.stop(&other).await.unwrap(), StopResponse::WrongUser);
    let not_yet = setup.bus.stop(&stop).await.unwrap();
    assert!(matches!(not_yet, StopResponse::Retry { .. }), "nobody aborted the run: {not_yet:?}");
    let reason = CancelReason::Stop;
    assert_eq!(*outcome(&setup.entry(&asked.key).await), Outcome::Cancelled { reason });
    assert_eq!(setup.bus.session(&session()).await.unwrap().unwrap().value.stopped_through, 1);
    let mut adapter = setup.bus.serve_adapter("g").await.unwrap();
    let serve = async {
        let Some(AdapterRequest::Abort(abort)) = adapter.next().await else { panic!("no abort came") };
        abort.answer(&AbortResponse { aborted: true, error: None }).await;
    };
    let (stopped, ()) = tokio::join!(setup.bus.stop(&stop), serve);
    assert_eq!(stopped.unwrap(), StopResponse::Stopped { cancelled: 0, aborted: true });
    // A click on what is left of its card changes nothing.
    let late = setup.reply(&asked.key, "r1", "alice", Answer::option(0)).await;
    let ReplyResponse::Closed { outcome: told, by, .. } = late else { panic!("{late:?}") };
    assert_eq!((told, by.as_str()), (Outcome::Cancelled { reason }, "stop"));
    assert_eq!(*outcome(&setup.entry(&asked.key).await), Outcome::Cancelled { reason });
}

#[tokio::test]
async fn a_pending_question_outlives_a_killed_router_and_a_restarted_server() {
    let mut setup = Setup::new().await;
    setup.bind().await;
    let asked = setup.ask("c1", |_| ()).await;
    setup.kill_routers().await;
    setup.server.restart().await.unwrap();
    until("the streams", async || setup.bus.check().await.ok()).await;
    setup.start_router().await;
    assert_eq!(setup.reply(&asked.key, "r1", "alice", Answer::option(2)).await, ReplyResponse::Saved);
}

#[tokio::test]
async fn without_a_router_a_reply_fails_at_once_instead_of_waiting() {
    let mut setup = Setup::new().await;
    setup.bind().await;
    let asked = setup.ask("c1", |_| ()).await;
    setup.kill_routers().await;
    let refused = until("the refusal", async || {
        let sent = setup.bus.reply(&reply(&asked.key, "r1", "alice", Answer::option(0))).await;
        matches!(sent, Err(ask_bus::BusError::NoResponders { .. })).then_some(())
    });
    refused.await;
    assert!(setup.entry(&asked.key).await.is_pending());
}

/// Answers a question and loses its call with the gateway.
async fn answered_and_lost(setup: &Setup, asked: &Entry) {
    assert_eq!(setup.reply(&asked.key, "r1", "alice", Answer::option(1)).await, ReplyResponse::Saved);
    let decided = setup.bus.question(&asked.key).await.unwrap().unwrap();
    let why = Returned::Unconfirmed { why: "gateway_restart".into() };
    let closed = decided.value.close(why, Timestamp::now()).unwrap();
    setup.bus.write_returned(&closed, decided.revision, false).await.unwrap();
}

fn is_from_record(entry: &Entry, first: &Entry) -> bool {
    matches!(&entry.decision().unwrap().by, DecidedBy::Record { question, .. } if *question == first.key.question)
}

#[tokio::test]
async fn an_unchanged_question_asked_again_after_its_call_was_lost_is_answered_from_the_record_once() {
    let setup = Setup::new().await;
    setup.bind().await;
    let first = setup.ask("c1", |_| ()).await;
    answered_and_lost(&setup, &first).await;
    let again = setup.ask("c2", |e| e.key.run = "r2".into()).await;
    let decided = setup.decided(&again.key).await;
    assert!(is_from_record(&decided, &first), "{decided:?}");
    assert_eq!(outcome(&decided), outcome(&setup.entry(&first.key).await));
    // Once more it is the person's to answer, and so is a question that was changed.
    let third = setup.ask("c3", |e| e.key.run = "r3".into()).await;
    let changed = setup.ask("c4", |e| e.question.prompts[0].text = "Where to now?".into()).await;
    setup.look(true).await;
    let shown = async |key| setup.entry(key).await.steps.first().cloned();
    until("both on screen", async || shown(&third.key).await.and(shown(&changed.key).await)).await;
    assert!(setup.entry(&third.key).await.is_pending() && setup.entry(&changed.key).await.is_pending());
}

#[tokio::test]
async fn a_question_that_was_asked_again_before_the_loss_was_known_is_answered_from_the_record() {
    let setup = Setup::new().await;
    setup.bind().await;
    let first = setup.ask("c1", |_| ()).await;
    setup.reply(&first.key, "r1", "alice", Answer::option(1)).await;
    let again = setup.ask("c2", |e| e.key.run = "r2".into()).await;
    let decided = setup.bus.question(&first.key).await.unwrap().unwrap();
    let why = Returned::Unconfirmed { why: "gateway_restart".into() };
    let closed = decided.value.close(why, Timestamp::now()).unwrap();
    setup.bus.write_returned(&closed, decided.revision, false).await.unwrap();
    assert!(is_from_record(&setup.decided(&again.key).await, &first));
}

#[tokio::test]
async fn what_a_dead_router_had_promised_from_the_record_is_given_by_the_next() {
    let mut setup = Setup::new().await;
    setup.bind().await;
    let first = setup.ask("c1", |_| ()).await;
    answered_and_lost(&setup, &first).await;
    setup.kill_routers().await;
    let again = setup.ask("c2", |e| e.key.run = "r2".into()).await;
    let lost = setup.bus.question(&first.key).await.unwrap().unwrap();
    setup.bus.write_given_again(&lost.value.give_again(&again).unwrap(), lost.revision).await.unwrap();
    setup.start_router().await;
    assert!(is_from_record(&setup.decided(&again.key).await, &first));
}

#[tokio::test]
async fn one_question_more_than_may_wait_is_undeliverable_at_once_and_the_others_stay() {
    let mut setup = Setup::with(|config| config.limits.per_run = 2).await;
    setup.bind().await;
    setup.look(true).await;
    let first = setup.ask("c1", |_| ()).await;
    let second = setup.ask("c2", |_| ()).await;
    let third = setup.ask("c3", |_| ()).await;
    let reason = Undeliverable::TooManyPending;
    assert_eq!(*outcome(&setup.decided(&third.key).await), Outcome::Undeliverable { reason });
    let shown = async |key| setup.entry(key).await.steps.first().cloned();
    until("both on record", async || shown(&first.key).await.and(shown(&second.key).await)).await;
    // A router that comes later and sees them in any order takes none of the others for too many.
    setup.kill_routers().await;
    setup.start_router_with(|config| config.limits.per_run = 1).await;
    setup.reply(&first.key, "r1", "alice", Answer::option(0)).await;
    assert!(setup.entry(&second.key).await.is_pending());
    let fourth = setup.ask("c4", |e| e.key.run = "r2".into()).await;
    until("the fourth on screen", async || setup.entry(&fourth.key).await.steps.first().cloned()).await;
}

#[tokio::test]
async fn a_user_has_one_limit_for_all_sessions() {
    let setup = Setup::with(|config| config.limits.per_user = 1).await;
    setup.bind().await;
    let other = SessionKey::new("g", "s2");
    let bind = SayRequest { session: other.clone(), ..say("m0", "alice", "hello") };
    setup.bus.say(&bind).await.unwrap();
    setup.look(true).await;
    let first = setup.ask("c1", |_| ()).await;
    until("the first on screen", async || setup.entry(&first.key).await.steps.first().cloned()).await;
    let second = setup.ask("c2", |e| e.key.session = "s2".into()).await;
    let decided = setup.decided(&second.key).await;
    assert!(
        matches!(&decided.decision().unwrap().by, DecidedBy::Rule { name } if name == "too_many_pending_for_the_user")
    );
}

#[tokio::test]
async fn a_late_answer_goes_to_the_agent_as_a_message_once_where_the_policy_says_so() {
    let setup = Setup::with(|config| config.late_replies = LatePolicy::SendAsMessage).await;
    setup.bind().await;
    let asked = setup.ask("c1", |_| ()).await;
    setup.reply(&asked.key, "r1", "alice", Answer::option(0)).await;
    for _ in 0..2 {
        let late = setup.reply(&asked.key, "r2", "alice", Answer::option(1)).await;
        assert!(matches!(late, ReplyResponse::Closed { sent_as_message: true, .. }), "{late:?}");
    }
    let mut items = setup.bus.chat_items("g").await.unwrap();
    let mut next = async || {
        let delivery = tokio::time::timeout(WITHIN, items.next()).await.unwrap().unwrap();
        delivery.done().await.unwrap();
        delivery.item.text.clone()
    };
    assert_eq!(next().await, "hello");
    assert_eq!(next().await, "Late answer to \"Where to?\": Oslo");
    setup.say("m9", "alice", "bye").await;
    assert_eq!(next().await, "bye");
}

#[tokio::test]
async fn a_late_answer_is_only_told_who_won_by_default() {
    let setup = Setup::new().await;
    setup.bind().await;
    let asked = setup.ask("c1", |_| ()).await;
    setup.reply(&asked.key, "r1", "alice", Answer::option(0)).await;
    let late = setup.reply(&asked.key, "r2", "alice", Answer::option(1)).await;
    assert!(matches!(late, ReplyResponse::Closed { sent_as_message: false, .. }), "{late:?}");
    assert_eq!(setup.bus.session(&session()).await.unwrap().unwrap().value.count, 1);
}

#[tokio::test]
async fn what_was_offered_to_nobody_was_never_shown_and_the_agent_is_not_told_that_nobody_answered() {
    let setup = Setup::new().await;
    setup.bind().await;
    // Until then missing presence is no evidence (F2).
    let settled = std::time::Instant::now() + Duration::from_millis(5_500);
    until("the router to know who is there", async || (std::time::Instant::now() > settled).then_some(()))
        .await;
    let deadline = Timestamp::now().plus(Duration::from_millis(700));
    let asked = setup.ask("c1", |e| e.deadline = deadline).await;
    let decided = setup.decided(&asked.key).await;
    assert_eq!(*outcome(&decided), Outcome::Undeliverable { reason: Undeliverable::NeverShown });
    assert_eq!(decided.decision().unwrap().delivered, Delivered::No);
    let told = tool_result(&decided).unwrap().text;
    assert!(told.contains("could not be shown") && !told.contains("did not respond"), "{told}");
    // A question that waits is shown to who comes.
    let mut feed = setup.bus.question_feed().await.unwrap();
    let waits = setup.ask("c2", |_| ()).await;
    setup.look(true).await;
    assert_eq!(next_step(&mut feed).await.key, waits.key);
}

#[tokio::test]
async fn a_question_that_every_surface_refused_is_undeliverable_and_the_next_message_goes_to_the_agent() {
    let setup = Setup::new().await;
    setup.bind().await;
    setup.look_with(true, [Surface::Card].into()).await;
    let mut feed = setup.bus.question_feed().await.unwrap();
    let asked = setup.ask("c1", |_| ()).await;
    assert_eq!(next_step(&mut feed).await.surface, Surface::Card);
    let refused = ShownRequest {
        schema: SCHEMA,
        key: asked.key.clone(),
        surface: Surface::Card,
        chat: Some("chat".into()),
        event: ShownEvent::Refused { reason: "no dialog here".into() },
        on_record: true,
    };
    setup.bus.shown(&refused).await.unwrap();
    let reason = Undeliverable::Refused;
    assert_eq!(*outcome(&setup.decided(&asked.key).await), Outcome::Undeliverable { reason });
    let said = setup.say("m1", "alice", "what is the weather?").await;
    let SayResponse::Routed { decision: MessageDecision::Message { .. }, rule, .. } = said else {
        panic!("{said:?}")
    };
    assert_eq!(rule, "nothing_pending");
}

#[tokio::test]
async fn a_secret_for_a_front_end_without_a_masked_input_is_undeliverable_and_never_declined() {
    let setup = Setup::new().await;
    setup.bind().await;
    setup.look_with(true, [Surface::Text].into()).await;
    let asked = setup
        .ask("c1", |e| {
            e.question = Question::new(vec![Prompt { secret: true, ..Prompt::free_text("Key?") }]).unwrap();
        })
        .await;
    let reason = Undeliverable::Unsupported;
    assert_eq!(*outcome(&setup.decided(&asked.key).await), Outcome::Undeliverable { reason });
}

#[tokio::test]
async fn a_partial_reply_to_a_form_is_corrected_once_and_the_whole_one_answers_once() {
    let setup = Setup::new().await;
    setup.bind().await;
    let named = |id: &str| Prompt { id: id.into(), ..Prompt::free_text(id) };
    let form = Question::new(vec![named("city"), named("budget")]).unwrap();
    let asked = setup.ask("c1", |e| e.question = form.clone()).await;
    setup.delivered(&asked.key, true).await;
    let partial = setup.say("m1", "alice", "Lisbon").await;
    let SayResponse::Routed { decision: MessageDecision::Clarify { text }, .. } = partial else {
        panic!("{partial:?}")
    };
    assert!(text.contains("budget") && !text.contains("city"), "{text}");
    assert!(setup.entry(&asked.key).await.is_pending());
    let whole = setup.say("m2", "alice", "Lisbon\n2000").await;
    assert!(
        matches!(whole, SayResponse::Routed { decision: MessageDecision::Answer { .. }, .. }),
        "{whole:?}"
    );
    assert_eq!(setup.say("m2", "alice", "Lisbon\n2000").await, whole);
    let entry = setup.entry(&asked.key).await;
    let answers = [("city".into(), Answer::text("Lisbon")), ("budget".into(), Answer::text("2000"))].into();
    assert_eq!((outcome(&entry), entry.late_count), (&Outcome::Answered { answers }, 0));
}

#[tokio::test]
async fn messages_of_one_session_that_come_at_once_are_each_routed_once_and_numbered() {
    let mut setup = Setup::new().await;
    setup.start_router().await;
    setup.start_router().await;
    setup.bind().await;
    let said = (1..30).map(|n| {
        let (bus, request) = (setup.bus.clone(), say(&format!("m{n}"), "alice", "hello"));
        tokio::spawn(async move { bus.say(&request).await.unwrap() })
    });
    for said in said.collect::<Vec<_>>() {
        assert!(matches!(said.await.unwrap(), SayResponse::Routed { .. }));
    }
    let mut items = setup.bus.chat_items("g").await.unwrap();
    let (mut runs, mut numbers) = (BTreeSet::new(), BTreeSet::new());
    for _ in 0..30 {
        let delivery = tokio::time::timeout(WITHIN, items.next()).await.unwrap().unwrap();
        delivery.done().await.unwrap();
        runs.insert(delivery.item.run.clone());
        numbers.insert(delivery.item.number);
    }
    assert_eq!((runs.len(), numbers), (30, (1..=30).collect()));
}

#[tokio::test]
async fn a_reply_right_after_the_question_is_never_lost_and_each_question_has_one_winner() {
    let mut setup = Setup::with(unlimited).await;
    setup.start_router_with(unlimited).await;
    setup.bind().await;
    let lives = (0..128).map(|n| {
        let bus = setup.bus.clone();
        let call = format!("c{n}");
        let entry = entry(&call);
        tokio::spawn(async move {
            bus.write_asked(&entry).await.unwrap();
            let mut replies = JoinSet::new();
            for r in 0..4 {
                let request = reply(&entry.key, &format!("r{r}"), "alice", Answer::option(r % 3));
                let bus = bus.clone();
                replies.spawn(async move { bus.reply(&request).await.unwrap() });
            }
            let told = replies.join_all().await;
            told.into_iter().filter(|response| *response == ReplyResponse::Saved).count()
        })
    });
    for life in lives.collect::<Vec<_>>() {
        assert_eq!(life.await.unwrap(), 1);
    }
    let entries = setup.bus.all_questions().await.unwrap();
    assert_eq!(entries.len(), 128);
    assert!(entries.iter().all(|e| outcome(&e.value).status() == "answered" && e.value.late_count == 3));
}

#[tokio::test]
async fn two_questions_of_one_run_each_get_their_own_answer_and_a_bare_one_is_refused() {
    let setup = Setup::new().await;
    setup.bind().await;
    let (first, second) = (setup.ask("c1", |_| ()).await, setup.ask("c2", |_| ()).await);
    for asked in [&first, &second] {
        setup.delivered(&asked.key, true).await;
    }
    let bare = setup.say("m1", "alice", "1").await;
    assert!(
        matches!(bare, SayResponse::Routed { decision: MessageDecision::Clarify { .. }, .. }),
        "{bare:?}"
    );
    assert!(setup.entry(&first.key).await.is_pending() && setup.entry(&second.key).await.is_pending());
    for (asked, index) in [(&second, 2), (&first, 0)] {
        assert_eq!(setup.reply(&asked.key, "r1", "alice", Answer::option(index)).await, ReplyResponse::Saved);
    }
    for (asked, index) in [(&first, 0), (&second, 2)] {
        let answers = [("answer".into(), Answer::option(index))].into();
        assert_eq!(*outcome(&setup.entry(&asked.key).await), Outcome::Answered { answers });
    }
}
