"""GSS (Appendix C.3): states are moved along a few directions where probes find memorisation rather than generalisation.

The paper leaves the scale and the sign of the directions open. Here probes are scaled to unit variance on the tokens that
generalise, steering directions have unit length, and the sign is the one that makes memorised tokens less likely.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unbind_core.architecture import decoder_layers
from unbind_core.encoding import pad_id
from unbind_core.rows import ForgetRow, spread
from unbind_core.running.capture import capture, capture_nll
from unbind_core.windows import Window, batches, forget_windows, retain_windows
from unbind_lab.filters.filter import Filter, Options
from unbind_lab.served import Served
from unbind_lab.setting import Bench

RETAIN_ROWS, RIDGE, QUANTILE = 60, 0.01, 0.99
PAPER_LAYER, PAPER_DEPTH = 23, 28


@dataclass(frozen=True)
class Directions:
    """Probes and steering directions [r,d], thresholds [r]."""

    probes: Tensor
    steering: Tensor
    thresholds: Tensor

    def moved(self, states: Tensor, strength: float) -> Tensor:
        """h - s sum_j 1[|a_j h| > tau_j] (a_j h) b_j: states [...,d]."""
        scores = states.float() @ self.probes.T
        scores = scores * (scores.abs() > self.thresholds)
        return states - strength * (scores @ self.steering).to(states.dtype)


def directions(memorised: Tensor, gradients: Tensor, general: Tensor, rank: int) -> Directions:
    """Of the memorised tokens' states and NLL gradients [n,d] and the general tokens' states [m,d]: FP64 inside."""
    states, slopes, others = memorised.double(), gradients.double(), general.double()
    covariance = others.T.cov()
    size = len(covariance)
    values, vectors = torch.linalg.eigh(
        covariance + RIDGE * covariance.trace() / size * torch.eye(size, dtype=torch.float64, device=covariance.device)
    )
    whitening = vectors @ torch.diag(values.clamp(min=1e-12).rsqrt()) @ vectors.T
    left, _, right = torch.linalg.svd(whitening @ (states.T @ slopes / len(states)))
    probes = (whitening @ left[:, :rank]).T
    scores = (others @ probes.T).abs()
    thresholds = scores.quantile(QUANTILE, dim=0, interpolation="higher")
    return Directions(probes.float(), -right[:rank].float(), thresholds.float())


def build(bench: Bench, rows: Sequence[ForgetRow], options: Options, folder: Path) -> Served:
    """Directions of the rows' tokens that the adaptation made likelier, against those that it did not."""
    model, tokenizer = bench.full.model, bench.full.tokenizer
    depth = len(decoder_layers(model))
    layer = min(depth - 1, round(options["layer"] * depth))
    forget = forget_windows(tokenizer, rows, range(len(rows)))
    some = spread(range(len(bench.retain_training)), RETAIN_ROWS)
    memorised, slopes, general = [], [], []
    for windows, own in ((forget, True), (retain_windows(tokenizer, bench.retain_training, some), False)):
        for states, gradients, gained in _tokens(bench, windows, layer, pad_id(tokenizer)):
            general.append(states[gained <= 0])
            if own:
                memorised.append(states[gained > 0])
                slopes.append(gradients[gained > 0])
    found = directions(torch.cat(memorised), torch.cat(slopes), torch.cat(general), int(options["rank"]))
    return Served(model, tokenizer, editing=lambda: _moving(model, layer, found, options["strength"]))


def _tokens(bench: Bench, windows: Sequence[Window], layer: int, pad: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """States and gradients [N,d], and omega [N] = log p_full - log p_base, of every batch."""
    for batch in batches(windows, pad, device=next(bench.full.model.parameters()).device):
        found = capture(bench.full.model, batch, [layer])
        _, before = capture_nll(bench.base.model, batch, [])
        yield found.states[layer], found.gradients[layer], before - found.nll


@contextmanager
def _moving(model: nn.Module, layer: int, found: Directions, strength: float) -> Iterator[None]:
    def hook(_module: nn.Module, _args: Any, output: Any) -> Any:
        states = output[0] if isinstance(output, tuple) else output
        states = found.moved(states, strength)
        return (states, *output[1:]) if isinstance(output, tuple) else states

    handle = decoder_layers(model)[layer].register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


GSS = Filter(
    "gss",
    build,
    {"layer": PAPER_LAYER / PAPER_DEPTH, "rank": 2, "strength": 2.0},
    tuple({"layer": layer, "rank": 2, "strength": strength} for layer in (0.5, 0.67, 0.83) for strength in (2.0, 8.0)),
)
