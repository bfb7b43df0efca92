"""What one update sees: rows to forget, the fixed answer instead of them, rows to keep; the model that learns and the one it left.

The formulas of Appendix C that several losses share are here, as pure functions. Only scored tokens enter any mean: the
continuation of a forget row, all but the first token of a retain row. Neither prompts nor padding do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from unbind_core.running.device import bfloat16_is_fast
from unbind_core.windows import Batch

TOGETHER = 8  # rows that share a pass


def token_nll(logits: Tensor, tokens: Tensor) -> Tensor:
    """-log p of each token: logits [N,V], int64 [N] -> [N]."""
    return nn.functional.cross_entropy(logits, tokens, reduction="none")


def kl(reference: Tensor, logits: Tensor) -> Tensor:
    """KL(reference || model), mean over scored positions (eq. (22)): logits [N,V] each -> scalar."""
    p, q = reference.log_softmax(-1), logits.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).mean()


def by_row(values: Tensor, rows: Tensor, count: int, *, mean: bool = False) -> Tensor:
    """Sum, or mean, over the tokens of each row: values [N], which row each is of, int64 [N] -> [count]."""
    total = values.new_zeros(count).index_add(0, rows, values)
    return total / torch.bincount(rows, minlength=count).clamp(min=1) if mean else total


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def pieces(batch: Batch) -> list[Batch]:
    """The rows of a batch, in their order, a few at a time, and no longer than the longest of the few.

    Where rows stand by length, nearly nothing of a piece is padding; of a batch of 32 half is.
    """
    found = []
    for at in range(0, len(batch.windows), TOGETHER):
        windows = batch.windows[at : at + TOGETHER]
        own = slice(at, at + TOGETHER), slice(max(len(window.ids) for window in windows))
        found.append(Batch(windows, batch.ids[own], batch.attention_mask[own], batch.predictors[own]))
    return found


def _logits(model: nn.Module, batch: Batch) -> Tensor:
    logits: Tensor = model(input_ids=batch.ids, attention_mask=batch.attention_mask, use_cache=False).logits
    return logits


@dataclass
class Texts:
    """What a model says of a batch: ``passes`` are its pieces, each with the logits [b,t,V] of every position."""

    passes: Sequence[tuple[Batch, Tensor]]
    batch: Batch

    @cached_property
    def logits(self) -> Tensor:
        """FP32 (or wider) [N,V]: of the scored positions."""
        return torch.cat([_wide(logits[piece.predictors]) for piece, logits in self.passes])

    @cached_property
    def tokens(self) -> Tensor:
        """int64 [N]."""
        return self.batch.next_tokens()

    @cached_property
    def nll(self) -> Tensor:
        """FP32 [N]."""
        return token_nll(self.logits, self.tokens)

    def row_log_likelihoods(self, *, mean: bool = False) -> Tensor:
        """s(x,y) of each row, or its mean over the row's tokens: [B]."""
        return by_row(-self.nll, self.batch.window_index(), len(self.batch.windows), mean=mean)

    def row_probabilities(self) -> Tensor:
        """The arithmetic mean of the probabilities of each row's tokens: [B]."""
        return by_row((-self.nll).exp(), self.batch.window_index(), len(self.batch.windows), mean=True)

    @cached_property
    def context_nll(self) -> Tensor:
        """FP32 [M]: of the tokens in front of the scored ones, all but the first of each row."""
        found = []
        for piece, logits in self.passes:
            before = torch.zeros_like(piece.predictors)
            for row, window in enumerate(piece.windows):
                before[row, : max(window.first_target - 1, 0)] = True
            found.append(token_nll(_wide(logits[before]), piece.ids[:, 1:][before[:, :-1]]))
        return torch.cat(found)


class Step:
    """One update. ``options``: the system's own numbers. Passes are made when a loss first asks for them, and once."""

    def __init__(
        self,
        model: nn.Module,
        reference: nn.Module,
        options: Mapping[str, float],
        forget_batch: Batch,
        chosen_batch: Batch | None = None,
        retain_batch: Batch | None = None,
    ) -> None:
        self.model, self.reference_model, self.options = model, reference, options
        self.forget_batch, self._chosen, self._retain = forget_batch, chosen_batch, retain_batch

    def run(self, model: nn.Module, batch: Batch) -> Texts:
        """What it says; products in bfloat16 where those are fast, as the paper's."""
        with self.products():
            return Texts([(piece, _logits(model, piece)) for piece in pieces(batch)], batch)

    def products(self) -> AbstractContextManager[object]:
        """What a pass is made under."""
        device = self.forget_batch.ids.device
        wide = next(self.model.parameters()).dtype is not torch.float32
        return nullcontext() if wide else torch.autocast(device.type, torch.bfloat16, enabled=bfloat16_is_fast(device))

    def taught(self, batch: Batch) -> Texts:
        """The same by the frozen reference, M_full."""
        with torch.no_grad():
            return self.run(self.reference_model, batch)

    @property
    def retain_batch(self) -> Batch:
        """Rows to keep."""
        assert self._retain is not None, "the system's 'retains' says that it needs none"
        return self._retain

    @cached_property
    def forget(self) -> Texts:
        """The rows to forget."""
        return self.run(self.model, self.forget_batch)

    @cached_property
    def forget_before(self) -> Texts:
        """The same, by M_full."""
        return self.taught(self.forget_batch)

    @cached_property
    def chosen(self) -> Texts:
        """The fixed answer to the same prompts."""
        assert self._chosen is not None, "the system's 'answers' says that it needs none"
        return self.run(self.model, self._chosen)

    @cached_property
    def chosen_before(self) -> Texts:
        """The same, by M_full."""
        assert self._chosen is not None, "the system's 'answers' says that it needs none"
        return self.taught(self._chosen)

    @cached_property
    def retain(self) -> Texts:
        """The rows to keep."""
        return self.run(self.model, self.retain_batch)

    def retain_kl(self) -> Tensor:
        """K_R of eq. (22)."""
        return kl(self.taught(self.retain_batch).logits, self.retain.logits)
