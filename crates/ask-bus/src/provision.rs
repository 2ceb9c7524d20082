//! Makes what the services need. Idempotent; the services themselves only look it up.

use std::time::Duration;

use ask_core::key::encode_token;
use async_nats::jetstream::consumer::{AckPolicy, pull};
use async_nats::jetstream::stream::{Config, DiscardPolicy, PersistenceMode, Republish, StorageType};

use crate::connection::Bus;
use crate::effect::Mutant;
use crate::error::BusError;
use crate::names::{self, ADAPTERS, ASK, CHAT, DEAD, PRESENCE, RUNS, SESSIONS};

const DAY: Duration = Duration::from_secs(24 * 3600);

/// What to make.
#[derive(Debug, Clone)]
pub struct Provisioning {
    /// The configured names of the gateways.
    pub gateways: Vec<String>,
    /// How many servers keep each stream: 1, or 3 in a cluster.
    pub replicas: usize,
}

/// One thing that is there now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Provisioned {
    /// What it is, e.g. `stream CHAT`.
    pub what: String,
    /// It was there before.
    pub existed: bool,
}

impl Bus {
    /// Makes or updates every bucket, stream and consumer, and lists them.
    ///
    /// # Errors
    /// What the server refused, by name.
    pub async fn provision(&self, what: &Provisioning) -> Result<Vec<Provisioned>, BusError> {
        let mut all = Vec::new();
        for config in streams(what.replicas) {
            let name = config.name.clone();
            let existed = match self.stream(&name).await {
                Ok(_) => true,
                Err(BusError::NotProvisioned { .. }) => false,
                Err(error) => return Err(error),
            };
            all.push(Provisioned { what: format!("stream {name}"), existed });
            let made = self.jetstream().create_or_update_stream(config).await;
            made.map_err(|e| BusError::unavailable(format!("the stream {name} was not made"), e))?;
        }
        let chat = self.stream(CHAT).await?;
        for gateway in &what.gateways {
            let name = names::chat_consumer(gateway);
            let existed = chat.get_consumer::<pull::Config>(&name).await.is_ok();
            all.push(Provisioned { what: format!("consumer {name} of CHAT"), existed });
            let config = pull::Config {
                durable_name: Some(name.clone()),
                filter_subject: format!("chat.{}.>", encode_token(gateway)),
                ack_policy: AckPolicy::Explicit,
                ack_wait: Duration::from_secs(10),
                max_ack_pending: 256,
                num_replicas: what.replicas,
                ..Default::default()
            };
            let made = chat.create_consumer(config).await;
            made.map_err(|e| BusError::unavailable(format!("the consumer {name} was not made"), e))?;
        }
        Ok(all)
    }
}

fn streams(replicas: usize) -> Vec<Config> {
    let file = |name: &str, subjects: &str| Config {
        name: name.into(),
        subjects: vec![subjects.into()],
        storage: StorageType::File,
        num_replicas: replicas,
        allow_direct: true,
        ..Default::default()
    };
    let bucket = |name: &str, history: i64| Config {
        max_messages_per_subject: history,
        allow_rollup: true,
        deny_delete: true,
        discard: DiscardPolicy::New,
        ..file(&names::bucket_stream(name), &names::bucket_subject(name, ">"))
    };
    // Losing the last milliseconds of these in a crash costs a repetition, and no fsync is paid.
    let persist_mode = (replicas == 1).then_some(PersistenceMode::Async);
    vec![
        Config {
            description: Some("questions: the record is the event".into()),
            allow_message_ttl: Mutant::Ttl.is_on(),
            max_age: 30 * DAY,
            republish: Some(Republish {
                source: names::bucket_subject(ASK, ">"),
                destination: "ask.>".into(),
                headers_only: false,
            }),
            ..bucket(ASK, 16)
        },
        Config {
            description: Some("who owns a session, how its messages were routed".into()),
            ..bucket(SESSIONS, 1)
        },
        Config {
            description: Some("who looks at which chat now".into()),
            max_age: Duration::from_secs(60),
            persist_mode,
            ..bucket(PRESENCE, 1)
        },
        Config { description: Some("leases, boot ids, public seal keys".into()), ..bucket(ADAPTERS, 1) },
        Config {
            description: Some("what goes to the gateways".into()),
            max_age: 7 * DAY,
            ..file(CHAT, "chat.>")
        },
        Config {
            description: Some("what the runs put out".into()),
            max_age: 2 * DAY,
            max_bytes: 1 << 30,
            persist_mode,
            ..file(RUNS, "run.>")
        },
        Config {
            description: Some("what could not be read, with the reason".into()),
            max_age: 30 * DAY,
            max_bytes: 256 << 20,
            ..file(DEAD, "dead.>")
        },
    ]
}
