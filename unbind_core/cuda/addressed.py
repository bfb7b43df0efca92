"""Where the corrections lie that kernels read; without Triton, so that any device may have it said."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Addressed(NamedTuple):
    """The corrections of m modules where they lie, for kernels: ``matrices`` int64 [m,2], addresses of each one's A and U', both
    [r,d], line by line, in FP32 or bfloat16; ``factors`` FP32 [m]; ``constants`` FP32 [m,d], each one's c times its factor;
    ``edge`` FP32 [2,R] of all R ranks: the bias of each and the least that it can be; None where no module has one.
    """

    matrices: Tensor
    factors: Tensor
    constants: Tensor
    edge: Tensor | None
