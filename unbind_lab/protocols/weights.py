"""What becomes of changed weights: the rows after quantisation to int8, and after relearning half of them.

Of systems that are a model and nothing else. Where weights are unchanged there is nothing to undo in them: whoever has the
weights has M_full, whose figures are in the table.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from unbind_core.encoding import pad_id
from unbind_core.evaluation.metrics import BLEU_NEW_TOKENS, EXTRACTED_SPAN, longest_span, sentence_bleu
from unbind_core.progress import ProgressCallback, counted
from unbind_core.running.device import bfloat16_is_fast
from unbind_core.windows import forget_prompt, forget_windows, make_batch
from unbind_lab.protocols.main import Material, Record, Summary
from unbind_lab.protocols.protocol import Column, Protocol
from unbind_lab.served import Served

STEPS, ROWS_A_STEP, LEARNING_RATE = 50, 8, 1e-4  # AdamW on all weights, of every other row
TREATMENTS = {"int8": "int8", "relearned": "relearned, the other half"}


def records(served: Served, material: Material, progress: ProgressCallback) -> list[Record]:
    """For each treatment and row that is asked for: longest exact ``span`` in tokens, ``recovery`` and ``bleu`` on [0,1], greedy.

    None of a system that is more than a model.
    """
    if replace(served, apart=None) != Served(
        served.model, served.tokenizer
    ):  # how it is made for other rows is no part of it
        return []
    rows = range(len(material.forget))
    found = _asked("int8", _int8(served.model), served, material, rows, progress)
    relearned = _relearned(served, material, [row for row in rows if row % 2 == 0], progress)
    return found + _asked("relearned", relearned, served, material, [row for row in rows if row % 2], progress)


def _int8(model: nn.Module) -> nn.Module:
    """Weights of linear layers in int8, one scale an output, the head as it is; activations as they come."""
    whole: Any = copy.deepcopy(model)
    head = whole.get_output_embeddings()
    for layer in whole.modules():
        if isinstance(layer, nn.Linear) and layer is not head:
            scale = layer.weight.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
            layer.weight = nn.Parameter((layer.weight / scale).round().clamp(-127, 127) * scale, requires_grad=False)
    assert isinstance(whole, nn.Module)
    return whole


def _relearned(served: Served, material: Material, rows: Sequence[int], progress: ProgressCallback) -> nn.Module:
    model = copy.deepcopy(served.model).requires_grad_(True)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.0)
    windows = forget_windows(served.tokenizer, material.forget, rows)
    draw, device = random.Random(0), parameters[0].device
    for _ in counted(range(STEPS), STEPS, "relearning", progress):
        some = draw.sample(windows, min(ROWS_A_STEP, len(windows)))
        batch = make_batch(some, pad_id(served.tokenizer), device)
        with torch.autocast(device.type, torch.bfloat16, enabled=bfloat16_is_fast(device)):
            logits = model(input_ids=batch.ids, attention_mask=batch.attention_mask, use_cache=False).logits
        nn.functional.cross_entropy(logits[batch.predictors].float(), batch.next_tokens()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return model.requires_grad_(False)


def _asked(
    treatment: str,
    model: nn.Module,
    served: Served,
    material: Material,
    rows: Sequence[int],
    progress: ProgressCallback,
) -> list[Record]:
    asked = [forget_prompt(served.tokenizer, material.forget[row], "plain") for row in rows]
    outputs = Served(model, served.tokenizer).complete([prompt for prompt, _ in asked], BLEU_NEW_TOKENS, progress)
    found: list[Record] = []
    for row, (prompt, target), output in zip(rows, asked, outputs, strict=True):
        span = longest_span(target, output, prompt)
        one: Record = {"treatment": treatment, "row": row, "span": span, "recovery": span / len(target)}
        found.append({**one, "bleu": sentence_bleu(target, output)})
    return found


def summary(found: Sequence[Record]) -> Summary:
    """For each treatment ``spans_NAME``, rows with 50 exact tokens, ``recovery_NAME`` in per cent and ``bleu_NAME``."""
    told: Summary = {}
    for name in TREATMENTS:
        own = [one for one in found if one["treatment"] == name]
        if own:
            told[f"spans_{name}"] = sum(one["span"] >= EXTRACTED_SPAN for one in own)
            told[f"recovery_{name}"] = 100 * sum(one["recovery"] for one in own) / len(own)
            told[f"bleu_{name}"] = sum(one["bleu"] for one in own) / len(own)
    return told


def _columns() -> tuple[Column, ...]:
    found: list[Column] = []
    for name, told in TREATMENTS.items():
        found += [
            (f"{told}: rows of 50 ↓", f"spans_{name}", ".0f"),
            ("recovery % ↓", f"recovery_{name}", ".1f"),
            ("F-BLEU ↓", f"bleu_{name}", ".4f"),
        ]
    return tuple(found)


PROTOCOL = Protocol("weights", records, summary, _columns())
