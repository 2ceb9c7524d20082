//! Where a question can be shown, and the rules that choose.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::entry::Road;
use crate::outcome::Undeliverable;
use crate::question::Question;

/// Where a question can be shown or answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Surface {
    /// A live question card.
    Card,
    /// A form dialog.
    Form,
    /// A yes/no dialog.
    Confirm,
    /// A masked input dialog.
    Masked,
    /// A text dialog of older front ends.
    Input,
    /// A select dialog of older front ends.
    Select,
    /// A card that waits in the chat.
    Durable,
    /// Plain text; the next message answers.
    Text,
    /// The message that was typed in the chat.
    Message,
    /// askctl.
    Cli,
    /// The Gateway's own surfaces (Control UI, TUI, channels).
    Gateway,
}

impl Surface {
    /// The name as it is written in records and labels.
    pub fn name(self) -> &'static str {
        match self {
            Self::Card => "card",
            Self::Form => "form",
            Self::Confirm => "confirm",
            Self::Masked => "masked",
            Self::Input => "input",
            Self::Select => "select",
            Self::Durable => "durable",
            Self::Text => "text",
            Self::Message => "message",
            Self::Cli => "cli",
            Self::Gateway => "gateway",
        }
    }
}

/// What is known about who could be shown a question of a session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "who", rename_all = "snake_case")]
pub enum Audience {
    /// No front end has ever been bound to the session.
    Nobody,
    /// A front end is bound, but has no stream open now.
    Absent {
        /// What that front end was able to show.
        surfaces: BTreeSet<Surface>,
    },
    /// A front end has a stream open.
    Present {
        /// What it can show now.
        surfaces: BTreeSet<Surface>,
        /// A person has this chat on screen.
        looking: bool,
    },
}

/// What the rules say about a pending question.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Showing {
    /// Show it here.
    Show(Surface),
    /// It stays pending until somebody comes or it is answered elsewhere.
    Wait,
    /// It can never be shown.
    Undeliverable(Undeliverable),
}

/// Chooses where to show a question, and names the rule.
///
/// `tried` are the surfaces that refused it or that never reported delivery.
pub fn choose(
    question: &Question,
    road: Road,
    audience: &Audience,
    tried: &[Surface],
) -> (Showing, &'static str) {
    let (surfaces, looking) = match audience {
        Audience::Nobody => return nobody(road),
        Audience::Absent { surfaces } if candidates(question).iter().any(|s| surfaces.contains(s)) => {
            return (Showing::Wait, "front_end_absent");
        }
        Audience::Absent { .. } => return unable(road),
        Audience::Present { surfaces, looking } => (surfaces, *looking),
    };
    let able: Vec<Surface> = candidates(question).into_iter().filter(|s| surfaces.contains(s)).collect();
    if able.is_empty() {
        return unable(road);
    }
    let untried: Vec<Surface> = able.iter().copied().filter(|s| !tried.contains(s)).collect();
    let live_possible = able.iter().any(|s| is_live(*s));
    let usable = untried.iter().copied().find(|s| looking || !is_live(*s));
    match usable {
        Some(surface) => (Showing::Show(surface), rule_of(question, surface)),
        None if live_possible && !looking => (Showing::Wait, "nobody_looking"),
        None => (Showing::Undeliverable(Undeliverable::Refused), "every_surface_refused"),
    }
}

/// A live surface needs a person who looks; the others wait in the chat.
pub fn is_live(surface: Surface) -> bool {
    !matches!(surface, Surface::Durable | Surface::Text)
}

/// The surfaces that fit a question, the best first.
fn candidates(question: &Question) -> Vec<Surface> {
    if question.is_secret() {
        return vec![Surface::Masked];
    }
    if question.prompts.iter().any(|p| p.multiple) {
        return vec![Surface::Form, Surface::Text];
    }
    let dialog = match question.prompts.as_slice() {
        [prompt] if !prompt.options.is_empty() && !prompt.allow_other => Surface::Select,
        // A select dialog takes no own words, so the input dialog lists the options.
        [_] => Surface::Input,
        _ => Surface::Form,
    };
    let mut fitting = vec![Surface::Card, dialog];
    if question.prompts.len() <= 3 {
        fitting.push(Surface::Durable);
    }
    fitting.push(Surface::Text);
    fitting
}

fn rule_of(question: &Question, surface: Surface) -> &'static str {
    match surface {
        Surface::Masked => "secret_is_masked",
        Surface::Form if question.prompts.iter().any(|p| p.multiple) => "multi_select_is_a_form",
        Surface::Form => "several_prompts_are_a_form",
        Surface::Card => "live_card",
        Surface::Durable => "durable_card_when_nobody_looks",
        Surface::Text => "text_without_dialogs",
        _ => "dialog_of_an_older_front_end",
    }
}

fn unable(road: Road) -> (Showing, &'static str) {
    match road {
        Road::Native => (Showing::Wait, "left_to_the_gateway"),
        _ => (Showing::Undeliverable(Undeliverable::Unsupported), "front_end_can_not_show_it"),
    }
}

fn nobody(road: Road) -> (Showing, &'static str) {
    match road {
        // The Gateway's own surfaces show it; cancelling it here would take it from them.
        Road::Native => (Showing::Wait, "left_to_the_gateway"),
        Road::McpAlone => (Showing::Wait, "answered_by_askctl"),
        _ => (Showing::Undeliverable(Undeliverable::NoFrontEnd), "no_front_end_was_ever_bound"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::question::{Choice, Prompt};

    fn ask(change: impl Fn(&mut Prompt)) -> Question {
        let mut prompt = Prompt::free_text("Where to?");
        change(&mut prompt);
        Question::new(vec![prompt]).unwrap()
    }

    fn choices(prompt: &mut Prompt) {
        prompt.options = ["A", "B", "C"].map(Choice::label).into();
    }

    fn present(surfaces: &[Surface], looking: bool) -> Audience {
        Audience::Present { surfaces: surfaces.iter().copied().collect(), looking }
    }

    const WEB: &[Surface] = &[Surface::Card, Surface::Form, Surface::Masked, Surface::Durable, Surface::Text];
    const OLD: &[Surface] = &[Surface::Masked, Surface::Input, Surface::Select, Surface::Text];

    #[test]
    fn the_surface_follows_the_question_and_who_looks() {
        use Showing::*;
        let absent = Audience::Absent { surfaces: WEB.iter().copied().collect() };
        let text_only = Audience::Absent { surfaces: [Surface::Text].into() };
        let secret = |p: &mut Prompt| p.secret = true;
        let multiple = |p: &mut Prompt| {
            choices(p);
            p.multiple = true
        };
        let strict = |p: &mut Prompt| {
            choices(p);
            p.allow_other = false
        };
        #[expect(clippy::type_complexity, reason = "a row of the table")]
        let table: Vec<(&str, Question, Road, Audience, Vec<Surface>, Showing, &str)> = vec![
            (
                "choices",
                ask(choices),
                Road::Plugin,
                present(WEB, true),
                vec![],
                Show(Surface::Card),
                "live_card",
            ),
            (
                "free text",
                ask(|_| ()),
                Road::Plugin,
                present(WEB, true),
                vec![],
                Show(Surface::Card),
                "live_card",
            ),
            (
                "secret",
                ask(secret),
                Road::Plugin,
                present(WEB, true),
                vec![],
                Show(Surface::Masked),
                "secret_is_masked",
            ),
            ("secret, away", ask(secret), Road::Plugin, present(WEB, false), vec![], Wait, "nobody_looking"),
            (
                "secret, text only",
                ask(secret),
                Road::Plugin,
                present(&[Surface::Text], true),
                vec![],
                Undeliverable(super::Undeliverable::Unsupported),
                "front_end_can_not_show_it",
            ),
            (
                "multi-select",
                ask(multiple),
                Road::Plugin,
                present(WEB, true),
                vec![],
                Show(Surface::Form),
                "multi_select_is_a_form",
            ),
            (
                "away",
                ask(choices),
                Road::Plugin,
                present(WEB, false),
                vec![],
                Show(Surface::Durable),
                "durable_card_when_nobody_looks",
            ),
            (
                "text only",
                ask(choices),
                Road::Plugin,
                present(&[Surface::Text], false),
                vec![],
                Show(Surface::Text),
                "text_without_dialogs",
            ),
            (
                "older, strict",
                ask(strict),
                Road::Plugin,
                present(OLD, true),
                vec![],
                Show(Surface::Select),
                "dialog_of_an_older_front_end",
            ),
            (
                "older, free",
                ask(choices),
                Road::Plugin,
                present(OLD, true),
                vec![],
                Show(Surface::Input),
                "dialog_of_an_older_front_end",
            ),
            (
                "card refused",
                ask(choices),
                Road::Plugin,
                present(WEB, true),
                vec![Surface::Card],
                Show(Surface::Durable),
                "durable_card_when_nobody_looks",
            ),
            (
                "all refused",
                ask(secret),
                Road::Plugin,
                present(WEB, true),
                vec![Surface::Masked],
                Undeliverable(super::Undeliverable::Refused),
                "every_surface_refused",
            ),
            ("absent", ask(choices), Road::Plugin, absent, vec![], Wait, "front_end_absent"),
            (
                "absent, unable",
                ask(secret),
                Road::Plugin,
                text_only,
                vec![],
                Undeliverable(super::Undeliverable::Unsupported),
                "front_end_can_not_show_it",
            ),
            (
                "absent, unable, native",
                ask(secret),
                Road::Native,
                Audience::Absent { surfaces: [Surface::Text].into() },
                vec![],
                Wait,
                "left_to_the_gateway",
            ),
            (
                "nobody, plugin",
                ask(choices),
                Road::Plugin,
                Audience::Nobody,
                vec![],
                Undeliverable(super::Undeliverable::NoFrontEnd),
                "no_front_end_was_ever_bound",
            ),
            (
                "nobody, native",
                ask(choices),
                Road::Native,
                Audience::Nobody,
                vec![],
                Wait,
                "left_to_the_gateway",
            ),
            (
                "nobody, lone client",
                ask(choices),
                Road::McpAlone,
                Audience::Nobody,
                vec![],
                Wait,
                "answered_by_askctl",
            ),
        ];
        for (name, question, road, audience, tried, showing, rule) in table {
            assert_eq!(choose(&question, road, &audience, &tried), (showing, rule), "{name}");
        }
    }
}
