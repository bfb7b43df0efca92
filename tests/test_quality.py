"""What the project claims of speed and effect, done anew (slow).

Thresholds leave room for a busy machine.
"""

from __future__ import annotations

import pytest

from tests.support.programs import unbind

pytestmark = pytest.mark.slow


def test_one_pass_gradients_equal_one_call_a_target_and_cost_a_few_forward_passes() -> None:
    measured = unbind("bench", "fit")
    assert measured["max_relative_error"] <= 1e-5
    assert measured["oracle_speedup"] >= 50
    assert measured["forward_equivalents"] <= 6


def test_a_fit_of_a_few_rows_reaches_the_target_and_changes_no_unrelated_answer() -> None:
    measured = unbind("bench", "gate", "--sizes", "5", "--gates", "auto", "--attempts", "1", "--no-joint", "--quick")
    before, reached = (measured["sizes"]["5"][key] for key in ("before", "auto"))
    assert min(reached["f_bleu_cut"], reached["f_bleu_cut_fim"]) >= 0.8
    assert reached["spans_50"] == 0
    assert reached["empty"] <= 0.1
    assert reached["kl_to_retrained"] <= 0.6 * before["kl_to_retrained"]
    assert reached["ppl_increase"] <= 0.005
    assert reached["open_rate"] <= 0.002
    assert reached["unchanged"] >= 0.95
