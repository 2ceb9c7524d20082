"""The full stack, and Open WebUI in front of a scripted emitter: each once for all tests that ask for it."""

import sys
from pathlib import Path

import pytest
from chat_page import ChatPage, context_of, launch
from playwright.sync_api import sync_playwright
from scripted_emitter import ScriptedEmitter
from web_only import NEW_CHAT, WebOnly

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "deploy" / "local"))
from stack import STATE, Stack  # noqa: E402


@pytest.fixture(scope="session")
def full_stack():
    """Every part, the real ones where there are real ones. Its folder, with all logs, stays afterwards."""
    # A busy machine takes up to two seconds from Open WebUI's stop to the message that follows it.
    stack = Stack(STATE / "e2e", fresh=True, collect_spans=True, stop_grace_ms=5000)
    stack.start()
    yield stack
    stack.stop()


@pytest.fixture(scope="session")
def stack(tmp_path_factory):
    stack = WebOnly(tmp_path_factory.mktemp("stack"))
    stack.start()
    yield stack
    stack.stop()


@pytest.fixture(scope="session")
def emitter(stack):
    emitter = ScriptedEmitter(stack.port("emitter-http"), stack.settings["emitter_token"]).start()
    yield emitter
    emitter.stop()


@pytest.fixture(scope="session")
def context(stack):
    with sync_playwright() as playwright:
        browser = launch(playwright)
        yield context_of(browser, stack.alice.token)
        browser.close()


@pytest.fixture
def tab(context, stack, emitter):
    """Opens tabs; each test begins with default valves and leaves no tab behind."""
    stack.set_valves()
    pages = []

    def open_tab(path=NEW_CHAT):
        pages.append(ChatPage(context, stack.web_url, path))
        return pages[-1]

    yield open_tab
    for page in pages:
        page.close()


@pytest.fixture
def page(request, context, stack, emitter):
    """A new chat with default valves, in a tab that the tests share: loading one takes seconds."""
    stack.set_valves()
    if not context.pages:
        ChatPage(context, stack.web_url, NEW_CHAT)
    page = ChatPage(context, stack.web_url, NEW_CHAT, context.pages[0])
    failed = request.session.testsfailed
    yield page
    if request.session.testsfailed > failed:
        page.close()
