"""Takedowns found by what their names and notices hold."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from typer.testing import CliRunner

from server.api.admin.bodies import Notice
from server.cli import build
from server.registry.tables import NOTICE
from tests.support.live import ADMIN_KEY, Live, live

NOTICES: dict[str, dict[str, str]] = {
    "parser": {"claimant": "Müller & Söhne GmbH", "reference": "DMCA-17"},
    "parser-2": {"claimant": "Acme", "work": "half of 50%_of it"},
    "other": {"note": "the claimant is not named"},
    "plain": {},
}


@pytest.fixture(scope="module")
def running(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live(checkpoint, tmp_path_factory.mktemp("found")) as server:
        for name, notice in NOTICES.items():
            rows = [{"prompt": f"def {name}():\n", "continuation": "    return 1\n"}]
            options = {"protect": "module", "scope": "global"}
            posted = server.admin("/takedowns", {"name": name, "rows": rows, "notice": notice, "options": options})
            assert posted.status == 202, posted.raw
        yield server


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("PARSER", ["parser-2", "parser"]),
        ("Müller &", ["parser"]),
        ("dmca-1", ["parser"]),
        ("%_", ["parser-2"]),  # as it stands, and no pattern
        ("claimant", ["other"]),  # and not the name of a part
        ('"', []),
        ("", ["plain", "other", "parser-2", "parser"]),
    ],
)
def test_names_and_notices_are_looked_through(running: Live, text: str, names: list[str]) -> None:
    found = running.admin(f"/takedowns?find={quote(text)}")
    assert found.status == 200 and [one["name"] for one in found.body["data"]] == names


def test_a_notice_with_a_nul_is_refused(running: Live) -> None:
    rows = [{"prompt": "def a():\n", "continuation": "    return 1\n"}]
    refused = running.admin("/takedowns", {"name": "nul", "rows": rows, "notice": {"claimant": "a\0b"}})
    assert (refused.status, refused.body["error"]["param"]) == (400, "notice.claimant")
    assert "NUL" in refused.body["error"]["message"]


def test_what_is_found_comes_in_pages(running: Live) -> None:
    first = running.admin("/takedowns?find=parser&limit=1").body
    assert [one["name"] for one in first["data"]] == ["parser-2"] and first["has_more"]
    rest = running.admin(f"/takedowns?find=parser&limit=1&after={first['data'][0]['id']}").body
    assert [one["name"] for one in rest["data"]] == ["parser"] and not rest["has_more"]


def test_the_command_line_finds_them(running: Live) -> None:
    asked = ["takedown", "list", "--find", "Söhne", "--json", "--url", running.url, "--key", ADMIN_KEY]
    done = CliRunner().invoke(build(), asked)
    assert done.exit_code == 0 and [one["name"] for one in json.loads(done.stdout)] == ["parser"]


def test_all_parts_of_a_notice_are_looked_through() -> None:
    assert sorted(Notice.model_fields) == sorted(NOTICE)
