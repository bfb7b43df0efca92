"""Logits -> one token for each row: greedy, or nucleus sampling from the request's own random numbers.

Each request draws one uniform number a step from its own generator, so a seed gives the same answer whatever else is in
the batch.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from server.engine.request import Sampling


def uniform_source(seed: int | None) -> Callable[[], float]:
    """Uniform numbers in [0, 1): repeatable for a seed, fresh without one."""
    return random.Random(seed).random


def sample(
    logits: Tensor, samplings: Sequence[Sampling], draws: Sequence[Callable[[], float]]
) -> tuple[list[int], list[bool]]:
    """Token of each row and whether the row was finite; ``logits`` [B,V]. All-greedy batches take one argmax."""
    best, tokens = logits.max(dim=-1)  # max propagates NaN, so it checks the row as well
    chosen = tokens.tolist()
    hot = [i for i, sampling in enumerate(samplings) if sampling.temperature > 0]
    if hot:
        picked = _nucleus(
            logits[hot].float(),
            torch.tensor([samplings[i].temperature for i in hot], device=logits.device),
            torch.tensor([samplings[i].top_p for i in hot], device=logits.device),
            torch.tensor([draws[i]() for i in hot], dtype=torch.float64, device=logits.device),
        )
        for i, token in zip(hot, picked, strict=True):
            chosen[i] = token
    return chosen, best.isfinite().tolist()


def _nucleus(logits: Tensor, temperature: Tensor, top_p: Tensor, uniform: Tensor) -> list[int]:
    """Inverse transform over the fewest likeliest tokens whose mass reaches ``top_p``; all [B] but logits [B,V]."""
    shifted = logits - logits.max(dim=-1, keepdim=True).values  # before dividing: a tiny temperature would overflow
    probabilities, order = torch.softmax(shifted / temperature[:, None], dim=-1).sort(
        dim=-1, descending=True, stable=True
    )
    mass = probabilities.double().cumsum(dim=-1)
    kept = (mass - probabilities) < top_p[:, None]  # a token stays while the mass before it is short of top_p
    kept[:, 0] = True
    total = (probabilities.double() * kept).sum(dim=-1)
    index = (mass < (uniform * total)[:, None]).sum(dim=-1)
    last = kept.sum(dim=-1) - 1
    tokens: list[int] = order.gather(1, torch.minimum(index, last)[:, None])[:, 0].tolist()
    return tokens
