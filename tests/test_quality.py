"""What the project claims of speed and effect, done anew (slow).

Thresholds leave room for a busy machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.support.programs import ENVIRONMENT
from tests.support.repository import ROOT

pytestmark = pytest.mark.slow


def unbind(*arguments: str) -> Any:
    """What ``unbind ... --json`` prints on its standard output."""
    done = subprocess.run(
        [sys.executable, "-m", "server", *arguments, "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1200,
        env=ENVIRONMENT,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def test_one_pass_gradients_equal_one_call_a_target_and_cost_a_few_forward_passes() -> None:
    measured = unbind("bench", "fit")
    assert measured["max_relative_error"] <= 1e-5
    assert measured["oracle_speedup"] >= 50
    assert measured["forward_equivalents"] <= 6


def test_one_pass_gradients_are_exact_in_double_precision() -> None:
    assert unbind("bench", "fit", "--dtype", "float64")["max_relative_error"] <= 1e-10


def test_the_cost_of_the_bank_is_reported_for_every_size_placement_and_phase() -> None:
    cost = unbind("bench", "filter")["cost"]
    assert {row["modules"] for row in cost} == {1, 8, 64, 512}
    assert {row["phase"] for row in cost} == {"decode", "prefill"}
    assert min(row["share"] for row in cost if row["modules"] == 1) < 0.25


def test_the_paper_s_gate_suppresses_recital_and_leaves_the_rest() -> None:
    measured = unbind("verify", "modules/demo-a-paper.safetensors")
    before, after = measured["before"], measured["after"]
    assert before["all"]["f_bleu"] >= 0.5
    assert after["all"]["f_bleu"] <= 0.55 * before["all"]["f_bleu"]
    assert after["all"]["f_bleu_fim"] <= 0.6 * before["all"]["f_bleu_fim"]
    assert after["all"]["spans_50"] <= 0.5 * before["all"]["spans_50"]  # over six ways to ask
    assert after["retain"]["ppl"] <= 1.03 * before["retain"]["ppl"]
    assert after["retain"]["bleu"] >= before["retain"]["bleu"] - 0.02
    assert {"fitted", "calibration", "validation"} <= set(after)


def left_alone(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Rows that no fit has seen are as they were."""
    assert after["retain"]["ppl"] <= 1.005 * before["retain"]["ppl"]
    assert after["retain"]["bleu"] >= before["retain"]["bleu"] - 0.005
    assert after["retain"]["gate_rate"] <= 0.002


def test_the_shipped_module_writes_what_a_model_might_that_never_saw_the_rows() -> None:
    measured = unbind("verify", "modules/demo-a.safetensors", "--reference", "server/demo/retrained")
    before, after, retrained = measured["before"], measured["after"], measured["reference"]
    assert before["all"]["f_bleu"] >= 0.5
    for form in ("f_bleu", "f_bleu_fim"):
        assert after["all"][form] <= retrained["all"][form] + 0.02
    assert after["all"]["spans_50"] == 0
    assert after["all"]["mean_recovery"] <= retrained["all"]["mean_recovery"] + 2
    left_alone(before, after)


def test_the_shipped_silent_module_ends_recital() -> None:
    measured = unbind("verify", "modules/demo-a-silent.safetensors")
    before, after = measured["before"], measured["after"]
    for form in ("f_bleu", "f_bleu_fim"):
        assert after["all"][form] <= 0.027 * before["all"][form]
    assert after["all"]["spans_50"] == 0
    assert after["all"]["mean_recovery"] <= 6.5
    left_alone(before, after)


def test_a_fit_of_a_few_rows_reaches_the_target_and_changes_no_unrelated_answer() -> None:
    measured = unbind("bench", "gate", "--sizes", "12", "--gates", "auto", "--attempts", "1", "--no-joint")
    before, reached = (measured["sizes"]["12"][key] for key in ("before", "auto"))
    assert min(reached["f_bleu_cut"], reached["f_bleu_cut_fim"]) >= 0.8
    assert reached["spans_50"] == 0
    assert reached["empty"] <= 0.1
    assert reached["kl_to_retrained"] <= 0.6 * before["kl_to_retrained"]
    assert reached["ppl_increase"] <= 0.005
    assert reached["open_rate"] <= 0.002
    assert reached["unchanged"] >= 0.95
