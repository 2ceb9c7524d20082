"""
title: OpenClaw
description: Talk to OpenClaw agents; their questions appear here as cards, dialogs and masked inputs.
version: 0.1.0
license: Apache-2.0
required_open_webui_version: 0.12.4
"""

# A transport between Open WebUI and owui-emitter (docs/pipe-protocol.md). It decides nothing, and keeps
# only what is on screen: whatever is lost with this process, the emitter can say again.
# Values of secret prompts are only ever put into the body of POST /v1/reply.

import asyncio
import base64
import contextlib
import json
import logging
import random
import re
import time
import uuid
import weakref
from typing import Literal

import aiohttp
from pydantic import BaseModel, Field

log = logging.getLogger("askbus_pipe")

POLL_S = 0.25  # how often the open tabs are looked at
SETTLE_S = 0.4  # an auto-cancelled card and the tab's "leave" arrive within this
DELIVERED_AFTER_S = 0.4  # a card pending this long was really shown
HUMAN_S = 0.15  # no person presses Cancel faster
CARD_TIMEOUT_MS = 240_000  # the most that Open WebUI grants
CARD_SHOWN_S = 230.0  # shown anew before Open WebUI gives up on it
RENEWED_WITHIN_S = 0.3  # a card that is to follow another waits behind it in the browser by then
MAX_TIMER_MS = 2**31 - 1  # of a browser
LONG_TEXT = 300  # a card shows no paragraphs, so longer questions are also in the chat
ON_SCREEN_FOR_S = 10.0  # what a cancelled call showed was on screen for the message that cancelled it
MAX_ATTACHED = 4 * 2**20  # bytes of all attachments together; owui-emitter takes no more
SILENCE_S = 30.0  # three missed pings
RETRY_S = (0.25, 5.0)
REPORT_FOR_S = 600.0  # how long a report is repeated after its turn is gone
LEFT_WAIT_S = 1.0  # for it to arrive before the call that may follow
TRACE_WAIT_S = 1.0
LINE_LIMIT = 8 * 2**20

CARDS = {"card", "form"}
DIALOGS = {"confirm", "masked", "input", "select"}
ASKS = "OpenClaw asks"
AGAIN = object()  # a call that ended without anybody's decision
DECLINED = {"declined": True}
CANCELLED = object()  # Cancel, or the browser's own cancel on a change of chat

# The browser shows one card or form and one dialog at a time. A second dialog would replace the first,
# whose call never returns; a second card waits unseen.
slots = weakref.WeakValueDictionary()
background = set()
on_screens = {}  # chat -> question on screen -> the timer that takes it off, or None


# ---- Open WebUI's messages to a turn ---------------------------------------------------------


def turn_text(messages):
    """The last user message as (text, attachments)."""
    content = next((m.get("content") for m in reversed(messages) if m.get("role") == "user"), None)
    if content is None or isinstance(content, str):
        return without_image_tags(content or ""), []
    texts, attachments = [], []
    for block in content:
        if block.get("type") == "text":
            texts.append(without_image_tags(block.get("text") or ""))
        elif block.get("type") == "image_url":
            url = (block.get("image_url") or {}).get("url") or ""
            data = re.fullmatch(r"data:([\w.+-]+/[\w.+-]+)(?:;[^,;]*)*;base64,(.*)", url, re.S)
            if data:
                mime = data[1]
                name = f"image-{len(attachments) + 1}.{mime.split('/')[1].split('+')[0]}"
                attachments.append({"name": name, "mime": mime, "data": data[2]})
            elif url:
                texts.append(url)
    return "\n".join(filter(None, texts)), attachments


def typed_text(text, metadata):
    """What was typed, where Open WebUI has put it into a template with pieces of the attached files: these
    go to the agent whole. Whatever else was added to the message or changed in it stays."""
    message = metadata.get("user_message") or {}
    typed, files = message.get("content"), message.get("files") or []
    kinds = {file.get("type") for file in files}
    is_templated = "file" in kinds and kinds <= {"file", "image"} and len(metadata.get("files") or []) <= len(files)
    is_whole = isinstance(typed, str) and typed.strip() and typed in text
    return typed if is_templated and is_whole else text


async def attached_files(metadata, user, used):
    """The message's files that are no images, as (attachments, names of those that can't be passed on);
    `used` bytes of base64 are taken already."""
    attachments, left_out = [], []
    for listed in (metadata.get("user_message") or {}).get("files") or []:
        if listed.get("type") != "file" or not listed.get("id"):
            continue
        name = str(listed.get("name") or listed["id"])[:200]
        try:
            file, content = await file_content(listed["id"], user)
        except Exception as error:  # a file that is gone must not keep the message back
            log.warning("the file %s can't be read: %s", listed["id"], type(error).__name__)
            file, content = None, None
        mime = (file and file.meta or {}).get("content_type") or "application/octet-stream"
        if mime.startswith("image/") and mime != "image/svg+xml":
            continue  # it is in the message itself
        if file is None or used + len(content) * 4 // 3 > MAX_ATTACHED * 4 // 3:
            left_out.append(name)
            continue
        data = base64.b64encode(content).decode()
        used += len(data)
        attachments.append({"name": file.filename[:200], "mime": mime, "data": data})
    return attachments, left_out


async def file_content(id, user):
    """(the file, its first bytes); (None, None) where it is another user's."""
    from open_webui.models.files import Files
    from open_webui.storage.provider import Storage

    def read():
        with open(Storage.get_file(file.path), "rb") as content:
            return content.read(MAX_ATTACHED + 1)

    file = await Files.get_file_by_id_and_user_id(id, user)
    return (file, await asyncio.to_thread(read)) if file else (None, None)


def without_image_tags(text):
    """Open WebUI puts a list of the attached files before the text. Images travel with the turn; the
    names of other files stay, so that the agent knows of them."""
    listed = re.match(r"<attached_files>\n(.*?)\n</attached_files>\s*", text, re.S)
    if not listed:
        return text
    others = [tag for tag in listed[1].splitlines() if ' content_type="image/' not in tag]
    head = f"<attached_files>\n{chr(10).join(others)}\n</attached_files>\n\n" if others else ""
    return head + text[listed.end() :]


def durable_answer(messages):
    """What became of the durable card that ends `messages`, or None where none does."""
    last = messages[-1] if messages else {}
    call = str(last.get("tool_call_id") or "")
    if last.get("role") != "tool" or not call.startswith("oc_"):
        return None
    content = last.get("content")
    if isinstance(content, list):
        content = "".join(block.get("text") or "" for block in content)
    try:
        result = json.loads(content)
        status, given, timed_out = result["status"], result.get("answers") or {}, result.get("timed_out")
    except (TypeError, ValueError, KeyError):
        if str(content).startswith("Error: tool call rejected"):
            return {"call": call, "status": "cancelled"}
        return {"call": call, "status": "refused", "reason": str(content)[:500]}
    if status != "answered":
        return {"call": call, "status": "again" if timed_out else "cancelled"}
    answers = {}
    for key, answer in given.items():
        prompt, _, codes = key.rpartition("~")
        if answer.get("type") == "other":
            answers[prompt] = {"text": answer.get("text") or ""}
            continue
        try:
            code = codes.split(".")[answer["option_index"]]  # as durable_card wrote them
            if code == "type":
                return {"call": call, "status": "again"}
            if code != "skip":
                answers[prompt] = {"index": int(code)}
        except (TypeError, ValueError, KeyError, IndexError):
            return {"call": call, "status": "refused", "reason": f"no such option: {one_line(key, 100)}"}
    if not answers:
        return {"call": call, "status": "declined"}
    return {"call": call, "status": "answered", "answers": answers}


def surfaces(live, saved, stream):
    """What this call can show: `live` a browser is behind it, `saved` the chat is in the database."""
    if not live:
        return ["text"]
    # Without streaming a chunk would be printed as text.
    durable = ["durable"] if saved and stream else []
    return ["card", "form", "confirm", "masked", *durable, "text"]


# ---- A question to what Open WebUI shows -----------------------------------------------------

APPROVING = re.compile(r"\W*(yes|allow|always|approve|accept|confirm|grant|permit|authori[sz]e|trust|proceed)\b", re.I)


def option_order(options):
    """Indexes in the order to show: Open WebUI marks the first as "Recommended", so nothing that
    approves comes first where there is something that does not."""
    order = list(range(len(options)))
    safe = [i for i in order if not APPROVING.match(options[i]["label"])]
    if safe and safe[0] != 0:
        order.remove(safe[0])
        order.insert(0, safe[0])
    return order


def one_line(text, limit=None):
    text = " ".join(str(text).split())
    return text if limit is None or len(text) <= limit else text[: limit - 1] + "…"


def quoted(text):
    """`text` as one line of a quotation, with nothing in it that markdown or HTML would take."""
    return re.sub(r"([\\`*_~<>\[\]|$])", r"\\\1", one_line(text))


def long_texts(ask):
    """What a card can't show well: texts with lines of their own, and long ones."""
    texts = [prompt["text"].strip() for prompt in ask["prompts"]]
    return [text for text in texts if "\n" in text or len(text) > LONG_TEXT]


def left_s(ask):
    """Seconds to the question's deadline, where it says."""
    return max(0.0, ask["deadline_ms"] / 1000 - time.time()) if ask.get("deadline_ms") else None


def waiting_text(ask):
    left = left_s(ask)
    if left is None:
        return "Waiting for your answer"
    minutes, seconds = divmod(round(left), 60)
    return f"Waiting for your answer, {minutes}:{seconds:02} left"


def next_status_s(left):
    """At how many seconds to the deadline the next status line is due: each is kept with the chat."""
    return max((mark for mark in (10, 30, *range(60, int(left) + 1, 60)) if mark < left - 1), default=0)


def card_event(ask):
    questions = []
    for prompt in ask["prompts"]:
        options = prompt.get("options") or []
        questions.append(
            {
                "id": prompt["id"],
                "header": prompt.get("header") or ASKS,
                "question": prompt["text"],
                "options": [
                    {"label": options[i]["label"], "description": options[i].get("description") or ""}
                    for i in option_order(options)
                ],
                "allow_other": prompt.get("allow_other", True) or not options,
            }
        )
    # Open WebUI waits for a shorter time by itself; the browser's timer would cancel a card unasked.
    left = left_s(ask)
    timeout_ms = CARD_TIMEOUT_MS if left is None else max(CARD_TIMEOUT_MS, min(int(left * 1000), MAX_TIMER_MS))
    data = {"questions": questions, "allow_other": True, "timeout_ms": timeout_ms}
    return {"type": "request:user_input", "data": data}


def form_event(ask):
    properties, required, several = {}, [], len(ask["prompts"]) > 1
    for prompt in ask["prompts"]:
        key, options = prompt["id"], prompt.get("options") or []
        field = {"title": prompt.get("header") or (prompt["text"] if several else "Answer")}
        if prompt.get("header") and several:
            field["description"] = prompt["text"]
        choices = [
            {"const": str(i), "title": " – ".join(filter(None, (o["label"], o.get("description"))))}
            for i, o in enumerate(options)
        ]
        needed = prompt.get("required", True)
        if prompt.get("multiple") and options:
            field |= {"type": "array", "items": {"anyOf": choices}}
        elif options:
            field |= {"type": "string", "oneOf": choices}
        else:
            field |= {"type": "string"}
        properties[key] = field
        own_words = bool(options) and prompt.get("allow_other", True)
        if own_words:
            properties[f"{key}~other"] = {"type": "string", "title": "Other", "description": "Your own words"}
        elif needed:
            required.append(key)
            if field["type"] == "array":
                field["minItems"] = 1
    return {
        "type": "request:elicitation",
        "data": {
            "mode": "form",
            "server_name": ASKS,
            "message": "" if several else ask["prompts"][0]["text"],
            "requestedSchema": {"type": "object", "properties": properties, "required": required},
            "timeout_ms": CARD_TIMEOUT_MS,
        },
    }


def dialog_event(ask, prompt):
    """One dialog for one prompt. A secret is masked whatever the surface says."""
    options = prompt.get("options") or []
    # An empty message would be replaced by Open WebUI's "This action cannot be undone".
    data = {"title": prompt.get("header") or ASKS, "message": prompt["text"].strip() or ASKS}
    if prompt.get("secret"):
        data["message"] += "\n\nThe value goes to the agent only; it is not kept in this chat."
        return {"type": "input", "data": data | {"placeholder": "hidden", "value": "", "type": "password"}}
    if ask["surface"] == "confirm":
        return {"type": "confirmation", "data": data}
    if selects(ask, prompt):
        choices = [{"label": options[i]["label"], "value": str(i)} for i in option_order(options)]
        return {"type": "input", "data": data | {"placeholder": "", "value": "", "type": "select", "options": choices}}
    if options:
        data["message"] += "\n\n" + numbered(options)
    return {"type": "input", "data": data | {"placeholder": "Your answer", "value": ""}}


def selects(ask, prompt):
    """Whether a dialog offers the options alone: the select dialog takes no own words."""
    own_words = prompt.get("allow_other", True) and ask["surface"] != "select"
    return bool(prompt.get("options")) and ask["surface"] != "input" and not own_words


def numbered(options):
    lines = []
    for i, option in enumerate(options):
        description = option.get("description")
        lines.append(f"{i + 1}. {one_line(option['label'])}" + (f" – {one_line(description)}" if description else ""))
    return "\n".join(lines)


def durable_card(ask):
    """A durable card as (text to print above it, arguments of `ask_user`), or None where Open WebUI
    could not hold it. It takes one to three questions with two or three options each, so a question
    that has others is mapped; the key says what each option means: an index, `type` or `skip`."""
    if not 1 <= len(ask["prompts"]) <= 3:
        return None
    above, questions = [], []
    skip = {"label": "Skip", "description": "Give no answer"}
    for prompt in ask["prompts"]:
        options = prompt.get("options") or []
        order = option_order(options)[:3]
        shown = [
            {"label": options[i]["label"], "description": options[i].get("description") or options[i]["label"]}
            for i in order
        ]
        codes = [str(i) for i in order]
        if not options:
            shown = [{"label": "Own words", "description": "Write your answer under Other"}, skip]
            codes = ["type", "skip"]
        elif len(options) == 1:
            # Skip goes first where the only choice approves.
            at = 0 if APPROVING.match(options[0]["label"]) else 1
            shown.insert(at, skip)
            codes.insert(at, "skip")
        hint = ""
        if prompt.get("multiple"):
            hint = " (several: write their numbers under Other, separated by commas)"
        elif len(options) > 3:
            hint = " (all choices are listed above: write a number under Other)"
        text = one_line(prompt["text"], 500 - len(hint)) + hint
        long = any(len(o["label"]) > 80 for o in options)
        if (
            len(options) > 3
            or prompt.get("multiple")
            or long
            or one_line(prompt["text"]) not in text
            or "\n" in prompt["text"].strip()
        ):
            above.append("\n\n".join(filter(None, (prompt["text"].strip(), numbered(options)))))
        key = f"{prompt['id']}~{'.'.join(codes)}"
        if len(key) > 64:
            return None
        questions.append(
            {
                "id": key,
                "header": one_line(prompt.get("header") or ASKS, 48),
                "question": text,
                "options": [
                    {"label": one_line(o["label"], 80), "description": one_line(o["description"], 240)} for o in shown
                ],
                "allow_other": prompt.get("allow_other", True) or bool(hint) or not options,
            }
        )
    return "\n\n".join(above), {"questions": questions}


def durable_chunks(arguments, call, model):
    function = {"name": "ask_user", "arguments": json.dumps(arguments)}
    tool_call = {"index": 0, "id": call, "type": "function", "function": function}
    base = {"id": call, "object": "chat.completion.chunk", "created": int(time.time()), "model": model}
    return [
        base | {"choices": [{"index": 0, "delta": {"tool_calls": [tool_call]}, "finish_reason": None}]},
        base | {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]},
    ]


# ---- What Open WebUI returns to a reply ------------------------------------------------------


def card_reply(ask, result):
    if not isinstance(result, dict) or result.get("error"):
        return AGAIN
    if result.get("status") != "answered":
        return CANCELLED
    answers = {}
    for prompt in ask["prompts"]:
        given = (result.get("answers") or {}).get(prompt["id"])
        if not given:
            continue
        if given.get("type") == "option":
            answers[prompt["id"]] = {"index": option_order(prompt["options"])[given["option_index"]]}
        else:
            answers[prompt["id"]] = {"text": given.get("text") or ""}
    return {"answers": answers} if answers else AGAIN


def form_reply(ask, result):
    if not isinstance(result, dict) or result.get("error"):
        return AGAIN
    if result.get("action") == "decline":
        return DECLINED
    if result.get("action") != "accept":
        return CANCELLED
    content, answers = result.get("content") or {}, {}
    for prompt in ask["prompts"]:
        given = content.get(prompt["id"], [] if prompt.get("multiple") else None)
        other = (content.get(f"{prompt['id']}~other") or "").strip()
        if isinstance(given, list):
            answer = ({"indexes": sorted(int(i) for i in given)} if given else {}) | ({"text": other} if other else {})
        elif other:
            answer = {"text": other}
        elif given in (None, ""):
            continue
        else:
            answer = {"index": int(given)} if prompt.get("options") else {"text": given}
        if answer:
            answers[prompt["id"]] = answer
    return {"answers": answers}


def dialog_reply(ask, prompt, result):
    """One prompt's answer."""
    if isinstance(result, dict) or result is None:
        return AGAIN
    if ask["surface"] == "confirm" and not prompt.get("secret"):
        labels = [o["label"] for o in prompt.get("options") or []]
        yes = next((i for i, label in enumerate(labels) if APPROVING.match(label)), 0)
        if result is True:
            return {"index": yes} if labels else {"text": "yes"}
        # Cancel, Escape and a click outside look alike: none of them is an answer.
        return DECLINED
    if result is False:
        return CANCELLED
    if not isinstance(result, str) or not result.strip():
        return AGAIN
    if prompt.get("secret"):
        return {"text": result}
    if selects(ask, prompt):
        return {"index": int(result)}
    return {"text": result.strip()}


def trace(ask, reply):
    """What a reader of the chat sees of a question answered live."""
    lines = []
    for prompt in ask["prompts"]:
        if reply.get("declined"):
            said = "declined"
        elif reply.get("cancelled"):
            said = "cancelled" if reply["cancelled"] == "user" else "cancelled (you went to another chat)"
        else:
            said = answer_text(prompt, reply["answers"].get(prompt["id"]))
        lines.append(f"> **{quoted(prompt['text'])}** — {said}")
    return "\n\n" + "\n>\n".join(lines) + "\n\n"


def answer_text(prompt, answer):
    if answer is None:
        return "no answer"
    if prompt.get("secret"):
        return "answered (hidden)"
    chosen = answer.get("indexes", [answer["index"]] if "index" in answer else [])
    said = [prompt["options"][i]["label"] for i in chosen] + ([answer["text"]] if "text" in answer else [])
    return ", ".join(map(quoted, said))


def pieces(text):
    """`text` in pieces that Open WebUI takes as text: it reads one that begins with `data:` as a raw
    event, through which an agent could drive the page."""
    if text.startswith("data:"):
        yield text[:1]
        text = text[1:]
    if text:
        yield text


# ---- owui-emitter ----------------------------------------------------------------------------


class Away(Exception):
    """The service can't be reached or can't do it now: try again."""


class Refused(Exception):
    """The service says no, with a message for the user."""


class Service:
    """owui-emitter's side of docs/pipe-protocol.md."""

    def __init__(self, url, token):
        self.url = url.rstrip("/")
        # One line may hold much text; aiohttp's own limit is 128 KiB.
        self.http = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {token}"}, read_bufsize=LINE_LIMIT, trust_env=False
        )

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        await self.http.close()

    async def get(self, path, timeout):
        try:
            async with self.http.get(self.url + path, timeout=aiohttp.ClientTimeout(total=timeout)) as response:
                if response.status != 200:
                    raise Away(f"status {response.status}")
                return await response.json(content_type=None)
        except (aiohttp.ClientError, OSError, ValueError, asyncio.TimeoutError) as error:
            raise Away(type(error).__name__) from None

    async def post(self, path, body, arrived=lambda: None):
        """(status, JSON object); raises Away for what is worth repeating. `arrived` is called when the
        service has it, which may be before it has decided."""
        try:
            timeout = aiohttp.ClientTimeout(total=15, sock_connect=5)
            async with self.http.post(self.url + path, json=body, timeout=timeout) as response:
                if response.status >= 500 or response.status in (408, 429):
                    raise Away(f"status {response.status}")
                arrived()
                raw = await response.read()
                status = response.status
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            raise Away(type(error).__name__) from None
        try:
            return status, json.loads(raw or b"{}")
        except ValueError:
            return status, {}

    async def turn(self, body, opened):
        """The lines of one turn; ends by Away, where the stream breaks, or by Refused."""
        try:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=SILENCE_S)
            async with self.http.post(self.url + "/v1/turn", json=body, timeout=timeout) as response:
                if response.status >= 500 or response.status in (408, 429):
                    raise Away(f"status {response.status}")
                if response.status != 200:
                    raise Refused(error_message(response.status, await response.read()))
                opened()
                async for line in response.content:
                    if not line.endswith(b"\n"):
                        break
                    if line.strip():
                        yield json.loads(line)
        except (aiohttp.ClientError, OSError, ValueError, asyncio.TimeoutError) as error:
            raise Away(type(error).__name__) from None
        raise Away("the stream ended early")


def error_message(status, raw):
    try:
        return json.loads(raw)["error"]["message"]
    except (ValueError, TypeError, KeyError):
        return f"askbus answered with status {status}"


def delays():
    delay, most = RETRY_S
    while True:
        yield delay * random.uniform(0.8, 1.2)
        delay = min(delay * 2, most)


async def report(open_service, path, body, arrived):
    """Posts what must be done even though its turn may be gone by then."""
    until = time.monotonic() + REPORT_FOR_S
    async with open_service() as service:
        for delay in delays():
            try:
                await service.post(path, body, arrived)
                return
            except Away as why:
                if time.monotonic() + delay > until:
                    log.warning("gave up on %s of message %s: %s", path, body.get("message"), why)
                    return
            await asyncio.sleep(delay)


# ---- Open WebUI's tabs -----------------------------------------------------------------------


def has_cards():
    """Whether this Open WebUI has question cards and tells which tab shows which chat."""
    try:
        from open_webui.socket.main import SESSION_POOL, get_user_chat_session_id  # noqa: F401
        from open_webui.utils import ask_user  # noqa: F401
    except ImportError:
        log.warning("this Open WebUI is older than 0.12: questions are shown as text")
        return False
    return True


class Tabs:
    """Which of the user's tabs shows the chat. The session that a call starts with goes stale on
    reload, and Open WebUI does not look for the new one by itself."""

    def __init__(self, user, chat, session):
        self.user, self.chat, self.session = user, chat, session
        self.saved = not chat.startswith(("temporary:", "local:"))

    def find(self):
        from open_webui.socket.main import SESSION_POOL, get_user_chat_session_id

        entry = SESSION_POOL.get(self.session)
        alive = bool(entry) and entry.get("id") == self.user
        if alive and (not self.saved or self.chat in (entry.get("chat_ids") or [])):
            return self.session, False
        found = get_user_chat_session_id(self.user, self.chat) if self.saved else None
        if found:
            self.session = found
            return found, False
        return None, alive

    async def look(self):
        """(session that shows the chat or None, whether the tab that did shows another chat now)"""
        from open_webui.socket.main import SESSION_POOL

        if isinstance(SESSION_POOL, dict):
            return self.find()
        return await asyncio.to_thread(self.find)  # several workers: Redis, which blocks


def put_on_screen(chat, question, for_s=None):
    """Where it is only `for_s` more seconds, a call that shows it anew meanwhile keeps it."""
    timer = for_s and asyncio.get_running_loop().call_later(for_s, take_off_screen, chat, question)
    before = on_screens.setdefault(chat, {}).get(question)
    if before:
        before.cancel()
    on_screens[chat][question] = timer


def take_off_screen(chat, question):
    shown = on_screens.get(chat, {})
    timer = shown.pop(question, None)
    if timer:
        timer.cancel()
    if not shown:
        on_screens.pop(chat, None)


def on_screen_now(chat):
    """The questions that were on screen when a message of the chat was typed; None where other
    processes may have shown some. Durable cards and text are in the chat itself and not named."""
    from open_webui.socket.main import SESSION_POOL

    return list(on_screens.get(chat, {})) if isinstance(SESSION_POOL, dict) else None


# ---- One turn --------------------------------------------------------------------------------


class Shown:
    """A question on the screen."""

    def __init__(self, ask):
        self.ask = ask
        self.task = None
        self.delivered = False
        self.sending = None  # since when a reply is on its way
        self.switched = asyncio.Event()
        self.why = None
        self.took_s = 0.0  # the last event call
        self.called = False  # somebody who looks elsewhere was told


class Turn:
    """One call of the pipe. `tabs`, `emit` and `call` are None where no browser is behind it."""

    def __init__(self, body, model, valves, open_service, tabs=None, metadata=None, emit=None, call=None):
        self.body, self.model, self.valves = body, model, valves
        self.open_service, self.tabs, self.metadata = open_service, tabs, metadata
        self.emit_event, self.event_call = emit, call
        self.ids = {key: body[key] for key in ("chat", "message", "user")}
        self.queue = asyncio.Queue()
        self.cursor = None  # of the last line that was dealt with
        self.open = {}  # question -> Shown
        self.settled = set()
        self.traces = []
        self.viewer = None
        self.other_chat = False
        self.was_seen = False  # a tab has shown the chat since this call began
        self.connected = False
        self.presence = None  # as last told
        self.parked = False
        self.printed = set()  # questions whose text is in the chat

    async def run(self):
        async with self.open_service() as service:
            self.service = service
            tasks = [asyncio.create_task(self.read())]
            if self.tabs:
                tasks.append(asyncio.create_task(self.watch_tabs()))
            try:
                while True:
                    line = await self.queue.get()
                    if line.get("type") in ("text", "ask", "end"):
                        await self.replies_land()
                    while self.traces:
                        for piece in pieces(self.traces.pop(0)):
                            yield piece
                    async for piece in self.handle(line):
                        yield piece
                    self.cursor = line.get("cursor") or self.cursor
                    if line.get("type") == "end" or self.parked:
                        await self.last_statuses()
                        return
            except (asyncio.CancelledError, GeneratorExit):
                # Without a browser this is a dropped connection, which is no Stop.
                if self.tabs and not self.parked:
                    left = self.later("/v1/left", self.ids | {"cursor": self.cursor})
                    if self.open:
                        await self.status("Stopped", True)
                    self.close()
                    with contextlib.suppress(asyncio.TimeoutError):
                        await asyncio.wait_for(left.wait(), LEFT_WAIT_S)
                raise
            finally:
                self.close()
                for task in tasks:
                    task.cancel()

    async def last_statuses(self):
        """What an answer said last may stand behind the end of the turn."""
        while not self.parked and not self.queue.empty():
            line = self.queue.get_nowait()
            if line.get("type") == "status":
                await self.status(line["text"], line.get("done", False))

    def close(self):
        for question, shown in self.open.items():
            shown.task.cancel()
            if shown.delivered:
                put_on_screen(self.body["chat"], question, ON_SCREEN_FOR_S)
        self.open.clear()

    async def handle(self, line):
        kind = line.get("type")
        if kind in ("text", "end"):
            for piece in pieces(line.get("text") or ""):
                yield piece
        elif kind == "status":
            await self.status(line["text"], line.get("done", False))
        elif kind == "tool":
            name = line.get("title") or line["name"]
            failed = line["phase"] == "end" and line.get("ok") is False
            await self.status(f"{name}: failed" if failed else name, line["phase"] == "end")
        elif kind == "notice":
            await self.toast(line.get("level", "info"), line["text"])
        elif kind == "ask" and not self.decided(line["question"]):
            if line["surface"] == "durable":
                async for piece in self.park(line):
                    yield piece
            else:
                if line["surface"] == "card" and line["question"] not in self.printed:
                    self.printed.add(line["question"])
                    for text in long_texts(line):
                        for piece in pieces(f"\n\n{text}\n\n"):
                            yield piece
                self.show(line)
        elif kind == "withdraw":
            for piece in pieces(self.withdraw(line["question"], line.get("why"))):
                yield piece

    async def read(self):
        after, retries, away = None, delays(), False

        def opened():
            nonlocal away, retries
            if away:
                self.queue.put_nowait({"type": "status", "text": "askbus is back", "done": True})
            away, retries, self.connected = False, delays(), True

        while True:
            looking = self.presence is None or self.presence["looking"]
            body = self.body | {"after": after, "looking": bool(self.tabs) and looking}
            self.presence = {"looking": True, "other_chat": False, "park": False} if looking else None
            try:
                async for line in self.service.turn(body, opened):
                    after = line.get("cursor") or after
                    self.queue.put_nowait(line)
                    if line.get("type") == "end":
                        return
            except Refused as refused:
                self.queue.put_nowait({"type": "end", "reason": "error", "text": f"\n\n{refused}"})
                return
            except Away as why:
                log.info("message %s: askbus is away: %s", self.body["message"], why)
            except Exception as error:  # a line that breaks the protocol: its text may be private
                log.error("message %s: can't read what askbus sent: %s", self.body["message"], type(error).__name__)
            self.connected = False
            delay = next(retries)
            if delay > RETRY_S[0] * 1.2 and not away:  # the second try failed as well
                away = True
                self.queue.put_nowait(
                    {"type": "status", "text": "askbus can't be reached: trying again", "done": False}
                )
            await asyncio.sleep(delay)

    # -- who is looking

    async def look(self):
        self.viewer, self.other_chat = await self.tabs.look()
        self.was_seen = self.was_seen or self.viewer is not None

    async def watch_tabs(self):
        gone, telling = None, set()
        try:
            while True:
                await self.look()
                now = time.monotonic()
                gone = None if self.viewer else gone or now
                presence = self.presence_after(now - gone if gone else 0.0)
                if self.connected and presence != self.presence and not telling:
                    task = asyncio.create_task(self.tell(presence))
                    telling.add(task)
                    task.add_done_callback(telling.discard)
                await asyncio.sleep(POLL_S)
        finally:
            for task in telling:
                task.cancel()

    def presence_after(self, away_s):
        """What to tell of a chat that no tab has shown for `away_s`; ends what waited too long."""
        looking = away_s < self.valves.PARK_AFTER_S
        held = []
        if not looking and self.other_chat and self.valves.ON_CHAT_SWITCH == "cancel":
            held = [shown for shown in self.open.values() if shown.delivered]
        if away_s >= self.valves.CHAT_SWITCH_AFTER_S:
            for shown in held:
                shown.switched.set()
        return {
            "looking": looking,
            "other_chat": not looking and self.other_chat,
            "park": not looking and not held,
        }

    async def tell(self, presence):
        with contextlib.suppress(Away):
            await self.service.post("/v1/presence", self.ids | presence)
            self.presence = presence

    # -- questions

    def decided(self, question):
        """Whether a decision of the user is known or on its way."""
        return question in self.settled or (question in self.open and self.open[question].sending is not None)

    def show(self, ask):
        question, surface = ask["question"], ask["surface"]
        shown = self.open.get(question)
        if shown and shown.ask["surface"] == surface:
            return
        if not self.tabs or surface not in CARDS | DIALOGS:
            self.reported(ask, "unsupported", f"this front end has no surface {surface}")
            return
        if shown:
            shown.task.cancel()
        shown = self.open[question] = Shown(ask)
        shown.task = asyncio.create_task(self.attend(shown))

    def withdraw(self, question, why):
        """Takes it off the screen; returns what the chat says about it."""
        self.settled.add(question)
        shown = self.open.get(question)
        if shown is None:
            return ""
        if shown.sending:  # the answer to our own reply tells more
            shown.why = why
            return ""
        shown.task.cancel()
        self.gone(shown, "Question closed")
        return f"\n\n> **{quoted(shown.ask['prompts'][0]['text'])}** — {quoted(why)}\n\n" if why else ""

    async def park(self, ask):
        call = f"oc_{ask['question']}.{ask.get('cursor') or self.cursor or ''}"
        card = durable_card(ask)
        if card is None:
            self.reported(ask, "unsupported", "a durable card holds 1 to 3 prompts with short ids")
            return
        self.parked = True
        await self.call_attention(ask)
        await self.status("Waiting for your answer", True)
        above, arguments = card
        if above:
            yield f"\n\n{above}\n\n"
        for chunk in durable_chunks(arguments, call, self.model):
            yield chunk
        self.reported(ask, "delivered")

    async def attend(self, shown):
        """Shows a question until somebody has decided it, and hands the decision in."""
        ask = shown.ask
        question = ask["question"]
        try:
            while True:
                reply = await self.answer(shown)
                shown.sending = time.monotonic()
                result = await self.hand_in(shown, reply)
                shown.sending = None
                if result or question in self.settled:
                    self.gone(shown, result or "Question closed")
                    break
        except asyncio.CancelledError:
            raise
        except Exception as error:  # never with its text: it may hold what was typed
            log.error("question %s can't be shown: %s", question, type(error).__name__)
            self.reported(ask, "refused", type(error).__name__)
            self.gone(shown, "The question can't be shown here")
        else:
            self.settled.add(question)

    async def answer(self, shown):
        """A reply, once there is one."""
        kind = "card" if shown.ask["surface"] in CARDS else "dialog"
        slot = slots.setdefault((self.body["chat"], kind), asyncio.Lock())
        switched = asyncio.ensure_future(shown.switched.wait())
        try:
            if slot.locked():
                self.reported(shown.ask, "waiting", f"another {kind} is open")
            async with slot:
                await self.status(waiting_text(shown.ask), False)
                return await self.decision(shown, switched)
        finally:
            switched.cancel()

    async def decision(self, shown, switched):
        """Shows the question, again and again, until a person or a change of chat has decided it."""
        ask, answers = shown.ask, {}
        pending = list(ask["prompts"])  # those without an answer; a dialog asks one at a time
        while True:
            while self.viewer is None and not switched.done():
                if self.other_chat and not shown.called:
                    shown.called = True
                    await self.call_attention(ask)
                await asyncio.wait({switched}, timeout=POLL_S)
            if switched.done():
                return {"cancelled": "chat_switch"}
            decision = await self.show_once(shown, pending[0])
            if decision is CANCELLED or decision == DECLINED:
                # The browser cancels by itself when it changes to another chat.
                await asyncio.sleep(SETTLE_S)
                await self.look()
                if self.viewer is None or shown.took_s < HUMAN_S:
                    decision = AGAIN
            if decision is AGAIN:
                await asyncio.sleep(POLL_S)
                continue
            self.delivered(shown)
            if decision is CANCELLED:
                return {"cancelled": "user"}
            if decision == DECLINED or "answers" in decision:
                return decision
            answers[pending.pop(0)["id"]] = decision
            if not pending:
                return {"answers": answers}

    async def show_once(self, shown, prompt):
        """A decision, AGAIN or CANCELLED; dialogs give the answer to `prompt` alone."""
        ask = shown.ask
        if ask["surface"] == "card":
            return await self.call(shown, card_event(ask), lambda result: card_reply(ask, result))
        if ask["surface"] == "form":
            return await self.call(shown, form_event(ask), lambda result: form_reply(ask, result))
        return await self.call(shown, dialog_event(ask, prompt), lambda result: dialog_reply(ask, prompt, result))

    async def call(self, shown, event, read):
        """One event call, its result as `read` understands it; AGAIN when the viewer went away, or the
        card must be shown anew."""
        self.metadata["session_id"] = self.viewer
        task = asyncio.ensure_future(self.event_call(event))
        begun, surface, left = time.monotonic(), shown.ask["surface"], left_s(shown.ask)
        status_at = next_status_s(left) if left else 0
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=POLL_S if shown.delivered else DELIVERED_AFTER_S / 4)
                pending_s = time.monotonic() - begun
                if self.viewer is None or (surface == "form" and pending_s > CARD_SHOWN_S):
                    break
                if surface == "card" and pending_s > CARD_SHOWN_S and not task.done():
                    task, begun = await self.renewed(task, event), time.monotonic()
                if not task.done() and pending_s >= DELIVERED_AFTER_S:
                    self.delivered(shown)
                if status_at and left_s(shown.ask) <= status_at:
                    await self.status(waiting_text(shown.ask), False)
                    status_at = next_status_s(status_at)
        finally:
            if not task.done():  # this closes the card or dialog in the browser
                task.cancel()
                await asyncio.wait({task})
        shown.took_s = time.monotonic() - begun
        if task.cancelled():
            return AGAIN
        if task.exception():
            log.error("event call for %s failed: %s", shown.ask["question"], type(task.exception()).__name__)
            return AGAIN
        return read(task.result())

    async def renewed(self, task, event):
        """The card again, behind the one that is shown, which then leaves it the place: nothing flickers."""
        newer = asyncio.ensure_future(self.event_call(event))
        stays = newer
        try:
            await asyncio.wait({task}, timeout=RENEWED_WITHIN_S)
            stays, goes = (task, newer) if task.done() else (newer, task)
            goes.cancel()
            await asyncio.wait({goes})
        except asyncio.CancelledError:
            stays.cancel()  # whoever called knows of the older one only
            raise
        return stays

    async def call_attention(self, ask):
        """Tells a user who looks at another chat. Open WebUI shows only the end of an answer there, with a
        way to the chat; in a tab that shows this chat it would end the answer."""
        await self.look()  # the last one may be old, and a new chat is on screen before its tab says so
        if self.viewer is None and self.other_chat and self.was_seen and self.tabs.saved:
            data = {"done": True, "title": ASKS, "content": one_line(ask["prompts"][0]["text"], 200)}
            await self.emit({"type": "chat:completion", "data": data})

    async def hand_in(self, shown, reply):
        """Repeats `reply` until it is decided upon; returns the status line that closes the question,
        or None where the person must answer again."""
        ask = shown.ask
        body = self.ids | {"reply": uuid.uuid4().hex, "question": ask["question"], "surface": ask["surface"]} | reply
        told = False
        for delay in delays():
            try:
                status, answer = await self.service.post("/v1/reply", body)
                break
            except Away as why:
                log.info("reply to %s waits: %s", ask["question"], why)
                if not told:
                    told = True
                    await self.status("Your answer is kept until askbus can save it", False)
            await asyncio.sleep(delay)
        result = answer.get("result")
        if result == "saved":
            self.traces.append(trace(ask, reply))
            return "Answered" if "answers" in reply else "No answer given"
        if status == 200:
            message = answer.get("message") or (
                "already answered" if result == "already_answered" else "this question is closed"
            )
            await self.toast("warning", message)
            self.traces.append(
                f"\n\n> **{quoted(ask['prompts'][0]['text'])}** — {quoted(shown.why or message)}\n\n"
            )
            return "Question closed"
        await self.toast("error", (answer.get("error") or {}).get("message") or f"askbus answered with status {status}")
        return None if status == 422 else "The answer was refused"

    def gone(self, shown, text):
        """A question left the screen."""
        if self.open.get(shown.ask["question"]) is shown:
            del self.open[shown.ask["question"]]
        take_off_screen(self.body["chat"], shown.ask["question"])
        self.queue.put_nowait({"type": "status", "text": text, "done": True})
        for other in list(self.open.values())[:1]:
            self.queue.put_nowait({"type": "status", "text": waiting_text(other.ask), "done": False})

    async def replies_land(self):
        """Gives replies on their way a moment, so that the trace stands before what follows from it."""
        for shown in list(self.open.values()):
            if shown.sending:
                await asyncio.wait({shown.task}, timeout=max(0, shown.sending + TRACE_WAIT_S - time.monotonic()))

    def delivered(self, shown):
        if not shown.delivered:
            shown.delivered = True
            put_on_screen(self.body["chat"], shown.ask["question"])
            self.reported(shown.ask, "delivered")

    def reported(self, ask, event, reason=None):
        body = self.ids | {"question": ask["question"], "surface": ask["surface"], "event": event}
        self.later("/v1/shown", body | ({"reason": reason} if reason else {}))

    def later(self, path, body):
        """Posts in the background; the event is set when it has arrived."""
        arrived = asyncio.Event()
        task = asyncio.create_task(report(self.open_service, path, body, arrived.set))
        background.add(task)
        task.add_done_callback(background.discard)
        return arrived

    # -- the user's screen

    async def status(self, text, done):
        await self.emit({"type": "status", "data": {"description": text, "done": done}})

    async def toast(self, level, text):
        await self.emit({"type": "notification", "data": {"type": level, "content": text}})

    async def emit(self, event):
        if self.emit_event and self.tabs:
            await self.emit_event(event)


class Pipe:
    class Valves(BaseModel):
        SERVICE_URL: str = Field(default="http://127.0.0.1:7802", description="Address of owui-emitter.")
        SERVICE_TOKEN: str = Field(
            default="",
            description="Its emitter.http.token.",
            json_schema_extra={"input": {"type": "password"}},
        )
        AGENT: str = Field(default="main", description="Agent behind the model OpenClaw: its id, or gateway/id.")
        PARK_AFTER_S: float = Field(
            default=3.0,
            ge=0,
            description="Seconds without a tab on the chat until an open question becomes a durable card.",
        )
        ON_CHAT_SWITCH: Literal["cancel", "park"] = Field(
            default="cancel", description="What becomes of a question whose user goes to another chat and stays there."
        )
        CHAT_SWITCH_AFTER_S: float = Field(
            default=30.0,
            ge=0,
            description="Seconds the user has to come back before ON_CHAT_SWITCH cancel takes effect.",
        )

    def __init__(self):
        self.valves = self.Valves()
        self.agents = []

    def service(self):
        return Service(self.valves.SERVICE_URL, self.valves.SERVICE_TOKEN)

    async def pipes(self):
        """The default agent under an id that never changes, and the gateways' other agents."""
        try:
            async with self.service() as service:
                self.agents = (await service.get("/v1/models", timeout=2))["models"]
        except (Away, KeyError, TypeError) as why:
            log.info("the list of agents can't be read: %s", why)
        default = next((a for a in self.agents if self.valves.AGENT in (a["id"], a["id"].split("/", 1)[-1])), None)
        others = [{"id": a["id"], "name": f"OpenClaw {a['name']}"} for a in self.agents if a is not default]
        return [{"id": "default", "name": "OpenClaw"}, *others]

    async def pipe(
        self,
        body,
        __user__=None,
        __metadata__=None,
        __event_emitter__=None,
        __event_call__=None,
        __task__=None,
        __chat_id__=None,
        __session_id__=None,
        __message_id__=None,
    ):
        if __task__:  # titles, tags, follow-ups: not for the agent
            return
        chat = (__chat_id__ or None) if __session_id__ else None
        # Channels and automations have a session of their own kind, with no browser behind it.
        live = bool(chat) and not __session_id__.startswith(("channel:", "automation:")) and has_cards()
        tabs = Tabs(__user__["id"], chat, __session_id__) if live else None
        model = body.get("model") or ""
        agent = model.split(".", 1)[-1]
        gateway, _, agent = (self.valves.AGENT if agent in ("default", model) else agent).rpartition("/")
        answer = durable_answer(body["messages"]) if chat else None
        metadata = __metadata__ or {}
        message, text, attachments, left_out = __message_id__ or uuid.uuid4().hex, None, [], []
        continues = not answer and bool(metadata.get("assistant_message_id"))
        if continues:
            # "Continue Response" calls with the id of the message that it continues.
            message, text = uuid.uuid4().hex, "Continue."
        elif not answer:
            text, attachments = turn_text(body["messages"])
            if chat:
                used = sum(len(image["data"]) for image in attachments)
                files, left_out = await attached_files(metadata, __user__["id"], used)
                attachments += files
            if not left_out:
                text = typed_text(text, metadata)
        request = {
            "chat": chat,
            "message": message,
            "agent": agent,
            "gateway": gateway or None,
            "user": {"id": __user__["id"], "name": __user__.get("name") or ""},
            "text": text,
            "continues": continues,
            "attachments": attachments,
            "front": "openwebui",
            "surfaces": surfaces(live, bool(tabs and tabs.saved), bool(body.get("stream"))),
            "answer": answer,
        }
        if live:
            request["on_screen"] = on_screen_now(chat)
        if left_out:
            limit = f"{MAX_ATTACHED >> 20} MB together"
            yield f"> Not passed on to the agent (not readable, or more than {limit}): {quoted(', '.join(left_out))}\n\n"
        turn = Turn(request, model, self.valves, self.service, tabs, __metadata__, __event_emitter__, __event_call__)
        async with contextlib.aclosing(turn.run()) as lines:
            async for piece in lines:
                yield piece
