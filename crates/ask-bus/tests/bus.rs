//! The bus on a real nats-server.

use std::time::Duration;

use ask_bus::seal::OpenKey;
use ask_bus::{AdapterRequest, Bus, BusError, BusOptions, Change, Lease, Provisioning, Stored, Watch};
use ask_core::SCHEMA;
use ask_core::entry::{Entry, Road, Verdict};
use ask_core::key::{QuestionKey, SessionKey};
use ask_core::outcome::{CancelReason, Returned};
use ask_core::question::{Prompt, Question};
use ask_core::reply::{Answer, Reply, ReplyContent, Responder};
use ask_core::session::SendBy;
use ask_core::surface::Surface;
use ask_core::time::Timestamp;
use ask_core::wire::{Agent, ChatItem, RunEvent, RunItem};
use testkit::nats::{NatsOptions, NatsServer};
use testkit::{WITHIN, until};

async fn provisioned() -> (NatsServer, Bus) {
    let server = NatsServer::start_with(NatsOptions { fsync: true, ..Default::default() }).await.unwrap();
    let bus = connect(&server).await;
    bus.provision(&Provisioning { gateways: vec!["g".into()], replicas: 1 }).await.unwrap();
    (server, bus)
}

async fn connect(server: &NatsServer) -> Bus {
    Bus::connect(BusOptions { url: server.url(), name: "test".into(), ..Default::default() }).await.unwrap()
}

fn key(question: &str) -> QuestionKey {
    format!("g.s.r.{question}").parse().unwrap()
}

fn entry(id: &str, secret: bool) -> Entry {
    let question = Question::new(vec![Prompt { secret, ..Prompt::free_text("What?") }]).unwrap();
    let now = Timestamp::now();
    let deadline = now.plus(Duration::from_secs(60));
    Entry::ask(key(id), Road::Plugin, "tool", "call", question, now, deadline, None).unwrap()
}

fn answered(entry: &Entry, answer: Answer) -> Entry {
    let by = Responder { user: "alice".into(), name: None, chat: None };
    let content = ReplyContent::Answers { answers: [("answer".into(), answer)].into() };
    let reply = Reply { id: "r1".into(), by, surface: Surface::Masked, content };
    let Verdict::Decide(next) = entry.reply(&reply, Timestamp::now()) else { panic!() };
    *next
}

fn text(run: &str, text: &str) -> RunItem {
    let what = RunEvent::Text { text: text.into() };
    RunItem { schema: SCHEMA, session: SessionKey::new("g", "s"), run: run.into(), seq: 1, what }
}

async fn next_put(watch: &mut Watch<Entry>) -> Stored<Entry> {
    let wait = async {
        loop {
            if let Some(stored) = watch.next().await.unwrap().into_stored() {
                return stored;
            }
        }
    };
    tokio::time::timeout(WITHIN, wait).await.expect("no entry came in time")
}

#[tokio::test]
async fn a_call_that_is_asked_again_finds_its_entry() {
    let (_server, bus) = provisioned().await;
    let first = bus.write_asked(&entry("q", false)).await.unwrap();
    let cancelled = first.value.cancel(CancelReason::Stop, "stop", Timestamp::now()).unwrap();
    bus.write_decided(&cancelled, first.revision).await.unwrap();
    let again = bus.write_asked(&entry("q", false)).await.unwrap();
    assert_eq!(again.value, cancelled);
}

#[tokio::test]
async fn n6_a_failed_compare_and_set_changes_nothing() {
    let (_server, bus) = provisioned().await;
    let first = bus.write_asked(&entry("q", false)).await.unwrap();
    let answered = answered(&first.value, Answer::text("yes"));
    bus.write_decided(&answered, first.revision).await.unwrap();
    let cancelled = first.value.cancel(CancelReason::Stop, "stop", Timestamp::now()).unwrap();
    let second = bus.write_decided(&cancelled, first.revision).await;
    assert!(matches!(second, Err(BusError::Conflict { .. })), "{second:?}");
    assert_eq!(bus.question(&key("q")).await.unwrap().unwrap().value, answered);
}

#[tokio::test]
async fn a_secret_is_unreachable_once_its_question_is_returned() {
    let (_server, bus) = provisioned().await;
    let (open, seal) = OpenKey::generate().unwrap();
    bus.write_seal_key("g", &seal).await.unwrap();
    let asked = bus.write_asked(&entry("q", true)).await.unwrap();
    let sealed = bus.seal_key("g").await.unwrap().unwrap().seal("hunter2", &key("q"), "r1").unwrap();
    let decided = answered(&asked.value, Answer::Sealed(sealed.clone()));
    let revision = bus.write_decided(&decided, asked.revision).await.unwrap();
    assert_eq!(*open.open(&sealed, &key("q"), "r1").unwrap(), "hunter2");
    let delivered = Returned::Delivered { proof: "acknowledged".into() };
    let closed = decided.close(delivered, Timestamp::now()).unwrap();
    bus.write_returned(&closed, revision, true).await.unwrap();
    let history = bus.question_history(&key("q")).await.unwrap();
    assert_eq!(history.len(), 1, "older values are rolled up");
    let left = serde_json::to_string(&history[0].0.value).unwrap();
    assert!(!left.contains(&sealed.ciphertext) && left.contains("hidden"));
}

#[tokio::test]
async fn n7_a_watch_loads_everything_and_misses_nothing_over_a_restart_of_the_server() {
    let (server, bus) = provisioned().await;
    bus.write_asked(&entry("q1", false)).await.unwrap();
    let mut watch = bus.watch_questions(Some("g"));
    assert_eq!(next_put(&mut watch).await.value.key, key("q1"));
    assert!(matches!(watch.next().await, Some(Change::Loaded { .. })));
    bus.write_asked(&entry("q2", false)).await.unwrap();
    assert_eq!(next_put(&mut watch).await.value.key, key("q2"));
    server.restart().await.unwrap();
    until("the server", async || bus.write_asked(&entry("q3", false)).await.ok()).await;
    while next_put(&mut watch).await.value.key != key("q3") {}
}

#[tokio::test]
async fn an_empty_bucket_counts_as_loaded() {
    let (_server, bus) = provisioned().await;
    let mut watch = bus.watch_sessions();
    assert!(matches!(watch.next().await, Some(Change::Loading)));
    assert!(matches!(watch.next().await, Some(Change::Loaded { .. })));
}

#[tokio::test]
async fn runs_are_replayed_and_followed_over_a_restart_of_the_server() {
    let (server, bus) = provisioned().await;
    let first = bus.write_run(&text("r", "a")).await.unwrap();
    let mut feed = bus.follow_runs().await.unwrap();
    assert_eq!(feed.begins.sequence, first);
    let second = bus.write_run(&text("r", "b")).await.unwrap();
    assert_eq!(feed.next().await.unwrap().sequence, second);
    let replayed = bus.replay_runs(&SessionKey::new("g", "s"), first).await.unwrap();
    assert_eq!(replayed.iter().map(|d| d.item.clone()).collect::<Vec<_>>(), [text("r", "b")]);
    assert_eq!(bus.replay_runs(&SessionKey::new("g", "other"), 0).await.unwrap(), []);
    server.restart().await.unwrap();
    until("the server", async || bus.write_run(&text("r", "c")).await.ok()).await;
    // What was written right before the kill may be lost; what comes after it never is.
    assert_eq!(feed.next().await.unwrap().item, text("r", "c"));
}

#[tokio::test]
async fn a_feed_misses_nothing_of_runs_whose_last_moments_were_lost_in_a_crash() {
    let (server, bus) = provisioned().await;
    let mut feed = bus.follow_runs().await.unwrap();
    let (store, before) = (server.store_dir(), tempfile::tempdir().unwrap());
    copy_folder(&store, before.path());
    for text_ in ["a", "b", "c"] {
        bus.write_run(&text("r", text_)).await.unwrap();
        assert_eq!(feed.next().await.unwrap().item, text("r", text_));
    }
    server.kill();
    std::fs::remove_dir_all(&store).unwrap();
    copy_folder(before.path(), &store);
    server.start_again().await.unwrap();
    // The numbers of what is lost come again, here before the feed is back.
    let other = connect(&server).await;
    for text_ in ["d", "e", "f", "g"] {
        until("the server", async || other.write_run(&text("r", text_)).await.ok()).await;
    }
    for text_ in ["d", "e", "f", "g"] {
        assert_eq!(feed.next().await.unwrap().item, text("r", text_));
    }
}

fn copy_folder(from: &std::path::Path, to: &std::path::Path) {
    std::fs::create_dir_all(to).unwrap();
    for item in std::fs::read_dir(from).unwrap() {
        let item = item.unwrap();
        let target = to.join(item.file_name());
        match item.file_type().unwrap().is_dir() {
            true => copy_folder(&item.path(), &target),
            false => drop(std::fs::copy(item.path(), target).unwrap()),
        }
    }
}

#[tokio::test]
async fn what_is_not_acknowledged_comes_again_and_what_is_does_not() {
    let (_server, bus) = provisioned().await;
    let item = |run: &str| ChatItem {
        schema: SCHEMA,
        session: SessionKey::new("g", "s"),
        message: run.into(),
        run: run.into(),
        number: 1,
        send: SendBy::ChatSend,
        text: "hello".into(),
        attachments: Vec::new(),
    };
    bus.write_chat(&item("r1")).await.unwrap();
    bus.write_chat(&item("r2")).await.unwrap();
    let mut items = bus.chat_items("g").await.unwrap();
    let first = items.next().await.unwrap();
    assert_eq!((first.item.run.as_str(), first.attempt), ("r1", 1));
    first.done().await.unwrap();
    let second = items.next().await.unwrap();
    second.later(Duration::from_millis(1)).await;
    let again = items.next().await.unwrap();
    assert_eq!((again.item.run.as_str(), again.attempt), ("r2", 2));
}

#[tokio::test]
async fn of_two_who_take_the_lease_one_gets_it() {
    let (_server, bus) = provisioned().await;
    let lease = |holder: &str| Lease { holder: holder.into(), epoch: 1, renewal: 0 };
    let revision = bus.write_lease("g", &lease("a"), 0).await.unwrap();
    assert!(matches!(bus.write_lease("g", &lease("b"), 0).await, Err(BusError::Conflict { .. })));
    assert_eq!(bus.lease("g").await.unwrap(), Some(Stored { value: lease("a"), revision }));
}

#[tokio::test]
async fn what_was_not_provisioned_is_named_and_never_made() {
    let server = NatsServer::start().await.unwrap();
    let bus = connect(&server).await;
    let missing = until("the missing stream", async || match bus.check().await {
        Err(error @ BusError::NotProvisioned { .. }) => Some(error.to_string()),
        _ => None,
    });
    assert_eq!(missing.await, "the stream KV_ask is missing on the nats server; run `askctl provision`");
    let written = bus.write_asked(&entry("q", false)).await;
    assert!(matches!(written, Err(BusError::NotProvisioned { .. })), "{written:?}");
}

#[tokio::test]
async fn provisioning_again_keeps_everything() {
    let (_server, bus) = provisioned().await;
    bus.write_asked(&entry("q", false)).await.unwrap();
    bus.provision(&Provisioning { gateways: vec!["g".into(), "h".into()], replicas: 1 }).await.unwrap();
    assert_eq!(bus.all_questions().await.unwrap().len(), 1);
    bus.chat_items("h").await.unwrap();
}

#[tokio::test]
async fn an_entry_that_can_not_be_read_is_parked_and_blocks_nothing() {
    let (server, bus) = provisioned().await;
    bus.write_asked(&entry("q1", false)).await.unwrap();
    let jetstream = async_nats::jetstream::new(async_nats::connect(server.url()).await.unwrap());
    jetstream.publish("$KV.ask.g.s.r.bad", "{nonsense".into()).await.unwrap().await.unwrap();
    bus.write_asked(&entry("q2", false)).await.unwrap();
    let mut watch = bus.watch_questions(None);
    assert_eq!(next_put(&mut watch).await.value.key, key("q1"));
    assert_eq!(next_put(&mut watch).await.value.key, key("q2"));
    let dead = jetstream.get_stream("DEAD").await.unwrap();
    let parked = dead.get_last_raw_message_by_subject("dead.KV.ask.g.s.r.bad").await.unwrap();
    assert_eq!(parked.payload.as_ref(), b"{nonsense");
    assert!(parked.headers.get("Askbus-Reason").is_some());
    // Everybody who starts meets it again, and every message of its session reads past it.
    let mut second = bus.watch_questions(None);
    assert_eq!(next_put(&mut second).await.value.key, key("q1"));
    assert_eq!(next_put(&mut second).await.value.key, key("q2"));
    assert_eq!(bus.questions_of(&key("q1").session_key()).await.unwrap().len(), 2);
    assert_eq!(bus.dead_letters().await.unwrap().len(), 1);
}

#[tokio::test]
async fn a_bucket_that_is_written_while_it_is_read_has_each_key_once() {
    let (server, bus) = provisioned().await;
    for n in 0..50 {
        bus.write_asked(&entry(&format!("q{n}"), false)).await.unwrap();
    }
    let jetstream = async_nats::jetstream::new(async_nats::connect(server.url()).await.unwrap());
    let value = serde_json::to_vec(&entry("q0", false)).unwrap();
    let writer = tokio::spawn(async move {
        loop {
            jetstream.publish("$KV.ask.g.s.r.q0", value.clone().into()).await.unwrap().await.unwrap();
        }
    });
    for _ in 0..100 {
        assert_eq!(bus.all_questions().await.unwrap().len(), 50);
    }
    writer.abort();
}

#[tokio::test]
async fn who_serves_is_reached_by_the_next_request_of_any_connection() {
    let (server, asker) = provisioned().await;
    let adapter = connect(&server).await;
    for gateway in (0..100).map(|n| format!("g{n}")) {
        let mut requests = adapter.serve_adapter(&gateway).await.unwrap();
        let answer = async {
            let Some(AdapterRequest::Agents(request)) = requests.next().await else { panic!("no request") };
            request.answer(&Vec::<Agent>::new()).await;
            Ok(())
        };
        let (listed, ()) = tokio::try_join!(asker.agents(&gateway), answer).unwrap();
        assert!(listed.is_empty());
    }
}

#[tokio::test]
async fn a_question_that_would_leave_no_room_for_its_answer_is_refused() {
    let (_server, bus) = provisioned().await;
    let mut large = entry("q", false);
    large.question.prompts[0].text = "x".repeat(600_000);
    let refused = bus.write_asked(&large).await.unwrap_err().to_string();
    assert!(refused.contains("524288"), "{refused}");
    assert_eq!(bus.all_questions().await.unwrap(), []);
}
