"""Where a person can be when a question comes, in a real Open WebUI and a real Chromium."""

import base64

from scripted_emitter import prompt
from test_pipe import TARGET
from web_only import NEW_CHAT


def test_of_two_questions_at_once_the_second_comes_after_the_first(page, emitter):
    page.send("cards")
    page.sees("First question?")
    emitter.wait_sent("/v1/shown", event="waiting", surface="card", chat=page.chat)
    page.click("one")
    page.sees("Second question?")
    page.click("two")
    page.sees('[{"index": 1}]')
    page.sees_not("Waiting for your answer")


def test_a_follow_up_question_of_the_same_run(page):
    page.send("twice")
    page.sees("First question?")
    page.click("one")
    page.sees("Second question?")
    page.click("two")
    page.sees('[{"index": 1}]')
    page.sees_not("Waiting for your answer")


def test_a_question_for_a_chat_that_is_not_on_screen_is_told_and_waits_there(page, stack, emitter):
    stack.set_valves(PARK_AFTER_S=600, CHAT_SWITCH_AFTER_S=600)
    page.send("talk")
    page.sees("Talking.")
    chat, run = page.chat, emitter.last_run()
    page.go("/")
    page.page.wait_for_url(lambda url: "/c/" not in url)
    question = run.open_question([prompt("While you were away?", "one", "two")], "card", True)
    page.sees("While you were away?")
    page.go(f"/c/{chat}")
    page.has_button("two")
    page.click("two")
    emitter.until(lambda: question in run.decided)
    page.click("Stop")
    emitter.until(lambda: run.left)


def test_a_second_tab_has_the_card_when_the_first_is_closed(tab, stack, emitter):
    stack.set_valves(PARK_AFTER_S=600)
    first = tab()
    first.send("choose")
    first.sees(TARGET)
    second = tab(f"/c/{first.chat}")
    second.sees("Working.")
    first.close()
    second.has_button("production")
    second.click("production")
    second.sees('[{"index": 1}]')


def test_a_tab_that_is_closed_and_opened_again_in_time_has_the_card(tab, stack, emitter):
    stack.set_valves(PARK_AFTER_S=600)
    first = tab()
    first.send("choose")
    first.sees(TARGET)
    chat = first.chat
    first.close()
    again = tab(f"/c/{chat}")
    again.has_button("canary")
    again.click("canary")
    again.sees('[{"index": 2}]')
    assert emitter.sent("/v1/left", chat=chat) == []


def test_back_with_a_dialog_open_and_forward_again(tab, stack, emitter):
    stack.set_valves(PARK_AFTER_S=1, CHAT_SWITCH_AFTER_S=600)
    page = tab()
    page.send("hello")
    page.sees("Say one of")
    page.go("/")
    page.page.wait_for_url(lambda url: "/c/" not in url)
    page.send("secret")
    page.page.wait_for_selector("#event-confirm-input")
    chat = page.chat
    page.page.go_back()
    page.page.wait_for_url(lambda url: chat not in url)
    emitter.wait_sent("/v1/presence", chat=chat, other_chat=True)
    page.go(f"/c/{chat}")
    page.fill_secret("four")
    page.sees("[secret of 4 characters]")


def test_escape_is_a_cancel(page, emitter):
    page.send("secret")
    page.page.wait_for_selector("#event-confirm-input")
    emitter.wait_sent("/v1/shown", event="delivered", chat=page.chat)
    page.page.keyboard.press("Escape")
    page.sees("[user]")


def test_a_click_beside_a_dialog_is_a_cancel(page, emitter):
    page.send("secret")
    page.page.wait_for_selector("#event-confirm-input")
    emitter.wait_sent("/v1/shown", event="delivered", chat=page.chat)
    page.page.mouse.click(8, 780)
    page.sees("[user]")


def test_a_file_is_passed_on(page, emitter):
    page.page.locator("#chat-container input[type=file]").first.set_input_files(
        [{"name": "notes.txt", "mimeType": "text/plain", "buffer": b"ship it on Friday"}]
    )
    page.sees("notes.txt")
    page.send("read it")
    page.sees("Say one of")
    turn = emitter.sent("/v1/turn", chat=page.chat)[0]
    passed = [(a["name"], a["mime"], base64.b64decode(a["data"])) for a in turn["attachments"]]
    assert passed == [("notes.txt", "text/plain", b"ship it on Friday")]
    assert "ship it" not in turn["text"] and turn["text"].endswith("read it")


def test_a_regenerated_answer_is_a_message_of_its_own(page, emitter):
    page.send("hello there")
    page.sees("Say one of")
    chat = page.chat
    page.page.get_by_role("button", name="Regenerate").last.click()
    page.page.get_by_role("menuitem", name="Try Again").or_(page.page.get_by_text("Try Again")).first.click()
    turns = emitter.wait_sent("/v1/turn", count=2, chat=chat)
    assert turns[0]["message"] != turns[1]["message"] and turns[1]["text"] == "hello there"


def test_a_question_with_paragraphs_is_readable_in_the_chat(page):
    page.send("paragraphs")
    page.has_button("one")
    assert page.page.locator("#messages-container p", has_text="And a second line").count() >= 1
    page.click("one")
    page.sees('[{"index": 0}]')


def test_a_temporary_chat_has_the_card_too(tab, stack, emitter):
    page = tab(f"{NEW_CHAT}&temporary-chat=true")
    page.send("choose")
    page.sees(TARGET)
    page.click("production")
    page.sees('[{"index": 1}]')
