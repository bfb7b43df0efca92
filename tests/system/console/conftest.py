"""The console in a real browser: Chromium without a window, where it is installed (Debian: apt-get install chromium)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.system.conftest import ADMIN_KEY, CHROMIUM

WAIT_MS = 60_000
WIDTHS, THEMES = (1280, 390), ("light", "dark")
collect_ignore_glob = [] if CHROMIUM else ["test_*.py"]


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        # Chromium's own sandbox needs rights that containers seldom give; the page is ours and on loopback.
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield running
        running.close()


@contextmanager
def opened(browser: Browser, url: str, key: str | None = None, width: int = 1280) -> Iterator[Page]:
    """A page of the console, signed in with ``key``; an error of its script, or what its policy forbids, fails the test."""
    context = browser.new_context(viewport={"width": width, "height": 900})
    page = context.new_page()
    page.set_default_timeout(WAIT_MS)
    expect.set_options(timeout=WAIT_MS)
    broken: list[str] = []
    page.on("pageerror", lambda error: broken.append(str(error)))
    page.on("console", lambda said: broken.append(said.text) if "Content Security Policy" in said.text else None)
    page.goto(url)
    expect(page.locator("h1")).to_be_visible()
    if key is not None:
        sign_in(page, key)
    yield page
    context.close()
    assert not broken


def sign_in(page: Page, key: str = ADMIN_KEY) -> None:
    """Sign in where the page asks for a key, or by the button in its head."""
    if not page.locator("#key").count():
        page.get_by_role("button", name="Sign in").click()
    page.fill("#key", key)
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Sign out")).to_be_visible()


def go(page: Page, title: str) -> None:
    """To a page by the menu."""
    page.get_by_role("navigation").get_by_role("link", name=title).click()
    expect(page.get_by_role("heading", level=1)).to_contain_text(title)


def complaints(page: Page) -> list[str]:
    """What axe finds serious or critical on the page as it is, in both themes and at both widths."""
    found = []
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        for theme in THEMES:
            page.emulate_media(color_scheme=theme)
            for violation in Axe().run(page).response["violations"]:
                if violation["impact"] in ("serious", "critical"):
                    nodes = "; ".join(node["html"][:100] for node in violation["nodes"][:3])
                    found.append(f"{width} {theme} {violation['id']}: {violation['help']}: {nodes}")
        assert page.evaluate("document.documentElement.scrollWidth") <= width, f"wider than {width}"
    return found
