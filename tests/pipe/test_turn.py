"""One call of the pipe against a scripted service and a scripted browser."""

import asyncio
import contextlib
import json
import logging
import sys
import time
import types
import unittest
from unittest import mock

from pipe_module import pipe

BODY = {
    "chat": "c1",
    "message": "m1",
    "user": {"id": "u1", "name": "Ada"},
    "text": "go",
    "surfaces": ["card", "masked", "durable", "text"],
}


def ask(question="q1", surface="card", cursor="2", **prompt):
    one = {"id": "target", "header": "", "text": "Where to?", "options": [{"label": "a"}, {"label": "b"}]} | prompt
    return {
        "type": "ask",
        "question": question,
        "surface": surface,
        "cursor": cursor,
        "prompts": [one],
        "can_park": True,
    }


def chose(index):
    return {"status": "answered", "answers": {"target": {"type": "option", "option_index": index, "label": "?"}}}


CANCELLED = {"status": "cancelled", "answers": {}}


class Service:
    """Streams what the test says; notes what the pipe posts."""

    def __init__(self):
        self.script = asyncio.Queue()
        self.turns, self.posts, self.responses = [], [], {}

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        pass

    def says(self, *lines):
        for line in lines:
            self.script.put_nowait(line)

    async def turn(self, body, opened):
        self.turns.append(body)
        first = await self.script.get()
        if isinstance(first, Exception):
            raise first
        opened()
        self.script._queue.appendleft(first)
        while True:
            line = await self.script.get()
            if isinstance(line, Exception):
                raise line
            yield line

    async def post(self, path, body, arrived=lambda: None):
        self.posts.append((path, body))
        waiting = self.responses.get(path)
        response = waiting.pop(0) if waiting else ((200, {"result": "saved"}) if path == "/v1/reply" else (204, {}))
        if isinstance(response, Exception):
            raise response
        arrived()
        return response

    def posted(self, path):
        return [body for p, body in self.posts if p == path]


class Browser:
    """The tabs of the user, and the event calls that are pending in them."""

    saved = True

    def __init__(self):
        self.session, self.other_chat = "tab1", False
        self.calls, self.pending, self.events = [], {}, []
        self.looks = 0
        self.there = []  # how many were on the screen when each came
        self.metadata = {"session_id": "stale"}

    async def look(self):
        self.looks += 1
        return self.session, self.session is None and self.other_chat

    async def call(self, event):
        key = len(self.calls)
        self.there.append(len(self.pending))
        self.calls.append((self.metadata["session_id"], event))
        self.pending[key] = asyncio.get_running_loop().create_future()
        try:
            return await self.pending[key]
        finally:
            del self.pending[key]

    def does(self, result):
        next(iter(self.pending.values())).set_result(result)

    async def emit(self, event):
        self.events.append(event)

    def said(self, kind):
        return [e["data"].get("description") or e["data"].get("content") for e in self.events if e["type"] == kind]


class TurnCase(unittest.IsolatedAsyncioTestCase):
    def setUp(self):
        # Each test has an event loop of its own.
        pipe.slots.clear()
        pipe.on_screens.clear()
        self.with_times(
            POLL_S=0.01, SETTLE_S=0.02, DELIVERED_AFTER_S=0.02, HUMAN_S=0.0, RETRY_S=(0.005, 0.02)
        )
        logging.getLogger("askbus_pipe").setLevel(logging.CRITICAL)

    def with_times(self, **times):
        for name, time_s in times.items():
            self.addCleanup(setattr, pipe, name, getattr(pipe, name))
            setattr(pipe, name, time_s)

    def start(self, live=True, **valves):
        self.service, self.browser, self.out = Service(), Browser(), []
        settings = {"PARK_AFTER_S": 0.05, "ON_CHAT_SWITCH": "cancel", "CHAT_SWITCH_AFTER_S": 0.05} | valves
        browser = self.browser
        turn = pipe.Turn(
            BODY,
            "askbus.default",
            types.SimpleNamespace(**settings),
            lambda: self.service,
            browser if live else None,
            browser.metadata,
            browser.emit,
            browser.call,
        )

        async def collect():
            async with contextlib.aclosing(turn.run()) as stream:
                async for piece in stream:
                    self.out.append(piece)

        self.task = asyncio.create_task(collect())
        self.addCleanup(self.task.cancel)
        return self.service, self.browser

    @property
    def text(self):
        return "".join(piece for piece in self.out if isinstance(piece, str))

    async def until(self, condition):
        async with asyncio.timeout(5):
            while not condition():
                await asyncio.sleep(0.002)

    async def ends(self):
        self.service.says({"type": "end", "reason": "done"})
        await asyncio.wait_for(self.task, 5)


class Question(TurnCase):
    async def test_a_click_is_handed_in_and_leaves_a_trace_before_what_follows(self):
        service, browser = self.start()
        service.says({"type": "text", "text": "Hm. ", "cursor": "1"}, ask())
        await self.until(lambda: service.posted("/v1/shown"))
        self.assertEqual(service.posted("/v1/shown")[0]["event"], "delivered")
        browser.does(chose(1))
        await self.until(lambda: service.posted("/v1/reply"))
        service.says({"type": "text", "text": "Going to b."})
        await self.ends()
        reply = service.posted("/v1/reply")[0]
        self.assertEqual(
            (reply["question"], reply["surface"], reply["answers"]), ("q1", "card", {"target": {"index": 1}})
        )
        self.assertEqual(self.text, "Hm. \n\n> **Where to?** — b\n\nGoing to b.")
        self.assertEqual(browser.said("status"), ["Waiting for your answer", "Answered"])

    async def test_the_call_goes_to_the_tab_that_shows_the_chat_now(self):
        service, browser = self.start()
        browser.session = None
        service.says(ask())
        await self.until(lambda: browser.said("status"))
        self.assertEqual(browser.calls, [])
        browser.session = "tab2"
        await self.until(lambda: browser.pending)
        self.assertEqual(browser.calls[0][0], "tab2")
        await self.ends()

    async def test_a_card_that_timed_out_is_shown_again(self):
        service, browser = self.start()
        service.says(ask())
        await self.until(lambda: browser.pending)
        browser.does({"error": "Event call timed out. The browser tab may be inactive or closed."})
        await self.until(lambda: len(browser.calls) == 2)
        await self.until(lambda: browser.pending)
        browser.does(chose(0))
        await self.until(lambda: "— a" in self.text)
        await self.ends()
        self.assertEqual(len(service.posted("/v1/reply")), 1)

    async def test_a_card_is_renewed_behind_the_one_that_is_shown(self):
        self.with_times(CARD_SHOWN_S=0.05, RENEWED_WITHIN_S=0.02)
        service, browser = self.start()
        service.says(ask())
        await self.until(lambda: len(browser.calls) >= 3)
        await self.ends()
        self.assertEqual(service.posted("/v1/reply"), [])
        self.assertTrue(all(there > 0 for there in browser.there[1:]), "it was never off the screen")

    async def test_an_answer_while_its_card_is_renewed_is_taken(self):
        self.with_times(CARD_SHOWN_S=0.05, RENEWED_WITHIN_S=5.0)
        service, browser = self.start()
        service.says(ask())
        await self.until(lambda: len(browser.calls) == 2)
        browser.does(chose(1))
        await self.until(lambda: service.posted("/v1/reply"))
        await self.ends()
        self.assertEqual(service.posted("/v1/reply")[0]["answers"], {"target": {"index": 1}})
        self.assertEqual(len(browser.calls), 2)

    async def test_a_card_that_is_renewed_while_it_is_withdrawn_leaves_none_behind(self):
        self.with_times(CARD_SHOWN_S=0.05, RENEWED_WITHIN_S=5.0)
        service, browser = self.start()
        service.says(ask())
        await self.until(lambda: len(browser.pending) == 2)
        service.says({"type": "withdraw", "question": "q1", "why": "stopped"})
        await self.until(lambda: not browser.pending)
        await self.ends()

    async def test_of_a_card_and_a_form_one_waits_for_the_other(self):
        service, browser = self.start()
        service.says(ask("q1"), ask("q2", "form", multiple=True))
        await self.until(lambda: len(service.posted("/v1/shown")) == 2)
        events = {body["question"]: body["event"] for body in service.posted("/v1/shown")}
        self.assertEqual(events, {"q1": "delivered", "q2": "waiting"})
        await self.ends()

    async def test_of_two_cards_one_waits_for_the_other_and_says_so(self):
        service, browser = self.start()
        service.says(ask("q1"), ask("q2", text="And then?"))
        await self.until(lambda: len(service.posted("/v1/shown")) == 2)
        events = {body["question"]: body["event"] for body in service.posted("/v1/shown")}
        self.assertEqual(events, {"q1": "delivered", "q2": "waiting"})
        browser.does(chose(0))
        await self.until(lambda: len(browser.calls) == 2)
        browser.does(chose(1))
        await self.until(lambda: len(service.posted("/v1/reply")) == 2)
        await self.ends()

    async def test_what_is_on_screen_is_known_to_the_next_call_of_the_chat(self):
        main = types.SimpleNamespace(SESSION_POOL={})
        names = ("open_webui", "open_webui.socket", "open_webui.socket.main")
        with mock.patch.dict(sys.modules, {name: main for name in names}):
            service, browser = self.start()
            service.says(ask())
            await self.until(lambda: service.posted("/v1/shown"))
            self.assertEqual(pipe.on_screen_now("c1"), ["q1"])
            self.task.cancel()  # "Send now"
            with contextlib.suppress(asyncio.CancelledError):
                await self.task
            self.assertEqual(pipe.on_screen_now("c1"), ["q1"])
            service, browser = self.start()
            service.says(ask())
            await self.until(lambda: service.posted("/v1/shown"))
            browser.does(chose(0))
            await self.until(lambda: "— a" in self.text)
            await self.ends()
            self.assertEqual(pipe.on_screen_now("c1"), [])
            main.SESSION_POOL = types.SimpleNamespace()  # of several processes
            self.assertIsNone(pipe.on_screen_now("c1"))

    async def test_a_question_with_paragraphs_is_also_in_the_chat_once(self):
        service, browser = self.start()
        service.says(ask(text="Where to?\n\nThink well."), {"type": "text", "text": "."}, ask(text="x"))
        await self.until(lambda: browser.pending)
        await self.ends()
        self.assertEqual(self.text.count("Where to?\n\nThink well."), 1)

    async def test_the_time_that_is_left_is_told_now_and_then(self):
        self.assertEqual([pipe.next_status_s(left) for left in (252, 61.5, 60, 45, 20, 9)], [240, 60, 30, 30, 10, 0])
        line = ask() | {"deadline_ms": (time.time() + 252) * 1000}
        service, browser = self.start()
        service.says(line)
        await self.until(lambda: browser.pending)
        await self.ends()
        self.assertIn("Waiting for your answer, 4:12 left", browser.said("status"))
        self.assertGreater(browser.calls[0][1]["data"]["timeout_ms"], 245_000)

    async def test_withdraw_closes_the_card_and_says_why(self):
        service, browser = self.start()
        service.says(ask())
        await self.until(lambda: browser.pending)
        service.says({"type": "withdraw", "question": "q1", "why": "answered in the Control UI: b"})
        await self.until(lambda: not browser.pending)
        service.says(ask())  # a late repetition
        await self.ends()
        self.assertEqual(len(browser.calls), 1)
        self.assertIn("> **Where to?** — answered in the Control UI: b", self.text)

    async def test_another_surface_replaces_the_one_shown(self):
        service, browser = self.start()
        service.says(ask(), ask())
        await self.until(lambda: browser.pending)
        service.says(ask(surface="select"))
        await self.until(lambda: browser.calls[-1][1]["type"] == "input")
        self.assertEqual(len(browser.pending), 1)
        await self.ends()

    async def test_a_surface_unknown_here_is_reported(self):
        service, _ = self.start()
        service.says(ask(surface="hologram"))
        await self.until(lambda: service.posted("/v1/shown"))
        self.assertEqual(service.posted("/v1/shown")[0]["event"], "unsupported")
        await self.ends()

    async def test_a_reply_is_repeated_with_its_id_until_it_is_saved(self):
        service, browser = self.start()
        service.responses["/v1/reply"] = [pipe.Away("x"), pipe.Away("x"), (200, {"result": "saved"})]
        service.says(ask())
        await self.until(lambda: browser.pending)
        browser.does(chose(0))
        await self.until(lambda: "— a" in self.text)
        self.assertEqual(len({body["reply"] for body in service.posted("/v1/reply")}), 1)
        self.assertEqual(len(service.posted("/v1/reply")), 3)
        self.assertIn("Your answer is kept until askbus can save it", browser.said("status"))
        await self.ends()

    async def test_text_goes_on_while_a_reply_can_not_be_saved(self):
        self.addCleanup(setattr, pipe, "TRACE_WAIT_S", pipe.TRACE_WAIT_S)
        pipe.TRACE_WAIT_S = 0.05
        service, browser = self.start()
        service.responses["/v1/reply"] = [pipe.Away("no router")] * 10_000
        service.says(ask())
        await self.until(lambda: browser.pending)
        browser.does(chose(0))
        await self.until(lambda: service.posted("/v1/reply"))
        service.says(*[{"type": "text", "text": "."}] * 500)
        await self.until(lambda: len(self.text) == 500)
        service.responses["/v1/reply"].clear()
        await self.until(lambda: "— a" in self.text)
        await self.ends()

    async def test_an_invalid_answer_is_explained_and_asked_again(self):
        service, browser = self.start()
        service.responses["/v1/reply"] = [
            (422, {"error": {"code": "invalid_answer", "message": "too long: 900, limit 500"}})
        ]
        service.says(ask())
        await self.until(lambda: browser.pending)
        browser.does(chose(0))
        await self.until(lambda: len(browser.calls) == 2 and browser.pending)
        self.assertEqual(browser.said("notification"), ["too long: 900, limit 500"])
        browser.does(chose(1))
        await self.until(lambda: "— b" in self.text)
        self.assertEqual(len({body["reply"] for body in service.posted("/v1/reply")}), 2)
        await self.ends()

    async def test_the_loser_of_a_race_hears_who_won(self):
        service, browser = self.start()
        service.responses["/v1/reply"] = [
            (200, {"result": "already_answered", "by": "bob", "message": "bob answered first: b"})
        ]
        service.says(ask())
        await self.until(lambda: browser.pending)
        browser.does(chose(0))
        await self.until(lambda: browser.said("notification"))
        await self.ends()
        self.assertEqual(browser.said("notification"), ["bob answered first: b"])
        self.assertIn("bob answered first", self.text)
        self.assertNotIn("— a", self.text)

    async def test_of_two_masked_dialogs_one_waits_for_the_other(self):
        service, browser = self.start()
        service.says(ask("q1", "masked", secret=True, options=[]), ask("q2", "masked", secret=True, options=[]))
        await self.until(lambda: service.posted("/v1/shown"))
        await self.until(lambda: len(service.posted("/v1/shown")) == 2)
        self.assertEqual(
            {body["question"]: body["event"] for body in service.posted("/v1/shown")},
            {"q1": "delivered", "q2": "waiting"},
        )
        self.assertEqual(len(browser.calls), 1)
        browser.does("s3cret-1")
        await self.until(lambda: len(browser.calls) == 2)
        browser.does("s3cret-2")
        await self.until(lambda: len(service.posted("/v1/reply")) == 2)
        await self.ends()
        self.assertEqual(service.posted("/v1/reply")[0]["answers"], {"target": {"text": "s3cret-1"}})
        self.assertIn("answered (hidden)", self.text)
        self.assertNotIn("s3cret", self.text + json.dumps(browser.events))

    async def test_an_answer_that_breaks_the_pipe_is_not_logged(self):
        logging.getLogger("askbus_pipe").setLevel(logging.DEBUG)
        with self.assertLogs("askbus_pipe") as logs:
            service, browser = self.start()
            service.says(ask(surface="select"))
            await self.until(lambda: browser.pending)
            browser.does("s3cret that is no index")
            await self.until(lambda: any(body["event"] == "refused" for body in service.posted("/v1/shown")))
            await self.ends()
        self.assertNotIn("s3cret", "".join(logs.output) + json.dumps(service.posts) + self.text)


class Viewer(TurnCase):
    async def shown(self, **valves):
        service, browser = self.start(**valves)
        service.says(ask())
        await self.until(lambda: service.posted("/v1/shown"))
        return service, browser

    async def test_cancel_is_the_users(self):
        service, browser = await self.shown()
        browser.does(CANCELLED)
        await self.until(lambda: service.posted("/v1/reply"))
        self.assertEqual(service.posted("/v1/reply")[0]["cancelled"], "user")
        await self.ends()

    async def test_who_looks_at_another_chat_is_told_once(self):
        service, browser = self.start(PARK_AFTER_S=60)
        service.says({"type": "text", "text": "."})
        await self.until(lambda: self.text)
        browser.session, browser.other_chat = None, True
        service.says(ask())
        await self.until(lambda: browser.said("chat:completion"))
        browser.session, browser.other_chat = "tab1", False
        await self.until(lambda: browser.pending)
        await self.ends()
        told = [event["data"] for event in browser.events if event["type"] == "chat:completion"]
        self.assertEqual(told, [{"done": True, "title": "OpenClaw asks", "content": "Where to?"}])

    async def test_a_chat_that_no_tab_has_shown_yet_is_not_taken_for_one_that_was_left(self):
        service, browser = self.start(PARK_AFTER_S=60)
        browser.session, browser.other_chat = None, True
        service.says(ask())
        await self.until(lambda: browser.looks > 20)
        browser.session, browser.other_chat = "tab1", False
        await self.until(lambda: browser.pending)
        await self.ends()
        self.assertEqual(browser.said("chat:completion"), [])

    async def test_a_cancel_faster_than_a_person_is_the_browsers(self):
        pipe.HUMAN_S = 5.0
        service, browser = await self.shown()
        browser.does(CANCELLED)
        await self.until(lambda: len(browser.calls) == 2)
        await self.ends()
        self.assertEqual(service.posted("/v1/reply"), [])

    async def test_a_short_visit_to_another_chat_keeps_the_question(self):
        service, browser = await self.shown(CHAT_SWITCH_AFTER_S=60)
        browser.session, browser.other_chat = None, True
        browser.does(CANCELLED)
        await self.until(lambda: service.posted("/v1/presence"))
        self.assertEqual(
            {k: service.posted("/v1/presence")[0][k] for k in ("looking", "other_chat", "park")},
            {"looking": False, "other_chat": True, "park": False},
        )
        browser.session = "tab1"
        await self.until(lambda: browser.pending)
        await self.until(lambda: service.posted("/v1/presence")[-1]["looking"])
        browser.does(chose(1))
        await self.until(lambda: "— b" in self.text)
        await self.ends()

    async def test_staying_in_another_chat_cancels(self):
        service, browser = await self.shown()
        browser.session, browser.other_chat = None, True
        await self.until(lambda: service.posted("/v1/reply"))
        self.assertEqual(service.posted("/v1/reply")[0]["cancelled"], "chat_switch")
        before = [path for path, _ in service.posts]
        self.assertFalse([body for path, body in service.posts[: before.index("/v1/reply")] if body.get("park")])
        await self.ends()

    async def test_policy_park_parks_in_another_chat(self):
        service, browser = await self.shown(ON_CHAT_SWITCH="park")
        browser.session, browser.other_chat = None, True
        await self.until(lambda: service.posted("/v1/presence"))
        self.assertTrue(service.posted("/v1/presence")[0]["park"])
        await self.ends()

    async def test_a_closed_tab_parks_as_a_durable_card(self):
        service, browser = await self.shown()
        browser.session = None
        await self.until(lambda: service.posted("/v1/presence"))
        told = service.posted("/v1/presence")[0]
        self.assertEqual((told["looking"], told["other_chat"], told["park"]), (False, False, True))
        self.assertEqual(browser.pending, {})
        service.says(ask(surface="durable", cursor="9"))
        await asyncio.wait_for(self.task, 5)
        call = self.out[-2]["choices"][0]["delta"]["tool_calls"][0]
        self.assertEqual((call["id"], call["function"]["name"]), ("oc_q1.9", "ask_user"))
        await self.until(lambda: service.posted("/v1/shown")[-1]["surface"] == "durable")
        self.assertEqual(service.posted("/v1/left"), [])

    async def test_presence_is_told_again_after_a_reconnect(self):
        service, browser = await self.shown()
        browser.session = None
        await self.until(lambda: service.posted("/v1/presence"))
        service.says(pipe.Away("gone"), {"type": "ping"})
        await self.until(lambda: len(service.posted("/v1/presence")) == 2)
        self.assertFalse(service.turns[1]["looking"])
        await self.ends()


class Stream(TurnCase):
    async def test_a_broken_stream_is_resumed_after_the_last_cursor(self):
        service, browser = self.start()
        service.says({"type": "text", "text": "one ", "cursor": "1"}, ask(), pipe.Away("gone"))
        await self.until(lambda: len(service.turns) == 2 and browser.pending)
        service.says(ask(), {"type": "text", "text": "two", "cursor": "3"})
        await self.until(lambda: "two" in self.text)
        await self.ends()
        self.assertEqual([body["after"] for body in service.turns], [None, "2"])
        self.assertEqual((self.text, len(browser.calls)), ("one two", 1))

    async def test_a_longer_outage_is_told_and_so_is_its_end(self):
        service, browser = self.start()
        service.says(*[pipe.Away("gone")] * 4, {"type": "ping"})
        await self.until(lambda: "askbus is back" in browser.said("status"))
        self.assertEqual(browser.said("status"), ["askbus can't be reached: trying again", "askbus is back"])
        await self.ends()

    async def test_a_refused_turn_ends_with_the_message(self):
        service, _ = self.start()
        service.says(pipe.Refused("the token is wrong: check SERVICE_TOKEN"))
        await asyncio.wait_for(self.task, 5)
        self.assertIn("check SERVICE_TOKEN", self.text)

    async def test_the_end_may_say_something(self):
        service, _ = self.start()
        service.says({"type": "mystery"}, {"type": "end", "reason": "error", "text": "no gateway"})
        await asyncio.wait_for(self.task, 5)
        self.assertEqual(self.text, "no gateway")

    async def test_status_tools_and_notices_are_shown(self):
        service, browser = self.start()
        service.says(
            {"type": "tool", "call": "1", "name": "read", "phase": "start", "title": "Read a.txt"},
            {"type": "tool", "call": "1", "name": "read", "phase": "end", "ok": False},
            {"type": "status", "text": "Thinking", "done": True},
            {"type": "notice", "level": "warning", "text": "careful"},
        )
        await self.ends()
        self.assertEqual(browser.said("status"), ["Read a.txt", "read: failed", "Thinking"])
        self.assertEqual(browser.said("notification"), ["careful"])

    async def test_stop_reports_left_with_the_cursor_and_closes_the_card(self):
        service, browser = self.start()
        service.says(ask(cursor="5"))
        await self.until(lambda: browser.pending)
        self.task.cancel()
        with self.assertRaises(asyncio.CancelledError):
            await self.task
        self.assertEqual(
            service.posted("/v1/left"), [{"chat": "c1", "message": "m1", "user": BODY["user"], "cursor": "5"}]
        )
        await self.until(lambda: not browser.pending)

    async def test_left_is_repeated_while_the_service_is_away(self):
        service, _ = self.start()
        service.responses["/v1/left"] = [pipe.Away("x"), pipe.Away("x")]
        service.says({"type": "text", "text": "x", "cursor": "1"})
        await self.until(lambda: self.text)
        self.task.cancel()
        with self.assertRaises(asyncio.CancelledError):
            await self.task
        await self.until(lambda: len(service.posted("/v1/left")) == 3)

    async def test_a_caller_without_a_browser_that_drops_is_no_stop(self):
        service, browser = self.start(live=False)
        service.says({"type": "text", "text": "x"}, {"type": "status", "text": "y"})
        await self.until(lambda: self.text)
        self.task.cancel()
        with self.assertRaises(asyncio.CancelledError):
            await self.task
        self.assertEqual((service.posts, browser.events), ([], []))
        self.assertFalse(service.turns[0]["looking"])


if __name__ == "__main__":
    unittest.main()
