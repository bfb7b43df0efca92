"""What modules cost at inference: the bank's edits against a plain forward pass, measured in the same run.

Behind ``unbind bench filter``. Modules are random, which costs the same as fitted ones or more: the arithmetic is dense,
and ``open_rate`` says how often their gates are open; on a CPU a learned correction costs nothing in a pass where none is.
"""

from __future__ import annotations

import copy
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from unbind_core.applying.bank import ModuleBank
from unbind_core.applying.gate_memory import GateMemory, SlotPlaces
from unbind_core.applying.hooks import Intervention
from unbind_core.applying.passes import Pass
from unbind_core.applying.selection import Selection
from unbind_core.architecture import LoadedModel
from unbind_core.errors import UnbindError
from unbind_core.identity import ModelIdentity
from unbind_core.module import UnbindModule
from unbind_core.module_file import FLOAT32

MODULES = (1, 8, 64, 512)
NETWORKS = (1, 8, 64)
KINDS = ("fisher", "network", "network network")  # detectors, and where it is no push the correction
NETWORK_WIDTH, NETWORK_HEADS, NETWORK_WINDOW = 128, 24, 32  # as fitted for 24 rows of the demo
HOLD = 64  # positions by which such gates are held open
UNITS = 512  # of a correction, as fitted
DECODE_ROWS, DECODE_CACHE = 16, 256
PREFILL_TOKENS = 512


def random_module(
    identity: ModelIdentity, number: int, layer: int, kind: str = "fisher", running: Mapping[str, Any] = FLOAT32
) -> UnbindModule:
    """A module of random directions; its numbers are seeded by ``number``. ``kind`` of ``KINDS``, both parts of the
    usual size. ``running``: the numerics that the model runs in.
    """
    detector, _, correction = kind.partition(" ")
    generator = torch.Generator().manual_seed(number)
    w, v = (torch.nn.functional.normalize(torch.randn(2, identity.hidden_size, generator=generator))).unbind()
    tensors: dict[str, Any] = {"w": w.clone(), "v": v.clone()}
    if detector == "network":
        tensors |= {
            "w": torch.randn(NETWORK_WIDTH, identity.hidden_size, generator=generator) / identity.hidden_size**0.5,
            "b": torch.zeros(NETWORK_WIDTH),
            "heads": torch.randn(NETWORK_HEADS, NETWORK_WIDTH, generator=generator) / NETWORK_WIDTH**0.5,
            "heads_b": torch.zeros(NETWORK_HEADS),
        }
    if correction == "network":  # small, as such a correction takes the place of the state's own way
        tensors |= {
            "v": None,
            "u": (torch.randn(identity.hidden_size, UNITS, generator=generator) / 1000).bfloat16(),
            "a": (torch.randn(UNITS, identity.hidden_size, generator=generator) / identity.hidden_size**0.5).bfloat16(),
            "c": v.clone(),
            "e": torch.zeros(UNITS),
        }
    return UnbindModule(
        name=f"bench{number:04}",
        layer=layer,
        detector=detector,
        correction=correction or "push",
        calibrated=running,
        window=NETWORK_WINDOW if detector == "network" else 1,
        tau_close=0.25 if detector == "network" else None,
        hold=HOLD if detector == "network" else None,
        **tensors,
        s_ref=0.0,
        tau=0.5,
        kappa=1.0,
        quantile=None,
        model=identity,
        forms=("plain",),
        partitions={},
        budgets={},
        measured={},
        forget_digest="",
        created_at="",
        versions={},
        settings={"random": True},
    )


def make_bank(
    identity: ModelIdentity, count: int, placement: str, device: torch.device, kind: str = "fisher"
) -> ModuleBank:
    """``count`` random modules of a kind, all at the middle layer ("one layer") or dealt out over all of them ("spread")."""
    layers = [n % identity.num_layers if placement == "spread" else identity.num_layers // 2 for n in range(count)]
    return ModuleBank.of((random_module(identity, n, layer, kind) for n, layer in enumerate(layers)), device)


class _Phase:
    """One shape of forward pass, ready to be timed with and without a selection."""

    def __init__(self, loaded: LoadedModel, phase: str) -> None:
        self.name = phase
        self._model = loaded.model
        self.device = next(loaded.model.parameters()).device
        self._dtype = next(loaded.model.parameters()).dtype
        self.batch, self.length = (DECODE_ROWS, 1) if phase == "decode" else (1, PREFILL_TOKENS)
        generator = torch.Generator().manual_seed(0)
        past = DECODE_CACHE if phase == "decode" else 0
        ids = torch.randint(5, len(loaded.tokenizer), (self.batch, past + self.length), generator=generator)
        ids = ids.to(self.device)
        self._ids = ids[:, past:]
        self._cache = self._model(ids[:, :past], use_cache=True).past_key_values if past else None
        self._states = torch.randn(
            self.batch, self.length, loaded.identity.hidden_size, generator=generator, dtype=torch.float32
        ).to(self.device, self._dtype)

        # Gates with memory find what they have kept of the positions before, as in an engine.
        memory = GateMemory(self.batch, past + self.length, self.device)
        self._pass = self._places(memory, past, self.length)
        self._before = self._places(memory, 0, past) if past else None
        self._past = torch.randn(self.batch, past, loaded.identity.hidden_size, generator=generator).to(self._states)

    def _places(self, memory: GateMemory, start: int, length: int) -> Pass:
        slots = torch.arange(self.batch, device=self.device)
        positions = (start + torch.arange(length, device=self.device)).expand(self.batch, -1)
        return Pass(places=SlotPlaces(memory, slots, positions, torch.full_like(slots, start)), phase=self.name)

    def remember(self, selection: Selection) -> None:
        """Have gates with memory see the positions before those that are timed: on random states most of them are open by then."""
        if self._before is not None and selection.remembers:
            for layer in sorted(selection.layers):
                selection.edit(layer, self._past, self._before)

    def seconds(self, work: Callable[[], object]) -> float:
        """Wall-clock time of ``work``, the device's own work included."""
        self._wait()
        begun = time.perf_counter()
        work()
        self._wait()
        return time.perf_counter() - begun

    def forward_seconds(self, intervention: Intervention, selection: Selection | None) -> float:
        """Time of one forward pass; a decode step works on its own copy of the cache."""
        cache = copy.deepcopy(self._cache)
        with intervention.step(selection, self._pass):
            return self.seconds(lambda: self._model(self._ids, past_key_values=cache, use_cache=cache is not None))

    def edit_seconds(self, selection: Selection) -> float:
        """Time of the edits alone, at every layer of the selection."""

        def edits() -> Tensor:
            states = self._states
            for layer in sorted(selection.layers):
                states = selection.edit(layer, states, self._pass).states
            return states

        return self.seconds(edits)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def measure(
    phase: _Phase, intervention: Intervention, bank: ModuleBank, rows: Sequence[Mapping[str, float]], repeats: int
) -> dict[str, float]:
    """Medians over interleaved repeats, and ``open_rate``, at what share of the positions gates were open.

    ``share``: time of the edits over time of the plain pass. ``end_to_end``: time of a pass with hooks and edits over
    the plain pass beside it, less one; a small difference of large numbers, less exact. ``forward_ms``: the plain pass.
    """
    selection = bank.select(rows)
    if selection is None:
        raise UnbindError("rows: no row asks for a module; give at least one name")
    phase.remember(selection)
    seen = _counted(bank, phase)
    for _ in range(2):
        phase.forward_seconds(intervention, None)
        phase.forward_seconds(intervention, selection)
        phase.edit_seconds(selection)
    plain, edited, edits = [], [], []
    for _ in range(repeats):
        plain.append(phase.forward_seconds(intervention, None))
        edits.append(phase.edit_seconds(selection))
        edited.append(phase.forward_seconds(intervention, selection))
    pairs = [after / before - 1 for before, after in zip(plain, edited, strict=True)]
    evaluated, opened = (after - before for before, after in zip(seen, _counted(bank, phase), strict=True))
    return {
        "open_rate": opened / evaluated,
        "share": statistics.median(edits) / statistics.median(plain),
        "end_to_end": statistics.median(pairs),
        "forward_ms": 1e3 * statistics.median(plain),
    }


def _counted(bank: ModuleBank, phase: _Phase) -> tuple[int, int]:
    """Positions evaluated and gates open so far, over all modules."""
    counts = [phases[phase.name] for phases in bank.counts().values()]
    return sum(evaluated for evaluated, _ in counts), sum(opened for _, opened in counts)


def run(loaded: LoadedModel, *, counts: Sequence[int] = MODULES, repeats: int = 15) -> dict[str, Any]:
    """Cost of the bank by number of modules, placement, phase and kind (``KINDS``: detector, and correction where it is no push).

    Decode is a step of 16 rows x 1 token on a cache of 256 tokens, prefill one row of 512 tokens. ``cost``: every row
    uses every module. ``cost_one_module_a_row``: decode where the bank holds as many modules, but each row uses one.
    """
    cost: list[dict[str, Any]] = []
    apart: list[dict[str, Any]] = []
    with torch.inference_mode(), Intervention(loaded.model) as intervention:
        for phase in (_Phase(loaded, "decode"), _Phase(loaded, "prefill")):
            for placement, kind in itertools.product(("one layer", "spread"), KINDS):
                for count in counts if kind == "fisher" else [count for count in counts if count <= max(NETWORKS)]:
                    bank = make_bank(loaded.identity, count, placement, phase.device, kind)
                    where = {"modules": count, "placement": placement, "phase": phase.name, "kind": kind}
                    everything = dict.fromkeys(bank.names, 1.0)
                    cost.append(where | measure(phase, intervention, bank, [everything], repeats))
                    if phase.name == "decode":
                        rows = [{bank.names[i * max(1, count // DECODE_ROWS) % count]: 1.0} for i in range(DECODE_ROWS)]
                        apart.append(where | measure(phase, intervention, bank, rows, repeats))
    parameters = sum(value.numel() for value in loaded.model.parameters())
    return {
        "cost": cost,
        "cost_one_module_a_row": apart,
        "model": {
            "name": loaded.identity.name,
            "parameters": parameters,
            "hidden_size": loaded.identity.hidden_size,
            "layers": loaded.identity.num_layers,
            "dtype": str(next(loaded.model.parameters()).dtype).removeprefix("torch."),
        },
        "device": str(next(loaded.model.parameters()).device),
        "threads": torch.get_num_threads(),
    }
