"""What stands around every page: the login, the menu, themes, and a server that is gone."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Route, expect

from tests.support.live import Live, live
from tests.system.conftest import ADMIN_KEY, serving
from tests.system.console.conftest import complaints, go, opened, sign_in

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def asking(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server that has a key, so that it asks for one."""
    with live(checkpoint, tmp_path_factory.mktemp("asking")) as running:
        running.admin("/keys", {"name": "first"})
        yield running


def test_without_a_key_there_is_nothing_but_the_login(browser: Browser, asking: Live) -> None:
    with opened(browser, asking.url + "/#/modules") as page:
        expect(page.get_by_role("heading", level=1)).to_have_text("Sign in")
        assert page.get_by_role("navigation").count() == 0 and "tiny" not in page.inner_text("body")
        assert complaints(page) == []
        for wrong, told in (("ubk_wrong", "does not know this key"), ("schlüssel", "ASCII")):
            page.fill("#key", wrong)
            page.keyboard.press("Enter")
            expect(page.get_by_role("alert").filter(has_text=told)).to_be_visible()
        sign_in(page)
        expect(page.get_by_role("heading", level=1)).to_have_text("Modules")  # where one was going
        page.reload()
        expect(page.get_by_role("heading", level=1)).to_have_text("Sign in")
        assert page.evaluate("[JSON.stringify(localStorage), JSON.stringify(sessionStorage), document.cookie]") == [
            "{}",
            "{}",
            "",
        ]


def test_a_key_that_may_infer_sees_no_page_of_the_administrator(browser: Browser, asking: Live) -> None:
    key = asking.admin("/keys", {"name": "coder", "scopes": ["inference"], "when_open": "refuse"}).body["key"]
    with opened(browser, asking.url, key) as page:
        expect(page.get_by_role("heading", level=1)).to_have_text("Playground")
        page.fill("#prompt", "def add(a, b):")
        page.fill("#tokens", "8")
        page.check("#modules input[value=one]")
        page.click("#go")
        expect(page.locator("#legend")).to_contain_text("told to keys with the scope 'report'")
        assert page.locator("#text1").inner_text() and page.locator(".open-3").count() == 0
        go(page, "Modules")
        expect(page.locator("main")).to_contain_text("needs a key with the scope 'admin'")
        page.fill("#key", key)
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert").filter(has_text="does not have the scope 'admin'")).to_be_visible()
        sign_in(page)
        expect(page.get_by_role("heading", level=1)).to_have_text("Modules")


def test_a_revoked_key_leads_back_to_the_login_and_says_why(browser: Browser, asking: Live) -> None:
    made = asking.admin("/keys", {"name": "passing", "scopes": ["admin", "inference"]}).body
    with opened(browser, asking.url, made["key"]) as page:
        go(page, "Modules")
        asking.admin(f"/keys/{made['id']}", method="DELETE")
        expect(page.get_by_role("heading", level=1)).to_have_text("Sign in")
        expect(page.get_by_role("alert").filter(has_text="the key 'passing' is revoked")).to_be_visible()


def test_who_signs_out_is_out_whatever_is_still_under_way(browser: Browser, asking: Live) -> None:
    """An answer that came later led back in: the pages and what they show were there again, under no key."""
    with opened(browser, asking.url, ADMIN_KEY) as page:
        go(page, "Modules")
        held: list[Route] = []
        page.route("**/console/state.json", lambda route: held.append(route))
        with page.expect_request("**/console/state.json"):
            pass
        page.get_by_role("button", name="Sign out").click()
        expect(page.get_by_label("API key")).to_be_visible()
        with page.expect_event("requestfinished"):
            held[0].continue_()
        page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        assert page.get_by_label("API key").count() == 1 and page.get_by_role("navigation").count() == 0


def test_the_menu_and_the_theme_work_by_keyboard(browser: Browser, asking: Live) -> None:
    with opened(browser, asking.url, ADMIN_KEY) as page:
        expect(page.locator("main")).to_be_focused()  # as the login is gone
        page.evaluate("document.body.tabIndex = -1; document.body.focus(); document.body.removeAttribute('tabindex')")
        page.keyboard.press("Tab")
        expect(page.get_by_role("link", name="Skip to the page")).to_be_focused()
        page.keyboard.press("Enter")
        expect(page.locator("main")).to_be_focused()
        background = "getComputedStyle(document.body).backgroundColor"
        light = page.evaluate(background)
        switch = page.get_by_role("button", name="Colours: ")
        switch.focus()
        page.keyboard.press("Enter")
        page.keyboard.press("Enter")
        expect(switch).to_have_text("Colours: dark")
        assert page.evaluate(background) != light
        page.get_by_role("link", name="Modules").focus()
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", level=1)).to_have_text("Modules")
        expect(page.locator("main")).to_be_focused()
        expect(page).to_have_title("Modules - Unbind")


def test_an_address_that_is_no_address_leaves_the_page_standing(browser: Browser, asking: Live) -> None:
    with opened(browser, asking.url + "/#/takedowns/%", ADMIN_KEY) as page:
        expect(page.get_by_role("alert").filter(has_text="no takedown '%'")).to_be_visible()
        page.goto(asking.url + "/#/%E0%A4%A")
        expect(page.get_by_role("heading", name="There is no such page")).to_be_visible()
        page.goto(asking.url + "/#/keys/rules/x")
        expect(page.get_by_role("heading", level=1)).to_have_text("What holds for x")
        page.goto(asking.url + "/#/keys/rules")
        expect(page.get_by_role("heading", level=1)).to_contain_text("Keys and policies")


def test_the_focus_is_never_with_nobody(browser: Browser, asking: Live) -> None:
    """A button keeps it while it is at work; where it is gone after that, the page has it."""
    made = asking.admin("/keys", {"name": "going"}).body
    focused = "document.activeElement.id || document.activeElement.textContent"
    with opened(browser, asking.url, ADMIN_KEY) as page:
        go(page, "Audit")
        expect(page.locator(".note.good")).to_be_visible()
        asked: list[Route] = []
        page.route("**/audit/verify", lambda route: asked.append(route))
        check = page.get_by_role("button", name="Check again")
        check.focus()
        page.keyboard.press("Enter")
        expect(check).to_have_attribute("aria-busy", "true")
        page.keyboard.press("Enter")
        page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        assert page.evaluate(focused) == "Check again"
        asked[0].continue_()
        expect(check).to_have_attribute("aria-busy", "false")
        assert len(asked) == 1 and page.evaluate(focused) == "Check again"
        go(page, "Keys and policies")
        page.get_by_role("button", name="Revoke going").focus()
        page.keyboard.press("Enter")
        page.get_by_role("dialog").get_by_role("button", name="Revoke").press("Enter")
        expect(page.get_by_role("button", name="Revoke going")).to_have_count(0)
        expect(page.locator("main")).to_be_focused()
        assert asking.complete(key=made["key"]).status == 401


def test_the_focus_comes_with_a_page_and_not_after_it(browser: Browser, asking: Live) -> None:
    """Whoever types as soon as a page stands must not lose the focus to it: no frame is painted between the link and the look."""
    led = """async hash => {
        const changed = new Promise(done => addEventListener("hashchange", done, { once: true }))
        document.querySelector("nav a").focus()
        location.hash = hash
        await changed
        return [document.querySelector("h1").textContent, document.activeElement.id]
    }"""
    with opened(browser, asking.url, ADMIN_KEY) as page:
        for hash, heading in (
            ("#/takedowns", "Takedowns"),
            ("#/takedowns/new", "New takedown"),
            ("#/keys", "Keys and policies"),
        ):
            assert page.evaluate(led, hash) == [heading, "main"]
        expect(page.get_by_role("link", name="New key")).to_be_visible()
        assert page.evaluate(led, "#/keys/new") == ["New key", "main"]
        page.get_by_role("button", name="Sign out").click()
        expect(page.get_by_label("API key")).to_be_focused()


def test_where_no_key_is_needed_the_page_opens_and_unknown_keys_are_refused(
    browser: Browser, checkpoint: Path, tmp_path: Path
) -> None:
    with live(checkpoint, tmp_path) as running, opened(browser, running.url) as page:
        expect(page.get_by_role("heading", level=1)).to_have_text("Playground")
        page.get_by_role("button", name="Sign in").click()
        expect(page.locator("#key")).to_be_focused()
        page.keyboard.type("ubk_wrong")
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert").filter(has_text="does not know this key")).to_be_visible()
        page.get_by_role("button", name="Go on without a key").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("Playground")
        running.admin("/keys", {"name": "first"})
        expect(page.get_by_role("alert").filter(has_text="asks for one now")).to_be_visible()


def test_a_server_that_is_killed_is_told_of_until_it_is_back(
    browser: Browser, checkpoint: Path, tmp_path: Path
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    first_one = serving(checkpoint, tmp_path / "first", worker=False, port=port)
    with first_one as first, opened(browser, first.url, ADMIN_KEY) as page:
        page.get_by_label("Prompt").fill("def kept(page):")
        first.process.kill()
        expect(page.get_by_role("alert").filter(has_text="does not answer")).to_be_visible()
        page.get_by_role("button", name="Complete").click()
        expect(page.get_by_text("There is no answer: the reason stands above.")).to_have_count(2)
        with live(checkpoint, tmp_path, port=port):
            expect(page.locator(".banner")).to_have_count(0)
            expect(page.get_by_label("Prompt")).to_have_value("def kept(page):")
            page.get_by_role("button", name="Complete").click()
            expect(page.locator("#legend")).to_contain_text("Both answers are identical.")


def test_times_say_their_zone_and_durations_carry(browser: Browser, asking: Live) -> None:
    """The same moment is another day elsewhere, and evidence is in UTC."""
    told = """async () => {
        const { duration, time } = await import("/console/app/format.js")
        return [time(1795897716), [0, 0.04, 9.99, 59.4, 59.7, 119.6, 3599.8, 7260].map(duration).join("; ")]
    }"""
    for zone, said in (
        ("Pacific/Kiritimati", "2026-11-29 10:28 UTC+14"),
        ("America/St_Johns", "2026-11-28 16:58 UTC-3:30"),
        ("UTC", "2026-11-28 20:28 UTC"),
    ):
        context = browser.new_context(timezone_id=zone)
        page = context.new_page()
        page.goto(asking.url)
        assert page.evaluate(told) == [said, "0 s; 0 s; 10 s; 59 s; 1 min 0 s; 2 min 0 s; 1 h 0 min; 2 h 1 min"]
        context.close()
