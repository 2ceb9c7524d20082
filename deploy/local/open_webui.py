"""Open WebUI's REST API, as far as setting it up and testing it needs."""

import json
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

# Requests stay on this machine whatever proxy the environment names.
open_local = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


class ApiError(Exception):
    """A request was refused; the message has method, path, status and what the server said."""

    def __init__(self, method: str, path: str, status: int, text: str):
        super().__init__(f"{method} {path}: {status}: {text[:500]}")
        self.status = status


@dataclass
class User:
    """A person with an account; `token` and `api_key` are filled in by `OpenWebUI.set_up`."""

    name: str
    email: str
    password: str
    id: str = ""
    token: str = field(default="", repr=False)
    api_key: str = field(default="", repr=False)


class OpenWebUI:
    """A running Open WebUI at `url`."""

    def __init__(self, url: str):
        self.url = url

    def call(self, method: str, path: str, body=None, token: str = "", timeout: float = 60):
        """Sends one request and returns the decoded JSON answer."""
        request = urllib.request.Request(
            self.url + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {}),
        )
        try:
            with open_local(request, timeout=timeout) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            raise ApiError(method, path, error.code, error.read().decode(errors="replace")) from None

    def set_up(self, admin: User, others: list[User]) -> None:
        """Creates the accounts that are missing and signs everybody in. The first account is the admin's."""
        try:
            self.call("POST", "/api/v1/auths/signup", _account(admin))
        except ApiError as error:
            if error.status not in (400, 403):  # it exists already
                raise
        self._sign_in(admin)
        for user in others:
            try:
                self.call("POST", "/api/v1/auths/add", _account(user) | {"role": "user"}, admin.token)
            except ApiError as error:
                if error.status != 400:
                    raise
            self._sign_in(user)
        admin.api_key = self.call("POST", "/api/v1/auths/api_key", {}, admin.token)["api_key"]

    def _sign_in(self, user: User) -> None:
        credentials = {"email": user.email, "password": user.password}
        try:
            session = self.call("POST", "/api/v1/auths/signin", credentials)
        except ApiError as error:
            raise ApiError("POST", f"/api/v1/auths/signin as {user.email}", error.status, str(error)) from None
        user.id, user.token = session["id"], session["token"]

    def install_pipe(self, id: str, name: str, source: Path, valves: dict, admin: User) -> None:
        """Creates or updates the function `id` from `source`, switches it on and sets its valves."""
        path = f"/api/v1/functions/id/{id}"
        function = {
            "id": id,
            "name": name,
            "content": source.read_text(),
            "meta": {"description": f"{name} through askbus", "manifest": {}},
        }
        if id in [known["id"] for known in self.call("GET", "/api/v1/functions/", token=admin.token)]:
            self.call("POST", f"{path}/update", function, admin.token)
        else:
            self.call("POST", "/api/v1/functions/create", function, admin.token)
        if not self.call("GET", path, token=admin.token)["is_active"]:
            self.call("POST", f"{path}/toggle", {}, admin.token)
        self.call("POST", f"{path}/valves/update", valves, admin.token)

    def models(self, user: User) -> list[str]:
        """The ids of the models that `user` may choose."""
        return [model["id"] for model in self.call("GET", "/api/models", token=user.token)["data"]]

    def share_model(self, id: str, name: str, admin: User) -> None:
        """Lets every user choose the model; a pipe's models are the admins' alone until then."""
        if any(known["id"] == id for known in self._model_entries(admin)):
            return
        everybody = [{"principal_type": "user", "principal_id": "*", "permission": "read"}]
        entry = {"id": id, "name": name, "base_model_id": None, "meta": {}, "params": {}, "access_grants": everybody}
        self.call("POST", "/api/v1/models/create", entry, admin.token)

    def _model_entries(self, admin: User) -> list[dict]:
        return self.call("GET", "/api/v1/models/base", token=admin.token)


def _account(user: User) -> dict:
    return {"name": user.name, "email": user.email, "password": user.password}
