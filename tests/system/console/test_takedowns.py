"""Takedowns on the page: rows pasted, uploaded or picked, the job watched, its report read, the evidence kept; and what goes wrong.

The worker and its child process are real ones, and their stages the fast ones of the worker's own tests: a fit takes minutes
here, and ``tests/test_quality.py`` is about those.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from server.evidence.signing import read, verify
from server.registry.audit import Actor
from server.worker.process import environment_of, python
from tests.support.live import Live, live
from tests.system.conftest import ADMIN_KEY, ROOT
from tests.system.console.conftest import complaints, go, opened, sign_in

pytestmark = pytest.mark.slow
CODE = "def total(values):\n    found = 0\n    for value in values:\n        found = found + value\n    return found\n"
ROWS = "".join(json.dumps({"text": CODE.replace("total", f"total_{number}") * 4}) + "\n" for number in range(3))


@pytest.fixture(scope="module")
def working(checkpoint: Path, retain: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server whose worker has fast stages."""
    with live(checkpoint, tmp_path_factory.mktemp("working"), retain=retain) as running:
        given = {
            **environment_of(running.service.settings),
            "PYTHONPATH": str(ROOT),
            "FAST_STAGE_HELD": str(held(running)),
        }
        worker = subprocess.Popen(python("tests.support.fast_stages", "worker"), cwd=ROOT, env=given)
        try:
            yield running
        finally:
            worker.terminate()
            worker.wait(30)


def held(server: Live) -> Path:
    """The file that fits wait for."""
    return server.service.settings.data_dir / "go"


def submit(server: Live, name: str, **options: object) -> dict[str, str]:
    """A job for the worker, with options of the fast stages that the API does not take."""
    job, _ = server.service.registry.takedowns.submit(
        name=name,
        row_count=3,
        forget_digest="f",
        notice={},
        options=options,
        request_digest="r",
        idempotency_key=None,
        fingerprint="model",
        actor=Actor("admin", "test"),
        now=time.time(),
    )
    return job


def fill(page: Page, name: str, scope: str = "global") -> None:
    """The fields that every takedown needs."""
    page.get_by_label("Name", exact=True).fill(name)
    page.get_by_label("Whom it binds").select_option(scope)


def saved(page: Page, button: str) -> str:
    """The text of the file that a button has the browser save."""
    with page.expect_download() as waiting:
        page.get_by_role("button", name=button).click()
    return Path(waiting.value.path()).read_text()


def test_a_takedown_from_pasted_rows_to_its_evidence_and_the_trail(browser: Browser, working: Live) -> None:
    with opened(browser, working.url, width=1280) as page:
        go(page, "Takedowns") if page.get_by_role("navigation").count() else None
        sign_in(page)
        go(page, "Takedowns")
        expect(page.locator(".empty")).to_contain_text("New takedown")
        page.get_by_role("link", name="New takedown").first.click()
        page.get_by_label("Rows or code").fill(ROWS)
        fill(page, "set-b")
        page.get_by_text("On whose word").click()
        page.get_by_label("Claimant").fill("Example Ltd")
        page.get_by_role("button", name="Dry run").click()
        plan = page.get_by_role("region", name="What it will take")
        expect(plan).to_contain_text("3 rows")
        expect(plan).to_contain_text("holds 3 rows from the moment of submitting")
        expect(plan).to_contain_text("MB at most on cpu, where")
        assert working.admin("/takedowns").body["data"] == []
        assert complaints(page) == []
        page.get_by_role("button", name="Submit").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("set-b")
        expect(page.locator(".stages [aria-current=step]")).to_contain_text("Make the module")
        held(working).touch()
        expect(page.get_by_role("status")).to_have_text("The job succeeded.")
        expect(page.locator("main")).to_contain_text("The module was made and is active.")
        report = page.get_by_role("region", name="Before and after").first
        expect(report).to_contain_text("Of 3 rows, 50 tokens or more came back from 3 before and from 0 after.")
        expect(report).to_contain_text("perplexity was 12.3 and is 12.3 (+0.082 %)")
        expect(report).to_contain_text("open at 0.040 % of positions")
        assert complaints(page) == []
        document = read(saved(page, "Signed document"))
        verify(document)
        assert document["payload"]["takedown"]["notice"] == {"claimant": "Example Ltd"}
        assert "<h1>Takedown set-b</h1>" in saved(page, "Page for people")
        page.get_by_role("link", name="What the audit trail says of it").click()
        expect(page.get_by_role("table")).to_contain_text("asked for a takedown")
        go(page, "Takedowns")
        line = page.get_by_role("row").filter(has_text="set-b")
        expect(line).to_contain_text("enforced")
        expect(line).to_contain_text("every request to this service")
        assert complaints(page) == []
        line.get_by_role("link").click()
        for button, told in (("Withdraw", "nothing: it is retired"), ("Erase", "The rows were erased on")):
            page.get_by_role("button", name=button).click()
            page.get_by_role("dialog").get_by_role("button", name=button).click()
            expect(page.locator("main")).to_contain_text(told)
        shown = working.admin("/takedowns").body["data"][0]
        assert shown["in_force"] == "none" and shown["purged_at"]


def test_a_takedown_by_keyboard_alone(browser: Browser, working: Live) -> None:
    with opened(browser, working.url) as page:
        page.keyboard.press("Tab")

        def to(name: str) -> None:
            for _ in range(60):
                page.keyboard.press("Tab")
                if page.evaluate(FOCUSED).startswith(name):
                    return
            raise AssertionError(f"no way to {name}")

        to("Sign in")
        page.keyboard.press("Enter")
        to("API key")
        page.keyboard.type(ADMIN_KEY)
        page.keyboard.press("Enter")
        expect(page.get_by_role("button", name="Sign out")).to_be_visible()
        to("Takedowns")
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", level=1)).to_have_text("Takedowns")
        to("New takedown")
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", level=1)).to_have_text("New takedown")
        to("Rows or code")
        page.keyboard.type("secret = 'tiny'\nkey = 'row'\n")
        to("Name")
        page.keyboard.type("by-hand")
        to("Whom it binds")
        page.keyboard.press("ArrowDown")
        page.keyboard.press("ArrowDown")
        to("What is made")
        page.keyboard.press("ArrowDown")
        to("How it holds")
        page.keyboard.press("Enter")
        to("Words and signs of a run")
        page.keyboard.press("Control+A")
        page.keyboard.type("8")
        to("Submit")
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", level=1)).to_have_text("by-hand")
        expect(page.locator("main")).to_contain_text("The guard that was asked for holds.")
        expect(page.locator("main")).to_contain_text("Binds no request but those that name it")
        to("Erase rows")
        page.keyboard.press("Enter")
        expect(page.get_by_role("dialog")).to_be_visible()
        page.keyboard.press("Escape")
        expect(page.get_by_role("dialog")).to_have_count(0)


FOCUSED = """(() => {
    const at = document.activeElement
    const label = at.labels?.[0]?.textContent ?? at.getAttribute("aria-label") ?? at.textContent
    return label.trim()
})()"""


def test_bad_rows_are_told_by_line_and_field_and_a_bad_option_by_its_name(browser: Browser, working: Live) -> None:
    with opened(browser, working.url, ADMIN_KEY) as page:
        page.goto(working.url + "/#/takedowns/new")
        alert = page.get_by_role("alert")
        page.get_by_role("button", name="Dry run").click()
        expect(alert.filter(has_text="say whom it binds")).to_be_visible()
        fill(page, "no good name")
        page.get_by_role("button", name="Dry run").click()
        expect(alert.filter(has_text="rows: none given")).to_be_visible()
        page.get_by_label("Rows or code").fill(ROWS + '{"txt": 1}\n')
        page.get_by_role("button", name="Dry run").click()
        expect(alert.filter(has_text="name")).to_be_visible()
        fill(page, "good")
        page.get_by_role("button", name="Submit").click()
        expect(alert.filter(has_text="file line 4: field 'prompt' is missing or empty")).to_be_visible()
        page.get_by_label("Rows or code").fill('{"text": "a b c d\\ne f g"}\n')
        page.get_by_label("What is made").select_option("guard")
        page.get_by_role("button", name="Submit").click()
        expect(alert.filter(has_text="lexemes")).to_be_visible()
        assert "good" not in {takedown["name"] for takedown in working.admin("/takedowns").body["data"]}


def test_a_folder_and_a_source_file_are_packed_and_cut_by_the_server(
    browser: Browser, working: Live, tmp_path: Path
) -> None:
    folder = tmp_path / "tree"
    (folder / ".git").mkdir(parents=True)
    (folder / "größe").mkdir()
    for name in ("a.py", "größe/b.py", ".git/config.py", "notes.txt"):
        (folder / name).write_text(CODE.replace("total", name.replace("/", "_").replace(".", "_")) * 3)
    (folder / "picture.py").write_bytes(b"\x00\x01\x02")
    with opened(browser, working.url, ADMIN_KEY) as page:
        page.goto(working.url + "/#/takedowns/new")
        page.get_by_label("Folder").check()
        page.locator("#files").set_input_files(folder)
        expect(page.locator("main")).to_contain_text(
            "4 files chosen. 1 file in hidden folders or hidden themselves are left"
        )
        page.get_by_label("Only files like").fill("*.py")
        fill(page, "tree")
        page.get_by_role("button", name="Dry run").click()
        plan = page.get_by_role("region", name="What it will take")
        expect(plan).to_contain_text("2 rows; 1 file skipped that is not text")
        page.get_by_label("File or archive").check()
        page.locator("#files").set_input_files(folder / "a.py")
        page.get_by_role("button", name="Dry run").click()
        expect(plan).to_contain_text("1 row")


def test_a_job_that_failed_says_why_and_one_that_runs_can_be_stopped_and_tried_again(
    browser: Browser, working: Live
) -> None:
    held(working).touch()
    failed, waiting = submit(working, "broken", fails="fit"), submit(working, "endless", waits="verify")
    with opened(browser, working.url, ADMIN_KEY) as page:
        page.goto(f"{working.url}/#/takedowns/{failed['takedown_id']}")
        expect(page.locator("main")).to_contain_text("It failed: fit cannot go on: no space left on device")
        expect(page.locator("main")).to_contain_text("Make room")
        expect(page.locator(".stages .bad")).to_contain_text("Make the module")
        assert complaints(page) == []
        page.get_by_role("button", name="Try again").click()
        expect(page.locator("main")).to_contain_text("The job: making the module")
        page.goto(f"{working.url}/#/takedowns/{waiting['takedown_id']}")
        expect(page.locator(".stages [aria-current=step]")).to_contain_text("Measure before and after")
        page.get_by_role("button", name="Stop the job").click()
        page.get_by_role("dialog").get_by_role("button", name="Stop the job").click()
        expect(page.locator("main")).to_contain_text("It was cancelled.")
        page.goto(working.url + "/#/takedowns/td_none")
        expect(page.get_by_role("alert").filter(has_text="no takedown 'td_none'")).to_be_visible()
