use std::future::Future;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use clap::{Arg, ArgAction, Command, value_parser};
use serde::de::DeserializeOwned;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::config::{self, Config};
use crate::{Health, Service, shutdown, telemetry};

/// The command line or the configuration was refused; nothing was started.
pub const EXIT_CONFIG: u8 = 64;

/// The service failed, or did not stop in time.
pub const EXIT_FAILURE: u8 = 1;

/// With the telemetry's two seconds this stays below the ten that `docker stop` grants.
const DRAIN_LIMIT: Duration = Duration::from_secs(7);

/// What a service gets to run with.
pub struct Frame<S> {
    /// The checked configuration.
    pub config: Config<S>,
    /// For readiness and metrics; its endpoint is already served.
    pub health: Health,
    /// Cancelled when the service must stop; it then has seven seconds.
    pub shutdown: CancellationToken,
}

/// Makes `ring` the process's TLS provider. The first line of every main: with two providers in the
/// binary the first TLS connection panics without it. May be called again.
pub fn install_crypto() {
    // An error only says that there is one already.
    let _ = rustls::crypto::ring::default_provider().install_default();
}

/// The whole `main` of a service: command line, configuration, telemetry, health endpoint, signals,
/// then `run`, and a bounded end. Exit codes: 0 clean, 64 bad command line or configuration,
/// 1 failure.
pub fn run_service<S, F, Fut>(service: &'static Service, run: F) -> ExitCode
where
    S: DeserializeOwned,
    F: FnOnce(Frame<S>) -> Fut,
    Fut: Future<Output = anyhow::Result<()>>,
{
    install_crypto();
    let file = match arguments(service) {
        Ok(file) => file,
        Err(code) => return code,
    };
    let config = match config::load::<S>(service, file.as_deref()) {
        Ok(config) => config,
        Err(error) => {
            eprintln!("{}: {error}", service.name);
            return ExitCode::from(EXIT_CONFIG);
        }
    };
    let runtime = match tokio::runtime::Runtime::new() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("{}: cannot start the async runtime: {error}", service.name);
            return ExitCode::from(EXIT_FAILURE);
        }
    };
    let code = runtime.block_on(Box::pin(framed(service, config, run)));
    // A blocking task that hangs must not hold the process.
    runtime.shutdown_background();
    ExitCode::from(code)
}

async fn framed<S, F, Fut>(service: &'static Service, config: Config<S>, run: F) -> u8
where
    F: FnOnce(Frame<S>) -> Fut,
    Fut: Future<Output = anyhow::Result<()>>,
{
    let telemetry = match telemetry::init(&[service], &config.telemetry) {
        Ok(telemetry) => telemetry,
        Err(error) => {
            eprintln!("{}: {error}", service.name);
            return EXIT_CONFIG;
        }
    };
    let code = match served(service, config, run).await {
        Ok(()) => {
            tracing::info!("stopped");
            0
        }
        Err(error) => {
            tracing::error!("failed: {error:#}");
            EXIT_FAILURE
        }
    };
    telemetry.shutdown().await;
    code
}

async fn served<S, F, Fut>(service: &'static Service, config: Config<S>, run: F) -> anyhow::Result<()>
where
    F: FnOnce(Frame<S>) -> Fut,
    Fut: Future<Output = anyhow::Result<()>>,
{
    let shutdown = shutdown::on_signal().context("cannot listen for signals")?;
    let listen = config.health.listen;
    let listener = TcpListener::bind(listen)
        .await
        .with_context(|| format!("cannot listen on health.listen = {listen}"))?;
    let health = Health::new(service);
    tracing::info!(
        service = service.name,
        version = service.version,
        health = %listener.local_addr()?,
        "starting"
    );
    let endpoint = tokio::spawn(health.clone().serve(listener, CancellationToken::new()));

    let draining = health.clone();
    let stopping = shutdown.clone();
    tokio::spawn(async move {
        stopping.cancelled().await;
        draining.stopping();
    });

    let frame = Frame { config, health, shutdown: shutdown.clone() };
    let result = shutdown::drain(service.name, &shutdown, DRAIN_LIMIT, Box::pin(run(frame))).await;
    // The endpoint answers to the very end, so that probes see why.
    endpoint.abort();
    result?
}

/// The config file, or the exit code when there is nothing to run.
fn arguments(service: &Service) -> Result<Option<PathBuf>, ExitCode> {
    let command = Command::new(service.name)
        .version(service.version)
        .about("A service of askbus. The environment ASKBUS__SECTION__KEY overrules the config file.")
        .arg(
            Arg::new("config")
                .long("config")
                .value_name("FILE")
                .env("ASKBUS_CONFIG")
                .value_parser(value_parser!(PathBuf))
                .help("Config file in TOML"),
        )
        .arg(
            Arg::new("print-defaults")
                .long("print-defaults")
                .action(ArgAction::SetTrue)
                .help("Print every key with its meaning and default, and exit"),
        );
    match command.try_get_matches() {
        Ok(matches) if matches.get_flag("print-defaults") => {
            print!("{}\n{}", config::COMMON_DEFAULTS, service.defaults);
            Err(ExitCode::SUCCESS)
        }
        Ok(matches) => Ok(matches.get_one("config").cloned()),
        Err(error) => {
            let _ = error.print();
            Err(if error.use_stderr() { ExitCode::from(EXIT_CONFIG) } else { ExitCode::SUCCESS })
        }
    }
}
