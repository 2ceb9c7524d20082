//! What the adapters of a gateway share: the lease, the last boot id, the public seal key, and
//! which session an MCP client speaks for.

use ask_core::key::encode_token;
use serde::{Deserialize, Serialize};

use crate::connection::{Bus, Expect};
use crate::effect::Effect;
use crate::error::BusError;
use crate::names::{self, ADAPTERS};
use crate::questions::Stored;

/// Who works for a gateway. It saves work and protects nothing: no safety rests on it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lease {
    /// The replica that holds it.
    pub holder: String,
    /// Rises with every change of the holder.
    pub epoch: u64,
    /// Rises with every renewal, so that the revision moves.
    pub renewal: u64,
}

/// The public half of a gateway's seal key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SealKey {
    /// Names the key.
    pub key_id: String,
    /// The public key, base64 without padding.
    pub public: String,
}

#[derive(Debug, Serialize, Deserialize)]
struct Boot {
    boot_id: String,
}

#[derive(Debug, Serialize, Deserialize)]
struct McpClient {
    session: String,
}

impl Bus {
    /// The gateway's lease now.
    ///
    /// # Errors
    /// While the server can't be reached.
    pub async fn lease(&self, gateway: &str) -> Result<Option<Stored<Lease>>, BusError> {
        let read = self.read(ADAPTERS, &key(gateway, "lease")).await?;
        Ok(read.map(|(value, revision)| Stored { value, revision }))
    }

    /// Takes or renews the lease; `revision` is 0 where there is none.
    ///
    /// # Errors
    /// [`BusError::Conflict`] when another replica was faster.
    pub async fn write_lease(&self, gateway: &str, lease: &Lease, revision: u64) -> Result<u64, BusError> {
        self.write(
            Effect::Lease,
            names::bucket_subject(ADAPTERS, &key(gateway, "lease")),
            lease,
            Expect::Revision(revision),
        )
        .await
    }

    /// The gateway process that was seen last.
    ///
    /// # Errors
    /// While the server can't be reached.
    pub async fn boot_id(&self, gateway: &str) -> Result<Option<String>, BusError> {
        Ok(self.read::<Boot>(ADAPTERS, &key(gateway, "boot")).await?.map(|(boot, _)| boot.boot_id))
    }

    /// Remembers the gateway process, after what a new one calls for has been done.
    ///
    /// # Errors
    /// When it can't be written.
    pub async fn write_boot_id(&self, gateway: &str, boot_id: &str) -> Result<(), BusError> {
        let boot = Boot { boot_id: boot_id.into() };
        self.write(
            Effect::Boot,
            names::bucket_subject(ADAPTERS, &key(gateway, "boot")),
            &boot,
            Expect::Nothing,
        )
        .await
        .map(drop)
    }

    /// The gateway's session that an MCP client has last spoken for, by its `mcp-session-id`.
    ///
    /// # Errors
    /// While the server can't be reached.
    pub async fn mcp_session(&self, gateway: &str, client: &str) -> Result<Option<String>, BusError> {
        let read = self.read::<McpClient>(ADAPTERS, &mcp_key(gateway, client)).await?;
        Ok(read.map(|(client, _)| client.session))
    }

    /// Remembers for which of the gateway's sessions an MCP client speaks.
    ///
    /// # Errors
    /// When it can't be written.
    pub async fn write_mcp_session(
        &self,
        gateway: &str,
        client: &str,
        session: &str,
    ) -> Result<(), BusError> {
        let subject = names::bucket_subject(ADAPTERS, &mcp_key(gateway, client));
        let value = McpClient { session: session.into() };
        self.write(Effect::McpSession, subject, &value, Expect::Nothing).await.map(drop)
    }

    /// Forgets for which session an MCP client speaks.
    ///
    /// # Errors
    /// When it can't be written.
    pub async fn clear_mcp_session(&self, gateway: &str, client: &str) -> Result<(), BusError> {
        self.clear_key(Effect::McpSession, ADAPTERS, &mcp_key(gateway, client)).await
    }

    /// The key to which secrets for this gateway are sealed.
    ///
    /// # Errors
    /// While the server can't be reached.
    pub async fn seal_key(&self, gateway: &str) -> Result<Option<SealKey>, BusError> {
        Ok(self.read(ADAPTERS, &key(gateway, "seal")).await?.map(|(seal, _)| seal))
    }

    /// Publishes the gateway's seal key. Only `askctl provision` calls it.
    ///
    /// # Errors
    /// When it can't be written.
    pub async fn write_seal_key(&self, gateway: &str, seal: &SealKey) -> Result<(), BusError> {
        self.write(
            Effect::Seal,
            names::bucket_subject(ADAPTERS, &key(gateway, "seal")),
            seal,
            Expect::Nothing,
        )
        .await
        .map(drop)
    }
}

fn mcp_key(gateway: &str, client: &str) -> String {
    key(gateway, &format!("mcp.{}", encode_token(client)))
}

fn key(gateway: &str, what: &str) -> String {
    format!("{}.{what}", encode_token(gateway))
}
