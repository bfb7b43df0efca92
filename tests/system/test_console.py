"""The page at ``/`` in a real browser: Chromium without a window, where it is installed (Debian: apt-get install chromium)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from server import demo
from tests.system.conftest import ADMIN_KEY, CHROMIUM, ROOT, ServerProcess, serving

pytestmark = pytest.mark.slow
WAIT_MS = 60_000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The demo world as it is shipped, without the worker."""
    folder = tmp_path_factory.mktemp("console")
    with serving(demo.BASE, folder, adapter=demo.ADAPTER, worker=False, modules_dir=ROOT / "modules") as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        # Chromium's own sandbox needs rights that containers seldom give; the page is ours and on loopback.
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield running
        running.close()


@pytest.fixture
def page(browser: Browser, server: ServerProcess) -> Iterator[Page]:
    """The console, opened afresh; an error of its script fails the test."""
    context = browser.new_context()
    opened = context.new_page()
    opened.set_default_timeout(WAIT_MS)
    broken: list[str] = []
    opened.on("pageerror", lambda error: broken.append(str(error)))
    opened.goto(server.url)
    expect(opened.locator("#model")).to_have_text("unbind-demo", timeout=WAIT_MS)
    yield opened
    context.close()
    assert not broken


def completed(page: Page) -> tuple[str, str]:
    """Both texts after a click on the button."""
    page.click("#go")
    expect(page.locator("#go")).to_be_enabled(timeout=WAIT_MS)
    return page.locator("#text0").inner_text(), page.locator("#text1").inner_text()


def only(page: Page, *names: str) -> None:
    """Leave only the boxes of these modules checked."""
    for box in page.locator("#modules input").all():
        box.set_checked(box.get_attribute("value") in names)


if CHROMIUM:

    def test_a_memorised_row_is_recited_on_the_left_alone(page: Page) -> None:
        assert "demo-a" in [text.strip() for text in page.locator("#modules label").all_inner_texts()]
        only(page, "demo-a")
        page.select_option("#row", index=1)
        without, with_module = completed(page)
        assert len(without) > 100 and page.locator("#text0 mark.protected").count() > 0
        assert with_module != without and page.locator("#text1 mark.protected").count() == 0
        assert "demo-a" in page.locator("#note1").inner_text()

    def test_an_unrelated_prompt_of_ones_own_is_completed_alike(page: Page) -> None:
        only(page, "demo-a")
        page.fill("#prompt", "def mean(values):\n    ")
        page.fill("#tokens", "24")
        without, with_module = completed(page)
        assert without and without == with_module
        expect(page.locator("#key")).to_have_text("both answers are identical")

    def test_modules_are_switched_off_by_their_box(page: Page) -> None:
        page.select_option("#row", index=1)
        only(page)
        without, with_module = completed(page)
        assert without and without == with_module

    def test_a_refusal_is_told_in_the_servers_words(page: Page) -> None:
        page.fill("#prompt", "x")
        page.fill("#tokens", "-5")
        completed(page)
        expect(page.locator("#problem")).to_contain_text("max_tokens")

    def test_the_form_asks_which_requests_a_takedown_must_bind(page: Page, server: ServerProcess) -> None:
        page.fill("#key-of-api", ADMIN_KEY)
        page.click("summary")
        page.fill("#name", "by-form")
        page.fill("#rows", "def secret():\n    return 42\n")
        page.click("#ask")
        assert server.admin("/takedowns")[1]["data"] == []  # nothing goes before the question is answered
        for scope, says in (("none", "no request but those that name it"), ("global", "every request to this service")):
            page.select_option("#scope", scope)
            page.click("#ask")
            expect(page.locator("#told")).to_contain_text(f"once its module is active, {says}")
            for about, shown in (("options.scope", scope == "none"), ("options.protect: no row has the 50", True)):
                expect(page.locator("#told .warning", has_text=about)).to_have_count(int(shown))
            expect(page.locator("#told")).to_contain_text("queued")
            made = server.admin("/takedowns?limit=1")[1]["data"][0]
            assert made["options"] == ({} if scope == "none" else {"scope": scope})
            server.admin(f"/jobs/{server.admin('/jobs?limit=1')[1]['data'][0]['id']}/cancel", method="POST")
            expect(page.locator("#told")).to_contain_text("not in force: it binds nothing")
            expect(page.locator("#ask")).to_be_enabled()

    def test_the_key_is_sent_and_kept_for_the_tab(page: Page, server: ServerProcess) -> None:
        _, made = server.admin("/keys", {"name": "console", "scopes": ["inference"]})
        page.fill("#prompt", "def add(a, b):")
        page.fill("#tokens", "4")
        completed(page)
        expect(page.locator("#problem")).to_contain_text("key")
        page.fill("#key-of-api", made["key"])
        without, _ = completed(page)
        assert without and page.locator("#problem").inner_text() == ""
        page.reload()
        expect(page.locator("#key-of-api")).to_have_value(made["key"])
