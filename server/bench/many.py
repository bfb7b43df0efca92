"""What many takedowns cost while text is made: decode steps under 64 and 1,000 networks against plain ones, in the same run.

Behind ``unbind bench filter``. Unlike random modules, these hardly ever open: what costs is to find that out. They are a fitted
module again and again, its hidden units in another order and its numbers disturbed, on the demo model's own rows; for another
model, random networks whose scores have the spread of a fitted one's on ordinary code.
"""

from __future__ import annotations

import copy
import json
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from server import demo
from server.bench.filter import NETWORK_HEADS, NETWORK_WIDTH, random_module
from unbind_core.applying.bank import ModuleBank
from unbind_core.applying.gate_memory import GateMemory, SlotPlaces
from unbind_core.applying.hooks import Intervention
from unbind_core.applying.networks import network_scores
from unbind_core.applying.passes import Pass
from unbind_core.applying.selection import Selection
from unbind_core.architecture import LoadedModel
from unbind_core.cpu.linears import packed_linears
from unbind_core.errors import UnbindError
from unbind_core.module import UnbindModule
from unbind_core.running.recording import recording

MANY = (64, 1000)
ROWS, CACHE, STEPS = 16, 256, 8
CHANGES = 5
DISTURBED = 0.1  # of each number's usual size
SPREAD = (
    0.6  # of the largest score at a position of ordinary code, in thresholds, whose median is 0; measured of demo-a
)
FITTED = Path(__file__).parents[2] / "modules" / "demo-a.safetensors"


def fitted_again(base: UnbindModule, number: int) -> UnbindModule:
    """A network module like ``base``: hidden units and heads in another order, every number disturbed; seeded by ``number``."""
    generator = torch.Generator().manual_seed(number)
    b, heads, heads_b = base.network
    units, order = (torch.randperm(len(part), generator=generator) for part in (b, heads))

    def disturbed(part: Tensor) -> Tensor:
        return part + DISTURBED * part.std() * torch.randn(part.shape, generator=generator)

    return replace(
        base,
        name=f"bench{number:04}",
        w=disturbed(base.w[units]),
        b=b[units].clone(),
        heads=disturbed(heads[order][:, units]),
        heads_b=heads_b[order].clone(),
    )


def fitted_often(loaded: LoadedModel, count: int) -> list[UnbindModule]:
    """So many network modules of this model, all different. Raises UnbindError where it is not the demo's."""
    base = UnbindModule.load(FITTED)
    if count and base.model != loaded.identity:
        raise UnbindError(
            f"--networks: they are made of a module of the demo model, not of '{loaded.identity.name}'; leave it out"
        )
    return [fitted_again(base, number) for number in range(count)]


def random_closed(loaded: LoadedModel, number: int, layer: int, states: Tensor) -> UnbindModule:
    """A random network with the thresholds that a fitted one would have on these ``states`` [N,d] of ordinary code."""
    one = random_module(loaded.identity, number, layer, "network network")
    largest = network_scores(states, one.w, *one.network).amax(-1)
    tau = float(largest.std()) / SPREAD
    return replace(one, s_ref=float(largest.median()), tau=tau, tau_close=tau / 2, window=8, first=4, least=4)


class _Decoding:
    """Rows of text, of which all but the last few tokens are in the cache."""

    def __init__(self, loaded: LoadedModel, layer: int) -> None:
        self.loaded = loaded
        self.device = next(loaded.model.parameters()).device
        self.ids = _ids(loaded).to(self.device)
        with recording(loaded.model, [layer]) as states:
            self._cache = loaded.model(self.ids[:, :CACHE], use_cache=True).past_key_values
        self.states = states[layer].flatten(0, 1).float()

    def prepare(self, intervention: Intervention, selection: Selection, memory: GateMemory) -> None:
        """Have the gates see the text in the cache."""
        with intervention.step(selection, self._pass(memory, 0, CACHE)):
            self.loaded.model(self.ids[:, :CACHE])

    def seconds(self, intervention: Intervention, selection: Selection | None, memory: GateMemory) -> float:
        """Of one decode step: the mean of a few."""
        cache = copy.deepcopy(self._cache)
        spent = 0.0
        for at in range(CACHE, CACHE + STEPS):
            pass_ = self._pass(memory, at, 1)
            self._wait()
            begun = perf_counter()
            with intervention.step(selection, pass_):
                self.loaded.model(self.ids[:, at : at + 1], past_key_values=cache, use_cache=True)
            self._wait()
            spent += perf_counter() - begun
        return spent / STEPS

    def _pass(self, memory: GateMemory, start: int, length: int) -> Pass:
        slots = torch.arange(ROWS, device=self.device)
        positions = (start + torch.arange(length, device=self.device)).expand(ROWS, -1)
        places = SlotPlaces(memory, slots, positions, torch.full_like(slots, start))
        return Pass(places=places, phase="decode" if length == 1 else "prefill")

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _selected(bank: ModuleBank) -> tuple[Selection, float]:
    """All of a bank for every row, and the milliseconds that making it took."""
    row = dict.fromkeys(bank.names, 1.0)
    begun = perf_counter()
    selection = bank.select([row])
    spent = 1e3 * (perf_counter() - begun)
    assert selection is not None
    return selection, spent


def _ids(loaded: LoadedModel) -> Tensor:
    """int64 [ROWS, CACHE + STEPS] of code that no module is about: shipped rows that chose nothing, one after another."""
    path = demo.ROWS / "retain_test.jsonl"
    texts = [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]
    ids: list[int] = []
    while len(ids) < ROWS * (CACHE + STEPS):
        ids += [token for text in texts for token in loaded.tokenizer(text, add_special_tokens=False).input_ids]
    return torch.tensor(ids[: ROWS * (CACHE + STEPS)]).view(ROWS, -1)


def many(loaded: LoadedModel, *, counts: Sequence[int] = MANY, repeats: int = 15) -> list[dict[str, Any]]:
    """By number of modules, all at one layer and asked for by every row: ``over_none``, a decode step (16 rows behind 256 tokens)
    under them over a plain one beside it, median of the repeats' ratios; ``step_ms``, the plain one; ``open_rate``;
    ``bytes_a_token``, what their gates keep of each position; ``kind``, what the modules are; ``first_ms`` and ``change_ms``, what
    making the selection takes at first and after one module more (median of five).
    """
    base = UnbindModule.load(FITTED)
    fits = base.model == loaded.identity
    layer = base.layer if fits else loaded.identity.num_layers - 1
    found = []
    with torch.inference_mode(), packed_linears(loaded.model), Intervention(loaded.model) as intervention:
        decoding = _Decoding(loaded, layer)
        for count in counts:
            with torch.inference_mode(False):
                sample = decoding.states[:: len(decoding.states) // 512].clone().cpu()
                made = [
                    fitted_again(base, n) if fits else random_closed(loaded, n, layer, sample)
                    for n in range(count + CHANGES)
                ]
                bank = ModuleBank.of(made[:count], decoding.device)
            selection, first_ms = _selected(bank)
            memory = GateMemory(ROWS, CACHE + STEPS, decoding.device)
            decoding.prepare(intervention, selection, memory)
            none, under = [], []
            for repeat in range(repeats + 1):  # the first warms up
                plain = decoding.seconds(intervention, None, memory)
                edited = decoding.seconds(intervention, selection, memory)
                if repeat:
                    none.append(plain)
                    under.append(edited)
            changes = []
            for more in made[count:]:
                bank.add(more)
                changes.append(_selected(bank)[1])
                bank.remove(more.name)
            tried, opened = (sum(phases["decode"][i] for phases in bank.counts().values()) for i in range(2))
            found.append(
                {
                    "modules": count,
                    "kind": f"network {NETWORK_WIDTH}x{NETWORK_HEADS} network, " + ("fitted" if fits else "random"),
                    "phase": "decode",
                    "over_none": statistics.median(b / a for a, b in zip(none, under, strict=True)),
                    "of_minima": min(under) / min(none),
                    "step_ms": 1e3 * statistics.median(none),
                    "open_rate": opened / tried,
                    "bytes_a_token": 4 * sum(bank.columns.values()),
                    "first_ms": first_ms,
                    "change_ms": statistics.median(changes),
                }
            )
    return found
