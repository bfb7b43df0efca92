"""What a part of a selection does in a decode step on a CUDA device: two products of networks and two kernels.

The operations of ``gates.py``, ``corrections.py`` and ``counts.py``, dozens of them, take next to nothing there, but launching them
does. What does not go through the kernels (prompts, the paper's gates, kept states) goes through those, and both share the memory
of gates and what was counted, so that a sequence may change from one to the other.
"""

from __future__ import annotations

import importlib
from contextlib import nullcontext
from functools import cache
from importlib.util import find_spec
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unbind_core.applying.corrections import Corrections
from unbind_core.applying.counts import PHASES, Tally
from unbind_core.applying.gates import NetworkGates, of_rows
from unbind_core.applying.looks import BOUNDARIES, Requests
from unbind_core.applying.networks import Block
from unbind_core.applying.passes import Pass
from unbind_core.applying.places import Addresses


@cache
def kernels_of(device: torch.device, wanted: bool | None = None) -> Any | None:
    """The kernels, where they are ``wanted``; None: on a CUDA device, where Triton is installed."""
    if wanted is False or (wanted is None and (device.type != "cuda" or not find_spec("triton"))):
        return None
    return importlib.import_module("unbind_core.cuda.decoding")


class Decided(NamedTuple):
    """What gates did, as :class:`Count` tells it, worked out when somebody asks: ``gate`` bool [N,M]; the rest as ``Part`` and
    ``Pass`` have it.
    """

    gate: Tensor
    on: Tensor
    rows: Tensor | None
    counts: Tensor | None

    def totals(self) -> tuple[Tensor, Tensor]:
        """Positions evaluated and gates open, int64 [M] each."""
        asked = of_rows(self.on, self.gate, self.rows).expand(self.gate.shape)
        counted = self.gate.new_ones(()) if self.counts is None else self.counts.reshape(-1, 1)
        return (asked & counted).sum(0), (self.gate & counted).sum(0)


class FusedPart:
    """The modules of one part, M of them; see ``Part``."""

    def __init__(
        self,
        kernels: Any,
        names: tuple[str, ...],
        gates: NetworkGates,
        corrections: Corrections,
        on: Tensor,
        strength: Tensor | None,
        acts: Tensor,
        slots: Tensor,
        tally: Tally,
        requests: Requests | None,
    ) -> None:
        """``on``, ``strength`` and ``acts`` [R,1,M] as ``Part`` has them; ``strength`` None where it is part of ``corrections``."""
        self._kernels, self._names, self._gates, self._corrections = kernels, names, gates, corrections
        self._on, self._tally, self._requests = on, tally, requests
        weights = acts.float() if strength is None else torch.where(acts, strength, 0.0)
        self._weights = weights.masked_fill(~on, -1.0).squeeze(1).contiguous()
        ranks = corrections.ranks
        begins = [0, *accumulate(ranks)]
        fields = [
            (*own, slot, begin, rank)
            for own, slot, begin, rank in zip(gates.described, slots.tolist(), begins, ranks, strict=False)
        ]
        self._modules = torch.tensor(fields, dtype=torch.int32, device=on.device)
        self._bounds = torch.full((kernels.BOUNDS,), torch.inf, device=on.device)
        self._bounds[: len(BOUNDARIES)] = torch.tensor(BOUNDARIES, device=on.device)
        self._count, self._ranks = len(names), begins[-1]
        self._blocks: list[tuple[Block, int]] = []
        first = 0
        for block in gates.blocks:
            self._blocks.append((block, first))
            first += len(block.counts)

    def where(self, edited: Tensor, layer: int, states: Tensor, pass_: Pass) -> Addresses | None:
        """Where a pass that goes through the kernels has its memory; None for those that do not."""
        places = pass_.places
        if places is None or not places.alone or pass_.real is not None or pass_.decoding is not None:
            return None
        if torch.is_grad_enabled() and (states.requires_grad or edited.requires_grad):
            return None
        return places.addresses(layer, self._gates.table_width) if edited.is_contiguous() else None

    def __call__(
        self, edited: Tensor, states: Tensor, pass_: Pass, where: Addresses, in_place: bool
    ) -> tuple[Tensor, Decided]:
        """As ``Part``."""
        kernels, d = self._kernels, states.shape[-1]
        flat, to = states.reshape(-1, d).contiguous(), edited.view(-1, d)
        into, back, _ = self._corrections.stacked
        work = flat.new_empty((len(flat), self._count + self._ranks))  # amounts, then what is within the corrections
        gate = flat.new_empty((len(flat), self._count), dtype=torch.bool)
        scores = None if pass_.record is None else flat.new_empty(gate.shape)
        tables = None if pass_.requests is None else self._requests
        with torch.cuda.device(flat.device) if kernels.elsewhere(flat.device) else nullcontext():
            with nullcontext() if tables is None else tables.lock:
                for block, first in self._blocks:
                    kernels.decide(
                        *block.products(flat), first, self._modules, self._gates.close, self._weights, pass_.rows, where,
                        self._tally.bins(PHASES.index(pass_.phase)), self._bounds, pass_.counts,
                        pass_.requests, None if tables is None else (tables.opened, tables.counts),
                        flat, into, gate, work, scores,
                    )  # fmt: skip
            out = to if in_place else torch.empty_like(to)
            kernels.correct(to, out, work, back, self._modules)
        if pass_.record is not None and scores is not None:
            pass_.record.append((self._names, torch.where(gate, scores, 0.0).view(*states.shape[:-1], -1)))
        if pass_.opened is not None:
            pass_.opened.append((work[:, : self._count] > 0).any(-1).view(states.shape[:-1]))
        return edited if in_place else out.view(edited.shape), Decided(gate, self._on, pass_.rows, pass_.counts)
