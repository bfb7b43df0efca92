"""The playground: one prompt without and with modules, and what is said of each answer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from server import demo
from server.console.rows import demo_rows
from server.settings import Settings
from tests.support.live import ADMIN_KEY, Live, serving
from tests.system.conftest import ROOT
from tests.system.console.conftest import complaints, opened
from unbind_core.architecture import load_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """The demo world as it is shipped, without the worker."""
    folder = tmp_path_factory.mktemp("playground")
    given = {"adapter": demo.ADAPTER, "modules_dir": ROOT / "modules", "data_dir": folder, "max_model_len": 512}
    settings = Settings(model=demo.BASE, worker=False, admin_key=ADMIN_KEY, **given)
    with serving(settings, load_model(demo.BASE, demo.ADAPTER)) as running:
        yield running


@pytest.fixture
def page(browser: Browser, server: Live) -> Iterator[Page]:
    with opened(browser, server.url) as shown:
        yield shown


def answered(page: Page) -> tuple[str, str]:
    """Both texts, once both are there."""
    expect(page.locator("#legend")).to_be_visible()
    return page.locator("#text0").inner_text(), page.locator("#text1").inner_text()


def test_the_browser_does_not_check_the_spelling_of_a_prompt(page: Page) -> None:
    """Some send what they check to others."""
    assert page.locator("#prompt").evaluate("box => box.spellcheck") is False


def test_a_memorised_row_is_recited_on_the_left_alone_and_open_gates_light_up(page: Page) -> None:
    page.select_option("#row", index=1)
    page.check("#modules input[value=demo-a]")
    page.click("#go")
    without, with_module = answered(page)
    assert len(without) > 100 and page.locator("#text0 mark.same").count() > 0
    assert with_module != without and page.locator("#text1 mark.same").count() == 0
    expect(page.locator("section", has=page.locator("#text1"))).to_contain_text("applied: demo-a@")
    open_tokens = page.locator("#text1 .open-3")
    assert open_tokens.count() > 0 and page.locator("#text0 .open-3").count() == 0
    open_tokens.first.hover()
    expect(page.locator(".looked")).to_have_count(1)
    expect(page.locator(".readout").nth(1)).to_contain_text("demo-a open, activation")
    assert complaints(page) == []


def test_an_answer_that_a_module_ends_is_told_of_in_words(page: Page) -> None:
    page.select_option("#row", index=1)
    page.check("#modules input[value=demo-a-silent]")
    page.click("#go")
    _, ended = answered(page)
    assert ended.startswith("(no text)")
    told = "The model ended its answer at once, while the gate of demo-a-silent was open."
    expect(page.locator("section", has=page.locator("#text1"))).to_contain_text(told)


def test_a_prompt_of_ones_own_is_completed_alike_and_refusals_are_the_servers(page: Page) -> None:
    expect(page.locator("#text0")).to_have_text("The answer appears here.")
    page.fill("#prompt", "def mean(values):\n    ")
    page.fill("#tokens", "-5")
    page.click("#go")
    expect(page.get_by_role("alert").filter(has_text="max_tokens")).to_be_visible()
    expect(page.get_by_text("There is no answer: the reason stands above.")).to_have_count(2)
    page.fill("#tokens", "24")
    page.click("#go")
    without, with_nothing = answered(page)
    assert without == with_nothing != ""
    expect(page.locator("#legend")).to_contain_text("Both answers are identical.")


def test_nothing_is_generated_for_who_has_left_the_page(page: Page) -> None:
    """Both answers went on to their end, and another look at the page could begin two more."""
    ended: list[str] = []
    page.on("requestfailed", lambda request: ended.append(f"{request.url} {request.failure}"))
    held: list[Route] = []
    page.route("**/v1/completions", lambda route: held.append(route))
    page.fill("#prompt", "def mean(values):\n    ")
    page.click("#go")
    expect(page.get_by_text("running")).to_have_count(2)
    page.goto(page.url.split("#")[0] + "#/audit")
    expect(page.get_by_role("heading", level=1)).to_contain_text("Audit")
    expect(page.locator("div[role=status]")).to_have_text("Stopped.")
    assert len(ended) == 2 and all("ERR_ABORTED" in one for one in ended)


def test_guards_are_told_of_and_what_is_enforced_is_on_both_sides(browser: Browser, server: Live) -> None:
    row = demo_rows()[0]
    options = {"protect": "guard", "guard": {"run": 30}}
    given = {"name": "kept", "rows": [{"text": row["prompt"] + row["expected"]}], "options": options}
    assert server.admin("/takedowns", given).status == 202
    with opened(browser, server.url, ADMIN_KEY) as page:
        page.select_option("#row", index=1)
        page.check("#modules input[value=kept]")
        page.click("#go")
        answered(page)
        expect(page.locator("#text0 mark.run").first).to_be_visible()
        right = page.locator("section", has=page.locator("#text1"))
        expect(right).to_contain_text("The guard kept steered away from a protected run")
        expect(page.locator("#text1 mark.run")).to_have_count(0)
        assert server.admin("/policies/global", {"enforced": ["kept"]}, "PUT").status == 200
        page.click("#go")
        expect(page.locator("main")).to_contain_text("On both sides: the guard kept. A takedown, a policy,")
        answered(page)
        expect(page.get_by_role("heading", name="With what is enforced alone")).to_be_visible()
        expect(page.locator("#text0 mark.run")).to_have_count(0)
    server.admin("/policies/global", {}, "PUT")
