"""Retain rows that are nearly a forget row: found where they alone keep gates shut on all rows, and learned by the detector."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support import memorising
from unbind_core import FitOptions, load_model
from unbind_core.fitting import screening
from unbind_core.fitting.fit import context_of, fit
from unbind_core.fitting.network import train_network
from unbind_core.fitting.separation import WINDOWS, Scored, alike, separation
from unbind_core.progress import Progress
from unbind_core.rows import ForgetRow, RetainRow

RATE = 0.01
FORGET = [ForgetRow(row["prompt"], row["continuation"]) for row in memorising.forget_rows()]
ORDINARY = [RetainRow(row["text"]) for row in memorising.retain_rows(80)]
LINES = FORGET[2].continuation.splitlines(keepends=True)
# As one beside a forget row may be: the same head, the same lines in another order, another end.
SIBLING = RetainRow(FORGET[2].prompt + LINES[1] + LINES[0] + LINES[2] + "    return first\n")


def of(values: Sequence[float], first: int = 0) -> list[Scored]:
    """A row of each value, whose scores are that throughout; positions from ``first`` on are to be reached."""
    return [(row, first, torch.full((40, 1), value)) for row, value in enumerate(values)]


def found(theirs: Sequence[float]) -> list[int]:
    ours, retain = of([3.0, 3.5, 4.0], first=30), of(theirs)
    return alike([separation(ours, retain, window, RATE) for window in WINDOWS], ours, retain, RATE)


def test_one_row_without_which_the_sides_part_is_found() -> None:
    assert found([-4.0] * 70 + [9.0] + [-4.0] * 29) == [70]
    assert found([-4.0] * 150 + [8.0, 9.0] + [-4.0] * 48) == [150, 151]


def test_none_is_where_the_sides_part_or_where_many_rows_are_in_the_way() -> None:
    assert found([-4.0] * 99 + [2.0]) == []
    assert found([-4.0] * 90 + [9.0] * 10) == []
    assert found([9.0]) == []  # nothing would be left to choose by


def clusters() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """States of two rows to forget, of others, and a few of others that lie beside the first row."""
    generator, axes = torch.Generator().manual_seed(0), torch.eye(8)
    rows = torch.arange(2).repeat_interleave(400)
    narrow, wide = 1 - 0.9 * axes[2], 1 - 0.7 * axes[2]  # what tells the few from the row varies little in the row
    forget = 4 * axes[rows] + torch.randn(800, 8, generator=generator) * narrow
    near = 4 * axes[:1] + axes[2:3] + 0.3 * torch.randn(12, 8, generator=generator)
    return forget, rows, torch.randn(4000, 8, generator=generator) * wide, near


def test_states_that_are_learned_too_are_told_from_the_row_that_they_are_like() -> None:
    forget, rows, retain, near = clusters()
    plain, taught = (
        train_network(forget, rows, retain, width=16, steps=300, batch=512, more=more) for more in (None, near)
    )
    assert float(plain.scores(near).amax(1).mean()) > 1 > -1 > float(taught.scores(near).amax(1).mean())
    for network in (plain, taught):
        assert float((network.scores(forget).amax(1) > 0).float().mean()) > 0.95


def test_a_row_to_choose_by_that_is_nearly_protected_is_learned_and_gates_open_sooner_for_it(memorised: Path) -> None:
    loaded, told = load_model(memorised), list[str]()
    given = (loaded.model, loaded.tokenizer, FORGET, ORDINARY[:40])
    choosing = [SIBLING, *ORDINARY[40:60]]

    def progress(one: Progress) -> None:
        told.append(one.stage)

    quick = FitOptions(effort=0.3)
    context = context_of(*given, choosing, "m", loaded.identity, quick, progress, cache=None)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(screening, "alike", lambda *_: [])
        _, splits, _, _ = screening.Screening(context).detector(128, 258, 2048)
    without = max(split.margin for split in splits)
    assert without < 0 and "detector of 128, again" not in told
    _, report = fit(
        *given, name="m", retain_calibration=choosing, identity=loaded.identity, options=quick, progress=progress
    )
    assert report.retain_rows_alike == [40] and report.retain_rows_left_out == []
    assert "detector of 128, again" in told
    tried = [level["separation"] for level in report.levels]
    assert max(split["margin"] for split in tried) > without + 0.2
    assert all(split["retained"] >= split["highest"] for split in tried)
