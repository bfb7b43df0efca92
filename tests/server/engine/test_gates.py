"""The engine under gates that remember: a request gets in any company and any chunks what it gets alone."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from server.engine.embedded.engine import EmbeddedEngine
from server.engine.embedded.kept import NOTHING_KEPT
from server.engine.request import GenerationRequest, Sampling
from tests.core.applying.test_hooks_gates import remembering_module
from tests.core.conftest import lowrank
from tests.server.conftest import MakeModule
from tests.server.engine.test_engine import _collect, _plain, _prompts, _tokens
from unbind_core.applying.attach import attach
from unbind_core.applying.bank import ModuleBank
from unbind_core.architecture import LoadedModel, load_model
from unbind_core.errors import ModelMismatch, UnbindError
from unbind_core.module import UnbindModule

pytestmark = pytest.mark.usefixtures("two_lanes")
SETS: tuple[tuple[str, ...], ...] = ((), ("n",), ("m",), ("m", "n"))
NEW = 20


@pytest.fixture(scope="module", params=["push", "lowrank"])
def modules(request: pytest.FixtureRequest, loaded: LoadedModel) -> list[UnbindModule]:
    """Two layers, windows of 5 and 3."""
    low = {"kappa": 0.3, **lowrank(loaded.identity.hidden_size)} if request.param == "lowrank" else {}
    first = remembering_module(loaded, "n", 0, window=5, **low)
    return [first, remembering_module(loaded, "m", 1, seed=1, window=3, heads=1, **low)]


@pytest.fixture(scope="module")
def expected(loaded: LoadedModel, modules: list[UnbindModule]) -> list[list[int]]:
    """Ten prompts under four sets of modules, one by one with plain ``generate``."""
    bank = ModuleBank()
    for module in modules:
        bank.add(module)
    found = []
    for i, prompt in enumerate(_prompts(10)):
        with attach(loaded.model, bank, list(SETS[i % 4])):
            found.append(_plain(loaded.model, prompt, NEW))
    return found


@pytest.fixture(params=[7, 64])
def engine(request: pytest.FixtureRequest, checkpoint: Path, modules: list[UnbindModule]) -> Iterator[EmbeddedEngine]:
    """Four slots; prompts of up to 70 tokens in chunks of a few tokens, or in one or two."""
    fresh = load_model(checkpoint)
    running = EmbeddedEngine(
        fresh.model,
        fresh.tokenizer,
        max_slots=4,
        max_length=128,
        queue_limit=16,
        chunk_tokens=request.param,
        least_pass=8,
    )
    running.start()
    running.sync_modules([(module, module.digest) for module in modules]).result(10)
    yield running
    running.close()


def _run(engine: EmbeddedEngine, numbers: list[int]) -> list[list[int]]:
    async def all_at_once() -> list[list[int]]:
        prompts = _prompts(10)
        requests = [
            GenerationRequest(prompts[i], Sampling(max_tokens=NEW), engine.modules.pin(SETS[i % 4])) for i in numbers
        ]
        return [_tokens(deltas) for deltas in await asyncio.gather(*(_collect(engine, r) for r in requests))]

    return asyncio.run(all_at_once())


def test_requests_in_mixed_batches_and_chunks_equal_the_same_request_alone(
    engine: EmbeddedEngine, loaded: LoadedModel, expected: list[list[int]]
) -> None:
    assert _run(engine, list(range(10))) == expected  # ten requests share four slots, so every slot is used again
    assert _run(engine, [5]) == [expected[5]]
    assert _run(engine, [3, 2, 1, 0, 7, 6]) == [expected[i] for i in (3, 2, 1, 0, 7, 6)]
    plain = [_plain(loaded.model, prompt, NEW) for prompt in _prompts(10)]
    assert sum(a != b for a, b in zip(plain, expected, strict=True)) >= 4  # the modules do something
    counts = engine.gate_counts().result(10)
    for name in "nm":
        evaluated, opened = (sum(phase[i] for phase in counts[name].values()) for i in (0, 1))
        assert 0 < opened < evaluated


def test_a_new_version_of_a_module_leaves_running_requests_their_gates(
    engine: EmbeddedEngine, loaded: LoadedModel, modules: list[UnbindModule], expected: list[list[int]]
) -> None:
    """The new one has other columns, in a table that grows while the old ones are in use."""
    other = remembering_module(loaded, "n", 0, seed=4, window=9, heads=5)
    prompt = _prompts(10)[1]

    async def swap_midway() -> tuple[list[int], list[int]]:
        tokens: list[int] = []
        newer: Any = None
        request = GenerationRequest(prompt, Sampling(max_tokens=NEW), engine.modules.pin(["n"]))
        async for delta in engine.generate(request):
            if len(tokens) >= 4 and newer is None:
                await asyncio.wrap_future(engine.sync_modules([(m, m.digest) for m in (other, modules[1])]))
                fresh = GenerationRequest(prompt, Sampling(max_tokens=NEW), engine.modules.pin(["n"]))
                newer = asyncio.create_task(_collect(engine, fresh))
            tokens += delta.tokens
        return tokens, _tokens(await newer)

    bank = ModuleBank()
    bank.add(other)
    with attach(loaded.model, bank):
        by_newer = _plain(loaded.model, prompt, NEW)
    assert asyncio.run(swap_midway()) == (expected[1], by_newer)


def test_a_module_calibrated_in_other_numerics_is_not_loaded(
    engine: EmbeddedEngine, modules: list[UnbindModule], make_module: MakeModule
) -> None:
    other = make_module("other", calibrated={"dtype": "bfloat16", "quantisation": None})
    with pytest.raises(
        ModelMismatch, match="calibrated in bfloat16, and the model runs in float32; run the model with --dtype"
    ):
        engine.sync_modules([(module, module.digest) for module in (*modules, other)]).result(10)
    assert sorted(engine.modules.current) == ["m", "n"]
    described = engine.modules.describe("n")
    assert (described["correction"], described["rank"]) == (modules[0].correction, modules[0].rank)
    assert described["calibrated"] == {"dtype": "float32", "quantisation": None}


def test_memory_is_there_for_what_is_loaded_before_it_can_be_named(
    engine: EmbeddedEngine, loaded: LoadedModel, modules: list[UnbindModule], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = engine.runner.gate_memory
    assert memory.bytes_allocated() == 4 * 130 * (4 + 2) * 4  # slots, positions between two more, columns, int32
    monkeypatch.setattr("unbind_core.applying.gate_memory.free_bytes", lambda _: 4 * 130 * 2 * 4)
    larger = remembering_module(loaded, "larger", 0, seed=5, heads=3)
    with pytest.raises(UnbindError, match="load fewer modules, or serve with fewer --max-slots"):
        engine.sync_modules([(module, module.digest) for module in (*modules, larger)]).result(10)
    assert set(engine.modules.current) == {"n", "m"} and len(engine.modules.bank_names()) == 2
    assert memory.bytes_allocated() == 4 * 130 * (4 + 2) * 4
    assert engine.runner.bank.columns == {0: 4, 1: 2}  # else a table would grow under a pass


def test_an_engine_without_such_modules_keeps_no_memory(loaded: LoadedModel, make_module: MakeModule) -> None:
    engine = EmbeddedEngine(loaded.model, loaded.tokenizer, max_slots=2, max_length=64)
    try:
        engine.modules.sync([(module, module.digest) for module in [make_module("linear")]])
        assert engine.runner.gate_memory.bytes_allocated() == 0
    finally:
        engine.close()


def test_a_failed_step_leaves_nothing_in_the_slot(engine: EmbeddedEngine, expected: list[list[int]]) -> None:
    layer = engine.runner.model.model.layers[0]
    handle = layer.register_forward_pre_hook(lambda _module, args: (args[0] * float("nan"), *args[1:]))
    assert _run(engine, [1, 2, 3]) != [expected[i] for i in (1, 2, 3)]
    handle.remove()
    assert all(not table.any() for table in engine.runner.gate_memory._tables.values())
    assert _run(engine, [1, 2, 3, 5]) == [expected[i] for i in (1, 2, 3, 5)]


def test_a_prefix_that_is_copied_brings_its_gates_along(engine: EmbeddedEngine) -> None:
    pinned, opened = engine.modules.pin(["m", "n"]), 0

    async def ask(prompt: tuple[int, ...]) -> tuple[int, list[int], list[Any]]:
        asked = GenerationRequest(prompt, Sampling(max_tokens=4, ignore_eos=True), pinned, report=True)
        flight, queue = engine.submit(asked)
        deltas = [await queue.get()]
        while deltas[-1].finish_reason is None:
            deltas.append(await queue.get())
        return flight.cached_tokens, _tokens(deltas), [gates for delta in deltas for gates in delta.activations]

    for seed in range(8):
        one = tuple(random.Random(seed).choices(range(6, 300), k=100))
        engine.scheduler.kept = [NOTHING_KEPT] * 4
        cached, *whole = asyncio.run(ask((*one[:40], 6)))
        engine.scheduler.kept = [NOTHING_KEPT] * 4
        asyncio.run(ask(one))
        copied, *again = asyncio.run(ask((*one[:40], 6)))
        assert (cached, copied) == (0, 40) and again == whole
        assert [len(kept.tokens) for kept in engine.scheduler.kept] == [103, 44, 0, 0]
        opened += any(any(gates.values()) for gates in whole[1])
    assert opened
