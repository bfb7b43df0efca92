"""The Fisher detector: which direction tells forget states from retain states (Section 4.1)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unbind_core.errors import FittingError
from unbind_core.fitting.moments import Moments

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
