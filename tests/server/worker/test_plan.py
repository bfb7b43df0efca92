"""What the worker makes of a fit's result without the fit: what people are told of a module that was made."""

from __future__ import annotations

from typing import Any

from server.worker.plan import remark
from unbind_core.evaluation.bounds import mean_bound, share_bound

OVER = {
    "touched": share_bound(3, 75).to_json(),
    "kl": mean_bound([0.5] * 3 + [0.0] * 72, ways=4).to_json(),
    "over": ["kl"],
}


def fitted(**more: Any) -> dict[str, dict[str, Any]]:
    return {"fit": {"outcome": "calibrated", "selected": None, **more}}


def test_a_module_within_its_budgets_on_rows_that_chose_nothing_has_no_remark() -> None:
    assert remark({}) == remark(fitted()) == remark(fitted(certificate=None)) == ""
    assert remark(fitted(certificate={**OVER, "over": []})) == ""


def test_what_costs_too_much_there_is_remarked_beside_what_is_left() -> None:
    said = remark(fitted(certificate=OVER))
    assert said.startswith("certificate: 3 of 75 retain rows that chose nothing were touched: at most 10.0 %")
    assert said.endswith("over the budget on them: kl 0.0200")
    both = remark(fitted(outcome="short", certificate=OVER))
    assert both.startswith("short: ") and both.endswith(said)


def test_of_a_module_that_misses_its_aim_it_is_said_by_what() -> None:
    missed = ["empty answers 0.083 (aim 0.050)", "rows with long exact spans 1 (aim 0)"]
    said = remark(
        fitted(outcome="short", selected={"forgot": {"f_bleu": {"plain": 0.01}, "spans": 1}, "missed": missed})
    )
    assert said.endswith("misses its aim: empty answers 0.083 (aim 0.050), rows with long exact spans 1 (aim 0)")
