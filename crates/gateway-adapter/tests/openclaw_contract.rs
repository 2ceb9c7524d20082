//! What the design leans on, proven on the real Gateway.

mod real_gateway;

use std::{sync::OnceLock, time::Duration};

use gateway_adapter::openclaw::{
    calls::{AgentTurn, ChatSend, ChatSent, QuestionRequest, QueueMode, Resolution, question_id},
    client::{self, Client, ConnectError, Opened, SCOPE_READ},
    connection::{Connection, Options},
    frames::{
        Answers, ChatState, Event, QUESTION_ALREADY_TERMINAL, QUESTION_INVALID_ANSWER, QUESTION_NOT_FOUND,
        QuestionPrompt, QuestionRecord, QuestionStatus, ToolFrame, ToolPhase,
    },
    identity::Identity,
};
use real_gateway::RealGateway;
use tokio::{sync::mpsc, time::timeout};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

/// On a busy machine of two cores the first run of a fresh Gateway was seen to take a minute.
const PATIENCE: Duration = Duration::from_secs(180);
const ASK: &str = r#"CALL ask_user {"questions":[{"id":"color","header":"Color","question":"Which color?","options":[{"label":"Red"},{"label":"Blue"}]}]}"#;

/// One Gateway for all tests that don't restart it; it ends with the test process.
fn shared() -> &'static RealGateway {
    static GATEWAY: OnceLock<RealGateway> = OnceLock::new();
    GATEWAY.get_or_init(|| {
        let (sender, gateway) = std::sync::mpsc::channel();
        // The scripted model needs a runtime that outlives each single test.
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Runtime::new().unwrap();
            runtime.block_on(async {
                sender.send(RealGateway::start("contract").await).unwrap();
                std::future::pending::<()>().await;
            });
        });
        gateway.recv().expect("gateway starts")
    })
}

/// A connection in a session of its own.
struct Chat {
    client: Client,
    events: mpsc::Receiver<Event>,
    session: String,
}

impl Chat {
    async fn open() -> Self {
        Self::on(shared()).await
    }

    async fn on(gateway: &RealGateway) -> Self {
        let opened = client::open(&gateway.request(gateway.url()), None).await.unwrap();
        Self::with(opened)
    }

    fn with(opened: Opened) -> Self {
        Self {
            client: opened.client,
            events: opened.events,
            session: format!("agent:main:contract-{}", Uuid::new_v4().simple()),
        }
    }

    fn message(&self, text: &str) -> ChatSend {
        ChatSend {
            session_key: self.session.clone(),
            message: text.to_owned(),
            idempotency_key: Uuid::new_v4().to_string(),
            queue_mode: None,
            attachments: vec![],
        }
    }

    /// Sends a message and returns its run.
    async fn send(&self, text: &str) -> String {
        let message = self.message(text);
        let sent = self.client.chat_send(&message).await.unwrap();
        assert_eq!(
            sent,
            ChatSent::Run {
                run_id: message.idempotency_key.clone(),
                status: "started".to_owned(),
                interrupted: false,
            }
        );
        message.idempotency_key
    }

    /// The first event that `pick` takes; all before it are gone.
    async fn until<T>(&mut self, what: &str, mut pick: impl FnMut(&Event) -> Option<T>) -> T {
        let found = timeout(PATIENCE, async {
            while let Some(event) = self.events.recv().await {
                if let Some(found) = pick(&event) {
                    return found;
                }
            }
            panic!("connection ended before: {what}");
        });
        found.await.unwrap_or_else(|_| panic!("not seen: {what}"))
    }

    async fn asked(&mut self) -> QuestionRecord {
        let session = self.session.clone();
        self.until("question.requested", |event| match event {
            Event::QuestionRequested(q) if q.session_key.as_ref() == Some(&session) => Some(q.clone()),
            _ => None,
        })
        .await
    }

    async fn resolved(&mut self, id: &str) -> (QuestionStatus, Option<Answers>) {
        self.until("question.resolved", |event| match event {
            Event::QuestionResolved(q) if q.id == id => Some((q.status, q.answers.clone())),
            _ => None,
        })
        .await
    }

    /// Text of the run's end; none where the run itself answered nothing.
    async fn ended(&mut self, run: &str) -> (ChatState, Option<String>) {
        self.until("end of the run", |event| match event {
            Event::Chat(chat) if chat.run_id == run => match chat.state {
                ChatState::Status | ChatState::Delta => None,
                state => Some((state, chat.text())),
            },
            _ => None,
        })
        .await
    }

    async fn is_pending(&self, id: &str) -> bool {
        let pending = self.client.question_list().await.unwrap();
        pending.iter().any(|question| question.id == id)
    }

    async fn answer(&self, question: &QuestionRecord, words: &str) {
        let resolution = Resolution::Answers(answers("color", words));
        let resolved =
            self.client.question_resolve(&question.id, &resolution, "alice", "reply-1").await.unwrap();
        assert_eq!(resolved.status, QuestionStatus::Answered);
    }
}

fn answers(prompt: &str, words: &str) -> Answers {
    Answers { answers: [(prompt.to_owned(), vec![words.to_owned()])].into() }
}

#[tokio::test]
#[ignore = "needs the real Gateway: ./dev e2e"]
async fn local_client_keeps_its_scopes_without_a_device() {
    let chat = Chat::open().await;
    let hello = chat.client.hello();
    assert_eq!(hello.protocol, 4);
    assert_eq!(hello.server.version, "2026.9.6");
    assert_eq!(hello.auth.device_token, None);
    for scope in client::REQUIRED_SCOPES {
        assert!(hello.auth.scopes.contains(&scope.to_owned()), "{scope}");
    }
    let agents = chat.client.agents_list().await.unwrap();
    assert_eq!(agents.default_id, "main");
    assert!(agents.agents.iter().any(|agent| agent.id == "main"));
}

#[tokio::test]
#[ignore = "needs the real Gateway: ./dev e2e"]
async fn a_device_gets_a_token_that_works_alone() {
    let gateway = shared();
    let path = gateway.folder().join("device.json");
    let mut identity = Identity::load_or_create(&path).unwrap();
    let mut request = gateway.request(gateway.url());
    let opened = client::open(&request, Some(&mut identity)).await.unwrap();
    assert!(opened.client.hello().auth.device_token.is_some());

    let mut again = Identity::load_or_create(&path).unwrap();
    assert_eq!(again.device_token(), identity.device_token());
    request.token = None;
    client::open(&request, Some(&mut again)).await.unwrap();

    again.set_device_token(Some("forged".to_owned())).unwrap();
    let error = client::open(&request, Some(&mut again)).await.err().unwrap();
    assert!(matches!(error, ConnectError::DeviceToken(_)), "{error:?}");
}

#[tokio::test]
#[ignore = "needs the real Gateway: ./dev e2e"]
async fn refused_connects_name_what_to_do() {
    let gateway = shared();
    let mut request = gateway.request(gateway.url());

    request.token = Some("wrong".to_owned());
    let error = client::open(&request, None).await.err().unwrap();
    assert!(matches!(error, ConnectError::Token(_)), "{error:?}");
    assert!(error.to_string().contains("adapter.gateway.token"), "{error}");

    request.token = None;
    let error = client::open(&request, None).await.err().unwrap();
    println!("without a token: {error}");
    assert!(!error.is_transient(), "{error:?}");
}

#[tokio::test]
#[ignore = "needs the real Gateway: ./dev e2e"]
async fn a_request_beyond_the_scopes_is_refused() {
    let gateway = shared();
    let mut request = gateway.request(gateway.url());
    request.scopes = vec![SCOPE_READ.to_owned()];
    let chat = Chat::with(client::open(&request, None).await.unwrap());
    let error = chat.client.chat_send(&chat.message("hi")).await.unwrap_err();
    println!("{error}");
    assert!(!error.is_retryable() && !error.may_have_happened());
    assert!(error.to_string().contains("operator.write"), "{error}");
}

#[tokio::test]
#[ignore = "needs the real Gateway: ./dev e2e"]
async fn question_id_follows_from_run_and_call() {
    let mut chat = Chat::open().await;
    let run = chat.send(ASK).await;
    let call: ToolFrame = chat
        .until("start of ask_user", |event| match event {
            Event::Agent(agent) if agent.run_id == run => {
                agent.tool().filter(|tool| tool.phase == ToolPhase::Start && tool.name == "ask_user")
            }
            _ => None,
        })
        .await;
    let question = chat.asked().await;
    assert_eq!(question.id, question_id(&run, &call.tool_call_id));
    assert_eq!(question.run_id.as_deref(), Some(run.as_str()));
    assert_eq!(question.questions[0].options[1].label, "Blue");
    chat.answer(&question, "Blue").await;
    let (state, text) = chat.ended(&run).await;
    assert_eq!(state, ChatState::Final);
    assert!(text.unwrap().contains("Color: Blue"));
}

#[tokio::test]
#[ignore = "needs the real Gateway: ./dev e2e"]
async fn a_question_takes_one_answer_and_says_why_it_takes_no_other() {
    let mut chat = Chat::open().await;
    let run = chat.send(ASK).await;
    let question = chat.asked().await;
    let resolve = async |id: &str, resolution: Resolution, by: &str| {
        chat.client.question_resolve(id, &resolution, by, by).await
    };

    let nonsense = Resolution::Answers(answers("size", "XL"));
    let error = resolve(&question.id, nonsense, "bob").await.unwrap_err();
    assert_eq!(error.reason(), Some(QUESTION_INVALID_ANSWER));
    assert!(chat.is_pending(&question.id).await);

    let first = Resolution::Answers(answers("color", "my own words"));
    resolve(&question.id, first, "reply-1").await.unwrap();
    let late = Resolution::Answers(answers("color", "Red"));
    for again in [late, Resolution::Cancel] {
        let error = resolve(&question.id, again, "reply-2").await.unwrap_err();
        assert_eq!(error.reason(), Some(QUESTION_ALREADY_TERMINAL));
    }
    let settled = chat.client.question_get(&question.id).await.unwrap();
    assert_eq!(settled.status, QuestionStatus::Answered);
    assert_eq!(settled.resolved_by.as_deref(), Some("reply-1"));
    assert_eq!(settled.answers, Some(answers("color", "my own words")));

    let error = resolve("ask_unknown", Resolution::Cancel, "x").await.unwrap_err();
    assert_eq!(error.reason(), Some(QUESTION_NOT_FOUND));
    let text = chat.ended(&run).await.1.unwrap();
    assert!(text.contains("my own words"), "{text}");
}

#[tokio::test]
#[ignore = "needs the real Gateway: ./dev e2e"]
async fn a_cancelled_question_lets_the_run_go_on() {
    let mut chat = Chat::open().await;
    let run = chat.send(ASK).await;
    let question = chat.asked().await;
    let resolved =
        chat.client.question_resolve(&question.id, &Resolution::Cancel, "reply-1", "reply-1").await.unwrap();
    assert_eq!(resolved.status, QuestionStatus::Cancelled);
    let settled = chat.client.question_get(&question.id).await.unwrap();
    assert_eq!(settled.resolved_by.as_deref(), Some("reply-1"));
    let (state, text) = chat.ended(&run).await;
    assert_eq!(state, ChatState::Final);
    assert!(text.unwrap().contains("no_answer"));
}

#[tokio::test]
#[ignore = "needs the real Gateway: ./dev e2e"]
async fn chat_send_answers_a_pending_question_whatever_its_queue_mode() {
    for mode in [None, Some(QueueMode::Steer), Some(QueueMode::Followup), Some(QueueMode::Collect)] {
        let mut chat = Chat::open().await;
        let run = chat.send(ASK).await;
        let question = chat.asked().await;
        let mut message = chat.message("Tell me a joke");
        message.queue_mode = mode;
        chat.client.chat_send(&message).await.unwrap();
        let outcome = chat.resolved(&question.id).await;
        let taken = answers("color", "Tell me a joke");
        assert_eq!(outcome, (QuestionStatus::Answered, Some(taken)), "{mode:?}");
        let text = chat.ended(&run).await.1.unwrap();
        assert!(text.contains("Tell me a joke"), "{mode:?}: {text}");
    }
}

#[tokio::test]
#[ignore = "needs the real Gateway: ./dev e2e"]
async fn the_agent_method_leaves_a_pending_question_alone_and_runs_afterwards() {
    let mut chat = Chat::open().await;
    let run = chat.send(ASK).await;
    let question = chat.asked().await;
    let turn = AgentTurn {
        session_key: chat.session.clone(),
        message: "Tell me a joke".to_owned(),
        idempotency_key: Uuid::new_v4().to_string(),
        attachments: Vec::new(),
    };
    let accepted = chat.client.agent(&turn).await.unwrap();
    assert_eq!(accepted.run_id, turn.idempotency_key);
    assert!(chat.is_pending(&question.id).await);
    chat.answer(&question, "Red").await;
    let (_, text) = chat.ended(&run).await;
    assert!(text.unwrap().contains("Color: Red"));
    let (state, text) = chat.ended(&accepted.run_id).await;
    assert_eq!(state, ChatState::Final);
    assert!(text.unwrap().contains("Tell me a joke"));
}

#[tokio::test]
#[ignore = "needs the real Gateway: ./dev e2e"]
async fn a_message_sent_twice_runs_once_and_history_knows_its_key() {
    let mut chat = Chat::open().await;
    let message = chat.message("hello there");
    let key = message.idempotency_key.clone();
    chat.client.chat_send(&message).await.unwrap();
    chat.ended(&key).await;

    let other = client::open(&shared().request(shared().url()), None).await.unwrap();
    let again = other.client.chat_send(&message).await.unwrap();
    let done = ChatSent::Run { run_id: key.clone(), status: "ok".to_owned(), interrupted: false };
    assert_eq!(again, done);
    let history = chat.client.chat_history(&chat.session, 100).await.unwrap();
    let rows: Vec<_> = history.messages.iter().map(|row| row.role()).collect();
    assert_eq!(rows, ["user", "assistant"]);
    assert_eq!(history.messages[0].idempotency_key(), Some(key.as_str()));
    assert_eq!(history.messages[1].run_id(), Some(key.as_str()));
    assert!(history.knows(&key));
    assert!(!history.knows("another"));
}

#[tokio::test]
#[ignore = "needs the real Gateway: ./dev e2e"]
async fn subscribed_connections_see_the_tool_frames_of_others() {
    let mut chat = Chat::open().await;
    let mut other = Chat::open().await;
    other.client.sessions_subscribe().await.unwrap();
    let run = chat.send(ASK).await;
    let frame = |event: &Event, phase: ToolPhase| match event {
        Event::SessionTool(agent) if agent.run_id == run => agent.tool().filter(|tool| tool.phase == phase),
        _ => None,
    };
    let start = other.until("start", |e| frame(e, ToolPhase::Start)).await;
    assert_eq!(start.name, "ask_user");
    assert_eq!(start.args["questions"][0]["question"], "Which color?");

    let history = other.client.chat_history(&chat.session, 50).await.unwrap();
    assert!(history.session_info.has_active_run);
    assert_eq!(history.in_flight_run.unwrap().run_id, run);

    let question = chat.asked().await;
    other.answer(&question, "Red").await;
    let result = other.until("result", |e| frame(e, ToolPhase::Result)).await;
    assert_eq!(result.tool_call_id, start.tool_call_id);
    assert!(!result.is_error);
    assert_eq!(result.result["details"]["status"], "answered");

    chat.ended(&run).await;
    let history = other.client.chat_history(&chat.session, 50).await.unwrap();
    let row = history.tool_result(&start.tool_call_id).unwrap();
    assert!(row.text().contains("Color: Red"), "{}", row.text());
}

#[tokio::test]
#[ignore = "needs the real Gateway: ./dev e2e"]
async fn abort_cancels_the_question_and_a_second_abort_finds_nothing() {
    let mut chat = Chat::open().await;
    let run = chat.send(ASK).await;
    let question = chat.asked().await;
    let aborted = chat.client.chat_abort(&chat.session, Some(&run)).await.unwrap();
    assert_eq!((aborted.aborted, aborted.run_ids), (true, vec![run.clone()]));
    let (mut ended, mut cancelled) = (false, false);
    chat.until("end of run and question", |event| {
        match event {
            Event::Chat(chat) if chat.run_id == run => ended |= chat.state == ChatState::Aborted,
            Event::QuestionResolved(q) if q.id == question.id => {
                cancelled |= q.status == QuestionStatus::Cancelled;
            }
            _ => {}
        }
        (ended && cancelled).then_some(())
    })
    .await;
    let again = chat.client.chat_abort(&chat.session, None).await.unwrap();
    assert_eq!((again.aborted, again.run_ids.len()), (false, 0));
}

#[tokio::test]
#[ignore = "needs the real Gateway: ./dev e2e"]
async fn a_stop_command_is_told_from_a_message() {
    let mut chat = Chat::open().await;
    let run = chat.send(ASK).await;
    chat.asked().await;
    let sent = chat.client.chat_send(&chat.message("/stop")).await.unwrap();
    assert_eq!(sent, ChatSent::Stopped { run_ids: vec![run.clone()] });
    assert_eq!(chat.ended(&run).await.0, ChatState::Aborted);
}

#[tokio::test]
#[ignore = "needs the real Gateway: ./dev e2e"]
async fn a_question_from_outside_may_be_free_text_and_is_seen_by_others() {
    let mut chat = Chat::open().await;
    let other = Chat::open().await;
    let request = QuestionRequest {
        id: None,
        questions: vec![QuestionPrompt {
            question_id: "color".to_owned(),
            header: "Color".to_owned(),
            question: "Which color?".to_owned(),
            is_other: true,
            ..QuestionPrompt::default()
        }],
        agent_id: Some("main".to_owned()),
        session_key: Some(chat.session.clone()),
        run_id: None,
        timeout_ms: Some(60_000),
    };
    let opened = other.client.question_request(&request).await.unwrap();
    let seen = chat.asked().await;
    assert_eq!(seen.id, opened.id);
    assert_eq!(seen.questions[0].options.len(), 0);
    other.client.close();
    chat.answer(&seen, "green").await;
}

#[tokio::test]
#[ignore = "needs the real Gateway: ./dev e2e"]
async fn after_a_kill_the_connection_comes_back_and_old_questions_and_keys_are_gone() {
    let mut gateway = RealGateway::start("contract-kill").await;
    let stop = CancellationToken::new();
    let options =
        Options { request: gateway.request(gateway.url()), identity: gateway.folder().join("device.json") };
    let (connection, mut connections) = Connection::start(options, stop.clone());
    let first = connections.recv().await.unwrap();
    let mut chat = Chat { client: first.client, events: first.events, session: "agent:main:kill".to_owned() };
    let message = chat.message("hello there");
    chat.client.chat_send(&message).await.unwrap();
    chat.ended(&message.idempotency_key).await;
    let asking = chat.session.clone();
    chat.session = "agent:main:kill-asks".to_owned();
    chat.send(ASK).await;
    let question = chat.asked().await;

    gateway.kill_and_restart().await;
    while chat.events.recv().await.is_some() {}
    let second = connections.recv().await.unwrap();
    assert_ne!(second.boot_id, first.boot_id);
    let client = connection.client().unwrap();
    let error = client.question_get(&question.id).await.unwrap_err();
    assert_eq!(error.reason(), Some(QUESTION_NOT_FOUND));

    // The Gateway would run the finished message again; only its history knows better.
    let history = client.chat_history(&asking, 100).await.unwrap();
    assert!(history.knows(&message.idempotency_key));
    let again = client.chat_send(&message).await.unwrap();
    assert!(matches!(&again, ChatSent::Run { status, .. } if status == "started"), "{again:?}");
    stop.cancel();
}

#[tokio::test]
#[ignore = "needs the real Gateway: ./dev e2e"]
async fn while_it_drains_an_open_connection_can_still_answer() {
    let gateway = RealGateway::start("contract-drain").await;
    let mut chat = Chat::on(&gateway).await;
    chat.send(ASK).await;
    let question = chat.asked().await;
    gateway.terminate();
    let busy = timeout(PATIENCE, async {
        loop {
            match client::open(&gateway.request(gateway.url()), None).await {
                Err(error) => break error,
                Ok(opened) => opened.client.close(),
            }
        }
    })
    .await
    .unwrap();
    assert!(matches!(busy, ConnectError::Busy { .. }), "{busy:?}");
    let error = chat.client.question_list().await.unwrap_err();
    assert!(error.is_retryable(), "{error:?}");
    let status = chat.client.question_get(&question.id).await.unwrap().status;
    assert_eq!(status, QuestionStatus::Pending);
    chat.answer(&question, "Blue").await;
    chat.until("shutdown", |event| matches!(event, Event::Shutdown { .. }).then_some(())).await;
}

#[tokio::test]
#[ignore = "needs the real Gateway: ./dev e2e"]
async fn from_the_network_a_device_is_paired_once() {
    let gateway = RealGateway::start_bound("contract-lan", "lan").await;
    let Some(url) = gateway.lan_url() else {
        println!("this machine has no network address: not tested");
        return;
    };
    let request = gateway.request(url);
    let error = client::open(&request, None).await.err().unwrap();
    println!("without a device: {error}");
    assert!(matches!(error, ConnectError::Scopes { .. }), "{error:?}");

    let path = gateway.folder().join("device.json");
    let mut identity = Identity::load_or_create(&path).unwrap();
    let error = client::open(&request, Some(&mut identity)).await.err().unwrap();
    println!("with a new device: {error}");
    let ConnectError::NotPaired { request_id, .. } = &error else {
        panic!("{error:?}");
    };
    let command = format!("openclaw devices approve {request_id}");
    assert!(error.to_string().contains(&command), "{error}");

    let again = client::open(&request, Some(&mut identity)).await.err().unwrap();
    assert_eq!(again.to_string(), error.to_string(), "one pairing request");

    gateway.openclaw(&["devices", "approve", request_id]).await;
    let opened = client::open(&request, Some(&mut identity)).await.unwrap();
    opened.client.question_list().await.unwrap();
    assert!(identity.device_token().is_some());
}
