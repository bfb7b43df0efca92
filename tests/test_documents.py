"""Documents say what is: targets, links, paths, settings, commands and imports that they name exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import unbind_core
from server.api.admin.bodies import BudgetOptions, GuardOptions, Notice, TakedownOptions
from server.cli import build
from server.settings import PREFIX, Settings
from tests.support.repository import FILES, ROOT, relative


def test_make_knows_the_targets_that_documents_name() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for path in (path for path in FILES if path.suffix == ".md"):
        named = set(re.findall(r"`make ([a-z]+)|^make ([a-z]+)", path.read_text(), re.MULTILINE))
        assert {first or second for first, second in named} <= targets, relative(path)


@pytest.mark.parametrize("path", [p for p in FILES if p.suffix == ".md"], ids=relative)
def test_links_between_documents_lead_somewhere(path: Path) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", path.read_text(encoding="utf-8"))
    assert not [link for link in links if not (path.parent / link).exists()]


def test_paths_in_the_architecture_page_exist() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    core, service = text.split("## `server`")
    for section, base in ((core, "unbind_core"), (service, "server")):
        for cell in re.findall(r"^\| (`[^|]+) \|", section, re.MULTILINE):
            names = [name for name in re.findall(r"`([\w/.]+)`", cell) if "/" in name or name.endswith(".py")]
            assert all((ROOT / base / name).exists() for name in names), cell


def test_the_page_of_the_api_names_all_that_a_takedown_takes() -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    fields = {
        *TakedownOptions.model_fields,
        *BudgetOptions.model_fields,
        *GuardOptions.model_fields,
        *Notice.model_fields,
    }
    assert [field for field in sorted(fields) if not re.search(rf"`(options\.)?{field}`", text)] == []


def test_every_setting_is_documented_as_it_is() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \|.*\| (.*) \|$", (ROOT / "docs/settings.md").read_text(), re.MULTILINE)
    described = [(name, PREFIX + name.upper(), field.description) for name, field in Settings.model_fields.items()]
    assert rows == described


@pytest.mark.parametrize("page", ["README.md", "docs/python.md"])
def test_the_python_of_a_page_compiles_and_imports_what_exists(page: str) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        tree = ast.parse(block)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == "unbind_core":
                assert {alias.name for alias in node.names} <= set(unbind_core.__all__)


def test_the_python_page_names_everything_public() -> None:
    text = (ROOT / "docs/python.md").read_text()
    assert not [name for name in unbind_core.__all__ if not re.search(rf"\b{name}\b", text)]


def test_the_readme_s_commands_and_options_exist() -> None:
    text = (ROOT / "README.md").read_text().replace("\\\n", " ")
    commands = re.findall(r"^\.venv/bin/unbind (.*)$", text, re.MULTILINE)
    assert {command.split()[0] for command in commands} >= {"fit", "show", "verify", "serve"}
    for command in commands:
        name, *rest = command.split()
        asked = [name, rest[0]] if name == "takedown" else [name]  # a group of commands
        shown = CliRunner(env={"COLUMNS": "250", "NO_COLOR": "1", "TERM": "dumb"}).invoke(build(), [*asked, "--help"])
        assert shown.exit_code == 0, shown.output
        assert all(option in shown.output for option in rest if option.startswith("--")), command


def test_every_error_code_is_explained_and_none_that_is_not_there() -> None:
    source = "\n".join(path.read_text() for path in (ROOT / "server").rglob("*.py"))
    there = set(re.findall(r"\bcode=\"([a-z_]+)\"", source))
    cells = re.findall(r"^\| (`.+?) \|", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE)
    explained = {name for cell in cells for name in re.findall(r"`([a-z_]+)`", cell)}
    assert there <= explained
    assert all(f'"{name}"' in source or f"'{name}" in source for name in explained)
