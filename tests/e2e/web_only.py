"""A real Open WebUI with the pipe in it, and nothing else of the stack."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "deploy" / "local"))
from stack import MODEL_ID, PIPE_ID, Stack  # noqa: E402
from witnesses import read  # noqa: E402

NEW_CHAT = f"/?models={MODEL_ID}"


class WebOnly(Stack):
    """The stack's Open WebUI without the rest of it."""

    def _write_configs(self):
        (self.folder / "open-webui").mkdir(exist_ok=True)

    def _binary(self, name):
        return Path(name)

    def _part(self, name, *arguments, **env):
        if name == "open-webui":
            super()._part(name, *arguments, **env)

    def _start_parts(self):
        self._start_one(self["open-webui"])

    def _open_webui_env(self):
        tasks = ("TITLE", "TAGS", "FOLLOW_UP")
        return super()._open_webui_env() | {f"ENABLE_{task}_GENERATION": "true" for task in tasks}

    def set_valves(self, **more):
        # Parking waits longer than a reload takes.
        valves = {"SERVICE_URL": self.emitter_url, "SERVICE_TOKEN": self.settings["emitter_token"], "PARK_AFTER_S": 15}
        self.web.call("POST", f"/api/v1/functions/id/{PIPE_ID}/valves/update", valves | more, self.admin.token)

    def messages(self, chat):
        """The chat's messages as stored, by id."""
        return self.web.call("GET", f"/api/v1/chats/{chat}", token=self.alice.token)["chat"]["history"]["messages"]

    def files_with(self, value):
        """Files of the data and log folders that hold `value`."""
        needle = value.encode()
        return [str(path) for path in self.folder.rglob("*") if path.is_file() and needle in read(path)]
