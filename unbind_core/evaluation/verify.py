"""Recital and everything else before and after a module: the table of ``unbind verify`` and of a takedown's evidence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from unbind_core.applying.attach import attach
from unbind_core.applying.bank import edit_of
from unbind_core.architecture import identify, numerics
from unbind_core.encoding import available_forms
from unbind_core.errors import ModelMismatch
from unbind_core.evaluation.held_out import HeldOut
from unbind_core.evaluation.metrics import BLEU_NEW_TOKENS
from unbind_core.evaluation.scores import (
    REPORTED_BY,
    RowScore,
    by_ways,
    forget_scores,
    require_known_rows,
    summary,
)
from unbind_core.identity import ModelIdentity
from unbind_core.module import UnbindModule
from unbind_core.progress import ProgressCallback, counted, silent
from unbind_core.rows import ForgetRow, RetainRow, forget_digest, spread
from unbind_core.running.capture import capture_nll
from unbind_core.running.generation import Editing
from unbind_core.running.recording import frozen
from unbind_core.windows import Window, batches

SAMPLED_ROWS = 12  # so many rows are asked in the ways that only reports look at, where each is asked once, plainly


def perplexity(
    model: nn.Module,
    windows: Sequence[Window],
    pad: int,
    *,
    editing: Editing = nullcontext,
    progress: ProgressCallback = silent,
) -> float:
    """exp(total target NLL / number of targets) over windows (Appendix A.3)."""
    device = next(model.parameters()).device
    total, count = 0.0, 0
    every = list(batches(windows, pad, device=device))
    with torch.no_grad(), frozen(model), editing():
        for batch in counted(every, len(every), "retain perplexity", progress):
            _, nll = capture_nll(model, batch, [])
            total, count = total + float(nll.double().sum()), count + len(nll)
    return math.exp(total / max(count, 1))


def measure(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    forget: Sequence[ForgetRow],
    retain: Sequence[RetainRow],
    *,
    attempts: int = 1,
    progress: ProgressCallback = silent,
) -> dict[str, Any]:
    """One column of the before/after table for a model without modules: ``all`` and, with retain rows, ``retain``. Raises DataError
    of rows that hold a token which the model lacks.
    """
    require_known_rows(model, tokenizer, forget, retain)
    scores = forget_scores(
        model, tokenizer, forget, forms=available_forms(tokenizer), attempts=attempts, progress=progress
    )
    table: dict[str, Any] = {"all": summary(scores), **by_ways(scores)}
    if retain:
        table["retain"] = HeldOut(model, tokenizer, retain, progress=progress).measures()
    return table


def _require(
    module: UnbindModule, model: nn.Module, tokenizer: PreTrainedTokenizerBase, identity: ModelIdentity | None
) -> None:
    try:
        module.require(identity or identify(model, tokenizer))
    except ModelMismatch as error:
        if identity is not None:
            raise
        raise ModelMismatch(
            f"{error}; where an adapter was merged, give the identity from before, identity=loaded.identity"
        ) from None
    module.require_numerics(numerics(model))


def verify(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    module: UnbindModule,
    forget: Sequence[ForgetRow],
    retain: Sequence[RetainRow],
    *,
    identity: ModelIdentity | None = None,
    attempts: int = 1,
    before: Sequence[RowScore] | None = None,
    cache: Path | None = None,
    progress: ProgressCallback = silent,
) -> dict[str, Any]:
    """The before/after table of a module: ``before`` and ``after``, each with ``all``, a group of rows a role, and ``retain``.

    Ways to ask are reported apart by whether a fit may look at them: ``chosen_by`` and ``reported_by``
    (:func:`unbind_core.evaluation.scores.by_ways`). Rows are reported apart by what the module's fit did with them (``fitted``,
    ``calibration``, ``validation``) where ``forget`` is the very set it was fitted on. ``attempts`` a condition, six
    conditions; the paper makes 5. With 0 each row is asked once, plainly, and a dozen of them in the ways that only reports look
    at. ``before``: the scores of the unedited model, where :func:`forget_scores` has given them for the same rows and attempts;
    ``cache``: a folder for what depends on the retain rows alone, which a fit may share. ``identity`` (from
    :func:`unbind_core.load_model`) is computed if not given; give it where adapters were merged. Raises ModelMismatch where the
    module is of another model than that, or was calibrated in other numerics than the model runs in: those are not its figures;
    DataError of rows that hold a token which the model lacks.
    """
    _require(module, model, tokenizer, identity)
    require_known_rows(model, tokenizer, forget, retain)
    groups: dict[str, Sequence[int]] = {}
    if forget_digest(forget) == module.forget_digest:
        groups = {
            "fitted": module.partitions["forget_fit"],
            "calibration": module.partitions["forget_calibration"],
            "validation": module.partitions["forget_validation"],
        }
    forms = available_forms(tokenizer)
    bank, _ = edit_of(module, next(model.parameters()).device)
    some = [forget[i] for i in spread(range(len(forget)), SAMPLED_ROWS)]
    table: dict[str, Any] = {}
    for column, editing in (("before", nullcontext), ("after", lambda: attach(model, bank))):
        asked = partial(forget_scores, model, tokenizer, editing=editing, progress=progress)
        found = (before if column == "before" else None) or asked(forget, forms=forms, attempts=attempts)
        reserved = asked(some, forms=(), ways=REPORTED_BY, new_tokens=BLEU_NEW_TOKENS) if attempts == 0 else []
        apart = by_ways([*found, *reserved])
        by_role = {name: summary([found[i] for i in indices]) for name, indices in groups.items()}
        table[column] = {"all": summary(found), **apart, **by_role}
    if retain:
        held = HeldOut(
            model,
            tokenizer,
            retain,
            [module.layer],
            cache=cache,
            fingerprint=module.model.fingerprint,  # the model's own, as was required
            progress=progress,
        )
        table["before"]["retain"] = held.measures()
        table["after"]["retain"] = held.measures(module, progress)
    return table
