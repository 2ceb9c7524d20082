"""A person in front of Open WebUI, in a real Chromium."""

import json
import re
import sys
from pathlib import Path

from playwright.sync_api import expect

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "deploy" / "local"))
import peers  # noqa: E402

ARGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
]
LONG_MS = 120_000


def launch(playwright):
    return playwright.chromium.launch(executable_path=str(peers.chromium()), headless=True, args=ARGS)


def context_of(browser, token):
    """A browser profile that is signed in."""
    context = browser.new_context(viewport={"width": 1100, "height": 800})
    # The version keeps the "what's new" dialog away.
    context.add_init_script(
        f"localStorage.setItem('token', {json.dumps(token)}); localStorage.setItem('version', '0.12.4');"
    )
    context.set_default_timeout(LONG_MS)
    expect.set_options(timeout=LONG_MS)
    return context


class ChatPage:
    """One tab. `path` is a chat (`/c/<id>`) or a new one (`/?models=<id>`)."""

    def __init__(self, context, url, path, page=None):
        """A new tab, or `page`, which shows the application already."""
        if page:
            self.page = page
            self.go(path)
            self.page.wait_for_url(url + path)
            expect(self.page.locator(".user-message")).to_have_count(0)
        else:
            self.page = context.new_page()
            self.page.goto(url + path)
            self.page.wait_for_selector("#chat-input")

    @property
    def chat(self):
        self.page.wait_for_url(re.compile(r"/c/"))
        return self.page.url.split("/c/")[1].split("?")[0]

    def send(self, text):
        self.page.click("#chat-input")
        self.page.keyboard.type(text)
        self.page.keyboard.press("Enter")

    def sees(self, text):
        expect(self.page.get_by_text(text).last).to_be_visible()

    def sees_not(self, text):
        expect(self.page.get_by_text(text)).to_have_count(0)

    def click(self, name):
        self.page.get_by_role("button", name=name).last.click()

    def has_button(self, name):
        expect(self.page.get_by_role("button", name=name).last).to_be_visible()

    def has_no_button(self, name):
        expect(self.page.get_by_role("button", name=name)).to_have_count(0)

    def type_other(self, text):
        self.page.get_by_placeholder("Type your answer").fill(text)
        self.page.keyboard.press("Enter")

    def fill_secret(self, text):
        self.page.wait_for_selector("#event-confirm-input")
        self.page.fill("#event-confirm-input", text)
        self.click("Confirm")

    def go(self, path):
        """Follows a link inside the app, without loading the page anew."""
        self.page.evaluate(
            "u => { const a = document.createElement('a'); a.href = u; document.body.append(a); a.click(); a.remove() }",
            path,
        )

    def reload(self):
        self.page.reload()
        self.page.wait_for_selector("#chat-input")

    def close(self):
        self.page.close()
