"""Thresholds, signs and strength grids: the pure part of calibration (Section 4.3, Appendix B.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

PAPER_QUANTILES = (0.10, 0.25, 0.50, 0.75)
# At small widths a gate that most forget positions open is open on too much retained code for any strength worth having.
QUANTILES = (*PAPER_QUANTILES, 0.90, 0.95, 0.98, 0.99)
PAPER_STRENGTHS = (0.0, 4.0, 8.0, 12.0, 16.0, 20.0, 32.0)  # the paper's absolute grid
# update sizes in units of the mean retain-state norm
NORM_STRENGTHS = (0.25, 0.35, 0.5, 0.71, 1.0, 1.41, 2.0, 4.0, 8.0)


@dataclass(frozen=True)
class Budgets:
    """What a module may cost on retain rows, mean over scored tokens, natural log; BLEU on the [0,1] scale (Appendix B.3).

    ``open_rate`` is the share of retain positions at which gates may be open; it binds ``gate="auto"`` alone.
    """

    kl: float = 0.01
    nll: float = 0.01
    bleu: float = 0.01
    open_rate: float = 0.002


@dataclass(frozen=True)
class Gate:
    """One candidate gate at a layer: ``tau`` and the signed axis ``v`` FP32 [d] for quantile ``q``.

    ``mean_open`` is the mean activation of the calibration positions it admits.
    """

    quantile: float
    tau: float
    v: Tensor
    response: float
    mean_open: float


def threshold(activations: Tensor, quantile: float) -> float | None:
    """Quantile of the positive activations, linear interpolation, repeated values kept (Section 4.3, eq. (8)); None without any."""
    positive = activations[activations > 0]
    if positive.numel() == 0:
        return None
    # torch.quantile is limited to 16 M elements, which no calibration set comes near
    return float(torch.quantile(positive.double(), quantile, interpolation="linear").to(activations.dtype))


def orient(v0: Tensor, activations: Tensor, gradients: Tensor, tau: float) -> tuple[Tensor, float]:
    """The sign under which the gate's update raises the loss (Section 4.3, eq. (9)).

    ``activations`` [N], ``gradients`` [N,d], ``v0`` [d] unit. Returns v [d] and c_q, the gate-weighted mean of g'v0.
    c_q = 0 makes the component of largest magnitude positive (first index on a tie).
    """
    weights = torch.where(activations >= tau, activations, 0.0).double()
    total = weights.sum()
    response = float((weights @ (gradients.double() @ v0.double())) / total) if float(total) > 0 else 0.0
    if response == 0.0:
        return (v0 if float(v0[v0.abs().argmax()]) > 0 else -v0), response
    return (v0 if response < 0 else -v0), response


def gates(v0: Tensor, activations: Tensor, gradients: Tensor, quantiles: Sequence[float] = QUANTILES) -> list[Gate]:
    """The candidate gates of one layer from unmodified forget-calibration positions; empty if no activation is positive."""
    found = []
    for quantile in quantiles:
        tau = threshold(activations, quantile)
        if tau is None:
            return []
        v, response = orient(v0, activations, gradients, tau)
        mean_open = float(activations[activations >= tau].mean())
        found.append(Gate(quantile, tau, v.float(), response, mean_open))
    return found


def strengths(
    gate: Gate, mean_norm: float, absolute: Sequence[float], relative: Sequence[float]
) -> list[tuple[str, float]]:
    """The strengths to try for a gate: ("paper", kappa) of the absolute grid and ("norm", kappa) of the relative one.

    A relative strength m makes the mean update of an admitted position m times the mean norm of retain states, so that
    one grid serves models of any scale.
    """
    paper = [("paper", float(kappa)) for kappa in absolute]
    return paper + [("norm", m * mean_norm / gate.mean_open) for m in relative]
