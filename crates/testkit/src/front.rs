//! A scripted front end: speaks the pipe's HTTP protocol to owui-emitter, as the pipe inside Open
//! WebUI does, for one person in one chat.

use std::collections::BTreeSet;
use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use futures::{Stream, StreamExt};
use serde::Deserialize;
use serde_json::{Map, Value, json};

/// The emitter pings every 10 seconds.
const SILENCE: Duration = Duration::from_secs(30);
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// How long [`Turn::until`] and what builds on it wait.
const PATIENCE: Duration = Duration::from_secs(30);

/// One person looking at one chat.
#[derive(Debug, Clone)]
pub struct FrontEnd {
    url: String,
    token: String,
    user: Value,
    chat: Option<String>,
    agent: String,
    surfaces: Vec<String>,
    on_screen: Arc<Mutex<BTreeSet<String>>>,
    http: reqwest::Client,
}

/// A question as the emitter wants it shown.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Ask {
    /// Its id.
    pub question: String,
    /// `card`, `form`, `confirm`, `masked`, `durable`, …
    pub surface: String,
    /// Revision of its entry.
    #[serde(default)]
    pub revision: u64,
    /// Milliseconds since 1970.
    #[serde(default)]
    pub deadline_ms: u64,
    /// Heading.
    #[serde(default)]
    pub title: String,
    /// What is asked.
    pub prompts: Vec<Prompt>,
    /// Whether it may become a durable card.
    #[serde(default)]
    pub can_park: bool,
    /// Where the stream stood.
    #[serde(default)]
    pub cursor: Option<String>,
}

/// One thing that is asked.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Prompt {
    /// Its id within the question.
    pub id: String,
    /// Short heading.
    #[serde(default)]
    pub header: String,
    /// What the person reads.
    #[serde(default)]
    pub text: String,
    /// What can be chosen.
    #[serde(default)]
    pub options: Vec<Choice>,
    /// Several options may be chosen.
    #[serde(default)]
    pub multiple: bool,
    /// Own words are taken too.
    #[serde(default)]
    pub allow_other: bool,
    /// The answer is confidential.
    #[serde(default)]
    pub secret: bool,
}

/// An option of a prompt.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Choice {
    /// What it is called.
    pub label: String,
    /// More about it.
    #[serde(default)]
    pub description: Option<String>,
}

impl Ask {
    /// Answers for the prompt of a question that has one: `json!({"index": 1})`, `{"text": …}`.
    pub fn answer(&self, answer: Value) -> Value {
        let mut answers = Map::new();
        if let Some(prompt) = self.prompts.first() {
            answers.insert(prompt.id.clone(), answer);
        }
        answers.into()
    }

    /// Id of the durable card that stands for it in the chat.
    pub fn durable_call(&self) -> String {
        let cursor = self.cursor.as_deref().unwrap_or_default();
        format!("oc_{}.{cursor}", self.question)
    }
}

/// What the emitter answered to a request.
#[derive(Debug, Clone)]
pub struct Answer {
    /// HTTP status.
    pub status: u16,
    /// JSON body; null where there is none.
    pub body: Value,
}

impl Answer {
    async fn read(response: reqwest::Response) -> Result<Self> {
        let status = response.status().as_u16();
        let text = response.bytes().await?;
        Ok(Self { status, body: serde_json::from_slice(&text).unwrap_or_default() })
    }

    /// `saved`, `already_answered`, `closed`, or the code of an error.
    pub fn result(&self) -> &str {
        let result = self.body["result"].as_str();
        let code = self.body["error"]["code"].as_str();
        result.or(code).unwrap_or_default()
    }
}

impl FrontEnd {
    /// Alice in a new chat with the agent `main`, able to show everything.
    pub fn new(url: &str, token: &str) -> Self {
        let surfaces = ["card", "form", "confirm", "masked", "durable", "text"];
        Self {
            url: url.trim_end_matches('/').to_owned(),
            token: token.to_owned(),
            user: json!({"id": "alice", "name": "Alice"}),
            chat: Some(new_id()),
            agent: "main".into(),
            surfaces: surfaces.map(str::to_owned).to_vec(),
            on_screen: Arc::default(),
            http: crate::http_client(),
        }
    }

    /// Another person.
    #[must_use]
    pub fn as_user(mut self, id: &str, name: &str) -> Self {
        self.user = json!({"id": id, "name": name});
        self
    }

    /// Another chat; none for a caller of the API only.
    #[must_use]
    pub fn in_chat(mut self, chat: Option<&str>) -> Self {
        self.chat = chat.map(str::to_owned);
        self
    }

    /// Another agent.
    #[must_use]
    pub fn with_agent(mut self, agent: &str) -> Self {
        self.agent = agent.to_owned();
        self
    }

    /// Other abilities to show questions.
    #[must_use]
    pub fn able_to_show(mut self, surfaces: &[&str]) -> Self {
        self.surfaces = surfaces.iter().map(|&surface| surface.to_owned()).collect();
        self
    }

    /// Another emitter, as after a restart on another port.
    #[must_use]
    pub fn at(mut self, url: &str) -> Self {
        url.trim_end_matches('/').clone_into(&mut self.url);
        self
    }

    /// Id of the chat.
    pub fn chat(&self) -> Option<&str> {
        self.chat.as_deref()
    }

    /// The body of a turn that says something, naming the questions on screen.
    pub fn message(&self, text: &str) -> Value {
        let mut body = self.about(&new_id());
        body["agent"] = self.agent.as_str().into();
        body["gateway"] = Value::Null;
        body["text"] = text.into();
        body["attachments"] = json!([]);
        body["on_screen"] = json!(*self.on_screen());
        body["front"] = "openwebui".into();
        body["surfaces"] = json!(self.surfaces);
        body["looking"] = true.into();
        body["after"] = Value::Null;
        body
    }

    /// Says something. The stream opens with the first read.
    pub fn say(&self, text: &str) -> Turn {
        self.open(self.message(text))
    }

    /// Comes back after a durable card was answered: `status` as in the protocol.
    pub fn after_card(&self, ask: &Ask, status: &str, answers: Value) -> Turn {
        let mut body = self.message("");
        body["text"] = Value::Null;
        body["answer"] = json!({"call": ask.durable_call(), "status": status, "answers": answers});
        self.open(body)
    }

    /// Opens a turn with a body of your own.
    pub fn open(&self, body: Value) -> Turn {
        Turn {
            front: self.clone(),
            message: body["message"].as_str().unwrap_or_default().to_owned(),
            body,
            stream: None,
            bytes: Vec::new(),
            pause: FIRST_PAUSE,
            ended: None,
            text: String::new(),
            seen: VecDeque::new(),
        }
    }

    /// Reports what happened to a question: `delivered`, `waiting`, `refused` or `unsupported`.
    ///
    /// # Errors
    /// The emitter has not taken it within 30 seconds.
    pub async fn shown(&self, message: &str, ask: &Ask, event: &str) -> Result<Answer> {
        if event == "delivered" {
            self.on_screen().insert(ask.question.clone());
        }
        let mut body = self.about(message);
        body["question"] = ask.question.as_str().into();
        body["surface"] = ask.surface.as_str().into();
        body["event"] = event.into();
        self.insist("/v1/shown", &body).await
    }

    /// Replies to a question, once: `decision` is `{"answers":{…}}`, `{"declined":true}` or
    /// `{"cancelled":"user"}`; `reply` identifies it.
    ///
    /// # Errors
    /// The emitter can't be reached.
    pub async fn reply_once(
        &self,
        reply: &str,
        message: &str,
        ask: &Ask,
        decision: &Value,
    ) -> Result<Answer> {
        let body = self.reply_body(reply, message, ask, decision);
        let answer = self.post("/v1/reply", &body).await?;
        self.note_reply(ask, &answer);
        Ok(answer)
    }

    /// Replies to a question, again and again until the emitter has decided about the reply.
    ///
    /// # Errors
    /// It has not within 30 seconds.
    pub async fn reply(&self, message: &str, ask: &Ask, decision: &Value) -> Result<Answer> {
        let body = self.reply_body(&new_id(), message, ask, decision);
        let answer = self.insist("/v1/reply", &body).await?;
        self.note_reply(ask, &answer);
        Ok(answer)
    }

    /// Tells who looks: `changes` as in the protocol, such as `{"looking": false}`.
    ///
    /// # Errors
    /// The emitter has not taken it within 30 seconds.
    pub async fn presence(&self, message: &str, changes: &Value) -> Result<Answer> {
        let mut body = self.about(message);
        body["looking"] = true.into();
        body["other_chat"] = false.into();
        body["park"] = false.into();
        for (name, value) in changes.as_object().into_iter().flatten() {
            body[name] = value.clone();
        }
        self.insist("/v1/presence", &body).await
    }

    /// The agents that can be talked to.
    ///
    /// # Errors
    /// The emitter can't be reached.
    pub async fn models(&self) -> Result<Answer> {
        let request = self.http.get(format!("{}/v1/models", self.url));
        self.send(request).await
    }

    fn on_screen(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.on_screen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn reply_body(&self, reply: &str, message: &str, ask: &Ask, decision: &Value) -> Value {
        let mut body = self.about(message);
        body["reply"] = reply.into();
        body["question"] = ask.question.as_str().into();
        body["surface"] = ask.surface.as_str().into();
        for (name, value) in decision.as_object().into_iter().flatten() {
            body[name] = value.clone();
        }
        body
    }

    fn note_reply(&self, ask: &Ask, answer: &Answer) {
        if answer.status == 200 {
            self.on_screen().remove(&ask.question);
        }
    }

    fn about(&self, message: &str) -> Value {
        json!({"chat": self.chat, "message": message, "user": self.user})
    }

    async fn post(&self, path: &str, body: &Value) -> Result<Answer> {
        self.send(self.request(path, body)).await
    }

    fn request(&self, path: &str, body: &Value) -> reqwest::RequestBuilder {
        self.http.post(format!("{}{path}", self.url)).json(body)
    }

    /// Repeats a request while the emitter is away or says that nothing was decided.
    async fn insist(&self, path: &str, body: &Value) -> Result<Answer> {
        let mut pause = FIRST_PAUSE;
        let taken = async {
            loop {
                match self.post(path, body).await {
                    Ok(answer) if answer.status != 503 => return answer,
                    _ => tokio::time::sleep(pause).await,
                }
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
        };
        let taken = tokio::time::timeout(PATIENCE, taken).await;
        taken.with_context(|| format!("{path} was not taken within {PATIENCE:?}"))
    }

    async fn send(&self, request: reqwest::RequestBuilder) -> Result<Answer> {
        Answer::read(request.bearer_auth(&self.token).send().await?).await
    }
}

type Bytes = Pin<Box<dyn Stream<Item = Option<Vec<u8>>> + Send>>;

/// One turn: the lines that the emitter sends for it. A broken stream is opened again where it
/// stood, as the pipe does it.
pub struct Turn {
    front: FrontEnd,
    message: String,
    body: Value,
    stream: Option<Bytes>,
    bytes: Vec<u8>,
    pause: Duration,
    ended: Option<String>,
    text: String,
    seen: VecDeque<Value>,
}

impl Turn {
    /// Id of the assistant message that this turn fills.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// All text received until now.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Reason of the end, once it was received.
    pub fn ended(&self) -> Option<&str> {
        self.ended.as_deref()
    }

    /// Where the stream stands.
    pub fn cursor(&self) -> Option<&str> {
        self.body["after"].as_str()
    }

    /// All lines received until now, but for pings.
    pub fn lines(&self) -> impl Iterator<Item = &Value> {
        self.seen.iter()
    }

    /// The next line; none after the end. It may be cancelled and called again.
    ///
    /// # Errors
    /// The emitter refuses the turn.
    pub async fn next(&mut self) -> Result<Option<Value>> {
        while self.ended.is_none() {
            if let Some(end) = self.bytes.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.bytes.drain(..=end).collect();
                let line: Value = serde_json::from_slice(&line)
                    .with_context(|| format!("read {:?}", String::from_utf8_lossy(&line)))?;
                self.note(&line);
                if line["type"] == "ping" {
                    continue;
                }
                self.seen.push_back(line.clone());
                return Ok(Some(line));
            }
            let Some(stream) = &mut self.stream else {
                self.connect().await?;
                continue;
            };
            match tokio::time::timeout(SILENCE, stream.next()).await {
                Ok(Some(Some(part))) => {
                    self.pause = FIRST_PAUSE;
                    self.bytes.extend(part);
                }
                _ => {
                    self.cut();
                    tokio::time::sleep(self.pause).await;
                }
            }
        }
        Ok(None)
    }

    /// Reads until a line fits.
    ///
    /// # Errors
    /// The turn ends before, or there is none within 30 seconds.
    pub async fn until(&mut self, fits: impl Fn(&Value) -> bool) -> Result<Value> {
        let found = async {
            while let Some(line) = self.next().await? {
                if fits(&line) {
                    return Ok(line);
                }
            }
            bail!("the turn ended before the line that was waited for")
        };
        let found = tokio::time::timeout(PATIENCE, found).await;
        found
            .unwrap_or_else(|_| bail!("the line that was waited for did not come"))
            .with_context(|| format!("lines of the turn: {}", json!(self.seen)))
    }

    /// Reads until a question is to be shown, and reports it as delivered.
    ///
    /// # Errors
    /// As [`until`](Self::until).
    pub async fn asked(&mut self) -> Result<Ask> {
        let ask = self.until(|line| line["type"] == "ask").await?;
        let ask: Ask = serde_json::from_value(ask)?;
        self.front.shown(&self.message, &ask, "delivered").await?;
        Ok(ask)
    }

    /// Reads to the end and returns its reason.
    ///
    /// # Errors
    /// As [`until`](Self::until).
    pub async fn end(&mut self) -> Result<String> {
        if self.ended.is_none() {
            self.until(|line| line["type"] == "end").await?;
        }
        Ok(self.ended.clone().unwrap_or_default())
    }

    /// Replies to a question of this turn and repeats that until it is decided.
    ///
    /// # Errors
    /// As [`FrontEnd::reply`].
    pub async fn reply(&self, ask: &Ask, answer: Value) -> Result<Answer> {
        let decision = json!({"answers": ask.answer(answer)});
        self.front.reply(&self.message, ask, &decision).await
    }

    /// Drops the connection; the next read opens it again with the cursor.
    pub fn cut(&mut self) {
        self.stream = None;
        self.bytes.clear();
    }

    /// The pipe was cancelled: Stop, or the start of "Send now". Returns once the emitter has it;
    /// what it decides is awaited with the future.
    ///
    /// # Errors
    /// The emitter can't be reached, or has not decided within 30 seconds.
    pub async fn leave(mut self) -> Result<impl Future<Output = Result<Answer>>> {
        self.cut();
        let mut body = self.front.about(&self.message);
        body["cursor"] = self.body["after"].clone();
        let front = self.front.clone();
        let request = front.request("/v1/left", &body).bearer_auth(&front.token);
        let response = request.send().await?;
        Ok(async move {
            match Answer::read(response).await {
                Ok(answer) if answer.status != 503 => Ok(answer),
                _ => front.insist("/v1/left", &body).await,
            }
        })
    }

    /// Opens the stream; a short pause and nothing else when it can't be opened now.
    async fn connect(&mut self) -> Result<()> {
        let request = self.front.http.post(format!("{}/v1/turn", self.front.url));
        let request = request.bearer_auth(&self.front.token).json(&self.body);
        match request.send().await {
            Ok(response) if response.status().is_success() => {
                let parts = response.bytes_stream();
                self.stream = Some(Box::pin(parts.map(|part| part.ok().map(|p| p.to_vec()))));
                return Ok(());
            }
            Ok(response) if response.status().is_client_error() => {
                let status = response.status();
                let text = response.text().await.unwrap_or_default();
                bail!("the emitter refused the turn with {status}: {text}");
            }
            _ => {}
        }
        tokio::time::sleep(self.pause).await;
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        Ok(())
    }

    fn note(&mut self, line: &Value) {
        if line["cursor"].is_string() {
            self.body["after"] = line["cursor"].clone();
        }
        let text = line["text"].as_str().unwrap_or_default();
        match line["type"].as_str() {
            Some("text") => self.text.push_str(text),
            Some("end") => {
                self.text.push_str(text);
                self.ended = Some(line["reason"].as_str().unwrap_or_default().to_owned());
            }
            Some("withdraw") => {
                let question = line["question"].as_str().unwrap_or_default();
                self.front.on_screen().remove(question);
            }
            _ => {}
        }
    }
}

impl std::fmt::Debug for Turn {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Turn")
            .field("message", &self.message)
            .field("ended", &self.ended)
            .field("seen", &self.seen)
            .finish_non_exhaustive()
    }
}

fn new_id() -> String {
    uuid::Uuid::new_v4().to_string()
}
