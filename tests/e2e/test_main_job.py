"""The main job: a person in Open WebUI, an agent in OpenClaw, a question between them. All parts are
real but the agent's model, which does what the person's message says."""

import json
import urllib.error
import urllib.request
import uuid

import pytest
from chat_page import ChatPage, context_of, launch
from open_webui import open_local
from playwright.sync_api import expect, sync_playwright
from stack import MODEL_ID
from waiting import until
from witnesses import Witnesses, steps

CITIES = ["Lisbon", "Oslo", "Kyoto"]
TOOLS = {"native": "ask_user", "plugin": "request_user_input", "mcp": "askbus__request_user_input"}
SERVICES = ["ask-router", "gateway-adapter", "owui-emitter"]
# Half a second a word.
SLOW_WORDS = 20
# Long enough for a card to be on screen.
DEADLINE_S = 8


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        browser = launch(playwright)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def witnesses(full_stack):
    return Witnesses(full_stack)


@pytest.fixture
def open_chat(full_stack, browser):
    """Opens a new chat of a person, in a browser profile of its own. The next test finds every part running."""
    contexts = []

    def open_chat(person):
        contexts.append(context_of(browser, person.token))
        return ChatPage(contexts[-1], full_stack.web_url, f"/?models={MODEL_ID}")

    yield open_chat
    for context in contexts:
        context.close()
    for part in full_stack.parts.values():
        if not part.running:
            part.start()


@pytest.fixture
def alice(open_chat, full_stack):
    return open_chat(full_stack.alice)


@pytest.fixture
def queue_off(full_stack):
    """Bob's messages are sent at once, also while an answer is on its way."""
    with_queue(full_stack, False)
    yield
    with_queue(full_stack, True)


def with_queue(stack, on):
    settings = {"ui": {"enableMessageQueue": on}}
    stack.web.call("POST", "/api/v1/users/user/settings/update", settings, stack.bob.token)


@pytest.fixture
def question():
    return new_question()


def new_question():
    return f"Where to, {uuid.uuid4().hex[:8]}?"


def ask(road, question, choices=(), **more):
    """What a person says so that the agent asks."""
    if road == "native":
        options = [{"label": choice} for choice in choices]
        args = {"questions": [{"id": "city", "header": "City", "question": question, "options": options}]}
    else:
        args = {"question": question} | ({"choices": choices} if choices else {})
    return f"CALL {TOOLS[road]} {json.dumps(args | more)}"


def answer_in(road, told):
    """The answer in the text of a tool result."""
    if road == "native":
        answer, status = told.split("\n\n", 1)
        assert json.loads(status)["status"] == "answered"
        return answer.removeprefix("City: ")
    return told


def got_once(witnesses, road, question, answer):
    """The agent got this answer, once, and the record says so; returns the record."""
    told = witnesses.wait_told(question)
    entry = witnesses.wait_returned(question)
    assert [answer_in(road, text) for text in witnesses.told(question)] == [answer], told
    assert entry["decision"]["outcome"]["status"] == "answered"
    assert entry["returned"]["result"] == "delivered", entry["returned"]
    assert entry["late_count"] == 0
    return entry


def session_of(page):
    return f"agent:main:owui-{page.chat}"


# ---- asking and answering --------------------------------------------------------------------


@pytest.mark.parametrize("road", TOOLS)
def test_a_click_answers(road, alice, witnesses, question):
    alice.send(ask(road, question, CITIES))
    alice.has_button("Oslo")
    alice.click("Oslo")
    alice.sees(f"{question} — Oslo")
    entry = got_once(witnesses, road, question, "Oslo")
    alice.sees("tool said:")
    alice.has_no_button("Lisbon")
    assert (entry["road"], entry["tool"]) == (road, TOOLS[road].removeprefix("askbus__"))
    assert entry["decision"]["by"]["reply"]["surface"] == "card"


@pytest.mark.parametrize("road", ["plugin", "mcp"])
def test_free_text_answers(road, alice, witnesses, question):
    alice.send(ask(road, question))
    alice.type_other("A house by the sea")
    alice.sees(f"{question} — A house by the sea")
    got_once(witnesses, road, question, "A house by the sea")
    alice.sees("tool said: A house by the sea")


@pytest.mark.parametrize("road", ["plugin", "mcp"])
def test_a_secret_reaches_the_agent_and_is_kept_nowhere_else(road, alice, full_stack, witnesses, question):
    secret = f"Canary-{uuid.uuid4().hex}"
    alice.send(ask(road, question, secret=True))
    alice.sees("The value goes to the agent only")
    alice.fill_secret(secret)
    alice.sees("answered (hidden)")
    entry = got_once(witnesses, road, question, secret)
    assert entry["decision"]["outcome"]["answers"] == {"answer": "hidden"}

    # The agent repeats what it got.
    alice.sees("tool said:")
    alice.has_no_button("Stop")
    alice.sees_not(secret)
    spans_of(witnesses, entry)
    ours = ["nats", "open-webui", "logs"]
    # What MCP returns lies in the Gateway's transcript; the plugin's results are handles there.
    theirs = ["openclaw"] if road == "plugin" else []
    but = () if road == "plugin" else ("logs/openclaw.log", "logs/openclaw-events.log")
    assert witnesses.files_with(secret, below=ours + theirs, but=but) == []
    # The same search finds what is no secret.
    found = witnesses.files_with(question, below=ours)
    assert any(name.startswith("nats/") for name in found), found
    assert any(name.startswith("open-webui/webui.db") for name in found), found


# ---- typed answers ---------------------------------------------------------------------------


def test_own_words_in_the_card_answer_a_question_with_choices(alice, witnesses, question):
    alice.send(ask("plugin", question, CITIES))
    alice.has_button("Oslo")
    alice.type_other("Reykjavik")
    got_once(witnesses, "plugin", question, "Reykjavik")
    alice.sees("tool said: Reykjavik")


@pytest.mark.parametrize("road", ["native", "plugin"])
def test_a_message_sent_now_answers(road, alice, witnesses, question):
    alice.send(ask(road, question, CITIES))
    alice.has_button("Oslo")
    witnesses.wait_shown(question)
    alice.send("Reykjavik")
    alice.click("Send now")
    entry = got_once(witnesses, road, question, "Reykjavik")
    assert entry["decision"]["by"]["reply"]["surface"] == "message"
    alice.sees("tool said:")
    alice.has_no_button("Lisbon")


def test_a_message_answers_with_the_queue_switched_off(queue_off, open_chat, full_stack, witnesses, question):
    bob = open_chat(full_stack.bob)
    bob.send(ask("plugin", question, CITIES))
    bob.has_button("Oslo")
    witnesses.wait_shown(question)
    bob.send("2")
    entry = got_once(witnesses, "plugin", question, "Oslo")
    assert entry["decision"]["by"]["reply"]["surface"] == "message"
    bob.sees("tool said: Oslo")


def test_a_caller_of_the_api_reads_the_question_and_answers_with_the_next_message(full_stack, witnesses, question):
    def say(text):
        body = {"model": MODEL_ID, "messages": [{"role": "user", "content": text}]}
        path = "/api/chat/completions"
        return full_stack.web.call("POST", path, body, full_stack.admin.api_key)["choices"][0]["message"]["content"]

    assert f"**{question}**\n1. Lisbon\n2. Oslo\n3. Kyoto" in say(ask("plugin", question, CITIES))
    assert "tool said: Kyoto" in say("3")
    entry = got_once(witnesses, "plugin", question, "Kyoto")
    assert [step["surface"] for step in steps(entry, "delivered")] == ["text"]


# ---- no question pending ---------------------------------------------------------------------


def test_a_message_sent_now_steers_the_run(alice, witnesses):
    steers(alice, witnesses, lambda: alice.click("Send now"))


def test_a_message_steers_the_run_with_the_queue_switched_off(queue_off, open_chat, full_stack, witnesses):
    steers(open_chat(full_stack.bob), witnesses, lambda: None)


def steers(page, witnesses, send):
    wish = f"and then {uuid.uuid4().hex[:8]}"
    page.send(f"SLOW {SLOW_WORDS}")
    page.sees("w1 ")
    page.send(wish)
    send()
    page.sees(f"echo: {wish}")
    # The agent said all that it had to say before it read the wish.
    page.sees(f"w{SLOW_WORDS - 1}")
    [request] = [r for r in witnesses.asked_of_model() if wish in json.dumps(r)]
    assert f"w{SLOW_WORDS - 1}" in json.dumps(request)


def test_stop_ends_the_run(alice, witnesses):
    alice.send("SLOW 600")
    alice.sees("w1 ")
    session = session_of(alice)
    assert witnesses.is_running(session)
    alice.click("Stop")
    until("the end of the run", lambda: not witnesses.is_running(session))
    alice.has_no_button("Stop")


def test_stop_cancels_the_question(alice, full_stack, witnesses, question):
    alice.send(ask("plugin", question, CITIES))
    alice.has_button("Oslo")
    witnesses.wait_shown(question)
    # The card hides the button.
    full_stack.web.call("POST", f"/api/tasks/chat/{alice.chat}/stop", {}, full_stack.alice.token)
    entry = witnesses.wait_returned(question)
    assert entry["decision"]["outcome"] == {"status": "cancelled", "reason": "stop"}
    alice.has_no_button("Oslo")
    until("the end of the run", lambda: not witnesses.is_running(session_of(alice)))
    # The agent may read why, but says nothing more.
    assert all('"reason":"stop"' in told for told in witnesses.told(question))
    alice.sees_not("tool said:")


# ---- other outcomes --------------------------------------------------------------------------


@pytest.mark.parametrize("road", ["plugin", "mcp"])
def test_a_deadline_passes(road, alice, witnesses, question):
    alice.send(ask(road, question, CITIES, timeout_seconds=DEADLINE_S))
    alice.has_button("Oslo")
    alice.sees(f"{question} — Expired")
    alice.has_no_button("Oslo")
    [told] = witnesses.wait_told(question)
    assert "User did not respond" in told and '"status":"expired"' in told
    entry = witnesses.wait_returned(question)
    assert entry["deadline"] - entry["asked_at"] == DEADLINE_S * 1000
    assert entry["decision"]["outcome"]["status"] == "expired"
    assert entry["decision"]["delivered"] == "yes"
    assert entry["decision"]["at"] >= entry["deadline"]


def test_an_answer_given_in_the_gateway_first_takes_the_card_away(alice, witnesses, question):
    alice.send(ask("native", question, CITIES))
    alice.has_button("Oslo")
    entry = witnesses.wait_shown(question)
    answer_at_gateway(witnesses, entry, "Kyoto")
    alice.sees(f"{question} — Answered in the Control UI: Kyoto")
    alice.has_no_button("Oslo")
    alice.sees("tool said:")
    entry = got_once(witnesses, "native", question, "Kyoto")
    assert entry["decision"]["by"]["reply"]["surface"] == "gateway"


def test_an_answer_given_in_the_gateway_first_overrules_ours(alice, full_stack, witnesses, question):
    alice.send(ask("native", question, CITIES))
    alice.has_button("Oslo")
    entry = witnesses.wait_shown(question)
    full_stack["gateway-adapter"].stop()
    alice.click("Oslo")
    alice.sees(f"{question} — Oslo")
    witnesses.wait_question(question, lambda entry: entry["state"] == "decided")
    answer_at_gateway(witnesses, entry, "Kyoto")
    full_stack["gateway-adapter"].start()
    alice.sees("Answered in the Control UI: Kyoto")
    alice.sees("tool said:")
    entry = witnesses.wait_returned(question)
    assert entry["returned"]["result"] == "overruled"
    assert entry["returned"]["outcome"]["answers"] == {"city": {"given": {"options": [2]}}}
    assert [answer_in("native", text) for text in witnesses.told(question)] == ["Kyoto"]


def answer_at_gateway(witnesses, entry, answer):
    """What another client of the Gateway does, its Control UI for example."""
    question = entry["key"].split(".")[-1].replace("=3A", ":")
    [listed] = [one for one in witnesses.gateway("question.list")["questions"] if one["id"] == question]
    answers = {listed["questions"][0]["questionId"]: [answer]}
    witnesses.gateway("question.resolve", id=question, answers={"answers": answers}, resolvedBy="another client")


# ---- people ----------------------------------------------------------------------------------


def test_a_reload_keeps_the_card(alice, witnesses, question):
    alice.send(ask("plugin", question, CITIES))
    alice.has_button("Oslo")
    assert alice.chat
    alice.reload()
    alice.has_button("Oslo")
    alice.click("Oslo")
    got_once(witnesses, "plugin", question, "Oslo")
    alice.sees("tool said: Oslo")


def test_two_people_get_their_own_answers(open_chat, full_stack, witnesses):
    people = [(open_chat(full_stack.alice), new_question(), "Oslo"), (open_chat(full_stack.bob), new_question(), "Kyoto")]
    for page, question, _ in people:
        page.send(ask("plugin", question, CITIES))
    for page, question, answer in people:
        page.has_button(answer)
        witnesses.wait_shown(question)
    for page, _, answer in people:
        page.click(answer)
    for page, question, answer in people:
        entry = got_once(witnesses, "plugin", question, answer)
        assert entry["decision"]["by"]["reply"]["responder"]["chat"] == page.chat
        page.sees(f"tool said: {answer}")


def test_a_reply_of_another_user_is_refused(alice, full_stack, witnesses, question):
    alice.send(ask("plugin", question, CITIES))
    alice.has_button("Oslo")
    entry = witnesses.wait_shown(question)
    body = {
        "reply": uuid.uuid4().hex,
        "chat": alice.chat,
        "message": "none",
        "user": {"id": full_stack.bob.id, "name": "Bob"},
        "question": entry["key"].split(".")[-1],
        "surface": "card",
        "answers": {"answer": {"index": 0}},
    }
    status, answer = post_to_emitter(full_stack, "/v1/reply", body)
    assert (status, answer["error"]["code"]) == (403, "wrong_user")
    assert "another user" in answer["error"]["message"]
    alice.click("Oslo")
    entry = got_once(witnesses, "plugin", question, "Oslo")
    assert entry["decision"]["by"]["reply"]["responder"]["user"] == full_stack.alice.id


def post_to_emitter(stack, path, body):
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {stack.settings['emitter_token']}"}
    request = urllib.request.Request(stack.emitter_url + path, json.dumps(body).encode(), headers)
    try:
        with open_local(request, timeout=60) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


# ---- deaths ----------------------------------------------------------------------------------


@pytest.mark.parametrize("answered", ["while it is away", "after its return"])
@pytest.mark.parametrize(
    "road,service",
    [*(("plugin", service) for service in SERVICES), ("native", "gateway-adapter"), ("mcp", "gateway-adapter")],
)
def test_a_service_is_killed_while_a_question_is_on_screen(
    road, service, answered, alice, full_stack, witnesses, question
):
    alice.send(ask(road, question, CITIES))
    alice.has_button("Oslo")
    witnesses.wait_shown(question)
    full_stack[service].kill()
    if answered == "while it is away":
        alice.click("Oslo")
        full_stack[service].start()
    else:
        full_stack[service].start()
        alice.click("Oslo")
    got_once(witnesses, road, question, "Oslo")
    alice.sees("tool said:")
    alice.has_no_button("Lisbon")
    expect(alice.page.get_by_text("tool said:")).to_have_count(1)


@pytest.mark.parametrize("end", ["restart", "kill"])
def test_nats_ends_while_a_question_is_on_screen(end, alice, full_stack, witnesses, question):
    alice.send(ask("plugin", question, CITIES))
    alice.has_button("Oslo")
    witnesses.wait_shown(question)
    nats = full_stack["nats"]
    if end == "kill":
        nats.kill()
    else:
        nats.stop()
    alice.click("Oslo")
    nats.start()
    got_once(witnesses, "plugin", question, "Oslo")
    alice.sees("tool said: Oslo")
    expect(alice.page.get_by_text("tool said:")).to_have_count(1)


# ---- the record ------------------------------------------------------------------------------


def test_a_whole_life_is_read_back_and_is_one_trace(alice, full_stack, witnesses, question):
    alice.send(ask("plugin", question, CITIES))
    alice.has_button("Oslo")
    witnesses.wait_shown(question)
    alice.click("Oslo")
    entry = got_once(witnesses, "plugin", question, "Oslo")

    shown = full_stack.askctl("show", entry["key"])
    said = ["by request_user_input (plugin), 3 options", "card, by rule", f"card, chat {alice.chat}",
            'answered "Oslo" by Alice on card', "the agent has it"]  # fmt: skip
    places = [shown.find(text) for text in said]
    assert -1 not in places and places == sorted(places), shown

    spans = spans_of(witnesses, entry)
    assert {span["service"] for span in spans} == set(SERVICES)
    assert len({span["trace_id"] for span in spans}) == 1
    known = {span["span_id"] for span in spans}
    roots = [span for span in spans if span["parent_span_id"] not in known]
    assert [span["parent_span_id"] for span in roots] == [""], roots


def spans_of(witnesses, entry):
    """All spans that name the question, once each service has sent some."""
    question = entry["key"].split(".")[-1]

    def spans():
        found = [span for span in witnesses.spans() if span["attributes"].get("askbus.question") == question]
        return found if {span["service"] for span in found} >= set(SERVICES) else None

    return until(f"spans of {', '.join(SERVICES)} that name {question}", spans)
