//! askctl: runs, shows and repairs askbus.

mod config;
mod dead;
mod demo;
mod doctor;
mod nats_server;
mod process;
mod provision;
mod questions;
mod reply;
mod terminal;
mod timeline;
mod up;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

/// Runs, shows and repairs askbus, which carries questions from agents to people.
#[derive(Debug, Parser)]
#[command(version)]
struct Cli {
    /// Config file in TOML; the same one serves all services
    #[arg(long, env = "ASKBUS_CONFIG", global = true, value_name = "FILE")]
    config: Option<PathBuf>,
    /// The nats-server to use [default: nats.url of the configuration]
    #[arg(long, global = true, value_name = "URL")]
    nats: Option<String>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Lets a scripted agent ask three questions, and shows what becomes of them
    Demo(demo::DemoArgs),
    /// Runs the three services in this process, with a nats-server of its own unless --nats names one
    Up {
        /// Folder of its data [default: ${XDG_STATE_HOME:-~/.local/state}/askbus/askctl]
        #[arg(long, value_name = "FOLDER")]
        state: Option<PathBuf>,
    },
    /// Makes buckets, streams, seal keys and tokens; again does no harm
    Provision {
        /// Folder of the keys and tokens [default: askctl.keys_dir of the configuration]
        #[arg(long, value_name = "FOLDER")]
        dir: Option<PathBuf>,
        /// Makes new seal keys where the files of the old ones are lost
        #[arg(long)]
        replace_seal_keys: bool,
    },
    /// Lists pending and recent questions
    Ls {
        /// All that are kept, not just the last ones
        #[arg(long)]
        all: bool,
        #[arg(long)]
        json: bool,
    },
    /// Shows all that is on record of a question
    Show {
        /// The question's id, or how it begins
        id: String,
        #[arg(long)]
        json: bool,
    },
    /// Prints what happens to questions, as it happens
    Watch,
    /// Answers a question in your name
    Answer(reply::AnswerArgs),
    /// Calls a question off; its agent is told so
    Cancel {
        /// The question's id, or how it begins
        id: String,
    },
    /// Shows a question's timeline and the id of its trace
    Trace {
        /// The question's id, or how it begins
        id: String,
    },
    /// Messages that no service could read
    Dead {
        #[command(subcommand)]
        command: dead::DeadCommand,
    },
    /// Looks for what is wrong, and says what to do
    Doctor {
        /// Folder of the keys [default: askctl.keys_dir of the configuration]
        #[arg(long, value_name = "FOLDER")]
        dir: Option<PathBuf>,
    },
}

fn main() -> ExitCode {
    service_kit::install_crypto();
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            let _ = error.print();
            return if error.use_stderr() {
                ExitCode::from(service_kit::EXIT_CONFIG)
            } else {
                ExitCode::SUCCESS
            };
        }
    };
    let runtime = match tokio::runtime::Runtime::new() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("askctl: cannot start the async runtime: {error}");
            return ExitCode::FAILURE;
        }
    };
    let result = runtime.block_on(Box::pin(run(cli)));
    // A read from the terminal must not hold the process.
    runtime.shutdown_background();
    match result {
        Ok(code) => code,
        Err(error) => {
            eprintln!("askctl: {error:#}");
            match error.is::<service_kit::ConfigError>() {
                true => ExitCode::from(service_kit::EXIT_CONFIG),
                false => ExitCode::FAILURE,
            }
        }
    }
}

async fn run(cli: Cli) -> Result<ExitCode> {
    match cli.command {
        Command::Demo(args) => return Box::pin(demo::demo(args)).await.map(|()| ExitCode::SUCCESS),
        Command::Up { state } => {
            let up = up::up(cli.config.as_deref(), cli.nats.as_deref(), state);
            return Box::pin(up).await.map(|()| ExitCode::SUCCESS);
        }
        _ => {}
    }
    let config = config::load(cli.config.as_deref(), cli.nats.as_deref())?;
    let connected = async || config::connect(&config.nats).await;
    match cli.command {
        Command::Demo(_) | Command::Up { .. } => unreachable!("they have a configuration of their own"),
        Command::Provision { dir, replace_seal_keys } => {
            let folder = dir.map_or_else(|| config.service.keys_dir(), Ok)?;
            let bus = connected().await?;
            let made = provision::provision(&bus, &config.service, &folder, replace_seal_keys).await?;
            provision::print(&made);
        }
        Command::Ls { all, json } => questions::ls(&connected().await?, all, json).await?,
        Command::Show { id, json } => {
            questions::show(&connected().await?, &config.service, &id, json).await?;
        }
        Command::Watch => {
            questions::watch(&connected().await?, service_kit::shutdown::on_signal()?).await?;
        }
        Command::Answer(args) => reply::answer(&connected().await?, args).await?,
        Command::Cancel { id } => reply::cancel(&connected().await?, &id).await?,
        Command::Trace { id } => questions::show_trace(&connected().await?, &config.service, &id).await?,
        Command::Dead { command } => dead::dead(&connected().await?, command).await?,
        Command::Doctor { dir } => {
            let folder = dir.map_or_else(|| config.service.keys_dir(), Ok)?;
            if !doctor::doctor(&config, cli.config.as_deref(), &folder).await {
                return Ok(ExitCode::FAILURE);
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}
