//! What a router does with a reply: which write it needs, and what its sender hears after it.

use crate::entry::{DecidedBy, Entry, Verdict};
use crate::outcome::{CancelReason, Outcome};
use crate::question::Invalid;
use crate::reply::{Answer, Reply, ReplyContent};
use crate::surface::Surface;
use crate::time::Timestamp;
use crate::wire::ReplyResponse;

/// Whose replies are taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trust {
    /// Only the session owner's; a late one is listed.
    Owner,
    /// Anybody's who may publish there: the gateway's adapters and operators.
    Anybody,
}

/// What is to be done about a reply. Where a write fails because the entry has moved on, nothing
/// is decided: the entry is read again and the reply taken again (rule N6).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Taken {
    /// Write this decision by compare-and-set, then answer "saved".
    Decide(Box<Entry>),
    /// Write this entry, which lists the reply as late, then give the answer.
    ListLate(Box<Entry>, ReplyResponse),
    /// Write nothing and give the answer.
    Answer(ReplyResponse),
}

impl Entry {
    /// What is to be done about a reply, as often as it is repeated.
    pub fn take(&self, reply: &Reply, trust: Trust, now: Timestamp) -> Taken {
        if let (Trust::Owner, Err(invalid)) = (trust, check_is_of_a_person(reply)) {
            return Taken::Answer(ReplyResponse::Invalid { invalid });
        }
        match self.reply(reply, now) {
            Verdict::Decide(next) => Taken::Decide(next),
            Verdict::Saved => Taken::Answer(ReplyResponse::Saved),
            Verdict::Invalid(invalid) => Taken::Answer(ReplyResponse::Invalid { invalid }),
            Verdict::Late(next) if trust == Trust::Owner => Taken::ListLate(next, self.closed()),
            Verdict::Late(_) | Verdict::KnownLate => Taken::Answer(self.closed()),
        }
    }

    /// What the sender of a reply hears when another decision came first. Everything in it is
    /// derived from the entry (rule N8).
    pub fn closed(&self) -> ReplyResponse {
        let Some(decision) = self.decision() else {
            return ReplyResponse::Retry { why: "the question is still pending".into() };
        };
        let (by, surface) = match &decision.by {
            DecidedBy::Reply { responder, surface, .. } => {
                (responder.display_name().to_owned(), Some(*surface))
            }
            DecidedBy::Record { responder, .. } => (responder.display_name().to_owned(), None),
            DecidedBy::Rule { name } => (name.clone(), None),
        };
        let outcome = hidden(self.shown_outcome().unwrap_or(&decision.outcome));
        ReplyResponse::Closed { outcome, at: decision.at, by, surface, sent_as_message: false }
    }
}

/// What only the gateway's adapters and operators say has subjects of its own.
fn check_is_of_a_person(reply: &Reply) -> Result<(), Invalid> {
    if matches!(reply.surface, Surface::Gateway | Surface::Cli) {
        return Err(Invalid::new("surface", "one of a front end", reply.surface.name()));
    }
    match &reply.content {
        ReplyContent::Answers { .. } | ReplyContent::Declined => Ok(()),
        ReplyContent::Cancelled { reason: CancelReason::User | CancelReason::ChatSwitch } => Ok(()),
        content => {
            let limit = "answers, declined, or cancelled by the user or a chat switch";
            Err(Invalid::new("content", limit, format!("{content:?}")))
        }
    }
}

fn hidden(outcome: &Outcome) -> Outcome {
    let mut outcome = outcome.clone();
    if let Outcome::Answered { answers } = &mut outcome {
        for answer in answers.values_mut().filter(|a| matches!(a, Answer::Sealed(_))) {
            *answer = Answer::Hidden;
        }
    }
    outcome
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::entry::Road;
    use crate::question::{Prompt, Question};
    use crate::reply::{Responder, Sealed};

    const NOW: Timestamp = Timestamp(3);

    fn pending(secret: bool) -> Entry {
        let question = Question::new(vec![Prompt { secret, ..Prompt::free_text("Where?") }]).unwrap();
        let key = "g.s.r.q".parse().unwrap();
        Entry::ask(key, Road::Plugin, "t", "c", question, Timestamp(1), Timestamp(9), None).unwrap()
    }

    fn reply(id: &str, answer: Answer) -> Reply {
        let by = Responder { user: "alice".into(), name: Some("Alice".into()), chat: None };
        let content = ReplyContent::Answers { answers: [("answer".into(), answer)].into() };
        Reply { id: id.into(), by, surface: Surface::Card, content }
    }

    fn decided(entry: &Entry, reply: &Reply) -> Entry {
        let Taken::Decide(next) = entry.take(reply, Trust::Owner, NOW) else { panic!() };
        *next
    }

    #[test]
    fn n5_n6_a_reply_decides_once_and_is_saved_for_ever() {
        let (first, other) = (reply("r1", Answer::text("here")), reply("r2", Answer::text("there")));
        let won = decided(&pending(false), &first);
        assert_eq!(won.take(&first, Trust::Owner, NOW), Taken::Answer(ReplyResponse::Saved));
        let Taken::ListLate(listed, told) = won.take(&other, Trust::Owner, NOW) else { panic!() };
        assert!(matches!(&told, ReplyResponse::Closed { by, .. } if by == "Alice"));
        assert_eq!(listed.late_count, 1);
        assert_eq!(listed.take(&other, Trust::Owner, NOW), Taken::Answer(told.clone()));
        assert_eq!(won.take(&other, Trust::Anybody, NOW), Taken::Answer(told));
        let blank = reply("r3", Answer::text(" "));
        let taken = pending(false).take(&blank, Trust::Owner, NOW);
        assert!(matches!(taken, Taken::Answer(ReplyResponse::Invalid { .. })));
    }

    #[test]
    fn a_front_end_says_only_what_a_person_can_say() {
        let cancelled = |reason| ReplyContent::Cancelled { reason };
        let table = [
            (Surface::Card, ReplyContent::Declined, true),
            (Surface::Card, cancelled(CancelReason::User), true),
            (Surface::Card, cancelled(CancelReason::ChatSwitch), true),
            (Surface::Card, cancelled(CancelReason::RunEnded), false),
            (Surface::Card, ReplyContent::Expired, false),
            (Surface::Gateway, ReplyContent::Declined, false),
            (Surface::Cli, ReplyContent::Declined, false),
        ];
        for (surface, content, taken) in table {
            let reply = Reply { surface, content, ..reply("r1", Answer::text("here")) };
            let is_taken = |trust| matches!(pending(false).take(&reply, trust, NOW), Taken::Decide(_));
            assert_eq!((is_taken(Trust::Owner), is_taken(Trust::Anybody)), (taken, true), "{reply:?}");
        }
    }

    #[test]
    fn n8_who_was_first_is_in_the_entry_and_a_secret_is_not_told() {
        let sealed = Sealed { key_id: "k".into(), encapsulated: "e".into(), ciphertext: "c".into() };
        let won = decided(&pending(true), &reply("r1", Answer::Sealed(sealed)));
        let ReplyResponse::Closed { outcome: Outcome::Answered { answers }, at, surface, .. } = won.closed()
        else {
            panic!()
        };
        assert_eq!((at, surface, &answers["answer"]), (NOW, Some(Surface::Card), &Answer::Hidden));
        let expired = pending(false).expire(false, Timestamp(9)).unwrap();
        assert!(
            matches!(expired.closed(), ReplyResponse::Closed { by, surface: None, .. } if by == "deadline")
        );
        assert!(matches!(pending(false).closed(), ReplyResponse::Retry { .. }));
    }
}
