"""What a gate that opens later is held to, and what a gate costs."""

from __future__ import annotations

import math
from dataclasses import replace

from unbind_core.fitting.calibration import Budgets
from unbind_core.fitting.judge import Aim, Cost, Remainder

AIM = Aim({"plain": 0.1, "fim": 0.1}, recovery=0.2, empty=0.1)
REACHED = Remainder(5, {"plain": 0.05, "fim": 0.05}, spans=0, recovery=0.1, empty=0.0)
MISSED = replace(REACHED, f_bleu={"plain": 0.3, "fim": 0.05})


def test_where_the_aim_was_reached_it_has_to_be_reached_still() -> None:
    assert AIM.no_worse(replace(REACHED, recovery=0.2), REACHED)
    for worse in (MISSED, replace(REACHED, spans=1), replace(REACHED, recovery=0.21), replace(REACHED, empty=0.2)):
        assert not AIM.no_worse(worse, REACHED)


def test_where_the_aim_was_missed_no_more_may_be_left_of_as_many_rows() -> None:
    assert AIM.no_worse(MISSED, MISSED) and AIM.no_worse(REACHED, MISSED)
    more = replace(MISSED, f_bleu={"plain": 0.31, "fim": 0.05})
    for worse in (more, replace(MISSED, spans=1), replace(MISSED, recovery=0.11), replace(MISSED, rows=4)):
        assert not AIM.no_worse(worse, MISSED)


def test_a_firmer_correction_mends_what_is_left_and_no_empty_answers() -> None:
    assert not AIM.said_too_much(REACHED) and not AIM.said_too_much(replace(REACHED, empty=1.0))
    for more in (MISSED, replace(REACHED, spans=1), replace(REACHED, recovery=0.21, empty=1.0)):
        assert AIM.said_too_much(more)


def test_a_cost_that_is_not_a_number_is_over_its_budget() -> None:
    found = Cost(0.0, 0.0, 0.0, Budgets(0.0, 0.0, 0.0, 0.0))
    assert found.within(Budgets()) and found.within(found.cautious)
    for name in ("kl", "nll", "bleu", "open_rate"):
        unknown = replace(found, cautious=replace(found.cautious, **{name: math.nan}))
        assert [one.partition(" ")[0] for one in unknown.over(Budgets())] == [name] and not unknown.within(Budgets())
