//! Which replica works for the gateway. The lease saves work; no safety rests on it.

use std::time::{Duration, Instant};

use ask_bus::{Bus, BusError, Lease};
use tokio::time::sleep;

/// Between two renewals.
const RENEW: Duration = Duration::from_secs(1);
/// A lease that has not moved for this long by the observer's own clock is stale.
const STALE: Duration = Duration::from_secs(4);
const LOOK: Duration = Duration::from_millis(250);

/// A lease that this replica holds.
pub(super) struct Held<'a> {
    bus: &'a Bus,
    gateway: &'a str,
    lease: Lease,
    revision: u64,
}

/// Waits until `holder` holds the lease. `stands_by` is called when another replica was seen at
/// work.
pub(super) async fn acquire<'a>(
    bus: &'a Bus,
    gateway: &'a str,
    holder: &str,
    stands_by: impl Fn(),
) -> Held<'a> {
    let mut seen: Option<(u64, Instant)> = None;
    loop {
        let (free, epoch, revision) = match bus.lease(gateway).await {
            Ok(None) => (true, 0, 0),
            Ok(Some(lease)) => {
                let since = match seen {
                    Some((revision, since)) if revision == lease.revision => since,
                    Some(_) if lease.value.holder != holder && !lease.value.holder.is_empty() => {
                        stands_by();
                        Instant::now()
                    }
                    _ => Instant::now(),
                };
                seen = Some((lease.revision, since));
                let released = lease.value.holder.is_empty() || lease.value.holder == holder;
                (released || since.elapsed() >= STALE, lease.value.epoch, lease.revision)
            }
            Err(error) => {
                tracing::debug!(%error, "the lease can't be read yet");
                // What could not be observed is no evidence.
                seen = None;
                (false, 0, 0)
            }
        };
        if free {
            let lease = Lease { holder: holder.into(), epoch: epoch + 1, renewal: 0 };
            match bus.write_lease(gateway, &lease, revision).await {
                Ok(revision) => return Held { bus, gateway, lease, revision },
                Err(error) => tracing::debug!(%error, "another replica took the lease"),
            }
        }
        sleep(LOOK).await;
    }
}

impl Held<'_> {
    /// Renews the lease until another replica has it.
    pub(super) async fn keep(&mut self) {
        loop {
            sleep(RENEW).await;
            self.lease.renewal += 1;
            match self.bus.write_lease(self.gateway, &self.lease, self.revision).await {
                Ok(revision) => self.revision = revision,
                Err(BusError::Conflict { .. }) => match self.bus.lease(self.gateway).await {
                    // Our own write, whose acknowledgement was lost.
                    Ok(Some(now))
                        if now.value.holder == self.lease.holder && now.value.epoch == self.lease.epoch =>
                    {
                        self.revision = now.revision;
                    }
                    Ok(_) => return,
                    Err(error) => tracing::debug!(%error, "the lease can't be read"),
                },
                // Without the bus nobody else can take it either.
                Err(error) => tracing::debug!(%error, "the lease was not renewed"),
            }
        }
    }

    /// Gives the lease back, so that the next replica need not wait.
    pub(super) async fn release(mut self) {
        self.lease.holder.clear();
        if let Err(error) = self.bus.write_lease(self.gateway, &self.lease, self.revision).await {
            tracing::debug!(%error, "the lease was not given back; it goes stale");
        }
    }
}
