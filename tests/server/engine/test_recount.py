"""What is counted of gates is true: a recount from captured states, by the formulas written out here, finds the same numbers."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from server.engine.embedded.engine import EmbeddedEngine
from server.engine.embedded.scheduler import Plan
from server.engine.request import Flight, GenerationRequest, Sampling
from tests.core.applying.test_hooks_gates import remembering_module
from tests.server.conftest import MakeModule
from tests.server.engine.test_engine import _collect, _prompts
from unbind_core.applying.looks import BOUNDARIES
from unbind_core.architecture import decoder_layers, load_model
from unbind_core.module import UnbindModule

pytestmark = pytest.mark.usefixtures("two_lanes")
SETS: tuple[dict[str, float], ...] = ({"paper": 1.0}, {"paper": 1.0, "net": 1.0}, {"net": 0.0}, {}, {"net": 2.0})
GRAIN = 1 / 1024  # what scores of networks are rounded to


@dataclass
class Captured:
    """States of each layer as its edit met them, and of which requests' positions they are, in the order of passes."""

    passes: list[tuple[list[tuple[Flight, int, int, int, str]], dict[int, Tensor]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._here = threading.local()  # passes run side by side on several threads

    def watch(self, engine: EmbeddedEngine) -> None:
        forward = engine.runner.forward

        def spied(plan: Plan) -> Tensor:
            self._here.states = {}
            parts = [(chunk.flight, chunk.flight.slot, chunk.start, chunk.count, "prefill") for chunk in plan.prefill]
            parts += [(flight, flight.slot, flight.computed, 1, "decode") for flight in plan.decode]
            logits = forward(plan)
            self.passes.append((parts, self._here.states))
            return logits

        engine.runner.forward = spied  # type: ignore[method-assign]
        for index, layer in enumerate(decoder_layers(engine.runner.model)):
            layer.register_forward_hook(self._hook(index), prepend=True)

    def _hook(self, index: int) -> Any:
        def hook(_module: Any, _args: Any, output: Any) -> None:
            states = output[0] if isinstance(output, tuple) else output
            self._here.states[index] = states.detach().double().flatten(0, 1).clone()

        return hook


@dataclass
class Recount:
    """Of one module."""

    counts: dict[str, list[int]] = field(default_factory=lambda: {"prefill": [0, 0], "decode": [0, 0]})
    scores: list[float] = field(default_factory=list)
    requests: set[int] = field(default_factory=set)


def recounted(captured: Captured, module: UnbindModule) -> Recount:
    """Position by position, in double precision: Section 4.1's gate, or a network's mean over its window with two thresholds."""
    found = Recount()
    z: dict[int, dict[int, Tensor]] = defaultdict(dict)  # by slot and position, of all heads
    was_open: dict[int, dict[int, bool]] = defaultdict(dict)
    for parts, states in captured.passes:
        behind = 0
        for flight, slot, start, count, phase in parts:
            own = slice(behind, behind := behind + count)
            named = {entry.module.name for entry in flight.request.modules.entries}
            if module.name not in named:
                continue
            for position, h in enumerate(states[module.layer][own], start):
                if module.heads is None:
                    score = float((h @ module.w.double() - module.s_ref) / module.tau)
                    is_open = score >= 1
                else:
                    hidden = torch.relu(module.w.double() @ h + module.b.double())
                    f = module.heads.double() @ hidden + module.heads_b.double()
                    raw = ((f - module.s_ref) / module.tau).clamp(-2, 2)
                    z[slot][position] = (raw / GRAIN).round()
                    window = [z[slot][p] for p in range(max(0, position - module.window + 1), position + 1)]
                    score = float(torch.stack(window).sum(0).max()) * GRAIN / len(window)
                    close = (module.tau_close or module.tau) / module.tau
                    is_open = score >= 1 or (was_open[slot].get(position - 1, False) and score >= close)
                    was_open[slot][position] = is_open
                if flight.request.sampling.warms_up:
                    continue
                found.counts[phase][0] += 1
                found.counts[phase][1] += is_open
                found.scores.append(score)
                if is_open:
                    found.requests.add(id(flight))
    return found


@pytest.fixture(params=["sums", "kept"])
def world(
    request: pytest.FixtureRequest, checkpoint: Path, make_module: MakeModule
) -> Iterator[tuple[EmbeddedEngine, list[UnbindModule], Captured, bool]]:
    loaded = load_model(checkpoint)
    engine = EmbeddedEngine(
        loaded.model, loaded.tokenizer, max_slots=4, max_length=128, queue_limit=32, chunk_tokens=24
    )
    if request.param == "kept":
        engine.runner.bank._summed_columns = 0  # gates of networks go by states that are kept
    modules = [make_module("paper"), remembering_module(loaded, "net", 0, window=5)]
    captured = Captured()
    engine.start()
    engine.sync_modules([(module, module.digest) for module in modules]).result(10)
    captured.watch(engine)
    yield engine, modules, captured, request.param == "kept"
    engine.close()


def test_counts_scores_and_requests_equal_a_recount_from_captured_states(
    world: tuple[EmbeddedEngine, list[UnbindModule], Captured, bool],
) -> None:
    engine, modules, captured, kept = world

    async def all_at_once(prompts: list[tuple[int, ...]], new: int) -> None:
        requests = [
            GenerationRequest(tuple(prompt), Sampling(max_tokens=new, ignore_eos=True), engine.modules.pin(SETS[i % 5]))
            for i, prompt in enumerate(prompts)
        ]
        await asyncio.gather(*(_collect(engine, one) for one in requests))

    first = [tuple(prompt) for prompt in _prompts(10)]
    asyncio.run(all_at_once(first, 9))
    asyncio.run(all_at_once([(*prompt, 7, 8, 9) for prompt in first[-5:]], 5))  # prefixes
    asyncio.run(all_at_once(first[:2], 0))  # warms up: computed, and not counted
    gates = engine.gates().result(10)
    assert any(start > 0 and flight.cached_tokens for parts, _ in captured.passes for flight, _, start, *_ in parts), (
        "no prefix was used again"
    )
    assert any(len({flight.request.modules.identity for flight, *_ in parts}) > 1 for parts, _ in captured.passes)
    assert any(len({phase for *_, phase in parts}) > 1 for parts, _ in captured.passes), "no pass had both"
    for module in modules:
        expected, look = recounted(captured, module), gates.looks[module.name]
        assert {phase: list(both) for phase, both in gates.counts[module.name].items()} == expected.counts
        assert all(0 < opened < evaluated for evaluated, opened in expected.counts.values())
        assert look.requests == len(expected.requests) > 1
        assert look.positions == len(expected.scores)
        if kept and module.heads is not None:
            continue  # behind gates that are closed for certain no score is worked out
        for bound, count in zip(BOUNDARIES, look.below, strict=True):
            near = 2 * GRAIN if module.heads is not None else 1e-4  # the last bit of a product may move a score
            least, most = (sum(score < bound + side * near for score in expected.scores) for side in (-1, 1))
            assert least <= count <= most and most - least <= 3, (module.name, bound)
