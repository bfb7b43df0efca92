"""Documents say what is: targets, links, paths, settings, commands and imports that they name exist."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

import unbind_core
from server.api.admin.bodies import BudgetOptions, GuardOptions, Notice, TakedownOptions
from server.cli import build
from server.settings import PREFIX, Settings
from tests.support.folders import files_in
from tests.support.repository import FILES, ROOT, relative


def test_make_knows_the_targets_that_documents_name() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for path in (path for path in FILES if path.suffix == ".md"):
        named = set(re.findall(r"`make ([a-z]+)|^make ([a-z]+)", path.read_text(), re.MULTILINE))
        assert {first or second for first, second in named} <= targets, relative(path)


@pytest.mark.parametrize("path", [p for p in FILES if p.suffix == ".md"], ids=relative)
def test_links_between_documents_lead_somewhere(path: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", path.read_text(encoding="utf-8"))
    targets = [(path.parent / link if link else path, anchor) for link, anchor in links]
    assert not [target for target, _ in targets if not target.exists()]
    assert not [(target, anchor) for target, anchor in targets if anchor and anchor not in anchors(target)]


def anchors(page: Path) -> set[str]:
    """What headings of a page can be linked to as."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


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
    texts = [path.read_text() for path in (ROOT / "server").rglob("*.py")]
    source = "\n".join(texts)
    there = set(re.findall(r"\bcode=\"([a-z_]+)\"", source))
    there |= set(re.findall(r"\w: \(4\d\d, \"([a-z_]+)\",", source))  # what the registry refuses
    parts = [part for text in texts if "invalid(" in text for part in ast.walk(ast.parse(text))]
    refusals = [part for part in parts if isinstance(part, ast.Call) and getattr(part.func, "id", "") == "invalid"]
    there |= {str(code.value) for part in refusals for code in part.args[2:] if isinstance(code, ast.Constant)}
    cells = re.findall(r"^\| (`.+?) \|", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE)
    explained = {name for cell in cells for name in re.findall(r"`([a-z_]+)`", cell)}
    assert there <= explained
    assert all(f'"{name}"' in source or f"'{name}" in source for name in explained)


def test_the_page_s_backup_takes_all_but_what_is_made_again_and_what_lies_unsealed(tmp_path: Path) -> None:
    taken = {"evidence.key", "forget/f.jsonl", "jobs/j/report.json", "modules/objects/m", "audit.logged"}
    left = {"unbind.sqlite-wal", "audit.head", "cache/c", "engine/e", "scratch/worker/forget/f.jsonl"}
    for name in taken | left:
        (tmp_path / ".unbind" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / ".unbind" / name).touch()
    (line,) = re.findall(r"^tar -C \.unbind .*$", (ROOT / "docs/operations/data.md").read_text(), re.MULTILINE)
    copy = tmp_path / "copy"
    copy.mkdir()
    subprocess.run(["sh", "-c", line.replace("/backup/monday", "copy")], cwd=tmp_path, check=True)
    assert {path.relative_to(copy).as_posix() for path in files_in(copy)} == taken
