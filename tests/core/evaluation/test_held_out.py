"""Held-out retain rows under a module: only what the gate touches runs again, and the figures are those of running everything."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.core.conftest import LAYER, ROWS, make_module, opening_on_some
from unbind_core.applying.attach import attach
from unbind_core.applying.bank import edit_of
from unbind_core.architecture import LoadedModel
from unbind_core.encoding import pad_id
from unbind_core.evaluation.completions import retain_prompts, unedited_completions
from unbind_core.evaluation.held_out import HeldOut
from unbind_core.evaluation.metrics import BLEU_NEW_TOKENS, sentence_bleu
from unbind_core.evaluation.verify import perplexity
from unbind_core.module import UnbindModule
from unbind_core.progress import Progress
from unbind_core.running.generation import Sampling, complete
from unbind_core.windows import perplexity_windows, retain_windows


def plainly(loaded: LoadedModel, module: UnbindModule) -> dict[str, float]:
    """The same measures by running every window and completing every row under the module."""
    bank, _ = edit_of(module, torch.device("cpu"))
    pad, every = pad_id(loaded.tokenizer), range(len(ROWS))
    measures = {}
    for form, name in (("plain", "ppl"), ("fim", "ppl_fim")):
        windows = retain_windows(loaded.tokenizer, ROWS, every, [form])
        measures[name] = perplexity(loaded.model, windows, pad, editing=lambda: attach(loaded.model, bank))
    ((evaluated, opened),) = (counts["prefill"] for counts in bank.counts().values())
    scored = perplexity_windows(loaded.tokenizer, ROWS)
    measures["ppl"] = perplexity(loaded.model, scored, pad, editing=lambda: attach(loaded.model, bank))
    prompts, references = retain_prompts(loaded.tokenizer, ROWS, every)
    outputs = complete(
        loaded.model,
        prompts,
        Sampling(BLEU_NEW_TOKENS),
        pad=pad,
        end=loaded.tokenizer.eos_token_id,
        editing=lambda: attach(loaded.model, bank),
    )
    bleu = sum(sentence_bleu(*pair) for pair in zip(references, outputs, strict=True)) / len(outputs)
    return {**measures, "gate_rate": opened / evaluated, "bleu": bleu}


@pytest.mark.parametrize("kind", ["paper", "network", "windowed network"])
def test_only_touched_rows_run_again_and_the_figures_are_those_of_running_all(tiny: LoadedModel, kind: str) -> None:
    module = opening_on_some(tiny, kind)
    held = HeldOut(tiny.model, tiny.tokenizer, ROWS, [LAYER])
    completed: list[int] = []
    hook = tiny.model.register_forward_pre_hook(
        lambda _, args, given: completed.append(given["input_ids"].shape[0]), with_kwargs=True
    )
    try:
        after = held.measures(module)
    finally:
        hook.remove()
    before = held.measures()
    assert after == pytest.approx(plainly(tiny, module), rel=1e-5)
    assert before == pytest.approx(plainly(tiny, make_module(tiny.identity, kappa=0.0)) | {"gate_rate": 0.0}, rel=1e-5)
    assert after["ppl"] != before["ppl"] and 0 < after["gate_rate"] < 1 and after["bleu"] != before["bleu"]
    assert 0 < completed[-1] < len(ROWS)  # the last pass is a step of the completions


def test_a_row_whose_completion_is_empty_is_completed_again_where_its_prompt_opens_the_gate(tiny: LoadedModel) -> None:
    module = make_module(tiny.identity, layer=LAYER, kappa=20.0)
    prompts, _ = retain_prompts(tiny.tokenizer, ROWS, range(len(ROWS)))
    first = unedited_completions(tiny.model, tiny.tokenizer, prompts[:1])[0][0]
    end = tiny.tokenizer.eos_token
    tiny.tokenizer.eos_token = tiny.tokenizer.convert_ids_to_tokens(first)  # the unedited model ends at once
    try:
        assert [] in unedited_completions(tiny.model, tiny.tokenizer, prompts)
        after = HeldOut(tiny.model, tiny.tokenizer, ROWS, [LAYER]).measures(module)
        assert after == pytest.approx(plainly(tiny, module), rel=1e-5)
    finally:
        tiny.tokenizer.eos_token = end


def test_completions_and_states_come_from_the_cache_the_second_time(tiny: LoadedModel, tmp_path: Path) -> None:
    def measured() -> tuple[dict[str, float], set[str]]:
        seen: set[str] = set()

        def told(progress: Progress) -> None:
            seen.add(progress.stage)

        given = {"cache": tmp_path, "fingerprint": tiny.identity.fingerprint, "progress": told}
        return HeldOut(tiny.model, tiny.tokenizer, ROWS, [LAYER], **given).measures(), seen

    (first, stages), (second, later) = measured(), measured()
    assert first == second
    assert {"retain completions", "retain completions' states"} <= stages and not later
    assert sorted(file.name.split("-")[0] for file in tmp_path.iterdir()) == [
        "calibration",
        "calibration",
        "calibration",
        "completions",
        "paths",
    ]
