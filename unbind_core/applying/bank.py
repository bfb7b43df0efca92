"""The bank: any number of modules, any mix of them in one batch, one edit per layer.

Between modules (frozen artifacts) and hooks, which call :meth:`Selection.edit` at every layer. A bank may change at any time; a
:class:`Selection` never does, so that a running request keeps the modules it began with.
"""

from __future__ import annotations

import difflib
import math
import sys
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

import torch
from torch import Tensor

from unbind_core.applying.corrections import placed
from unbind_core.applying.counts import PHASES, Counters
from unbind_core.applying.fused import kernels_of
from unbind_core.applying.gate_memory import Columns
from unbind_core.applying.gates import FisherGates, NetworkGates, windows_of
from unbind_core.applying.kept_gates import LONGEST, KeptGates
from unbind_core.applying.looks import NOTHING_SEEN, Look, Requests
from unbind_core.applying.networks import Blocks, Networks
from unbind_core.applying.selection import Part, Selection
from unbind_core.errors import UnbindError, UnknownModule
from unbind_core.module import UnbindModule
from unbind_core.module_file import DETECTORS

_CACHED_SELECTIONS = 64
_BLOCK = 128  # modules of a block, at most, whose gates go by kept states; usual networks are packed in 5 ms
_BLOCK_COLUMNS = 4096  # columns of running sums of a block


class ModuleBank:
    """Modules by name, stacked per layer on one device; may be changed from another thread while a model runs."""

    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        one_table: bool = False,
        summed_columns: int | None = None,
        requests: int = 0,
        kernels: bool | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """An empty bank whose tensors will live on ``device``. ``one_table``: the modules of all layers share the columns of one
        memory between them, where an engine keeps one for all layers. ``summed_columns``: so many columns of its memory a layer
        has for running sums of heads; the gates of further modules go by the states that are kept (``KeptGates``). Default: as
        many as a state has numbers, with which that memory is the smaller; in one table all gates go by running sums.
        ``requests``: how many an engine has at a time, so that :meth:`looks` tells how near gates come; 0: nobody looks.
        ``kernels``: whether decode steps go through those of ``cuda/``; None: on a CUDA device. They are compiled when the first
        module comes, for states of this ``dtype``; None: in the first step.
        """
        self._summed_columns = sys.maxsize if summed_columns is None and one_table else summed_columns
        self._device, self._one_table = torch.device(device), one_table
        self._kernels, self._dtype = kernels_of(self._device, kernels), dtype
        self._lock = threading.RLock()
        self._modules: dict[str, UnbindModule] = {}
        self._slots: dict[str, int] = {}
        self._starts: dict[str, int] = {}  # the first column of gates with running sums
        self._halves: dict[str, int] = {}  # the half column of those that go by kept states
        self._states: dict[int, int] = {}  # by layer, the first column of those
        self._tensors: dict[str, dict[str, Tensor]] = {}
        self._slot_names: list[str] = []
        self._columns: dict[int, Columns] = {}
        self._summed: Counter[int] = Counter()  # by layer, columns of running sums
        self._counters = Counters(self._device, 4 * requests)
        self._blocks = Blocks()
        self.version = 0  # another one whenever selections are made anew
        self._cache: OrderedDict[tuple[tuple[tuple[str, float], ...], ...], Selection | None] = OrderedDict()

    @classmethod
    def of(cls, modules: Iterable[UnbindModule], device: torch.device | str = "cpu") -> ModuleBank:
        """A bank that holds these modules. Raises ModelMismatch where they are not all of one model."""
        bank = cls(device)
        for module in modules:
            bank.add(module)
        return bank

    def add(self, module: UnbindModule) -> None:
        """Make a module available; one of the same name is replaced for selections made from now on. Raises ModelMismatch where the
        bank already holds modules of another model.
        """
        if self._kernels is not None and self._dtype is not None and module.heads is not None:
            self._kernels.prepare(module.w.shape[1], self._dtype, paged=self._one_table)
        with self._lock:
            if other := next((one for one in self._modules.values() if one.name != module.name), None):
                module.require(other.model)
            if (replaced := self._modules.get(module.name)) and replaced.digest == module.digest:
                return
            tensors = placed(module.tensors, self._device, self._kernels is not None)  # without room nothing changes
            if replaced:
                self.remove(module.name)
            self._modules[module.name] = module
            self._tensors[module.name] = tensors
            self._slots[module.name] = self._counters.new_slot()
            self._slot_names.append(module.name)
            if module.heads is not None:
                self._take_columns(module, len(module.heads) + 1)  # for each head's score, and for the gate's state
            self._changed()

    def remove(self, name: str) -> None:
        """Take a module out; selections in use keep it to their end. Raises UnknownModule."""
        with self._lock:
            module = self[name]
            del self._modules[name], self._slots[name], self._tensors[name]
            if module.heads is not None:
                columns = self._columns[self._home(module.layer)]
                columns.free(name)
                if self._starts.pop(name, None) is None:
                    del self._halves[name]
                    if not any(self._modules[other].layer == module.layer for other in self._halves):
                        columns.free(module.layer)
                        del self._states[module.layer]
                else:
                    self._summed[module.layer] -= len(module.heads) + 1
            self._changed()

    def _take_columns(self, module: UnbindModule, wanted: int) -> None:
        """A module keeps its kind of memory for as long as it is here, as sequences that run were begun with it."""
        columns = self._columns.setdefault(self._home(module.layer), Columns())
        size = module.w.shape[1]
        most = size if self._summed_columns is None else self._summed_columns
        if self._summed[module.layer] + wanted <= most or max(module.window, module.hold or 0) > LONGEST:
            self._summed[module.layer] += wanted
            self._starts[module.name] = columns.take(module.name, wanted)
            return
        if module.layer not in self._states:
            self._states[module.layer] = columns.take(module.layer, size)
        self._halves[module.name] = columns.take_half(module.name)

    def _column(self, name: str) -> int:
        """The first column of a module, or its half one; 0 where it has none."""
        return self._halves.get(name, self._starts.get(name, 0))

    def _home(self, layer: int) -> int:
        return 0 if self._one_table else layer

    @property
    def columns(self) -> dict[int, int]:
        """By layer, how many columns of a gate memory its modules use; for layers whose gates have one. Under 0 for all layers of
        one table.
        """
        with self._lock:
            return {layer: columns.width for layer, columns in self._columns.items() if columns.width}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the modules, sorted."""
        with self._lock:
            return tuple(sorted(self._modules))

    def __len__(self) -> int:
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

        Strength 0 measures without changing anything. None when no row asks for any module. Equal arguments give the same object
        until the bank changes. Raises UnknownModule, and UnbindError on a strength that is negative or not finite.
        """
        key = tuple(tuple(sorted(row.items())) for row in rows)
        if len(set(key)) == 1:  # one row for all, so that a batch may grow and shrink
            key, rows = key[:1], rows[:1]
        with self._lock:
            if key in self._cache:
                self._cache.move_to_end(key)
                return self._cache[key]
            with torch.inference_mode(False):  # a selection made in inference mode must serve outside it too
                self._cache[key] = selection = self._select(rows)
            if len(self._cache) > _CACHED_SELECTIONS:
                self._cache.popitem(last=False)
            return selection

    def counts(self) -> dict[str, dict[str, tuple[int, int]]]:
        """Name -> phase -> (positions evaluated, gates open) since the bank was made, for modules since removed too.

        This and :meth:`looks` alone wait for the device.
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

    @property
    def requests(self) -> Requests | None:
        """Tells requests apart, for a pass to say of which each state is; None where nobody looks."""
        return self._counters.requests

    def looks(self) -> dict[str, Look]:
        """Name -> how near its gate came and in how many requests it opened, as :meth:`counts`; waits for the device as well."""
        with self._lock:
            names = list(self._slot_names)
            looked = self._counters.looked()
        found: dict[str, Look] = {}
        for name, look in zip(names, looked, strict=False):
            found[name] = found.get(name, NOTHING_SEEN).and_of(look)
        return found

    def _select(self, rows: Sequence[Mapping[str, float]]) -> Selection | None:
        for row in rows:
            for name, value in row.items():
                self[name]
                if not math.isfinite(value) or value < 0:
                    raise UnbindError(f"strength of module '{name}' is {value}; it must be finite and not negative")
        used = sorted({name for row in rows for name in row})
        parts: dict[int, list[Part]] = {}
        for layer in sorted({self._modules[name].layer for name in used}):
            for kind, kept in ((kind, kept) for kind in DETECTORS for kept in (False, True)):
                modules = [
                    module
                    for module in map(self._modules.__getitem__, used)
                    if module.layer == layer and module.detector == kind and (module.name in self._halves) == kept
                ]
                # As gates with memory want them, and in the order of their columns, which is quicker to read.
                modules.sort(key=lambda module: (*windows_of(module), self._column(module.name)))
                if modules:
                    parts.setdefault(layer, []).append(self._part(layer, modules, rows))
        if not parts:
            return None
        selection = Selection(parts, len(rows), any(self._modules[name].heads is not None for name in used))
        self._counters.watch(selection, [part.tally for own in parts.values() for part in own])
        return selection

    def _part(self, layer: int, modules: Sequence[UnbindModule], rows: Sequence[Mapping[str, float]]) -> Part:
        """The part of a selection that modules of one kind at one layer make."""
        names = [module.name for module in modules]
        tensors = [self._tensors[name] for name in names]
        asked = [[name in row for name in names] for row in rows]
        strengths = [[float(row.get(name, 0.0)) for name in names] for row in rows]
        if all(one == asked[0] for one in asked) and all(one == strengths[0] for one in strengths):
            asked, strengths = asked[:1], strengths[:1]
        on, strength = (torch.tensor(table, device=self._device).unsqueeze(1) for table in (asked, strengths))
        gates: FisherGates | NetworkGates | KeptGates
        if modules[0].heads is None:
            gates = FisherGates(modules, tensors, on, self._device)
        else:
            networks, width = self._networks_of(modules), self._columns[self._home(layer)].width
            if names[0] in self._halves:
                halves = [self._halves[name] for name in names]
                gates = KeptGates(modules, networks, on, halves, self._states[layer], width, self._device)
            else:
                starts = [self._starts[name] for name in names]
                gates = NetworkGates(modules, networks, on, starts, width, self._device)
        kappa = torch.tensor([module.kappa for module in modules], device=self._device)
        slots = torch.tensor([self._slots[name] for name in names], device=self._device)
        return Part(names, gates, tensors, kappa, slots, strength, on, self.requests, self._kernels)

    def _networks_of(self, modules: Sequence[UnbindModule]) -> Networks:
        """Their networks in blocks, which selections share. A module is in the block of those with its window whose columns are
        near its own: one that comes or goes is the matter of one block, whatever number there are.
        """
        blocks = []
        for _, neighbours in groupby(modules, self._neighbourhood):
            some = list(neighbours)
            slots = tuple(self._slots[module.name] for module in some)
            blocks.append(self._blocks.of(slots, some, [self._tensors[module.name] for module in some]))
        return Networks(blocks)

    def _neighbourhood(self, module: UnbindModule) -> tuple[int, ...]:
        size = _BLOCK if module.name in self._halves else _BLOCK_COLUMNS
        return *windows_of(module), self._column(module.name) // size

    def _changed(self) -> None:
        """Selections are made anew from now on; of the same blocks, but for those where something came or went."""
        self._blocks.keep([block for made in self._cache.values() if made is not None for block in made.blocks])
        self._cache.clear()
        self.version += 1


def edit_of(module: UnbindModule, device: torch.device) -> tuple[ModuleBank, Selection]:
    """A bank with this module alone, and its selection for every row."""
    bank = ModuleBank.of([module], device)
    selection = bank.select([{module.name: 1.0}])
    assert selection is not None
    return bank, selection
