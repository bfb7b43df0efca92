"""What an open gate does to a state: one arithmetic for corrections of all kinds, in the bank and in a fit.

A push is a correction of rank 0: a constant, -v; a low-rank one is a network whose units have no bias and no floor at 0. So the
modules of a layer are one pair of matrices whatever their kinds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

FEW = 4  # where no more than a fourth of the modules act, theirs alone are multiplied


class Stacked(NamedTuple):
    """The corrections of m modules: ``into`` FP32 [d,R], their A' side by side, R being the sum of their ranks; ``edge`` FP32
    [2,R], the bias of each of the R numbers and the least that it can be, None where no module has one; ``back`` FP32 [R+m,d]:
    their U' below each other, then their c; ``owner`` int64 [R], whose each is, None where all are the first module's.
    """

    into: Tensor
    edge: Tensor | None
    back: Tensor
    owner: Tensor | None


def added(states: Tensor, amount: Tensor, by: Stacked, to: Tensor) -> Tensor:
    """``to`` plus the sum over modules of amount (U max(A h + bias, least) + c), in FP32 and cast to the dtype of ``to`` before the
    addition.

    ``states`` [...,d], what is read; ``to`` [...,d], what is added to; ``amount`` FP32 [...,m]. Where an amount is 0 its module
    adds exactly 0, whatever the state holds.
    """
    d = states.shape[-1]
    flat = amount.reshape(-1, amount.shape[-1])
    if by.into.shape[1]:
        own = flat[:, :1] if by.owner is None else flat.index_select(1, by.owner)
        within = states.reshape(-1, d).float() @ by.into
        if by.edge is not None:
            within = (within + by.edge[0]).clamp(min=by.edge[1])
        flat = torch.cat((within.mul(own).masked_fill(own == 0, 0.0), flat), 1)
    if to.dtype == torch.float32:
        return torch.addmm(to.reshape(-1, d), flat, by.back).view(to.shape)
    return to + (flat @ by.back).view(to.shape).to(to.dtype)


def corrected(states: Tensor, amount: Tensor, u: Tensor, a: Tensor, c: Tensor, e: Tensor) -> Tensor:
    """h + amount (u relu(a h + e) + c) for one network: states [...,d], amount FP32 [...], u FP32 [d,r], a [r,d], c [d], e [r].

    What the bank does with a module whose strength is part of ``amount``. Can be differentiated in all of them.
    """
    by = Stacked(a.t(), torch.stack((e, torch.zeros_like(e))), torch.cat((u.t(), c[None])), None)
    return added(states, amount.unsqueeze(-1), by, states)


class Corrections:
    """The corrections of m modules; ``factors`` FP32 [m] are part of the tensors, as strengths that never change."""

    def __init__(self, tensors: Sequence[Mapping[str, Tensor]], factors: Tensor) -> None:
        """``tensors`` are the modules' own, on the device of ``factors``: v of a push, else u, a and c, and e of a network."""
        self._tensors, self._factors = tuple(tensors), factors
        self.ranks = [own["u"].shape[1] if "u" in own else 0 for own in tensors]
        self.width = 2 * sum(self.ranks)  # as of gates, beside the constants

    @cached_property
    def stacked(self) -> Stacked:
        """Those of all modules. Made when it is needed, which on a CPU is seldom: of many modules few act in a pass."""
        with torch.inference_mode(False):  # a selection that was first used in inference mode must serve outside it too
            return self._stack(range(len(self._tensors)))

    def _stack(self, which: Sequence[int]) -> Stacked:
        tensors, factors = [self._tensors[i] for i in which], self._factors
        if len(which) < len(factors):
            factors = factors[torch.tensor(which, device=factors.device)]
        low = [i for i, own in enumerate(tensors) if "u" in own]
        constants = torch.stack([own["c"] if "u" in own else -own["v"] for own in tensors])
        into = (
            torch.cat([constants.new_empty(0, constants.shape[1]), *(tensors[i]["a"].float() for i in low)])
            .t()
            .contiguous()
        )
        outs = [tensors[i]["u"].t().float() * factors[i] for i in low]
        back = torch.cat((*outs, constants * factors[:, None]))
        edge = None
        if any("e" in own for own in tensors):
            edge = torch.cat([_edge(tensors[i]) for i in low], 1)
        owners = [i for i in low for _ in range(tensors[i]["u"].shape[1])]
        return Stacked(into, edge, back, torch.tensor(owners, device=factors.device) if len(tensors) > 1 else None)

    def add_to(self, to: Tensor, states: Tensor, amount: Tensor) -> Tensor:
        """``to`` [...,d] plus what the modules correct of ``states`` [...,d] by ``amount`` FP32 [...,m]; ``to`` itself where a CPU
        sees at once that there is nothing to add. A device of its own is not waited for. Where few modules act, a CPU multiplies
        theirs alone.
        """
        if self.width and amount.device.type == "cpu":
            acting = amount.reshape(-1, amount.shape[-1]).any(0).nonzero()[:, 0].tolist()
            if not acting:
                return to
            if len(acting) <= len(self._tensors) // FEW:
                return added(states, amount[..., acting], self._stack(acting), to)
        return added(states, amount, self.stacked, to)


def _edge(tensors: Mapping[str, Tensor]) -> Tensor:
    """Bias and least [2,r] of one module's numbers: those of a low-rank correction have neither."""
    if "e" in tensors:
        return torch.stack((tensors["e"], torch.zeros_like(tensors["e"])))
    none = tensors["c"].new_zeros(len(tensors["a"]))
    return torch.stack((none, none - torch.inf))
