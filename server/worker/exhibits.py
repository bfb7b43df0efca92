"""What evidence shows beside the tables: how a gate's score is spread over forget and retain rows, and samples of text.

Made while the job has the model at hand; kept in the job's private folder, for the samples hold protected code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unbind_core.applying.attach import attach
from unbind_core.applying.bank import ModuleBank
from unbind_core.applying.gates import NetworkGates
from unbind_core.applying.networks import Block, Networks
from unbind_core.applying.passes import Pass
from unbind_core.architecture import LoadedModel
from unbind_core.encoding import decode_behind, pad_id
from unbind_core.module import UnbindModule
from unbind_core.rows import ForgetRow, RetainRow
from unbind_core.running.capture import capture_states
from unbind_core.running.generation import Sampling, complete
from unbind_core.windows import Window, batches, forget_prompt, forget_windows, retain_windows, window_limit

BINS = 40
ROWS = 12  # of each kind, for the histograms: some thousand positions
SAMPLES = 3
SAMPLE_TOKENS = 96


def exhibits(
    loaded: LoadedModel, module: UnbindModule, forget: Sequence[ForgetRow], retain: Sequence[RetainRow]
) -> dict[str, Any]:
    """``{"histograms", "samples"}`` as plain JSON values."""
    limit = window_limit(loaded.model)
    forget_part = forget_windows(loaded.tokenizer, forget, range(min(ROWS, len(forget))), module.forms, limit)
    retain_part = retain_windows(loaded.tokenizer, retain, range(min(ROWS, len(retain))), module.forms, limit)
    return {
        "histograms": histograms(loaded, module, forget_part, retain_part),
        "samples": samples(loaded, module, forget),
    }


def histograms(
    loaded: LoadedModel, module: UnbindModule, forget: Sequence[Window], retain: Sequence[Window]
) -> dict[str, Any]:
    """Counts of what the gate goes by over target positions, in common bins, with the threshold.

    That is w'h - s_ref for the paper's gate; for a network the windowed evidence in units of its threshold.
    """
    scores = {"forget": _scores(loaded, module, forget), "retain": _scores(loaded, module, retain)}
    every = torch.cat([found for found in scores.values() if len(found)] or [torch.zeros(1)])
    threshold = module.tau if module.heads is None else 1.0
    low, high = float(every.min()), max(float(every.max()), threshold)
    high = high if high > low else low + 1.0
    return {
        "low": low,
        "high": high,
        "threshold": threshold,
        "score": "gate score w'h - s" if module.heads is None else "evidence in units of the threshold",
        "counts": {name: torch.histc(found, BINS, low, high).int().tolist() for name, found in scores.items()},
    }


def _scores(loaded: LoadedModel, module: UnbindModule, windows: Sequence[Window]) -> Tensor:
    device = next(loaded.model.parameters()).device
    tensors = {name: tensor.to(device) for name, tensor in module.tensors.items()}
    found = []
    for batch in batches(windows, pad_id(loaded.tokenizer), device=device):
        whole = capture_states(loaded.model, batch, [module.layer])[module.layer]
        if module.heads is None:
            scores = whole.float() @ tensors["w"] - module.s_ref
        else:
            asked = torch.ones((1, 1, 1), dtype=torch.bool, device=device)
            gates = NetworkGates(
                [module], Networks([Block([module], [tensors])]), asked, [0], len(module.heads) + 1, device
            )
            scores = gates(module.layer, whole, Pass(real=batch.attention_mask.bool()))[0][..., 0]
        found.append(scores[batch.predictors].cpu())
    return torch.cat(found) if found else torch.zeros(0)


def samples(loaded: LoadedModel, module: UnbindModule, forget: Sequence[ForgetRow]) -> list[dict[str, str]]:
    """Greedy completions of a few forget rows without and with the module."""
    rows = forget[:SAMPLES]
    tokenizer, model = loaded.tokenizer, loaded.model
    prompts = [forget_prompt(tokenizer, row, "plain")[0] for row in rows]
    bank = ModuleBank.of([module], next(model.parameters()).device)

    def texts(**editing: Any) -> list[str]:
        outputs = complete(
            model, prompts, Sampling(SAMPLE_TOKENS), pad=pad_id(tokenizer), end=tokenizer.eos_token_id, **editing
        )
        return [decode_behind(tokenizer, *pair) for pair in zip(prompts, outputs, strict=True)]

    pairs = zip(rows, texts(), texts(editing=lambda: attach(model, bank)), strict=True)
    return [
        {"prompt": row.prompt, "protected": row.continuation, "before": before, "after": after}
        for row, before, after in pairs
    ]
