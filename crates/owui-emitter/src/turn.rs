//! One turn: a message or a card's answer goes in, and what follows from it is streamed.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use ask_bus::{BusError, RunDelivery, Stored, trace};
use ask_core::SCHEMA;
use ask_core::entry::{DecidedBy, Entry, Step, StepKind};
use ask_core::key::{QuestionKey, SessionKey};
use ask_core::outcome::{CancelReason, Outcome, Returned};
use ask_core::question::Question;
use ask_core::reply::{ReplyContent, Responder};
use ask_core::session::{MessageDecision, Session};
use ask_core::surface::Surface;
use ask_core::text_reply;
use ask_core::time::Timestamp;
use ask_core::wire::{
    ReplyResponse, RunEvent, SayRequest, SayResponse, ShowStep, ShownEvent, ShownResponse, ToolPhase,
};
use bytes::Bytes;
use futures::Stream;
use serde_json::{Value, json};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, Interval, MissedTickBehavior, interval, sleep_until};
use tracing::Instrument;

use crate::cursor::{Cursor, SAID};
use crate::http::{CardAnswer, CardStatus, TurnRequest};
use crate::hub::{Event, Looking, Registration};
use crate::reply::{BadAnswer, Given, answers};
use crate::runs::{Finish, Runs, Shown, not_streamed};
use crate::{Emitter, delays, words};

/// Lines that may wait for a slow reader.
const LINES: usize = 64;
/// What is on display is read again this often: its changes come by a road that may miss some.
const READ_AGAIN: Duration = Duration::from_secs(5);
/// After this long without a sign of the agent the person is told that the message waits.
const QUIET: Duration = Duration::from_secs(1);
/// How long a turn that is over stays to tell what became of its replies. After a takeover the end
/// of the run may be known before that.
const RETURNS: Duration = Duration::from_secs(3);
/// A message that went into a queue gets a run of its own within this time, or none.
const FOLLOW_UP: Duration = Duration::from_secs(5);

/// What a caller without a screen gets when another call goes on with its conversation.
const TAKEN_OVER: &str = "\n\nAnother call has taken over this conversation and gets what follows. Calls without a chat share one conversation per user.";

/// Why a stream is over.
enum Over {
    /// Its last line was sent.
    Ended,
    /// The front end closed it.
    Gone,
    /// It breaks off, to be opened again elsewhere.
    BrokenOff,
}

type Flow<T = ()> = Result<T, Over>;

pub(crate) struct Turn {
    emitter: Arc<Emitter>,
    request: TurnRequest,
    session: SessionKey,
    events: mpsc::Receiver<Event>,
    looking: watch::Receiver<Looking>,
    lines: mpsc::Sender<Bytes>,
    cursor: Cursor,
    /// The last item of `RUNS` that `runs` knows; it also knows those told before a reconnect.
    folded: u64,
    runs: Runs,
    /// The questions on display, and where.
    asked: HashMap<String, (QuestionKey, Surface)>,
    withdrawn: HashSet<String>,
    /// The questions of which this chat knows what became of its reply.
    closed: HashSet<String>,
    ping: Interval,
    presence: Option<JoinHandle<()>>,
    /// When the message before this one came; absent for a session's first.
    before: Option<Timestamp>,
    /// When to tell that the message waits.
    quiet_until: Option<Instant>,
    quiet_told: bool,
    /// The questions that this chat answered and whose call is not known to have it.
    unreturned: HashSet<String>,
    /// When to stop waiting for that.
    returns_until: Option<Instant>,
    /// When to stop waiting for a run that follows.
    follow_up_until: Option<Instant>,
}

impl Turn {
    /// Starts a turn; the stream has its lines. `bound` is the session's entry as it was before,
    /// `after` where a broken stream goes on, `card` the question and place of a durable card that
    /// was answered.
    pub(crate) fn start(
        emitter: Arc<Emitter>,
        request: TurnRequest,
        session: SessionKey,
        bound: Option<&Session>,
        registration: Registration,
        after: Option<Cursor>,
        card: Option<(String, Cursor)>,
    ) -> impl Stream<Item = Result<Bytes, Infallible>> + use<> {
        let (lines, mut receive) = mpsc::channel(LINES);
        let Registration { id, begins, events, looking } = registration;
        let (card_question, card_cursor) = card.unzip();
        let goes_on = match after {
            Some(after) => Some(after.in_stream(begins.created)),
            None => card_cursor.map(|card| card.after_card(begins)),
        };
        let replay = goes_on.is_some();
        let mut cursor = goes_on.unwrap_or_else(|| Cursor::at(begins, Timestamp::now()));
        if request.text.is_some() {
            cursor.seen.get_or_insert(bound.map_or(0, |session| session.count));
        }
        let mut messages = bound.into_iter().flat_map(|session| session.messages.iter().rev());
        let before = messages.find(|message| message.id != request.message).map(|message| message.at);
        let mut ping = interval(emitter.config.ping);
        ping.set_missed_tick_behavior(MissedTickBehavior::Delay);
        ping.reset();
        let mut turn = Self {
            folded: cursor.start,
            emitter,
            request,
            session,
            events,
            looking,
            lines,
            cursor,
            runs: Runs::default(),
            asked: HashMap::new(),
            withdrawn: HashSet::new(),
            closed: HashSet::new(),
            unreturned: HashSet::new(),
            returns_until: None,
            ping,
            presence: None,
            before,
            quiet_until: None,
            quiet_told: false,
            follow_up_until: None,
        };
        tokio::spawn(async move {
            let over = match turn.run(replay, card_question).await {
                Ok(never) => match never {},
                Err(over) => over,
            };
            turn.close(id, over).await;
        });
        futures::stream::poll_fn(move |context| receive.poll_recv(context).map(|line| line.map(Ok)))
    }

    async fn close(mut self, id: u64, over: Over) {
        if let Some(presence) = self.presence.take() {
            presence.abort();
            let _ = presence.await;
        }
        self.emitter.hub.take_left(&self.session, &self.request.message);
        let alone = self.emitter.hub.unregister(&self.session, id, &self.request.message);
        // A stream that goes on elsewhere has somebody there all the time.
        if alone
            && !matches!(over, Over::BrokenOff)
            && let Err(error) = self.emitter.bus.clear_presence(&self.session, &self.request.message).await
        {
            tracing::debug!(session = %self.session, %error, "presence was not cleared; it lapses");
        }
    }

    async fn run(&mut self, replay: bool, card: Option<String>) -> Flow<Infallible> {
        // A stream that breaks from here on can be continued.
        self.send(json!({"type": "ping"})).await?;
        self.say_who_is_there().await?;
        let span = tracing::info_span!("receive turn", otel.kind = "server", askbus.session = %self.session);
        match (self.request.answer.take(), card) {
            (Some(answer), Some(question)) => self.hand_in_card(answer, &question).instrument(span).await?,
            _ => self.say().instrument(span).await?,
        }
        self.go_on_where_a_cancelled_call_was().await?;
        self.tell_what_was_missed().await?;
        if replay {
            self.replay().await?;
        }
        self.live().await
    }

    async fn say_who_is_there(&mut self) -> Flow {
        let emitter = self.emitter.clone();
        let (session, message) = (self.session.clone(), self.request.message.clone());
        let surfaces = self.request.surfaces.clone();
        let looking = *self.looking.borrow();
        let first = self.during(emitter.write_presence(&session, &message, &surfaces, looking)).await?;
        if let Err(error) = first {
            tracing::debug!(%session, %error, "presence was not written; the next heartbeat says it");
        }
        let keep = emitter.clone().keep_presence(session, message, surfaces, self.looking.clone());
        self.presence = Some(tokio::spawn(keep));
        Ok(())
    }

    // ---- what the person said

    async fn say(&mut self) -> Flow {
        let emitter = self.emitter.clone();
        let user = &self.request.user;
        let request = SayRequest {
            schema: SCHEMA,
            session: self.session.clone(),
            message: self.request.message.clone(),
            user: user.id.clone(),
            user_name: (!user.name.is_empty()).then(|| user.name.clone()),
            front: self.request.front.clone(),
            chat: self.request.chat.clone(),
            surfaces: self.request.surfaces.clone(),
            text: self.request.text.take().unwrap_or_default(),
            attachments: std::mem::take(&mut self.request.attachments),
            on_screen: self.request.on_screen.take(),
            seen: self.cursor.seen,
            goes_on: self.request.continues,
        };
        let mut delay = delays();
        let mut waits = false;
        loop {
            let span = tracing::info_span!(
                "send say",
                otel.kind = "producer",
                messaging.system = "nats",
                messaging.operation.name = "request",
                messaging.operation.type = "send",
            );
            let why = match self.during(emitter.bus.say(&request).instrument(span)).await? {
                Ok(SayResponse::Routed { decision, note, rule, .. }) => {
                    tracing::info!(session = %self.session, rule, "the message was routed");
                    if waits {
                        self.status("Your message is saved", true).await?;
                    }
                    return self.routed(decision, note).await;
                }
                Ok(SayResponse::WrongUser) => {
                    return self
                        .end(
                            "error",
                            Some("\n\nThis chat belongs to another user, so your message was not sent."),
                        )
                        .await;
                }
                Ok(SayResponse::Refused { why }) => {
                    return self.end("error", Some(&format!("\n\n{why}"))).await;
                }
                Ok(SayResponse::Retry { why }) => why,
                Err(
                    error @ (BusError::TooLarge { .. } | BusError::Refused(_) | BusError::Unreadable { .. }),
                ) => {
                    return self.end("error", Some(&format!("\n\nYour message was not sent: {error}"))).await;
                }
                Err(error) => error.to_string(),
            };
            tracing::warn!(session = %self.session, why, "a message is not saved yet");
            if !waits {
                waits = true;
                self.status("Your message is not saved yet: askbus is not complete. Trying again", false)
                    .await?;
            }
            self.during(delay.wait()).await?;
        }
    }

    async fn routed(&mut self, decision: MessageDecision, note: Option<String>) -> Flow {
        match decision {
            MessageDecision::Message { run, .. } => {
                self.runs.await_run(&run);
                self.quiet_until = Some(Instant::now() + QUIET);
            }
            MessageDecision::Answer { question } => {
                if let Some(note) = note {
                    self.say_once(&note).await?;
                }
                if let Some(run) = self.run_of(&question) {
                    self.runs.await_run(&run);
                }
            }
            MessageDecision::Late { question } => {
                let note = note.unwrap_or_else(|| "This question is closed already.".into());
                self.say_once(&note).await?;
                match self.run_of(&question) {
                    Some(run) if self.is_active(&run).await? => self.runs.await_run(&run),
                    _ => return self.end("done", None).await,
                }
            }
            MessageDecision::Clarify { text } => {
                self.say_once(&text).await?;
                return self.stay_for_cards().await;
            }
            MessageDecision::Stop => return self.end("stopped", None).await,
        }
        Ok(())
    }

    /// After a correction the pending questions stay on screen, where the front end has a screen.
    async fn stay_for_cards(&mut self) -> Flow {
        if self.request.surfaces.iter().all(|surface| *surface == Surface::Text) {
            return self.end("done", None).await;
        }
        let entries = self.entries().await?;
        let pending: Vec<String> =
            entries.into_iter().filter(|e| e.value.is_pending()).map(|e| e.value.key.run).collect();
        if pending.is_empty() {
            return self.end("done", None).await;
        }
        for run in pending {
            self.runs.await_run(&run);
        }
        Ok(())
    }

    fn run_of(&self, question: &str) -> Option<String> {
        question.parse::<QuestionKey>().ok().map(|key| key.run)
    }

    async fn hand_in_card(&mut self, answer: CardAnswer, question: &str) -> Flow {
        let (emitter, session) = (self.emitter.clone(), self.session.clone());
        let mut delay = delays();
        let mut waits = false;
        let entry = loop {
            match self.during(emitter.question_in(&session, question)).await? {
                Ok(Some(stored)) => break stored.value,
                Ok(None) => {
                    let text = "\n\nThis question is not known any more, so your answer could not be used.";
                    return self.end("error", Some(text)).await;
                }
                Err(error) => self.card_waits(&mut waits, &error.to_string()).await?,
            }
            self.during(delay.wait()).await?;
        };
        let CardAnswer { call, status, answers: given, reason } = answer;
        let content = match status {
            CardStatus::Again => None,
            CardStatus::Refused => {
                let reason = reason.unwrap_or_else(|| "the front end did not take the card".into());
                let event = ShownEvent::Refused { reason };
                self.put_on_record(&entry, Surface::Durable, event).await?;
                None
            }
            CardStatus::Declined => Some(ReplyContent::Declined),
            CardStatus::Cancelled => Some(ReplyContent::Cancelled { reason: CancelReason::User }),
            CardStatus::Answered => self.card_content(&entry, &call, given).await?,
        };
        let mut closed = false;
        if let Some(content) = content {
            closed = self.decide_card(&entry, &call, content).await?;
        }
        let run = entry.key.run.clone();
        if closed && !self.is_active(&run).await? {
            return self.end("done", None).await;
        }
        self.runs.await_run(&run);
        Ok(())
    }

    async fn card_content(
        &mut self,
        entry: &Entry,
        call: &str,
        given: BTreeMap<String, Given>,
    ) -> Flow<Option<ReplyContent>> {
        let why = match answers(&entry.key, &entry.question, given, Surface::Durable, call, None) {
            Ok(answers) => return Ok(Some(ReplyContent::Answers { answers })),
            Err(BadAnswer::Invalid(invalid)) => format!("This answer can't be taken: {invalid}"),
            Err(BadAnswer::Incomplete { why, .. }) => why,
            Err(BadAnswer::NoSealKey) => "A secret can't be given on a card that stays in the chat.".into(),
        };
        self.say_once(&why).await?;
        Ok(None)
    }

    /// Hands a card's decision in until it is decided upon; true when another one came first.
    async fn decide_card(&mut self, entry: &Entry, call: &str, content: ReplyContent) -> Flow<bool> {
        let emitter = self.emitter.clone();
        let user = &self.request.user;
        let by = Responder {
            user: user.id.clone(),
            name: (!user.name.is_empty()).then(|| user.name.clone()),
            chat: self.request.chat.clone(),
        };
        let mut delay = delays();
        let mut waits = false;
        loop {
            // A card is answered once, so its id names the reply over all repetitions.
            let reply = emitter.hand_in(entry, call, by.clone(), Surface::Durable, content.clone());
            match self.during(reply).await? {
                Ok(ReplyResponse::Saved) => return Ok(false),
                Ok(ReplyResponse::Closed { outcome, by, surface, sent_as_message, .. }) => {
                    let what = words::too_late(&entry.question, &outcome, &by, surface, sent_as_message);
                    self.say_once(&format!("> **{}** — {what}", entry.question.title())).await?;
                    return Ok(true);
                }
                Ok(ReplyResponse::WrongUser) => {
                    let text = "\n\nThis question belongs to another user, so your answer was refused.";
                    self.end("error", Some(text)).await?;
                }
                Ok(ReplyResponse::UnknownQuestion) => {
                    let text = "\n\nThis question is not known any more, so your answer could not be used.";
                    self.end("error", Some(text)).await?;
                }
                Ok(ReplyResponse::Invalid { invalid }) => {
                    self.say_once(&format!("This answer can't be taken: {invalid}")).await?;
                    return Ok(false);
                }
                Ok(ReplyResponse::Retry { why }) => self.card_waits(&mut waits, &why).await?,
                Err(error @ (BusError::TooLarge { .. } | BusError::Refused(_))) => {
                    self.end("error", Some(&format!("\n\nYour answer was not sent: {error}"))).await?;
                }
                Err(error) => self.card_waits(&mut waits, &error.to_string()).await?,
            }
            self.during(delay.wait()).await?;
        }
    }

    async fn card_waits(&mut self, waits: &mut bool, why: &str) -> Flow {
        tracing::warn!(session = %self.session, why, "a card's answer is not saved yet");
        if std::mem::replace(waits, true) {
            return Ok(());
        }
        self.status("Your answer is not saved yet: askbus is not complete. Trying again", false).await
    }

    // ---- what follows

    /// Tells what happened since the place where the front end goes on.
    async fn replay(&mut self) -> Flow {
        for stored in self.entries().await? {
            // Older ones were told in earlier turns.
            let recent = stored.value.decision().is_some_and(|d| d.at.0 >= self.cursor.begun);
            if recent {
                self.entry_changed(&stored).await?;
            }
        }
        let emitter = self.emitter.clone();
        if let Ok(end) = self.during(emitter.bus.run_cursor()).await? {
            self.rewind(end.sequence);
        }
        for delivery in self.session_runs(self.cursor.start).await? {
            self.run_went_on(delivery).await?;
        }
        Ok(())
    }

    /// A call that this message has cancelled was told only a part of what its run had put out.
    async fn go_on_where_a_cancelled_call_was(&mut self) -> Flow {
        let Some(left) = self.emitter.hub.take_left(&self.session, &self.request.message) else {
            return Ok(());
        };
        let missed = self.text_between(left, None).await?;
        if missed.is_empty() { Ok(()) } else { self.text(&missed).await }
    }

    /// Tells the outcomes of questions that waited in the chat while nothing was open there: shown
    /// as text or as a durable card since the message before this one, and decided elsewhere.
    async fn tell_what_was_missed(&mut self) -> Flow {
        let Some(before) = self.before else { return Ok(()) };
        for stored in self.entries().await? {
            let entry = &stored.value;
            let waited = entry.steps.iter().any(|step| self.ended_a_turn(step) && step.at >= before);
            let decided = entry.decision().is_some_and(|d| d.at.0 < self.cursor.begun);
            if !waited || !decided || stored.revision <= self.cursor.revision || self.is_ours(entry) {
                continue;
            }
            self.cursor.revision = stored.revision;
            if let Some(what) = words::decided_elsewhere(entry) {
                self.text(&format!("\n\n> **{}** — {what}\n\n", entry.question.title())).await?;
            }
        }
        Ok(())
    }

    /// Whether a question was shown in this chat in a way that ended the turn.
    fn ended_a_turn(&self, step: &Step) -> bool {
        matches!(&step.what, StepKind::Delivered { surface: Surface::Text | Surface::Durable, chat }
            if *chat == self.request.chat)
    }

    /// Whether a question was decided by a reply from this chat.
    fn is_ours(&self, entry: &Entry) -> bool {
        let Some(DecidedBy::Reply { responder, .. }) = entry.decision().map(|d| &d.by) else { return false };
        let chat = &self.request.chat;
        responder.chat == *chat && (chat.is_some() || responder.user == self.request.user.id)
    }

    async fn live(&mut self) -> Flow<Infallible> {
        let mut read_again = interval(READ_AGAIN);
        read_again.set_missed_tick_behavior(MissedTickBehavior::Delay);
        read_again.reset();
        let shutdown = self.emitter.shutdown.clone();
        loop {
            self.end_if_finished().await?;
            let (quiet, follow_up) = (self.quiet_until, self.follow_up_until);
            let returns = self.returns_until;
            tokio::select! {
                () = self.lines.closed() => return Err(Over::Gone),
                () = shutdown.cancelled() => return Err(Over::BrokenOff),
                event = self.events.recv() => match event {
                    Some(event) => self.on_event(event).await?,
                    None => return Err(Over::BrokenOff),
                },
                _ = self.ping.tick() => self.send(json!({"type": "ping"})).await?,
                _ = read_again.tick() => self.read_what_is_asked().await?,
                () = sleep_until(quiet.unwrap_or_else(Instant::now)), if quiet.is_some() => {
                    self.quiet_until = None;
                    self.quiet_told = true;
                    self.status("Sent, waiting for the gateway", false).await?;
                }
                () = sleep_until(returns.unwrap_or_else(Instant::now)), if returns.is_some() => {}
                () = sleep_until(follow_up.unwrap_or_else(Instant::now)), if follow_up.is_some() => {
                    return self.end("done", None).await;
                }
            }
        }
    }

    async fn on_event(&mut self, event: Event) -> Flow {
        match event {
            Event::Run(delivery) => self.run_went_on(delivery).await,
            Event::Rewound(sequence) => {
                self.rewind(sequence);
                Ok(())
            }
            Event::Entry(stored) => self.entry_changed(&stored).await,
            Event::Step(step) => self.ask(step).await,
            Event::ReadAgain => self.read_what_is_asked().await,
            Event::Refused(question) => {
                self.asked.remove(&question);
                Ok(())
            }
            Event::Superseded => {
                let text_only = self.request.surfaces.iter().all(|surface| *surface == Surface::Text);
                self.end("superseded", text_only.then_some(TAKEN_OVER)).await
            }
            Event::Stopped => self.end("stopped", None).await,
        }
    }

    /// `RUNS` has lost what came after `sequence`; its numbers come again.
    fn rewind(&mut self, sequence: u64) {
        let Cursor { start, opened, sequence: told, .. } = &mut self.cursor;
        for place in [start, opened, told, &mut self.folded] {
            *place = (*place).min(sequence);
        }
    }

    async fn run_went_on(&mut self, delivery: RunDelivery) -> Flow {
        let RunDelivery { item, sequence } = delivery;
        if sequence <= self.folded {
            return Ok(());
        }
        self.folded = sequence;
        let shown = self.runs.apply(&item, sequence > self.cursor.opened);
        if sequence <= self.cursor.sequence {
            return Ok(());
        }
        self.cursor.sequence = sequence;
        self.show(shown).await
    }

    /// Sends what runs show. Only the last line has the place of all of it, so that a stream that
    /// breaks in between loses nothing.
    async fn show(&mut self, shown: Vec<Shown>) -> Flow {
        let mut text = String::new();
        let mut works = false;
        for piece in shown {
            works = true;
            match piece {
                Shown::Text(more) => text.push_str(&more),
                Shown::WholeText { run, text: whole } => {
                    let before = self.text_between(0, Some(&run)).await?;
                    let streamed = before + self.runs.text_of(&run);
                    text.push_str(&not_streamed(&streamed, &whole));
                }
                Shown::Tool(RunEvent::Tool { call, name, phase, title, ok, .. }) => {
                    let phase = match phase {
                        ToolPhase::Start => "start",
                        ToolPhase::Update => "update",
                        ToolPhase::End => "end",
                    };
                    self.raw(&json!({
                        "type": "tool", "call": call, "name": name, "phase": phase, "title": title, "ok": ok,
                    }))
                    .await?;
                }
                Shown::Tool(_) | Shown::Working => {}
            }
        }
        if works {
            self.quiet_until = None;
            if std::mem::take(&mut self.quiet_told) {
                self.status("The agent is working", true).await?;
            }
        }
        if text.is_empty() { Ok(()) } else { self.text(&text).await }
    }

    async fn end_if_finished(&mut self) -> Flow {
        let finish = self.runs.finish();
        if finish.is_none() || self.unreturned.is_empty() {
            self.returns_until = None;
        } else if *self.returns_until.get_or_insert(Instant::now() + RETURNS) > Instant::now() {
            return Ok(());
        }
        match finish {
            None => self.follow_up_until = None,
            Some(Finish::Done) => return self.end("done", None).await,
            Some(Finish::Stopped) => return self.end("stopped", None).await,
            Some(Finish::Failed(why)) => return self.end("error", Some(&format!("\n\n{why}"))).await,
            Some(Finish::Waiting) => {
                self.follow_up_until.get_or_insert(Instant::now() + FOLLOW_UP);
            }
        }
        Ok(())
    }

    // ---- questions

    async fn ask(&mut self, step: ShowStep) -> Flow {
        let ShowStep { key, surface, .. } = step;
        let question = key.question.clone();
        if self.asked.get(&question).is_some_and(|(_, shown_on)| *shown_on == surface) {
            return Ok(());
        }
        let emitter = self.emitter.clone();
        // What can't be read now is stepped again with the next heartbeat.
        let Ok(Some(stored)) = self.during(emitter.bus.question(&key)).await? else { return Ok(()) };
        let entry = &stored.value;
        if !entry.is_pending() {
            return Ok(());
        }
        let span = tracing::info_span!(
            "process step",
            otel.kind = "consumer",
            messaging.system = "nats",
            messaging.operation.name = "process",
            messaging.operation.type = "process",
            askbus.question = %question,
            askbus.surface = surface.name(),
        );
        trace::continue_from(&span, entry.traceparent.as_deref());
        if !self.request.surfaces.contains(&surface) {
            let reason = format!("this front end has no surface {}", surface.name());
            let (chat, event) = (self.request.chat.clone(), ShownEvent::Refused { reason });
            let report = emitter.clone().report_until_on_record(stored.value, surface, chat, event);
            emitter.later(report);
            return Ok(());
        }
        self.asked.insert(question.clone(), (key, surface));
        if surface == Surface::Text {
            return self.ask_as_text(entry).instrument(span).await;
        }
        self.send(ask_line(&stored, surface, &self.request)).instrument(span).await
    }

    async fn ask_as_text(&mut self, entry: &Entry) -> Flow {
        let question = &entry.key.question;
        if self.cursor.told.as_ref() != Some(question) {
            self.cursor.told = Some(question.clone());
            self.text(&format!("\n\n{}", text_reply::as_text(&entry.question))).await?;
        }
        self.put_on_record(entry, Surface::Text, ShownEvent::Delivered).await?;
        self.end("asked", None).await
    }

    /// Waits until a report is on record: from then on a message can answer the question.
    async fn put_on_record(&mut self, entry: &Entry, surface: Surface, event: ShownEvent) -> Flow {
        let emitter = self.emitter.clone();
        let chat = self.request.chat.clone();
        let mut delay = delays();
        loop {
            let report = emitter.report_on_record(entry, surface, chat.as_deref(), event.clone());
            match self.during(report).await? {
                Ok(ShownResponse::Noted { .. } | ShownResponse::UnknownQuestion) => return Ok(()),
                Ok(ShownResponse::Retry { why }) => tracing::warn!(why, "not on record yet"),
                Err(error) => tracing::warn!(%error, "not on record yet"),
            }
            self.during(delay.wait()).await?;
        }
    }

    async fn read_what_is_asked(&mut self) -> Flow {
        let asked: Vec<QuestionKey> = self.asked.values().map(|(key, _)| key.clone()).collect();
        let emitter = self.emitter.clone();
        for key in asked {
            if let Ok(Some(stored)) = self.during(emitter.bus.question(&key)).await? {
                self.entry_changed(&stored).await?;
            }
        }
        Ok(())
    }

    async fn entry_changed(&mut self, stored: &Stored<Entry>) -> Flow {
        let (entry, question) = (&stored.value, &stored.value.key.question);
        let Some(decision) = entry.decision() else { return Ok(()) };
        self.asked.remove(question);
        let ours = self.is_ours(entry);
        let news = stored.revision > self.cursor.revision;
        match ours && entry.returned().is_none() {
            true => drop(self.unreturned.insert(question.clone())),
            false => drop(self.unreturned.remove(question)),
        }
        if self.withdrawn.insert(question.clone()) {
            let why = if ours { None } else { words::decided_elsewhere(entry) };
            self.send(json!({"type": "withdraw", "question": question, "why": why})).await?;
        }
        if !news {
            return Ok(());
        }
        self.cursor.revision = stored.revision;
        if !ours || entry.returned().is_none() || !self.closed.insert(question.clone()) {
            return Ok(());
        }
        if let Some(theirs) = words::overruled(entry) {
            let title = entry.question.title();
            return self.text(&format!("\n\n> **{title}** — {theirs}. Your reply came second.\n\n")).await;
        }
        match (entry.returned(), &decision.outcome) {
            (Some(Returned::Unconfirmed { why }), Outcome::Answered { .. }) => {
                let text = format!("It is not known whether the agent has your answer: {why}");
                self.send(json!({"type": "notice", "level": "warning", "text": text})).await
            }
            _ => Ok(()),
        }
    }

    // ---- reading the bus

    async fn entries(&mut self) -> Flow<Vec<Stored<Entry>>> {
        let (emitter, session) = (self.emitter.clone(), self.session.clone());
        let mut delay = delays();
        loop {
            match self.during(emitter.bus.questions_of(&session)).await? {
                Ok(mut entries) => {
                    // The place up to which they were told is a revision.
                    entries.sort_by_key(|stored| stored.revision);
                    return Ok(entries);
                }
                Err(error) => tracing::warn!(%session, %error, "its questions can't be read yet"),
            }
            self.during(delay.wait()).await?;
        }
    }

    async fn session_runs(&mut self, after: u64) -> Flow<Vec<RunDelivery>> {
        let (emitter, session) = (self.emitter.clone(), self.session.clone());
        let mut delay = delays();
        loop {
            match self.during(emitter.bus.replay_runs(&session, after)).await? {
                Ok(deliveries) => return Ok(deliveries),
                Err(error) => tracing::warn!(%session, %error, "its runs can't be read yet"),
            }
            self.during(delay.wait()).await?;
        }
    }

    /// The text of one run, or of all, between `after` and the begin of what this turn streams.
    async fn text_between(&mut self, after: u64, run: Option<&str>) -> Flow<String> {
        let start = self.cursor.start;
        let earlier = self.session_runs(after).await?.into_iter().take_while(|d| d.sequence <= start);
        let of_run = earlier.filter(|d| run.is_none_or(|run| d.item.run == run));
        Ok(of_run
            .filter_map(|d| match d.item.what {
                RunEvent::Text { text } => Some(text),
                _ => None,
            })
            .collect())
    }

    /// Whether a run had begun and not ended when this turn began.
    async fn is_active(&mut self, run: &str) -> Flow<bool> {
        let items = self.session_runs(0).await?;
        let Some(last) = items.iter().rev().find(|d| d.item.run == run) else { return Ok(false) };
        let over = matches!(last.item.what, RunEvent::Ended { .. } | RunEvent::Failed { .. });
        Ok(!over || last.sequence > self.cursor.opened)
    }

    // ---- lines

    async fn text(&mut self, text: &str) -> Flow {
        self.send(json!({"type": "text", "text": text})).await
    }

    /// Tells what the message was answered with, once over all repetitions of the request.
    async fn say_once(&mut self, text: &str) -> Flow {
        if self.cursor.told.as_deref() == Some(SAID) {
            return Ok(());
        }
        self.cursor.told = Some(SAID.into());
        self.text(&format!("\n\n{text}\n\n")).await
    }

    async fn status(&mut self, text: &str, done: bool) -> Flow {
        self.send(json!({"type": "status", "text": text, "done": done})).await
    }

    async fn end<T>(&mut self, reason: &str, text: Option<&str>) -> Flow<T> {
        let mut line = json!({"type": "end", "reason": reason});
        if let Some(text) = text {
            line["text"] = text.into();
        }
        self.raw(&line).await?;
        Err(Over::Ended)
    }

    /// Sends a line with the place up to which everything has been told with it.
    async fn send(&mut self, mut line: Value) -> Flow {
        line["cursor"] = self.cursor.to_string().into();
        self.raw(&line).await
    }

    async fn raw(&mut self, line: &Value) -> Flow {
        let line = Bytes::from(format!("{line}\n"));
        tokio::select! {
            sent = self.lines.send(line) => sent.map_err(|_| Over::Gone),
            () = self.emitter.shutdown.cancelled() => Err(Over::BrokenOff),
        }
    }

    /// Waits for something while the stream stays alive.
    fn during<T>(&mut self, work: impl Future<Output = T>) -> impl Future<Output = Flow<T>> {
        let mut work = Box::pin(work);
        async move {
            loop {
                tokio::select! {
                    done = &mut work => return Ok(done),
                    () = self.lines.closed() => return Err(Over::Gone),
                    () = self.emitter.shutdown.cancelled() => return Err(Over::BrokenOff),
                    _ = self.ping.tick() => self.send(json!({"type": "ping"})).await?,
                }
            }
        }
    }
}

fn ask_line(stored: &Stored<Entry>, surface: Surface, request: &TurnRequest) -> Value {
    let Entry { key, question, deadline, .. } = &stored.value;
    let prompts: Vec<Value> = question
        .prompts
        .iter()
        .map(|prompt| {
            let options: Vec<Value> = prompt
                .options
                .iter()
                .map(|option| json!({"label": option.label, "description": option.description.as_deref().unwrap_or("")}))
                .collect();
            json!({
                "id": prompt.id,
                "header": prompt.short_header(),
                "text": prompt.text,
                "options": options,
                "multiple": prompt.multiple,
                "allow_other": prompt.allow_other,
                "secret": prompt.secret,
                "required": prompt.required,
            })
        })
        .collect();
    json!({
        "type": "ask",
        "question": key.question,
        "surface": surface,
        "revision": stored.revision,
        "deadline_ms": deadline,
        "title": "",
        "prompts": prompts,
        "can_park": request.surfaces.contains(&Surface::Durable) && can_park(question),
    })
}

/// Whether a durable card can hold the question: no secrets, and it has no multi-select.
fn can_park(question: &Question) -> bool {
    !question.is_secret() && question.prompts.len() <= 3 && !question.prompts.iter().any(|p| p.multiple)
}
