"""A takedown's whole path on the page, with a real fit of rows that the model recites: by mouse, and by keyboard alone.

The tests go on from each other: the one by keyboard uses the module that was fitted in the one by mouse.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from server.evidence.signing import read, verify
from tests.support.memorising import forget_rows, retain_rows, write_rows
from tests.system.conftest import ADMIN_KEY, ServerProcess, serving
from tests.system.console.conftest import complaints, go, opened

pytestmark = pytest.mark.slow
ROWS = forget_rows()
PROMPT, PROTECTED = ROWS[0]["prompt"], ROWS[0]["continuation"]
ENDED_MS = 300_000  # for a fit on a machine that has other work
STAGES = (
    "Ask whether the model knows the rows",
    "Make the module",
    "Measure before and after",
    "Measure the cost beside the other modules",
    "Write the module",
)
WATCH = """() => {
    const seen = window.seen = []
    new MutationObserver(() => {
        const now = document.querySelector(".stages [aria-current=step] span")?.textContent
        if (now && seen.at(-1) !== now) seen.push(now)
    }).observe(document.body, { subtree: true, childList: true, attributes: true })
}"""
FOCUSED = """() => {
    const at = document.activeElement
    return (at.labels?.[0]?.textContent ?? at.getAttribute("aria-label") ?? at.textContent).trim()
}"""


@pytest.fixture(scope="module")
def server(memorised: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that asks for keys, and a worker that may die once on a job."""
    folder = tmp_path_factory.mktemp("path")
    retain = write_rows(folder / "retain.jsonl", retain_rows())
    test = write_rows(folder / "test.jsonl", retain_rows(6))
    with serving(memorised, folder, retain=retain, retain_test=test, max_attempts=1) as running:
        assert running.admin("/keys", {"name": "clients"})[0] == 201
        yield running


def jsonl(rows: list[dict[str, str]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def saved(page: Page, button: str) -> str:
    """The text of the file that a button has the browser save."""
    with page.expect_download() as waiting:
        page.get_by_role("button", name=button).click()
    return Path(waiting.value.path()).read_text()


def line(page: Page, name: str) -> Locator:
    """A module's line on the page Modules."""
    return page.get_by_role("region", name="Modules and guards").get_by_role("row").filter(has_text=name)


def answered(page: Page) -> tuple[str, str]:
    """Both texts of the playground, once both are there."""
    expect(page.locator("#legend")).to_be_visible()
    return page.locator("#text0").inner_text(), page.locator("#text1").inner_text()


def wait_for_the_end(page: Page) -> None:
    expect(page.get_by_role("status")).to_have_text("The job succeeded.", timeout=ENDED_MS)


def test_by_mouse(browser: Browser, server: ServerProcess) -> None:
    with opened(browser, server.url) as page:
        expect(page.get_by_role("heading", level=1)).to_have_text("Sign in")
        page.get_by_label("API key").fill(ADMIN_KEY)
        page.get_by_role("button", name="Sign in").click()
        go(page, "Takedowns")
        expect(page.locator(".empty")).to_contain_text("New takedown")
        page.get_by_role("link", name="New takedown").first.click()
        page.get_by_label("Rows or code").fill(jsonl(ROWS))
        page.get_by_label("Name", exact=True).fill("set-t")
        page.get_by_label("Whom it binds").select_option("named")
        page.get_by_text("On whose word").click()
        page.get_by_label("Claimant").fill("Example Ltd")
        page.get_by_role("button", name="Dry run").click()
        expect(page.get_by_role("region", name="What it will take")).to_contain_text("6 rows")
        assert complaints(page) == [] and server.admin("/takedowns")[1]["data"] == []
        page.evaluate(WATCH)
        page.get_by_role("button", name="Submit").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("set-t")
        wait_for_the_end(page)
        seen = page.evaluate("window.seen")
        assert [stage for stage in STAGES if stage in seen] == seen and {*STAGES[1:3]} <= {*seen}
        expect(page.locator(".stages li.good")).to_have_count(len(STAGES))
        expect(page.locator("main")).to_contain_text("The module was made and is active.")
        report = page.get_by_role("region", name="Before and after").first
        expect(report).to_contain_text("On average 100 % of a row came back before, and ")
        assert complaints(page) == []
        document = read(saved(page, "Signed document"))
        verify(document)
        assert document["payload"]["takedown"]["notice"] == {"claimant": "Example Ltd"}
        assert "<h1>Takedown set-t</h1>" in saved(page, "Page for people")

        page.get_by_role("region", name="Module and guard").get_by_role("link", name="module").click()
        expect(line(page, "set-t")).to_contain_text("Being active, it still protects nobody who does not ask for it.")
        expect(line(page, "set-t")).to_contain_text("protected rows: open at ")
        expect(page.get_by_role("heading", level=2, name="set-t, version 1")).to_be_visible()
        assert complaints(page) == []
        go(page, "Playground")
        page.get_by_label("Prompt").fill(PROMPT)
        page.get_by_label("set-t", exact=True).check()
        page.get_by_role("button", name="Complete").click()
        without, with_module = answered(page)
        assert without.startswith(PROTECTED) and not with_module.startswith(PROTECTED)
        lit = page.locator("#text1 .open-1, #text1 .open-2, #text1 .open-3")
        assert lit.count() > 0 and page.locator("#text0").locator(".open-1, .open-2, .open-3").count() == 0
        lit.first.hover()
        expect(page.locator(".readout").nth(1)).to_contain_text("set-t open, activation")

        go(page, "Modules")
        page.get_by_role("button", name="Suspend set-t, version 1").click()
        page.get_by_role("dialog").get_by_role("button", name="Suspend").click()
        expect(page.locator("main")).to_contain_text("set-t, version 1, is suspended. It binds nothing while")
        go(page, "Playground")
        expect(page.locator(".empty")).to_contain_text("No module is loaded")
        go(page, "Modules")
        page.get_by_role("button", name="Shadow set-t, version 1").click()
        expect(page.locator("main")).to_contain_text("is shadow. It binds nothing: it is measured and never applied")
        go(page, "Playground")
        page.get_by_label("Prompt").fill(PROMPT)
        page.get_by_label("set-t", exact=True).check()
        page.get_by_role("button", name="Complete").click()
        without, with_module = answered(page)
        assert with_module == without and without.startswith(PROTECTED)
        expect(page.locator("main")).to_contain_text("measured only (shadow)")

        go(page, "Modules")
        page.get_by_role("button", name="Activate set-t, version 1").click()
        expect(page.locator("main")).to_contain_text("is active. It binds no request but those that name it")
        page.goto(server.url + "/#/takedowns/new")
        page.get_by_label("Rows or code").fill(jsonl(ROWS[:3]))
        page.get_by_label("Name", exact=True).fill("set-t")
        page.get_by_label("Whom it binds").select_option("named")
        page.get_by_text("How it holds").click()
        page.get_by_label("It is the next version").check()
        page.get_by_role("button", name="Submit").click()
        wait_for_the_end(page)
        go(page, "Modules")
        page.get_by_role("button", name="Roll back set-t, version 2").click()
        page.get_by_role("dialog").get_by_role("button", name="Roll back").click()
        expect(page.locator("main")).to_contain_text("set-t, version 1, is active")
        assert server.admin("/modules/set-t")[1]["version"] == 1
        go(page, "Audit")
        expect(page.locator(".note.good")).to_contain_text("The trail is whole")
        rows = page.get_by_role("region", name="Audit trail").get_by_role("row")
        expect(rows.nth(1)).to_contain_text("activated a module")
        expect(rows.filter(has_text="suspended a module")).to_have_count(1)
        expect(rows.filter(has_text="asked for a takedown")).to_have_count(2)


def test_by_keyboard_alone(browser: Browser, server: ServerProcess) -> None:
    with opened(browser, server.url) as page:
        press = page.keyboard.press

        def to(name: str, *keys: str) -> None:
            """By the Tab key to the control of that name, and there these keys."""
            for _ in range(80):
                press("Tab")
                if page.evaluate(FOCUSED).startswith(name):
                    break
            else:
                raise AssertionError(f"the Tab key does not lead to {name}")
            for key in keys:
                press(key)

        expect(page.get_by_label("API key")).to_be_focused()
        page.keyboard.type(ADMIN_KEY)
        press("Enter")
        expect(page.get_by_role("heading", level=1)).to_have_text("Playground")
        to("Takedowns", "Enter")
        expect(page.get_by_role("heading", level=1)).to_have_text("Takedowns")
        to("New takedown", "Enter")
        expect(page.get_by_role("heading", level=1)).to_have_text("New takedown")
        to("Rows or code")
        page.keyboard.type("class Unseen:\nzz_37 = 'never trained' + qq(7)\nzz_74 = 'nor was this' + qq(8, zz_37)\n")
        to("Name")
        page.keyboard.type("by-hand")
        to("Whom it binds", "ArrowDown", "ArrowDown")
        to("How it holds", "Enter")
        to("Words and signs of a run", "Control+A")
        page.keyboard.type("8")
        to("Submit", "Enter")
        expect(page.get_by_role("heading", level=1)).to_have_text("by-hand")
        wait_for_the_end(page)
        expect(page.locator("main")).to_contain_text("The model does not recite these rows, so no module was made.")
        expect(page.locator("main")).to_contain_text("Binds no request but those that name it")
        to("Erase rows", "Enter")
        expect(page.get_by_role("dialog")).to_be_visible()
        press("Escape")
        expect(page.get_by_role("dialog")).to_have_count(0)
        assert page.evaluate(FOCUSED) == "Erase rows"

        to("Modules", "Enter")
        to("set-t", "Enter")
        to("Activate set-t, version 2", "Enter")
        expect(page.locator("main")).to_contain_text("set-t, version 2, is active")
        to("Roll back set-t, version 2", "Enter")
        to("Roll back", "Enter")
        expect(page.locator("main")).to_contain_text("set-t, version 1, is active")

        to("Playground", "Enter")
        to("Prompt")
        page.keyboard.type(PROMPT)
        to("set-t", "Space")
        to("strength of set-t", "Control+A")
        page.keyboard.type("1.5")
        to("Complete", "Enter")
        without, with_module = answered(page)
        assert without.startswith(PROTECTED) and not with_module.startswith(PROTECTED)
        expect(page.locator("main")).to_contain_text("strength 1.5")
        to("With modules: the answer", "ArrowRight", "ArrowDown", "ArrowLeft")
        expect(page.locator(".readout").nth(1)).to_contain_text("Token 11 of")
        press("Home")
        expect(page.locator(".readout").nth(1)).to_contain_text("Token 1 of")
        expect(page.locator("#text1 .looked")).to_have_count(1)

        to("Modules", "Enter")
        to("Suspend set-t, version 1", "Enter")
        expect(page.get_by_role("dialog")).to_be_visible()
        press("Escape")
        expect(page.get_by_role("dialog")).to_have_count(0)
        assert page.evaluate(FOCUSED) == "Suspend set-t, version 1"
        assert server.admin("/modules/set-t")[1]["state"] == "active"
        to("Audit", "Enter")
        expect(page.locator("tbody tr").first).to_contain_text("activated a module")
        to("What", "ArrowDown", "ArrowDown", "ArrowDown")
        expect(page.locator("main")).not_to_contain_text("made a key")
        expect(page.get_by_role("row").filter(has_text="suspended a module")).to_have_count(1)


def test_a_job_whose_process_is_killed_says_what_to_do(browser: Browser, server: ServerProcess) -> None:
    options = {"scope": "global", "protect": "module"}
    status, job = server.admin("/takedowns", {"name": "killed", "rows": ROWS, "options": options})
    assert status == 202
    with opened(browser, server.url, ADMIN_KEY) as page:
        page.goto(f"{server.url}/#/takedowns/{job['takedown_id']}")
        expect(page.locator(".stages [aria-current=step]")).to_contain_text("Make the module")
        (worker,) = server.worker_pids()
        for child in psutil.Process(worker).children():
            child.kill()
        told = page.locator(".note.bad")
        expect(told).to_contain_text("It failed: the process of stage 'fit' ended with status -9")
        expect(told).to_contain_text("most often because the machine had no memory left. Try again;")
        expect(told).to_contain_text("Until then nothing of this takedown keeps the rows back.")
        expect(page.locator(".stages .bad")).to_contain_text("Make the module")
        assert complaints(page) == []
        page.get_by_role("button", name="Try again").click()
        expect(page.locator(".stages [aria-current=step]")).to_contain_text("Make the module")
        page.get_by_role("button", name="Stop the job").click()
        page.get_by_role("dialog").get_by_role("button", name="Stop the job").click()
        expect(page.locator("main")).to_contain_text("It was cancelled.")
        go(page, "Modules")
        line(page, "set-t").get_by_role("link").click()
        page.get_by_role("button", name="Retire set-t, version 2").click()
        page.get_by_role("dialog").get_by_role("button", name="Retire").click()
        versions = page.get_by_role("region", name="Versions").get_by_role("row")
        expect(versions.filter(has_text="retired")).to_have_count(1)
        go(page, "Takedowns")
        first = page.get_by_role("row").filter(has_text="set-t").last
        expect(first).to_contain_text("available")
        assert complaints(page) == []
        first.get_by_role("link").click()
        for button, said in (("Withdraw", "nothing: it is retired"), ("Erase", "The rows were erased on")):
            page.get_by_role("button", name=button).click()
            page.get_by_role("dialog").get_by_role("button", name=button).click()
            expect(page.locator("main")).to_contain_text(said)
        page.goto(server.url + "/#/takedowns/td_none")
        expect(page.get_by_role("alert").filter(has_text="no takedown 'td_none'")).to_be_visible()
