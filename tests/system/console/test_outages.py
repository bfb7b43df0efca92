"""A server that is slow, fails for a while or hangs: what pages show meanwhile, and that they go on by themselves."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tests.support.live import Live, live
from tests.system.conftest import ADMIN_KEY, serving
from tests.system.console.conftest import go, opened

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live(checkpoint, tmp_path_factory.mktemp("outages")) as running:
        yield running


def settled(page: Page) -> None:
    """Whatever the page does at once is done: two frames are painted."""
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


def asked_once(page: Page, name: str, address: str) -> list[Route]:
    """The questions of a page whose answers do not come, one in twenty seconds; further ones are added."""
    held: list[Route] = []
    page.route(address, lambda route: held.append(route))
    page.clock.install()
    go(page, name)
    page.clock.run_for(20_000)
    settled(page)
    assert len(held) == 1
    return held


def test_a_list_is_shown_by_a_server_that_is_slower_than_the_page_asks(browser: Browser, server: Live) -> None:
    """The next question discarded the answer to the one before it, so that there was none, and they heaped up at the server."""
    with opened(browser, server.url, ADMIN_KEY) as page:
        held = asked_once(page, "Takedowns", "**/admin/v1/takedowns?*")
        held[0].continue_()
        expect(page.get_by_role("heading", name="Nothing was asked to be forgotten yet")).to_be_visible()
        page.clock.run_for(20_000)
        settled(page)
        assert len(held) == 2  # and it is asked again, once


def test_a_server_that_hangs_is_told_of_until_it_goes_on(browser: Browser, checkpoint: Path, tmp_path: Path) -> None:
    """Its port takes connections, and nobody answers."""
    with serving(checkpoint, tmp_path, worker=False) as hanging, opened(browser, hanging.url, ADMIN_KEY) as page:
        os.kill(hanging.process.pid, signal.SIGSTOP)
        try:
            expect(page.get_by_role("alert").filter(has_text="does not answer")).to_be_visible()
        finally:
            os.kill(hanging.process.pid, signal.SIGCONT)
        expect(page.locator(".banner")).to_have_count(0)


@pytest.mark.parametrize(
    ("status", "kind", "told"),
    [
        (200, "text/html", "what answered was not this server"),
        (200, "application/json", "what answered was not this server"),
        (502, "text/html", "the server answered 502"),
    ],
)
def test_what_answers_in_the_servers_place_is_told_of_until_it_is_gone(
    browser: Browser, server: Live, status: int, kind: str, told: str
) -> None:
    """A proxy's login, or half of an answer, froze the page: nothing of it was ever shown again, the login neither."""
    with opened(browser, server.url, ADMIN_KEY) as page:
        seen = """() => {
            window.banners = 0
            new MutationObserver(all => { for (const one of all) window.banners += one.addedNodes.length })
                .observe(document.querySelector('[role=alert]'), { childList: true })
        }"""
        page.evaluate(seen)
        asked: list[Route] = []

        def instead(route: Route) -> None:
            asked.append(route)
            route.fulfill(status=status, body='{"model":', content_type=kind)

        page.route("**/console/state.json", instead)
        expect(page.locator(".banner")).to_contain_text(told)
        go(page, "Modules")
        expect(page.get_by_role("row").filter(has_text="one").first).to_be_visible()
        while len(asked) < 3:
            with page.expect_response("**/console/state.json"):
                pass
        settled(page)
        assert page.evaluate("window.banners") == 1  # it stays, and is read out once
        page.unroute("**/console/state.json")
        expect(page.locator(".banner")).to_have_count(0)


def test_figures_are_asked_for_one_time_after_the_other(browser: Browser, server: Live) -> None:
    with opened(browser, server.url, ADMIN_KEY) as page:
        asked_once(page, "Activity", "**/metrics")
        page.unroute("**/metrics")  # what is held goes on
        expect(page.locator("#age")).to_contain_text("Figures of")


@pytest.mark.parametrize("status", [0, 502])
@pytest.mark.parametrize(
    ("address", "asks", "shown"),
    [
        ("audit", "**/admin/v1/audit/verify", "text=The trail is whole"),
        ("keys/rules/profile:fixed", "**/admin/v1/policies/profile*", "text=While a gate is open"),
    ],
)
def test_what_is_asked_once_is_asked_again_after_an_outage(
    browser: Browser, server: Live, address: str, asks: str, shown: str, status: int
) -> None:
    def failing(route: Route) -> None:
        asked.append(route.request.url)
        if len(asked) > 1:
            route.continue_()
        elif status:
            route.fulfill(status=status, body="<html>Bad Gateway</html>", content_type="text/html")
        else:
            route.abort()

    asked: list[str] = []
    with opened(browser, server.url, ADMIN_KEY) as page:
        server.admin("/profiles/fixed", {}, "PUT")
        page.route(asks, failing)
        page.goto(f"{server.url}/#/{address}")
        expect(page.locator(shown)).to_be_visible()
        assert len(asked) == 2
