"""Keys and policies, the audit trail, and what the server does now."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Route, expect

from server.registry.audit import Actor, append
from tests.support.live import Live, live
from tests.system.conftest import ADMIN_KEY
from tests.system.console.conftest import complaints, go, opened

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def keyed(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server with modules and no key yet."""
    with live(checkpoint, tmp_path_factory.mktemp("keyed"), profiles={"fixed": {"shadow": ["one"]}}) as running:
        yield running


def test_a_key_is_made_shown_once_used_and_revoked(browser: Browser, keyed: Live) -> None:
    with opened(browser, keyed.url, ADMIN_KEY) as page:
        go(page, "Keys and policies")
        expect(page.locator(".empty")).to_contain_text("There is no key yet")
        page.get_by_role("link", name="New key").first.click()
        expect(page.locator("main")).to_contain_text("every request to this server needs one")
        page.get_by_label("Name", exact=True).fill("ide team")
        page.get_by_label("Enforced modules").fill("one=strong")
        page.get_by_label("Answers a minute").fill("60")
        page.get_by_label("At once").fill("5")
        page.get_by_label("It lasts").select_option("A day")
        page.get_by_role("button", name="Make the key").click()
        expect(page.get_by_role("alert").filter(has_text="enforced")).to_be_visible()
        page.get_by_label("Enforced modules").fill("one=0.5")
        assert complaints(page) == []
        page.get_by_role("button", name="Make the key").click()
        text = page.get_by_label("The key", exact=True).input_value()
        answer = keyed.complete(key=text, max_tokens=1)
        assert answer.headers["x-unbind-modules"].startswith("one@")
        page.get_by_role("link", name="I have kept it").click()
        line = page.get_by_role("row").filter(has_text="ide team").first
        expect(line).to_contain_text("60 answers a minute, 5 at once")
        expect(page.get_by_role("row").filter(has_text="Key ide team")).to_contain_text("Enforced: one at 0.5.")
        assert text not in page.content() and complaints(page) == []
        page.get_by_role("button", name="Revoke ide team").click()
        page.get_by_role("dialog").get_by_role("button", name="Revoke").click()
        expect(line).to_contain_text("revoked")
        assert keyed.complete(key=text).status == 401
        made = keyed.admin("/keys", {"name": "another window"}).body
        expect(page.get_by_role("button", name="Revoke another window")).to_be_visible()
        keyed.admin(f"/keys/{made['id']}", method="DELETE")
        expect(page.get_by_role("button", name="Revoke another window")).to_have_count(0)


def test_a_key_is_made_once_however_often_the_button_is_pressed(browser: Browser, keyed: Live) -> None:
    """Of two, the text of one was never shown, and it was good for ever."""
    with opened(browser, keyed.url, ADMIN_KEY) as page:
        page.goto(keyed.url + "/#/keys/new")
        page.get_by_label("Name", exact=True).fill("pressed twice")
        page.get_by_role("button", name="Make the key").dblclick()
        expect(page.get_by_label("The key", exact=True)).to_be_visible()
        page.get_by_role("link", name="I have kept it").click()
        expect(page.get_by_role("button", name="Revoke pressed twice")).to_be_visible()
        made = [key for key in keyed.admin("/keys").body["data"] if key["name"] == "pressed twice"]
        assert len(made) == 1


def test_a_key_has_ended_when_the_server_says_so(browser: Browser, keyed: Live) -> None:
    """The clock of who looks may be wrong: the page called a key expired that was good, and hid its rules."""
    keyed.admin("/keys", {"name": "lasting", "expires_in": 3600})
    with opened(browser, keyed.url, ADMIN_KEY) as page:
        page.clock.set_fixed_time("2099-01-01")
        go(page, "Keys and policies")
        expect(page.get_by_role("row").filter(has_text="lasting").first).to_contain_text("usable")
        expect(page.get_by_role("row").filter(has_text="Key lasting")).to_be_visible()


def test_rules_that_were_changed_in_another_window_are_not_written_over_unseen(browser: Browser, keyed: Live) -> None:
    with opened(browser, keyed.url, ADMIN_KEY) as page:
        page.goto(keyed.url + "/#/keys/profile")
        page.get_by_label("Name", exact=True).fill("team")
        page.get_by_role("button", name="Make the profile").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("What holds for the profile team")
        page.get_by_label("Enforced").fill("one, two=0.5")
        keyed.admin("/profiles/team", {"shadow": ["two"]}, "PUT")
        page.get_by_role("button", name="Save").click()
        expect(page.get_by_role("alert").filter(has_text="Somebody else changed these rules")).to_contain_text(
            "Measured only: two."
        )
        assert complaints(page) == []
        page.get_by_role("button", name="Write mine over them").click()
        line = page.get_by_role("row").filter(has_text="Profile team")
        expect(line).to_contain_text("Enforced: one, two at 0.5.")
        assert keyed.admin("/profiles/team").body["enforced"] == {"one": 1.0, "two": 0.5}
        page.get_by_role("link", name="Change what holds for team").click()
        page.get_by_label("Enforced").fill("one, lost")
        page.get_by_role("button", name="Save").click()
        expect(page.locator(".note.bad")).to_contain_text("Not active: lost.")
        go(page, "Keys and policies")
        expect(page.locator("main")).to_contain_text("New key")
        page.goto(keyed.url + "/#/keys")
        page.get_by_role("button", name="Delete the profile team").click()
        page.get_by_role("dialog").get_by_role("button", name="Delete").click()
        expect(line).to_have_count(0)
        expect(page.get_by_role("row").filter(has_text="Profile fixed")).to_contain_text("in the settings file")


def test_a_profile_that_two_pages_make_at_once_is_made_by_one(browser: Browser, keyed: Live) -> None:
    with opened(browser, keyed.url, ADMIN_KEY) as mine, opened(browser, keyed.url, ADMIN_KEY) as theirs:
        for page in (mine, theirs):
            page.goto(keyed.url + "/#/keys/profile")
            page.get_by_label("Name", exact=True).fill("both")
        theirs.get_by_role("button", name="Make the profile").click()
        theirs.get_by_label("Enforced").fill("one")
        theirs.get_by_role("button", name="Save").click()
        expect(theirs.get_by_role("row").filter(has_text="Profile both")).to_contain_text("Enforced: one.")
        mine.get_by_role("button", name="Make the profile").click()
        expect(mine.get_by_role("alert").filter(has_text="There is a profile both already")).to_be_visible()
        assert keyed.admin("/profiles/both").body["enforced"] == {"one": 1.0}
        mine.get_by_role("link", name="See what it says").click()
        expect(mine.get_by_label("Enforced")).to_have_value("one")
        keyed.admin("/profiles/both", method="DELETE")
        mine.get_by_role("button", name="Save").click()
        expect(mine.get_by_role("alert").filter(has_text="profile 'both' does not exist")).to_be_visible()


def test_the_trail_is_paged_filtered_checked_and_saved(browser: Browser, keyed: Live) -> None:
    with opened(browser, keyed.url, ADMIN_KEY) as page:
        with keyed.service.registry.transactions.change() as session:
            for _ in range(60):
                append(session, time.time(), Actor("admin", "test"), "rules.put", "global", {})
        go(page, "Audit")
        expect(page.locator(".note.good")).to_contain_text("The trail is whole")
        assert complaints(page) == []
        rows = page.locator("tbody tr")
        expect(rows).to_have_count(50)
        newest = int(rows.first.locator("th").inner_text())
        page.get_by_role("button", name="Older").click()
        expect(rows.first.locator("th")).to_have_text(str(newest - 50))
        page.get_by_role("button", name="Newer").click()
        expect(rows.first.locator("th")).to_have_text(str(newest))
        older = page.get_by_role("button", name="Older")
        held: list[Route] = []
        page.route(lambda url: f"after={newest - 49}" in url, lambda route: held.append(route), times=1)
        older.click()
        expect(older).to_be_disabled()  # until the page that it led to is there
        while not held:
            page.wait_for_timeout(10)
        held[0].continue_()
        expect(rows.first.locator("th")).to_have_text(str(newest - 50))
        page.get_by_label("What", exact=True).select_option("Keys")
        expect(page.locator("main")).not_to_contain_text("wrote rules")
        expect(rows.first).to_contain_text("key")
        with page.expect_download() as waiting:
            page.get_by_role("button", name="Export as JSON lines").click()
        lines = [json.loads(line) for line in Path(waiting.value.path()).read_text().splitlines()]
        assert lines == keyed.admin("/audit?action=key").body["data"] and lines
        page.get_by_label("By whom").fill("nobody")
        page.keyboard.press("Enter")
        expect(page.locator(".empty")).to_contain_text("No entry is like that")
        page.get_by_role("button", name="Show all").click()
        expect(rows).to_have_count(50)


def test_the_menu_leads_from_the_trail_of_one_subject_to_all_of_it(browser: Browser, keyed: Live) -> None:
    made = keyed.admin("/keys", {"name": "followed"}).body["id"]
    with opened(browser, f"{keyed.url}/#/audit/{made}", ADMIN_KEY) as page:
        expect(page.locator("tbody tr")).to_have_count(1)
        go(page, "Audit")
        expect(page.get_by_label("To what")).to_have_value("")
        expect(page.locator("tbody tr").nth(1)).to_be_visible()
        page.go_back()
        expect(page.get_by_label("To what")).to_have_value(made)
        expect(page.locator("tbody tr")).to_have_count(1)


def test_activity_counts_what_is_asked_and_tells_how_old_its_figures_are(browser: Browser, keyed: Live) -> None:
    with opened(browser, keyed.url, ADMIN_KEY) as page:
        go(page, "Activity")
        expect(page.locator(".empty")).to_contain_text("Reading the first figures")
        key = keyed.admin("/keys", {"name": "asker"}).body["key"]
        for _ in range(3):
            assert keyed.complete(key=key, unbind={"modules": ["two"]}).status == 200
        expect(page.locator("#age")).to_contain_text("read every 5 s")
        figures = page.get_by_role("region", name="Activity in figures")
        expect(figures.get_by_role("row").filter(has_text="generated")).not_to_contain_text("generated-")
        gates = page.get_by_role("region", name="Gates by module").get_by_role("row").filter(has_text="two")
        text = keyed.call("/metrics", key=ADMIN_KEY).raw.decode().splitlines()
        read = sum(
            float(line.split()[-1]) for line in text if line.startswith('unbind_gate_evaluations_total{module="two"')
        )
        expect(gates).to_contain_text(f"{read:,.0f}")
        expect(page.locator("main")).to_contain_text("does not tell the rates that modules were calibrated at")
        assert page.locator("canvas").count() == 5 and complaints(page) == []
        page.emulate_media(forced_colors="active")  # lines take their colours of what stands for them in the legend
        lines = page.locator(".chart").first.locator(".swatch")
        assert len(set(lines.evaluate_all("lines => lines.map(line => getComputedStyle(line).color)"))) == 2
        page.emulate_media(forced_colors="none")
        go(page, "Audit")
        go(page, "Activity")
        expect(page.locator("canvas").first).to_be_visible()  # what was read is still there


def test_the_lines_of_gates_are_held_against_calibrated_rates_where_these_are_told(
    browser: Browser, keyed: Live
) -> None:
    with opened(browser, keyed.url, ADMIN_KEY) as page:
        found = page.evaluate(
            """async text => {
                const { modules, rates, sample, shares } = await import("/console/app/pages/activity/metrics.js")
                const at = [0, 5, 10].map((second, number) => sample(text[number], second))
                const calibrated = at[2].calibrated
                return { modules: modules(at), rates: rates(at, "requests"), shares: shares(at, 'a"b\\\\c'), calibrated }
            }""",
            [
                _exposition(requests, read, opened_)
                for requests, read, opened_ in ((0, 0, 0), (10, 400, 2), (5, 800, 10))
            ],
        )
    assert found == {
        "modules": ['a"b\\c'],
        "rates": [None, 2, None],  # fewer than before: the server was started anew
        "shares": [None, 0.005, 0.0125],
        "calibrated": {'a"b\\c': {"retain": 0.001, "forget": 0.9}},
    }


def _exposition(requests: int, read: int, opened_: int) -> str:
    name = 'module="a\\"b\\\\c"'
    return (
        "# TYPE unbind_requests counter\n"
        f'unbind_requests_total{{route="/v1/completions",status="200"}} {requests}\n'
        f'unbind_gate_evaluations_total{{{name},phase="prefill"}} {read // 2}\n'
        f'unbind_gate_evaluations_total{{{name},phase="decode"}} {read // 2}\n'
        f'unbind_gate_activations_total{{{name},phase="decode"}} {opened_}\n'
        f'unbind_module_calibrated_rate{{{name},side="retain"}} 0.001\n'
        f'unbind_module_calibrated_rate{{{name},side="forget"}} 9e-1\n'
    )
