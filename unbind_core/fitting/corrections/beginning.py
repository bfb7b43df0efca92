"""Where the learning of a correction begins: at the linear map that is nearest to the reference's states, as a network.

Every direction of the map is two pairs of units, one of either sign, which part at a third and at two thirds of the states:
together they are the map, and what is learned from there on need not be linear (docs/experiments.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from unbind_core.fitting.descent import Descent

UNITS = 512  # of a correction
PAIRS = 2  # of units, for each direction that learning begins with
STEPS = 450  # of learning
RATE = 0.02  # of the learning rate, in units of a state's size
ON = 0.06  # of the learning rate of u and a that are begun, in units of the size of their numbers
SHARE = 0.25  # of a state's size that biases move by, where the vectors of ``a`` move by their learning rate
RIDGE = 0.01  # of the states' variances, added to them before the linear map is solved for
PART = 8192  # states that are added up at a time for it
SEEN = 4096  # states that say where pairs part, at most


class Parts(NamedTuple):
    """h becomes h + u relu(a h + e) + c: u FP32 [d,r], a [r,d], c [d], e [r]."""

    u: Tensor
    a: Tensor
    c: Tensor
    e: Tensor


def beginning(
    states: Tensor, wanted: Tensor, left_by: Callable[[Parts], float], *, units: int, generator: torch.Generator
) -> Parts:
    """Where the learning of a correction of ``states`` [N,d] begins.

    At the linear map nearest to states ``wanted`` [N,e], if the divergence that ``left_by`` says it leaves is less than with
    nothing. States of another model may be of another width, or mean something else to the head.
    """
    d = states.shape[1]
    drawn = (torch.randn(max(1, units // (2 * PAIRS)), d, generator=generator) / _size(states)).to(states.device)
    nothing = paired(drawn.new_zeros(d, len(drawn)), drawn, drawn.new_zeros(d), states)
    if wanted.shape != states.shape or wanted is states:
        return nothing
    mapped = paired(*nearest(states, wanted, drawn), states)
    with torch.no_grad():
        return min(nothing, mapped, key=left_by)


def paired(u: Tensor, a: Tensor, c: Tensor, states: Tensor) -> Parts:
    """The linear map x + u (a x) + c, u [d,r], a [r,d] and c [d], as a network of 2 PAIRS r units, whose pairs part at quantiles of
    ``states`` x [N,d].
    """
    seen = states[:: max(1, len(states) // SEEN)].float() @ a.t()
    where = seen.quantile(torch.arange(1, PAIRS + 1, device=seen.device) / (PAIRS + 1), dim=0)
    one = u / PAIRS
    return Parts(
        torch.cat((one, -one) * PAIRS, 1),
        torch.cat((a, -a) * PAIRS),
        c + one @ where.sum(0),
        torch.cat([part for at in where for part in (-at, at)]),
    )


def nearest(states: Tensor, wanted: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """u FP32 [d,r], a FP32 [r,d] and c FP32 [d], with which x + u (a x) + c is nearest to ``wanted`` [N,d] for ``states`` x [N,d]:
    ridge regression of reduced rank. Of ranks that there is nothing to map with, ``a`` holds those of ``drawn`` [r,d].
    """
    d, rank = states.shape[1], len(drawn)
    square, cross = drawn.new_zeros(d, d), drawn.new_zeros(d, d)
    mean = sum(part.float().sum(0) for part in states.split(PART)) / len(states)
    change = sum(part.float().sum(0) for part in wanted.split(PART)) / len(states) - mean
    for ours, theirs in zip(states.split(PART), wanted.split(PART), strict=True):
        x = ours.float() - mean
        square += x.T @ x
        cross += x.T @ (theirs.float() - ours.float() - change)
    square.diagonal().mul_(1 + RIDGE).clamp_(min=1e-6)
    root = torch.linalg.cholesky(square)
    left, values, right = torch.linalg.svd(torch.linalg.solve_triangular(root, cross, upper=False))
    kept = min(rank, int((values > 1e-6 * values[0]).sum()))
    half = values[:kept].sqrt()  # as much in u as in a
    u, a = drawn.new_zeros(d, rank), drawn.clone()
    u[:, :kept] = right[:kept].T * half
    a[:kept] = torch.linalg.solve_triangular(root.T, left[:, :kept] * half, upper=True).T
    return u, a, change - u @ (a @ mean)


def learning(begun: Parts, states: Tensor, steps: int) -> tuple[Parts, Descent]:
    """A correction of states [N,d] as it is begun, and what learns it in so many steps."""
    size, d = _size(states), states.shape[1]
    parts = Parts(*(tensor.clone().requires_grad_(True) for tensor in begun))
    rates = [RATE * size * d**-0.5, RATE / size]
    if bool(parts.u.any()):
        rates = [ON * float(tensor.detach().pow(2).mean().sqrt()) for tensor in (parts.u, parts.a)]
    rates += [RATE * size * d**-0.5, rates[1] * size * SHARE]
    return parts, Descent(zip(parts, rates, strict=True), lambda step: 1 - step / steps)


def _size(states: Tensor) -> float:  # the mean norm of states [N,d]
    return float(states[:: max(1, len(states) // 5000)].float().norm(dim=1).mean())
