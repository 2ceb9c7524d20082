//! Connections: challenge, who may do what, frames in and out.

use std::sync::Arc;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ed25519_dalek::{Signature, VerifyingKey};
use futures::{SinkExt, StreamExt};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::handshake::server::{ErrorResponse, Request, Response};
use tokio_tungstenite::tungstenite::http::StatusCode;
use tokio_tungstenite::tungstenite::protocol::frame::CloseFrame;
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;
use tokio_util::sync::CancellationToken;

use super::state::{Connection, Device};
use super::wire::{Rejection, check_params, new_id, now_ms};
use super::{Core, Fault, methods};

const PROTOCOL: u64 = 4;
const SIGNATURE_VALID_MS: u64 = 600_000;
const MAX_PAYLOAD: usize = 26_214_400;
const CLIENT_IDS: [&str; 16] = [
    "webchat-ui",
    "openclaw-control-ui",
    "openclaw-browser-copilot",
    "openclaw-tui",
    "webchat",
    "cli",
    "gateway-client",
    "openclaw-macos",
    "openclaw-linux",
    "openclaw-ios",
    "openclaw-watchos",
    "openclaw-android",
    "node-host",
    "openclaw-worker",
    "test",
    "openclaw-probe",
];
const CLIENT_MODES: [&str; 8] = ["webchat", "cli", "ui", "backend", "node", "worker", "probe", "test"];
const OPTIONAL_PARAMS: [&str; 13] = [
    "caps",
    "commands",
    "computerUse",
    "permissions",
    "pathEnv",
    "role",
    "scopes",
    "modelCatalog",
    "device",
    "auth",
    "locale",
    "userAgent",
    "workerRuns",
];

/// Takes connections until the Gateway process that listens is gone.
pub(super) async fn serve(core: Arc<Core>, listener: TcpListener, life: CancellationToken) {
    loop {
        let socket = tokio::select! {
            () = life.cancelled() => return,
            accepted = listener.accept() => accepted,
        };
        if let Ok((socket, _)) = socket {
            let (core, life) = (core.clone(), life.clone());
            tokio::spawn(async move {
                let connection = connection(core, socket, &life);
                tokio::select! { () = life.cancelled() => {} () = connection => {} }
            });
        }
    }
}

async fn connection(core: Arc<Core>, socket: TcpStream, life: &CancellationToken) {
    let draining = core.state().draining;
    let mut from_browser = false;
    #[expect(clippy::result_large_err, reason = "the signature is given")]
    let check = |request: &Request, response: Response| {
        from_browser = request.headers().contains_key("origin");
        let refused = if draining {
            StatusCode::SERVICE_UNAVAILABLE
        } else if request.headers().contains_key("x-forwarded-for") {
            StatusCode::FORBIDDEN
        } else {
            return Ok(response);
        };
        let mut response = ErrorResponse::new(None);
        *response.status_mut() = refused;
        Err(response)
    };
    let Ok(mut socket) = tokio_tungstenite::accept_hdr_async(socket, check).await else {
        return;
    };
    let nonce = new_id();
    let challenged_at = now_ms();
    let challenge = json!({"type": "event", "event": "connect.challenge",
        "payload": {"nonce": nonce, "ts": challenged_at}});
    if socket.send(Message::text(challenge.to_string())).await.is_err() {
        return;
    }
    let Some(Ok(Message::Text(first))) = socket.next().await else {
        return;
    };
    let Ok(first) = serde_json::from_str::<Value>(&first) else {
        return;
    };
    let (out, mut frames) = mpsc::unbounded_channel();
    let cut = CancellationToken::new();
    let admitted = {
        let answer = admit(&core, &first, &nonce, from_browser);
        answer.map(|(scopes, hello)| {
            let mut state = core.state();
            if life.is_cancelled() {
                return None;
            }
            let id = state.next_connection;
            state.next_connection += 1;
            let caps = first["params"]["caps"].as_array();
            let tool_events = caps.is_some_and(|caps| caps.contains(&"tool-events".into()));
            state.connections.insert(
                id,
                Connection {
                    scopes,
                    tool_events,
                    subscribed: false,
                    seq: 0,
                    out: out.clone(),
                    cut: cut.clone(),
                },
            );
            let frame = json!({"type": "res", "id": first["id"], "ok": true, "payload": hello});
            state.send(id, &frame);
            Some(id)
        })
    };
    let id = match admitted {
        Ok(Some(id)) => id,
        Ok(None) => return,
        Err(rejection) => {
            let frame = json!({"type": "res", "id": first["id"], "ok": false,
                "error": rejection.to_json()});
            let _ = socket.send(Message::text(frame.to_string())).await;
            let _ = socket.close(Some(close(1008, &rejection.message))).await;
            return;
        }
    };

    let (mut sink, mut incoming) = socket.split();
    let mut tick = tokio::time::interval(core.options.tick);
    tick.tick().await;
    loop {
        tokio::select! {
            () = cut.cancelled() => break,
            frame = frames.recv() => {
                let Some(frame) = frame else { break };
                let last = frame.is_close();
                if sink.send(frame).await.is_err() || last {
                    break;
                }
            }
            message = incoming.next() => match message {
                Some(Ok(Message::Text(text))) if text.len() > MAX_PAYLOAD => {
                    let _ = out.send(Message::Close(Some(close(1009, "payload too large"))));
                }
                Some(Ok(Message::Text(text))) => {
                    if let Ok(frame) = serde_json::from_str(&text) {
                        methods::handle(&core, id, frame);
                    }
                }
                Some(Ok(Message::Close(_)) | Err(_)) | None => break,
                Some(Ok(_)) => {}
            },
            _ = tick.tick() => {
                let payload = json!({"ts": now_ms()});
                core.state().send_event("tick", &payload, |to, _| to == id);
            }
        }
    }
    let mut state = core.state();
    state.connections.remove(&id);
    state.changed.send_replace(());
}

pub(super) fn close(code: u16, reason: &str) -> CloseFrame {
    let mut reason = reason.to_owned();
    reason.truncate(reason.floor_char_boundary(120));
    CloseFrame { code: CloseCode::from(code), reason: reason.into() }
}

/// Scopes and the hello of a connection, or why it is refused.
fn admit(
    core: &Arc<Core>,
    frame: &Value,
    nonce: &str,
    from_browser: bool,
) -> Result<(Vec<String>, Value), Rejection> {
    if frame["type"] != "req" || frame["method"] != "connect" {
        return Err(Rejection::invalid("invalid handshake: first request must be connect"));
    }
    let params = &frame["params"];
    check_params("connect", params, &["minProtocol", "maxProtocol", "client"], &OPTIONAL_PARAMS)?;
    let client = &params["client"];
    let member = |list: &[&str], value: &Value| value.as_str().is_some_and(|v| list.contains(&v));
    let at = |path: &str| {
        Rejection::invalid(format!(
            "invalid connect params: at /client/{path}: must be equal to one of the allowed values"
        ))
    };
    if !member(&CLIENT_IDS, &client["id"]) {
        return Err(at("id"));
    }
    if !member(&CLIENT_MODES, &client["mode"]) {
        return Err(at("mode"));
    }
    let speaks = |name: &str| params[name].as_u64().unwrap_or_default();
    if !(speaks("minProtocol")..=speaks("maxProtocol")).contains(&PROTOCOL) {
        let details = json!({"code": "PROTOCOL_MISMATCH", "expectedProtocol": PROTOCOL});
        return Err(Rejection::invalid("protocol mismatch").with_details(details));
    }
    let mut state = core.state();
    if let Some(Fault::Refuse(rejection)) = state.take_fault("connect") {
        return Err(rejection);
    }

    let asked: Vec<String> = serde_json::from_value(params["scopes"].clone()).unwrap_or_default();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let token = text(&params["auth"]["token"]);
    let device_token = text(&params["auth"]["deviceToken"]);
    let device = &params["device"];
    let known = state.paired.get(&text(&device["id"])).cloned();
    let by_device = known.as_ref().is_some_and(|device| token.is_empty() && device.token == device_token);
    if !by_device && token.is_empty() && device_token.is_empty() {
        let details = json!({"code": "DEVICE_IDENTITY_REQUIRED"});
        return Err(Rejection::new("NOT_PAIRED", "device identity required").with_details(details));
    }
    if !by_device && token != core.options.token {
        let message = "unauthorized: gateway token mismatch (use this gateway's \
                       gateway.auth.token or pair the device)";
        let details = json!({"code": "AUTH_TOKEN_MISMATCH", "authReason": "token_mismatch"});
        return Err(Rejection::invalid(message).with_details(details));
    }

    let mut scopes = asked.clone();
    let mut issued = None;
    if device.is_object() {
        verify_device(params, nonce)?;
        let covered =
            known.as_ref().is_some_and(|known| asked.iter().all(|scope| known.scopes.contains(scope)));
        let pairs = core.options.needs_approval || client["id"] == "cli";
        if covered {
            issued = known.map(|device| device.token);
        } else if pairs {
            let device = Device { id: text(&device["id"]), scopes: asked, token: new_id() };
            if core.options.needs_approval {
                let request = new_id();
                state.waiting_for_approval.insert(request.clone(), device);
                let details = json!({"code": "PAIRING_REQUIRED", "requestId": request});
                let message = "pairing required: device pairing required";
                return Err(Rejection::new("NOT_PAIRED", message).with_details(details));
            }
            issued = Some(device.token.clone());
            state.paired.insert(device.id.clone(), device);
        }
    } else {
        // Nobody is told: the list of scopes is just empty.
        let local = matches!(
            (client["id"].as_str(), client["mode"].as_str()),
            (Some("gateway-client"), Some("backend")) | (Some("cli"), Some("cli"))
        );
        if core.options.needs_approval || from_browser || !local {
            scopes.clear();
        }
    }
    if core.options.empty_scopes {
        scopes.clear();
    }

    let method = if by_device { "device-token" } else { "token" };
    let mut auth = json!({"method": method, "role": "operator", "scopes": scopes});
    if let Some(token) = issued {
        auth["deviceToken"] = token.into();
        auth["issuedAtMs"] = now_ms().into();
    }
    let hello = json!({"type": "hello-ok", "protocol": PROTOCOL,
        "server": {"version": "2026.9.6", "bootId": state.boot_id, "connId": new_id()},
        "features": {"methods": methods::NAMES, "events": methods::EVENTS, "capabilities": []},
        "snapshot": {"suspension": {"phase": "accepting"}},
        "auth": auth,
        "policy": {"maxPayload": MAX_PAYLOAD, "maxBufferedBytes": 52_428_800,
            "tickIntervalMs": millis(core.options.tick)}});
    Ok((scopes, hello))
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// Checks that the device holds the key it names, for this connection and these claims.
fn verify_device(params: &Value, nonce: &str) -> Result<(), Rejection> {
    let refuse = |message: &str, code: &str, reason: &str| {
        let details = json!({"code": code, "reason": reason});
        Rejection::invalid(message).with_details(details)
    };
    let (device, client, auth) = (&params["device"], &params["client"], &params["auth"]);
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let bytes = |value: &Value| URL_SAFE_NO_PAD.decode(text(value)).unwrap_or_default();

    let key: Vec<u8> = bytes(&device["publicKey"]);
    if hex::encode(Sha256::digest(&key)) != text(&device["id"]) {
        return Err(refuse(
            "device identity mismatch",
            "DEVICE_AUTH_DEVICE_ID_MISMATCH",
            "device-id-mismatch",
        ));
    }
    if text(&device["nonce"]) != nonce {
        return Err(refuse("device nonce mismatch", "DEVICE_AUTH_NONCE_MISMATCH", "device-nonce-mismatch"));
    }
    let signed_at = device["signedAt"].as_u64().unwrap_or_default();
    if now_ms().abs_diff(signed_at) > SIGNATURE_VALID_MS {
        return Err(refuse(
            "device signature expired",
            "DEVICE_AUTH_SIGNATURE_EXPIRED",
            "device-signature-stale",
        ));
    }
    let scopes: Vec<String> = serde_json::from_value(params["scopes"].clone()).unwrap_or_default();
    let token = ["token", "deviceToken"]
        .iter()
        .map(|name| text(&auth[*name]))
        .find(|token| !token.is_empty())
        .unwrap_or_default();
    let common = [
        text(&device["id"]),
        text(&client["id"]),
        text(&client["mode"]),
        text(&params["role"]),
        scopes.join(","),
        signed_at.to_string(),
        token,
        nonce.to_owned(),
    ]
    .join("|");
    let platform = text(&client["platform"]).to_lowercase();
    let family = text(&client["deviceFamily"]).to_lowercase();
    let payloads = [format!("v3|{common}|{platform}|{family}"), format!("v2|{common}")];
    let key = <[u8; 32]>::try_from(key).ok();
    let key = key.and_then(|key| VerifyingKey::from_bytes(&key).ok());
    let signature = Signature::from_slice(&bytes(&device["signature"])).ok();
    let valid = key.zip(signature).is_some_and(|(key, signature)| {
        payloads.iter().any(|payload| key.verify_strict(payload.as_bytes(), &signature).is_ok())
    });
    if valid {
        Ok(())
    } else {
        Err(refuse("device signature invalid", "DEVICE_AUTH_SIGNATURE_INVALID", "device-signature"))
    }
}
