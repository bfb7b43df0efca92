"""Trying an edit without running the whole model: kept states of one role's rows, and what an edit makes of them.

The choice of a gate (``search.py``, ``auto.py``) tries hundreds of edits at a layer. States below it do not change, so each
trial starts from the layer's kept output, and only rows on which a gate opens are computed again.
"""

from __future__ import annotations

import copy
import hashlib
import json
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from unbind_core.applying.passes import Pass
from unbind_core.applying.selection import Edit, Selection
from unbind_core.architecture import decoder_layers
from unbind_core.files import write_whole
from unbind_core.progress import ProgressCallback, counted, silent
from unbind_core.running.capture import target_nll
from unbind_core.running.recording import frozen, recording
from unbind_core.running.upper_layers import logits_above
from unbind_core.windows import Batch, Window, batches, make_batch

SCREEN_TOKENS = 1024
EARLY_SHARE, EARLY_FACTOR = 0.1, 1.5


@dataclass
class Outcome:
    """Sums over the scored tokens of one role: NLL under the edit, KL(original || edited), open and evaluated positions;
    ``scored`` tokens were gone through, all of them if ``complete``. ``rows``: the same for each row, for bounds.
    """

    nll: float = 0.0
    kl: float = 0.0
    open_gates: int = 0
    evaluated: int = 0
    scored: int = 0
    complete: bool = True
    rows: dict[int, RowOutcome] = field(default_factory=dict)


@dataclass
class RowOutcome:
    """One row's part: rise of its summed NLL, its summed KL, its scored tokens; the positions changed, and all of them."""

    nll: float = 0.0
    kl: float = 0.0
    scored: int = 0
    changed: int = 0
    positions: int = 0


@dataclass
class BatchStates:
    """One batch with its unedited states at every layer [B,T,d] and the NLL of its targets [N]."""

    batch: Batch
    states: dict[int, Tensor]
    nll: Tensor
    rows: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.rows = self.batch.window_index()


class Replay:
    """The windows of one role, with the states from which any edit at any layer can be tried."""

    def __init__(
        self,
        model: nn.Module,
        windows: Sequence[Window],
        layers: Sequence[int],
        *,
        pad: int,
        tokens: int = 2048,
        cache: Path | None = None,
        stage: str = "states",
        progress: ProgressCallback = silent,
    ) -> None:
        """``cache`` is a file to keep the states in, named for what they depend on."""
        self.model, self.pad = model, pad
        self.last = len(decoder_layers(model)) - 1
        self.layers = sorted({*layers, self.last})
        self.device = next(model.parameters()).device
        each = list(batches(windows, pad, tokens=tokens, device=self.device))
        self.batches = (_load(cache, each, self.layers) if cache and each else None) or [
            self._keep(batch) for batch in counted(each, len(each), stage, progress)
        ]
        if cache and not cache.exists():
            _save(cache, self.batches)
        random.Random(0).shuffle(self.batches)  # so that the first few say something of all lengths
        self._sum_up()

    def _sum_up(self) -> None:
        self.count = sum(len(kept.nll) for kept in self.batches)
        self.base_nll = float(sum(kept.nll.double().sum() for kept in self.batches))

    def without(self, rows: Collection[int]) -> Replay:
        """The same for the windows of all other rows."""
        other = copy.copy(self)
        for cached in ("_screen", "_screen_logits"):  # of all rows
            other.__dict__.pop(cached, None)
        other.batches = [part for kept in self.batches if (part := _without(kept, rows)) is not None]
        other._sum_up()
        return other

    def _keep(self, batch: Batch) -> BatchStates:
        with torch.no_grad(), frozen(self.model), recording(self.model, self.layers) as states:
            logits = self.model(input_ids=batch.ids, attention_mask=batch.attention_mask, use_cache=False).logits
        return BatchStates(batch, states, target_nll(logits, batch))

    def touched(self, kept: BatchStates, selection: Selection, layer: int) -> tuple[Edit, Tensor]:
        """The edit of a batch at ``layer``, and which of its real positions it changed (bool [B,T])."""
        return changed_by(selection, layer, kept.batch, kept.states[layer])

    def screen_kl(self, selection: Selection, layer: int) -> float:
        """Mean KL of an edit over one small batch: what the bisection over strengths looks at."""
        kept = self._screen
        edit, changed = self.touched(kept, selection, layer)
        if not bool(changed.any()):
            return 0.0
        logits = logits_above(self.model, kept.batch.ids, kept.batch.attention_mask, layer, edit.states)
        return float(_kls(self._screen_logits, logits[kept.batch.predictors]).sum()) / len(kept.nll)

    @cached_property
    def _screen(self) -> BatchStates:
        """Windows spread over all lengths, up to SCREEN_TOKENS, as one batch of kept states."""
        order = [window for kept in self.batches for window in kept.batch.windows]
        mean = sum(len(window.ids) for window in order) / len(order)
        step = max(1, round(len(order) * mean / SCREEN_TOKENS))
        batch = make_batch(order[min(step // 2, len(order) - 1) :: step], self.pad, self.device)
        return self._keep(batch)

    @cached_property
    def _screen_logits(self) -> Tensor:
        kept = self._screen
        logits = logits_above(self.model, kept.batch.ids, kept.batch.attention_mask, self.last, kept.states[self.last])
        return logits[kept.batch.predictors]

    def run(
        self,
        selection: Selection,
        layer: int,
        *,
        kl_budget: float | None = None,
        progress: ProgressCallback = silent,
    ) -> Outcome:
        """Measure an edit. With ``kl_budget`` (a mean over tokens) KL is measured too, and the run ends where it is out of reach:
        the sum is over what all tokens together may have, or a tenth of the tokens have half as much again as they may.
        """
        outcome = Outcome()
        for kept in counted(self.batches, len(self.batches), "edited rows", progress):
            edit, changed = self.touched(kept, selection, layer)
            rows = changed.any(-1)
            nll, kls = kept.nll, torch.zeros_like(kept.nll)
            if bool(rows.any()):
                part = _rows_of(kept.batch, rows)
                logits = logits_above(self.model, part.ids, part.attention_mask, layer, edit.states[rows])
                mine = rows[kept.rows]
                nll = kept.nll.masked_scatter(mine, target_nll(logits, part))
                if kl_budget is not None:
                    original = logits_above(
                        self.model, part.ids, part.attention_mask, self.last, kept.states[self.last][rows]
                    )
                    kls = kls.masked_scatter(
                        mine, _kls(original[part.predictors], logits[part.predictors]).to(kls.dtype)
                    )
                    outcome.kl += float(kls.double().sum())
            evaluated, opened = edit.totals()
            outcome.evaluated, outcome.open_gates = outcome.evaluated + evaluated, outcome.open_gates + opened
            outcome.nll += float(nll.double().sum())
            outcome.scored += len(nll)
            _by_row(outcome.rows, kept, changed, nll, kls)
            early = outcome.scored >= EARLY_SHARE * self.count
            allowed = min(EARLY_FACTOR * outcome.scored, self.count) if early else self.count
            if kl_budget is not None and outcome.kl > kl_budget * allowed:
                outcome.complete = False
                break
        return outcome


def changed_by(selection: Selection, layer: int, batch: Batch, states: Tensor) -> tuple[Edit, Tensor]:
    """The edit of a batch's ``states`` [B,T,d] at ``layer``, and which of the real positions it changed (bool [B,T])."""
    rows, real = states.new_zeros(states.shape[0], dtype=torch.int64), batch.attention_mask.bool()
    edit = selection.edit(layer, states, Pass(rows=rows, real=real))
    return edit, (edit.states != states).any(-1) & real


def _save(file: Path, kept: Sequence[BatchStates]) -> None:
    """Write the states of all batches, whole or not at all."""
    tensors = {f"{i}.{layer}": states.cpu() for i, one in enumerate(kept) for layer, states in one.states.items()}
    tensors |= {f"{i}.nll": one.nll.cpu() for i, one in enumerate(kept)}
    write_whole(file, lambda temporary: save_file(tensors, temporary))


def _load(file: Path, each: Sequence[Batch], layers: Sequence[int]) -> list[BatchStates] | None:
    """What :func:`_save` wrote for these batches; None where there is no such file or it is damaged."""
    try:
        with safe_open(file, framework="pt", device=str(each[0].ids.device)) as content:
            return [
                BatchStates(batch, {n: content.get_tensor(f"{i}.{n}") for n in layers}, content.get_tensor(f"{i}.nll"))
                for i, batch in enumerate(each)
            ]
    except (OSError, SafetensorError):
        return None


def _without(kept: BatchStates, rows: Collection[int]) -> BatchStates | None:
    """A batch without the windows of some rows; None where nothing is left of it."""
    stay = torch.tensor([window.row not in rows for window in kept.batch.windows], device=kept.nll.device)
    if bool(stay.all()):
        return kept
    if not bool(stay.any()):
        return None
    states = {layer: part[stay] for layer, part in kept.states.items()}
    return BatchStates(_rows_of(kept.batch, stay), states, kept.nll[stay[kept.rows]])


def _rows_of(batch: Batch, rows: Tensor) -> Batch:
    """The sub-batch of the rows that are true in ``rows`` (bool [B])."""
    chosen = tuple(window for window, wanted in zip(batch.windows, rows.tolist(), strict=True) if wanted)
    return Batch(chosen, batch.ids[rows], batch.attention_mask[rows], batch.predictors[rows])


def _kls(original: Tensor, edited: Tensor) -> Tensor:
    """KL(original || edited) of each row, natural log, FP32 softmax: logits [N,V] -> [N]."""
    p = torch.log_softmax(original.float(), -1)
    q = torch.log_softmax(edited.float(), -1)
    return nn.functional.kl_div(q, p, reduction="none", log_target=True).sum(-1)


def _by_row(rows: dict[int, RowOutcome], kept: BatchStates, changed: Tensor, nll: Tensor, kls: Tensor) -> None:
    """Add a batch's tokens to the rows that they belong to."""
    count = len(kept.batch.windows)
    sums = torch.zeros(3, count, dtype=torch.float64, device=nll.device)
    parts = torch.stack(((nll - kept.nll).double(), kls.double(), torch.ones_like(nll).double()))
    by_window = zip(
        kept.batch.windows, sums.index_add_(1, kept.rows, parts).T.tolist(), changed.sum(-1).tolist(), strict=True
    )
    for window, (rise, kl, scored), moved in by_window:
        row = rows.setdefault(window.row, RowOutcome())
        row.nll, row.kl, row.scored = row.nll + rise, row.kl + kl, row.scored + int(scored)
        row.changed, row.positions = row.changed + moved, row.positions + len(window.ids)


def cache_key(*parts: object) -> str:
    """The part of a cache file's name that says what its content depends on."""
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:32]


def retain_replay(
    model: nn.Module,
    windows: Sequence[Window],
    layers: Sequence[int],
    *,
    pad: int,
    cache: Path | None,
    fingerprint: str,
    stage: str = "calibration states",
    progress: ProgressCallback = silent,
) -> Replay:
    """Windows of retain rows with their states at some layers, from ``cache`` where they are known."""
    dtype = next(model.parameters()).dtype
    key = cache_key(fingerprint, dtype, [(w.ids, w.first_target) for w in windows], layers)
    return Replay(
        model,
        windows,
        layers,
        pad=pad,
        cache=cache and cache / f"calibration-{key}.safetensors",
        stage=stage,
        progress=progress,
    )
