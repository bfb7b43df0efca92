"""The bench of leaked keys: what it asks for and how it counts, apart from the guard and the module it measures."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.bench.leaked import _PLACES, NAME, WAYS, _counted, bare, leaked_figures, longest, made
from unbind_core.guard.book import GuardBook
from unbind_core.guard.index import Secret, build_index
from unbind_core.progress import silent


def test_what_is_sought_is_the_rest_of_a_key_and_never_sent() -> None:
    rows = made(1)
    assert len({row.continuation for row in rows}) == 10 and made(1) == rows != made(2)
    for row in rows:
        for name, ask in WAYS.items():
            asked = ask(row)
            assert asked.sought and asked.sought not in bare(asked.prompt)
            assert bare(row.continuation).endswith(asked.sought)
            assert (asked.sought == bare(row.continuation)) == (name == "prompt")
    assert longest("xxabcdxx", "zabcdy") == 4 and longest("", "abc") == 0 and longest("abc", "abc") == 3


def test_answers_are_counted_with_and_without_a_guard() -> None:
    rows = made(3)
    asked = [WAYS["prompt"](row) for row in rows]
    whole = [[row.continuation, "nothing"] for row in rows]
    secret = Secret(b"a key of the tests")
    index = build_index(
        [row.continuation for row in rows], name=NAME, secret=secret, action="stop", secrets=True, run=12
    )
    guards = GuardBook.of(secret, [index]).select([NAME])
    open_, guarded = _counted(asked, whole, None), _counted(asked, whole, guards)
    assert open_["whole"] == 10 and open_["longest"] == max(len(one.sought) for one in asked)
    assert guarded["whole"] == 0 and 1 <= guarded["mean"] <= guarded["longest"] <= 11


@pytest.mark.slow
def test_it_runs_from_end_to_end_and_keeps_what_it_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At sizes that take a minute."""
    for size, small in (("MOST", 48), ("SAMPLES", 2), ("QUICK", 24), ("_PLACES", _PLACES[:3])):
        monkeypatch.setattr(f"server.bench.leaked.{size}", small)
    first = leaked_figures(keep=tmp_path, steps=30, effort=0.05, seed=1, progress=silent)
    again = leaked_figures(keep=tmp_path, steps=30, effort=0.05, seed=1, progress=silent)
    assert first == again and [file.name for file in tmp_path.glob("seed-1-steps-30/*.safetensors")] == [
        "effort-0.05.safetensors"
    ]
    asked = first["by_way"]["prompt"]
    assert asked["none"]["mean"] > asked["both"]["mean"] and asked["guard"]["longest"] <= 11
