//! The tool `request_user_input` as OpenClaw's plugin carries it, over HTTP.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use serde_json::{Value, json};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::runs::ToolResult;
use super::wire::new_id;
use super::{Core, PluginEndpoint};

const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
/// How long acknowledgements and cancels are repeated.
const TELL_FOR: Duration = Duration::from_secs(60);

/// One execution of the tool. When it is dropped before its end, the run was aborted: the call is
/// cancelled at the other side, unless the Gateway process is gone.
pub(super) struct Execution {
    core: Arc<Core>,
    life: CancellationToken,
    endpoint: PluginEndpoint,
    call: String,
    body: Value,
    url: String,
    ended: bool,
}

enum Attempt {
    Ended(Box<ToolResult>),
    /// The other side had taken the call.
    RepeatSoon,
    Repeat,
}

impl Execution {
    pub fn new(
        core: &Arc<Core>,
        life: &CancellationToken,
        endpoint: PluginEndpoint,
        call: &str,
        body: Value,
    ) -> Self {
        // Call ids are hexadecimal here, so there is nothing to percent-encode.
        let url = format!("{}/v1/calls/{call}.{}", endpoint.url, new_id());
        Self {
            core: core.clone(),
            life: life.clone(),
            endpoint,
            call: call.to_owned(),
            body,
            url,
            ended: false,
        }
    }

    pub async fn run(mut self) -> ToolResult {
        let mut pause = FIRST_PAUSE;
        for attempt in 1.. {
            match self.attempt().await {
                Attempt::Ended(mut result) => {
                    result.attempts = attempt;
                    self.ended = true;
                    return *result;
                }
                Attempt::RepeatSoon => pause = FIRST_PAUSE,
                Attempt::Repeat => {}
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
        unreachable!("it is repeated for ever")
    }

    async fn attempt(&self) -> Attempt {
        let request = self.core.http.post(&self.url);
        let request = request.bearer_auth(&self.endpoint.token).json(&self.body);
        let Ok(response) = request.send().await else {
            return Attempt::Repeat;
        };
        let status = response.status();
        let repeat = if status.is_success() { Attempt::RepeatSoon } else { Attempt::Repeat };
        // The answer is one JSON object after line feeds; a broken stream is no answer.
        let mut text = Vec::new();
        let mut parts = response.bytes_stream();
        while let Some(part) = parts.next().await {
            let Ok(part) = part else {
                return repeat;
            };
            text.extend_from_slice(&part);
        }
        if status.is_server_error() {
            return repeat;
        }
        let answer: Value = serde_json::from_slice(&text).unwrap_or_default();
        let message = answer["error"]["message"].as_str().unwrap_or_default();
        let error = |text: String| Attempt::Ended(Box::new(ToolResult::error(text)));
        match status.as_u16() {
            200 if answer["retry"] == true || !answer.is_object() => repeat,
            200 => Attempt::Ended(Box::new(self.result(&answer))),
            400 => error(message.to_owned()),
            401 => error("askbus refused the token: set plugins.entries.askbus.config.token".into()),
            other => error(format!("askbus answered {other}: {message}")),
        }
    }

    fn result(&self, answer: &Value) -> ToolResult {
        let text = answer["text"].as_str().unwrap_or_default().to_owned();
        let secret = answer["secret"]["value"].as_str().map(str::to_owned);
        self.acknowledge(answer["revision"].clone());
        let text = match &secret {
            None => text,
            Some(_) if self.endpoint.handles => format!("[[ask-secret:{}]]", new_id()),
            Some(value) => value.clone(),
        };
        ToolResult {
            text,
            details: answer["details"].clone(),
            is_error: answer["isError"] == true,
            secret,
            ..ToolResult::default()
        }
    }

    fn whose(&self) -> Value {
        json!({"gateway": self.body["gateway"], "sessionKey": self.body["sessionKey"],
            "runId": self.body["runId"]})
    }

    fn acknowledge(&self, revision: Value) {
        let mut body = self.whose();
        body["revision"] = revision;
        let request = self.core.http.post(format!("{}/ack", self.url)).json(&body);
        let (core, call) = (self.core.clone(), self.call.clone());
        self.tell(request, move || core.state().acknowledged(&call));
    }

    /// Sends a request until it is accepted, for a while and as long as the Gateway lives.
    fn tell(&self, request: reqwest::RequestBuilder, then: impl FnOnce() + Send + 'static) {
        let request = request.bearer_auth(&self.endpoint.token);
        let life = self.life.clone();
        let told = async move {
            let started = Instant::now();
            let mut pause = FIRST_PAUSE;
            while started.elapsed() < TELL_FOR {
                let sent = request.try_clone().map(reqwest::RequestBuilder::send);
                if let Some(sent) = sent
                    && sent.await.is_ok_and(|response| response.status().is_success())
                {
                    then();
                    return;
                }
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
        };
        tokio::spawn(async move {
            tokio::select! { () = life.cancelled() => {} () = told => {} }
        });
    }
}

impl Drop for Execution {
    fn drop(&mut self) {
        if self.ended || self.life.is_cancelled() {
            return;
        }
        let mut body = self.whose();
        body["reason"] = "AbortError: This operation was aborted".into();
        self.tell(self.core.http.delete(&self.url).json(&body), || {});
    }
}
