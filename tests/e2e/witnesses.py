"""What the parts of the stack have on record: the bus, the agent's model, the Gateway, the spans, the disk."""

import json
import os
import subprocess
from pathlib import Path

import peers
from open_webui import open_local
from waiting import until


class Witnesses:
    def __init__(self, stack):
        self.stack = stack

    # ---- the bus

    def question(self, text):
        """All that is on record of the question with this text, as `askctl show --json` has it; None without one."""
        listed = json.loads(self.stack.askctl("ls", "--all", "--json"))
        ids = [one["id"] for one in listed if one["title"] == text]
        assert len(ids) < 2, f"asked {len(ids)} times: {text}"
        return json.loads(self.stack.askctl("show", "--json", ids[0])) if ids else None

    def wait_question(self, text, condition):
        """The question's entry, once it fulfils `condition`."""
        last = None

        def entry():
            nonlocal last
            last = self.question(text)
            return last and condition(last["entry"]) and last["entry"]

        try:
            return until(text, entry)
        except AssertionError as error:
            raise AssertionError(f"{error}\non record: {json.dumps(last, indent=1)}") from None

    def wait_shown(self, text):
        """A pending question that is known to be on screen."""
        return self.wait_question(text, lambda entry: steps(entry, "delivered"))

    def wait_returned(self, text):
        return self.wait_question(text, lambda entry: entry["state"] == "returned")

    # ---- the agent's model

    def asked_of_model(self):
        with open_local(f"{self.stack.model_url}/log", timeout=60) as log:
            return json.load(log)

    def told(self, text):
        """The tool results that the model was given since a person said `text`."""
        said = [(r["messages"], at) for r in self.asked_of_model() for at, m in enumerate(r["messages"]) if says(m, text)]
        messages, at = said[-1] if said else ([], 0)
        return [content(message) for message in messages[at:] if message["role"] == "tool"]

    def wait_told(self, text, count=1):
        """The same, once there are as many."""
        return until(f"{count} tool results in: {text}", lambda: len(t := self.told(text)) >= count and t)

    # ---- the Gateway

    def gateway(self, method, **params):
        """One call of the Gateway as another operator."""
        called = subprocess.run(
            [peers.node(), Path(__file__).with_name("gateway_call.mjs"), method, json.dumps(params)],
            env=os.environ
            | {"GATEWAY_URL": self.stack.gateway_url, "GATEWAY_TOKEN": self.stack.settings["gateway_token"]},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert called.returncode == 0, called.stderr
        return json.loads(called.stdout)

    def is_running(self, session):
        """Whether the agent works in this session."""
        history = self.gateway("chat.history", sessionKey=session, limit=1)
        return history["sessionInfo"].get("hasActiveRun", False)

    # ---- spans

    def spans(self):
        lines = self.stack.spans_file.read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    # ---- the disk

    def files_with(self, value, *, below, but=()):
        """Files below these folders of the stack that hold `value`, named relative to its folder."""
        needle = value.encode()
        files = [file for folder in below for file in (self.stack.folder / folder).rglob("*") if file.is_file()]
        found = [str(file.relative_to(self.stack.folder)) for file in files if needle in read(file)]
        return [name for name in found if name not in but]


def read(file):
    try:
        return file.read_bytes()
    except FileNotFoundError:  # gone since it was listed
        return b""


def says(message, text):
    return message["role"] == "user" and text in content(message)


def content(message):
    if isinstance(message["content"], str):
        return message["content"]
    return "".join(part.get("text", "") for part in message["content"] or [])


def steps(entry, kind):
    """The steps of this kind on record."""
    return [step for step in entry.get("steps", []) if step["step"] == kind]
