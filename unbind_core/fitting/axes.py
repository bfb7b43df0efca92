"""The output axis: which direction, subtracted, raises the loss of target tokens most (Section 4.2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unbind_core.errors import FittingError
from unbind_core.fitting.moments import CrossMoments, Moments


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


def gradient_axis(cross: CrossMoments) -> Tensor:
    """The unit direction -mean(g) FP64 [d]: subtracting it raises the mean loss of the targets fastest, to first order."""
    norm = cross.gradient.norm()
    if not bool(torch.isfinite(norm)) or not float(norm) > 0:
        raise FittingError(
            "the mean gradient of the forget rows is zero or not finite; check the rows and the model's dtype"
        )
    direction: Tensor = -cross.gradient / norm
    return direction


def constrained_axis(cross: CrossMoments, retain: Moments, ridge: float) -> Tensor:
    """The unit direction u FP64 [d] that minimises u'A_f u / u'(S_r + lambda I)u: one that retain states hardly use.

    The generalised eigenproblem A_f u = mu (S_r + lambda I) u by a Cholesky factor; lambda is ``ridge`` times the mean
    variance. Oriented so that subtracting it raises the targets' mean loss.
    """
    scatter = retain.covariance
    lift = ridge * float(scatter.trace()) / retain.dimension
    factor = torch.linalg.cholesky(
        scatter + lift * torch.eye(retain.dimension, dtype=scatter.dtype, device=scatter.device)
    )
    half = torch.linalg.solve_triangular(factor, cross.symmetric, upper=False)
    whitened = torch.linalg.solve_triangular(factor, half.T, upper=False)
    _, vectors = torch.linalg.eigh((whitened + whitened.T) / 2)
    u: Tensor = torch.linalg.solve_triangular(factor.T, vectors[:, :1], upper=True)[:, 0]
    u = u / u.norm()
    return u if float(cross.gradient @ u) < 0 else -u
