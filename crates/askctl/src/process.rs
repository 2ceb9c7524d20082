//! Processes that askctl starts: each with a log file of its own, and an end of its own.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail};
use rustix::process::{Pid, Signal, kill_process};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::time::Instant;

const LOOK_AGAIN: Duration = Duration::from_millis(50);
const TAIL_LINES: usize = 12;

/// A process that may be started several times.
#[derive(Debug)]
pub struct Process {
    pub name: &'static str,
    program: PathBuf,
    args: Vec<OsString>,
    env: Vec<(String, OsString)>,
    log: PathBuf,
    /// Held open by the process for as long as it lives.
    lock: Option<File>,
    piped: bool,
    child: Option<Child>,
}

impl Process {
    /// Nothing runs yet; its output will go to `log`, which begins empty.
    pub fn new(name: &'static str, program: &Path, log: &Path) -> Result<Self> {
        File::create(log).with_context(|| format!("the log file {} can't be written", log.display()))?;
        Ok(Self {
            name,
            program: program.into(),
            args: Vec::new(),
            env: Vec::new(),
            log: log.into(),
            lock: None,
            piped: false,
            child: None,
        })
    }

    pub fn arg(mut self, arg: impl Into<OsString>) -> Self {
        self.args.push(arg.into());
        self
    }

    pub fn env(mut self, name: &str, value: impl Into<OsString>) -> Self {
        self.env.push((name.into(), value.into()));
        self
    }

    /// Gives the process pipes as its standard input and output.
    pub fn piped(mut self) -> Self {
        self.piped = true;
        self
    }

    /// The lock is held until this process and its parent are gone.
    pub fn holding(mut self, lock: File) -> Self {
        self.lock = Some(lock);
        self
    }

    /// Starts it.
    pub fn start(&mut self) -> Result<()> {
        let log = || OpenOptions::new().append(true).open(&self.log);
        let failed = || format!("{} ({}) can't be started", self.name, self.program.display());
        let stdin = match &self.lock {
            Some(lock) => Stdio::from(lock.try_clone().with_context(failed)?),
            None if self.piped => Stdio::piped(),
            None => Stdio::null(),
        };
        let stdout = if self.piped { Stdio::piped() } else { log().with_context(failed)?.into() };
        let child = Command::new(&self.program)
            .args(&self.args)
            .envs(self.env.iter().map(|(name, value)| (name, value)))
            .stdin(stdin)
            .stdout(stdout)
            .stderr(log().with_context(failed)?)
            // Ctrl-C in a terminal then reaches askctl alone, which ends the others in order.
            .process_group(0)
            .kill_on_drop(true)
            .spawn();
        self.child = Some(child.with_context(failed)?);
        Ok(())
    }

    /// Its standard output, once per start.
    pub fn stdout(&mut self) -> Option<ChildStdout> {
        self.child.as_mut()?.stdout.take()
    }

    /// Its standard input, once per start.
    pub fn stdin(&mut self) -> Option<ChildStdin> {
        self.child.as_mut()?.stdin.take()
    }

    pub fn id(&self) -> Option<u32> {
        self.child.as_ref()?.id()
    }

    /// Waits until `ready` says so.
    ///
    /// # Errors
    /// It ended, or is not ready `within` this time; with the end of its log.
    pub async fn until<F: Future<Output = bool>>(
        &mut self,
        within: Duration,
        mut ready: impl FnMut() -> F,
    ) -> Result<()> {
        let give_up = Instant::now() + within;
        while !ready().await {
            if let Some(child) = &mut self.child
                && let Some(status) = child.try_wait()?
            {
                return Err(self.failure(&format!("ended with {status}")));
            }
            if Instant::now() > give_up {
                return Err(self.failure(&format!("was not ready within {within:?}")));
            }
            tokio::time::sleep(LOOK_AGAIN).await;
        }
        Ok(())
    }

    /// Waits for its end.
    pub async fn ended(&mut self) -> Result<ExitStatus> {
        let Some(child) = &mut self.child else { bail!("{} does not run", self.name) };
        let status = child.wait().await?;
        self.child = None;
        Ok(status)
    }

    /// `kill -9`; returns when it is gone.
    pub async fn kill(&mut self) -> Result<()> {
        if let Some(mut child) = self.child.take() {
            child.kill().await.with_context(|| format!("{} was not killed", self.name))?;
        }
        Ok(())
    }

    /// Asks it to end, and kills it when it has not ended `within` this time.
    pub async fn stop(&mut self, within: Duration) -> Result<()> {
        let Some(child) = &mut self.child else { return Ok(()) };
        let id = child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
        if let Some(id) = id {
            // An error says that it is gone.
            let _ = kill_process(id, Signal::TERM);
        }
        if tokio::time::timeout(within, child.wait()).await.is_err() {
            tracing::warn!("{} did not end within {within:?} and was killed", self.name);
        }
        self.kill().await
    }

    /// What happened, and the end of its log.
    pub fn failure(&self, what: &str) -> anyhow::Error {
        anyhow!("{} {what}{}", self.name, tail(&self.log))
    }
}

/// The end of a log and where the rest is.
pub fn tail(log: &Path) -> String {
    let text = fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().collect();
    let last = lines[lines.len().saturating_sub(TAIL_LINES)..].join("\n    ");
    format!("\n  the end of {}:\n    {last}", log.display())
}
