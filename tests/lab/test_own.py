"""Systems that a file of the user's defines: as the documents have them, measured and shown like all others."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from server.cli import build
from unbind_core.errors import UnbindError
from unbind_lab.lab import Lab
from unbind_lab.setting import Setting
from unbind_lab.systems import chosen, own
from unbind_lab.table import markdown
from unbind_lab.trained.training import Trained

ROOT = Path(__file__).parents[2]
SECTION = (ROOT / "docs/lab.md").read_text().split("## A system of your own\n")[1].split("\n## ")[0]
(EXAMPLE,) = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)


def test_the_documents_example_is_measured_resumed_and_shown(setting: Setting, tmp_path: Path) -> None:
    path, told = tmp_path / "mine.py", list[str]()
    path.write_text(EXAMPLE)
    for _ in range(2):
        systems = own(path)
        assert [one.name for one in systems] == ["capped-ga", "by-name"] and isinstance(systems[0], Trained)
        Lab(setting, tmp_path / "out", report=told.append).run([*chosen(["m-full", "ga"]), *systems])
    folder = tmp_path / "out" / setting.name
    written = {file: file.stat().st_mtime_ns for file in folder.rglob("*") if file.is_file()}
    names = [line.split("|")[1].strip() for line in markdown(folder).splitlines() if line.startswith("|")]
    shown = names[2 : names.index("system", 1)]
    assert shown == ["m-full", "ga", "ga", "by-name", "capped-ga", "capped-ga"]
    beside = markdown(folder, folder)
    assert beside.count("capped-ga") == 2 and beside.count("by-name") == 1

    path.write_text(EXAMPLE.replace("clamp(max=", "clamp(min=0.0, max="))
    before = json.loads((folder / "main/capped-ga-paper.json").read_text())["made_of"]
    Lab(setting, tmp_path / "out").run(own(path), configurations=("paper",))
    assert json.loads((folder / "main/capped-ga-paper.json").read_text())["made_of"] != before
    untouched = [file for file in written if file.name.startswith("ga-")]
    assert untouched and all(file.stat().st_mtime_ns == written[file] for file in untouched)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read (No such file or directory)"),
        ("x = 1\n", "defines no system"),
        ("from unbind_lab.trained.ga import GA\n", "defines no system"),
        ("import nothing_of_the_kind\n", "fails: ModuleNotFoundError: No module named 'nothing_of_the_kind'"),
        ("def loss(:\n", "fails: SyntaxError"),
        (EXAMPLE.replace('"capped-ga"', '"ga"'), "'ga' is a shipped system's name"),
        (EXAMPLE.replace('"capped-ga"', '"../ga"'), "'../ga' cannot be a file's name"),
    ],
)
def test_a_file_that_cannot_be_run_is_told_of_before_anything_is_made(
    text: str | None, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "mine.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UnbindError, match=re.escape(said)):
        own(path)
    found = CliRunner(env={"COLUMNS": "250", "NO_COLOR": "1", "TERM": "dumb"}).invoke(
        build(), ["lab", "run", "demo", "--own", str(path), "--out", str(tmp_path / "out")]
    )
    assert found.exit_code == 1 and said in found.output.replace("\n", " ")
    assert not (tmp_path / "out").exists()
