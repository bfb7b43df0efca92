"""The page of modules: whom each binds, and every change of its state with what the API answered."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from tests.server.api.admin.test_modules import adopt, applied
from tests.support.live import ADMIN_KEY, Live, live
from tests.system.console.conftest import complaints, go, opened

pytestmark = pytest.mark.slow


@pytest.fixture
def server(checkpoint: Path, tmp_path: Path) -> Iterator[Live]:
    with live(checkpoint, tmp_path) as running:
        yield running


@pytest.fixture
def page(browser: Browser, server: Live) -> Iterator[Page]:
    with opened(browser, server.url, ADMIN_KEY) as shown:
        go(shown, "Modules")
        yield shown


def row(page: Page, name: str) -> Locator:
    return page.get_by_role("region", name="Modules and guards").get_by_role("row").filter(has_text=name)


def press(page: Page, button: str, *, sure: bool = False) -> None:
    """Press a button, and ``sure`` the one of the question that follows."""
    page.get_by_role("button", name=button).click()
    if sure:
        page.get_by_role("dialog").get_by_role("button", name=button.split(maxsplit=1)[0]).click()


def test_an_active_module_without_a_scope_binds_nobody_until_it_is_enforced(page: Page, server: Live) -> None:
    expect(row(page, "one")).to_contain_text("Being active, it still protects nobody who does not ask for it.")
    assert applied(server.complete()) == []
    press(page, "Enforce one", sure=True)
    expect(page.locator("main")).to_contain_text("one is enforced by the policy 'global'")
    expect(row(page, "one")).to_contain_text("Binds every request (policy global)")
    expect(row(page, "two")).to_contain_text("protects nobody")
    assert applied(server.complete()) == ["one"]
    expect(row(page, "one")).to_contain_text("positions")  # of the request just now


def test_beside_others_in_force_the_joint_answer_is_shown(page: Page, server: Live) -> None:
    press(page, "Suspend one, version 1", sure=True)
    adopt(server, "promised", "global")
    expect(row(page, "promised")).to_contain_text("Binds every request to this service.")
    press(page, "Activate one, version 1")
    expect(page.locator("main")).to_contain_text("what all of them cost together is measured first")
    expect(page.locator("main")).to_contain_text("waiting for a worker")
    job = server.admin("/jobs?limit=1").body["data"][0]
    server.admin(f"/jobs/{job['id']}/cancel", method="POST")
    press(page, "Activate all the same")
    expect(page.locator("main")).to_contain_text("one, version 1, is active")


def test_a_measurement_is_followed_through_a_restart_of_the_server(page: Page, server: Live) -> None:
    """A server answers 503 until its model is loaded."""
    press(page, "Suspend one, version 1", sure=True)
    adopt(server, "promised", "global")
    expect(row(page, "promised")).to_be_visible()
    loading = {"status": 503, "json": {"error": {"message": "the model is being loaded", "code": "loading"}}}
    page.route("**/admin/v1/jobs/*", lambda route: route.fulfill(**loading), times=2)
    press(page, "Activate one, version 1")
    expect(page.locator("main")).to_contain_text("waiting for a worker")


def test_without_modules_the_page_says_what_to_do_next_and_tells_errors(
    browser: Browser, checkpoint: Path, tmp_path: Path
) -> None:
    with live(checkpoint, tmp_path, ()) as server, opened(browser, server.url, ADMIN_KEY) as page:
        expect(page.locator("main")).to_contain_text("No module is loaded")
        assert complaints(page) == []
        go(page, "Modules")
        expect(page.locator("main")).to_contain_text("There is no module yet")
        assert complaints(page) == []
        folder = server.service.settings.modules_dir
        folder.mkdir()
        (folder / "late.safetensors").write_bytes(b"no module")
        expect(page.locator("main")).to_contain_text("late.safetensors could not be loaded")


def test_what_came_of_an_action_is_seen_under_a_long_list_too(page: Page) -> None:
    page.set_viewport_size({"width": 1280, "height": 260})
    last = page.get_by_role("button", name="Suspend two, version 1")
    last.scroll_into_view_if_needed()
    expect(page.get_by_role("heading", level=1)).not_to_be_in_viewport()
    press(page, "Suspend two, version 1", sure=True)
    expect(page.get_by_text("two, version 1, is suspended")).to_be_in_viewport()


def test_a_module_may_be_called_as_what_every_object_has(browser: Browser, checkpoint: Path, tmp_path: Path) -> None:
    """The page said that it is enforced, and nothing was; in the playground it stood chosen, and did not apply."""
    name = "constructor"
    with live(checkpoint, tmp_path, (name,)) as server, opened(browser, server.url, ADMIN_KEY) as page:
        choice = page.get_by_label(name, exact=True)
        expect(choice).not_to_be_checked()
        choice.check()
        page.get_by_label("Prompt").fill("def add(a, b):")
        page.get_by_role("button", name="Complete").click()
        expect(page.get_by_text(f"applied: {name}@")).to_have_count(1)
        expect(page.locator("#legend")).to_be_visible()
        go(page, "Activity")
        expect(page.get_by_role("region", name="Gates by module")).to_contain_text(name)
        go(page, "Modules")
        press(page, f"Enforce {name}", sure=True)
        expect(row(page, name)).to_contain_text("Binds every request (policy global)")
        assert applied(server.complete()) == [name]


def test_a_name_of_any_length_stays_within_a_phone(page: Page, server: Live) -> None:
    adopt(server, "m" * 64, "global")
    go(page, "Playground")
    expect(page.locator("#modules")).to_contain_text("m" * 64)
    assert complaints(page) == []


def test_a_list_with_long_names_and_notices_is_read_without_scrolling_it(page: Page, server: Live) -> None:
    """Of names and claimants only the first letters could be read on a phone, or at a zoom of 400 %."""
    rows = [
        {
            "text": "def total(values):\n    found = 0\n    for value in values:\n        found += value\n    return found\n"
            * 4
        }
    ]
    options, notice = {"protect": "guard", "scope": "global"}, {"claimant": "c" * 1500}
    given = {"name": "n" * 40, "rows": rows, "options": options, "notice": notice}
    assert server.admin("/takedowns", given).status == 202
    beyond = "[...document.querySelectorAll('.scroll')].map(box => box.scrollWidth - box.clientWidth)"
    for title, region, widths in (("Takedowns", "Takedowns", (1280, 320)), ("Modules", "Modules and guards", (320,))):
        go(page, title)
        expect(page.get_by_role("region", name=region)).to_contain_text("n" * 40)
        for width in widths:
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate(beyond) == [0]


def _by_one(url: str) -> str:
    return url.replace("limit=1000", "limit=1")


def test_what_applies_to_whom_is_said_of_modules_on_later_pages_of_the_list_too(page: Page, server: Live) -> None:
    adopt(server, "zoned", "global")
    page.route("**/admin/v1/modules?*", lambda route: route.continue_(url=_by_one(route.request.url)))
    go(page, "Keys and policies")
    expect(page.get_by_role("row").filter(has_text="Every request")).to_contain_text("zoned")
