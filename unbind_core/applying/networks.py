"""The networks of many modules as one: their scores in one product into all hidden units and one back for each module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from unbind_core.module import UnbindModule

GRAIN = 1024.0  # scores are rounded to 1/1024 of a threshold: whole numbers of which sums are exact
CLIP = 2.0  # and count for at most two thresholds, so that no single position opens a gate for long
_NO_HEAD = -1e30  # the score of a head that a module has less than another: never the largest


def network_scores(states: Tensor, w: Tensor, b: Tensor, heads: Tensor, heads_b: Tensor) -> Tensor:
    """f(h) = heads relu(w h + b) + heads_b in FP32: states [...,d], w [h,d], b [h], heads [K,h], heads_b [K] -> [...,K]."""
    return functional.linear(functional.linear(states.float(), w, b).relu_(), heads, heads_b)


def in_grains(z: Tensor) -> Tensor:
    """Scores that are in units of 1/1024 of a threshold, FP32, as they count: clipped and rounded, int32. ``z`` is lost."""
    return z.clamp_(-CLIP * GRAIN, CLIP * GRAIN).round_().int()


class Networks:
    """M networks; those with fewer hidden units or heads than the largest are filled up, which changes no score."""

    def __init__(self, modules: Sequence[UnbindModule], tensors: Sequence[Mapping[str, Tensor]]) -> None:
        """``tensors`` are the modules' own, on the device where the scores are wanted."""
        self.counts = [len(own["heads"]) for own in tensors]
        self.hidden, self.most = max(len(own["b"]) for own in tensors), max(self.counts)
        self._own = [(own["w"], own["b"]) for own in tensors]
        b = torch.cat([_padded(own["b"], self.hidden) for own in tensors])
        self._into = _product_and_relu(torch.cat([_padded(own["w"], self.hidden) for own in tensors]), b)
        heads, offsets = [], []
        for module, own in zip(modules, tensors, strict=True):  # s_ref and tau are part of the last product
            per_score = GRAIN / module.tau
            heads.append(_padded(_padded(own["heads"].T * per_score, self.hidden).T, self.most).T)
            offsets.append(_padded((own["heads_b"] - module.s_ref) * per_score, self.most, _NO_HEAD))
        self._heads, self._heads_b = torch.stack(heads), torch.stack(offsets).unsqueeze(1)
        self.width = len(b)  # products of a state with a vector of its size

    def scores(self, states: Tensor) -> Tensor:
        """(f - s_ref) / tau of every head in units of 1/1024, FP32 [M,N,most]: states [N,d] of any dtype."""
        hidden = self._into(states.float()).view(len(states), -1, self.hidden).transpose(0, 1)
        return torch.baddbmm(self._heads_b, hidden, self._heads)

    def scores_of(self, which: int, states: Tensor) -> Tensor:
        """The same of one module, [n,most]: states FP32 [n,d]."""
        w, b = self._own[which]
        hidden = functional.linear(states, w, b).relu_()
        return torch.addmm(self._heads_b[which], hidden, self._heads[which, : len(b)])


def _padded(part: Tensor, rows: int, value: float = 0.0) -> Tensor:
    """``value`` below, up to so many rows."""
    missing = rows - part.shape[0]
    return functional.pad(part, (0, 0) * (part.dim() - 1) + (0, missing), value=value) if missing else part


def _product_and_relu(w: Tensor, b: Tensor) -> Callable[[Tensor], Tensor]:
    """relu(w h + b) for FP32 states [N,d]. On a CPU w is packed once by oneDNN, as ``cpu/linears.py`` does it, and the plain one is
    not kept: a pass of few rows takes half the time.
    """
    if (
        w.device.type == "cpu"
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    ):
        operators: Any = torch.ops.mkldnn
        multiply, packed = operators._linear_pointwise, operators._reorder_linear_weight(w, None)
        return lambda states: multiply(states, packed, b, "relu", [], "")
    return lambda states: functional.linear(states, w, b).relu_()
