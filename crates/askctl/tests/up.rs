//! `askctl up` as a process: its own nats-server, the services, its end.

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::time::Duration;

use ask_bus::{Bus, BusOptions};
use rand::Rng as _;
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};
use tokio::time::{Instant, sleep};

const PATIENCE: Duration = Duration::from_secs(60);

struct Up {
    folder: PathBuf,
    config: PathBuf,
    url: String,
    child: Child,
    said: Vec<String>,
}

fn askctl(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_askctl"));
    command.args(args).env_remove("ASKBUS_CONFIG").kill_on_drop(true);
    command
}

/// A configuration on ports that are free now, without a Gateway.
fn write_config(folder: &Path) -> (PathBuf, String) {
    let free = || loop {
        let port: u16 = rand::rng().random_range(20_000..32_000);
        if let Ok(listener) = TcpListener::bind(("127.0.0.1", port)) {
            return listener.local_addr().unwrap();
        }
    };
    let [nats, monitor, gateway] = [free(), free(), free()];
    let keys = folder.join("keys");
    let text = format!(
        "[nats]\nurl = \"nats://{nats}\"\n\
         [askctl]\nmonitor_url = \"http://{monitor}\"\nkeys_dir = {keys:?}\n\
         [router]\nhealth.listen = \"127.0.0.1:0\"\n\
         [adapter]\nhealth.listen = \"127.0.0.1:0\"\nseal_key.file = {:?}\n\
         gateway.url = \"ws://{gateway}\"\ngateway.identity_file = {:?}\n\
         http.listen = \"127.0.0.1:0\"\nhttp.token.file = {:?}\n\
         [emitter]\nhealth.listen = \"127.0.0.1:0\"\n\
         http.listen = \"127.0.0.1:0\"\nhttp.token.file = {:?}\n",
        keys.join("seal-openclaw.key"),
        keys.join("identity.json"),
        keys.join("adapter.token"),
        keys.join("emitter.token"),
    );
    let config = folder.join("askbus.toml");
    fs::write(&config, text).unwrap();
    (config, format!("nats://{nats}"))
}

impl Up {
    async fn start(folder: &Path) -> Self {
        let (config, url) = write_config(folder);
        let mut child =
            askctl(&["up", "--state", folder.to_str().unwrap(), "--config", config.to_str().unwrap()])
                .stdout(Stdio::piped())
                .stderr(fs::File::create(folder.join("up.log")).unwrap())
                .spawn()
                .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut said = Vec::new();
        let addresses = async {
            while let Some(line) = lines.next_line().await.unwrap() {
                let last = line.contains("owui-emitter");
                said.push(line);
                if last {
                    return;
                }
            }
            panic!("{}", fs::read_to_string(folder.join("up.log")).unwrap());
        };
        tokio::time::timeout(PATIENCE, addresses).await.unwrap();
        Self { folder: folder.into(), config, url, child, said }
    }

    async fn askctl(&self, args: &[&str]) -> Output {
        let args = [&["--config", self.config.to_str().unwrap()], args].concat();
        tokio::time::timeout(PATIENCE, askctl(&args).output()).await.unwrap().unwrap()
    }

    /// The nats-server that runs now: it names its file by its process id.
    fn server(&self) -> Option<Pid> {
        let files = fs::read_dir(self.folder.join("nats/ports")).unwrap().flatten();
        let ids = files.filter_map(|file| {
            let name = file.file_name().into_string().ok()?;
            let id = name.strip_suffix(".ports")?.rsplit('_').next()?.parse().ok()?;
            Pid::from_raw(id)
        });
        ids.into_iter().find(|id| test_kill_process(*id).is_ok())
    }

    async fn until(&self, what: &str, mut condition: impl FnMut() -> bool) {
        let give_up = Instant::now() + PATIENCE;
        while !condition() {
            let log = || fs::read_to_string(self.folder.join("up.log")).unwrap();
            assert!(Instant::now() < give_up, "{what}:\n{}", log());
            sleep(Duration::from_millis(20)).await;
        }
    }
}

#[tokio::test]
async fn up_brings_a_whole_bus_back_after_its_server_died_and_ends_in_order() {
    let folder = tempfile::tempdir().unwrap();
    let mut up = Up::start(folder.path()).await;
    let said = up.said.join("\n");
    assert!(said.contains("made       stream KV_ask") && said.contains(&up.url), "{said}");
    let bus = Bus::connect(BusOptions { url: up.url.clone(), name: "test".into(), ..Default::default() })
        .await
        .unwrap();
    assert!(bus.connected(PATIENCE).await, "{}", fs::read_to_string(folder.path().join("up.log")).unwrap());

    let doctor = up.askctl(&["doctor"]).await;
    let text = String::from_utf8_lossy(&doctor.stdout).into_owned();
    for line in ["ok       nats", "ok       disk", "ok       buckets", "ok       router", "ok       seal key"]
    {
        assert!(text.contains(line), "{line} in {text}");
    }
    assert!(
        text.contains("PROBLEM  adapter    openclaw: its gateway-adapter is not connected to it"),
        "{text}"
    );

    let first = up.server().unwrap();
    kill_process(first, Signal::KILL).unwrap();
    up.until("another nats-server runs", || up.server().is_some_and(|id| id != first)).await;
    up.until("the connection is back", || bus.is_connected()).await;
    bus.check().await.unwrap();

    let second = askctl(&["up", "--state", folder.path().to_str().unwrap()]).output();
    let second = tokio::time::timeout(PATIENCE, second).await.unwrap().unwrap();
    let said = String::from_utf8_lossy(&second.stderr).into_owned();
    assert!(second.status.code() == Some(1) && said.contains("is in use by another `askctl up`"), "{said}");

    kill_process(Pid::from_raw(up.child.id().unwrap() as i32).unwrap(), Signal::TERM).unwrap();
    let status = tokio::time::timeout(PATIENCE, up.child.wait()).await.unwrap().unwrap();
    assert!(status.success(), "{}", fs::read_to_string(folder.path().join("up.log")).unwrap());
    assert_eq!(up.server(), None, "its nats-server is gone");
}

#[tokio::test]
async fn a_server_left_behind_by_a_killed_up_keeps_its_folder() {
    let folder = tempfile::tempdir().unwrap();
    let mut up = Up::start(folder.path()).await;
    up.child.kill().await.unwrap();
    let left = up.server().unwrap();
    let second = up.askctl(&["up", "--state", folder.path().to_str().unwrap()]).await;
    let said = String::from_utf8_lossy(&second.stderr).into_owned();
    kill_process(left, Signal::KILL).unwrap();
    assert!(said.contains("left behind"), "{said}");
}
