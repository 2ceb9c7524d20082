//! Alarms: one heap, nothing per question. They run on the monotonic clock, so that a jump of the
//! wall clock expires nothing.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

use ask_bus::BusError;
use ask_core::key::QuestionKey;
use ask_core::surface::Surface;
use ask_core::time::Timestamp;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tracing::Instrument;

use crate::{Router, spans};

/// What is due at some time.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Alarm {
    /// A question's deadline.
    Deadline(QuestionKey),
    /// Steps of a question have waited long enough for another write to carry them.
    Steps(QuestionKey),
    /// A surface should have reported delivery by now.
    Undelivered(QuestionKey, Surface),
}

/// When and what.
pub(crate) type Timed = (Instant, Alarm);

/// The alarms of one router.
pub(crate) struct Alarms {
    incoming: mpsc::UnboundedReceiver<Timed>,
    heap: BinaryHeap<Reverse<Timed>>,
}

impl Alarms {
    /// The heap, and where to set an alarm.
    pub(crate) fn new() -> (mpsc::UnboundedSender<Timed>, Self) {
        let (set, incoming) = mpsc::unbounded_channel();
        (set, Self { incoming, heap: BinaryHeap::new() })
    }

    /// The next alarm that is due. Cancel safe.
    pub(crate) async fn next(&mut self) -> Option<Alarm> {
        loop {
            let next = self.heap.peek().map(|Reverse((at, _))| *at);
            let due = async {
                match next {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                timed = self.incoming.recv() => self.heap.push(Reverse(timed?)),
                () = due => return self.heap.pop().map(|Reverse((_, alarm))| alarm),
            }
        }
    }
}

/// How long after its deadline this replica expires a question, so that not all do so at once.
pub(crate) fn apart(key: &QuestionKey, replica: u64, stagger: Duration) -> Duration {
    let mut hash = DefaultHasher::new();
    (key, replica).hash(&mut hash);
    stagger.mul_f64((hash.finish() % 1000) as f64 / 1000.0)
}

impl Router {
    /// Ends a question at its deadline. The alarm came from the monotonic clock, so it is due
    /// whatever the wall clock says now.
    pub(crate) async fn expire(&self, key: &QuestionKey) {
        let Some(stored) = self.pending.get(key) else { return };
        let span = spans::question("expire", "deadline", &stored.value);
        async {
            // What arrives meanwhile may show that somebody was there.
            let is_current = self.pending.nothing_offered(key) && self.present.is_current(&self.bus).await;
            let nothing_offered = || is_current && self.pending.nothing_offered(key);
            let decided = self.decide(key, |entry| entry.fall_due(nothing_offered(), Timestamp::now())).await;
            match decided {
                Ok(true) => tracing::info!(question = %key.question, "expired"),
                Ok(false) => {}
                Err(error) => {
                    tracing::warn!(question = %key.question, %error, "could not be expired; trying again");
                    self.set_alarm(Duration::from_millis(500), Alarm::Deadline(key.clone()));
                }
            }
        }
        .instrument(span)
        .await;
    }

    /// Decides a pending question by a rule of the router. False when it is decided already or
    /// the rule does not apply.
    pub(crate) async fn decide(
        &self,
        key: &QuestionKey,
        rule: impl Fn(&ask_core::entry::Entry) -> Option<ask_core::entry::Entry>,
    ) -> Result<bool, BusError> {
        let mut known = self.pending.get(key);
        for _ in 0..crate::ATTEMPTS {
            // What the watch gave is good enough for the first try: a failed one decides nothing.
            let stored = match known.take() {
                Some(stored) => stored,
                None => match self.bus.question(key).await? {
                    Some(stored) => stored,
                    None => return Ok(false),
                },
            };
            let Some(next) = rule(&stored.value) else {
                self.pending.apply(stored, &self.alarms_of(), None);
                return Ok(false);
            };
            let next = self.pending.with_steps(next);
            match self.bus.write_decided(&next, stored.revision).await {
                Ok(revision) => {
                    self.decided(&next, revision);
                    return Ok(true);
                }
                Err(BusError::Conflict { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Err(BusError::Conflict { key: key.to_string() })
    }

    pub(crate) fn set_alarm(&self, after: Duration, alarm: Alarm) {
        // The receiver lives as long as the router runs.
        let _ = self.alarms.send((Instant::now() + after, alarm));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(question: &str) -> QuestionKey {
        format!("g.s.r.{question}").parse().unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn alarms_come_in_the_order_of_their_time() {
        let (set, mut alarms) = Alarms::new();
        let now = Instant::now();
        for (question, after) in [("later", 20), ("first", 5), ("last", 3600)] {
            set.send((now + Duration::from_secs(after), Alarm::Deadline(key(question)))).unwrap();
        }
        for question in ["first", "later", "last"] {
            assert_eq!(alarms.next().await, Some(Alarm::Deadline(key(question))));
        }
        assert_eq!(now.elapsed().as_secs(), 3600);
    }

    #[test]
    fn replicas_expire_a_question_apart_but_never_early() {
        let stagger = Duration::from_millis(100);
        let each: Vec<Duration> = (0..20).map(|replica| apart(&key("q"), replica, stagger)).collect();
        assert!(each.iter().all(|d| *d <= stagger));
        assert!(each.iter().any(|d| d != &each[0]));
    }
}
