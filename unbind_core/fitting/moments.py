"""Streaming FP64 moments of hidden states: what a fit keeps of the text it has read; and the paper's two directions,
which follow from them: which tells forget from retain states (Section 4.1), and which raises the loss (Section 4.2).

Adding rows part by part gives what all of them at once give. Retain moments do not depend on the forget set, so they are computed
once per model, retain set and window policy and kept on disk (``save_moments``, ``load_moments``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from unbind_core.errors import FittingError
from unbind_core.files import write_whole

RIDGE = 0.01


@dataclass
class Moments:
    """Count, mean and scatter of rows of dimension ``d``; accumulates on ``device``.

    ``mean`` FP64 [d]; ``scatter`` FP64 [d,d] = sum (h - mean)(h - mean)'. ``norm_sum`` is the sum of the rows' 2-norms.
    """

    dimension: int
    device: torch.device | str = "cpu"
    count: int = 0
    norm_sum: float = 0.0
    mean: Tensor = field(init=False)
    scatter: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.mean = torch.zeros(self.dimension, dtype=torch.float64, device=self.device)
        self.scatter = torch.zeros(self.dimension, self.dimension, dtype=torch.float64, device=self.device)

    def add(self, states: Tensor) -> None:
        """Take in rows [N,d] of any floating dtype."""
        if states.shape[0] == 0:
            return
        rows = states.to(torch.float64)
        count, mean = rows.shape[0], rows.mean(0)
        total, gap, centred = self.count + count, mean - self.mean, rows - mean
        # Chan's update of what was seen by what comes
        self.scatter += centred.T @ centred + torch.outer(gap, gap) * (self.count * count / total)
        self.mean += gap * (count / total)
        self.count = total
        self.norm_sum += float(rows.norm(dim=1).sum())

    @property
    def covariance(self) -> Tensor:
        """Unbiased sample covariance, FP64 [d,d] (Section 4.1, eq. (2)); zero for fewer than two rows."""
        return self.scatter / max(self.count - 1, 1)

    @property
    def mean_norm(self) -> float:
        """Mean 2-norm of the rows: the unit of the model-independent strength grid."""
        return self.norm_sum / max(self.count, 1)


@dataclass
class CrossMoments:
    """Sums of h g' and of g over paired rows, FP64 [d,d] and [d]: all that output axes need (Section 4.2, eq. (7))."""

    dimension: int
    device: torch.device | str = "cpu"
    count: int = 0
    product: Tensor = field(init=False)
    gradient: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.gradient = torch.zeros(self.dimension, dtype=torch.float64, device=self.device)
        self.product = torch.zeros(self.dimension, self.dimension, dtype=torch.float64, device=self.device)

    def add(self, states: Tensor, gradients: Tensor) -> None:
        """Take in paired rows [N,d] and [N,d]."""
        self.product += states.to(torch.float64).T @ gradients.to(torch.float64)
        self.gradient += gradients.to(torch.float64).sum(0)
        self.count += states.shape[0]

    @property
    def symmetric(self) -> Tensor:
        """A_f = (H'G + G'H) / 2n, FP64 [d,d] (Section 4.2, eq. (7))."""
        return (self.product + self.product.T) / (2 * max(self.count, 1))


def save_moments(path: Path, moments: dict[int, Moments]) -> None:
    """Write layer -> moments as one safetensors file, whole or not at all."""
    tensors: dict[str, Tensor] = {}
    for layer, m in moments.items():
        tensors[f"{layer}.mean"] = m.mean.cpu()
        tensors[f"{layer}.scatter"] = m.scatter.cpu()
        tensors[f"{layer}.totals"] = torch.tensor([float(m.count), m.norm_sum], dtype=torch.float64)
    write_whole(path, lambda temporary: save_file(tensors, temporary))


def load_moments(path: Path, layers: list[int], device: torch.device | str = "cpu") -> dict[int, Moments] | None:
    """Layer -> moments from a file of :func:`save_moments`; None if there is none or it is unreadable or lacks a layer."""
    found: dict[int, Moments] = {}
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            for layer in layers:
                mean = file.get_tensor(f"{layer}.mean")
                m = Moments(mean.shape[0], device)
                m.mean, m.scatter = mean, file.get_tensor(f"{layer}.scatter")
                count, m.norm_sum = file.get_tensor(f"{layer}.totals").tolist()
                m.count = int(count)
                found[layer] = m
    except (OSError, SafetensorError):
        return None
    return found


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
