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

from unbind_core.cuda.addressed import Addressed

FEW = 4  # where no more than a fourth of the modules act, theirs alone are multiplied
STACKED = 2**28  # bytes of matrices that are made of several modules' at a time
KEPT = 2**23  # of one of two such matrices that stays on a device of its own: a network's at a width of 3,584 has 7 MB


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


def placed(tensors: Mapping[str, Tensor], device: torch.device, addressed: bool) -> dict[str, Tensor]:
    """A module's tensors on a device; ``addressed``: as kernels read them, U' line by line."""
    own = {name: part.to(device) for name, part in tensors.items()}
    if addressed and "u" in own:
        own["u"] = own["u"].t().contiguous().t()
    return own


class Corrections:
    """The corrections of m modules; ``factors`` FP32 [m] are part of the tensors, as strengths that never change."""

    def __init__(self, tensors: Sequence[Mapping[str, Tensor]], factors: Tensor) -> None:
        """``tensors`` are the modules' own, on the device of ``factors``: v of a push, else u, a and c, and e of a network."""
        self._tensors, self._factors = tuple(tensors), factors
        self.ranks = [own["u"].shape[1] if "u" in own else 0 for own in tensors]
        self.single = ["u" in own and own["u"].dtype == torch.float32 for own in tensors]  # else in bfloat16
        self.width = 2 * sum(self.ranks)  # as of gates, beside the constants
        size = max((own["u"].shape[0] for own in tensors if "u" in own), default=1)
        self._most = STACKED // (2 * 4 * size)  # ranks
        self._small = sum(self.ranks) <= self._most
        self._last: tuple[Sequence[int], Stacked] | None = None

    def stacked(self, which: Sequence[int]) -> Stacked:
        """Those of some modules, by number. Made when asked for; the last are kept, as an open gate stays so for a while, but for
        large ones on a device of its own: there are many selections, and nobody has left room for them.
        """
        if (last := self._last) is not None and last[0] == which:
            return last[1]
        with torch.inference_mode(False):  # what is first asked for in inference mode must serve outside it too
            made = self._stack(which)
        if made.back.device.type == "cpu" or made.back.nbytes <= KEPT:
            self._last = which, made
        return made

    @cached_property
    def addressed(self) -> Addressed:
        """Those of all modules where they lie. What does not lie line by line is copied, and stays as long as this does."""
        with torch.inference_mode(False):
            self._lines = [
                (own["a"].contiguous(), own["u"].t().contiguous()) if "u" in own else () for own in self._tensors
            ]
            places = [[one.data_ptr() for one in lines] or [0, 0] for lines in self._lines]
            matrices = torch.tensor(places, dtype=torch.int64, device=self._factors.device)
            edges = [_edge(own) for own in self._tensors if "u" in own]
            edge = torch.cat(edges, 1) if any("e" in own for own in self._tensors) else None
            return Addressed(matrices, self._factors, _constants(self._tensors) * self._factors[:, None], edge)

    def _stack(self, which: Sequence[int]) -> Stacked:
        tensors, factors = [self._tensors[i] for i in which], self._factors
        if len(which) < len(factors):
            factors = factors[torch.tensor(which, device=factors.device)]
        low = [i for i, own in enumerate(tensors) if "u" in own]
        constants = _constants(tensors)
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
        """``to`` [...,d] plus what the modules correct of ``states`` [...,d] by ``amount`` FP32 [...,m]; ``to`` itself where one
        looked and there is nothing to add. On a CPU one looks which modules act, and multiplies theirs alone where they are few. A
        device of its own is waited for only where the matrices of all together are large; then no more than STACKED are made.
        """
        every = range(len(self._tensors))
        if not self.width or (self._small and amount.device.type != "cpu"):
            return added(states, amount, self.stacked(every), to)
        acting = amount.reshape(-1, amount.shape[-1]).any(0).nonzero()[:, 0].tolist()
        if not acting:
            return to
        if self._small and len(acting) > len(every) // FEW:
            return added(states, amount, self.stacked(every), to)
        first, *others = self._groups(acting)
        if not others:
            return added(states, amount[..., first], self.stacked(first), to)
        total = torch.zeros_like(to, dtype=torch.float32)
        for some in (first, *others):
            total = added(states, amount[..., some], self._stack(some), total)
        return to + total.to(to.dtype)

    def _groups(self, acting: Sequence[int]) -> list[list[int]]:
        """These modules in turn, as many in each group as may be put together, or one."""
        groups, ranks = list[list[int]](), self._most + 1
        for i in acting:
            ranks += self.ranks[i]
            if ranks > self._most:
                groups.append([])
                ranks = self.ranks[i]
            groups[-1].append(i)
        return groups


def _constants(tensors: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """What each module adds whatever the state, [m,d]."""
    return torch.stack([own["c"] if "u" in own else -own["v"] for own in tensors])


def _edge(tensors: Mapping[str, Tensor]) -> Tensor:
    """Bias and least [2,r] of one module's numbers: those of a low-rank correction have neither."""
    if "e" in tensors:
        return torch.stack((tensors["e"], torch.zeros_like(tensors["e"])))
    none = tensors["c"].new_zeros(len(tensors["a"]))
    return torch.stack((none, none - torch.inf))
