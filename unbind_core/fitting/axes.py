"""The output axis: which direction, subtracted, raises the loss of target tokens most (Section 4.2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unbind_core.errors import FittingError
from unbind_core.fitting.moments import CrossMoments


@dataclass(frozen=True)
class OutputAxis:
    """Unsigned unit direction ``v0`` FP64 [d], its eigenvalue, and the distance to the next eigenvalue."""

    v0: Tensor
    eigenvalue: float
    gap: float


def output_axis(cross: CrossMoments) -> OutputAxis:
    """Unit eigenvector of the smallest eigenvalue of A_f = (H'G + G'H)/2n (Section 4.2, eq. (7)).

    The eigenvalue must be negative for the update to raise the loss to first order; a small gap says that the direction
    is poorly determined. Both are recorded, neither is an error. Raises FittingError on non-finite or missing statistics.
    """
    matrix = cross.symmetric
    if cross.count == 0 or not bool(torch.isfinite(matrix).all()):
        raise FittingError(
            "the gradients of the forget rows are missing or not finite; check the rows and the model's dtype"
        )
    values, vectors = torch.linalg.eigh(matrix)
    gap = float(values[1] - values[0]) if len(values) > 1 else 0.0
    return OutputAxis(vectors[:, 0].contiguous(), float(values[0]), gap)
