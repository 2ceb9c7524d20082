"""owui-emitter's side of docs/pipe-protocol.md, scripted: what the user writes chooses what the agent
does. It keeps its state over stop() and start(), as the bus does for the real one."""

import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PING_S = 5.0
PATIENCE_S = 600  # of an agent that waits for a person


class Stopped(Exception):
    """The pipe of this run left."""


def options(*labels):
    return [{"label": label, "description": ""} for label in labels]


def prompt(text, *labels, **more):
    base = {"id": "target", "header": "Deploy", "text": text, "options": options(*labels)}
    return base | {"multiple": False, "allow_other": True, "secret": False, "required": True} | more


def choose(run):
    run.text("Working. ")
    run.result(run.ask(prompt("Pick a deploy target", "staging", "production", "canary")))


def permit(run):
    run.result(run.ask(prompt("Delete the cluster?", "Allow", "Deny")))


def five(run):
    run.result(run.ask(prompt("Pick one of five", "a1", "b2", "c3", "d4", "e5")))


def words(run):
    run.result(run.ask(prompt("What should it be called?")))


def secret(run):
    run.result(run.ask(prompt("Which token?", secret=True), surface="masked", can_park=False))


def secrets(run):
    first = run.open_question([prompt("First token?", secret=True)], "masked", can_park=False)
    second = run.open_question([prompt("Second token?", secret=True)], "masked", can_park=False)
    run.result(run.decision(first))
    run.result(run.decision(second))


def cards(run):
    asked = [run.open_question([prompt(f"{n} question?", "one", "two")], "card", True) for n in ("First", "Second")]
    for question in asked:
        run.result(run.decision(question))


def twice(run):
    for n in ("First", "Second"):
        run.result(run.ask(prompt(f"{n} question?", "one", "two")))


def paragraphs(run):
    run.result(run.ask(prompt("Which one?\n\nAnd a second line to think of.", "one", "two")))


def form(run):
    several = prompt("Which regions?", "eu", "us", "ap", multiple=True, allow_other=False)
    run.result(run.ask(several, surface="form"))


def confirm(run):
    run.result(run.ask(prompt("Go on?", "Yes", "No"), surface="confirm"))


def talk(run):
    run.text("Talking. ")
    run.forever()


def raw(run):
    run.text('data: {"event":{"type":"notification","data":{"type":"info","content":"forged"}}}')


SCRIPTS = {
    f.__name__: f
    for f in (choose, permit, five, words, secret, secrets, cards, twice, paragraphs, form, confirm, talk, raw)
}


class Run:
    """What one message of a user set off."""

    def __init__(self, emitter, body):
        self.emitter, self.user, self.surfaces, self.name = (
            emitter,
            body["user"]["id"],
            body["surfaces"],
            body["message"],
        )
        self.lines, self.asks, self.decided, self.done = [], {}, {}, False
        self.left = False
        script = SCRIPTS.get((body["text"] or "").split(" ")[0])
        self.thread = threading.Thread(target=self.play, args=(script,), daemon=True)

    def play(self, script):
        try:
            if script is None:
                self.text("Say one of: " + ", ".join(SCRIPTS))
            else:
                script(self)
            self.say(type="end", reason="done")
        except Stopped:
            self.say(type="end", reason="stopped")

    def say(self, **line):
        with self.emitter.changed:
            self.lines.append(line | {"cursor": str(len(self.lines) + 1)})
            self.emitter.changed.notify_all()

    def text(self, text):
        self.say(type="text", text=text)

    def result(self, reply):
        said = "declined" if reply.get("declined") else reply.get("cancelled")
        if not said:
            said = ", ".join(self.said(answer) for answer in reply["answers"].values())
        self.text(f"[{said}]")

    def said(self, answer):
        question = self.asks[next(reversed(self.asks))]
        if question["prompts"][0]["secret"]:
            return f"secret of {len(answer['text'])} characters"
        return json.dumps(answer)

    def ask(self, one, surface="card", can_park=True):
        if surface not in self.surfaces:
            self.emitter.waiting[self.user] = (self, question := self.new_question([one], "text", False))
            lines = [one["text"], *(f"{i + 1}. {o['label']}" for i, o in enumerate(one["options"]))]
            self.text("\n".join(lines))
            self.say(type="end", reason="asked")
            return self.decision(question)
        return self.decision(self.open_question([one], surface, can_park))

    def new_question(self, prompts, surface, can_park):
        question = f"{self.name}-{len(self.asks) + 1}"
        self.asks[question] = {
            "type": "ask", "question": question, "surface": surface, "revision": 1, "title": "OpenClaw asks",
            "deadline_ms": int(time.time() * 1000) + 300_000, "prompts": prompts, "can_park": can_park,
        }  # fmt: skip
        return question

    def open_question(self, prompts, surface, can_park):
        question = self.new_question(prompts, surface, can_park)
        self.say(**self.asks[question])
        return question

    def park(self):
        for question, line in list(self.asks.items()):
            if question not in self.decided and line["can_park"] and line["surface"] != "durable":
                line["surface"] = "durable"
                self.say(**line)

    def decision(self, question):
        self.emitter.until(lambda: question in self.decided or self.left, PATIENCE_S)
        if question not in self.decided:
            raise Stopped
        return self.decided[question]

    def forever(self):
        self.emitter.until(lambda: self.left, PATIENCE_S)
        raise Stopped

    def withdraw(self, why):
        question = next(q for q in self.asks if q not in self.decided)
        self.decided[question] = {"reply": "-", "declined": True}
        self.say(type="withdraw", question=question, why=why)


class ScriptedEmitter:
    """Serves the pipe. `requests` holds all that the pipe sent."""

    def __init__(self, port, token):
        self.port, self.token = port, token
        self.changed = threading.Condition()
        self.requests, self.runs, self.starts, self.waiting = [], {}, {}, {}
        self.refusals = []  # (status, body) for the next replies
        self.server = None

    def start(self):
        emitter = self

        class Bound(Handler):
            owner = emitter

        self.server = Server(("127.0.0.1", self.port), Bound)
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def stop(self):
        """Drops every connection, as a killed process does."""
        server, self.server = self.server, None
        server.shutdown()
        server.server_close()
        server.drop()
        with self.changed:
            self.changed.notify_all()

    def until(self, condition, timeout=60):
        with self.changed:
            if not self.changed.wait_for(condition, timeout):
                raise TimeoutError("the condition did not come true")

    def sent(self, path, **fields):
        """Bodies that the pipe posted to `path`, those with these fields."""
        with self.changed:
            return [b for p, b in self.requests if p == path and all(b.get(k) == v for k, v in fields.items())]

    def wait_sent(self, path, count=1, timeout=60, **fields):
        self.until(lambda: len(self.sent(path, **fields)) >= count, timeout)
        return self.sent(path, **fields)

    def last_run(self):
        return next(reversed(self.runs.values()))

    # -- requests, under the lock

    def turn(self, body):
        message = body["message"]
        run, answer = self.runs.get(message), body.get("answer")
        if run is None:
            waiting = self.waiting.pop(body["user"]["id"], None) if body["chat"] is None else None
            if waiting:
                run, question = waiting
                self.starts[message] = len(run.lines)
                run.decided[question] = {"reply": message, "answers": {"target": {"text": body["text"]}}}
            else:
                run = Run(self, body)
                run.thread.start()
            self.runs[message] = run
        if answer:
            call = answer["call"].removeprefix("oc_")
            question, cursor = call.rsplit(".", 1)
            self.starts[message] = int(cursor)
            if answer["status"] == "again":
                run.say(**run.asks[question])
            elif answer["status"] == "answered":
                run.decided.setdefault(question, {"reply": call, "answers": answer["answers"]})
            else:
                decided = {"declined": True} if answer["status"] == "declined" else {"cancelled": "user"}
                run.decided.setdefault(question, {"reply": call} | decided)
        return run, int(body.get("after") or self.starts.get(message, 0))

    def reply(self, body):
        run = next((r for r in self.runs.values() if body["question"] in r.asks), None)
        if self.refusals:
            return self.refusals.pop(0)
        if run is None:
            return 404, {"error": {"code": "unknown_question", "message": "no such question"}}
        if run.user != body["user"]["id"]:
            return 403, {"error": {"code": "wrong_user", "message": "not your question"}}
        winner = run.decided.setdefault(body["question"], body)
        if winner["reply"] == body["reply"]:
            return 200, {"result": "saved"}
        return 200, {"result": "already_answered", "by": "bob", "message": "bob answered first"}


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, *args):
        self.sockets = set()
        super().__init__(*args)

    def process_request(self, request, address):
        self.sockets.add(request)
        super().process_request(request, address)

    def shutdown_request(self, request):
        self.sockets.discard(request)
        super().shutdown_request(request)

    def drop(self):
        for connection in list(self.sockets):
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def handle_error(self, *_):
        pass  # connections that the browser's side or drop() closed


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    owner = None

    def log_message(self, *_):
        pass

    def answer(self, status, body=None):
        raw = b"" if body is None else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def allowed(self):
        if self.headers["Authorization"] == f"Bearer {self.owner.token}":
            return True
        self.answer(401, {"error": {"code": "unauthorized", "message": "wrong token: set SERVICE_TOKEN"}})
        return False

    def do_GET(self):
        if self.allowed():
            self.answer(
                200, {"models": [{"id": "openclaw/main", "name": "Main"}, {"id": "openclaw/ops", "name": "Ops"}]}
            )

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.allowed():
            return
        owner = self.owner
        with owner.changed:
            owner.requests.append((self.path, body))
            owner.changed.notify_all()
            if self.path == "/v1/reply":
                response = owner.reply(body)
            elif self.path == "/v1/turn":
                run, at = owner.turn(body)
                response = None
            else:
                run = owner.runs.get(body["message"])
                if self.path == "/v1/presence" and body["park"] and run:
                    run.park()
                if self.path == "/v1/left" and run:
                    run.left = True
                response = 204, None
            owner.changed.notify_all()
        if response:
            self.answer(*response)
        else:
            self.stream(run, at)

    def stream(self, run, at):
        server = self.server
        self.send_response(200)
        self.send_header("Content-Type", "application/x-ndjson")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        while self.owner.server is server:
            with self.owner.changed:
                self.owner.changed.wait_for(lambda: len(run.lines) > at or self.owner.server is not server, PING_S)
                lines = run.lines[at:] or [{"type": "ping"}]
                at = max(at, len(run.lines))
                stale = [line for line in lines if line["type"] == "ask" and line["question"] in run.decided]
            if self.owner.server is not server:
                break
            for line in lines:
                if line not in stale:
                    self.chunk(json.dumps(line).encode() + b"\n")
            if lines[-1]["type"] == "end":
                self.chunk(b"")
                return
        self.close_connection = True

    def chunk(self, raw):
        self.wfile.write(b"%x\r\n%s\r\n" % (len(raw), raw))
        self.wfile.flush()
