//! The router on a real nats-server.

use std::collections::BTreeSet;
use std::time::Duration;

use ask_bus::{AdapterRequest, Bus, BusOptions, FeedItem, Provisioning, QuestionFeed};
use ask_core::SCHEMA;
use ask_core::entry::{Entry, Road, StepKind};
use ask_core::key::{QuestionKey, SessionKey, call_question_id};
use ask_core::outcome::{CancelReason, Delivered, Outcome, Returned, Undeliverable};
use ask_core::question::{Choice, Prompt, Question};
use ask_core::reply::{Answer, Reply, ReplyContent, Responder};
use ask_core::session::{MessageDecision, SendBy};
use ask_core::surface::Surface;
use ask_core::time::Timestamp;
use ask_core::wire::*;
use ask_router::{RouterConfig, SERVICE};
use service_kit::Health;
use testkit::nats::NatsServer;
use testkit::{WITHIN, until};
use tokio::task::JoinHandle;
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
        let server = NatsServer::start().await.unwrap();
        let bus = connect(&server).await;
        bus.provision(&Provisioning { gateways: vec!["g".into()], replicas: 1 }).await.unwrap();
        let mut setup = Self { server, bus, routers: Vec::new() };
        setup.start_router().await;
        setup
    }

    async fn start_router(&mut self) {
        let config = RouterConfig {
            delivery_within: Duration::from_millis(1500),
            presence_for: Duration::from_secs(15),
            stagger: Duration::from_millis(20),
            operators: Default::default(),
        };
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
        let mut entry =
            Entry::ask(key, Road::Plugin, "request_user_input", call, question, now, deadline, None).unwrap();
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
        let presence = Presence {
            schema: SCHEMA,
            emitter: "e".into(),
            surfaces: surfaces(),
            looking,
            other_chat: false,
        };
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
    let ReplyResponse::Closed { by, surface, outcome, .. } = second else { panic!("{second:?}") };
    assert_eq!((by.as_str(), surface, outcome.status()), ("alice", Some(Surface::Card), "answered"));
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
    let setup = Setup::new().await;
    setup.bind().await;
    let deadline = Timestamp::now().plus(Duration::from_millis(700));
    let asked = setup.ask("c1", |e| e.deadline = deadline).await;
    let decided = setup.decided(&asked.key).await;
    assert_eq!(*outcome(&decided), Outcome::Expired);
    let late = decided.decision().unwrap().at.since(deadline);
    assert!(decided.decision().unwrap().at >= deadline && late < Duration::from_secs(5), "{late:?} late");
}

#[tokio::test]
async fn far_more_questions_than_are_decided_at_a_time_expire_once_each() {
    let mut setup = Setup::new().await;
    setup.start_router().await;
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
    let mut setup = Setup::new().await;
    setup.bind().await;
    setup.kill_routers().await;
    let deadline = Timestamp::now().plus(Duration::from_millis(1));
    let asked = setup.ask("c1", |e| e.deadline = deadline).await;
    until("the deadline", async || (Timestamp::now() > deadline).then_some(())).await;
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
    assert_eq!(setup.say("m1", "alice", "oslo").await, response, "a retry gets the same");
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
