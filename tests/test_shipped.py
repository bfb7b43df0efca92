"""What the modules that ship do to recital and to everything else, measured anew (slow)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.programs import unbind

pytestmark = pytest.mark.slow


def test_the_paper_s_gate_suppresses_recital_and_leaves_the_rest() -> None:
    measured = unbind("verify", "modules/demo-a-paper.safetensors", "--attempts", "1")
    before, after = measured["before"], measured["after"]
    assert before["all"]["f_bleu"] >= 0.5
    assert after["all"]["f_bleu"] <= 0.6 * before["all"]["f_bleu"]
    assert after["all"]["f_bleu_fim"] <= 0.6 * before["all"]["f_bleu_fim"]
    assert after["all"]["spans_50"] <= 0.75 * before["all"]["spans_50"]  # over six ways to ask
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
    measured = unbind("verify", "modules/demo-a-silent.safetensors", "--attempts", "1")
    before, after = measured["before"], measured["after"]
    for form in ("f_bleu", "f_bleu_fim"):
        assert after["all"][form] <= 0.027 * before["all"][form]
    assert after["all"]["spans_50"] == 0
    assert after["all"]["mean_recovery"] <= 6.5
    left_alone(before, after)
