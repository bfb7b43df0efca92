"""How weights are learned: matrices by Muon, whose steps go as far in every direction, vectors by Adam.

A gradient's few large directions hide the many small ones that tell rows apart. What a step of Adam leaves of those takes it twice
as many steps (docs/experiments.md). torch.optim.Muon takes its products in bfloat16 always, which lasts tens of times as long on
processors that have no instructions for it; this one takes them in what is fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from unbind_core.running.device import bfloat16_is_fast

MOMENTUM = 0.85
# Of a polynomial a x + b x^3 + c x^5 that brings singular values near 1, and how often it is applied: Jordan and others, 2024.
A, B, C, TIMES = 3.4445, -4.7750, 2.0315, 5


class Muon(Optimizer):
    """Gradients' running mean, looked ahead by one step (Nesterov), and of that the nearest orthogonal matrix, roughly.

    ``lr``: the root mean square of the numbers of a step, as Adam's steps have it. ``decay``: the share of a step's length by which
    numbers shrink.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], decay: float = 0.0) -> None:
        super().__init__(groups, {"lr": 1e-3, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Of every matrix that has a gradient."""
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                mean = self.state[matrix].get("mean")
                if mean is None:
                    mean = self.state[matrix]["mean"] = torch.zeros_like(matrix)
                mean.lerp_(matrix.grad, 1 - MOMENTUM)
                direction = orthogonal(matrix.grad.lerp(mean, MOMENTUM))
                # an orthogonal matrix's numbers have a mean square of one over its longer side
                size = max(matrix.shape) ** 0.5
                matrix.mul_(1 - group["lr"] * group["decay"]).add_(direction, alpha=-group["lr"] * size)


class Descent:
    """Learns ``weights``, each with its learning rate, of which each step takes the share that ``share`` says of its number."""

    def __init__(
        self, weights: Iterable[tuple[Tensor, float]], share: Callable[[int], float], *, decay: float = 0.0
    ) -> None:
        matrices, vectors = list[dict[str, Any]](), list[dict[str, Any]]()
        for one, rate in weights:
            (matrices if one.dim() == 2 else vectors).append({"params": [one], "lr": rate})
        self._optimizers = (Muon(matrices, decay), Adam(vectors))
        self._schedules = [LambdaLR(optimizer, share) for optimizer in self._optimizers]

    def step(self) -> None:
        """By the gradients that there are, which are gone afterwards."""
        for optimizer, schedule in zip(self._optimizers, self._schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()


def step_products(rows: int, columns: int) -> float:
    """Multiplications that a step of a matrix of this shape takes."""
    short, long = sorted((rows, columns))
    return TIMES * short**2 * (2.0 * long + short)


def orthogonal(matrix: Tensor) -> Tensor:
    """The orthogonal matrix nearest to ``matrix`` [n,m], with singular values of 0.7 to 1.2 in place of 1, in its dtype."""
    fast = torch.bfloat16 if bfloat16_is_fast(matrix.device) else torch.float32
    wide = matrix.to(fast)
    if matrix.shape[0] > matrix.shape[1]:
        wide = wide.T
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(TIMES):
        square = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(square, square, square, beta=B, alpha=C), wide, beta=A)
    return (wide.T if matrix.shape[0] > matrix.shape[1] else wide).to(matrix.dtype)
