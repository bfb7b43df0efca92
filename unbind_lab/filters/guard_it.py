"""GUARD-IT (arXiv 2605.12765; facts from its authors' code): states of a text that is like some of the rows are turned from them.

Rows are clustered; of each cluster the mean state of its texts, less its projection on that of retained texts, is the direction, as
long as states are. A text that is like clusters has h replaced by h - strength * (mean of their directions), at its former length.
It is a rotation, at every position, and decided once a text: here of a prompt, and of a whole text that is scored.

The authors compare texts by a sentence encoder and choose a threshold by eye. Here texts are compared by the mean states that the
directions are made of, less the mean of retained texts, and the threshold is the one that a share of retained texts passes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from unbind_core.architecture import decoder_layers
from unbind_core.encoding import pad_id
from unbind_core.rows import ForgetRow, spread
from unbind_core.running.capture import capture_states
from unbind_core.windows import Window, batches, forget_windows, retain_windows
from unbind_lab.filters.filter import Filter, Options
from unbind_lab.served import Served
from unbind_lab.setting import Bench

RETAIN_ROWS, SHARE = 300, 0.02  # retained texts, and how many of them may be taken for rows
CLUSTERS, STARTS, ROUNDS = range(2, 11), 8, 30


@dataclass(frozen=True)
class Redirection:
    """``centre`` [d]; ``clusters`` [K,d] of unit length about it; ``directions`` [K,d]; cosines above ``threshold`` count."""

    centre: Tensor
    clusters: Tensor
    directions: Tensor
    threshold: float

    def away(self, means: Tensor) -> Tensor:
        """What a text with these mean states [B,d] is turned away from, [B,d]; 0 where it is like no cluster."""
        like = (normalize(means - self.centre, dim=-1) @ self.clusters.T > self.threshold).to(means.dtype)
        return like @ self.directions / like.sum(-1, keepdim=True).clamp(min=1)


def redirection(forget: Tensor, retain: Tensor, seed: int) -> Redirection:
    """Of the mean states of texts to forget [n,d] and retained ones [m,d]."""
    centre = retain.mean(0)
    around = normalize(forget - centre, dim=-1)
    labels = clustered(around, seed)
    means = torch.stack([forget[labels == k].mean(0) for k in range(int(labels.max()) + 1)])
    apart = means - (means @ centre / centre.dot(centre))[:, None] * centre
    length = (
        torch.stack([forget[labels == k].norm(dim=1).mean() for k in range(len(means))]) + retain.norm(dim=1).mean()
    )
    clusters = normalize(means - centre, dim=-1)
    likeness = (normalize(retain - centre, dim=-1) @ clusters.T).amax(1)
    return Redirection(
        centre, clusters, normalize(apart, dim=-1) * length[:, None] / 2, float(likeness.quantile(1 - SHARE))
    )


def clustered(points: Tensor, seed: int) -> Tensor:
    """int64 [n]: the clusters 0 to K - 1 of points [n,d] by k-means, for the K in CLUSTERS with the best mean silhouette."""
    generator = torch.Generator().manual_seed(seed)
    found = [_k_means(points, k, generator) for k in CLUSTERS if k < len(points)]
    if not found:
        return torch.zeros(len(points), dtype=torch.int64, device=points.device)
    best = max(found, key=lambda labels: silhouette(points, labels))
    numbered: Tensor = torch.unique(best, return_inverse=True)[1]
    return numbered


def _k_means(points: Tensor, k: int, generator: torch.Generator) -> Tensor:
    runs: list[tuple[float, int, Tensor]] = []
    for _ in range(STARTS):
        centres = points[torch.randperm(len(points), generator=generator)[:k].to(points.device)]
        for _ in range(ROUNDS):
            labels = torch.cdist(points, centres).argmin(1)
            centres = torch.stack(
                [points[labels == j].mean(0) if bool((labels == j).any()) else centres[j] for j in range(k)]
            )
        distance = torch.cdist(points, centres).amin(1)
        runs.append((float(distance.square().sum()), len(runs), labels))
    return min(runs)[2]


def silhouette(points: Tensor, labels: Tensor) -> float:
    """Mean over points of (b - a) / max(a, b): a is the mean distance to others of its cluster, b to the nearest other cluster; 0
    for a point alone.
    """
    distance = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")
    own = labels[:, None] == torch.unique(labels)[None]
    sums, sizes = distance @ own.to(distance.dtype), own.sum(0)
    a = sums[own] / (sizes[own.long().argmax(1)] - 1).clamp(min=1)
    b = (sums / sizes).masked_fill(own, float("inf")).amin(1)
    alone = sizes[own.long().argmax(1)] == 1
    return float(((b - a) / torch.maximum(a, b)).masked_fill(alone | ~b.isfinite(), 0.0).mean())


def build(bench: Bench, rows: Sequence[ForgetRow], options: Options, folder: Path) -> Served:
    """Mean states of whole texts at the layer, of the rows and of RETAIN_ROWS retained ones."""
    model, tokenizer = bench.full.model, bench.full.tokenizer
    depth = len(decoder_layers(model))
    layer = min(depth - 1, round(options["layer"] * depth))
    some = spread(range(len(bench.retain_training)), RETAIN_ROWS)
    forget, retain = (
        _means(model, windows, layer, pad_id(tokenizer))
        for windows in (
            forget_windows(tokenizer, rows, range(len(rows))),
            retain_windows(tokenizer, bench.retain_training, some),
        )
    )
    found = redirection(forget, retain, bench.setting.seed)
    return Served(model, tokenizer, editing=lambda: _turning(model, layer, found, options["strength"]))


def _means(model: nn.Module, windows: Sequence[Window], layer: int, pad: int) -> Tensor:
    found = []
    for batch in batches(windows, pad, device=next(model.parameters()).device):
        states = capture_states(model, batch, [layer])[layer]
        found += [own[: len(window.ids)].float().mean(0) for window, own in zip(batch.windows, states, strict=True)]
    return torch.stack(found)


@contextmanager
def _turning(model: nn.Module, layer: int, found: Redirection, strength: float) -> Iterator[None]:
    masks: list[Tensor | None] = [None]
    decided: list[Tensor] = []

    def seen(_module: nn.Module, _args: Any, given: dict[str, Any]) -> None:
        mask = given.get("attention_mask")
        masks[0] = mask if isinstance(mask, Tensor) and mask.dim() == 2 else None

    def hook(_module: nn.Module, _args: Any, output: Any) -> Any:
        states = output[0] if isinstance(output, tuple) else output
        if states.shape[1] > 1 or not decided or len(decided[0]) != len(states):  # a text begins
            mask = masks[0]
            real = (
                torch.ones(states.shape[:2], device=states.device)
                if mask is None
                else mask[:, -states.shape[1] :].float()
            )
            weights = real / real.sum(1, keepdim=True).clamp(min=1)
            decided[:] = [found.away(torch.einsum("bt,btd->bd", weights, states.float()))]
        away = strength * decided[0][:, None]
        turned = states.float() - away
        turned = turned * (
            states.float().norm(dim=-1, keepdim=True) / turned.norm(dim=-1, keepdim=True).clamp(min=1e-8)
        )
        states = torch.where((away != 0).any(-1, keepdim=True), turned.to(states.dtype), states)
        return (states, *output[1:]) if isinstance(output, tuple) else states

    handles = [
        model.register_forward_pre_hook(seen, with_kwargs=True),
        decoder_layers(model)[layer].register_forward_hook(hook),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


GUARD_IT = Filter(
    "guard-it",
    build,
    {"layer": 0.25, "strength": 1.0},
    tuple({"layer": layer, "strength": strength} for layer in (0.25, 0.5) for strength in (0.3, 0.6, 1.0)),
)
