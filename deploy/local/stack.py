#!/usr/bin/env python3
"""The whole of askbus on this machine, on the real parts, without containers.

nats-server, a model, the OpenClaw Gateway, the three services and Open WebUI,
each a process on loopback with its own log. `./dev up` runs it in the
foreground; tests/e2e starts the very same stack and also kills parts of it.

    stack.py up          runs until Ctrl-C
    stack.py down        stops the one that `up` started
"""

import contextlib
import fcntl
import json
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import open_webui
import peers

ROOT = Path(__file__).resolve().parents[2]
STATE = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "askbus"
GATEWAY_NAME = "openclaw"
PIPE_ID = "askbus"
# The model that people choose in Open WebUI: the pipe's default agent.
MODEL_ID = f"{PIPE_ID}.default"
# Below the range from which the kernel takes ports for outgoing connections, so
# that a part that is down for a moment finds its port free again.
PORTS = range(20_000, 32_000)
# Where `up` serves Open WebUI when the port is free.
WEB_PORT = 8180
# Far more than any part needs, even on a busy machine.
READY_WITHIN_S = 300
SAY_EVERY_S = 20
STOP_WITHIN_S = 15


class StackError(Exception):
    """What is wrong, and what to do about it."""


class Part:
    """One process of the stack: started, stopped, killed and started again under the same name."""

    # OpenClaw gives itself up when it gets no processor for five seconds while it starts;
    # with this status it refuses its configuration.
    may_give_up = frozenset({"openclaw"})
    refused_config = 78

    def __init__(self, name: str, command: list, env: dict[str, str], ready_url: str, log: Path):
        self.name = name
        self.command = [str(word) for word in command]
        self.env = env
        self.ready_url = ready_url
        self.log = log
        self.process: subprocess.Popen | None = None
        self.started = 0.0

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self, wait: bool = True) -> None:
        """Starts the process and, unless `wait` is false, returns when it is ready."""
        if self.running:
            raise StackError(f"{self.name} is running already")
        self._spawn()
        if wait:
            self.wait_ready()

    def _spawn(self) -> None:
        self.started = time.monotonic()
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                self.command,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Out of the terminal's group: Ctrl-C reaches us alone, and we stop it in order.
                start_new_session=True,
            )

    def wait_ready(self) -> None:
        begun = said = time.monotonic()
        deadline = begun + READY_WITHIN_S
        while not _answers(self.ready_url):
            if time.monotonic() - said > SAY_EVERY_S:
                said = time.monotonic()
                peers.say(f"{self.name}: not ready after {said - begun:.0f} s, waiting; its log: {self.log}")
            if time.monotonic() > deadline:
                raise StackError(f"{self.name} is not ready after {READY_WITHIN_S} s ({self.ready_url}):\n{self.log_tail()}")
            if not self.running:
                if self.name not in self.may_give_up or self.process.returncode == self.refused_config:
                    raise StackError(f"{self.name} ended with status {self.process.returncode}:\n{self.log_tail()}")
                self._spawn()
            time.sleep(0.1)

    def stop(self) -> None:
        """Asks the process to end and waits for it; kills it when it takes too long."""
        if self.running:
            self.process.terminate()
            try:
                self.process.wait(STOP_WITHIN_S)
            except subprocess.TimeoutExpired:
                self.kill()

    def kill(self) -> None:
        """kill -9; returns when the process is gone."""
        if self.running:
            self.process.kill()
            self.process.wait()

    def restart(self) -> None:
        self.stop()
        self.start()

    def log_tail(self, lines: int = 15) -> str:
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:]) + f"\nwhole log: {self.log}"


class Stack:
    """All parts, their addresses and the people's accounts.

    `folder` keeps everything of it: data, configuration, logs, accounts. Starting again on the same
    folder goes on where it stopped, unless `fresh` empties it first. `collect_spans` adds a span collector whose output is
    `spans_file`, one JSON object a line. `stop_grace_ms` is the emitter's.
    """

    def __init__(self, folder: Path, fresh: bool = False, collect_spans: bool = False, stop_grace_ms: int = 2000):
        self.folder = folder
        self.fresh = fresh
        self.logs = folder / "logs"
        self.collect_spans = collect_spans
        self.stop_grace_ms = stop_grace_ms
        # What a new folder wishes for; once started, what each part has.
        self.ports: dict[str, int] = {}
        self.parts: dict[str, Part] = {}
        self._lock = None

    def __getitem__(self, name: str) -> Part:
        return self.parts[name]

    # ---- addresses ---------------------------------------------------------------------------

    def port(self, name: str) -> int:
        return self.ports[name]

    def address(self, name: str) -> str:
        return f"127.0.0.1:{self.ports[name]}"

    @property
    def web_url(self) -> str:
        return f"http://{self.address('open-webui')}"

    @property
    def nats_url(self) -> str:
        return f"nats://{self.address('nats')}"

    @property
    def gateway_url(self) -> str:
        return f"ws://{self.address('openclaw')}"

    @property
    def adapter_url(self) -> str:
        return f"http://{self.address('adapter-http')}"

    @property
    def emitter_url(self) -> str:
        return f"http://{self.address('emitter-http')}"

    @property
    def model_url(self) -> str:
        """What the scripted model was asked is at /log there."""
        return f"http://{self.address('model')}"

    @property
    def config_file(self) -> Path:
        """The services' and askctl's configuration."""
        return self.folder / "askbus.toml"

    @property
    def keys(self) -> Path:
        """What provision makes, and the adapter's identity at the Gateway."""
        return self.folder / "keys"

    @property
    def spans_file(self) -> Path:
        return self.logs / "spans.log"

    # ---- life --------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts everything and returns when people can chat."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._take_lock()
        self._end_leftovers()
        if self.fresh:
            self._empty_folder()
        self.logs.mkdir(exist_ok=True)
        self._load_settings()
        self._write_configs()
        self._define_parts()
        try:
            self._start_parts()
            self._set_up_open_webui()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stops all parts, the bus last."""
        if not self._lock:
            return
        for part in reversed(self.parts.values()):
            part.stop()
        self._remember_processes()
        self._lock.close()
        self._lock = None

    def restart(self, name: str) -> None:
        self[name].restart()
        self._remember_processes()

    def watch(self) -> None:
        """Starts again what ends by itself or is killed; never returns."""
        while True:
            for part in self.parts.values():
                # What ends at once is not started again at once.
                if not part.running and time.monotonic() - part.started > 3:
                    peers.say(f"{part.name} ended with status {part.process.returncode}, starting it again; its log: {part.log}")
                    part.start(wait=False)
                    self._remember_processes()
            time.sleep(0.2)

    def askctl(self, *arguments: str, timeout: float = 60) -> str:
        """Runs askctl on this stack's bus and returns what it prints."""
        done = subprocess.run(
            [self._binary("askctl"), "--config", self.config_file, *arguments],
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        if done.returncode != 0:
            raise StackError(f"askctl {' '.join(arguments)} failed with status {done.returncode}:\n{done.stderr}{done.stdout}")
        return done.stdout

    def _start_parts(self) -> None:
        waiting = dict(self.parts)
        self._start_one(waiting.pop("nats"))
        peers.say("askbus: provisioning the bus")
        self.askctl("provision")
        for part in waiting.values():
            part.start(wait=False)
        self._remember_processes()
        # The adapter is ready only when it is connected to OpenClaw.
        for part in sorted(waiting.values(), key=lambda part: part.name == "gateway-adapter"):
            self._report_ready(part)

    def _start_one(self, part: Part) -> None:
        part.start(wait=False)
        self._remember_processes()
        self._report_ready(part)

    def _report_ready(self, part: Part) -> None:
        peers.say(f"{part.name}: starting{' (up to half a minute)' if part.name in ('openclaw', 'open-webui') else ''}")
        part.wait_ready()

    def _set_up_open_webui(self) -> None:
        self.web = open_webui.OpenWebUI(self.web_url)
        accounts = {name: open_webui.User(**account) for name, account in self.settings["users"].items()}
        self.admin, self.alice, self.bob = accounts["admin"], accounts["alice"], accounts["bob"]
        peers.say("open-webui: creating accounts, installing the pipe")
        self.web.set_up(self.admin, [self.alice, self.bob])
        valves = {"SERVICE_URL": self.emitter_url, "SERVICE_TOKEN": self.settings["emitter_token"]}
        pipe = ROOT / "deploy/open-webui/askbus_pipe.py"
        self.web.install_pipe(PIPE_ID, "OpenClaw", pipe, valves, self.admin)
        self.web.share_model(MODEL_ID, "OpenClaw", self.admin)

    # ---- what is kept in the folder ----------------------------------------------------------

    def _take_lock(self) -> None:
        lock = open(self.folder / "lock", "a")
        if not _try_lock(lock):
            lock.close()
            raise StackError(f"a stack is running on {self.folder} already: `./dev down` stops it")
        lock.truncate(0)
        print(os.getpid(), file=lock, flush=True)
        self._lock = lock

    def _empty_folder(self) -> None:
        for entry in self.folder.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)
            elif entry.name != "lock":
                entry.unlink()

    def _load_settings(self) -> None:
        """Tokens, accounts and ports: made once, so that a restart changes nothing for anybody."""
        file = self.folder / "settings.json"
        self.settings = json.loads(file.read_text()) if file.exists() else _new_settings(self.ports)
        self.ports = _free_ports(self.settings["ports"])
        _write_private(file, json.dumps(self.settings | {"ports": self.ports}, indent=2))

    def _remember_processes(self) -> None:
        alive = {name: part.process.pid for name, part in self.parts.items() if part.running}
        processes = {name: {"pid": pid, "started": _started(pid)} for name, pid in alive.items()}
        _write_private(self.folder / "processes.json", json.dumps(processes))

    def _end_leftovers(self) -> None:
        """Ends the parts of a stack that was itself killed."""
        with contextlib.suppress(FileNotFoundError):
            for name, process in json.loads((self.folder / "processes.json").read_text()).items():
                if _started(process["pid"]) == process["started"]:
                    peers.say(f"{name}: ending the process {process['pid']} left by a stack that was killed")
                    os.kill(process["pid"], signal.SIGKILL)

    # ---- parts and their configuration -------------------------------------------------------

    def _define_parts(self) -> None:
        nats_store = self.folder / "nats"
        self._part(
            "nats",
            [peers.nats_server(), "--config", ROOT / "deploy/nats/nats-server.conf",
             "--port", self.port("nats"), "--http_port", self.port("nats-http")],
            f"http://{self.address('nats-http')}/healthz",
            ASKBUS_NATS_STORE=json.dumps(str(nats_store)),
        )  # fmt: skip
        if self.collect_spans:
            self._part("spans", [self._binary("testkit"), "otlp", "--listen", self.address("spans")], f"tcp://{self.address('spans')}")
        if self._model() is None:
            self._part("model", [self._binary("testkit"), "model", "--listen", self.address("model")], f"{self.model_url}/v1/models")
        for service in ("ask-router", "gateway-adapter", "owui-emitter"):
            command = [self._binary(service), "--config", self.config_file]
            self._part(service, command, f"http://{self.address(service)}/readyz")
        self._part(
            "openclaw",
            [peers.node(), peers.openclaw(), "gateway", "run", "--port", self.port("openclaw"), "--bind", "loopback"],
            f"http://{self.address('openclaw')}/readyz",
            **self._gateway_env(),
        )
        web = [peers.open_webui(), "serve", "--host", "127.0.0.1", "--port", self.port("open-webui")]
        self._part("open-webui", web, f"{self.web_url}/health", **self._open_webui_env())

    def _part(self, name: str, command: list, ready_url: str, **env: str) -> None:
        # The provider's key is for the Gateway alone.
        inherited = {key: value for key, value in os.environ.items() if key != "ASKBUS_MODEL_API_KEY"}
        self.parts[name] = Part(name, command, {**inherited, **env}, ready_url, self.logs / f"{name}.log")

    def _binary(self, name: str) -> Path:
        folder = Path(os.environ.get("ASKBUS_BIN_DIR") or ROOT / "target/debug")
        if not (folder / name).exists():
            raise StackError(f"{folder / name} is missing: `./dev up` and `./dev e2e` build it first")
        return folder / name

    def _model(self) -> dict[str, str] | None:
        """The user's own provider, or None for the scripted model."""
        url = os.environ.get("ASKBUS_MODEL_BASE_URL")
        model = os.environ.get("ASKBUS_MODEL")
        if bool(url) != bool(model):
            raise StackError("ASKBUS_MODEL_BASE_URL and ASKBUS_MODEL go together: the provider's /v1 address and the model's name")
        return {"url": url, "model": model} if url else None

    def _write_configs(self) -> None:
        self.keys.mkdir(mode=0o700, exist_ok=True)
        _write_private(self.config_file, self._service_config())
        (self.folder / "openclaw/workspace").mkdir(parents=True, exist_ok=True)
        (self.folder / "openclaw/home").mkdir(exist_ok=True)
        (self.folder / "open-webui").mkdir(exist_ok=True)
        _write_private(self.folder / "openclaw/openclaw.json", json.dumps(self._gateway_config(), indent=2))

    def _service_config(self) -> str:
        telemetry = f'[telemetry]\notlp_endpoint = "http://{self.address("spans")}"\n' if self.collect_spans else ""
        return f"""\
[nats]
url = "{self.nats_url}"

{telemetry}
[router.health]
listen = "{self.address("ask-router")}"

[adapter]
seal_key.file = {json.dumps(str(self.keys / f"seal-{GATEWAY_NAME}.key"))}

[adapter.health]
listen = "{self.address("gateway-adapter")}"

[adapter.gateway]
name = "{GATEWAY_NAME}"
url = "{self.gateway_url}"
token = "{self.settings["gateway_token"]}"
identity_file = {json.dumps(str(self.keys / "adapter-identity.json"))}

[adapter.http]
listen = "{self.address("adapter-http")}"
token = "{self.settings["adapter_token"]}"

[emitter]
stop_grace_ms = {self.stop_grace_ms}

[emitter.health]
listen = "{self.address("owui-emitter")}"

[emitter.http]
listen = "{self.address("emitter-http")}"
token = "{self.settings["emitter_token"]}"

[askctl]
gateways = ["{GATEWAY_NAME}"]
keys_dir = {json.dumps(str(self.keys))}
monitor_url = "http://{self.address("nats-http")}"
"""

    def _gateway_config(self) -> dict:
        """OpenClaw's configuration. Tokens are named, not contained: the Gateway expands them."""
        own = self._model()
        provider, model = ("own", own["model"]) if own else ("scripted", "scripted-1")
        return {
            "gateway": {
                "mode": "local",
                "port": self.port("openclaw"),
                "bind": "loopback",
                "auth": {"mode": "token", "token": "${OPENCLAW_GATEWAY_TOKEN}"},
            },
            "logging": {"file": str(self.logs / "openclaw-events.log")},
            # Nothing is asked of anybody on the network, and no turn begins by itself.
            "update": {"checkOnStart": False},
            "models": {
                "mode": "replace",
                "catalogRefresh": {"enabled": False},
                "providers": {
                    provider: {
                        "baseUrl": own["url"] if own else f"{self.model_url}/v1",
                        "apiKey": "${ASKBUS_MODEL_API_KEY}",
                        "api": "openai-completions",
                        "models": [_model_entry(model)],
                    }
                },
            },
            "agents": {
                "defaults": {
                    "workspace": str(self.folder / "openclaw/workspace"),
                    "model": {"primary": f"{provider}/{model}"},
                    "heartbeat": {"every": "0m"},
                }
            },
            # With tool search, the default, a model that calls ask_user by name is told that it is unknown.
            "tools": {"toolSearch": False},
            "plugins": {
                "load": {"paths": [str(ROOT / "deploy/openclaw")]},
                "entries": {
                    "askbus": {
                        "enabled": True,
                        "config": {"url": self.adapter_url, "token": "${ASKBUS_TOKEN}", "gateway": GATEWAY_NAME},
                    }
                },
            },
            "mcp": {
                "servers": {
                    "askbus": {
                        "url": f"{self.adapter_url}/mcp",
                        "transport": "streamable-http",
                        # OpenClaw gives up after a minute where it is not told to wait for people.
                        "requestTimeoutMs": 3_900_000,
                        "headers": {"Authorization": "Bearer ${ASKBUS_TOKEN}"},
                    }
                }
            },
        }

    def _gateway_env(self) -> dict[str, str]:
        folder = self.folder / "openclaw"
        return {
            "HOME": str(folder / "home"),
            "OPENCLAW_STATE_DIR": str(folder / "state"),
            "OPENCLAW_CONFIG_PATH": str(folder / "openclaw.json"),
            "OPENCLAW_GATEWAY_TOKEN": self.settings["gateway_token"],
            "OPENCLAW_SKIP_CHANNELS": "1",
            "OPENCLAW_DISABLE_BONJOUR": "1",
            "ASKBUS_TOKEN": self.settings["adapter_token"],
            "ASKBUS_MODEL_API_KEY": os.environ.get("ASKBUS_MODEL_API_KEY") or "none",
        }

    def _open_webui_env(self) -> dict[str, str]:
        folder = self.folder / "open-webui"
        return {
            "DATA_DIR": str(folder),
            "WEBUI_SECRET_KEY": self.settings["web_secret"],
            "WEBUI_URL": self.web_url,
            "CORS_ALLOW_ORIGIN": self.web_url,
            "DEFAULT_MODELS": MODEL_ID,
            # What is typed arrives as typed: the rich input makes curly quotes, which no JSON has.
            "DEFAULT_INTERFACE_SETTINGS": json.dumps({"richTextInput": False, "showChangelog": False}),
            "ENABLE_API_KEYS": "true",
            # The pipe is the only model, and nothing is fetched from anywhere.
            "ENABLE_OLLAMA_API": "false",
            "ENABLE_OPENAI_API": "false",
            "OFFLINE_MODE": "true",
            "HF_HUB_OFFLINE": "1",
            "BYPASS_EMBEDDING_AND_RETRIEVAL": "true",
            "RAG_EMBEDDING_ENGINE": "openai",
            "ENABLE_VERSION_UPDATE_CHECK": "false",
            "ENABLE_PIP_INSTALL_FRONTMATTER_REQUIREMENTS": "false",
            "ENABLE_COMMUNITY_SHARING": "false",
            "ENABLE_EVALUATION_ARENA_MODELS": "false",
            "SCARF_NO_ANALYTICS": "true",
            "DO_NOT_TRACK": "true",
            "ANONYMIZED_TELEMETRY": "false",
            # Each of these would be another call of the agent.
            "ENABLE_TITLE_GENERATION": "false",
            "ENABLE_TAGS_GENERATION": "false",
            "ENABLE_FOLLOW_UP_GENERATION": "false",
            "ENABLE_AUTOCOMPLETE_GENERATION": "false",
        }


def _new_settings(ports: dict[str, int]) -> dict:
    def account(name: str) -> dict:
        return {"name": name.title(), "email": f"{name}@askbus.test", "password": secrets.token_urlsafe(9)}

    return {
        "ports": ports,
        "gateway_token": secrets.token_urlsafe(24),
        "adapter_token": secrets.token_urlsafe(24),
        "emitter_token": secrets.token_urlsafe(24),
        "web_secret": secrets.token_urlsafe(24),
        "users": {name: account(name) for name in ("admin", "alice", "bob")},
    }


def _model_entry(name: str) -> dict:
    return {
        "id": name,
        "name": name,
        "reasoning": False,
        "input": ["text"],
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
        "contextWindow": 128_000,
        "maxTokens": 8_000,
    }


def _free_ports(wanted: dict[str, int]) -> dict[str, int]:
    names = (
        "nats", "nats-http", "spans", "model", "ask-router", "gateway-adapter", "owui-emitter",
        "adapter-http", "emitter-http", "openclaw", "open-webui",
    )  # fmt: skip
    ports: dict[str, int] = {}
    for name in names:
        candidates = ([wanted[name]] if name in wanted else []) + random.sample(PORTS, 50)
        ports[name] = next(port for port in candidates if port not in ports.values() and _is_free(port))
    return ports


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _answers(url: str) -> bool:
    try:
        if url.startswith("tcp://"):
            host, port = url.removeprefix("tcp://").split(":")
            socket.create_connection((host, int(port)), timeout=5).close()
        else:
            open_webui.open_local(url, timeout=5).close()
    except OSError:  # urllib's errors are among them
        return False
    return True


def _started(pid: int) -> str | None:
    """When the process began; tells it from a later one with the same id. None: there is none."""
    try:
        # The 22nd field; the second one, the name, may hold blanks and brackets.
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return None
    return subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True).stdout.strip() or None


def _write_private(file: Path, text: str) -> None:
    """Replaces the file as a whole, readable by its owner alone."""
    part = file.with_name(file.name + ".part")
    part.unlink(missing_ok=True)
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as output:
        output.write(text)
    part.replace(file)


# ---- commands --------------------------------------------------------------------------------


def up() -> None:
    stack = Stack(STATE / "up")
    stack.ports = {"open-webui": WEB_PORT}

    def stop(*_):
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    try:
        stack.start()
        print(_welcome(stack), flush=True)
        stack.watch()
    except KeyboardInterrupt:
        peers.say("\naskbus: stopping")
    finally:
        stack.stop()
    peers.say(f"askbus: stopped; chats and questions are kept in {stack.folder}")


def _welcome(stack: Stack) -> str:
    accounts = "\n".join(f"    {user.email:<18} {user.password}" for user in (stack.admin, stack.alice, stack.bob))
    own = stack._model()
    try_it = (
        "Ask it for something that it must ask you back."
        if own
        else "The model is a script (./dev help says how to name a real one). Type for example\n\n"
        '    CALL request_user_input {"question": "Where to?", "choices": ["Lisbon", "Oslo", "Kyoto"]}'
    )
    return f"""
askbus is up. Open  {stack.web_url}  and sign in as one of

{accounts}

{try_it}

Look inside: {stack._binary("askctl")} --config {stack.config_file} ls
Logs: {stack.logs}
Kill any process of it and see it come back. Ctrl-C stops everything."""


def down() -> None:
    stack = Stack(STATE / "up")
    if not stack.folder.exists():
        peers.say("askbus: nothing was started here")
        return
    with open(stack.folder / "lock", "a+") as lock:
        if _try_lock(lock):
            stack._end_leftovers()
            peers.say("askbus: not running")
            return
        lock.seek(0)
        os.kill(int(lock.read()), signal.SIGTERM)
        peers.say("askbus: stopping (up to a minute)")
        fcntl.flock(lock, fcntl.LOCK_EX)
    peers.say("askbus: stopped")


def _try_lock(file) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def main(arguments: list[str]) -> int:
    commands = {"up": up, "down": down}
    if len(arguments) != 1 or arguments[0] not in commands:
        peers.say("usage: stack.py up|down")
        return 64
    try:
        commands[arguments[0]]()
    except (StackError, peers.PeerError, open_webui.ApiError) as error:
        peers.say(f"askbus: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
