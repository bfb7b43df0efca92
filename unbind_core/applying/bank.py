"""The bank: any number of modules, any mix of them in one batch, one edit per layer.

Between modules (frozen artifacts) and hooks (which call :meth:`Selection.edit` at every layer). A bank may change at
any time; a :class:`Selection` never does, so that a running request keeps the modules it began with.
"""

from __future__ import annotations

import difflib
import math
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from unbind_core.applying.counts import PHASES, Counters, Tally
from unbind_core.applying.gate_memory import Columns, Places
from unbind_core.applying.gates import FisherGates, NetworkGates, of_rows
from unbind_core.errors import UnbindError, UnknownModule
from unbind_core.module import DETECTORS, UnbindModule
from unbind_core.running.device import threads_for

Record = list[tuple[tuple[str, ...], Tensor]]
_CACHED_SELECTIONS = 64


class _Part:
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

    def __init__(self, parts: Mapping[int, Sequence[_Part]], rows: int, remembers: bool) -> None:
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


class ModuleBank:
    """Modules by name, stacked per layer on one device; may be changed from another thread while a model runs."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        """An empty bank whose tensors will live on ``device``."""
        self._device = torch.device(device)
        self._lock = threading.RLock()
        self._modules: dict[str, UnbindModule] = {}
        self._slots: dict[str, int] = {}
        self._starts: dict[str, int] = {}
        self._tensors: dict[str, dict[str, Tensor]] = {}
        self._slot_names: list[str] = []
        self._columns: dict[int, Columns] = {}
        self._counters = Counters(self._device)
        self._cache: OrderedDict[tuple[tuple[tuple[str, float], ...], ...], Selection | None] = OrderedDict()

    def add(self, module: UnbindModule) -> None:
        """Make a module available; one of the same name is replaced for selections made from now on.

        Raises ModelMismatch where the bank already holds modules of another model.
        """
        with self._lock:
            for other in self._modules.values():
                if other.name != module.name:
                    module.require(other.model)
                    break
            replaced = self._modules.get(module.name)
            if replaced is not None and replaced.digest == module.digest:
                return
            if replaced is not None:
                self.remove(module.name)
            self._modules[module.name] = module
            self._tensors[module.name] = {key: part.to(self._device) for key, part in module.tensors.items()}
            self._slots[module.name] = self._counters.new_slot()
            self._slot_names.append(module.name)
            if module.heads is not None:  # a column for each head's score, and one for the gate's state
                columns = self._columns.setdefault(module.layer, Columns())
                self._starts[module.name] = columns.take(module.name, len(module.heads) + 1)
            self._cache.clear()

    def remove(self, name: str) -> None:
        """Take a module out; selections in use keep it to their end. Raises UnknownModule."""
        with self._lock:
            module = self[name]
            del self._modules[name], self._slots[name], self._tensors[name]
            if self._starts.pop(name, None) is not None:
                self._columns[module.layer].free(name)
            self._cache.clear()

    @property
    def columns(self) -> dict[int, int]:
        """By layer, how many columns of a gate memory its modules use; for layers whose gates have one."""
        with self._lock:
            return {layer: columns.width for layer, columns in self._columns.items() if columns.width}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the modules, sorted."""
        with self._lock:
            return tuple(sorted(self._modules))

    def __len__(self) -> int:
        """How many modules the bank holds."""
        return len(self._modules)

    def __contains__(self, name: object) -> bool:
        """Whether a module of this name can be selected."""
        return name in self._modules

    def __getitem__(self, name: str) -> UnbindModule:
        """The module of this name. Raises UnknownModule."""
        try:
            return self._modules[name]
        except KeyError:
            near = difflib.get_close_matches(name, self._modules, 3) or self.names[:3]
            hint = f"did you mean {' or '.join(near)}?" if near else "the bank is empty; add modules first"
            raise UnknownModule(f"no module '{name}'; {hint}") from None

    def select(self, rows: Sequence[Mapping[str, float]]) -> Selection | None:
        """The selection for a batch: per row, module name -> strength as a multiple of the calibrated kappa.

        Strength 0 measures without changing anything. None when no row asks for any module. Equal arguments give the
        same object until the bank changes. Raises UnknownModule, and UnbindError on a strength that is negative or not
        finite.
        """
        key = tuple(tuple(sorted(row.items())) for row in rows)
        with self._lock:
            if key in self._cache:
                self._cache.move_to_end(key)
                return self._cache[key]
            with torch.inference_mode(False):  # a selection made in inference mode must serve outside it too
                selection = self._select(rows)
            self._cache[key] = selection
            if len(self._cache) > _CACHED_SELECTIONS:
                self._cache.popitem(last=False)
            return selection

    def counts(self) -> dict[str, dict[str, tuple[int, int]]]:
        """Name -> phase -> (positions evaluated, gates open) since the bank was made, for modules since removed too.

        The only call that waits for the device.
        """
        with self._lock:
            names = list(self._slot_names)
            table = self._counters.read()
        totals = {name: dict.fromkeys(PHASES, (0, 0)) for name in names}
        for phase, slots in zip(PHASES, table, strict=True):
            for name, (evaluated, opened) in zip(names, slots, strict=False):
                before = totals[name][phase]
                totals[name][phase] = (before[0] + evaluated, before[1] + opened)
        return totals

    def _select(self, rows: Sequence[Mapping[str, float]]) -> Selection | None:
        for row in rows:
            for name, value in row.items():
                self[name]
                if not math.isfinite(value) or value < 0:
                    raise UnbindError(f"strength of module '{name}' is {value}; it must be finite and not negative")
        used = sorted({name for row in rows for name in row})
        parts: dict[int, list[_Part]] = {}
        for layer in sorted({self._modules[name].layer for name in used}):
            for kind in DETECTORS:
                modules = [m for m in map(self._modules.__getitem__, used) if m.layer == layer and m.detector == kind]
                modules.sort(key=lambda module: module.window)  # as gates with memory want them
                if modules:
                    parts.setdefault(layer, []).append(self._part(layer, modules, rows))
        if not parts:
            return None
        selection = Selection(parts, len(rows), any(self._modules[name].heads is not None for name in used))
        self._counters.watch(selection, [part.tally for own in parts.values() for part in own])
        return selection

    def _part(self, layer: int, modules: Sequence[UnbindModule], rows: Sequence[Mapping[str, float]]) -> _Part:
        """The part of a selection that modules of one kind at one layer make."""
        names = [module.name for module in modules]
        tensors = [self._tensors[name] for name in names]
        asked = [[name in row for name in names] for row in rows]
        strengths = [[float(row.get(name, 0.0)) for name in names] for row in rows]
        if all(one == asked[0] for one in asked) and all(one == strengths[0] for one in strengths):
            asked, strengths = asked[:1], strengths[:1]
        on, strength = (torch.tensor(table, device=self._device).unsqueeze(1) for table in (asked, strengths))
        gates: FisherGates | NetworkGates
        if modules[0].heads is None:
            gates = FisherGates(modules, tensors, on, self._device)
        else:
            starts = [self._starts[name] for name in names]
            gates = NetworkGates(modules, tensors, on, starts, self._columns[layer].width, self._device)
        v = torch.stack([own["v"] for own in tensors])
        kappa = torch.tensor([module.kappa for module in modules], device=self._device)
        slots = torch.tensor([self._slots[name] for name in names], device=self._device)
        return _Part(names, gates, v, kappa, slots, strength, on)
