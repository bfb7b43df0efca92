"""What a part of a selection does in a decode step on a CUDA device: two products of networks and two kernels.

The operations of ``gates.py``, ``corrections.py`` and ``counts.py``, dozens of them, take next to nothing there, but launching them
does. What does not go through the kernels (prompts, the paper's gates, kept states) goes through those, and both share the memory
of gates and what was counted, so that a sequence may change from one to the other.
"""

from __future__ import annotations

import importlib
import logging
import threading
from contextlib import nullcontext
from functools import cache
from importlib.util import find_spec
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from unbind_core.applying.corrections import Corrections
from unbind_core.applying.counts import PHASES, Tally
from unbind_core.applying.gates import NetworkGates, of_rows
from unbind_core.applying.looks import BOUNDARIES, Requests
from unbind_core.applying.networks import Block
from unbind_core.applying.passes import Pass
from unbind_core.applying.places import Addresses

if TYPE_CHECKING:
    from unbind_core.cuda.decoding import DecodeKernels

log = logging.getLogger("unbind.engine")
PAGED, SLOTS = (torch.int32, torch.int32), (torch.int64, torch.int64)  # dtypes of the positions and tables of memories
ALIGNED = 16  # bytes to which kernels are told that states are


class Kernels:
    """A device's kernels, compiled when they are first asked for. Where they cannot be, the log says so, once, and torch does their
    work.
    """

    def __init__(self, device: torch.device) -> None:
        """Nothing is compiled yet."""
        self._device, self._lock = device, threading.Lock()
        self._made: dict[tuple[int, torch.dtype, torch.dtype, torch.dtype], DecodeKernels | None] = {}
        self._told = False

    def made(self, d: int, dtype: torch.dtype, positions: torch.dtype, tables: torch.dtype) -> DecodeKernels | None:
        """Those for states of ``d`` numbers that are edited in ``dtype``, and a memory whose :class:`Addresses` have ``positions``
        and ``tables`` of these dtypes. The first time it takes seconds, see :meth:`prepare`.
        """
        key = d, dtype, positions, tables
        if key not in self._made:
            with self._lock:
                if key not in self._made:
                    self._made[key] = self._compiled(*key)
        return self._made[key]

    def prepare(self, d: int, dtype: torch.dtype, paged: bool) -> None:
        """Compile those of an engine whose memory is in pages, as vLLM's, or in slots, before it needs them."""
        self.made(d, dtype, *(PAGED if paged else SLOTS))

    def _compiled(self, *key: Any) -> DecodeKernels | None:
        try:
            decoding = importlib.import_module("unbind_core.cuda.decoding")
            made: DecodeKernels = decoding.DecodeKernels(self._device, BOUNDARIES, *key)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with Triton or its compiler
            if not self._told:
                log.warning(
                    "the kernels of decode steps cannot be compiled (%s: %s); modules do the same, but slow steps down more. "
                    "Install what Triton compiles with, a C compiler (gcc) and Python's headers, or another version of Triton",
                    type(error).__name__,
                    error,
                )
            self._told = True
            return None
        return made


@cache
def kernels_of(device: torch.device, wanted: bool | None = None) -> Kernels | None:
    """The device's kernels, where they are ``wanted``; None: on a CUDA device, where Triton is installed."""
    if wanted is False or (wanted is None and (device.type != "cuda" or not find_spec("triton"))):
        return None
    return Kernels(device)


class Decided(NamedTuple):
    """What gates did, as :class:`Count` tells it, worked out when somebody asks: ``amounts`` FP32 [N,M], 0 behind closed gates; the
    rest as ``Part`` and ``Pass`` have it.
    """

    amounts: Tensor
    on: Tensor
    rows: Tensor | None
    counts: Tensor | None

    @property
    def gate(self) -> Tensor:
        """Whether each is open, bool [N,M]."""
        return self.amounts != 0

    def totals(self) -> tuple[Tensor, Tensor]:
        """Positions evaluated and gates open, int64 [M] each."""
        gate = self.gate
        asked = of_rows(self.on, gate, self.rows).expand(gate.shape)
        counted = gate.new_ones(()) if self.counts is None else self.counts.reshape(-1, 1)
        return (asked & counted).sum(0), (gate & counted).sum(0)


class FusedPart:
    """The modules of one part, M of them; see ``Part``."""

    def __init__(
        self,
        kernels: Kernels,
        names: tuple[str, ...],
        gates: NetworkGates,
        corrections: Corrections,
        on: Tensor,
        amounts: Tensor,
        slots: Tensor,
        tally: Tally,
        requests: Requests | None,
    ) -> None:
        """``on`` and ``slots`` as ``Part`` has them; ``amounts`` FP32 [R,1,M]: what an open gate's correction is times."""
        self._kernels, self._names, self._gates, self._corrections = kernels, names, gates, corrections
        self._on, self._requests = on, requests
        self._weights = amounts.masked_fill(~on, -1.0).squeeze(1).contiguous()
        ranks = corrections.ranks
        begins = [0, *accumulate(ranks)]
        fields = [
            (*own, slot, begin, rank, single)
            for own, slot, begin, rank, single in zip(
                gates.described, slots.tolist(), begins, ranks, corrections.single, strict=False
            )
        ]
        self._modules = torch.tensor(fields, dtype=torch.int32, device=on.device)
        self._count, self._ranks = len(names), begins[-1]
        self._bins = {phase: tally.bins(i) for i, phase in enumerate(PHASES)}
        self._blocks: list[tuple[Block, int]] = []
        first = 0
        for block in gates.blocks:
            self._blocks.append((block, first))
            first += len(block.counts)

    def __call__(
        self, edited: Tensor, layer: int, states: Tensor, pass_: Pass, in_place: bool
    ) -> tuple[Tensor, Decided] | None:
        """As ``Part``; None, and nothing is done, for a pass that does not go through the kernels."""
        if (where := self._where(edited, layer, states, pass_)) is None:
            return None
        d, m = states.shape[-1], self._count
        if (kernels := self._kernels.made(d, edited.dtype, where.positions.dtype, where.tables.dtype)) is None:
            return None
        flat = states.reshape(-1, d)
        by = self._corrections.addressed
        work = flat.new_empty((len(flat), 2 * m + self._ranks))
        rows, counts, requests = map(_one_by_one, (pass_.rows, pass_.counts, pass_.requests))
        tables = None if requests is None else self._requests
        with kernels.here():
            with nullcontext() if tables is None else tables.lock:
                for block, first in self._blocks:
                    kernels.decide(
                        *block.products(flat), first, self._modules, self._gates.close, self._weights, rows, where,
                        self._bins[pass_.phase], counts, requests,
                        None if tables is None else (tables.opened, tables.counts), flat, by, work,
                    )  # fmt: skip
            out = edited if in_place else torch.empty_like(edited)
            kernels.correct(edited.view(-1, d), out.view(-1, d), work, by, self._modules, in_place)
        amounts = work[:, :m]
        if pass_.record is not None:
            active = torch.where(amounts != 0, work[:, -m:], 0.0)
            pass_.record.append((self._names, active.view(*states.shape[:-1], -1)))
        if pass_.opened is not None:
            pass_.opened.append((amounts > 0).any(-1).view(states.shape[:-1]))
        return out, Decided(amounts, self._on, pass_.rows, pass_.counts)

    def _where(self, edited: Tensor, layer: int, states: Tensor, pass_: Pass) -> Addresses | None:
        """Where a pass that goes through the kernels has its memory; None for those that do not."""
        places = pass_.places
        if places is None or not places.alone or pass_.real is not None or pass_.decoding is not None:
            return None
        if torch.is_grad_enabled() and (states.requires_grad or edited.requires_grad):
            return None
        if not all(one.is_contiguous() and one.data_ptr() % ALIGNED == 0 for one in (edited, states)):
            return None
        found = places.addresses(layer, self._gates.table_width)
        return found and found._replace(positions=found.positions.contiguous())


def _one_by_one(values: Tensor | None) -> Tensor | None:
    """One behind the other in memory, as kernels read them: what says the same of all states may be a single number there."""
    return None if values is None else values.contiguous()
