"""Which modules each row of a batch uses, and the edit they make at each layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from unbind_core.applying.corrections import Corrections
from unbind_core.applying.counts import PHASES, Count, Tally
from unbind_core.applying.fused import Decided, FusedPart, Kernels
from unbind_core.applying.gates import FisherGates, NetworkGates, of_rows
from unbind_core.applying.kept_gates import KeptGates
from unbind_core.applying.looks import Requests
from unbind_core.applying.networks import Block
from unbind_core.applying.passes import WHOLE, Pass
from unbind_core.errors import UnbindError
from unbind_core.running.device import threads_for


class Edit(NamedTuple):
    """Edited states, and the counts of the gates that decided, one for each detector kind at the layer."""

    states: Tensor
    counts: tuple[Count | Decided, ...]

    def totals(self) -> tuple[int, int]:
        """(positions evaluated, gates open) over all modules; waits for the device."""
        evaluated, opened = 0, 0
        for count in self.counts:
            asked, gates = count.totals()
            evaluated, opened = evaluated + int(asked.sum()), opened + int(gates.sum())
        return evaluated, opened


class Part:
    """The modules of one detector kind at one layer, m of them used by any of R rows. Tensor arithmetic, no synchronisation."""

    def __init__(
        self,
        names: Sequence[str],
        gates: FisherGates | NetworkGates | KeptGates,
        tensors: Sequence[Mapping[str, Tensor]],
        kappa: Tensor,
        slots: Tensor,
        strength: Tensor,
        on: Tensor,
        requests: Requests | None = None,
        kernels: Kernels | None = None,
    ) -> None:
        """``tensors`` are the modules' own; kappa FP32 [m], slots int64 [m]; ``on`` bool [R,1,m] says which modules each row asks
        for, R being 1 where all ask for the same, ``strength`` FP32 [R,1,m] how many times kappa. ``requests``: those that are
        told apart, where anybody looks at scores. ``kernels``: those of ``cuda/``, for decode steps.
        """
        self._names = tuple(names)
        self._places = {name: i for i, name in enumerate(names)}
        self._gates, self.blocks = gates, gates.blocks
        self._proportional = isinstance(gates, FisherGates)
        self._zero = kappa.new_zeros(())
        self._on = on
        self._acts = on & (strength > 0)
        self.tally = Tally(slots, on, None if requests is None else gates.units, requests)
        # Where no two rows want a module with different strengths, its correction holds the strength once and for all.
        most = torch.where(on, strength, 0.0).amax((0, 1))
        alike = bool(((strength == most) | ~on).all())
        self._strength = None if alike else strength
        self._corrections = Corrections(tensors, kappa * most if alike else kappa)
        self.width = gates.width + self._corrections.width  # products of a state with a vector of its size
        self._fused: FusedPart | None = None
        if kernels is not None and isinstance(gates, NetworkGates):
            amounts = self._acts.float() if alike else torch.where(self._acts, strength, 0.0)
            self._fused = FusedPart(
                kernels, self._names, gates, self._corrections, on, amounts, slots, self.tally, requests
            )

    def __call__(
        self, edited: Tensor, layer: int, states: Tensor, pass_: Pass, in_place: bool = False
    ) -> tuple[Tensor, Count | Decided]:
        """``edited`` [...,d] with this part's corrections, which are read off ``states`` FP32 alone; and what its gates did.
        ``in_place``: it may itself be changed.
        """
        moved = pass_.forced is not None or pass_.eased is not None
        kernels = None if moved else self._fused  # which know of no gate that opens for another reason
        if kernels is not None and (done := kernels(edited, layer, states, pass_, in_place)) is not None:
            return done
        scores, gate = self._gates(layer, states, pass_, self._where(pass_.eased, states))
        a = scores
        if (forced := self._where(pass_.forced, states)) is not None:  # each as one that has just reached its threshold
            a, gate = torch.where(forced & ~gate, self._gates.units.to(a.dtype), a), gate | forced
        amount = torch.where(gate, a, self._zero) if self._proportional else gate.to(a.dtype)
        if self._strength is not None:
            amount = amount.mul_(of_rows(self._strength, states, pass_.rows))
        if pass_.record is not None:
            pass_.record.append((self._names, torch.where(gate, a, 0.0)))
        if pass_.opened is not None:
            pass_.opened.append((gate & of_rows(self._acts, states, pass_.rows)).any(-1))
        count = self._count(scores, gate, states, pass_)
        return self._corrections.add_to(edited, states, amount), count

    def _where(self, named: Mapping[str, Tensor] | None, states: Tensor) -> Tensor | None:
        """bool [...,m] from bool [...] by name; None where none of them is of a module here."""
        own = () if named is None else named.keys() & self._places.keys()
        if named is None or not own:
            return None
        here = torch.zeros(*states.shape[:-1], len(self._names), dtype=torch.bool, device=states.device)
        for name in own:
            here[..., self._places[name]] = named[name]
        return here

    def _count(self, scores: Tensor, gate: Tensor, states: Tensor, pass_: Pass) -> Count:
        counts = pass_.real if pass_.counts is None else pass_.counts
        asked = of_rows(self._on, states, pass_.rows)
        if counts is not None:
            asked, gate = asked & counts.unsqueeze(-1), gate & counts.unsqueeze(-1)
        self.tally.note(scores, gate, asked, pass_.requests)
        count = Count(gate, asked, pass_.rows is None and counts is None)
        if pass_.decoding is None:
            self.tally.add(PHASES.index(pass_.phase), count)
            return count
        decoding = pass_.decoding.unsqueeze(-1)
        for phase, here in (("prefill", ~decoding), ("decode", decoding)):
            self.tally.add(PHASES.index(phase), Count(gate & here, asked & here, False))
        return count


class Selection:
    """Which modules each row of a batch uses, how strongly. Immutable: it pins its tensors whatever the bank does."""

    def __init__(self, parts: Mapping[int, Sequence[Part]], rows: int, remembers: bool) -> None:
        """Made by :meth:`ModuleBank.select`."""
        self._parts = dict(parts)
        self._width = {layer: sum(part.width for part in own) for layer, own in self._parts.items()}
        self.layers = frozenset(parts)
        self.rows = rows
        self.remembers = remembers  # whether some gate has a memory, so that an engine must say where its rows stand

    @property
    def blocks(self) -> list[Block]:
        """The blocks of networks that its gates have, which other selections may share."""
        return [block for own in self._parts.values() for part in own for block in part.blocks]

    def edit(
        self, layer: int, states: Tensor, pass_: Pass = WHOLE, to: Tensor | None = None, in_place: bool = False
    ) -> Edit:
        """The edited states of one layer (Section 4.3, eq. (10)), same shape and dtype; the input stays as it is, and is given back
        where nothing is added.

        ``states`` [B,T,d] or [N,d], of which ``pass_`` says the rest. ``to``: what the corrections are added to and what is given
        back, where an engine keeps a state as a sum of parts; None for the states themselves. ``in_place``: ``to`` may itself be
        changed. In FP32 throughout; all modules of the layer read the same unmodified states. Raises UnbindError where the batch
        has other rows than the selection.
        """
        if pass_.rows is None and self.rows not in (1, states.shape[0]):
            raise UnbindError(
                f"rows: the selection has {self.rows} rows, the batch {states.shape[0]}; pass rows, an index each"
            )
        edited, counts = states if to is None else to, list[Count | Decided]()
        read = states.float()  # once for all that follows
        in_place = in_place and (read is not edited or len(self._parts[layer]) == 1)
        with threads_for(states.device, states.numel() * self._width[layer]):
            for part in self._parts[layer]:
                edited, count = part(edited, layer, read, pass_, in_place)
                counts.append(count)
        return Edit(edited, tuple(counts))
