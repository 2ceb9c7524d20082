//! `dead`: what no service could read.

use anyhow::{Context as _, Result, bail};
use ask_bus::{Bus, DeadLetter, SentAgain};
use ask_core::time::Timestamp;
use clap::Subcommand;

use crate::terminal::{duration, plain, put, say, table};

const LONGEST: usize = 80;

/// What to do with dead letters.
#[derive(Debug, Subcommand)]
pub enum DeadCommand {
    /// Lists them with the reason
    Ls,
    /// Prints what one holds
    Show {
        /// Its number, as `ls` gives it
        number: u64,
    },
    /// Gives one to its reader again, e.g. after an update of the services
    SendAgain {
        /// Its number, as `ls` gives it
        number: u64,
    },
    /// Drops one for good
    Drop {
        /// Its number, as `ls` gives it
        number: u64,
    },
}

/// Carries out one of them.
pub async fn dead(bus: &Bus, command: DeadCommand) -> Result<()> {
    match command {
        DeadCommand::Ls => ls(bus).await,
        DeadCommand::Show { number } => {
            let letter = find(bus, number).await?;
            say!("{}\n{}", plain(&letter.subject, 400), plain(&letter.reason, 400));
            say!("{}", plain(&String::from_utf8_lossy(&letter.payload), usize::MAX));
            Ok(())
        }
        DeadCommand::SendAgain { number } => {
            let letter = find(bus, number).await?;
            let sent = bus.send_again(&letter).await;
            let how = match sent.with_context(|| format!("{number} was not sent again and stays"))? {
                SentAgain::Answered(answer) => format!("was taken; the answer: {}", plain(&answer, 400)),
                SentAgain::Written => "is in its stream again".into(),
            };
            say!("{number} {how}");
            Ok(())
        }
        DeadCommand::Drop { number } => {
            if !bus.drop_dead_letter(number).await? {
                return missing(number);
            }
            say!("{number} is dropped");
            Ok(())
        }
    }
}

async fn ls(bus: &Bus) -> Result<()> {
    let letters = bus.dead_letters().await?;
    if letters.is_empty() {
        say!("no dead letters: everything could be read");
        return Ok(());
    }
    let now = Timestamp::now();
    let mut rows = vec![["NUMBER", "PARKED", "SUBJECT", "REASON"].map(str::to_owned).to_vec()];
    rows.extend(letters.iter().map(|letter| {
        let ago = format!("{} ago", duration(now.since(letter.at)));
        let (subject, reason) = (plain(&letter.subject, LONGEST), plain(&letter.reason, LONGEST));
        vec![letter.number.to_string(), ago, subject, reason]
    }));
    put(table(0, &rows));
    Ok(())
}

async fn find(bus: &Bus, number: u64) -> Result<DeadLetter> {
    match bus.dead_letter(number).await? {
        Some(letter) => Ok(letter),
        None => missing(number),
    }
}

fn missing<T>(number: u64) -> Result<T> {
    bail!("there is no dead letter {number}; `askctl dead ls` lists them")
}
