"""What is measured again: whatever a protocol or a system is made of has a part in its digest. What was not stands in no table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import unbind_lab
from unbind_lab.keeping import code_of, files_of
from unbind_lab.lab import Lab
from unbind_lab.protocols.known import PROTOCOLS
from unbind_lab.setting import Setting
from unbind_lab.systems import SYSTEMS, chosen
from unbind_lab.table import markdown

ROOT = Path(unbind_lab.__file__).parents[1]


@pytest.mark.parametrize(
    ("further", "file"),
    [
        (PROTOCOLS["tasks"].further, "unbind_lab/tasks/last_line.toml"),
        (PROTOCOLS["tasks"].further, "unbind_lab/tasks/harness.py"),
        (PROTOCOLS["attacks"].further, "server/bench/attacks/known.py"),
        (PROTOCOLS["attacks"].further, "unbind_lab/protocols/attacked.py"),
        (PROTOCOLS["related"].further, "unbind_core/evaluation/neighbours.py"),
        (PROTOCOLS["muse"].further, "unbind_core/evaluation/membership.py"),
        (PROTOCOLS["strengths"].further, "unbind_lab/protocols/varied.py"),
        (PROTOCOLS["successive"].further, "unbind_core/fitting/corrections/learning.py"),
        (PROTOCOLS["layers"].further, "unbind_core/fitting/corrections/learning.py"),
        (SYSTEMS["unbind-strict"].further, "unbind_core/fitting/paper.py"),  # type: ignore[union-attr]
        (SYSTEMS["prompt-filter"].further, "server/bench/guard/prompt_filter.py"),  # type: ignore[union-attr]
        (SYSTEMS["guard"].further, "unbind_core/guard/textguard.py"),  # type: ignore[union-attr]
    ],
)
def test_a_digest_covers_what_is_measured_with(further: tuple[object, ...], file: str) -> None:
    assert ROOT / file in [path for module in further for path in files_of(module)]


def test_a_digest_follows_the_files_of_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "measures"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "table.toml").write_text("a = 1")
    monkeypatch.syspath_prepend(str(tmp_path))
    import measures  # type: ignore[import-not-found]

    before = code_of(measures)
    (package / "table.toml").write_text("a = 2")
    assert code_of(measures) != before


def test_a_table_leaves_out_what_was_measured_on_other_rows_than_m_full(setting: Setting, tmp_path: Path) -> None:
    folder, protocols = tmp_path / setting.name, ["main", "access"]
    asked_once = replace(setting, access_attempts=1)
    Lab(asked_once, tmp_path).run(chosen(["m-full", "m-base"]), protocols)
    changed = replace(asked_once, retain_rows=5, completed_rows=3)
    Lab(changed, tmp_path).run(chosen(["m-full"]), protocols)
    first, *_, access, _, _ = markdown(folder).split("### ")  # the last two are the paper's
    for part, more in ((first, ""), (access, " --protocols access")):
        assert "| m-full |" in part and "| m-base |" not in part
        assert "Left out, as they were measured on other rows or by other code than m-full: m-base (shipped)." in part
        assert f"`unbind lab run {setting.name}{more}` measures them anew." in part
    assert "m-base" not in markdown(folder, folder)

    Lab(changed, tmp_path).run(chosen(["m-base"]), protocols)
    Lab(replace(changed, learning_rates=(1e-3,)), tmp_path).run(chosen(["ga"]), configurations=["paper"])
    found = markdown(folder)
    assert "Left out" not in found and found.count("| m-base |") == 5 and found.count("| ga |") == 4
