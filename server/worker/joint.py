"""What several modules cost together. Each was calibrated alone; gates that open on the same code add up.

All active modules at once are held against the retain budgets of one; where they are over, each other module is measured in a pair
with the new one, so that the answer can say which pair and by how much.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import torch

from unbind_core.applying.attach import attach
from unbind_core.applying.bank import ModuleBank
from unbind_core.architecture import LoadedModel
from unbind_core.encoding import pad_id
from unbind_core.module import UnbindModule
from unbind_core.progress import Progress, ProgressCallback
from unbind_core.rows import RetainRow, retain_digest
from unbind_core.running.likelihood import divergences, nll_of
from unbind_core.running.recording import frozen
from unbind_core.running.vocabulary import last_states, logits_of
from unbind_core.windows import Batch, batches, retain_windows, window_limit

SAMPLE_ROWS = 48
DEFAULT_BUDGET = 0.01


def measure_together(
    loaded: LoadedModel, modules: Sequence[UnbindModule], rows: Sequence[RetainRow], progress: ProgressCallback
) -> dict[str, Any]:
    """Retain KL and NLL increase of ``modules`` (the new one first) together; the pairs only where that is over budget.

    Rows that repeat what one of them forgets were left out of its fit and are left out here.
    """
    outside = {digest for module in modules for digest in module.measured.get("retain_left_out", ())}
    rows = [row for row in rows if retain_digest(row) not in outside]
    chosen = random.Random(0).sample(range(len(rows)), min(SAMPLE_ROWS, len(rows)))
    device = next(loaded.model.parameters()).device
    windows = retain_windows(loaded.tokenizer, rows, sorted(chosen), modules[0].forms, window_limit(loaded.model))
    every = list(batches(windows, pad_id(loaded.tokenizer), device=device))
    budgets = {name: float(modules[0].budgets.get(name, DEFAULT_BUDGET)) for name in ("kl", "nll")}
    steps = len(modules)  # the whole, and a pair for each other module
    progress(Progress("joint cost", 0, steps))
    together = _cost(loaded, modules, every)
    within = together["kl"] <= budgets["kl"] and together["nll_increase"] <= budgets["nll"]
    pairs: list[dict[str, Any]] = []
    if not within:
        for done, other in enumerate(modules[1:], start=1):
            progress(Progress("joint cost", done, steps, other.name))
            pairs.append({"modules": [modules[0].name, other.name], **_cost(loaded, (modules[0], other), every)})
        pairs.sort(key=lambda pair: -math.inf if math.isnan(pair["kl"]) else -pair["kl"])
    return {
        "measured": True,
        "within": within,
        "modules": [module.name for module in modules],
        **together,
        "budgets": budgets,
        "pairs": pairs,
    }


def _cost(loaded: LoadedModel, modules: Sequence[UnbindModule], every: Sequence[Batch]) -> dict[str, float]:
    bank = ModuleBank.of(modules, next(loaded.model.parameters()).device)
    kl = nll = 0.0
    count = 0
    with torch.no_grad(), frozen(loaded.model):
        for batch in every:
            count += int(batch.predictors.sum())
            opened = _opened(bank)
            with attach(loaded.model, bank):
                edited = last_states(loaded.model, batch.ids, batch.attention_mask)
            if _opened(bank) == opened:
                continue  # nothing was changed
            plain = last_states(loaded.model, batch.ids, batch.attention_mask)
            following = batch.next_tokens()
            both = (logits_of(loaded.model, states[batch.predictors]) for states in (plain, edited))
            for before, after in zip(*both, strict=True):
                targets, following = following[: len(before)], following[len(before) :]
                kl += float(divergences(before, after).sum())
                nll += float((nll_of(after, targets) - nll_of(before, targets)).double().sum())
    return {"kl": kl / max(count, 1), "nll_increase": nll / max(count, 1)}


def _opened(bank: ModuleBank) -> int:
    return sum(opened for counts in bank.counts().values() for _, opened in counts.values())
