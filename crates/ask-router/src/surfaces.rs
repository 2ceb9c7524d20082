//! Choosing where a pending question is shown, and telling the front ends.

use std::time::Duration;

use ask_bus::BusError;
use ask_core::SCHEMA;
use ask_core::entry::{Entry, Road, StepKind};
use ask_core::key::QuestionKey;
use ask_core::outcome::Undeliverable;
use ask_core::surface::{self, Showing, Surface};
use ask_core::time::Timestamp;
use ask_core::wire::ShowStep;
use tracing::Instrument;

use crate::deadlines::Alarm;
use crate::{Router, spans};

/// Steps that no other write carries within this time are written by themselves.
pub(crate) const STEPS_WITHIN: Duration = Duration::from_secs(1);

impl Router {
    /// Shows a pending question where the rules say, now. Called when it is asked and whenever who
    /// is there may have changed; repeating it is harmless.
    pub(crate) async fn show(&self, key: &QuestionKey) {
        let Some(stored) = self.pending.get(key) else { return };
        if let Err(error) = self.show_entry(&stored.value).await {
            tracing::warn!(question = %key.question, %error, "could not be shown; trying again");
            self.set_alarm(STEPS_WITHIN, Alarm::Undelivered(key.clone(), Surface::Gateway));
        }
    }

    async fn show_entry(&self, entry: &Entry) -> Result<(), BusError> {
        let (key, session_key) = (&entry.key, entry.key.session_key());
        if self.answer_from_record(entry).await? {
            return Ok(());
        }
        let session = self.bus.session(&session_key).await?;
        let owner = session.as_ref().map(|s| s.value.owner.as_str());
        let limits = self.config.limits;
        let before = self.pending.asked_before(entry, owner, limits.per_user);
        // What was shown once stays, whatever the limits say later; and the Gateway's own surfaces
        // show what nobody here can be shown.
        let was_shown = entry.steps.iter().any(|step| matches!(step.what, StepKind::Surface { .. }));
        let is_ours = session.is_some() || entry.road != Road::Native;
        if let Some(rule) = limits.exceeded(before).filter(|_| is_ours && !was_shown) {
            return self.give_up(entry, Undeliverable::TooManyPending, rule).await;
        }
        let audience = self.present.audience(&session_key, session.as_ref().map(|s| &s.value.surfaces));
        if self.present.somebody(&session_key) {
            self.pending.evidence_lost(&session_key);
        }
        let (refused, unreported) = self.pending.tried(key);
        let tried: Vec<Surface> = refused.iter().chain(&unreported).copied().collect();
        let mut choice = surface::choose(&entry.question, entry.road, &audience, &tried);
        if !unreported.is_empty() && matches!(choice.0, Showing::Undeliverable(_)) {
            // A report that did not come is no refusal: begin again with the best surface.
            self.pending.try_unreported_again(key);
            choice = surface::choose(&entry.question, entry.road, &audience, &refused);
        }
        match choice {
            (Showing::Wait, rule) => {
                tracing::debug!(question = %key.question, rule, "waits");
                Ok(())
            }
            (Showing::Show(surface), rule) => self.show_on(entry, surface, rule).await,
            // Whoever has seen it may still answer it.
            (Showing::Undeliverable(_), rule) if self.pending.was_delivered_anywhere(key) => {
                tracing::debug!(question = %key.question, rule, "was delivered, so it waits");
                Ok(())
            }
            (Showing::Undeliverable(reason), rule) => self.give_up(entry, reason, rule).await,
        }
    }

    async fn give_up(
        &self,
        entry: &Entry,
        reason: Undeliverable,
        rule: &'static str,
    ) -> Result<(), BusError> {
        let span = spans::question("choose surface", rule, entry);
        self.decide(&entry.key, |entry| entry.undeliverable(reason, rule, Timestamp::now()))
            .instrument(span)
            .await
            .map(drop)
    }

    /// Gives a question the answer that the same question got before its call was lost. True when
    /// it is decided by that.
    async fn answer_from_record(&self, entry: &Entry) -> Result<bool, BusError> {
        for lost in self.pending.lost(&entry.key.session_key()) {
            let Some(first) = self.bus.question(&lost).await? else { continue };
            let Some(given) = first.value.give_again(entry) else { continue };
            if given != first.value {
                match self.bus.write_given_again(&given, first.revision).await {
                    Ok(_) => {}
                    // Another question may have it now.
                    Err(BusError::Conflict { .. }) => continue,
                    Err(error) => return Err(error),
                }
            }
            let span = spans::question("answer from record", "asked_again_after_its_call_was_lost", entry);
            let decide = self.decide(&entry.key, |entry| entry.answer_from_record(&given, Timestamp::now()));
            if decide.instrument(span).await? {
                tracing::info!(question = %entry.key.question, from = %lost.question, "answered from the record");
                return Ok(true);
            }
        }
        Ok(false)
    }

    async fn show_on(&self, entry: &Entry, surface: Surface, rule: &'static str) -> Result<(), BusError> {
        let step = ShowStep { schema: SCHEMA, key: entry.key.clone(), surface, rule: rule.into() };
        // Also for a step that another router has put on record: that one may be gone.
        if self.pending.await_report(&entry.key, surface) {
            self.set_alarm(self.config.delivery_within, Alarm::Undelivered(entry.key.clone(), surface));
        }
        let first = self.pending.hold(&entry.key, StepKind::Surface { surface, rule: rule.into() });
        if !first {
            return self.bus.publish_step(&step).await;
        }
        let span = spans::question("choose surface", rule, entry);
        span.record("askbus.surface", surface.name());
        self.set_alarm(STEPS_WITHIN, Alarm::Steps(entry.key.clone()));
        self.bus.publish_step(&step).instrument(span).await
    }

    /// Goes on to the next surface when this one has not reported delivery.
    pub(crate) async fn try_next_surface(&self, key: &QuestionKey, surface: Surface) {
        if self.pending.get(key).is_none() || self.pending.was_delivered(key, surface) {
            return;
        }
        if surface != Surface::Gateway {
            tracing::info!(question = %key.question, surface = surface.name(), "no report of delivery");
            self.pending.did_not_report(key, surface);
        }
        self.show(key).await;
    }

    /// Writes the steps that are held for a question, also after its decision.
    pub(crate) async fn write_steps(&self, key: &QuestionKey) {
        if let Err(error) = self.put_steps_on_record(key).await {
            tracing::warn!(question = %key.question, %error, "its steps are not on record yet");
            self.set_alarm(STEPS_WITHIN, Alarm::Steps(key.clone()));
        }
    }

    /// Writes the steps of all questions, before this router stops.
    pub(crate) async fn write_all_steps(&self) {
        for key in self.pending.with_held_steps() {
            if let Err(error) = self.put_steps_on_record(&key).await {
                tracing::warn!(question = %key.question, %error, "its steps are lost with this router");
            }
        }
    }

    /// Writes what is held for the entry, if anything.
    pub(crate) async fn put_steps_on_record(&self, key: &QuestionKey) -> Result<(), BusError> {
        for _ in 0..crate::ATTEMPTS {
            let Some(stored) = self.bus.question(key).await? else { return Ok(()) };
            let next = self.pending.with_steps(stored.value.clone());
            if next == stored.value {
                self.pending.recorded(&next);
                return Ok(());
            }
            match self.bus.write_steps(&next, stored.revision).await {
                Ok(_) => {
                    self.pending.recorded(&next);
                    return Ok(());
                }
                Err(BusError::Conflict { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Err(BusError::Conflict { key: key.to_string() })
    }
}
