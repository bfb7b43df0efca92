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
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from unbind_core.errors import UnbindError, UnknownModule
from unbind_core.module import UnbindModule

PHASES = ("prefill", "decode")
_CACHED_SELECTIONS = 64


def activation(states: Tensor, w: Tensor, s_ref: Tensor) -> Tensor:
    """a = relu(h w' - s_ref) in FP32 (paper eq. 6): states [...,d] of any dtype, w [M,d], s_ref [M] -> [...,M].

    Thresholds are computed through this same function, so that a boundary at deployment is the boundary at calibration.
    """
    return functional.linear(states.float(), w, -s_ref).relu_()


class _Counters:
    """Positions evaluated and gates open, int64 [2 phases, slots] each; a module's slot is never given to another."""

    def __init__(self, device: torch.device) -> None:
        self._lock = threading.Lock()
        self._evaluated = torch.zeros((2, 64), dtype=torch.int64, device=device)
        self._open = torch.zeros_like(self._evaluated)
        self.used = 0

    def new_slot(self) -> int:
        """The next free slot; the tables grow by doubling."""
        with self._lock:
            if self.used == self._open.shape[1]:
                with torch.inference_mode(False):  # else these could not be counted in outside inference mode
                    self._evaluated = functional.pad(self._evaluated, (0, self.used))
                    self._open = functional.pad(self._open, (0, self.used))
            self.used += 1
            return self.used - 1

    def add(self, phase: int, slots: Tensor, evaluated: Tensor, opened: Tensor) -> None:
        """Add int64 [m] counts at the given slots, without waiting for the device."""
        with self._lock:  # growth between reading and writing a table would lose the count
            self._evaluated[phase].index_add_(0, slots, evaluated)
            self._open[phase].index_add_(0, slots, opened)

    def read(self) -> list[list[tuple[int, int]]]:
        """Per phase and slot (evaluated, open); waits for the device."""
        with self._lock:
            tables = torch.stack((self._evaluated, self._open), dim=2).tolist()
        return [[(int(e), int(o)) for e, o in phase] for phase in tables]


@dataclass(frozen=True)
class _Stack:
    """One layer's modules in canonical (name) order: w, v FP32 [M,d]; s_ref, tau, kappa FP32 [M]; slots int64 [M]."""

    names: tuple[str, ...]
    w: Tensor
    v: Tensor
    s_ref: Tensor
    tau: Tensor
    kappa: Tensor
    slots: Tensor

    def take(self, wanted: Sequence[int]) -> _Stack:
        """The stack of some of the modules only."""
        if len(wanted) == len(self.names):
            return self
        index = torch.tensor(wanted, device=self.w.device)
        parts = (part[index] for part in (self.w, self.v, self.s_ref, self.tau, self.kappa, self.slots))
        return _Stack(tuple(self.names[i] for i in wanted), *parts)


class _LayerEdit:
    """One layer's part of a selection: m modules used by any of R rows. Pure tensor arithmetic, no synchronisation."""

    def __init__(self, stack: _Stack, strength: Tensor, on: Tensor, counters: _Counters) -> None:
        """``strength`` FP32 [R,m] multiplies kappa; ``on`` bool [R,m] says which modules each row asks for."""
        self._stack = stack
        self._counters = counters
        self._on = on
        self._on_count = on.sum(0)
        # A row that does not ask has the threshold NaN, with which every comparison is false, even that of an overflow.
        self._tau = torch.where(on, stack.tau, torch.nan)
        self._scale = stack.kappa * strength * on
        self._every_row_alike = bool((on == on[0]).all()) and bool((strength == strength[0]).all())
        # where no row differs, kappa is multiplied into the directions once and for all
        self._scaled_v = self._scale[0].unsqueeze(1) * stack.v if self._every_row_alike else stack.v

    def __call__(self, states: Tensor, rows: Tensor | None, phase: int, counted: Tensor | None) -> Tensor:
        """As :meth:`Selection.edit`."""
        stack = self._stack
        a = activation(states, stack.w, stack.s_ref)
        if self._every_row_alike:
            gate = a >= self._tau[0]
            b = torch.where(gate, a, 0.0)
        else:
            gate = a >= self._of_rows(self._tau, states, rows)
            b = torch.where(gate, a, 0.0).mul_(self._of_rows(self._scale, states, rows))
        self._count(gate, states, rows, phase, counted)
        flat = b.view(-1, b.shape[-1])
        if states.dtype == torch.float32:
            return torch.addmm(states.reshape(-1, states.shape[-1]), flat, self._scaled_v, alpha=-1).view(states.shape)
        return states - (flat @ self._scaled_v).view(states.shape).to(states.dtype)

    @staticmethod
    def _of_rows(table: Tensor, states: Tensor, rows: Tensor | None) -> Tensor:
        """Entries of a [R,m] table for every state: [B,1,m] for states [B,T,d], [N,m] for states [N,d]."""
        chosen = table if rows is None else table.index_select(0, rows)
        return chosen.unsqueeze(1) if states.dim() == 3 else chosen

    def _count(self, gate: Tensor, states: Tensor, rows: Tensor | None, phase: int, counted: Tensor | None) -> None:
        length = states.shape[1] if states.dim() == 3 else 1
        if counted is None:
            if self._every_row_alike:
                evaluated = self._on[0].long() * (states.shape[0] * length)
            elif rows is None:
                evaluated = self._on_count * length
            else:
                evaluated = self._on.index_select(0, rows).sum(0) * length
            opened = gate.sum(dim=tuple(range(gate.dim() - 1)))
        else:
            opened = (gate & counted.unsqueeze(-1)).sum(dim=tuple(range(gate.dim() - 1)))
            on = self._on[:1] if self._every_row_alike else self._on
            on = self._of_rows(on, states, None if self._every_row_alike else rows)
            evaluated = (on & counted.unsqueeze(-1)).sum(dim=tuple(range(gate.dim() - 1)))
        self._counters.add(phase, self._stack.slots, evaluated, opened)


class Selection:
    """Which modules each row of a batch uses, how strongly. Immutable: it pins its tensors whatever the bank does."""

    def __init__(self, edits: Mapping[int, _LayerEdit], rows: int) -> None:
        """Made by :meth:`ModuleBank.select`."""
        self._edits = dict(edits)
        self.layers = frozenset(edits)
        self.rows = rows

    def edit(
        self,
        layer: int,
        states: Tensor,
        rows: Tensor | None = None,
        phase: str = "prefill",
        counted: Tensor | None = None,
    ) -> Tensor:
        """The edited states of one layer (paper eq. 12), new storage, same shape and dtype; the input stays as it is.

        ``states`` [B,T,d] or [N,d]. ``rows``: int64 [B] or [N], the selection's row of each; None where batch row i
        uses row i, or where the selection has a single row for all. ``counted``: bool [B,T] or [N], false at padding,
        None where all positions are real; it matters to the counts alone. a = relu(h w' - s_ref), b = a 1[a >= tau]
        kappa on[row], h - cast(b v), in FP32 throughout. All modules of the layer read the same unmodified states.
        Raises UnbindError where the batch has other rows than the selection.
        """
        if rows is None and self.rows not in (1, states.shape[0]):
            raise UnbindError(
                f"rows: the selection has {self.rows} rows, the batch {states.shape[0]}; pass rows, an index each"
            )
        return self._edits[layer](states, rows, PHASES.index(phase), counted)


class ModuleBank:
    """Modules by name, stacked per layer on one device; may be changed from another thread while a model runs."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        """An empty bank whose tensors will live on ``device``."""
        self._device = torch.device(device)
        self._lock = threading.RLock()
        self._modules: dict[str, UnbindModule] = {}
        self._slots: dict[str, int] = {}
        self._slot_names: list[str] = []
        self._stacks: dict[int, _Stack] = {}
        self._counters = _Counters(self._device)
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
            self._modules[module.name] = module
            self._slots[module.name] = self._counters.new_slot()
            self._slot_names.append(module.name)
            self._forget({module.layer} | ({replaced.layer} if replaced is not None else set()))

    def remove(self, name: str) -> None:
        """Take a module out; selections in use keep it to their end. Raises UnknownModule."""
        with self._lock:
            module = self[name]
            del self._modules[name], self._slots[name]
            self._forget({module.layer})

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

    def _forget(self, layers: set[int]) -> None:
        for layer in layers:
            self._stacks.pop(layer, None)
        self._cache.clear()

    def _stack(self, layer: int) -> _Stack:
        if layer not in self._stacks:
            names = tuple(name for name in self.names if self._modules[name].layer == layer)
            modules = [self._modules[name] for name in names]

            def scalars(values: Sequence[float]) -> Tensor:
                return torch.tensor(values, dtype=torch.float32, device=self._device)

            self._stacks[layer] = _Stack(
                names,
                torch.stack([module.w for module in modules]).to(self._device),
                torch.stack([module.v for module in modules]).to(self._device),
                scalars([module.s_ref for module in modules]),
                scalars([module.tau for module in modules]),
                scalars([module.kappa for module in modules]),
                torch.tensor([self._slots[name] for name in names], device=self._device),
            )
        return self._stacks[layer]

    def _select(self, rows: Sequence[Mapping[str, float]]) -> Selection | None:
        for row in rows:
            for name, value in row.items():
                self[name]
                if not math.isfinite(value) or value < 0:
                    raise UnbindError(f"strength of module '{name}' is {value}; it must be finite and not negative")
        edits = {}
        used = {name for row in rows for name in row}
        for layer in sorted({self._modules[name].layer for name in used}):
            everything = self._stack(layer)
            stack = everything.take([i for i, name in enumerate(everything.names) if name in used])
            strength = torch.tensor([[float(row.get(name, 0.0)) for name in stack.names] for row in rows])
            on = torch.tensor([[name in row for name in stack.names] for row in rows])
            edits[layer] = _LayerEdit(stack, strength.to(self._device), on.to(self._device), self._counters)
        return Selection(edits, len(rows)) if edits else None
