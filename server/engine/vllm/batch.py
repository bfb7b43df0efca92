"""What the requests of a step ask of modules; most steps have the requests of the step before, so it is made once for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unbind_core.applying.passes import Forced


@dataclass(frozen=True)
class Batch:
    """``names`` are vLLM's. ``digests``: the requests' sets of modules, each once, "" that of those which ask for none; ``rows``
    int64 [S], which of them is a request's, None where all have the same; ``counted`` bool [S], None where all are. ``flights``:
    the names under which they are told apart. ``forced``: of the requests by their places where gates are open whatever their
    detectors say. ``watching``: who wishes to hear of its gates, with their ``legs``; ``reports``:
    whether one of them wants activations.
    """

    names: list[str]
    digests: Sequence[str]
    rows: Tensor | None
    counted: Tensor | None
    flights: Sequence[str]
    forced: Mapping[int, Sequence[Forced]]
    watching: Sequence[int]
    legs: Sequence[str]
    reports: bool

    @classmethod
    def of(cls, names: Sequence[str], asked: Sequence[Mapping[str, Any]], device: torch.device) -> Batch:
        """Of requests' ``extra_args``."""
        sets = [one.get("unbind", "") for one in asked]
        digests, loud = sorted(set(sets)), [not one.get("quiet") for one in asked]
        index = {digest: row for row, digest in enumerate(digests)}
        watching = [i for i, one in enumerate(asked) if one.get("leg")]
        return cls(
            list(names),  # vLLM changes its own
            digests,
            torch.tensor([index[one] for one in sets], device=device) if len(digests) > 1 else None,
            None if all(loud) else torch.tensor(loud, device=device),
            [one.get("flight", name) for one, name in zip(asked, names, strict=True)],
            {i: [Forced(*span) for span in one["forced"]] for i, one in enumerate(asked) if one.get("forced")},
            watching,
            [asked[i]["leg"] for i in watching],
            any(asked[i].get("report") for i in watching),
        )
