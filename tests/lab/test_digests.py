"""What is measured again: whatever a protocol or a system is made of has a part in its digest."""

from __future__ import annotations

from pathlib import Path

import pytest

import unbind_lab
from unbind_lab.keeping import code_of, files_of
from unbind_lab.protocols.known import PROTOCOLS
from unbind_lab.systems import SYSTEMS

ROOT = Path(unbind_lab.__file__).parents[1]


@pytest.mark.parametrize(
    ("further", "file"),
    [
        (PROTOCOLS["tasks"].further, "unbind_lab/tasks/last_line.toml"),
        (PROTOCOLS["tasks"].further, "unbind_lab/tasks/harness.py"),
        (PROTOCOLS["attacks"].further, "server/bench/attacks/known.py"),
        (PROTOCOLS["attacks"].further, "unbind_lab/protocols/attacked.py"),
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
