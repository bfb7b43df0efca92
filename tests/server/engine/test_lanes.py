"""Requests whose passes run side by side: neither sees anything of the other."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
import torch

from server.engine.embedded.engine import EmbeddedEngine
from server.engine.embedded.scheduler import Plan
from server.engine.request import Delta, GenerationRequest, Sampling
from tests.core.applying.test_hooks_gates import remembering_module
from tests.server.conftest import MakeModule
from tests.server.engine.test_engine import _plain
from unbind_core.applying.attach import attach
from unbind_core.applying.bank import ModuleBank
from unbind_core.architecture import LoadedModel

pytestmark = pytest.mark.usefixtures("two_lanes")
PROMPTS = [tuple(range(20 + i, 150 + i)) for i in range(6)]
NEW = 6


@pytest.fixture
def engine(loaded: LoadedModel, make_module: MakeModule) -> Iterator[EmbeddedEngine]:
    """Six prompts of 130 tokens go through it two at a time."""
    running = EmbeddedEngine(
        loaded.model, loaded.tokenizer, max_slots=6, max_length=160, chunk_tokens=256, least_pass=8
    )
    running.start()
    modules = [make_module("linear", layer=1), remembering_module(loaded, "network", 1, window=5)]
    running.sync_modules([(module, module.digest) for module in modules]).result(10)
    yield running
    running.close()


def _answers(engine: EmbeddedEngine, names: list[str]) -> list[list[Delta]]:
    async def one(prompt: tuple[int, ...]) -> list[Delta]:
        request = GenerationRequest(prompt, Sampling(max_tokens=NEW, ignore_eos=True), engine.modules.pin(names))
        return [delta async for delta in engine.generate(request)]

    async def together() -> list[list[Delta]]:
        return list(await asyncio.gather(*map(one, PROMPTS)))

    return asyncio.run(together())


def _watched(engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many passes run at the beginning of each prompt's pass, itself included."""
    running, seen, lock = 0, [], threading.Lock()
    forward = engine.runner.forward
    started = threading.Event()

    def watched(plan: Plan) -> torch.Tensor:
        nonlocal running
        if not plan.prefill:
            return forward(plan)
        with lock:
            running += 1
            seen.append(running)
            if running > 1:
                started.set()
        started.wait(0.2)  # a pass of a model so small is over before the other thread has begun its own
        logits = forward(plan)
        with lock:
            running -= 1
            started.clear()
        return logits

    monkeypatch.setattr(engine.runner, "forward", watched)
    return seen


@pytest.mark.parametrize("names", [[], ["linear", "network"]])
def test_prompts_computed_side_by_side_are_answered_and_counted_as_alone(
    engine: EmbeddedEngine, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, names: list[str]
) -> None:
    seen = _watched(engine, monkeypatch)
    answers = _answers(engine, names)
    assert 2 in seen
    bank = ModuleBank()
    for entry in engine.modules.pin(names).entries:
        bank.add(entry.module)
    counted = engine.gate_counts().result(10)
    engine.close()
    for prompt, deltas in zip(PROMPTS, answers, strict=True):
        with attach(loaded.model, bank, names):
            expected = _plain(loaded.model, prompt, NEW)
        assert [token for delta in deltas for token in delta.tokens] == expected
    alone = bank.counts()
    for name in names:
        assert counted[name]["prefill"] == alone[name]["prefill"]
        assert counted[name]["prefill"][0] == sum(map(len, PROMPTS))


def test_a_pass_that_fails_fails_nobody_beside_it(engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    _watched(engine, monkeypatch)
    forward = engine.runner.forward

    def broken(plan: Plan) -> torch.Tensor:
        logits = forward(plan)
        if any(chunk.flight.prompt == PROMPTS[1] for chunk in plan.prefill):
            raise RuntimeError("broken")
        return logits

    monkeypatch.setattr(engine.runner, "forward", broken)
    ends = [deltas[-1] for deltas in _answers(engine, [])]
    assert [delta.error is not None for delta in ends] == [i == 1 for i in range(len(PROMPTS))]
    assert [delta.finish_reason for delta in ends].count("length") == len(PROMPTS) - 1


def test_a_step_of_one_thread_is_nothing_to_another(engine: EmbeddedEngine) -> None:
    bank = ModuleBank()
    bank.add(next(iter(engine.modules.pin(["linear"]).entries)).module)
    selection = bank.select([{"linear": 1.0}])
    elsewhere: list[object] = []

    def look() -> None:
        elsewhere.append(engine.runner.intervention.current)

    with engine.runner.intervention.step(selection):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        assert engine.runner.intervention.current is not None
    assert elsewhere == [None]
