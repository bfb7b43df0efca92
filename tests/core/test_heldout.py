"""Held-out retain rows under a module: only what the gate touches runs again, and the figures are those of running everything."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.core.conftest import make_module, make_network_module
from unbind_core.architecture import LoadedModel
from unbind_core.capture import frozen, recording
from unbind_core.evaluation import perplexity
from unbind_core.gates import network_scores, windowed
from unbind_core.generation import Sampling, complete
from unbind_core.heldout import HeldOut
from unbind_core.hooks import attach
from unbind_core.metrics import sentence_bleu
from unbind_core.module import UnbindModule
from unbind_core.progress import Progress
from unbind_core.retained import retain_prompts, unedited_completions
from unbind_core.rows import RetainRow
from unbind_core.trials import BLEU_NEW_TOKENS, edit_of
from unbind_core.windows import pad_id, retain_windows

LAYER = 1
ROWS = [
    RetainRow(
        f"class Item{i}:\n    size = {i * 37}\n\n    def area_{i % 3}(self):\n        return self.size ** {i}\n" * 2
    )
    for i in range(10)
]


def highest(loaded: LoadedModel, module: UnbindModule) -> list[float]:
    """What the module's gate goes by, at its highest on each row's unedited path: prompt and greedy completion."""
    prompts, _ = retain_prompts(loaded.tokenizer, ROWS, range(len(ROWS)))
    found = []
    for prompt, output in zip(prompts, unedited_completions(loaded.model, loaded.tokenizer, prompts), strict=True):
        ids = torch.tensor([[*prompt, *output]])
        with torch.no_grad(), frozen(loaded.model), recording(loaded.model, [LAYER]) as states:
            loaded.model(ids)
        if module.heads is None:
            scores = states[LAYER].float() @ module.w - module.s_ref
        else:
            each = network_scores(states[LAYER], module.w, *module.network)
            scores = windowed(each, module.window, torch.arange(1, ids.shape[1] + 1)).amax(-1)
        found.append(float(scores.max()))
    return found


def opening_on_some(loaded: LoadedModel, kind: str) -> UnbindModule:
    """A strong module of one kind whose gate opens on some of the rows."""

    def made(seed: int, **changes: Any) -> UnbindModule:
        if kind == "paper":
            return make_module(loaded.identity, layer=LAYER, seed=seed, kappa=20.0, **changes)
        window = {"network": 1, "windowed network": 4}[kind]
        return make_network_module(
            loaded.identity, layer=LAYER, seed=seed, window=window, heads=1, kappa=20.0, **changes
        )

    for seed in range(20):
        tops = sorted(highest(loaded, made(seed)))
        gap, middle = max((high - low, (high + low) / 2) for low, high in pairwise(tops[2:-2]))
        if gap > 0.02 * (tops[-1] - tops[0]) > 0:
            break
    if kind == "paper":
        return made(seed, tau=middle)
    reference = middle - 4 * (tops[-1] - middle)  # far enough below that scores are not clipped
    return made(seed, s_ref=reference, tau=middle - reference, tau_close=0.9 * (middle - reference))


def plainly(loaded: LoadedModel, module: UnbindModule) -> dict[str, float]:
    """The same measures by running every window and completing every row under the module."""
    bank, _ = edit_of(module, torch.device("cpu"))
    pad, every = pad_id(loaded.tokenizer), range(len(ROWS))
    measures = {}
    for form, name in (("plain", "ppl"), ("fim", "ppl_fim")):
        windows = retain_windows(loaded.tokenizer, ROWS, every, [form])
        measures[name] = perplexity(loaded.model, windows, pad, editing=lambda: attach(loaded.model, bank))
    ((evaluated, opened),) = (counts["prefill"] for counts in bank.counts().values())
    prompts, references = retain_prompts(loaded.tokenizer, ROWS, every)
    outputs = complete(
        loaded.model, prompts, Sampling(BLEU_NEW_TOKENS), pad=pad, end=loaded.tokenizer.eos_token_id,
        editing=lambda: attach(loaded.model, bank),
    )  # fmt: skip
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


def test_completions_come_from_the_cache_the_second_time(tiny: LoadedModel, tmp_path: Path) -> None:
    def measured() -> tuple[dict[str, float], set[str]]:
        seen: set[str] = set()

        def told(progress: Progress) -> None:
            seen.add(progress.stage)

        given = {"cache": tmp_path, "fingerprint": tiny.identity.fingerprint, "progress": told}
        return HeldOut(tiny.model, tiny.tokenizer, ROWS, [LAYER], **given).measures(), seen

    (first, stages), (second, later) = measured(), measured()
    assert first == second
    assert stages - later == {"retain completions"} and len(list(tmp_path.iterdir())) == 1
