"""Upper bounds cover the truth as often as they say, at the rates and tails that retain rows have."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unbind_core.evaluation.bounds import Bound, mean_bound, share_bound, told

TRIALS = 600


@pytest.mark.parametrize(
    ("events", "n", "value"),
    [
        (0, 150, 0.019773),
        (0, 75, 0.039156),
        (1, 150, 0.031234),
        (3, 75, 0.100146),
        (10, 200, 0.083335),
        (74, 75, 0.999316),
    ],
)
def test_the_bound_of_a_share_is_clopper_and_pearsons(events: int, n: int, value: float) -> None:
    """Values of the beta distribution's 95 % quantile, with events + 1 and n - events."""
    found = share_bound(events, n)
    assert found.value == pytest.approx(value, abs=1e-6)
    assert (found.observed, found.method, found.n, found.level) == (events / n, "clopper-pearson", n, 0.95)


def test_nothing_seen_in_150_rows_says_at_most_2_per_cent() -> None:
    assert told({"touched": share_bound(0, 150).to_json()}).startswith("0 of 150 retain rows")
    assert "at most 2.0 % of such rows are (95 %, clopper-pearson)" in told({"touched": share_bound(0, 150).to_json()})
    assert mean_bound([0.0] * 150).value == pytest.approx(share_bound(0, 150).value, rel=1e-9)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 60), st.data())
def test_a_bound_is_above_what_was_seen_and_falls_with_rows_and_rises_with_ways(n: int, data: st.DataObject) -> None:
    events = data.draw(st.integers(0, n))
    one, twice = share_bound(events, n), share_bound(2 * events, 2 * n)
    assert one.observed <= twice.value <= one.value + 1e-9 <= 1 + 1e-9
    assert share_bound(events, n, ways=4).value >= one.value
    # of costs that are 0 or 1 nothing is known that the share does not say
    costs = [1.0] * events + [0.0] * (n - events)
    assert mean_bound(costs).value >= one.value - 1e-9 and mean_bound(costs, ways=4).value >= mean_bound(costs).value


def test_several_statements_of_the_same_rows_share_the_error() -> None:
    assert share_bound(0, 150, ways=5).value == pytest.approx(1 - 0.01 ** (1 / 150), abs=1e-9)
    assert share_bound(0, 150, level=0.99).value == pytest.approx(1 - 0.01 ** (1 / 150), abs=1e-9)
    assert share_bound(0, 150, ways=5).level == 0.95


@pytest.mark.parametrize("share", [0.005, 0.01, 0.03])
@pytest.mark.parametrize("n", [75, 150, 250])
def test_at_least_94_of_100_bounds_cover_the_truth_where_few_rows_cost_much(share: float, n: int) -> None:
    """Half a per cent to three of the rows are affected, with costs of a long tail, cut off at the cap of 1."""
    rng = np.random.default_rng(int(1000 * share) + n)
    mean = share * float(np.minimum(rng.lognormal(-1.5, 1.2, 200_000), 1).mean())
    bound_of = cache(lambda events: share_bound(events, n).value)
    shares = means = 0
    for _ in range(TRIALS):
        affected = rng.random(n) < share
        costs = np.where(affected, np.minimum(rng.lognormal(-1.5, 1.2, n), 1), 0.0)
        shares += bound_of(int(affected.sum())) >= share
        means += mean_bound(costs.tolist()).value >= mean
    assert shares >= 0.94 * TRIALS and means >= 0.94 * TRIALS


def test_a_threshold_chosen_on_one_part_is_certified_by_the_other() -> None:
    """The rows that set a threshold never open it, and would say nothing; those that did not say how many open it."""
    rng, n, covered, opened = np.random.default_rng(0), 75, 0, 0
    for _ in range(TRIALS):
        choice, certificate = rng.standard_exponential((2, n))
        threshold = float(choice.max())  # over all rows that choose, as where there is no gap
        truth = math.exp(-threshold)
        events = int((certificate > threshold).sum())
        opened += events > 0
        covered += share_bound(events, n).value >= truth
    assert covered >= 0.94 * TRIALS
    assert opened > 0.3 * TRIALS  # so often one of the others opens it


@pytest.mark.parametrize("call", ["share_bound(1, 0)", "share_bound(3, 2)", "mean_bound([])", "mean_bound([1.5])"])
def test_numbers_that_make_no_sense_are_refused(call: str) -> None:
    with pytest.raises(ValueError, match=r"give|must lie between 0 and 1"):
        eval(call, {"share_bound": share_bound, "mean_bound": mean_bound})


def test_the_sentence_names_what_was_observed_over_its_budget() -> None:
    kl = Bound(0.1, 0.02, "hoeffding", 75, 0.95).to_json()
    said = told({"touched": share_bound(2, 75).to_json(), "kl": kl, "over": ["kl"]})
    assert said.startswith("2 of 75") and said.endswith("over the budget on them: kl 0.0200")
