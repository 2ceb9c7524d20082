//! A scripted person with one chat: says something, is asked, and does what the plan says.

use std::collections::BTreeMap;
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context as _, Result};
use ask_core::key::SessionKey;
use ask_core::time::Timestamp;
use serde::Serialize;
use serde_json::{Value, json};
use testkit::front::{Ask, FrontEnd, Turn};
use testkit::gateway::{Request, ToolOutcome};
use tokio::sync::watch;
use tokio::task::AbortHandle;

use crate::history::{
    Call, Content, Life, Local, Row, Said, Sent, SessionHistory, Stop, Submitted, Told, Written,
};
use crate::mcp;
use crate::world::{GATEWAY, SharedWorld, lock, text};

/// Long enough that no question with it expires by itself.
pub const LONG_S: u64 = 300;

/// What one session goes through.
#[derive(Debug, Clone, Serialize)]
pub struct SessionPlan {
    /// What it is called in logs.
    pub name: &'static str,
    /// How the agent asks.
    pub road: Road,
    /// How many questions are asked at once; only the first one has a plan.
    pub questions: usize,
    /// Seconds until a question expires.
    pub timeout_s: u64,
    /// What is done once the first question is shown, or the message said where nothing is asked.
    pub actions: Vec<Action>,
    /// nats-server is killed at this moment.
    pub kill_nats: Option<Moment>,
}

/// How the agent asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Road {
    /// `ask_user` of the Gateway.
    Native,
    /// `request_user_input` of the plugin.
    Plugin,
    /// The same for a secret.
    Secret,
    /// `request_user_input` of the MCP server; one such call at a time in a world.
    Mcp,
    /// It asks nothing and talks for so many half seconds.
    Nothing(usize),
}

/// Something that is done.
#[derive(Debug, Clone, Serialize)]
pub struct Action {
    /// How much later.
    pub after_ms: u64,
    /// What.
    pub what: What,
}

/// What somebody does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum What {
    /// The owner replies with this option.
    Choose(usize),
    /// The owner replies with own words, or the secret.
    Words,
    /// The same reply is sent twice at once.
    Twice,
    /// The owner declines.
    Decline,
    /// The owner cancels.
    Cancel,
    /// Somebody else replies.
    Stranger,
    /// The owner types a message while the question is on screen.
    Type,
    /// The owner types a message without having seen the question.
    TypeBlind,
    /// Somebody answers at the Gateway's own Control UI.
    AnswerAtGateway,
    /// Somebody skips it there.
    SkipAtGateway,
    /// The owner presses Stop.
    Stop,
    /// The owner types `/stop`.
    TypeStop,
    /// The Gateway goes down, the owner replies, and the agent of the next Gateway asks the same.
    AskAgain,
    /// Somebody stops the run at the Control UI.
    Abort,
    /// The connection of the open stream breaks.
    Cut,
}

const STOP: &str = "/stop";

/// A step of a life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Moment {
    /// A message was said.
    Said,
    /// A question is on record.
    Asked,
    /// A question is shown.
    Shown,
    /// A reply is being sent.
    Replied,
    /// Its sender was told what became of it.
    Told,
    /// The turn has ended.
    Ended,
}

impl Moment {
    /// All of them.
    pub const ALL: [Self; 6] = [Self::Said, Self::Asked, Self::Shown, Self::Replied, Self::Told, Self::Ended];
}

impl SessionPlan {
    /// A plan with one question and these actions.
    pub fn new(name: &'static str, road: Road, actions: &[(u64, What)]) -> Self {
        let actions = actions.iter().map(|&(after_ms, what)| Action { after_ms, what }).collect();
        Self { name, road, questions: 1, timeout_s: LONG_S, actions, kill_nats: None }
    }

    /// Whether somebody does this in it.
    pub fn does(&self, what: What) -> bool {
        self.actions.iter().any(|action| action.what == what)
    }

    /// With another timeout, in seconds.
    #[must_use]
    pub fn within(mut self, timeout_s: u64) -> Self {
        self.timeout_s = timeout_s;
        self
    }
}

/// A person at work.
pub struct Person {
    world: SharedWorld,
    tag: String,
    plan: SessionPlan,
    front: FrontEnd,
    http: reqwest::Client,
    /// Key of the session at the gateway.
    pub session: SessionKey,
    record: Mutex<SessionHistory>,
    waiting: Mutex<BTreeMap<u64, String>>,
    asked: Mutex<BTreeSet<String>>,
    moments: Mutex<Vec<Moment>>,
    counter: Mutex<u64>,
    stream: watch::Sender<Stream>,
    tasks: Mutex<Vec<AbortHandle>>,
}

/// What the person does to the open stream.
#[derive(Debug, Clone, Copy, Default)]
struct Stream {
    stopped: bool,
    cuts: u64,
}

/// Something that has not come to its end, until it is dropped.
struct Waits {
    person: Arc<Person>,
    number: u64,
}

impl Drop for Waits {
    fn drop(&mut self) {
        lock(&self.person.waiting).remove(&self.number);
    }
}

/// What the Gateway has seen, read once for several sessions.
pub struct GatewaySaw {
    outcomes: Vec<ToolOutcome>,
    requests: Vec<Request>,
}

impl GatewaySaw {
    /// Reads it.
    pub fn now(world: &SharedWorld) -> Self {
        Self { outcomes: world.gateway.outcomes(), requests: world.gateway.requests() }
    }
}

impl Person {
    /// Begins; `tag` is in everything that is said.
    pub fn start(world: &SharedWorld, tag: &str, plan: &SessionPlan) -> Arc<Self> {
        let owner = format!("owner-{tag}");
        let front = FrontEnd::new(&world.emitter_url(), &world.front_token)
            .as_user(&owner, &owner)
            .in_chat(Some(tag))
            .able_to_show(&["card", "form", "confirm", "masked"]);
        let session = SessionKey::new(GATEWAY, format!("agent:main:owui-{tag}"));
        let record = SessionHistory { session: session.session.clone(), owner, ..Default::default() };
        // A connection each, so that repetitions go to different replicas.
        let http = reqwest::Client::builder().no_proxy().pool_max_idle_per_host(0).build();
        let person = Arc::new(Self {
            world: world.clone(),
            tag: tag.into(),
            plan: plan.clone(),
            front,
            http: http.expect("an http client without settings"),
            session,
            record: Mutex::new(record),
            waiting: Mutex::default(),
            asked: Mutex::default(),
            moments: Mutex::default(),
            counter: Mutex::default(),
            stream: watch::Sender::default(),
            tasks: Mutex::default(),
        });
        if person.plan.road == Road::Mcp {
            let (here, args) = (person.clone(), person.args(0));
            let waits = person.waits("the mcp call".into());
            person.spawn(async move {
                mcp::carry(&here.world, &args).await;
                drop(waits);
            });
        }
        let first = person.first_message();
        person.say(first, false);
        person.moment(Moment::Said);
        if person.plan.kill_nats == Some(Moment::Asked) {
            let (watching, here) = (person.waits("the first question".into()), person.clone());
            person.spawn(async move {
                loop {
                    let on_record = here.world.bus.questions_of(&here.session).await;
                    if on_record.is_ok_and(|entries| !entries.is_empty()) {
                        break;
                    }
                    tokio::time::sleep(Duration::from_millis(2)).await;
                }
                here.moment(Moment::Asked);
                drop(watching);
            });
        }
        if matches!(person.plan.road, Road::Nothing(_)) {
            for action in person.plan.actions.clone() {
                person.act(action, None);
            }
        }
        person
    }

    /// Ends all that still goes on.
    pub fn end(&self) {
        for task in lock(&self.tasks).drain(..) {
            task.abort();
        }
    }

    /// What is on record now, and what everybody has seen.
    ///
    /// # Errors
    /// While the bus can't be read.
    pub async fn history(&self, saw: &GatewaySaw) -> Result<SessionHistory> {
        let mut history = lock(&self.record).clone();
        let bus = &self.world.bus;
        for stored in bus.questions_of(&self.session).await? {
            let values = bus.question_history(&stored.value.key).await?.into_iter();
            let values = values
                .map(|(stored, at_ms)| Written { revision: stored.revision, at_ms, entry: stored.value })
                .collect();
            history.lives.push(Life { values });
        }
        // What was asked again comes after what it repeats.
        history.lives.sort_by_key(|life| life.last().map(|written| written.entry.asked_at));
        history.routed = bus.session(&self.session).await?.map(|stored| stored.value);
        let own = |session: &str| session == self.session.session;
        history.calls = saw.outcomes.iter().filter(|call| own(&call.session)).map(call).collect();
        let rows = self.world.gateway.transcript(&self.session.session);
        let users = rows.iter().filter(|row| row["role"] == "user");
        history.rows = users
            .map(|row| Row {
                key: text(&row["idempotencyKey"]),
                text: text(&row["content"]),
                aside: row["__openclaw"]["aside"] == true,
            })
            .collect();
        let sends = saw.requests.iter().filter(|request| {
            matches!(request.method.as_str(), "chat.send" | "agent")
                && own(&text(&request.params["sessionKey"]))
        });
        history.sends = sends
            .map(|sent| Sent {
                key: text(&sent.params["idempotencyKey"]),
                text: text(&sent.params["message"]),
            })
            .collect();
        let handed = bus.chat_of(&self.session).await?;
        history.handed = handed.into_iter().map(|item| item.run).collect();
        history.waiting = lock(&self.waiting).values().cloned().collect();
        Ok(history)
    }

    /// Something that the person began has not come to its end.
    pub fn is_waiting(&self) -> bool {
        !lock(&self.waiting).is_empty()
    }

    fn first_message(&self) -> String {
        self.message_that_ends("thanks")
    }

    /// What makes the agent do what the plan says, and say these words then.
    fn message_that_ends(&self, words: &str) -> String {
        let tag = &self.tag;
        let tool = match self.plan.road {
            Road::Native => "ask_user",
            Road::Mcp => mcp::TOOL,
            _ => "request_user_input",
        };
        let calls: Vec<String> =
            (0..self.plan.questions).map(|n| format!("CALL {tool} {}", self.args(n))).collect();
        match self.plan.road {
            Road::Nothing(slow) => format!("{tag} hello SLOW {slow}"),
            _ => format!("{} THEN {tag} {words}", calls.join(" ")),
        }
    }

    /// What the agent's tool is called with.
    fn args(&self, number: usize) -> Value {
        let timeout = self.plan.timeout_s;
        let question = format!("{} asks {number}: which colour?", self.tag);
        let labels = ["Red", "Green", "Blue"];
        match self.plan.road {
            Road::Native => {
                let options = labels.map(|label| json!({"label": label}));
                let prompt =
                    json!({"id": "pick", "header": "Pick", "question": question, "options": options});
                json!({"questions": [prompt], "timeoutSeconds": timeout})
            }
            Road::Secret => json!({"question": question, "secret": true, "timeout_seconds": timeout}),
            _ => json!({"question": question, "choices": labels, "timeout_seconds": timeout}),
        }
    }

    fn say(self: &Arc<Self>, text: String, blind: bool) {
        let mut body = self.front.message(&text);
        if blind {
            body["on_screen"] = json!([]);
        }
        let turn = self.front.open(body);
        let message = turn.message().to_owned();
        let requests = self.world.gateway.requests();
        let arrived =
            |said: &Said| requests.iter().any(|request| request.params["message"] == said.text.as_str());
        {
            let said = &mut lock(&self.record).said;
            let hurried = said.last().is_some_and(|last| !last.heard && !arrived(last));
            said.push(Said {
                message: message.clone(),
                text: text.clone(),
                heard: false,
                hurried,
                ended: None,
            });
        }
        if text == STOP {
            let stop = Stop { message: Some(message), pressed_ms: Timestamp::now().0, told_ms: None };
            lock(&self.record).stops.push(stop);
        }
        let (here, waits) = (self.clone(), self.waits(format!("the turn of \"{text}\" has not ended")));
        self.spawn(async move {
            here.follow(turn).await;
            here.moment(Moment::Ended);
            drop(waits);
        });
    }

    async fn follow(self: &Arc<Self>, mut turn: Turn) {
        let mut stream = self.stream.subscribe();
        stream.mark_unchanged();
        loop {
            let line = tokio::select! {
                line = turn.next() => line,
                _ = stream.changed() => {
                    turn.cut();
                    if stream.borrow_and_update().stopped {
                        let (message, cursor) = (turn.message().to_owned(), turn.cursor().map(str::to_owned));
                        drop(turn);
                        return self.stop(&message, cursor.as_deref()).await;
                    }
                    continue;
                }
            };
            let message = turn.message();
            let Some(line) = self.heard(message, line) else { return };
            if line["type"] == "ask" {
                self.asked(message, &line);
            }
        }
    }

    /// Records a line of the stream of a message; none where it ends.
    fn heard(&self, message: &str, line: Result<Option<Value>>) -> Option<Value> {
        let record = &mut *lock(&self.record);
        let line = match line {
            Ok(line) => line?,
            Err(error) => {
                record.complaints.push(format!("the emitter refused a turn: {error:#}"));
                return None;
            }
        };
        let said = record.said.iter_mut().find(|said| said.message == message)?;
        // A status may say that it is not taken yet.
        said.heard |= line["type"] != "status";
        if line["type"] == "end" {
            let reason = text(&line["reason"]);
            let stop = record.stops.iter_mut().find(|stop| stop.message.as_deref() == Some(message));
            if let Some(stop) = stop.filter(|_| reason == "stopped") {
                stop.told_ms = Some(Timestamp::now().0);
            }
            said.ended = Some(reason);
        }
        Some(line)
    }

    /// A question is to be shown; it may be shown again.
    fn asked(self: &Arc<Self>, message: &str, line: &Value) {
        let Ok(ask) = serde_json::from_value::<Ask>(line.clone()) else {
            lock(&self.record).complaints.push(format!("a question can't be read: {line}"));
            return;
        };
        let question = question_of(&ask);
        let (here, shown, at) = (self.clone(), ask.clone(), message.to_owned());
        self.spawn(async move {
            // It is repeated for a while; what is asked again is reported again.
            let _ = here.front.shown(&at, &shown, "delivered").await;
        });
        if !lock(&self.asked).insert(ask.question.clone()) {
            return;
        }
        let again = lock(&self.record).shown.contains(&question);
        lock(&self.record).shown.push(question.clone());
        self.moment(Moment::Shown);
        let place = Place { message: message.to_owned(), ask };
        if again {
            // The record may have answered it by then.
            self.act(Action { after_ms: 2500, what: What::Choose(2) }, Some(place));
        } else if question.contains("asks 0:") {
            for action in self.plan.actions.clone() {
                self.act(action, Some(place.clone()));
            }
        } else {
            // Of many, so late that all of them wait at once.
            let after_ms = if self.plan.questions > 2 { 1500 } else { 30 };
            self.act(Action { after_ms, what: What::Choose(1) }, Some(place));
        }
    }

    fn act(self: &Arc<Self>, action: Action, place: Option<Place>) {
        let (here, waits) = (self.clone(), self.waits(format!("{:?} is not done", action.what)));
        self.spawn(async move {
            tokio::time::sleep(Duration::from_millis(action.after_ms)).await;
            here.perform(action.what, place).await;
            drop(waits);
        });
    }

    async fn perform(self: &Arc<Self>, what: What, place: Option<Place>) {
        let number = self.number();
        match (what, place) {
            (What::Type | What::TypeBlind, _) => {
                self.say(format!("{} types {number}.", self.tag), what == What::TypeBlind);
            }
            (What::TypeStop, _) => self.say(STOP.into(), false),
            (What::AskAgain, Some(place)) => self.ask_again(number, place).await,
            (What::Stop, _) => self.stream.send_modify(|stream| stream.stopped = true),
            (What::Cut, _) => self.stream.send_modify(|stream| stream.cuts += 1),
            (What::Abort, _) => {
                lock(&self.record).aborted = true;
                self.world.gateway.stop_run(&self.session.session);
            }
            (What::AnswerAtGateway | What::SkipAtGateway, Some(place)) => self.at_gateway(what, &place.ask),
            (_, Some(place)) => self.reply(what, number, place).await,
            (_, None) => {}
        }
    }

    fn at_gateway(&self, what: What, ask: &Ask) {
        let (question, id) = (question_of(ask), &ask.question);
        let values = (what == What::AnswerAtGateway).then(|| vec!["Green".to_owned()]);
        let accepted = match &values {
            Some(values) => self.world.gateway.answer_locally(id, &json!({"pick": values})),
            None => self.world.gateway.skip_locally(id),
        };
        let accepted = accepted.is_ok();
        lock(&self.record).local.push(Local { question, values, accepted });
    }

    async fn ask_again(self: &Arc<Self>, number: u64, place: Place) {
        self.world.kill_gateway();
        self.reply(What::Choose(1), number, place).await;
        if let Err(error) = self.world.start_gateway().await {
            lock(&self.record).complaints.push(format!("the gateway did not start again: {error:#}"));
        }
        self.say(self.message_that_ends("goes on"), false);
    }

    async fn reply(self: &Arc<Self>, what: What, number: u64, place: Place) {
        let Place { message, ask } = place;
        let id = format!("{}-reply-{number}", self.tag);
        let owner = lock(&self.record).owner.clone();
        let user = if what == What::Stranger { format!("stranger-{}", self.tag) } else { owner };
        let mut body = json!({"reply": id, "chat": self.tag, "message": message,
            "user": {"id": user, "name": user}, "question": ask.question, "surface": ask.surface});
        let secret = ask.prompts.first().is_some_and(|prompt| prompt.secret);
        let own_words = format!("{} answers {number}.", self.tag);
        let content = match what {
            What::Decline => {
                body["declined"] = true.into();
                Content::Declined
            }
            What::Cancel => {
                body["cancelled"] = "user".into();
                Content::Cancelled
            }
            What::Choose(index) if !secret => {
                body["answers"] = ask.answer(json!({"index": index}));
                let label = ask.prompts.first().and_then(|prompt| prompt.options.get(index));
                Content::Values(label.map(|option| option.label.clone()).into_iter().collect())
            }
            _ => {
                body["answers"] = ask.answer(json!({"text": own_words}));
                if secret { Content::Secret(own_words) } else { Content::Values(vec![own_words]) }
            }
        };
        let (question, to) = (question_of(&ask), ask.question);
        let submitted = Submitted { id: id.clone(), user, question, to, content, told: Vec::new() };
        lock(&self.record).replies.push(submitted);
        self.moment(Moment::Replied);
        let send = || self.until_told(&id, &body);
        match what {
            What::Twice => drop(tokio::join!(send(), send())),
            _ => send().await,
        }
        // The same is told again, for ever.
        if what == What::Twice {
            send().await;
        }
        self.moment(Moment::Told);
    }

    /// Sends a reply until its sender is told what became of it.
    async fn until_told(&self, id: &str, body: &Value) {
        let (status, answer) = self.insist("/v1/reply", body).await;
        let (result, error) = (text(&answer["result"]), text(&answer["error"]["code"]));
        let result = if result.is_empty() { error } else { result };
        let by = answer["by"].as_str().map(str::to_owned);
        let as_message = text(&answer["message"]).contains("went to the agent as a message");
        let told = Told { at_ms: Timestamp::now().0, status, result, by, as_message };
        let mut record = lock(&self.record);
        if let Some(reply) = record.replies.iter_mut().find(|reply| reply.id == id) {
            reply.told.push(told);
        }
    }

    async fn stop(&self, message: &str, cursor: Option<&str>) {
        let pressed_ms = Timestamp::now().0;
        let at = {
            let mut record = lock(&self.record);
            record.stops.push(Stop { message: None, pressed_ms, told_ms: None });
            record.stops.len() - 1
        };
        let owner = lock(&self.record).owner.clone();
        let body = json!({"chat": self.tag, "message": message, "user": {"id": owner, "name": owner},
            "cursor": cursor});
        self.insist("/v1/left", &body).await;
        lock(&self.record).stops[at].told_ms = Some(Timestamp::now().0);
    }

    /// Repeats a request until something is decided about it.
    async fn insist(&self, path: &str, body: &Value) -> (u16, Value) {
        let mut pause = Duration::from_millis(50);
        loop {
            if let Ok((status, answer)) = self.post(path, body).await
                && status != 503
            {
                return (status, answer);
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(Duration::from_secs(1));
        }
    }

    async fn post(&self, path: &str, body: &Value) -> Result<(u16, Value)> {
        let request = self.http.post(format!("{}{path}", self.world.emitter_url()));
        let request =
            request.bearer_auth(&self.world.front_token).json(body).timeout(Duration::from_secs(20));
        let response = request.send().await?;
        let status = response.status().as_u16();
        let text = response.bytes().await?;
        Ok((status, serde_json::from_slice(&text).context("an answer in JSON")?))
    }

    /// A step is reached, for the first time or again.
    fn moment(self: &Arc<Self>, moment: Moment) {
        if self.plan.kill_nats != Some(moment) {
            return;
        }
        let mut moments = lock(&self.moments);
        if moments.contains(&moment) {
            return;
        }
        moments.push(moment);
        let (here, waits) = (self.clone(), self.waits("nats-server is away".into()));
        self.spawn(async move {
            if let Err(error) = here.world.restart_nats(Duration::from_millis(300)).await {
                lock(&here.record).complaints.push(format!("nats-server did not start again: {error:#}"));
            }
            drop(waits);
        });
    }

    fn waits(self: &Arc<Self>, what: String) -> Waits {
        let number = self.number();
        lock(&self.waiting).insert(number, what);
        Waits { person: self.clone(), number }
    }

    fn number(&self) -> u64 {
        let mut counter = lock(&self.counter);
        *counter += 1;
        *counter
    }

    fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        lock(&self.tasks).push(tokio::spawn(work).abort_handle());
    }
}

/// Where a question was shown.
#[derive(Clone)]
struct Place {
    message: String,
    ask: Ask,
}

fn question_of(ask: &Ask) -> String {
    ask.prompts.first().map(|prompt| prompt.text.clone()).unwrap_or_default()
}

fn call(outcome: &ToolOutcome) -> Call {
    let args = &outcome.args;
    let question = args["question"].as_str().or(args["questions"][0]["question"].as_str());
    Call {
        question: question.unwrap_or_default().to_owned(),
        tool: outcome.tool.clone(),
        text: outcome.text.clone(),
        details: outcome.details.clone(),
        is_error: outcome.is_error,
        secret: outcome.secret.clone(),
    }
}
