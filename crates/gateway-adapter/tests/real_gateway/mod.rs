//! Starts the real OpenClaw Gateway with a scripted model and throwaway state.
//!
//! `ASKBUS_OPENCLAW` names the folder that holds `app/` (the npm package), `ASKBUS_NODE` the node
//! to run it with.

use std::{
    fs,
    net::{IpAddr, TcpListener, UdpSocket},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use gateway_adapter::openclaw::{
    client::{self, REQUIRED_SCOPES, Request},
    url::GatewayUrl,
};
use serde_json::json;
use testkit::model::{MODEL, ScriptedModel};

pub const TOKEN: &str = "contract-token-0123456789abcdef";
/// On a machine of two cores that is busy otherwise, a start was seen to take 40 s.
const START_TIMEOUT: Duration = Duration::from_secs(300);

/// A running Gateway; its process ends with this value or with the test process.
pub struct RealGateway {
    folder: PathBuf,
    port: u16,
    bind: &'static str,
    child: Option<Child>,
    _model: ScriptedModel,
}

impl RealGateway {
    /// Starts a Gateway that listens on the local machine only.
    pub async fn start(name: &str) -> Self {
        Self::start_bound(name, "loopback").await
    }

    /// Starts a Gateway with `gateway.bind` as told: `loopback` or `lan`.
    pub async fn start_bound(name: &str, bind: &'static str) -> Self {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(folder.join("home")).unwrap();
        fs::create_dir_all(folder.join("state")).unwrap();
        let model = ScriptedModel::start().await.unwrap();
        let port = free_port();
        let config = json!({
            "gateway": {"mode": "local", "port": port, "bind": bind,
                "auth": {"mode": "token", "token": TOKEN}},
            "models": {"mode": "replace", "providers": {"scripted": {
                "baseUrl": model.url(), "apiKey": "x", "api": "openai-completions",
                "models": [{"id": MODEL, "name": "Scripted", "reasoning": false,
                    "input": ["text"], "contextWindow": 128_000, "maxTokens": 8000,
                    "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0}}]}}},
            "agents": {"defaults": {"workspace": folder.join("workspace"),
                "model": {"primary": format!("scripted/{MODEL}")}}},
            "tools": {"toolSearch": false},
        });
        fs::write(folder.join("openclaw.json"), config.to_string()).unwrap();
        let mut gateway = Self { folder, port, bind, child: None, _model: model };
        gateway.launch(true).await;
        gateway
    }

    /// Address of the Gateway on this machine.
    pub fn url(&self) -> GatewayUrl {
        format!("127.0.0.1:{}", self.port).parse().unwrap()
    }

    /// Address of the Gateway as another machine sees it.
    pub fn lan_url(&self) -> Option<GatewayUrl> {
        Some(format!("{}:{}", lan_address()?, self.port).parse().unwrap())
    }

    /// A request with the right token and the required scopes.
    pub fn request(&self, url: GatewayUrl) -> Request {
        Request {
            url,
            token: Some(TOKEN.to_owned()),
            scopes: REQUIRED_SCOPES.map(str::to_owned).to_vec(),
            display_name: "askbus contract test".to_owned(),
        }
    }

    /// Where a test may keep files.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Kills the process (-9) and starts another on the same state.
    pub async fn kill_and_restart(&mut self) {
        self.stop();
        self.launch(false).await;
    }

    /// Asks the process to stop (SIGTERM): it drains first.
    pub fn terminate(&self) {
        let pid = fs::read_to_string(self.folder.join("pid")).unwrap();
        let status = Command::new("kill").arg(pid.trim()).status().unwrap();
        assert!(status.success());
    }

    /// Runs the Gateway's own command line on its state.
    pub async fn openclaw(&self, arguments: &[&str]) -> String {
        let mut command = tokio::process::Command::from(self.command());
        let output = command.args(arguments).output().await.unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(
            output.status.success(),
            "openclaw {arguments:?}: {text}{}",
            String::from_utf8_lossy(&output.stderr)
        );
        text
    }

    /// One start at a time: while it starts, a Gateway gives itself up when it gets no processor
    /// for five seconds. Then a supervisor would start it again, and so do we.
    async fn launch(&mut self, first: bool) {
        static STARTS: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());
        let _one = STARTS.lock().await;
        let deadline = Instant::now() + START_TIMEOUT;
        self.spawn();
        let request = self.request(self.url());
        while let Err(error) = client::open(&request, None).await {
            assert!(
                error.is_transient() && Instant::now() < deadline,
                "{error}; see {}",
                self.folder.join("gateway.log").display()
            );
            let child = self.child.as_mut().unwrap();
            if child.try_wait().unwrap().is_some() {
                if first {
                    // Half a first start may leave a state that wants a repair by hand.
                    let _ = fs::remove_dir_all(self.folder.join("state"));
                }
                self.spawn();
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }

    fn spawn(&mut self) {
        let log =
            fs::File::options().create(true).append(true).open(self.folder.join("gateway.log")).unwrap();
        // The shell holds the read end of a pipe: when this process ends in whatever way, it sees
        // the end of the pipe and kills the Gateway. When the Gateway ends, so does the shell.
        let script = r#"exec 3<&0
            "$@" </dev/null 3<&- & gateway=$!
            echo $gateway >pid
            { read -r _ <&3; kill -9 $gateway; } 2>/dev/null &
            wait $gateway"#;
        let mut command = Command::new("sh");
        let gateway = self.command();
        command
            .arg("-c")
            .arg(script)
            .arg("sh")
            .arg(gateway.get_program())
            .args(gateway.get_args())
            .args(["gateway", "run", "--port", &self.port.to_string()])
            .args(["--bind", self.bind])
            .envs(gateway.get_envs().filter_map(|(k, v)| Some((k, v?))))
            .current_dir(&self.folder)
            .stdin(Stdio::piped())
            .stdout(log.try_clone().unwrap())
            .stderr(log);
        self.child = Some(command.spawn().unwrap());
    }

    fn command(&self) -> Command {
        let set = |name| std::env::var_os(name).expect("ASKBUS_* is not set: run ./dev e2e");
        let install = PathBuf::from(set("ASKBUS_OPENCLAW"));
        let mut command = Command::new(set("ASKBUS_NODE"));
        command
            .arg(install.join("app/node_modules/openclaw/openclaw.mjs"))
            .env("HOME", self.folder.join("home"))
            .env("OPENCLAW_STATE_DIR", self.folder.join("state"))
            .env("OPENCLAW_CONFIG_PATH", self.folder.join("openclaw.json"))
            .env("OPENCLAW_SKIP_CHANNELS", "1")
            .env("OPENCLAW_DISABLE_BONJOUR", "1");
        command
    }

    fn stop(&mut self) {
        if let Some(mut child) = self.child.take() {
            drop(child.stdin.take());
            let _ = child.wait();
        }
    }
}

impl Drop for RealGateway {
    fn drop(&mut self) {
        self.stop();
    }
}

fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port()
}

/// This machine's address on its network; nothing is sent.
fn lan_address() -> Option<IpAddr> {
    let socket = UdpSocket::bind("0.0.0.0:0").ok()?;
    socket.connect("192.0.2.1:9").ok()?;
    let address = socket.local_addr().ok()?.ip();
    (!address.is_loopback() && !address.is_unspecified()).then_some(address)
}
