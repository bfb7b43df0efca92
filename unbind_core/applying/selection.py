"""Which modules each row of a batch uses, and the edit they make at each layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from unbind_core.applying.counts import PHASES, Tally
from unbind_core.applying.gate_memory import Places
from unbind_core.applying.gates import FisherGates, NetworkGates, of_rows
from unbind_core.errors import UnbindError
from unbind_core.running.device import threads_for

Record = list[tuple[tuple[str, ...], Tensor]]


class Part:
    """The modules of one detector kind at one layer, m of them used by any of R rows. Tensor arithmetic, no synchronisation."""

    def __init__(
        self, names: Sequence[str], gates: FisherGates | NetworkGates, v: Tensor, kappa: Tensor, slots: Tensor,
        strength: Tensor, on: Tensor,
    ) -> None:  # fmt: skip
        """v FP32 [m,d], kappa FP32 [m], slots int64 [m]; ``on`` bool [R,1,m] says which modules each row asks for, R being 1 where
        all ask for the same, ``strength`` FP32 [R,1,m] how many times kappa.
        """
        self._names = tuple(names)
        self._gates = gates
        self._proportional = isinstance(gates, FisherGates)
        self.width = gates.width  # products of a state with a vector of its size
        self._zero = v.new_zeros(())
        self._on = on
        self.tally = Tally(slots, on)
        # Where no two rows want a module with different strengths, its direction holds the strength once and for all.
        most = torch.where(on, strength, 0.0).amax((0, 1))
        alike = bool(((strength == most) | ~on).all())
        self._strength = None if alike else strength
        self._v = (kappa * most if alike else kappa).unsqueeze(1) * v

    def __call__(
        self, edited: Tensor, layer: int, states: Tensor, rows: Tensor | None, phase: int, real: Tensor | None,
        places: Places | None, counted: Tensor | None, record: Record | None,
    ) -> Tensor:  # fmt: skip
        """``edited`` less this part's correction, which is read off ``states`` alone."""
        a, gate = self._gates(layer, states, rows, real, places)
        amount = torch.where(gate, a, self._zero) if self._proportional else gate.to(a.dtype)
        if self._strength is not None:
            amount = amount.mul_(of_rows(self._strength, states, rows))
        self._count(gate, states, rows, phase, real if counted is None else counted)
        if record is not None:
            record.append((self._names, torch.where(gate, a, 0.0)))
        flat = amount.view(-1, amount.shape[-1])
        if edited.dtype == torch.float32:
            return torch.addmm(edited.reshape(-1, edited.shape[-1]), flat, self._v, alpha=-1).view(edited.shape)
        return edited - (flat @ self._v).view(edited.shape).to(edited.dtype)

    def _count(self, gate: Tensor, states: Tensor, rows: Tensor | None, phase: int, counted: Tensor | None) -> None:
        if rows is None and counted is None:
            self.tally.every_row(phase, gate)
            return
        asked = of_rows(self._on, states, rows).expand(gate.shape)
        if counted is not None:
            asked, gate = asked & counted.unsqueeze(-1), gate & counted.unsqueeze(-1)
        self.tally.some(phase, gate, asked)


class Selection:
    """Which modules each row of a batch uses, how strongly. Immutable: it pins its tensors whatever the bank does."""

    def __init__(self, parts: Mapping[int, Sequence[Part]], rows: int, remembers: bool) -> None:
        """Made by :meth:`ModuleBank.select`."""
        self._parts = dict(parts)
        self._width = {layer: sum(part.width for part in own) for layer, own in self._parts.items()}
        self.layers = frozenset(parts)
        self.rows = rows
        self.remembers = remembers  # whether some gate has a memory, so that an engine must say where its rows stand

    def edit(
        self,
        layer: int,
        states: Tensor,
        rows: Tensor | None = None,
        phase: str = "prefill",
        real: Tensor | None = None,
        places: Places | None = None,
        counted: Tensor | None = None,
        record: Record | None = None,
    ) -> Tensor:
        """The edited states of one layer (paper eq. 12), new storage, same shape and dtype; the input stays as it is.

        ``states`` [B,T,d] or [N,d]. ``rows``: int64 [B] or [N], the selection's row of each; None where batch row i
        uses row i, or where the selection has a single row for all. ``real``: bool [B,T] or [N], false at padding,
        None where all positions are real. ``places`` says where the rows stand in a memory of gates; None where they are whole
        sequences from position 0, or where no gate has a memory. ``counted``: as ``real``, for what enters the counts; None where
        that is all that is real. ``record`` is given the activations behind open gates, 0
        behind closed ones: (names, FP32 [...,M]) for each kind of detector. In FP32 throughout; all modules of the layer read the
        same unmodified states. Raises UnbindError where the batch has other rows than the selection.
        """
        if rows is None and self.rows not in (1, states.shape[0]):
            raise UnbindError(
                f"rows: the selection has {self.rows} rows, the batch {states.shape[0]}; pass rows, an index each"
            )
        edited = states
        with threads_for(states.device, states.numel() * self._width[layer]):
            for part in self._parts[layer]:
                edited = part(edited, layer, states, rows, PHASES.index(phase), real, places, counted, record)
        return edited
