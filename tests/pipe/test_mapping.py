"""What the pipe makes of Open WebUI's messages, of a question, and of what a person did."""

import json
import sys
import types
import unittest
from unittest import mock

from pipe_module import pipe


def options(*labels):
    return [{"label": label, "description": f"about {label}"} for label in labels]


def prompt(text="Where to?", labels=(), **more):
    return {"id": "target", "header": "Deploy", "text": text, "options": options(*labels)} | more


def ask(*prompts, surface="card", **more):
    return {
        "type": "ask",
        "question": "q1",
        "surface": surface,
        "title": "OpenClaw asks",
        "prompts": list(prompts),
    } | more


def answered_by(card, index, status="answered"):
    """The tool message with which Open WebUI returns a durable card's option."""
    given = {card["questions"][0]["id"]: {"type": "option", "option_index": index, "label": "x"}}
    return [{"role": "tool", "tool_call_id": "oc_q1.7", "content": json.dumps({"status": status, "answers": given})}]


class Messages(unittest.TestCase):
    def test_the_last_user_message_is_the_text(self):
        messages = [
            {"role": "user", "content": "one"},
            {"role": "user", "content": "two"},
            {"role": "assistant", "content": "x"},
        ]
        self.assertEqual(pipe.turn_text(messages), ("two", []))

    def test_blocks_become_text_and_attachments(self):
        blocks = [
            {"type": "text", "text": "look"},
            {"type": "image_url", "image_url": {"url": "data:image/svg+xml;charset=utf-8;base64,QUJD"}},
            {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
        ]
        text, attachments = pipe.turn_text([{"role": "user", "content": blocks}])
        self.assertEqual(text, "look\nhttps://example.org/a.png")
        self.assertEqual(attachments, [{"name": "image-1.svg", "mime": "image/svg+xml", "data": "QUJD"}])

    def test_an_image_alone_has_no_text(self):
        blocks = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,QUJD"}}]
        text, attachments = pipe.turn_text([{"role": "user", "content": blocks}])
        self.assertEqual((text, len(attachments)), ("", 1))

    def test_open_webuis_file_list_keeps_what_is_not_passed_on(self):
        image = '<file type="file" id="1" url="1" content_type="image/png" name="dot.png"/>'
        report = '<file type="file" id="2" url="2" content_type="application/pdf" name="report.pdf"/>'

        def text(*tags):
            listed = "<attached_files>\n" + "\n".join(tags) + "\n</attached_files>\n\n"
            blocks = [{"type": "text", "text": listed}, {"type": "text", "text": "look"}]
            self.assertEqual(
                pipe.turn_text([{"role": "user", "content": listed + "look"}])[0].split(),
                pipe.turn_text([{"role": "user", "content": blocks}])[0].split(),
            )
            return pipe.turn_text([{"role": "user", "content": listed + "look"}])[0]

        self.assertEqual(text(image), "look")
        self.assertNotIn("dot.png", text(image, report))
        self.assertIn("report.pdf", text(image, report))

    def test_a_template_around_what_was_typed_is_no_part_of_it(self):
        file, templated = {"type": "file"}, "### Task: use <source>…</source>\n\nred?"

        def metadata(content, *files, of_the_chat=()):
            return {"user_message": {"content": content, "files": list(files)}, "files": [*files, *of_the_chat]}

        cases = [
            ("red?", metadata("red?"), "red?"),
            (templated, metadata("red?", file), "red?"),
            # What was found in the web or in the chat's knowledge, changed by a filter, or added by a
            # regeneration is no template.
            (templated, metadata("red?"), templated),
            (templated, metadata("red?", file, {"type": "collection"}), templated),
            (templated, metadata("red?", file, of_the_chat=[file]), templated),
            ("[removed]", metadata("my number is 7", file), "[removed]"),
            ("More concise", metadata("red?", file), "More concise"),
            ("red", {}, "red"),
            ("red", metadata("", file), "red"),
        ]
        for text, given, expected in cases:
            self.assertEqual(pipe.typed_text(text, given), expected, (text, given))

    def test_no_user_message_is_empty_text(self):
        self.assertEqual(pipe.turn_text([{"role": "system", "content": "be nice"}]), ("", []))

    def test_surfaces(self):
        cases = [
            ((False, False, True), ["text"]),
            ((True, True, True), ["card", "form", "confirm", "masked", "durable", "text"]),
            ((True, True, False), ["card", "form", "confirm", "masked", "text"]),
            ((True, False, True), ["card", "form", "confirm", "masked", "text"]),
        ]
        for given, expected in cases:
            self.assertEqual(pipe.surfaces(*given), expected, given)


class OpenWebui(unittest.IsolatedAsyncioTestCase):
    def modules(self, pool, found=None):
        main = types.SimpleNamespace(SESSION_POOL=pool, get_user_chat_session_id=lambda user, chat: found)
        names = ("open_webui", "open_webui.socket", "open_webui.socket.main")
        return mock.patch.dict(sys.modules, {name: main for name in names})

    async def test_a_question_goes_to_no_tab_of_another_user_or_chat(self):
        cases = [
            ({"s1": {"id": "alice", "chat_ids": ["c1"]}}, None, ("s1", False)),
            ({"s1": {"id": "alice", "chat_ids": ["c2"]}}, None, (None, True)),
            ({"s1": {"id": "alice", "chat_ids": ["c2"]}}, "s2", ("s2", False)),
            ({"s1": {"id": "bob", "chat_ids": ["c1"]}}, None, (None, False)),
            ({}, None, (None, False)),
        ]
        for pool, found, expected in cases:
            with self.modules(pool, found):
                self.assertEqual(await pipe.Tabs("alice", "c1", "s1").look(), expected, pool)

    async def test_an_unsaved_chat_is_in_the_tab_that_it_began_in(self):
        with self.modules({"s1": {"id": "alice"}}, found="s2"):
            self.assertEqual(await pipe.Tabs("alice", "local:1", "s1").look(), ("s1", False))
        with self.modules({}, found="s2"):
            self.assertEqual(await pipe.Tabs("alice", "local:1", "s1").look(), (None, False))

    def test_an_open_webui_without_cards_is_no_error(self):
        with mock.patch.dict(sys.modules, {"open_webui": None}), self.assertLogs("askbus_pipe"):
            self.assertFalse(pipe.has_cards())

    async def test_a_file_that_can_not_be_passed_on_keeps_no_message_back(self):
        async def content(id, user):
            if id == "gone":
                raise FileNotFoundError
            if id == "photo":
                return types.SimpleNamespace(filename="photo.png", meta={"content_type": "image/png"}), b"x"
            size = {"large": pipe.MAX_ATTACHED + 1, "half": pipe.MAX_ATTACHED * 2 // 3}.get(id, 3)
            file = types.SimpleNamespace(filename=f"{id}.txt", meta={"content_type": "text/plain"})
            return (None, None) if id == "foreign" else (file, b"x" * size)

        ids = ("small", "photo", "gone", "large", "foreign", "half", "half")
        files = [{"type": "file", "id": id, "name": id} for id in ids] + [{"type": "image", "id": "i"}]
        with mock.patch.object(pipe, "file_content", content), self.assertLogs("askbus_pipe"):
            passed, left_out = await pipe.attached_files({"user_message": {"files": files}}, "alice", 0)
        self.assertEqual([attachment["name"] for attachment in passed], ["small.txt", "half.txt"])
        self.assertEqual(left_out, ["gone", "large", "foreign", "half"])
        self.assertLess(sum(len(attachment["data"]) for attachment in passed), 6_000_000)

    async def test_background_tasks_never_reach_the_service(self):
        one = pipe.Pipe()
        with mock.patch.object(one, "service", create=True) as service:
            messages = {"messages": [{"role": "user", "content": "Suggest a title"}]}
            for task in ("title_generation", "tags_generation", "follow_up_generation", "query_generation"):
                given = one.pipe(messages, __user__={"id": "alice"}, __task__=task, __chat_id__="c1")
                self.assertEqual([piece async for piece in given], [], task)
        service.assert_not_called()


class Card(unittest.TestCase):
    def test_an_approving_option_never_comes_first(self):
        cases = [
            (("Staging", "Production"), [0, 1]),
            (("Allow once", "Allow always", "Deny"), [2, 0, 1]),
            (("yes", "No"), [1, 0]),
            (("Approve", "Yes"), [0, 1]),
            (("Yesterday", "Today"), [0, 1]),
            ((), []),
        ]
        for labels, order in cases:
            self.assertEqual(pipe.option_order(options(*labels)), order, labels)

    def test_the_chosen_option_is_named_by_its_place_in_the_question(self):
        question = ask(prompt(labels=("Allow", "Deny")))
        shown = pipe.card_event(question)["data"]["questions"][0]["options"]
        self.assertEqual([o["label"] for o in shown], ["Deny", "Allow"])
        result = {"status": "answered", "answers": {"target": {"type": "option", "option_index": 0, "label": "Deny"}}}
        self.assertEqual(pipe.card_reply(question, result), {"answers": {"target": {"index": 1}}})

    def test_free_text_needs_no_options_and_takes_own_words(self):
        question = ask(prompt(allow_other=False))
        shown = pipe.card_event(question)["data"]["questions"][0]
        self.assertEqual((shown["options"], shown["allow_other"]), ([], True))
        result = {"status": "answered", "answers": {"target": {"type": "other", "text": "the moon"}}}
        self.assertEqual(pipe.card_reply(question, result), {"answers": {"target": {"text": "the moon"}}})

    def test_results_without_a_decision(self):
        question = ask(prompt(labels=("a", "b")))
        cases = [
            ({"error": "Client session disconnected."}, pipe.AGAIN),
            ({"error": "Event call timed out. The browser tab may be inactive or closed."}, pipe.AGAIN),
            (None, pipe.AGAIN),
            ({"status": "answered", "answers": {}}, pipe.AGAIN),
            (True, pipe.AGAIN),
            ("yes", pipe.AGAIN),
            ([], pipe.AGAIN),
            ({"status": "cancelled", "answers": {}}, pipe.CANCELLED),
        ]
        for result, expected in cases:
            self.assertIs(pipe.card_reply(question, result), expected, result)


    def test_words_that_look_like_nothing_are_answers(self):
        one = prompt()
        for text in ("0", "no", "false", "None", "cancel"):
            said = {"status": "answered", "answers": {"target": {"type": "other", "text": text}}}
            self.assertEqual(pipe.card_reply(ask(one), said), {"answers": {"target": {"text": text}}})
            form = {"action": "accept", "content": {"target": text}}
            self.assertEqual(pipe.form_reply(ask(one, surface="form"), form), {"answers": {"target": {"text": text}}})
            self.assertEqual(pipe.dialog_reply(ask(one, surface="input"), one, text), {"text": text})


class Form(unittest.TestCase):
    def test_several_choices_and_own_words(self):
        question = ask(
            prompt(labels=("x", "y", "z"), multiple=True, allow_other=False),
            {"id": "name", "text": "Name?", "options": [], "required": False},
            {"id": "size", "text": "Size?", "options": options("S", "L")},
            surface="form",
        )
        schema = pipe.form_event(question)["data"]["requestedSchema"]
        self.assertEqual(list(schema["properties"]), ["target", "name", "size", "size~other"])
        self.assertEqual(schema["required"], ["target"])
        accept = {"action": "accept", "content": {"target": ["2", "0"], "size": "1", "size~other": " XL ", "name": ""}}
        self.assertEqual(
            pipe.form_reply(question, accept), {"answers": {"target": {"indexes": [0, 2]}, "size": {"text": "XL"}}}
        )

    def test_a_multi_select_takes_own_words_as_well(self):
        question = ask(prompt(labels=("x", "y"), multiple=True), surface="form")
        schema = pipe.form_event(question)["data"]["requestedSchema"]
        self.assertEqual((list(schema["properties"]), schema["required"]), (["target", "target~other"], []))
        both = pipe.form_reply(question, {"action": "accept", "content": {"target": ["1"], "target~other": "z"}})
        self.assertEqual(both, {"answers": {"target": {"indexes": [1], "text": "z"}}})
        self.assertIn("— y, z", pipe.trace(question, both))
        words = pipe.form_reply(question, {"action": "accept", "content": {"target~other": "z"}})
        self.assertEqual(words, {"answers": {"target": {"text": "z"}}})
        self.assertEqual(pipe.form_reply(question, {"action": "accept", "content": {}}), {"answers": {}})

    def test_decline_cancel_and_change_of_chat(self):
        question = ask(prompt(labels=("x", "y"), multiple=True), surface="form")
        self.assertEqual(pipe.form_reply(question, {"action": "decline"}), {"declined": True})
        self.assertIs(pipe.form_reply(question, {"action": "cancel"}), pipe.CANCELLED)
        self.assertIs(pipe.form_reply(question, {"status": "cancelled", "answers": {}}), pipe.CANCELLED)


class Dialog(unittest.TestCase):
    def test_a_secret_is_masked_on_every_surface(self):
        for surface in ("masked", "input", "select", "confirm"):
            one = prompt(secret=True, labels=("a", "b"))
            event = pipe.dialog_event(ask(one, surface=surface), one)
            self.assertEqual((event["type"], event["data"]["type"]), ("input", "password"), surface)
            self.assertEqual(pipe.dialog_reply(ask(one, surface=surface), one, " s3cret "), {"text": " s3cret "})

    def test_a_message_is_never_empty(self):
        one = prompt(text=" ")
        self.assertTrue(pipe.dialog_event(ask(one, surface="input"), one)["data"]["message"])

    def test_confirmation_says_yes_by_label_and_no_as_declined(self):
        one = prompt(labels=("No", "Yes"))
        self.assertEqual(pipe.dialog_reply(ask(one, surface="confirm"), one, True), {"index": 1})
        self.assertEqual(pipe.dialog_reply(ask(one, surface="confirm"), one, False), {"declined": True})

    def test_selection_and_text(self):
        one = prompt(labels=("a", "b"))
        event = pipe.dialog_event(ask(one, surface="select"), one)
        self.assertEqual([o["value"] for o in event["data"]["options"]], ["0", "1"])
        self.assertEqual(pipe.dialog_reply(ask(one, surface="select"), one, "1"), {"index": 1})
        self.assertIn("2. b", pipe.dialog_event(ask(one, surface="input"), one)["data"]["message"])
        self.assertEqual(pipe.dialog_reply(ask(one, surface="input"), one, "2\n"), {"text": "2"})

    def test_beside_a_secret_own_words_stay_possible(self):
        free, strict = prompt(labels=("a", "b")), prompt(labels=("a", "b"), allow_other=False)
        question = ask(free, prompt(id="key", secret=True), surface="masked")
        self.assertNotIn("type", pipe.dialog_event(question, free)["data"])
        self.assertEqual(pipe.dialog_reply(question, free, "c"), {"text": "c"})
        self.assertEqual(pipe.dialog_event(question, strict)["data"]["type"], "select")
        self.assertEqual(pipe.dialog_reply(question, strict, "1"), {"index": 1})

    def test_nothing_entered_is_no_answer(self):
        one = prompt(secret=True)
        question = ask(one, surface="masked")
        for result, expected in (
            ("", pipe.AGAIN),
            ("  ", pipe.AGAIN),
            (None, pipe.AGAIN),
            ({"error": "x"}, pipe.AGAIN),
            (True, pipe.AGAIN),
            (7, pipe.AGAIN),
            (False, pipe.CANCELLED),
        ):
            self.assertIs(pipe.dialog_reply(question, one, result), expected, result)


class Durable(unittest.TestCase):
    def card(self, *prompts):
        return pipe.durable_card(ask(*prompts, surface="durable"))

    def labels(self, card):
        return [o["label"] for o in card["questions"][0]["options"]]

    def test_two_or_three_choices_are_the_options(self):
        above, card = self.card(prompt(labels=("Allow", "Deny")))
        self.assertEqual((above, self.labels(card)), ("", ["Deny", "Allow"]))
        self.assertEqual(
            pipe.durable_answer(answered_by(card, 1)),
            {"call": "oc_q1.7", "status": "answered", "answers": {"target": {"index": 0}}},
        )

    def test_more_choices_are_listed_above(self):
        above, card = self.card(prompt(labels=("a", "b", "c", "d", "e"), allow_other=False))
        self.assertIn("5. e – about e", above)
        self.assertEqual(self.labels(card), ["a", "b", "c"])
        self.assertTrue(card["questions"][0]["allow_other"])

    def test_free_text_has_a_neutral_first_option_that_decides_nothing(self):
        _, card = self.card(prompt())
        self.assertEqual(self.labels(card), ["Own words", "Skip"])
        self.assertEqual(pipe.durable_answer(answered_by(card, 0))["status"], "again")
        self.assertEqual(pipe.durable_answer(answered_by(card, 1))["status"], "declined")
        words = {card["questions"][0]["id"]: {"type": "other", "text": "the moon"}}
        message = {
            "role": "tool",
            "tool_call_id": "oc_q1.7",
            "content": json.dumps({"status": "answered", "answers": words}),
        }
        self.assertEqual(pipe.durable_answer([message])["answers"], {"target": {"text": "the moon"}})

    def test_a_single_choice_gets_skip_beside_it(self):
        self.assertEqual(self.labels(self.card(prompt(labels=("Retry",)))[1]), ["Retry", "Skip"])
        _, card = self.card(prompt(labels=("Approve",)))
        self.assertEqual(self.labels(card), ["Skip", "Approve"])
        self.assertEqual(pipe.durable_answer(answered_by(card, 1))["answers"], {"target": {"index": 0}})

    def test_open_webuis_limits_are_kept(self):
        above, card = self.card(prompt(text="x" * 600, header="h" * 60, labels=("l" * 90, "b")))
        question = card["questions"][0]
        self.assertEqual((len(question["question"]), len(question["header"])), (500, 48))
        self.assertTrue(all(len(o["label"]) <= 80 and 0 < len(o["description"]) <= 240 for o in question["options"]))
        self.assertIn("x" * 600, above)
        self.assertIsNone(self.card(*[prompt()] * 4))
        self.assertIsNone(self.card(prompt(id="i" * 64)))

    def test_what_else_becomes_of_a_card(self):
        cases = [
            ("Error: tool call rejected by user.", "cancelled"),
            ("Error: Each question requires 2-3 options.", "refused"),
            ('{"status":"cancelled","answers":{}}', "cancelled"),
            ('{"status":"cancelled","answers":{},"timed_out":true}', "again"),
        ]
        for content, status in cases:
            message = {"role": "tool", "tool_call_id": "oc_q1.7", "content": content}
            self.assertEqual(pipe.durable_answer([message])["status"], status, content)

    def test_an_option_that_the_card_has_not_is_refused(self):
        for given in ({"type": "option", "option_index": 7}, {"type": "option"}):
            content = json.dumps({"status": "answered", "answers": {"target~0.1": given}})
            message = {"role": "tool", "tool_call_id": "oc_q1.7", "content": content}
            self.assertEqual(pipe.durable_answer([message])["status"], "refused", given)

    def test_other_tool_results_are_none_of_ours(self):
        self.assertIsNone(pipe.durable_answer([{"role": "tool", "tool_call_id": "call_1", "content": "{}"}]))
        self.assertIsNone(pipe.durable_answer([{"role": "user", "content": "hi"}]))
        self.assertIsNone(pipe.durable_answer([]))

    def test_the_call_ends_the_message(self):
        _, card = self.card(prompt(labels=("a", "b")))
        call, finish = pipe.durable_chunks(card, "oc_q1.7", "askbus.default")
        self.assertEqual(call["choices"][0]["delta"]["tool_calls"][0]["id"], "oc_q1.7")
        self.assertEqual(finish["choices"][0]["finish_reason"], "tool_calls")


class Chat(unittest.TestCase):
    def test_a_trace_tells_question_and_answer(self):
        question = ask(prompt(text="Where\nto?", labels=("a", "b")), prompt(id="why", text="Why?"))
        text = pipe.trace(question, {"answers": {"target": {"index": 1}, "why": {"text": "because"}}})
        self.assertIn("> **Where to?** — b\n>\n> **Why?** — because", text)
        self.assertIn("— cancelled", pipe.trace(question, {"cancelled": "user"}))
        self.assertIn("— declined", pipe.trace(question, {"declined": True}))

    def test_a_trace_is_text_whatever_is_in_it(self):
        question = ask(prompt(text="Is **this** <b>it</b>?"))
        text = pipe.trace(question, {"answers": {"target": {"text": "[a](http://b) `c` $d$"}}})
        self.assertIn(r"> **Is \*\*this\*\* \<b\>it\</b\>?** — \[a\](http://b) \`c\` \$d\$", text)

    def test_a_secret_leaves_no_trace_of_its_value(self):
        question = ask(prompt(text="Token?", secret=True), surface="masked")
        text = pipe.trace(question, {"answers": {"target": {"text": "s3cret"}}})
        self.assertIn("> **Token?** — answered (hidden)", text)
        self.assertNotIn("s3cret", text)

    def test_text_is_never_taken_for_a_raw_event(self):
        for text in ('data: {"event": {}}', "data:data:", "plain", ""):
            parts = list(pipe.pieces(text))
            self.assertEqual("".join(parts), text)
            self.assertFalse(any(part.startswith("data:") and part is parts[0] for part in parts), parts)


if __name__ == "__main__":
    unittest.main()
