"""Rows of a takedown: pasted, uploaded or picked, and what is wrong with them; ``test_whole_path.py`` goes on from there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tests.server.api.admin.test_joined import active
from tests.support.live import Live, live
from tests.system.conftest import ADMIN_KEY
from tests.system.console.conftest import complaints, go, opened, sign_in

pytestmark = pytest.mark.slow
CODE = "def total(values):\n    found = 0\n    for value in values:\n        found = found + value\n    return found\n"
ROWS = "".join(json.dumps({"text": CODE.replace("total", f"total_{number}") * 4}) + "\n" for number in range(3))


@pytest.fixture(scope="module")
def server(checkpoint: Path, retain: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server that takes rows, and nobody who fits anything."""
    with live(checkpoint, tmp_path_factory.mktemp("taking"), retain=retain) as running:
        yield running


def fill(page: Page, name: str, scope: str = "global") -> None:
    """The fields that every takedown needs."""
    page.get_by_label("Name", exact=True).fill(name)
    page.get_by_label("Whom it binds").select_option(scope)


def test_bad_rows_are_told_by_line_and_field_and_a_bad_option_by_its_name(browser: Browser, server: Live) -> None:
    with opened(browser, server.url, ADMIN_KEY) as page:
        page.goto(server.url + "/#/takedowns/new")
        alert = page.get_by_role("alert")
        page.get_by_role("button", name="Dry run").click()
        expect(alert.filter(has_text="Say whom it binds")).to_be_visible()
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
        assert "good" not in {takedown["name"] for takedown in server.admin("/takedowns").body["data"]}


def test_secrets_are_guarded_by_letters_and_the_list_of_guards_says_so(browser: Browser, server: Live) -> None:
    key = "acme_live_7Rt2QmX9fLw4ZsKd81vNpB3y"
    with opened(browser, server.url, ADMIN_KEY) as page:
        page.goto(server.url + "/#/takedowns/new")
        page.get_by_label("Rows or code").fill(f"KEY={key}")
        fill(page, "secret-keys")
        page.get_by_label("What is made").select_option("guard")
        page.get_by_text("How it holds").click()
        hint = page.get_by_text("Give JSON lines with prompt and continuation")
        expect(hint).to_have_count(0)
        page.get_by_label("The rows are secrets").check()
        expect(hint).to_be_visible()
        page.get_by_role("button", name="Dry run").click()
        plan = page.get_by_role("region", name="What it will take")
        expect(plan).to_contain_text("1 were given as one text and cut")
        page.get_by_label("Words and signs of a run").fill("50")
        page.get_by_role("button", name="Dry run").click()
        expect(page.get_by_role("alert").filter(has_text="50")).to_be_visible()  # none of these is as long
        page.get_by_label("Words and signs of a run").fill("")
        page.get_by_label("Rows or code").fill(json.dumps({"prompt": 'KEY = "', "continuation": key}))
        page.get_by_role("button", name="Submit").click()
        expect(page.get_by_role("heading", level=1)).to_contain_text("secret-keys")
        go(page, "Modules")
        said = page.get_by_role("region", name="Modules and guards").get_by_role("row").filter(has_text="secret-keys")
        expect(said).to_contain_text("steers away at runs of 12 letters and digits; 1 row")
        assert complaints(page) == []


def test_takedowns_are_found_by_name_and_notice(browser: Browser, server: Live) -> None:
    for name, claimant in (("findable-1", "Acme/50 % & é"), ("findable-2", "")):
        body = {"name": name, "rows": [{"text": CODE * 4}], "notice": {"claimant": claimant} if claimant else {}}
        assert server.admin("/takedowns", {**body, "options": {"protect": "guard", "scope": "global"}}).status == 202
    with opened(browser, server.url, ADMIN_KEY) as page:
        go(page, "Takedowns")
        names = page.get_by_role("region", name="Takedowns").get_by_role("rowheader")
        page.get_by_label("Find").fill("FINDABLE")
        page.get_by_role("button", name="Show", exact=True).click()
        expect(names).to_have_text(["findable-2", "findable-1"])
        page.get_by_label("Find").fill(" /50 % & ")
        page.get_by_label("Find").press("Enter")
        expect(names).to_have_text(["findable-1"])
        names.get_by_role("link").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("findable-1")
        page.go_back()
        expect(names).to_have_text(["findable-1"])
        expect(page.get_by_label("Find")).to_have_value("/50 % &")
        page.get_by_label("Find").fill("nobody like that")
        page.get_by_label("Find").press("Enter")
        expect(page.get_by_role("heading", name="No takedown is like that")).to_be_visible()
        page.get_by_role("button", name="Show all").click()
        expect(names.filter(has_text="findable")).to_have_count(2)
        assert complaints(page) == []


def test_what_joins_a_takedown_is_shown_and_told_of_where_one_is_withdrawn(browser: Browser, server: Live) -> None:
    parts = [active(server, name) for name in ("part-1", "part-2")]
    whole = active(server, "whole", joins=parts)
    with opened(browser, server.url, ADMIN_KEY) as page:
        page.goto(f"{server.url}/#/takedowns/{parts[0]}")
        made = page.locator("section").filter(has=page.get_by_role("heading", name="What was made"))
        expect(made).to_contain_text("Its rows are also in what joins it: whole (enforced).")
        page.get_by_role("button", name="Withdraw").click()
        asked = page.get_by_role("dialog")
        expect(asked).to_contain_text("its rows stay in the module of whole")
        asked.get_by_role("button", name="Withdraw").click()
        expect(made).to_contain_text("retired")
        assert complaints(page) == []
        made.get_by_role("link", name="whole").click()
        expect(page.get_by_role("heading", level=1)).to_contain_text("whole")
        for name in ("part-1", "part-2"):
            expect(made.get_by_role("link", name=name)).to_be_visible()
        page.get_by_role("button", name="Withdraw").click()
        expect(page.get_by_role("dialog")).to_contain_text("What it joins stays superseded")
        page.goto(f"{server.url}/#/modules")
        page.get_by_role("button", name="Suspend whole, version 1").click()
        page.get_by_role("dialog").get_by_role("button", name="Suspend").click()
        expect(page.get_by_text("it has the rows of part-2, which stay superseded")).to_be_visible()
    assert server.admin(f"/takedowns/{whole}").body["in_force"] == "none"


def test_a_module_that_was_joined_elsewhere_meanwhile_is_not_among_the_chosen(browser: Browser, server: Live) -> None:
    for name in ("early", "late"):
        active(server, name)
    with opened(browser, server.url, ADMIN_KEY) as page:
        go(page, "Takedowns")
        page.get_by_role("link", name="Join", exact=True).click()
        chosen = page.get_by_role("group", name="What it joins")
        for name in ("early", "late"):
            chosen.get_by_label(name).check()
        expect(chosen).to_contain_text("2 of")
        page.get_by_label("Name", exact=True).fill("earlies")
        go(page, "Takedowns")
        active(server, "elsewhere", joins=["early"])
        page.get_by_role("link", name="Join", exact=True).click()
        expect(chosen.get_by_label("late")).to_be_checked()
        expect(chosen.get_by_label("early")).to_have_count(0)
        expect(chosen).to_contain_text("1 of")
        page.get_by_role("button", name="Submit").click()
        expect(page.get_by_text("It joins: ")).to_contain_text("late (enforced)")
    made = next(one for one in server.admin("/takedowns").body["data"] if one["name"] == "earlies")
    assert made["row_count"] == 3 and len(made["options"]["joins"]) == 1
    server.admin(f"/jobs/{made['job']['id']}/cancel", method="POST")


def test_takedowns_are_joined_by_choosing_them(browser: Browser, server: Live) -> None:
    parts = [active(server, name) for name in ("small-1", "small-2", "small-3")]
    server.admin("/policies/global", {"enforced": {"small-1": 1.0}}, method="PUT")
    with opened(browser, server.url, ADMIN_KEY) as page:
        go(page, "Takedowns")
        page.get_by_role("link", name="Join", exact=True).click()
        expect(page.get_by_role("heading", level=1)).to_have_text("Join takedowns")
        page.get_by_label("Name", exact=True).fill("smalls")
        page.get_by_role("button", name="Submit").click()
        expect(page.get_by_role("alert").filter(has_text="choose one module at least")).to_be_visible()
        chosen = page.get_by_role("group", name="What it joins")
        expect(chosen.get_by_role("checkbox", name="small-1")).to_have_accessible_description(
            "Binds every request to this service."
        )
        for name in ("small-2", "small-1"):
            chosen.get_by_label(name).check()
        expect(chosen).to_contain_text("2 of")
        page.get_by_role("button", name="Dry run").click()
        plan = page.get_by_role("region", name="What it will take")
        expect(plan).to_contain_text("6 rows")
        expect(plan).to_contain_text("demands 'small-1'")
        page.get_by_text("And more rows").click()
        page.get_by_label("Rows or code").fill(ROWS)
        expect(plan).to_have_count(0)
        page.get_by_role("button", name="Submit").click()
        expect(page.get_by_role("heading", level=1)).to_contain_text("smalls")
        expect(page.get_by_text("demands 'small-1'")).to_be_visible()  # what the server warned of is still there
        for name in ("small-1", "small-2"):  # in the order of their ids
            expect(page.get_by_text("It joins: ")).to_contain_text(f"{name} (enforced)")
        assert complaints(page) == []
    made = next(one for one in server.admin("/takedowns").body["data"] if one["name"] == "smalls")
    assert made["row_count"] == 9 and set(made["options"]["joins"]) == set(parts[:2])
    assert made["options"]["scope"] == "global"
    server.admin("/policies/global", {"enforced": {}}, method="PUT")


def test_a_folder_and_a_source_file_are_packed_and_cut_by_the_server(
    browser: Browser, server: Live, tmp_path: Path
) -> None:
    folder = tmp_path / "tree"
    (folder / ".git").mkdir(parents=True)
    (folder / "größe").mkdir()
    for name in ("a.py", "größe/b.py", ".git/config.py", "notes.txt"):
        (folder / name).write_text(CODE.replace("total", name.replace("/", "_").replace(".", "_")) * 3)
    (folder / "picture.py").write_bytes(b"\x00\x01\x02")
    with opened(browser, server.url, ADMIN_KEY) as page:
        page.goto(server.url + "/#/takedowns/new")
        page.get_by_label("Folder").check()
        page.locator("#files").set_input_files(folder)
        expect(page.locator("main")).to_contain_text(
            "4 files chosen. 1 file in hidden folders or hidden themselves are left"
        )
        page.get_by_label("Only files like").fill("*.py")
        fill(page, "tree")
        page.get_by_role("button", name="Dry run").click()
        plan = page.get_by_role("region", name="What it will take")
        expect(plan).to_contain_text("2 rows; 1 file skipped that is not UTF-8 text")
        page.get_by_label("File or archive").check()
        page.locator("#files").set_input_files(folder / "a.py")
        page.get_by_role("button", name="Dry run").click()
        expect(plan).to_contain_text("1 row")


def test_what_was_skipped_of_the_files_is_told_after_submitting(browser: Browser, server: Live, tmp_path: Path) -> None:
    """No dry run came before, and the takedown does not hold what stands in these."""
    (tmp_path / "plain.py").write_text(CODE.replace("total", "plain") * 4)
    (tmp_path / "latin.py").write_bytes(b"# caf\xe9\n" + CODE.encode() * 4)
    with opened(browser, server.url, ADMIN_KEY) as page:
        page.goto(server.url + "/#/takedowns/new")
        page.get_by_label("File or archive").check()
        page.locator("#files").set_input_files([tmp_path / "plain.py", tmp_path / "latin.py"])
        fill(page, "lossy")
        page.get_by_role("button", name="Submit").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("lossy")
        expect(page.locator(".note.warn")).to_contain_text("1 row is taken; 1 file skipped that is not UTF-8 text")


def test_a_list_that_is_pasted_is_its_rows_and_files_can_be_dropped(
    browser: Browser, server: Live, tmp_path: Path
) -> None:
    (tmp_path / "dropped.py").write_text(CODE.replace("total", "dropped") * 4)
    (tmp_path / "folder").mkdir()
    listed = json.dumps([json.loads(line) for line in ROWS.splitlines()], indent=1)
    with opened(browser, server.url, ADMIN_KEY) as page:
        page.goto(server.url + "/#/takedowns/new")
        fill(page, "pasted")
        page.get_by_label("Rows or code").fill("[1, 2]\n")
        expect(page.locator("#read-as")).to_have_text("Read as code: one row of 1 line.")
        page.get_by_label("Rows or code").fill(listed)
        expect(page.locator("#read-as")).to_have_text("Read as a JSON list: 3 rows.")
        page.get_by_role("button", name="Dry run").click()
        plan = page.get_by_role("region", name="What it will take")
        expect(plan).to_contain_text("3 rows")
        protocol = page.context.new_cdp_session(page)

        def drop(path: Path) -> None:
            data = {"items": [], "files": [str(path)], "dragOperationsMask": 1}
            for kind in ("dragEnter", "dragOver", "drop"):
                protocol.send("Input.dispatchDragEvent", {"type": kind, "x": 300, "y": 300, "data": data})

        drop(tmp_path / "folder")
        expect(page.get_by_role("alert").filter(has_text="that is a folder")).to_be_visible()
        drop(tmp_path / "dropped.py")
        expect(page.locator("main")).to_contain_text("1 file chosen.")
        page.get_by_role("button", name="Dry run").click()
        expect(plan).to_contain_text("1 row")
        assert len(page.context.pages) == 1
        (tmp_path / "dropped.py").unlink()
        page.get_by_role("button", name="Dry run").click()
        expect(page.get_by_role("alert").filter(has_text="'dropped.py' cannot be read any more")).to_be_visible()


def test_what_was_typed_is_there_again_until_somebody_signs_out(browser: Browser, server: Live) -> None:
    made = server.admin("/keys", {"name": "passing", "scopes": ["admin", "inference"]}).body
    with opened(browser, server.url, made["key"]) as page:
        page.goto(server.url + "/#/takedowns/new")
        fill(page, "typed")
        page.get_by_label("Rows or code").fill(CODE)
        server.admin(f"/keys/{made['id']}", method="DELETE")
        expect(page.get_by_role("heading", level=1)).to_have_text("Sign in")
        sign_in(page)
        expect(page.get_by_label("Rows or code")).to_have_value(CODE)
        go(page, "Modules")
        page.go_back()
        expect(page.get_by_label("Name", exact=True)).to_have_value("typed")
        asked: list[str] = []
        page.on("dialog", lambda dialog: (asked.append(dialog.type), dialog.accept()))
        page.get_by_role("button", name="Sign out").click()
        sign_in(page)
        expect(page.get_by_label("Name", exact=True)).to_have_value("")
        page.get_by_label("Rows or code").fill(CODE)
        page.reload()
        expect(page.get_by_role("heading", level=1)).to_have_text("Sign in")
        assert asked == ["beforeunload"]


def test_an_answer_is_of_the_form_as_it_is_and_leads_nobody_away(browser: Browser, server: Live) -> None:
    """A plan that came late stood below other rows than its own; what was submitted led away from another page."""
    with opened(browser, server.url, ADMIN_KEY) as page:
        held: list[Route] = []
        page.goto(server.url + "/#/takedowns/new")
        page.route("**/admin/v1/takedowns", lambda route: held.append(route))
        fill(page, "slow")
        page.get_by_label("Rows or code").fill(CODE)
        for button in ("Dry run", "Submit"):
            with page.expect_request("**/admin/v1/takedowns"):
                page.get_by_role("button", name=button).click()
            if button == "Dry run":
                page.get_by_label("Rows or code").fill(CODE.replace("total", "other"))
            else:
                go(page, "Audit")
            with page.expect_event("requestfinished", lambda request: request.method == "POST"):
                held.pop().continue_()
            page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
            assert page.get_by_role("region", name="What it will take").count() == 0
        expect(page.locator("div[role=status]")).to_have_text("The takedown was submitted.")
        expect(page.get_by_role("heading", level=1)).to_have_text("Audit")


def test_what_is_submitted_again_after_another_page_is_made_once(browser: Browser, server: Live) -> None:
    """The server had it, and its answer was lost."""
    with opened(browser, server.url, ADMIN_KEY) as page:
        page.goto(server.url + "/#/takedowns/new")
        page.route("**/admin/v1/takedowns", lambda route: (route.fetch(), route.abort()), times=1)
        fill(page, "sent-twice")
        page.get_by_label("Rows or code").fill(CODE.replace("total", "twice"))
        page.get_by_role("button", name="Submit").click()
        expect(page.locator("form").get_by_role("alert")).to_have_text("the server does not answer")
        go(page, "Modules")
        page.go_back()
        page.get_by_role("button", name="Submit").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("sent-twice")
        assert [made["name"] for made in server.admin("/takedowns?find=sent-twice").body["data"]] == ["sent-twice"]


def test_what_to_do_about_a_failed_job_depends_on_its_reason(browser: Browser, server: Live) -> None:
    reasons = {
        "the process of stage 'fit' ended with status -9, 3 times; see the worker's log": "no memory left. Try again",
        "3 workers died on stage 'fit'; see the worker's log": "no memory left. Try again",
        "fit cannot go on: no space left on device": "Make room",
        "retain.jsonl: line 3 is no JSON": "mend the retain rows",
        "KeyError in fit.py, line 12": "ask whoever runs this server",
    }
    with opened(browser, server.url, ADMIN_KEY) as page:
        told = page.evaluate(
            """async reasons => {
                const { remedy } = await import("/console/app/pages/takedowns/words.js")
                return reasons.map(remedy)
            }""",
            list(reasons),
        )
    assert all(expected in said for expected, said in zip(reasons.values(), told, strict=True)), told


def test_a_takedown_whose_guard_is_gone_does_not_say_that_it_holds(browser: Browser, server: Live) -> None:
    rows, name = [{"text": CODE.replace("total", "gone") * 4}], "gone-".ljust(64, "x")
    posted = {"name": name, "rows": rows, "options": {"scope": "global", "protect": "guard"}}
    takedown = server.admin("/takedowns", posted).body["takedown_id"]
    with opened(browser, server.url, ADMIN_KEY) as page:
        page.goto(f"{server.url}/#/takedowns/{takedown}")
        main = page.locator("main")
        expect(main).to_contain_text("The guard that was asked for holds.")
        page.get_by_role("button", name="Withdraw").click()
        page.get_by_role("dialog").get_by_role("button", name="Withdraw").click()
        expect(main).to_contain_text("The guard was made. As of now it binds nothing: it is retired.")
        expect(main).not_to_contain_text("asked for holds")
        expect(page.locator(".badge").first).to_have_text("not in force")
        assert complaints(page) == []
        told = page.evaluate(
            """async () => {
                const { since } = await import("/console/app/pages/takedowns/words.js")
                const binds = "nothing while it is suspended", made = { id: "mod_1", kind: "module", state: "suspended", binds }
                const of = outcome => since({ module_id: "mod_1", outcome, result: {} }, { modules: [made], guard: null })
                return [of("active"), of("verified"), of("nothing_to_remove")]
            }"""
        )
        html = str(server.admin(f"/takedowns/{takedown}/evidence?format=html").raw, "utf-8")
        page.set_viewport_size({"width": 320, "height": 900})
        page.goto("about:blank")
        page.set_content(html)
        assert page.evaluate("document.documentElement.scrollWidth") <= 320 and 'name="viewport"' in html
        assert page.locator("main h1").inner_text() == f"Takedown {name}"
    assert told[0] == ["warn", "The module was made. As of now it binds nothing while it is suspended."]
    assert told[1] is None and "No guard holds now" in told[2][1]


def test_a_module_that_misses_its_aim_is_not_told_of_as_all_well(browser: Browser, server: Live) -> None:
    posted = {"name": "brief", "rows": [{"text": CODE * 4}], "options": {"scope": "global", "protect": "module"}}
    takedown = server.admin("/takedowns", posted).body["takedown_id"]
    (number,) = server.admin(f"/takedowns/{takedown}").body["jobs"]
    job, said = server.admin(f"/jobs/{number}").body, "short: the module is within its budgets, but misses its aim"
    with opened(browser, server.url, ADMIN_KEY) as page:
        ended = {
            **job,
            "state": "succeeded",
            "finished_at": 1.0,
            "outcome": "active",
            "result": {"outcome": "active", "remark": said},
        }
        page.route("**/admin/v1/jobs/*", lambda route: route.fulfill(json=ended))
        page.goto(f"{server.url}/#/takedowns/{takedown}")
        expect(page.locator(".note.warn")).to_contain_text(said)
        expect(page.locator(".note.good")).to_have_count(0)


def test_a_list_of_many_is_turned_page_by_page(browser: Browser, server: Live) -> None:
    rows = [{"text": CODE.replace("total", "listed") * 4}]
    server.admin("/takedowns", {"name": "listed", "rows": rows, "options": {"scope": "global", "protect": "guard"}})
    (newest,) = server.admin("/takedowns?limit=1").body["data"]
    many = [{**newest, "id": f"td_{number}", "name": f"number {number}"} for number in range(150)]

    def answer(route: Route) -> None:
        after = dict(parse_qsl(urlsplit(route.request.url).query)).get("after", "")
        first = int(after.removeprefix("td_")) + 1 if after else 0
        shown = many[first : first + 100]
        route.fulfill(json={"object": "list", "data": shown, "has_more": first + len(shown) < len(many)})

    with opened(browser, server.url, ADMIN_KEY) as page:
        page.route("**/admin/v1/takedowns?*", answer)
        go(page, "Takedowns")
        rows, newer, older = (
            page.locator("tbody tr"),
            page.get_by_role("button", name="Newer"),
            page.get_by_role("button", name="Older"),
        )
        expect(rows).to_have_count(100)
        expect(newer).to_be_disabled()
        older.click()
        expect(rows).to_have_count(50)
        expect(rows.last).to_contain_text("number 149")
        assert page.evaluate("scrollY") == 0
        page.get_by_role("link", name="number 120").click()
        expect(page.get_by_role("alert").filter(has_text="no takedown 'td_120'")).to_be_visible()
        page.go_back()
        expect(rows).to_have_count(50)
        expect(older).to_be_disabled()
        newer.click()
        expect(rows.first).to_contain_text("number 0")
