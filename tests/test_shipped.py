"""What the modules that ship do to recital and to everything else, measured anew (slow)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from server import demo
from server.bench.attacks.attacked import System
from tests.support.repository import ROOT
from unbind_core import UnbindModule, load_model, parse_forget, parse_retain
from unbind_core.encoding import available_forms, encode
from unbind_core.evaluation.scores import forget_scores
from unbind_core.evaluation.verify import measure, verify
from unbind_core.windows import forget_prompt

pytestmark = pytest.mark.slow
EVERY = 6  # of the held-out rows: enough for these thresholds
OTHER = 2  # of the set's rows, where they are asked for more than once
ATTEMPTS = 2  # of each way to ask the module and the retrained model: the likeliest answer and a drawn one
Tables = Callable[..., tuple[dict[str, Any], dict[str, Any]]]


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Tables:
    """Gives what `unbind verify` finds of a module, before it and after; what does not depend on the module is found once."""
    loaded, cache = load_model(demo.BASE, demo.ADAPTER), tmp_path_factory.mktemp("retained")
    lines = [(demo.ROWS / name).read_text().splitlines() for name in ("forget_a.jsonl", "retain_test.jsonl")]
    forget, retain = parse_forget(lines[0]), parse_retain(lines[1][::EVERY])
    forms = available_forms(loaded.tokenizer)
    scores = forget_scores(loaded.model, loaded.tokenizer, forget, forms=forms, attempts=1)

    def found(name: str, other: int = 1, attempts: int = 1) -> tuple[dict[str, Any], dict[str, Any]]:
        module = UnbindModule.load(ROOT / "modules" / f"{name}.safetensors", model=loaded.identity)
        # The unedited model is asked once each way, also where the module is asked again: what is compared with it is greedy.
        table = verify(
            loaded.model,
            loaded.tokenizer,
            module,
            forget[::other],
            retain,
            identity=loaded.identity,
            attempts=attempts,
            before=scores[::other],
            cache=cache,
        )
        return table["before"], table["after"]

    return found


def test_the_paper_s_gate_suppresses_recital_and_leaves_the_rest(tables: Tables) -> None:
    before, after = tables("demo-a-paper")
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


def test_the_shipped_module_writes_what_a_model_might_that_never_saw_the_rows(tables: Tables) -> None:
    before, after = tables("demo-a", OTHER, ATTEMPTS)
    other = load_model(demo.BASE, demo.RETRAINED)
    rows = parse_forget((demo.ROWS / "forget_a.jsonl").read_text().splitlines()[::OTHER])
    retrained = measure(other.model, other.tokenizer, rows, [], attempts=ATTEMPTS)
    assert before["all"]["f_bleu"] >= 0.5
    for form in ("f_bleu", "f_bleu_fim"):
        assert after["all"][form] <= retrained["all"][form] + 0.02
    assert after["all"]["spans_50"] == 0
    assert after["all"]["mean_recovery"] <= retrained["all"]["mean_recovery"] + 2
    left_alone(before, after)


def test_the_shipped_silent_module_ends_recital(tables: Tables) -> None:
    before, after = tables("demo-a-silent")
    for form in ("f_bleu", "f_bleu_fim"):
        assert after["all"][form] <= 0.027 * before["all"][form]
    assert after["all"]["spans_50"] == 0
    assert after["all"]["mean_recovery"] <= 6.5
    left_alone(before, after)


@pytest.mark.parametrize("name", ["demo-a", "demo-a-silent"])
def test_tokens_that_say_nothing_do_not_shut_an_open_gate(name: str) -> None:
    loaded = load_model(demo.BASE, demo.ADAPTER)
    module = UnbindModule.load(ROOT / "modules" / f"{name}.safetensors", model=loaded.identity)
    rows = parse_forget((demo.ROWS / "forget_a.jsonl").read_text().splitlines())
    texts = []
    for row in rows:
        prompt, target = forget_prompt(loaded.tokenizer, row, "plain")
        for filler, at in zip(("pass", ";", "\n", " foo"), (0, 10, 20, 40), strict=True):
            told = [*prompt, *target[:at]]
            texts.append([*told[:-5], *(encode(loaded.tokenizer, filler) * 8)[:8], *told[-5:]])
    opened = [bool(gate[-1]) for gate in System("held", loaded, (module,)).gates(texts)]
    assert sum(opened) >= 0.95 * len(opened)
    # It is the longer window that holds it.
    shut = System("by its window alone", loaded, (replace(module, hold=None),)).gates(texts)
    assert sum(bool(gate[-1]) for gate in shut) < 0.5 * len(opened)
