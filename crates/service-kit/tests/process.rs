//! A service as a process: `examples/smallest.rs`, which `cargo test` builds beside the tests.

use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use testkit::otlp::OtlpSink;
use tokio::io::{AsyncBufReadExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStderr, Command};

const SOON: Duration = Duration::from_secs(20);

fn command(variables: &[(&str, &str)]) -> Command {
    let test = std::env::current_exe().unwrap();
    let target: PathBuf = test.ancestors().nth(2).unwrap().into();
    let example = target.join("examples/smallest");
    assert!(example.exists(), "{} is missing, run: cargo test", example.display());
    let mut command = Command::new(example);
    command
        .env("ASKBUS__ROUTER__HEALTH__LISTEN", "127.0.0.1:0")
        .env("ASKBUS__TELEMETRY__LOG_FORMAT", "json")
        .envs(variables.iter().copied())
        .stderr(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true);
    command
}

struct Running {
    child: Child,
    log: Lines<BufReader<ChildStderr>>,
}

impl Running {
    fn start(variables: &[(&str, &str)]) -> Self {
        let mut child = command(variables).spawn().unwrap();
        let log = BufReader::new(child.stderr.take().unwrap()).lines();
        Self { child, log }
    }

    /// The next log line with this message.
    async fn logged(&mut self, message: &str) -> serde_json::Value {
        let found = async {
            while let Some(line) = self.log.next_line().await.unwrap() {
                let line: serde_json::Value = serde_json::from_str(&line).unwrap();
                if line["message"] == message {
                    return line;
                }
            }
            panic!("the process ended without logging {message:?}");
        };
        tokio::time::timeout(SOON, found).await.expect(message)
    }

    async fn signal(&self, name: &str) {
        let pid = self.child.id().unwrap().to_string();
        assert!(Command::new("kill").args(["-s", name, &pid]).status().await.unwrap().success());
    }

    async fn ended(&mut self) -> ExitStatus {
        tokio::time::timeout(SOON, self.child.wait()).await.expect("the process goes on").unwrap()
    }
}

#[tokio::test]
async fn it_logs_serves_probes_sends_spans_and_ends_cleanly_on_sigterm() {
    let sink = OtlpSink::start().await.unwrap();
    let endpoint = sink.endpoint();
    let mut service = Running::start(&[
        ("ASKBUS__TELEMETRY__OTLP_ENDPOINT", &endpoint),
        ("ASKBUS__ROUTER__GREETING", "good morning"),
    ]);
    let health = service.logged("starting").await["health"].as_str().unwrap().to_owned();
    let up = service.logged("up").await;
    assert_eq!(up["greeting"], "good morning", "fields of the span are in the line");
    let ready = testkit::http_client().get(format!("http://{health}/readyz")).send().await.unwrap();
    assert_eq!(ready.status(), 200);

    service.signal("TERM").await;
    service.logged("shutting down").await;
    assert_eq!(service.ended().await.code(), Some(0));
    let spans = sink.wait_for(|spans| !spans.is_empty(), SOON).await.unwrap();
    assert_eq!((spans[0].service.as_str(), spans[0].name.as_str()), ("smallest", "hello"));
    assert_eq!(spans[0].trace_id, up["trace_id"], "the line names the trace");
    assert_eq!(spans[0].span_id, up["span_id"]);
}

#[tokio::test]
async fn probes_see_the_shutdown_and_a_second_signal_ends_it() {
    let mut service = Running::start(&[("ASKBUS__ROUTER__END", "hang")]);
    let health = service.logged("starting").await["health"].as_str().unwrap().to_owned();
    service.logged("up").await;
    service.signal("INT").await;
    service.logged("shutting down").await;
    let seen = async {
        let client = testkit::http_client();
        loop {
            let answer = client.get(format!("http://{health}/readyz")).send().await.unwrap();
            if answer.status() == 503 {
                return answer.json::<serde_json::Value>().await.unwrap();
            }
            tokio::task::yield_now().await;
        }
    };
    let answer = tokio::time::timeout(SOON, seen).await.unwrap();
    assert_eq!(answer["unmet"]["running"], "shutting down");

    service.signal("INT").await;
    assert_eq!(service.ended().await.code(), Some(1));
}

#[tokio::test]
async fn a_failure_is_logged_and_ends_with_1() {
    let mut service = Running::start(&[("ASKBUS__ROUTER__END", "fail")]);
    service.logged("failed: this end was configured").await;
    assert_eq!(service.ended().await.code(), Some(1));
}

#[tokio::test]
async fn a_bad_configuration_or_command_line_ends_with_64_before_anything_starts() {
    let bad_value = ("ASKBUS__TELEMETRY__LOG_FORMAT", "xml");
    let cases = [
        (
            command(&[bad_value]),
            "smallest: telemetry.log_format (from the environment variable \
             ASKBUS__TELEMETRY__LOG_FORMAT): `xml` is not allowed: unknown variant `xml`, \
             expected `text` or `json`",
        ),
        (command(&[("ASKBUS_CONFIG", "/nowhere")]), "cannot read the config file /nowhere"),
        (command(&[("ASKBUS__ROUTR__END", "fail")]), "routr"),
    ];
    for (mut command, expected) in cases {
        let output = command.output().await.unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(64), "{error}");
        assert!(error.contains(expected), "{error}");
    }
    let output = command(&[]).arg("--confg").output().await.unwrap();
    assert_eq!(output.status.code(), Some(64));
}

#[tokio::test]
async fn print_defaults_shows_a_config_file_that_it_accepts() {
    let defaults = command(&[]).arg("--print-defaults").output().await.unwrap();
    assert!(defaults.status.success());
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("askbus.toml");
    std::fs::write(&file, &defaults.stdout).unwrap();
    let output = command(&[("ASKBUS__ROUTER__END", "fail")]).arg("--config").arg(&file).output();
    assert_eq!(output.await.unwrap().status.code(), Some(1), "it got as far as its end");
}
