"""Can rows be told from others by numbers about each? The area under the ROC curve of a single number and of a classifier."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

FOLDS, REPEATS = 5, 4
PENALTY = 1.0  # of the classifier's squared weights: as that of a row


def auc(scores: NDArray[np.float64], members: NDArray[np.bool_]) -> float:
    """P(a member's score is above another's), ties counting half; scores [N], members [N] with some of both."""
    ordered = np.sort(scores)
    rank = (
        np.searchsorted(ordered, scores, "left") + np.searchsorted(ordered, scores, "right") + 1
    ) / 2  # mean of ties
    inside, outside = int(members.sum()), int((~members).sum())
    return float((rank[members].sum() - inside * (inside + 1) / 2) / (inside * outside))


@dataclass(frozen=True)
class Told:
    """How well members are told from others: ``classifier`` on rows it was not fitted on, and the best ``single`` number."""

    classifier: float
    single: float
    best: str

    @property
    def larger(self) -> float:
        """The better of the two."""
        return max(self.classifier, self.single)


def told_apart(features: dict[str, NDArray[np.float64]], members: NDArray[np.bool_], seed: int = 0) -> Told:
    """AUC of a logistic regression on all ``features`` (name -> [N]) and of the best one alone, in whichever direction it tells.

    The regression is cross-validated in FOLDS parts with as many members in each, REPEATS times, and the mean over parts is
    given. With few members the best of several numbers is above 0.5 by chance alone, so hold it against the same figure of a
    model that never saw them. ``members`` needs FOLDS of either kind, else ValueError.
    """
    if min(int(members.sum()), int((~members).sum())) < FOLDS:
        raise ValueError(f"{FOLDS} members and as many others are needed")
    each = {name: auc(values, members) for name, values in features.items()}
    best = max(each, key=lambda name: abs(each[name] - 0.5))
    table = np.stack(list(features.values()), 1)
    generator = np.random.default_rng(seed)
    found = []
    for _ in range(REPEATS):
        part = np.empty(len(members), dtype=np.int64)
        for kind in (True, False):
            rows = generator.permutation(np.flatnonzero(members == kind))
            part[rows] = np.arange(len(rows)) % FOLDS
        found += [_held_out(table, members, part == fold) for fold in range(FOLDS)]
    return Told(float(np.mean(found)), max(each[best], 1 - each[best]), best)


def _held_out(table: NDArray[np.float64], members: NDArray[np.bool_], held: NDArray[np.bool_]) -> float:
    """AUC on the rows ``held`` of a classifier fitted on the others; features in units of those."""
    mean, scale = table[~held].mean(0), table[~held].std(0)
    scaled = torch.from_numpy((table - mean) / np.where(scale > 0, scale, 1.0))
    weights = _logistic(scaled[torch.from_numpy(~held)], torch.from_numpy(members[~held]).double())
    scores = (scaled @ weights[:-1]).numpy()
    return auc(scores[held], members[held])


def _logistic(table: Tensor, members: Tensor) -> Tensor:
    """Weights FP64 [F + 1], the offset last, of a ridge logistic regression in which both kinds weigh the same."""
    inputs = torch.cat((table, torch.ones(len(table), 1, dtype=torch.float64)), 1)
    share = members.mean()
    weigh = torch.where(members > 0, 0.5 / share, 0.5 / (1 - share))
    ridge = PENALTY * torch.eye(inputs.shape[1], dtype=torch.float64)
    ridge[-1, -1] = 1e-6  # the offset is free
    weights = torch.zeros(inputs.shape[1], dtype=torch.float64)
    for _ in range(25):  # Newton's steps; the penalty keeps them bounded
        p = torch.sigmoid(inputs @ weights)
        slope = inputs.T @ (weigh * (p - members)) + ridge @ weights
        bend = (inputs * (weigh * p * (1 - p)).unsqueeze(1)).T @ inputs + ridge
        step = torch.linalg.solve(bend, slope)
        weights = weights - step * min(1.0, 4.0 / float(step.norm().clamp(min=1e-12)))
        if float(step.norm()) < 1e-8:
            break
    return weights
