//! From a signal to the end of the process.

use std::future::Future;
use std::time::Duration;

use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// A token that is cancelled by the first SIGTERM or SIGINT. A second one ends the process at once
/// with exit code 1. Call it inside a tokio runtime.
pub fn on_signal() -> std::io::Result<CancellationToken> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let token = CancellationToken::new();
    let cancelled = token.clone();
    tokio::spawn(async move {
        for first in [true, false] {
            let name = tokio::select! {
                _ = terminate.recv() => "SIGTERM",
                _ = interrupt.recv() => "SIGINT",
            };
            if first {
                tracing::info!(signal = name, "shutting down");
                cancelled.cancel();
            } else {
                tracing::warn!(signal = name, "second signal, ending at once");
                std::process::exit(i32::from(crate::run::EXIT_FAILURE));
            }
        }
    });
    Ok(token)
}

/// The work did not end within the time it was given after the shutdown began.
#[derive(Debug, thiserror::Error)]
#[error("{what} did not stop within {limit:?} and was abandoned")]
pub struct DrainTimeout {
    what: &'static str,
    limit: Duration,
}

/// Runs `work` to its end; once `shutdown` is cancelled it has `limit` left, then it is dropped.
pub async fn drain<T>(
    what: &'static str,
    shutdown: &CancellationToken,
    limit: Duration,
    work: impl Future<Output = T>,
) -> Result<T, DrainTimeout> {
    let too_late = async {
        shutdown.cancelled().await;
        tokio::time::sleep(limit).await;
    };
    tokio::select! {
        biased;
        result = work => Ok(result),
        () = too_late => Err(DrainTimeout { what, limit }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn work_is_abandoned_only_after_the_shutdown_and_its_limit() {
        let shutdown = CancellationToken::new();
        let done = drain("work", &shutdown, Duration::ZERO, async { 7 }).await;
        assert_eq!(done.unwrap(), 7, "without a shutdown there is no limit");

        shutdown.cancel();
        let done = drain("work", &shutdown, Duration::ZERO, async { 7 }).await;
        assert_eq!(done.unwrap(), 7, "what is done at once is never abandoned");

        let stuck = drain("work", &shutdown, Duration::ZERO, std::future::pending::<()>()).await;
        let error = stuck.unwrap_err().to_string();
        assert_eq!(error, "work did not stop within 0ns and was abandoned");
    }
}
