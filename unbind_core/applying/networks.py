"""The networks of many modules: their scores in one product into the hidden units of a block and one back for each module."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.nn import functional

from unbind_core.module import UnbindModule

GRAIN = 1024.0  # scores are rounded to 1/1024 of a threshold: whole numbers of which sums are exact
CLIP = 2.0  # and count for at most two thresholds, so that no single position opens a gate for long
_HIDDEN = 1 << 24  # hidden units at a time, of all networks of a block at so many states
_NO_HEAD = -1e30  # the score of a head that a module has less than another: never the largest


def network_scores(states: Tensor, w: Tensor, b: Tensor, heads: Tensor, heads_b: Tensor) -> Tensor:
    """f(h) = heads relu(w h + b) + heads_b in FP32: states [...,d], w [h,d], b [h], heads [K,h], heads_b [K] -> [...,K]."""
    return functional.linear(functional.linear(states.float(), w, b).relu_(), heads, heads_b)


def in_grains(z: Tensor) -> Tensor:
    """Scores that are in units of 1/1024 of a threshold, FP32, as they count: clipped and rounded, int32. ``z`` is lost."""
    return z.clamp_(-CLIP * GRAIN, CLIP * GRAIN).round_().int()


class Block:
    """m networks as one; those with fewer hidden units or heads than the largest are filled up, which changes no score.

    Immutable, so that selections share it: when modules come and go, the blocks that have none of them stay as they are.
    """

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
        # Which of the m x most heads there are.
        self._real: Tensor | None = None
        if min(self.counts) < self.most:
            there = [i * self.most + k for i, count in enumerate(self.counts) for k in range(count)]
            self._real = torch.tensor(there, device=b.device)

    def scores(self, states: Tensor) -> Tensor:
        """(f - s_ref) / tau of every head in units of 1/1024, FP32 [N,heads], by module: states FP32 [N,d]."""
        found = self._padded_scores(states).transpose(0, 1).reshape(len(states), -1)
        return found if self._real is None else found.index_select(-1, self._real)

    def largest(self, states: Tensor) -> Tensor:
        """Of each module the largest of them, FP32 [N,m]."""
        rows = max(16, _HIDDEN // self.width)
        return torch.cat([self._padded_scores(some).amax(-1).t() for some in states.split(rows)])

    def _padded_scores(self, states: Tensor) -> Tensor:
        """FP32 [m,N,most], ``_NO_HEAD`` or so where a module has fewer heads."""
        if states.device.type == "cpu":
            return torch.baddbmm(self._heads_b, self._hidden(states), self._heads)
        products, offsets = self.products(states)  # elsewhere it copies the offsets first
        return products.add_(offsets)

    def products(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """The same as a sum that is still to be made: FP32 [m,N,most], and [m,1,most] that are the same for all states."""
        return torch.bmm(self._hidden(states), self._heads), self._heads_b

    def _hidden(self, states: Tensor) -> Tensor:
        """FP32 [m,N,hidden]."""
        return self._into(states).view(len(states), -1, self.hidden).transpose(0, 1)

    def scores_of(self, which: int, states: Tensor) -> Tensor:
        """The scores of one module, [n,most], likewise: states FP32 [n,d]."""
        w, b = self._own[which]
        hidden = functional.linear(states, w, b).relu_()
        return torch.addmm(self._heads_b[which], hidden, self._heads[which, : len(b)])


class Blocks:
    """The blocks that selections have, so that the same networks are packed once."""

    def __init__(self) -> None:
        self._used: WeakValueDictionary[tuple[int, ...], Block] = WeakValueDictionary()
        self._kept: list[Block] = []

    def of(
        self, key: tuple[int, ...], modules: Sequence[UnbindModule], tensors: Sequence[Mapping[str, Tensor]]
    ) -> Block:
        """These modules' block, of which ``key`` is the name for good; see :class:`Block`."""
        if (block := self._used.get(key)) is None:
            self._used[key] = block = Block(modules, tensors)
        return block

    def keep(self, blocks: list[Block]) -> None:
        """Have these to the next call that names any, whoever uses them."""
        self._kept = blocks or self._kept


class Networks:
    """M networks in blocks."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        """Modules are numbered through the blocks."""
        self.blocks = tuple(blocks)
        self.counts = [count for block in blocks for count in block.counts]  # heads by module
        self.most, self.width = max(self.counts), sum(block.width for block in blocks)
        self._begins = [0, *accumulate(len(block.counts) for block in blocks)]

    def scores(self, states: Tensor) -> Tensor:
        """See :meth:`Block.scores`; states [N,d] of any dtype."""
        return _side_by_side([block.scores(states.float()) for block in self.blocks])

    def largest(self, states: Tensor) -> Tensor:
        """See :meth:`Block.largest`."""
        return _side_by_side([block.largest(states) for block in self.blocks])

    def scores_of(self, which: int, states: Tensor) -> Tensor:
        """See :meth:`Block.scores_of`; as many columns whichever module it is."""
        block = bisect_right(self._begins, which) - 1
        found = self.blocks[block].scores_of(which - self._begins[block], states)
        return functional.pad(found, (0, self.most - found.shape[1]), value=_NO_HEAD)


def _side_by_side(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def _padded(part: Tensor, rows: int, value: float = 0.0) -> Tensor:
    """``value`` below, up to so many rows."""
    missing = rows - part.shape[0]
    return functional.pad(part, (0, 0) * (part.dim() - 1) + (0, missing), value=value) if missing else part


def _product_and_relu(w: Tensor, b: Tensor) -> Callable[[Tensor], Tensor]:
    """relu(w h + b) for FP32 states [N,d]. On a CPU w is packed once by oneDNN, as ``cpu/linears.py`` does it, and the plain one is
    not kept: a pass of few rows takes half the time. On a CUDA device it is one launch.
    """
    if (
        w.device.type == "cpu"
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    ):
        operators: Any = torch.ops.mkldnn
        multiply, packed = operators._linear_pointwise, operators._reorder_linear_weight(w, None)
        return lambda states: multiply(states, packed, b, "relu", [], "")
    if w.device.type == "cuda" and hasattr(torch, "_addmm_activation"):
        both, transposed = torch._addmm_activation, w.t()
        return lambda states: both(b, states, transposed)
    return lambda states: functional.linear(states, w, b).relu_()
