"""What a correction is learned from: states of the rows where they are met, with what the reference has there, and what follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unbind_core.fitting.corrections.reference import Reference
from unbind_core.fitting.corrections.states import Met, last_states
from unbind_core.progress import ProgressCallback, silent

NO_ROW = -1  # in place of a token, where what follows is no row's
OWN = 3  # times that a row's own windows count beside those in which it is met elsewhere
# Positions that are learned from, of the rows as they are and as they are met elsewhere.
MOST_OWN, MOST_ELSEWHERE = 60_000, 40_000


@dataclass(frozen=True)
class Examples:
    """``states`` [N,d] of this layer, ``theirs`` [N,e] of the reference's last, the rows' next tokens int64 [N] (or NO_ROW)."""

    states: Tensor
    theirs: Tensor
    following: Tensor


def examples(
    model: nn.Module,
    met: Sequence[Met],
    reference: Reference,
    *,
    pad: int,
    generator: torch.Generator,
    own: int = 0,
    continued: Sequence[Met] = (),
    effort: float = 1.0,
    progress: ProgressCallback = silent,
) -> Examples:
    """From the rows' parts of windows, which are drawn whole: of the first ``own``, the rows as they are, until they have MOST_OWN
    positions, and of the others until they have MOST_ELSEWHERE, or of both as many fewer as less ``effort`` is to be made; and
    all of the ``continued`` ones, where no row's token follows. Those of the rows as they are count OWN times.
    """
    first, others = (
        _drawn(part, max(1, round(effort * most)), generator)
        for part, most in ((met[:own], MOST_OWN), (met[own:], MOST_ELSEWHERE))
    )
    met = [*first, *others, *continued]
    of_rows, repeated = len(met) - len(continued), [*range(len(first))] * (OWN - 1) + [*range(len(met))]
    ours = [one.states.to(torch.bfloat16) for one in met]
    theirs = ours
    if reference.model is not None:
        asked = [one.window for one in met], [one.at for one in met]
        theirs = last_states(reference.source(model), *asked, pad, progress)
    elif reference.near is not None:
        theirs = reference.near.states(model, met, pad, progress)

    def repeat(of: Sequence[Tensor]) -> Tensor:
        return torch.cat([of[i] for i in repeated])

    ids = [torch.tensor(one.window.ids)[one.at + 1] for one in met]
    following = repeat([own if i < of_rows else torch.full_like(own, NO_ROW) for i, own in enumerate(ids)])
    states = repeat(ours)
    return Examples(states, states if theirs is ours else repeat(theirs), following.to(states.device))


def _drawn(met: Sequence[Met], most: int, generator: torch.Generator) -> list[Met]:
    """Windows in no order, until there are ``most`` positions."""
    found, count = list[Met](), 0
    for number in torch.randperm(len(met), generator=generator).tolist():
        if count >= most:
            break
        found.append(met[number])
        count += len(met[number].at)
    return found
