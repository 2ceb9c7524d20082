//! The official Python client of MCP (tests/mcp/client.py). `./dev e2e` runs this: it needs a
//! Python that has the package `mcp`, named by ASKBUS_MCP_PYTHON.

use std::process::{Output, Stdio};

use ask_core::entry::Entry;
use ask_core::outcome::{CancelReason, Outcome};
use ask_core::reply::Answer;
use serde_json::{Value, json};
use tokio::process::{Child, Command};

use testkit::until;

use crate::bench::{Adapter, Bench, TOKEN};

fn call(adapter: &Adapter, args: Value, timeout_s: Option<f64>) -> Child {
    let python = std::env::var("ASKBUS_MCP_PYTHON").expect("ASKBUS_MCP_PYTHON: run ./dev e2e");
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/mcp/client.py");
    let url = format!("{}/mcp", adapter.url);
    let mut command = Command::new(python);
    command.arg(script).args([url.as_str(), TOKEN]).arg(args.to_string());
    command.args(timeout_s.map(|s| s.to_string()));
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true).spawn().unwrap()
}

async fn result(client: Child) -> Value {
    let Output { status, stdout, stderr } = client.wait_with_output().await.unwrap();
    assert!(status.success(), "{}", String::from_utf8_lossy(&stderr));
    serde_json::from_slice(&stdout).unwrap()
}

async fn asked(bench: &Bench) -> Entry {
    until("the question", async || {
        let all = bench.bus.all_questions().await.ok()?;
        all.into_iter().map(|stored| stored.value).next()
    })
    .await
}

#[tokio::test]
#[ignore = "needs a Python with the package mcp: ./dev e2e"]
async fn the_python_client_gets_the_answer() {
    let bench = Bench::start().await;
    let adapter = bench.adapter().await;
    let client = call(&adapter, json!({"question": "Where to?", "choices": ["A", "B"]}), None);
    bench.answer_as_operator(&asked(&bench).await, Answer::option(1)).await;
    let got = result(client).await;
    assert_eq!((&got["tool"], &got["texts"]), (&json!("request_user_input"), &json!(["B"])));
    assert_eq!((&got["is_error"], &got["details"]["status"]), (&json!(false), &json!("answered")));
}

#[tokio::test]
#[ignore = "needs a Python with the package mcp: ./dev e2e"]
async fn the_python_client_resumes_after_a_restart() {
    let bench = Bench::start().await;
    let adapter = bench.adapter().await;
    let client = call(&adapter, json!({"question": "Where to?"}), None);
    let asked = asked(&bench).await;
    let address = adapter.address;
    drop(adapter);
    let _adapter = bench.adapter_at(address).await;
    bench.answer_as_operator(&asked, Answer::text("home")).await;
    assert_eq!(result(client).await["texts"], json!(["home"]));
    assert_eq!(bench.bus.all_questions().await.unwrap().len(), 1);
}

#[tokio::test]
#[ignore = "needs a Python with the package mcp: ./dev e2e"]
async fn the_python_client_that_gives_up_cancels_its_question() {
    let bench = Bench::start().await;
    let adapter = bench.adapter().await;
    let client = call(&adapter, json!({"question": "Where to?"}), Some(5.0));
    let asked = asked(&bench).await;
    bench.returned(&asked).await;
    let entry = bench.bus.question(&asked.key).await.unwrap().unwrap().value;
    assert_eq!(entry.decision().unwrap().outcome, Outcome::Cancelled { reason: CancelReason::Caller });
    assert!(!client.wait_with_output().await.unwrap().status.success());
}
