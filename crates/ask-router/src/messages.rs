//! Typed messages: the write of the session's entry is the decision, then its effect is done.

use ask_bus::{BusError, Incoming, Stored};
use ask_core::SCHEMA;
use ask_core::entry::{Entry, StepKind};
use ask_core::key::{QuestionKey, SessionKey, message_run_id};
use ask_core::reply::Reply;
use ask_core::route::{Route, Typed, route, send_by};
use ask_core::session::{Effect, Known, MessageDecision, RoutedMessage, SendBy, Session};
use ask_core::take::Trust;
use ask_core::time::Timestamp;
use ask_core::wire::{ChatItem, ReplyRequest, ReplyResponse, SayRequest, SayResponse, StopResponse};
use tracing::Instrument;

use crate::deadlines::Alarm;
use crate::surfaces::STEPS_WITHIN;
use crate::{Router, spans};

const ATTACHMENTS_STAY: &str = "Your text was taken as the answer. An answer carries no attachments, so the agent has not got them: send them again as a message of their own.";

impl Router {
    pub(crate) async fn on_say(&self, incoming: Incoming<SayRequest>) {
        let span = spans::request("say", incoming.traceparent.as_deref());
        async {
            let rule = incoming.request.goes_on.then_some("continue_is_no_answer");
            let response = self.say(&incoming.request, rule).await.unwrap_or_else(|error| match error {
                BusError::TooLarge { .. } => SayResponse::Refused { why: error.to_string() },
                error => {
                    tracing::warn!(%error, "a message was not routed");
                    SayResponse::Retry { why: error.to_string() }
                }
            });
            if let SayResponse::Routed { rule, .. } = &response {
                tracing::Span::current().record("askbus.rule", rule.as_str());
            }
            incoming.answer(&response).await;
        }
        .instrument(span)
        .await;
    }

    /// Sends a late answer to the agent as a message; false where its session has no owner yet.
    pub(crate) async fn say_late(
        &self,
        session: &SessionKey,
        reply: &Reply,
        text: String,
    ) -> Result<bool, BusError> {
        let Some(stored) = self.bus.session(session).await? else { return Ok(false) };
        let Session { owner, front, chat, surfaces, .. } = stored.value;
        let request = SayRequest {
            schema: SCHEMA,
            session: session.clone(),
            message: format!("late-{}", reply.id),
            user: owner,
            user_name: reply.by.name.clone(),
            front,
            chat,
            surfaces,
            text,
            attachments: Vec::new(),
            on_screen: None,
            seen: None,
            goes_on: false,
        };
        // Boxed, since a typed answer that is late comes from `say` itself.
        match Box::pin(self.say(&request, Some("late_reply"))).await? {
            SayResponse::Retry { why } => {
                Err(BusError::Unavailable { what: "the late answer was not sent".into(), reason: why })
            }
            said => Ok(matches!(said, SayResponse::Routed { .. })),
        }
    }

    /// Routes a message once, and does its effect as often as it is repeated (S1, S2). A message
    /// that has a `rule` already goes to the agent whatever it says.
    async fn say(&self, request: &SayRequest, rule: Option<&str>) -> Result<SayResponse, BusError> {
        for _ in 0..crate::ATTEMPTS {
            let stored = self.bus.session(&request.session).await?;
            let revision = stored.as_ref().map_or(0, |s| s.revision);
            let session = stored.map_or_else(|| bind(request), |s| s.value);
            if session.owner != request.user {
                return Ok(SayResponse::WrongUser);
            }
            match session.known(&request.message, request.seen) {
                Known::Routed(message) => {
                    let message = message.clone();
                    return self.effect(request, Stored { value: session, revision }, &message).await;
                }
                Known::TooOld => {
                    let why = "This message is older than what the session remembers, so it can't be told whether it was sent. Please send it again as a new message.";
                    return Ok(SayResponse::Refused { why: why.into() });
                }
                Known::New => {}
            }
            let message = self.decide_route(request, rule).await?;
            let mut next = session.routed(message.clone());
            next.surfaces = request.surfaces.clone();
            match self.bus.write_session(&next, revision).await {
                Ok(revision) => {
                    return self.effect(request, Stored { value: next, revision }, &message).await;
                }
                Err(BusError::Conflict { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Err(BusError::Conflict { key: request.session.to_string() })
    }

    /// Decides from the entries alone, never from this router's memory (S4, S5).
    async fn decide_route(
        &self,
        request: &SayRequest,
        rule: Option<&str>,
    ) -> Result<RoutedMessage, BusError> {
        let entries = self.bus.questions_of(&request.session).await?;
        let open: Vec<&Entry> = entries.iter().map(|e| &e.value).filter(|e| e.takes_messages()).collect();
        let typed = Typed {
            text: &request.text,
            attachments: !request.attachments.is_empty(),
            on_screen: request.on_screen.as_deref(),
        };
        let (route, rule) = match rule {
            Some(rule) => (Route::Message(send_by(SendBy::ChatSend, false, open.iter().copied())), rule),
            None => route(typed, &open),
        };
        if let Route::Correct(index, text) = &route {
            let key = &open[*index].key;
            if self.pending.hold(key, StepKind::Corrected { why: text.clone() }) {
                self.set_alarm(STEPS_WITHIN, Alarm::Steps(key.clone()));
            }
        }
        let decision = route.decision(&open, &message_run_id(&request.session, &request.message));
        Ok(RoutedMessage { id: request.message.clone(), at: Timestamp::now(), decision, rule: rule.into() })
    }

    /// Does, or redoes, what was decided about a message.
    async fn effect(
        &self,
        request: &SayRequest,
        session: Stored<Session>,
        message: &RoutedMessage,
    ) -> Result<SayResponse, BusError> {
        let mut decision = message.decision.clone();
        let mut note = None;
        let effect = session.value.effect(message);
        if !matches!(effect, Effect::Stop { .. } | Effect::Nothing)
            && let Some(through) = session.value.owed_stop(&message.id)
            && let StopResponse::Retry { why } = self.stop_session(&request.session, Some(through)).await?
        {
            return Ok(SayResponse::Retry { why });
        }
        match effect {
            Effect::Send { run, send, number } => {
                let item = ChatItem {
                    schema: SCHEMA,
                    session: request.session.clone(),
                    message: request.message.clone(),
                    run,
                    number,
                    send,
                    text: request.text.clone(),
                    attachments: request.attachments.clone(),
                };
                self.bus.write_chat(&item).await?;
            }
            Effect::Reply { question } => {
                let rule = StepKind::Message { message: request.message.clone(), rule: message.rule.clone() };
                note = self.answer(request, &question, rule).await?;
                if note.is_some() && matches!(decision, MessageDecision::Answer { .. }) {
                    decision = MessageDecision::Late { question };
                    let late = |session: &Session| session.answer_was_late(&request.message);
                    self.change_session(&request.session, late).await?;
                } else if note.is_none() && !request.attachments.is_empty() {
                    note = Some(ATTACHMENTS_STAY.into());
                }
            }
            Effect::Stop { through } => {
                if let StopResponse::Retry { why } =
                    self.stop_session(&request.session, Some(through)).await?
                {
                    return Ok(SayResponse::Retry { why });
                }
            }
            Effect::Nothing => {}
        }
        let (rule, count) = (message.rule.clone(), session.value.count);
        Ok(SayResponse::Routed { decision, rule, count, note })
    }

    /// Hands the message in as its question's reply. `Some` says who was first instead.
    async fn answer(
        &self,
        request: &SayRequest,
        question: &str,
        step: StepKind,
    ) -> Result<Option<String>, BusError> {
        let key: QuestionKey = question.parse()?;
        let Some(stored) = self.bus.question(&key).await? else {
            return Ok(Some("The question is no longer on record.".into()));
        };
        let Some(reply) = request.as_reply(&stored.value.question) else {
            return Ok(Some("The message does not answer the question.".into()));
        };
        if stored.value.is_pending() && self.pending.hold(&key, step) {
            self.set_alarm(STEPS_WITHIN, Alarm::Steps(key.clone()));
        }
        let request = ReplyRequest { schema: SCHEMA, key, reply };
        let taken = self.take_reply(&request, Trust::Owner).await?;
        Ok(match taken {
            ReplyResponse::Saved => None,
            ReplyResponse::Closed { outcome, by, sent_as_message, .. } => {
                let sent = if sent_as_message { " It went to the agent as a message instead." } else { "" };
                Some(format!("The question was {} already, by {by}.{sent}", outcome.status()))
            }
            ReplyResponse::Retry { why } => {
                return Err(BusError::Unavailable { what: "the answer was not written".into(), reason: why });
            }
            ReplyResponse::Invalid { invalid } => Some(format!("The answer was not taken: {invalid}.")),
            ReplyResponse::WrongUser | ReplyResponse::UnknownQuestion => {
                Some("The question is not one of this chat's.".into())
            }
        })
    }

    /// Changes a session's entry; what `change` gives no value for stays as it is.
    pub(crate) async fn change_session(
        &self,
        key: &SessionKey,
        change: impl Fn(&Session) -> Option<Session>,
    ) -> Result<(), BusError> {
        for _ in 0..crate::ATTEMPTS {
            let Some(stored) = self.bus.session(key).await? else { return Ok(()) };
            let Some(next) = change(&stored.value) else { return Ok(()) };
            match self.bus.write_session(&next, stored.revision).await {
                Ok(_) => return Ok(()),
                Err(BusError::Conflict { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Err(BusError::Conflict { key: key.to_string() })
    }
}

/// A session's first message binds it to its sender, for good.
fn bind(request: &SayRequest) -> Session {
    Session {
        schema: SCHEMA,
        key: request.session.clone(),
        owner: request.user.clone(),
        front: request.front.clone(),
        chat: request.chat.clone(),
        surfaces: request.surfaces.clone(),
        bound_at: Timestamp::now(),
        count: 0,
        stopped_through: 0,
        stop_done: 0,
        messages: Default::default(),
    }
}
