"""The paper's two directions: which tells forget from retain states (Section 4.1), and which raises the loss (Section 4.2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unbind_core.errors import FittingError
from unbind_core.fitting.moments import CrossMoments, Moments

RIDGE = 0.01


@dataclass(frozen=True)
class FisherDetector:
    """Unit direction ``w`` FP64 [d] and the mean retain score ``s_ref`` (Section 4.1, eqs. (4) and (5))."""

    w: Tensor
    s_ref: float


def fisher_detector(forget: Moments, retain: Moments, ridge: float = RIDGE) -> FisherDetector:
    """w = C^-1 (mu_f - mu_r) / ||.||,  C = S_f + S_r + ridge * tr(S_f + S_r)/d * I;  s_ref = w' mu_r.

    Section 4.1, eqs. (3) to (5).

    The ridge is in units of the mean variance, so it means the same for states of any scale.
    Raises FittingError where the ridge is not positive and finite or the direction vanishes.
    """
    if forget.count < 2 or retain.count < 2:
        raise FittingError(
            f"{forget.count} forget and {retain.count} retain positions; two of each are needed for a covariance"
        )
    scatter = forget.covariance + retain.covariance
    lift = ridge * float(scatter.trace()) / forget.dimension
    if not (lift > 0.0 and lift != float("inf")):
        raise FittingError(
            f"the ridge is {lift}: the states do not vary or are not finite; check the rows and the model's dtype"
        )
    identity = torch.eye(forget.dimension, dtype=torch.float64, device=scatter.device)
    direction = torch.linalg.solve(scatter + lift * identity, forget.mean - retain.mean)
    norm = float(direction.norm())
    if not (norm > 0.0 and norm != float("inf")):
        raise FittingError(f"the detector's norm is {norm}: forget and retain states have the same mean")
    w = direction / norm
    return FisherDetector(w, float(w @ retain.mean))


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
