"""Trying an edit without running the whole model: kept states of one role's rows, and what an edit makes of them.

The choice of a gate (``search.py``, ``auto.py``) tries hundreds of edits at a layer. States below it do not change, so each
trial starts from the layer's kept output, and only rows on which a gate opens are computed again.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import random
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from unbind_core.applying.passes import Pass
from unbind_core.applying.selection import Edit, Selection
from unbind_core.architecture import decoder_layers, unwrap
from unbind_core.evaluation.kept import BatchStates, kept_states, rows_of
from unbind_core.progress import ProgressCallback, counted, silent
from unbind_core.running.capture import capture_nll
from unbind_core.running.likelihood import divergences, nll_of
from unbind_core.running.vocabulary import logits_in_parts
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
        """``cache`` is a file to keep the states in, named for what they depend on; where they are many there are more files."""
        self.model, self.pad = model, pad
        self.last = len(decoder_layers(model)) - 1
        self.layers = sorted({*layers, self.last})
        self.device = next(model.parameters()).device
        each = list(batches(windows, pad, tokens=tokens, device=self.device))
        self.batches = kept_states(
            each, self.layers, lambda batch: self.bytes_of(batch.ids.numel()), self._capture, cache, stage, progress
        )
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
        other.batches = [part for kept in self.batches if (part := kept.without(rows)) is not None]
        other._sum_up()
        return other

    def _capture(self, batch: Batch) -> tuple[dict[int, Tensor], Tensor]:
        return capture_nll(self.model, batch, self.layers)

    def bytes_of(self, positions: int) -> int:
        """Of the states of so many positions at all layers."""
        config = unwrap(self.model).config.get_text_config()  # type: ignore[union-attr, operator]
        itemsize = next(self.model.parameters()).dtype.itemsize
        return int(positions * config.hidden_size * itemsize * len(self.layers))

    def touched(self, kept: BatchStates, selection: Selection, layer: int) -> tuple[Edit, Tensor]:
        """The edit of a batch at ``layer``, and which of its real positions it changed (bool [B,T])."""
        return changed_by(selection, layer, kept.batch, kept.states[layer])

    def open_rate(self, selection: Selection, layer: int) -> float:
        """Share of the positions at which the gate of an edit's one module is open: of all, the first of every window included, but
        not of padding. No model is run.
        """
        each = [self.touched(kept, selection, layer)[0].totals() for kept in self.batches]
        return sum(opened for _, opened in each) / max(sum(evaluated for evaluated, _ in each), 1)

    def screen_kl(self, selection: Selection, layer: int) -> float:
        """Mean KL of an edit over one small batch: what the bisection over strengths looks at."""
        kept = self._screen
        edit, changed = self.touched(kept, selection, layer)
        if not bool(changed.any()):
            return 0.0
        pairs = zip(self._screen_logits, self._logits(kept.batch, layer, edit.states), strict=True)
        return sum(float(divergences(original, edited).sum()) for original, edited in pairs) / len(kept.nll)

    @cached_property
    def _screen(self) -> BatchStates:
        """Windows spread over all lengths, up to SCREEN_TOKENS, as one batch of kept states."""
        order = [window for kept in self.batches for window in kept.batch.windows]
        mean = sum(len(window.ids) for window in order) / len(order)
        step = max(1, round(len(order) * mean / SCREEN_TOKENS))
        batch = make_batch(order[min(step // 2, len(order) - 1) :: step], self.pad, self.device)
        return BatchStates(batch, *self._capture(batch))

    @cached_property
    def _screen_logits(self) -> list[Tensor]:
        """Of one small batch, in the parts in which an edit's are compared with them."""
        return list(self._logits(self._screen.batch, self.last, self._screen.states[self.last]))

    def _logits(self, batch: Batch, layer: int, states: Tensor) -> Iterator[Tensor]:
        """Logits of a batch's predictor positions with the output of ``layer`` as given."""
        return logits_in_parts(self.model, batch.ids, batch.attention_mask, batch.predictors, layer, states)

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
                part = rows_of(kept.batch, rows)
                edited = self._logits(part, layer, edit.states[rows])
                original = (
                    self._logits(part, self.last, kept.states[self.last][rows]) if kl_budget is not None else None
                )
                moved, apart = _compared(part, edited, original)
                mine = rows[kept.rows]
                nll = kept.nll.masked_scatter(mine, moved)
                if apart is not None:
                    kls = kls.masked_scatter(mine, apart.to(kls.dtype))
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


def _compared(
    batch: Batch, edited: Iterable[Tensor], original: Iterable[Tensor] | None
) -> tuple[Tensor, Tensor | None]:
    """NLL [N] of a batch's targets under an edit and, with the ``original`` logits, the divergences [N]; both in equal parts."""
    nll, kls, following = [], [], batch.next_tokens()
    for part, before in zip(edited, itertools.repeat(None) if original is None else original, strict=False):
        nll.append(nll_of(part, following[: len(part)]))
        following = following[len(part) :]
        if before is not None:
            kls.append(divergences(before, part))
    return torch.cat(nll), torch.cat(kls) if kls else None


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
