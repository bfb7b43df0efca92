"""What an open gate does to a state: one arithmetic for pushes and low-rank corrections, in the bank and in a fit.

A push is a correction of rank 0: a constant, -v. So the modules of a layer are one pair of matrices whatever their kinds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

FEW = 4  # where no more than a fourth of the modules act, theirs alone are multiplied


def added(states: Tensor, amount: Tensor, into: Tensor, back: Tensor, owner: Tensor | None, to: Tensor) -> Tensor:
    """``to`` plus the sum over modules of amount (U (A h) + c), in FP32 and cast to the dtype of ``to`` before the addition.

    ``states`` [...,d], what is read; ``to`` [...,d], what is added to; ``amount`` FP32 [...,m]; ``into`` FP32 [d,R], the modules'
    A' side by side, R being the sum of their ranks; ``back`` FP32 [R+m,d]: their U' below each other, then their c; ``owner``
    int64 [R], whose each rank is, None where all are the first module's. Where an amount is 0 its module adds exactly 0, whatever
    the state holds.
    """
    d = states.shape[-1]
    flat = amount.reshape(-1, amount.shape[-1])
    if into.shape[1]:
        own = flat[:, :1] if owner is None else flat.index_select(1, owner)
        within = (states.reshape(-1, d).float() @ into).mul(own).masked_fill(own == 0, 0.0)
        flat = torch.cat((within, flat), 1)
    if to.dtype == torch.float32:
        return torch.addmm(to.reshape(-1, d), flat, back).view(to.shape)
    return to + (flat @ back).view(to.shape).to(to.dtype)


def corrected(states: Tensor, amount: Tensor, u: Tensor, a: Tensor, c: Tensor) -> Tensor:
    """h + amount (u (a h) + c) for one low-rank correction: states [...,d], amount FP32 [...], u FP32 [d,r], a [r,d], c [d].

    What the bank does with a module whose strength is part of ``amount``. Can be differentiated in all of them.
    """
    return added(states, amount.unsqueeze(-1), a.t(), torch.cat((u.t(), c[None])), None, states)


class Corrections:
    """The corrections of m modules; ``factors`` FP32 [m] are part of the tensors, as strengths that never change."""

    def __init__(self, tensors: Sequence[Mapping[str, Tensor]], factors: Tensor) -> None:
        """``tensors`` are the modules' own, on the device of ``factors``: v of a push, u, a and c of the low-rank kind."""
        self._tensors, self._factors = tuple(tensors), factors
        self.ranks = [own["u"].shape[1] if "u" in own else 0 for own in tensors]
        self.width = 2 * sum(self.ranks)  # as of gates, beside the constants

    @cached_property
    def stacked(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """``into``, ``back`` and ``owner`` of all modules, see :func:`added`. Made when it is needed, which on a CPU is seldom:
        of many modules few act in a pass.
        """
        with torch.inference_mode(False):  # a selection that was first used in inference mode must serve outside it too
            return self._stack(range(len(self._tensors)))

    def _stack(self, which: Sequence[int]) -> tuple[Tensor, Tensor, Tensor | None]:
        """``into``, ``back`` and ``owner`` of these modules, as :func:`added` wants them."""
        tensors, factors = [self._tensors[i] for i in which], self._factors
        if len(which) < len(factors):
            factors = factors[torch.tensor(which, device=factors.device)]
        low = [i for i, own in enumerate(tensors) if "u" in own]
        constants = torch.stack([own["c"] if "u" in own else -own["v"] for own in tensors])
        into = torch.cat([constants.new_empty(0, constants.shape[1]), *(tensors[i]["a"] for i in low)]).t().contiguous()
        outs = [tensors[i]["u"].t() * factors[i] for i in low]
        back = torch.cat((*outs, constants * factors[:, None]))
        owners = [i for i in low for _ in range(tensors[i]["u"].shape[1])]
        return into, back, torch.tensor(owners, device=factors.device) if len(tensors) > 1 else None

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
                into, back, owner = self._stack(acting)
                return added(states, amount[..., acting], into, back, owner, to)
        into, back, owner = self.stacked
        return added(states, amount, into, back, owner, to)
