"""What an open gate does to a state: one arithmetic for pushes and low-rank corrections, in the bank and in a fit.

A push is a correction of rank 0: a constant, -v. So the modules of a layer are one pair of matrices whatever their kinds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
    """The corrections of m modules, stacked; ``factors`` FP32 [m] are part of the tensors, as strengths that never change."""

    def __init__(self, tensors: Sequence[Mapping[str, Tensor]], factors: Tensor) -> None:
        """``tensors`` are the modules' own, on the device of ``factors``: v of a push, u, a and c of the low-rank kind."""
        low = [i for i, own in enumerate(tensors) if "u" in own]
        constants = torch.stack([own["c"] if "u" in own else -own["v"] for own in tensors])
        d = constants.shape[1]
        self._into = torch.cat([constants.new_empty(0, d), *(tensors[i]["a"] for i in low)]).t().contiguous()
        outs = [tensors[i]["u"].t() * factors[i] for i in low]
        self._back = torch.cat((*outs, constants * factors[:, None]))
        owners = [i for i in low for _ in range(tensors[i]["u"].shape[1])]
        self._owner = torch.tensor(owners, device=factors.device) if len(tensors) > 1 else None
        self.width = 2 * len(owners)  # products of a state with a vector of its size, beside the constants
        self._few = len(tensors) // FEW

    def add_to(self, to: Tensor, states: Tensor, amount: Tensor) -> Tensor:
        """``to`` [...,d] plus what the modules correct of ``states`` [...,d] by ``amount`` FP32 [...,m]; ``to`` itself where a CPU
        sees at once that there is nothing to add. A device of its own is not waited for. Where few modules act, a CPU multiplies
        theirs alone.
        """
        if not self.width or amount.device.type != "cpu":
            return added(states, amount, self._into, self._back, self._owner, to)
        acting = amount.reshape(-1, amount.shape[-1]).any(0).nonzero()[:, 0]
        if not len(acting):
            return to
        if len(acting) > self._few or self._owner is None:
            return added(states, amount, self._into, self._back, self._owner, to)
        ranks = torch.isin(self._owner, acting).nonzero()[:, 0]
        owner = torch.searchsorted(acting, self._owner[ranks])
        back = self._back.index_select(0, torch.cat((ranks, len(self._owner) + acting)))
        return added(states, amount[..., acting], self._into[:, ranks], back, owner, to)
