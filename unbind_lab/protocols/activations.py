"""How near a module's gate is to opening, at every position of the rows to forget and of the reported retain rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from unbind_core.applying.gates import activation, decided
from unbind_core.applying.networks import network_scores
from unbind_core.encoding import encode_prompt, pad_id
from unbind_core.module import UnbindModule
from unbind_core.progress import ProgressCallback
from unbind_core.running.capture import capture_states
from unbind_core.windows import MAX_WINDOW, Window, batches
from unbind_lab.filters.unbind import Modular
from unbind_lab.protocols.main import Material, Record, Summary
from unbind_lab.protocols.protocol import Protocol
from unbind_lab.served import Served

BINS = 20  # to a threshold, where a gate opens
HIGH = 0.999


def records(served: Served, material: Material, _progress: ProgressCallback) -> list[Record]:
    """One a row: its ``role``, and ``counts``, how many of its positions there are in each bin, by the bin's number; bin n begins
    at n / BINS thresholds. None of a system that is no module.
    """
    if not isinstance(served, Modular):
        return []
    texts = {"forget": [row.prompt + row.continuation for row in material.forget]}
    texts["retain"] = [row.text for row in material.retain]
    return [
        {"role": role, "row": row, "counts": counts}
        for role, own in texts.items()
        for row, counts in sorted(_counted(served, own))
    ]


def _counted(served: Modular, texts: Sequence[str]) -> Iterator[tuple[int, dict[int, int]]]:
    """Of each text as a request has it: its number, and positions by bin."""
    every = [encode_prompt(served.tokenizer, text)[:MAX_WINDOW] for text in texts]
    windows = [Window(tuple(ids), 1, row) for row, ids in enumerate(every)]
    module, device = served.module, next(served.model.parameters()).device
    for batch in batches(windows, pad_id(served.tokenizer), device=device):
        states = capture_states(served.model, batch, [module.layer])[module.layer]
        for window, own in zip(batch.windows, states, strict=True):
            e = evidence(module, own[: len(window.ids)].float().cpu())
            yield window.row, dict(sorted(Counter((e * BINS).floor().int().tolist()).items()))


def evidence(module: UnbindModule, states: Tensor) -> Tensor:
    """What the gate goes by in units of its threshold, FP32 [T], of a sequence's states FP32 [T,d]: the largest of the heads'
    mean scores over the window, or the paper's activation (eq. (5)).
    """
    if module.detector != "network":
        return (
            activation(states, module.w.float().reshape(1, -1), torch.tensor([module.s_ref], device=states.device))[
                :, 0
            ]
            / module.tau
        )
    assert module.b is not None and module.heads is not None and module.heads_b is not None
    scores = network_scores(states, module.w, module.b, module.heads, module.heads_b)
    return decided(scores, module.s_ref, module.tau, module.window, module.first, module.least)


def summary(found: Sequence[Record]) -> Summary:
    """``reached_ROLE``: per cent of positions at the threshold or above; ``median_ROLE`` and ``high_ROLE``: the end of the bin that
    half of the positions, and all but 0.1 % of them, are below, in thresholds.
    """
    told: Summary = {}
    for role in dict.fromkeys(one["role"] for one in found):
        counts = summed(one for one in found if one["role"] == role)
        every = sum(counts.values())
        told[f"reached_{role}"] = 100 * sum(count for number, count in counts.items() if number >= BINS) / every
        for name, share in (("median", 0.5), ("high", HIGH)):
            below, place = 0, 0
            for place in sorted(counts):
                below += counts[place]
                if below >= share * every:
                    break
            told[f"{name}_{role}"] = (place + 1) / BINS
    return told


def summed(found: Iterator[Record]) -> Counter[int]:
    """Positions by bin over rows; JSON has made text of the bins' numbers."""
    counts: Counter[int] = Counter()
    for one in found:
        counts.update({int(number): count for number, count in one["counts"].items()})
    return counts


PROTOCOL = Protocol(
    "activations",
    records,
    summary,
    (
        ("forget: at the threshold, %", "reached_forget", ".1f"),
        ("median", "median_forget", ".2f"),
        ("retain: at the threshold, %", "reached_retain", ".3f"),
        ("median", "median_retain", ".2f"),
        ("99.9 %", "high_retain", ".2f"),
    ),
)
