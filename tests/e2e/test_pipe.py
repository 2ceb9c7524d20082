"""The pipe in a real Open WebUI, in front of a real Chromium, against a scripted emitter."""

import base64
import json
import urllib.request

import pytest
from scripted_emitter import prompt
from web_only import MODEL_ID, PIPE_ID

TARGET = "Pick a deploy target"


def first_message(emitter, page):
    return emitter.wait_sent("/v1/turn", chat=page.chat)[0]["message"]


def test_models_are_listed(stack, emitter):
    models = stack.web.call("GET", "/api/models", token=stack.admin.token)["data"]
    assert {m["id"]: m["name"] for m in models} == {MODEL_ID: "OpenClaw", f"{PIPE_ID}.openclaw/ops": "OpenClaw Ops"}


def test_a_click_answers_and_stays_readable(page, stack, emitter):
    page.send("choose")
    page.sees(TARGET)
    emitter.wait_sent("/v1/shown", event="delivered", surface="card", chat=page.chat)
    page.click("production")
    page.sees('[{"index": 1}]')
    page.sees("— production")
    turn = emitter.sent("/v1/turn", chat=page.chat)[0]
    assert (turn["agent"], turn["gateway"], turn["text"], turn["looking"]) == ("main", None, "choose", True)
    assert turn["surfaces"] == ["card", "form", "confirm", "masked", "durable", "text"]
    stored = stack.messages(page.chat)[turn["message"]]
    assert stored["content"].startswith("Working. ") and "— production" in stored["content"]


def test_an_approving_choice_is_not_recommended(page):
    page.send("permit")
    page.sees("Delete the cluster?")
    assert "Deny" in page.page.get_by_text("Recommended").locator("xpath=ancestor::button").inner_text()
    page.click("Deny")
    page.sees('[{"index": 1}]')


def test_own_words_where_there_are_no_choices(page):
    page.send("words")
    page.sees("What should it be called?")
    page.type_other("Moby Dick")
    page.sees('[{"text": "Moby Dick"}]')


def test_several_choices_in_a_form(page):
    page.send("form")
    page.page.get_by_label("Deploy").select_option(["0", "2"])
    page.click("Submit")
    page.sees('[{"indexes": [0, 2]}]')


def test_a_confirmation(page):
    page.send("confirm")
    page.sees("Go on?")
    page.click("Confirm")
    page.sees('[{"index": 0}]')


def test_a_secret_survives_a_reload_and_is_kept_nowhere(page, stack, emitter):
    value = "S3cret-and-unique-0815"
    page.send("secret")
    page.page.wait_for_selector("#event-confirm-input")
    chat = page.chat
    page.reload()
    page.fill_secret(value)
    page.sees(f"[secret of {len(value)} characters]")
    page.sees("answered (hidden)")
    assert emitter.sent("/v1/reply", chat=chat)[0]["answers"] == {"target": {"text": value}}
    assert stack.files_with(value) == []


def test_two_secrets_are_asked_one_after_the_other(page):
    page.send("secrets")
    page.sees("First token?")
    page.fill_secret("one-1")
    page.sees("Second token?")
    page.fill_secret("second-22")
    page.sees("[secret of 9 characters]")


def test_a_reload_before_the_question_is_asked(page, emitter):
    page.send("talk")
    page.sees("Talking.")
    run = emitter.last_run()
    page.reload()
    page.sees("Talking.")
    question = run.open_question([prompt("After the reload?", "one", "two")], "card", True)
    page.sees("After the reload?")
    page.click("two")
    emitter.until(lambda: question in run.decided)
    assert run.decided[question]["answers"] == {"target": {"index": 1}}
    page.sees("— two")
    page.click("Stop")
    emitter.until(lambda: run.left)


def test_a_reload_while_the_card_is_open(page):
    page.send("choose")
    page.sees(TARGET)
    assert page.chat
    page.reload()
    page.sees(TARGET)
    page.click("canary")
    page.sees('[{"index": 2}]')


def test_cancel_is_told_apart_from_a_change_of_chat(page, emitter):
    page.send("choose")
    page.sees(TARGET)
    chat = page.chat
    page.go("/")
    page.sees_not(TARGET)
    page.go(f"/c/{chat}")
    page.sees(TARGET)
    page.click("Cancel")
    page.sees("[user]")
    assert [reply["cancelled"] for reply in emitter.sent("/v1/reply", chat=chat)] == ["user"]


def test_staying_in_another_chat_cancels(page, stack, emitter):
    stack.set_valves(PARK_AFTER_S=1, CHAT_SWITCH_AFTER_S=2)
    page.send("choose")
    page.sees(TARGET)
    chat = page.chat
    emitter.wait_sent("/v1/shown", event="delivered", chat=chat)
    page.go("/")
    assert emitter.wait_sent("/v1/presence", chat=chat)[0]["other_chat"] is True
    assert emitter.wait_sent("/v1/reply", chat=chat)[0]["cancelled"] == "chat_switch"
    page.go(f"/c/{chat}")
    page.sees("[chat_switch]")


def test_in_another_chat_the_question_parks_where_that_is_the_policy(page, stack, emitter):
    stack.set_valves(PARK_AFTER_S=1, ON_CHAT_SWITCH="park")
    page.send("choose")
    page.sees(TARGET)
    chat = page.chat
    page.go("/")
    emitter.wait_sent("/v1/shown", event="delivered", surface="durable", chat=chat)
    page.go(f"/c/{chat}")
    page.sees(TARGET)
    page.click("production")
    page.sees('[{"index": 1}]')


@pytest.mark.parametrize("said,above,answer,expected", [
    ("choose", "Working.", lambda page: page.click("production"), '[{"index": 1}]'),
    ("five", "Pick one of five", lambda page: page.type_other("4"), '[{"text": "4"}]'),
    ("choose", "Working.", lambda page: page.click("Cancel"), "[user]"),
])  # fmt: skip
def test_a_closed_tab_parks_and_the_answer_comes_later(tab, stack, emitter, said, above, answer, expected):
    stack.set_valves(PARK_AFTER_S=1)
    page = tab()
    page.send(said)
    emitter.wait_sent("/v1/shown", event="delivered", message=first_message(emitter, page))
    chat = page.chat
    page.close()
    emitter.wait_sent("/v1/shown", event="delivered", surface="durable", chat=chat)
    page = tab(f"/c/{chat}")
    page.sees(above)
    page.has_button("Cancel")
    answer(page)
    page.sees(expected)
    assert emitter.sent("/v1/left", chat=chat) == []


def test_own_words_chosen_as_an_option_asks_again(tab, stack, emitter):
    stack.set_valves(PARK_AFTER_S=1)
    page = tab()
    page.send("words")
    emitter.wait_sent("/v1/shown", event="delivered", message=first_message(emitter, page))
    chat = page.chat
    page.close()
    emitter.wait_sent("/v1/shown", event="delivered", surface="durable", chat=chat)
    page = tab(f"/c/{chat}")
    page.click("Own words")
    emitter.wait_sent("/v1/shown", count=2, event="delivered", surface="durable", chat=chat)
    page.type_other("Queequeg")
    page.sees('[{"text": "Queequeg"}]')


def test_stop_while_the_agent_talks(page, stack, emitter):
    page.send("talk")
    page.sees("Talking.")
    page.click("Stop")
    left = emitter.wait_sent("/v1/left", chat=page.chat)[0]
    assert left["cursor"] == "1"


def test_stop_while_a_card_is_open_closes_it(page, stack, emitter):
    page.send("choose")
    page.sees(TARGET)
    chat = page.chat
    stack.web.call("POST", f"/api/tasks/chat/{chat}/stop", {}, stack.alice.token)
    emitter.wait_sent("/v1/left", chat=chat)
    page.has_no_button("production")
    assert emitter.sent("/v1/reply", chat=chat) == []


def test_send_now_is_no_cancel(page, emitter):
    page.send("choose")
    page.sees(TARGET)
    chat = page.chat
    page.send("talk about something else")
    page.click("Send now")
    turn = emitter.wait_sent("/v1/turn", chat=chat, text="talk about something else")[0]
    assert turn["on_screen"] == list(emitter.runs[first_message(emitter, page)].asks)
    emitter.wait_sent("/v1/left", chat=chat)
    assert emitter.sent("/v1/reply", chat=chat) == []
    page.sees("Talking.")
    page.click("Stop")
    emitter.wait_sent("/v1/left", count=2, chat=chat)


def test_a_withdrawn_question_leaves_the_screen(page, emitter):
    page.send("choose")
    page.sees(TARGET)
    emitter.last_run().withdraw("answered in the Control UI: staging")
    page.sees("answered in the Control UI: staging")
    page.has_no_button("production")


def test_an_invalid_answer_is_explained_and_asked_again(page, emitter):
    emitter.refusals.append((422, {"error": {"code": "invalid_answer", "message": "target: too long"}}))
    page.send("words")
    page.type_other("first")
    page.sees("target: too long")
    page.type_other("second")
    page.sees('[{"text": "second"}]')


def test_the_emitter_restarts_while_a_card_is_open(page, emitter):
    page.send("choose")
    page.sees(TARGET)
    chat = page.chat
    emitter.stop()
    page.sees("askbus can't be reached")
    page.has_button("production")
    emitter.start()
    emitter.wait_sent("/v1/turn", count=2, chat=chat)
    page.has_button("production")
    page.click("production")
    page.sees('[{"index": 1}]')
    assert page.page.get_by_text("Working.").count() == 1
    turns = emitter.sent("/v1/turn", chat=chat)
    assert turns[0]["after"] is None and turns[-1]["after"] == "2"


def test_an_answer_given_while_the_emitter_is_away_arrives_once(page, emitter):
    page.send("choose")
    page.sees(TARGET)
    chat = page.chat
    emitter.stop()
    page.click("canary")
    page.sees("Your answer is kept")
    emitter.start()
    page.sees('[{"index": 2}]')
    replies = emitter.sent("/v1/reply", chat=chat)
    assert len({reply["reply"] for reply in replies}) == 1


def test_text_that_looks_like_an_event_is_text(page):
    page.send("raw")
    page.sees('data: {"event"')


def test_titles_and_tags_never_reach_the_agent(stack, emitter, page):
    page.send("hello there")
    page.sees("Say one of")
    page.page.wait_for_function("document.title.includes('hello')")
    assert {turn["text"] for turn in emitter.sent("/v1/turn", chat=page.chat)} == {"hello there"}


def test_an_image_is_passed_on(page, emitter):
    dot = base64.b64decode(
        "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
    )
    page.page.locator("#chat-container input[type=file]").first.set_input_files(
        [{"name": "dot.png", "mimeType": "image/png", "buffer": dot}]
    )
    page.page.wait_for_selector("#chat-container img[src]")
    page.send("look")
    page.sees("Say one of")
    turn = emitter.sent("/v1/turn", chat=page.chat)[0]
    assert turn["text"] == "look"
    assert [(a["name"], a["mime"]) for a in turn["attachments"]] == [("image-1.png", "image/png")]


@pytest.mark.parametrize("stream", [False, True])
def test_a_caller_without_a_browser_gets_text_and_answers_by_its_next_message(stack, emitter, stream):
    def say(text):
        body = {"model": MODEL_ID, "stream": stream, "messages": [{"role": "user", "content": text}]}
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {stack.alice.token}"}
        request = urllib.request.Request(f"{stack.web_url}/api/chat/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as response:
            raw = response.read().decode()
        if not stream:
            return json.loads(raw)["choices"][0]["message"]["content"]
        lines = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith("data: {")]
        return "".join(line["choices"][0]["delta"].get("content") or "" for line in lines)

    assert say("choose") == f"Working. {TARGET}\n1. staging\n2. production\n3. canary"
    assert say("2") == '[{"text": "2"}]'
    turn = emitter.sent("/v1/turn", text="choose")[-1]
    assert (turn["chat"], turn["surfaces"], turn["looking"]) == (None, ["text"], False)
    assert emitter.sent("/v1/left", message=turn["message"]) == []


def test_a_wrong_token_says_which_setting(stack, emitter, page):
    stack.set_valves(SERVICE_TOKEN="wrong")
    stack.set_valves(SERVICE_TOKEN="wrong")
    page.send("hello")
    page.sees("wrong token: set SERVICE_TOKEN")


def test_a_restart_of_open_webui_keeps_a_parked_question_and_stops_no_run(stack, emitter, tab):
    stack.set_valves(PARK_AFTER_S=1)
    talking = tab()
    talking.send("talk")
    talking.sees("Talking.")
    asking = tab()
    stack.set_valves(PARK_AFTER_S=600)
    asking.send("choose")
    emitter.wait_sent("/v1/shown", event="delivered", chat=asking.chat)
    stack.set_valves(PARK_AFTER_S=1)
    page = tab()
    page.send("choose")
    page.sees(TARGET)
    chat = page.chat
    page.close()
    emitter.wait_sent("/v1/shown", event="delivered", surface="durable", chat=chat)
    stack.restart("open-webui")
    page = tab(f"/c/{chat}")
    page.sees(TARGET)
    page.click("production")
    page.sees('[{"index": 1}]')
    assert emitter.sent("/v1/left", chat=talking.chat) == []
    # Nobody has the other card on screen any more, so that no message is taken as its answer unseen.
    asking.reload()
    asking.send("talk again")
    assert emitter.wait_sent("/v1/turn", chat=asking.chat, text="talk again")[0]["on_screen"] == []
