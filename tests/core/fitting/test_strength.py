"""The search for a strength, where it is known what each one costs and which rows it makes forget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.conftest import make_network_module
from unbind_core import UnbindModule
from unbind_core.fitting.calibration import Budgets
from unbind_core.fitting.judge import Cost, Remainder
from unbind_core.fitting.options import Clock, Target
from unbind_core.fitting.strength import PROBED_ROWS, UPDATE_SIZES, StrengthSearch, Verdict
from unbind_core.identity import ModelIdentity

MODULE = make_network_module(ModelIdentity("f" * 64, "tiny", 16, 4))


class Known(StrengthSearch):
    """The search for a strength where it is known what each one costs and which rows it makes forget."""

    def __init__(self, module: UnbindModule, costs: Sequence[float], enough: int, probed: int) -> None:
        budgets = Budgets(kl=1.0, nll=1.0, bleu=1.0, open_rate=1.0)
        super().__init__(cast(Any, self), budgets, Target(), Clock(), [*range(PROBED_ROWS), PROBED_ROWS])
        self.module, self.costs, self.enough, self.enough_of_probe = module, costs, enough, probed

    def at(self, strength: float) -> UnbindModule:
        return replace(self.module, kappa=strength)

    def cost(self, module: UnbindModule) -> Cost:
        kl = self.costs[UPDATE_SIZES.index(module.kappa)]
        return Cost(0.0, kl, 0.0, Budgets(kl=kl, nll=0.0, bleu=0.0, open_rate=0.0))

    def remainder(self, module: UnbindModule, rows: Sequence[int], *, thorough: bool = False) -> Remainder:
        needed = self.enough_of_probe if len(rows) == PROBED_ROWS else self.enough
        return Remainder({"plain": 0.0 if UPDATE_SIZES.index(module.kappa) >= needed else 1.0}, 0, 0.0)


@settings(deadline=None)
@given(st.integers(0, 7), st.integers(0, 7), st.integers(0, 7))
def test_the_least_strength_that_reaches_the_target_is_taken(affordable: int, enough: int, easier: int) -> None:
    costs = [0.5 if i < affordable else 2.0 for i in range(len(UPDATE_SIZES))]
    known = Known(MODULE, costs, enough, min(enough, easier))
    found = known.least(known.at)
    assert found.strength == found.module.kappa
    if affordable == 0:
        assert found.verdict is Verdict.NONE and found.remainder is None
    else:
        assert UPDATE_SIZES.index(found.strength) == min(enough, affordable - 1)
        assert found.verdict is (Verdict.CHOSEN if enough < affordable else Verdict.MISSES)
        assert found.remainder is not None
        assert found.remainder.reaches(known.target) == (enough < affordable)


def test_a_level_that_only_the_probe_passes_asks_all_rows_three_times_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    known, asked = Known(MODULE, [0.5] * len(UPDATE_SIZES), len(UPDATE_SIZES), 0), []
    remainder = known.remainder

    def counted(module: UnbindModule, rows: Sequence[int], *, thorough: bool = False) -> Remainder:
        asked.append(len(rows))
        return remainder(module, rows, thorough=thorough)

    monkeypatch.setattr(known, "remainder", counted)
    found = known.least(known.at)
    assert asked.count(PROBED_ROWS + 1) == 3 and found.verdict is Verdict.MISSES
    assert found.remainder is not None and not found.remainder.reaches(known.target)


def test_a_strength_over_budget_is_never_taken_even_where_more_costs_less() -> None:
    known = Known(MODULE, [2.0, *[0.5] * (len(UPDATE_SIZES) - 1)], 0, 0)
    found = known.least(known.at)
    assert (found.strength, found.verdict) == (UPDATE_SIZES[1], Verdict.CHOSEN)
