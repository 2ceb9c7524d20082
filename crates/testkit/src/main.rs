//! The scripted peers as processes, for the demo and the full stack.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use testkit::front::{Ask, FrontEnd};
use testkit::gateway::{GatewayOptions, PluginEndpoint, ScriptedGateway};
use testkit::model::{ModelOptions, ScriptedModel};
use testkit::otlp::OtlpSink;
use tokio::io::{AsyncBufReadExt, BufReader};

/// Scripted peers of askbus: OpenClaw Gateway, model provider, span collector.
#[derive(Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    peer: Peer,
}

#[derive(Subcommand)]
enum Peer {
    /// Model provider with the OpenAI chat completions API; what it got is at GET /log
    Model {
        /// Address to serve
        #[arg(long, default_value = "127.0.0.1:0")]
        listen: SocketAddr,
        /// Characters per streamed piece of text [default: one word]
        #[arg(long)]
        piece: Option<usize>,
    },
    /// OpenClaw Gateway whose agent does what messages say; prints what each tool call got as a line
    /// of JSON, with the SHA-256 of a secret instead of its value
    Gateway {
        /// Address to serve
        #[arg(long, default_value = "127.0.0.1:18789")]
        listen: SocketAddr,
        /// Shared token that clients must send
        #[arg(long, env = "OPENCLAW_GATEWAY_TOKEN", hide_env_values = true)]
        token: String,
        /// Name that its plugin gives as the gateway's
        #[arg(long, default_value = "openclaw")]
        name: String,
        /// Where its plugin finds gateway-adapter; without it there is no request_user_input
        #[arg(long, value_name = "URL", requires = "plugin_token")]
        plugin_endpoint: Option<String>,
        /// Token that its plugin sends
        #[arg(long, env = "ASKBUS_PLUGIN_TOKEN", hide_env_values = true)]
        plugin_token: Option<String>,
    },
    /// Front end of one person, who says one thing: prints what owui-emitter sends as lines of JSON,
    /// and reads replies as such lines, {"question": ID, "decision": {"answers": {…}}}
    Front {
        /// Where owui-emitter listens
        #[arg(long, value_name = "URL")]
        emitter: String,
        /// Token of its front ends
        #[arg(long, env = "ASKBUS_FRONT_TOKEN", hide_env_values = true)]
        token: String,
        /// What the person says to the agent
        message: String,
    },
    /// OTLP/gRPC collector that prints each span as a line of JSON
    Otlp {
        /// Address to serve
        #[arg(long, default_value = "127.0.0.1:4317")]
        listen: SocketAddr,
    },
}

#[tokio::main]
async fn main() -> Result<()> {
    match Cli::parse().peer {
        Peer::Model { listen, piece } => {
            let model = ScriptedModel::listen(listen, ModelOptions { piece }).await?;
            eprintln!("scripted model at {}", model.url());
            stopped().await
        }
        Peer::Gateway { listen, token, name, plugin_endpoint, plugin_token } => {
            let plugin = plugin_endpoint.map(|url| PluginEndpoint {
                url,
                token: plugin_token.unwrap_or_default(),
                handles: true,
            });
            let options =
                GatewayOptions { listen: Some(listen), token, name, plugin, ..GatewayOptions::default() };
            let gateway = ScriptedGateway::start(options).await?;
            eprintln!("scripted gateway at {}", gateway.url());
            tokio::select! { ended = print_outcomes(&gateway) => ended, ended = stopped() => ended }
        }
        Peer::Front { emitter, token, message } => {
            let front = FrontEnd::new(&emitter, &token);
            tokio::select! { ended = converse(&front, &message) => ended, ended = stopped() => ended }
        }
        Peer::Otlp { listen } => {
            let sink = OtlpSink::listen(listen).await?;
            eprintln!("span collector at {}", sink.endpoint());
            tokio::select! { ended = print_spans(&sink) => ended, ended = stopped() => ended }
        }
    }
}

async fn print_outcomes(gateway: &ScriptedGateway) -> Result<()> {
    let mut printed = 0;
    loop {
        let more = |gateway: &ScriptedGateway| gateway.outcomes().len() > printed;
        gateway.until(more, Duration::from_secs(3600)).await;
        let outcomes = gateway.outcomes();
        for outcome in &outcomes[printed..] {
            let mut line = serde_json::to_value(outcome)?;
            if let Some(secret) = &outcome.secret {
                line["secret_sha256"] = hex::encode(Sha256::digest(secret)).into();
            }
            println!("{line}");
        }
        printed = outcomes.len();
    }
}

/// Shows every question at once, until the turn or the input ends.
async fn converse(front: &FrontEnd, message: &str) -> Result<()> {
    let mut turn = front.say(message);
    let mut on_screen: HashMap<String, Ask> = HashMap::new();
    let mut replies = BufReader::new(tokio::io::stdin()).lines();
    loop {
        tokio::select! {
            line = turn.next() => {
                let Some(line) = line? else { return Ok(()) };
                if line["type"] == "ask" {
                    let ask: Ask = serde_json::from_value(line.clone())?;
                    front.shown(turn.message(), &ask, "delivered").await?;
                    on_screen.insert(ask.question.clone(), ask);
                }
                println!("{line}");
            }
            reply = replies.next_line() => {
                let Some(reply) = reply? else { return Ok(()) };
                let reply: Value = serde_json::from_str(&reply).context("a reply is a line of JSON")?;
                let question = reply["question"].as_str().unwrap_or_default();
                let ask = on_screen.get(question).with_context(|| format!("no question {question} is shown"))?;
                let answer = front.reply(turn.message(), ask, &reply["decision"]).await?;
                let line = json!({"type": "replied", "question": question, "status": answer.status,
                    "body": answer.body});
                println!("{line}");
            }
        }
    }
}

async fn print_spans(sink: &OtlpSink) -> Result<()> {
    let mut printed = 0;
    loop {
        let more = |spans: &[testkit::otlp::Span]| spans.len() > printed;
        let Ok(spans) = sink.wait_for(more, Duration::from_secs(3600)).await else {
            continue;
        };
        for span in &spans[printed..] {
            println!("{}", serde_json::to_string(span)?);
        }
        printed = spans.len();
    }
}

/// Ends at Ctrl-C or SIGTERM.
async fn stopped() -> Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut terminated = signal(SignalKind::terminate()).context("listen for SIGTERM")?;
    tokio::select! {
        _ = terminated.recv() => Ok(()),
        interrupted = tokio::signal::ctrl_c() => interrupted.context("listen for Ctrl-C"),
    }
}
