//! A question that is asked again unchanged, because its first call was lost with its gateway, is
//! answered from the record instead of by the person (rule R1).

use std::collections::BTreeMap;
use std::time::Duration;

use crate::call::GATEWAY_RESTART;
use crate::entry::{Entry, Road};
use crate::outcome::{Outcome, Returned};
use crate::question::{Prompt, Question};
use crate::reply::Answer;

/// How long an answer that was lost on its way is used again.
pub const RECORD_KEPT: Duration = Duration::from_secs(600);

/// Words by which something is allowed or forbidden. A question in which one of them stands is
/// asked of the person again: that it was no approval costs a question, the opposite a mistake.
const ALLOWING: &[&str] = &[
    "abort accept agree agreed allow always approve cancel confirm continue decline deny disallow forbid",
    "grant never no nope not ok okay permit permission proceed refuse reject stop sure y yeah yep yes n",
    // In the languages that people answer in, also without accents.
    "ja j jo jep klar nein nee nej ne nie abbrechen ablehnen bestätigen erlauben fortfahren zustimmen",
    "oui non accepter refuser confirmer autoriser annuler sí si aceptar rechazar confirmar permitir",
    "cancelar sim não nao aceitar recusar sì accetta rifiuta conferma annulla tak anuluj ano da да нет",
    "так ні evet hayır hayir kyllä kylla ei igen nem ναι όχι نعم لا כן לא हाँ हां नहीं",
    "是 否 好 不 对 对的 好的 はい いいえ 네 예 아니요 아니오",
];

/// The same where words are not set apart, and as phrases.
const ALLOWING_PHRASES: &[&str] = &[
    "go ahead",
    "do it",
    "ship it",
    "d'accord",
    "是否",
    "吗",
    "可以",
    "确认",
    "允许",
    "取消",
    "ですか",
    "ますか",
];

/// First words of a sentence that asks for a yes or a no.
const ASKING_LEAVE: &[&str] = &[
    "am are can could did do does has have is may must shall should was were will would",
    "darf dürfen hast habt ist kann kannst können möchten möchtest muss sind soll sollen willst wollen",
    "est dois doit faut peut puis voulez veux debo puedo puede quieres devo posso vuoi deve quer",
    "kan mag moet wil vil må får skal ska czy можно нужно",
];

/// True when the answer in `entry` may be given again: its call was lost with its gateway, nothing
/// in it is secret, and it allowed nothing.
pub fn was_lost(entry: &Entry) -> bool {
    let Some(Returned::Unconfirmed { why }) = entry.returned() else { return false };
    let Some(Outcome::Answered { answers }) = entry.decision().map(|d| &d.outcome) else { return false };
    is_call(entry.road)
        && why == GATEWAY_RESTART
        && answers.values().all(|answer| matches!(answer, Answer::Given { .. }))
        && !entry.question.is_secret()
        && !is_approval(&entry.question, answers)
}

/// True when `asked` is the question of `first` again, unchanged and in time, and the answer was
/// given to no other.
pub fn is_asked_again(asked: &Entry, first: &Entry) -> bool {
    let answered = first.decision().map(|d| d.at);
    asked.is_pending()
        && was_lost(first)
        && is_call(asked.road)
        && asked.key != first.key
        && asked.key.session_key() == first.key.session_key()
        && asked.tool == first.tool
        && asked.question == first.question
        && answered.is_some_and(|at| asked.asked_at >= at && asked.asked_at.since(at) <= RECORD_KEPT)
        && first.given_again.as_ref().is_none_or(|to| *to == asked.key.to_string())
}

/// True where something may have been allowed or forbidden. Nobody marks such questions, so this
/// goes by every word of question, options and answers, and takes each choice of at most two for
/// one.
pub fn is_approval(question: &Question, answers: &BTreeMap<String, Answer>) -> bool {
    let own_words = answers.values().filter_map(|answer| match answer {
        Answer::Given { other, .. } => other.as_deref(),
        Answer::Sealed(_) | Answer::Hidden => None,
    });
    let of_prompt = |prompt: &Prompt| {
        let options = prompt.options.iter().flat_map(|o| [Some(o.label.as_str()), o.value.as_deref()]);
        matches!(prompt.options.len(), 1 | 2)
            || asks_leave(&prompt.text)
            || options.flatten().chain([prompt.text.as_str(), prompt.header.as_str()]).any(allows)
    };
    question.prompts.iter().any(of_prompt) || own_words.into_iter().any(allows)
}

fn allows(text: &str) -> bool {
    let text = text.to_lowercase();
    words(&text).any(|word| is_listed(ALLOWING, word))
        || ALLOWING_PHRASES.iter().any(|phrase| text.contains(phrase))
}

fn asks_leave(text: &str) -> bool {
    let text = text.to_lowercase();
    let mut sentences = text.split(['.', '!', '?', ':', ';', ',', '\n', '(', '¿']);
    sentences.any(|sentence| words(sentence).next().is_some_and(|word| is_listed(ASKING_LEAVE, word)))
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    // Marks belong to the word in some scripts, so it ends only where something else begins.
    text.split(|c: char| {
        c.is_whitespace() || c.is_ascii_punctuation() || "–—…“”„«»。、，？！（）".contains(c)
    })
    .filter(|word| !word.is_empty())
}

fn is_listed(list: &[&str], word: &str) -> bool {
    list.iter().any(|line| line.split(' ').any(|listed| listed == word))
}

fn is_call(road: Road) -> bool {
    matches!(road, Road::Plugin | Road::Mcp)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::{CALLER_CANCELLED, NO_PROOF, RUN_ENDED};
    use crate::entry::{DecidedBy, Verdict};
    use crate::question::Choice;
    use crate::reply::{Reply, ReplyContent, Responder, Sealed};
    use crate::surface::Surface;
    use crate::time::Timestamp;

    const MINUTE: u64 = 60_000;

    fn asked(call: &str, at: u64, change: impl Fn(&mut Entry)) -> Entry {
        let options = ["Lisbon", "Oslo", "Kyoto"].map(Choice::label).into();
        let question = Question::new(vec![Prompt { options, ..Prompt::free_text("Where to?") }]).unwrap();
        let key = format!("g.s.r.{call}").parse().unwrap();
        let (at, deadline) = (Timestamp(at), Timestamp(at + 5 * MINUTE));
        let mut entry = Entry::ask(key, Road::Plugin, "t", call, question, at, deadline, None).unwrap();
        change(&mut entry);
        entry
    }

    /// Answered at minute 1, and not returned for this reason.
    fn lost(why: &str, answer: Answer, change: impl Fn(&mut Entry)) -> Entry {
        let by = Responder { user: "alice".into(), name: None, chat: None };
        let content = ReplyContent::Answers { answers: [("answer".into(), answer)].into() };
        let reply = Reply { id: "r".into(), by, surface: Surface::Card, content };
        let Verdict::Decide(entry) = asked("first", 0, change).reply(&reply, Timestamp(MINUTE)) else {
            panic!()
        };
        entry.close(Returned::Unconfirmed { why: why.into() }, Timestamp(2 * MINUTE)).unwrap()
    }

    fn oslo() -> Answer {
        Answer::option(1)
    }

    #[test]
    fn only_an_unchanged_question_in_time_is_answered_from_the_record() {
        let first = lost(GATEWAY_RESTART, oslo(), |_| ());
        let table: [(&str, Entry, bool); 8] = [
            ("unchanged", asked("second", 3 * MINUTE, |_| ()), true),
            ("ten minutes after the answer", asked("second", 11 * MINUTE, |_| ()), true),
            ("later", asked("second", 11 * MINUTE + 1, |_| ()), false),
            ("other words", asked("second", 3 * MINUTE, |e| e.question.prompts[0].text += "?"), false),
            ("another tool", asked("second", 3 * MINUTE, |e| e.tool = "u".into()), false),
            ("another session", asked("second", 3 * MINUTE, |e| e.key.session = "s2".into()), false),
            ("the Gateway's own", asked("second", 3 * MINUTE, |e| e.road = Road::Native), false),
            ("itself", asked("first", 3 * MINUTE, |_| ()), false),
        ];
        for (what, again, expected) in table {
            assert_eq!(is_asked_again(&again, &first), expected, "{what}");
        }
    }

    #[test]
    fn only_an_answer_that_was_lost_with_its_gateway_is_given_again() {
        let sealed = Sealed { key_id: "k".into(), encapsulated: "e".into(), ciphertext: "c".into() };
        let secret = |e: &mut Entry| {
            e.question.prompts[0].options.clear();
            e.question.prompts[0].secret = true;
        };
        let approval = |e: &mut Entry| e.question.prompts[0].options[0].label = "Yes, delete it".into();
        let table = [
            ("lost", lost(GATEWAY_RESTART, oslo(), |_| ()), true),
            ("its run is over", lost(RUN_ENDED, oslo(), |_| ()), false),
            ("given up", lost(CALLER_CANCELLED, oslo(), |_| ()), false),
            ("perhaps received", lost(NO_PROOF, oslo(), |_| ()), false),
            ("a secret", lost(GATEWAY_RESTART, Answer::Sealed(sealed), secret), false),
            ("an approval", lost(GATEWAY_RESTART, oslo(), approval), false),
            ("the Gateway's own", lost(GATEWAY_RESTART, oslo(), |e| e.road = Road::Native), false),
        ];
        for (what, first, expected) in table {
            assert_eq!(was_lost(&first), expected, "{what}");
        }
        assert!(!was_lost(&asked("pending", 0, |_| ())));
    }

    #[test]
    fn no_approval_is_given_again_whatever_its_words() {
        let cities = &["Lisbon", "Oslo", "Kyoto"][..];
        let table: &[(&str, &[&str], &str, bool)] = &[
            ("Where to?", cities, "", false),
            ("Which region should I deploy to?", &["eu", "us", "asia"], "", false),
            ("What is the name of the project?", &[], "askbus", false),
            ("Wohin soll ich deployen?", cities, "", false),
            // By the options.
            ("Delete it", &["Yes, delete it", "Wait a week", "Ask again"], "", true),
            ("Löschen", &["Später", "Ja", "Morgen"], "", true),
            ("Supprimer", &["Plus tard", "Demain", "Non"], "", true),
            ("What now", &["Later", "Today", "I do not want this"], "", true),
            ("削除", &["後で", "はい", "明日"], "", true),
            // Each choice of two may be one.
            ("Release", &["Ship", "Hold"], "", true),
            ("Read the warning", &["Understood"], "", true),
            // By the question.
            ("May I delete the database? (y/n)", &[], "sure thing", true),
            ("Delete the database [y/N]", &[], "hm", true),
            ("The database is old. Shall it be deleted?", &[], "please", true),
            ("Darf ich die Datenbank löschen?", &[], "mach nur", true),
            ("¿Puedo borrarla?", &[], "adelante", true),
            ("Can I take one of these?", cities, "", true),
            ("Type CONFIRM to delete", &[], "x", true),
            ("是否删除数据库？", &[], "删", true),
            // By the answer.
            ("How about deleting the database?", &[], "yes, all of it", true),
            ("How about deleting the database?", &[], "Nein!", true),
            ("How about deleting the database?", &[], "Да", true),
            ("How about deleting the database?", &[], "go ahead", true),
            ("How about deleting the database?", &[], "NO", true),
        ];
        for (text, labels, own, expected) in table {
            let options = labels.iter().copied().map(Choice::label).collect();
            let question = Question::new(vec![Prompt { options, ..Prompt::free_text(*text) }]).unwrap();
            let answer = if own.is_empty() { Answer::option(0) } else { Answer::text(*own) };
            let answers = [("answer".to_owned(), answer)].into();
            assert_eq!(is_approval(&question, &answers), *expected, "{text} {labels:?} {own}");
        }
    }

    #[test]
    fn an_answer_is_given_again_once() {
        let first = lost(GATEWAY_RESTART, oslo(), |_| ());
        let (second, third) = (asked("second", 3 * MINUTE, |_| ()), asked("third", 3 * MINUTE, |_| ()));
        let given = first.give_again(&second).unwrap();
        assert_eq!(given.give_again(&third), None);
        // The writer that died in between goes on.
        assert_eq!(given.give_again(&second), Some(given.clone()));
        let answered = second.answer_from_record(&given, Timestamp(4 * MINUTE)).unwrap();
        let decision = answered.decision().unwrap();
        assert_eq!(decision.outcome, first.decision().unwrap().outcome);
        assert!(
            matches!(&decision.by, DecidedBy::Record { question, .. } if *question == first.key.question)
        );
        assert_eq!(second.answer_from_record(&first, Timestamp(4 * MINUTE)), None, "it is not marked");
        assert_eq!(third.answer_from_record(&given, Timestamp(4 * MINUTE)), None, "it is another's");
    }
}
