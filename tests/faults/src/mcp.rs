//! The Gateway's MCP client: carries one call of the agent to the adapters, over their restarts.

use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use serde_json::{Value, json};

use crate::world::{SharedWorld, text};

/// The tool as the agent knows it.
pub const TOOL: &str = "askbus__request_user_input";
const REVISION: &str = "2025-11-25";
const TRY_AGAIN: Duration = Duration::from_millis(200);

/// Waits for the agent's call, and gives it what the adapters answer.
pub async fn carry(world: &SharedWorld, args: &Value) {
    let call = loop {
        if let Some(call) = world.gateway.calls_by_hand().into_iter().next() {
            break call;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    };
    let mut last_event = None;
    let mut session = None;
    let answer = loop {
        match ask(world, args, &mut session, &mut last_event).await {
            Ok(answer) => break answer,
            Err(_) => tokio::time::sleep(TRY_AGAIN).await,
        }
    };
    let result = &answer["result"];
    let is_error = result["isError"] == true;
    world.gateway.finish_call(&call, &text(&result["content"][0]["text"]), json!({}), is_error);
}

/// One try: asks, or comes back for the answer where it is known how.
async fn ask(
    world: &SharedWorld,
    args: &Value,
    session: &mut Option<String>,
    last_event: &mut Option<String>,
) -> Result<Value> {
    let http = testkit::http_client();
    let url = format!("http://{}/mcp", world.adapters.address);
    let headers = |request: reqwest::RequestBuilder| {
        request.bearer_auth(&world.adapter_token).header("accept", "application/json, text/event-stream")
    };
    if session.is_none() {
        let initialize = json!({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": {
            "protocolVersion": REVISION, "capabilities": {},
            "clientInfo": {"name": "openclaw-bundle-mcp", "version": "1"}}});
        let response = headers(http.post(&url)).json(&initialize).send().await?;
        let id = response.headers().get("mcp-session-id").context("a session")?.to_str()?.to_owned();
        *session = Some(id);
    }
    let id = session.as_deref().unwrap_or_default();
    let request = match last_event.as_deref() {
        Some(last) => http.get(&url).header("last-event-id", last),
        None => http.post(&url).json(&json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call",
            "params": {"name": "request_user_input", "arguments": args}})),
    };
    let request = headers(request).header("mcp-session-id", id).header("mcp-protocol-version", REVISION);
    let mut response = request.send().await?.error_for_status()?;
    let mut read = String::new();
    while let Some(part) = response.chunk().await? {
        read.push_str(std::str::from_utf8(&part)?);
        while let Some((event, rest)) = read.split_once("\n\n") {
            let field = |name: &str| event.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
            if let Some(id) = field("id:") {
                *last_event = Some(id.to_owned());
            }
            if let Some(data) = field("data:").filter(|data| !data.is_empty()) {
                return Ok(serde_json::from_str(data)?);
            }
            read = rest.to_owned();
        }
    }
    bail!("the stream ended without an answer")
}
