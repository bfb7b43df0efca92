"""Launches the kernels of a decode step for ``applying/fused.py``. Importing this needs Triton."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unbind_core.cuda import kernels

BOUNDS = kernels.BOUNDS


def decide(
    products: Tensor,
    offsets: Tensor,
    first: int,
    modules: Tensor,
    closes: Tensor,
    weights: Tensor,
    rows: Tensor | None,
    where: Any,
    tally: Tensor,
    bounds: Tensor,
    counted: Tensor | None,
    requests: Tensor | None,
    tables: tuple[Tensor, Tensor] | None,
    states: Tensor,
    into: Tensor,
    gates: Tensor,
    work: Tensor,
    scores: Tensor | None,
) -> None:
    """What the gates of m modules decide at N states, m of the M of a part from the one numbered ``first`` on.

    ``products`` FP32 [m,N,most], to which ``offsets`` FP32 [m,1,most] are added, are scores in grains. ``modules`` int32
    [M,FIELDS]; ``closes`` FP32 [M], in thresholds; ``weights`` FP32 [R,M]: how strongly each row of the selection has a module act,
    below 0 where it does not ask for it; ``rows`` int64 [N], None where state i is row i or R is 1; ``where``: ``Addresses``.
    ``tally`` int64 [M,BINS], by ``bounds`` FP32 [BOUNDS], of states that are ``counted`` bool [N]. ``requests`` int64 [N], rows of
    the first of two ``tables``: int32 [requests,slots], whether a gate was open for one, and int64 [slots], for how many.
    ``states`` FP32 [N,d] and ``into`` FP32 [d,ranks] are read where a correction acts.

    Written are the memory's rows; ``gates`` bool [N,M]; ``work`` FP32 [N,M + ranks]: amounts, and behind them amount (A h) of each
    rank whose module acts; and ``scores`` FP32 [N,M], where they are wanted.
    """
    m, count, most = products.shape
    in_all, d = len(modules), states.shape[1]
    by_row = 0 if len(weights) == 1 else 1 if rows is not None else 2
    opened, hits = tables if tables is not None else (modules, tally)
    kernels.decide[(m, count)](
        products, offsets, count, most, modules, closes, first, in_all, work.shape[1] - in_all,
        weights, weights if rows is None else rows, by_row,
        where.memory, where.memory.stride(0), where.positions, where.ahead,
        where.tables, where.tables.stride(0), where.size, int(where.paged),
        tally, bounds, gates if counted is None else counted, int(counted is not None),
        tally if requests is None else requests, int(requests is not None and tables is not None),
        opened, opened.stride(0), hits,
        states, into, d, gates, work, work if scores is None else scores, int(scores is not None),
    )  # fmt: skip


def correct(to: Tensor, out: Tensor, work: Tensor, back: Tensor, modules: Tensor) -> None:
    """``out`` [N,d] becomes ``to`` [N,d], plus what acts of ``work``, see :func:`decide`; ``back`` FP32 [ranks + M,d] as
    ``added`` has it. They may be the same tensor, which stays as it is where nothing acts.
    """
    count, d = to.shape
    ranks = work.shape[1] - len(modules)
    kernels.correct[(count, -(-d // kernels.BLOCK))](
        to, out, work, back, modules, d, len(modules), ranks, int(out is to)
    )


def elsewhere(device: torch.device) -> bool:
    """Whether this is a CUDA device but not the current one, which kernels go to."""
    return device.type == "cuda" and device.index != torch.cuda.current_device()
