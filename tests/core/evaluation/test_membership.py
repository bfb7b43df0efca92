"""Telling members by numbers: certain where they differ, chance where they do not, and no credit for rows that were fitted on."""

from __future__ import annotations

import numpy as np
import pytest

from unbind_core.evaluation.membership import auc, told_apart

MEMBERS = np.arange(120) < 40


def test_the_area_counts_ties_half() -> None:
    members = np.array([True, True, False, False])
    assert auc(np.array([4.0, 3.0, 2.0, 1.0]), members) == 1.0
    assert auc(np.array([1.0, 2.0, 3.0, 4.0]), members) == 0.0
    assert auc(np.ones(4), members) == 0.5
    assert auc(np.array([2.0, 1.0, 1.0, 0.0]), members) == 0.875


def test_members_that_differ_in_two_numbers_together_are_told_though_neither_alone_tells_them() -> None:
    spread = np.random.default_rng(0).normal(size=(2, 120))
    both = {"first": spread[0] * 3 + MEMBERS, "second": spread[0] * 3 + spread[1] * 0.05}
    told = told_apart(both, MEMBERS)
    assert told.classifier > 0.99 and told.single < 0.75
    assert told.larger == told.classifier


def test_a_number_that_falls_for_members_tells_as_well_as_one_that_rises() -> None:
    told = told_apart({"falls": -1.0 * MEMBERS, "nothing": np.zeros(120)}, MEMBERS)
    assert (told.single, told.best) == (1.0, "falls")


def test_identical_sets_are_not_told_however_many_numbers_there_are() -> None:
    values = np.random.default_rng(1).normal(size=(30, 120))
    told = told_apart({str(i): row for i, row in enumerate(values)}, MEMBERS)
    assert abs(told.classifier - 0.5) < 0.15
    alike = told_apart({"same": np.ones(120)}, MEMBERS)
    assert (alike.classifier, alike.single) == (0.5, 0.5)


def test_too_few_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="5 members"):
        told_apart({"one": np.arange(8.0)}, np.arange(8) < 4)
