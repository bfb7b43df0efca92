"""Random mixes: who else is in the batch, when they came and what they asked for changes no answer."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from server.engine.embedded.engine import EmbeddedEngine
from server.engine.embedded.memory import DoesNotFit, plan_memory
from server.engine.refusals import EngineStopped, QueueFull
from server.engine.request import Delta, GenerationRequest, Sampling
from tests.core.conftest import lowrank
from tests.server.conftest import MakeModule
from unbind_core.architecture import LoadedModel
from unbind_core.errors import UnknownModule
from unbind_core.module import UnbindModule

pytestmark = pytest.mark.usefixtures("two_lanes")
NAMES = ("one", "two", "three", "four")


def _modules(loaded: LoadedModel, make_module: MakeModule) -> list[UnbindModule]:
    """Pushes and low-rank corrections at three layers; one layer has both."""
    low = {"kappa": 0.3, **lowrank(loaded.identity.hidden_size)}
    return [make_module(name, layer=i % 3, seed=i, **(low if i % 2 else {})) for i, name in enumerate(NAMES)]


def _start(loaded: LoadedModel, make_module: MakeModule, **options: Any) -> EmbeddedEngine:
    engine = EmbeddedEngine(
        loaded.model,
        loaded.tokenizer,
        **{"max_slots": 6, "max_length": 200, "chunk_tokens": 40, "least_pass": 8, **options},
    )
    engine.start()
    modules = _modules(loaded, make_module)
    engine.sync_modules([(module, module.digest) for module in modules]).result(10)
    return engine


def _request(rng: random.Random, engine: EmbeddedEngine, prompts: Sequence[tuple[int, ...]]) -> GenerationRequest:
    """Prompts begin alike now and then, so that prefixes are found; every sampling parameter takes part."""
    base = rng.choice(prompts)
    prompt = base[: rng.randrange(1, len(base))] + tuple(rng.randrange(6, 300) for _ in range(rng.randrange(1, 30)))
    sampling = Sampling(max_tokens=rng.randrange(1, 25), ignore_eos=True, logprobs=0)
    if rng.random() < 0.4:
        sampling = Sampling(
            max_tokens=rng.randrange(1, 25),
            temperature=rng.choice([0.3, 1.0]),
            top_p=rng.choice([1.0, 0.9]),
            top_k=rng.choice([0, 20]),
            min_p=rng.choice([0.0, 0.05]),
            presence_penalty=rng.choice([0.0, 0.5]),
            repetition_penalty=rng.choice([1.0, 1.2]),
            logit_bias=rng.choice([(), {9: 2.0}]),
            seed=rng.randrange(100),
            ignore_eos=True,
            logprobs=0,
        )
    names = {name: rng.choice([0.0, 0.5, 1.0]) for name in rng.sample(NAMES, rng.randrange(4))}
    return GenerationRequest(prompt, sampling, engine.modules.pin(names))


async def _answer(
    engine: EmbeddedEngine, request: GenerationRequest, delay: float = 0.0
) -> tuple[list[int], list[float]]:
    await asyncio.sleep(delay)
    deltas = [delta async for delta in engine.generate(request)]
    assert deltas[-1].error is None
    tokens = [token for delta in deltas for token in delta.tokens]
    return tokens, [entry.logprob for delta in deltas for entry in delta.logprobs]


@pytest.mark.parametrize("seed", range(4))
def test_every_answer_of_a_mix_is_the_answer_alone(loaded: LoadedModel, make_module: MakeModule, seed: int) -> None:
    rng = random.Random(seed)
    prompts = [tuple(rng.randrange(6, 300) for _ in range(rng.randrange(5, 120))) for _ in range(5)]
    engine = _start(loaded, make_module)
    try:
        requests = [_request(rng, engine, prompts) for _ in range(32)]

        async def mixed() -> list[tuple[list[int], list[float]]]:
            arrivals = [rng.uniform(0, 0.3) for _ in requests]
            return await asyncio.gather(*(_answer(engine, r, at) for r, at in zip(requests, arrivals, strict=True)))

        together = asyncio.run(mixed())
    finally:
        engine.close()
    alone = _start(loaded, make_module, max_slots=1)
    try:
        for request, (tokens, logprobs) in zip(requests, together, strict=True):
            names = {e.module.name: f for e, f in zip(request.modules.entries, request.modules.factors, strict=True)}
            same = GenerationRequest(request.prompt, request.sampling, alone.modules.pin(names))
            expected, scores = asyncio.run(_answer(alone, same))
            assert tokens == expected
            assert logprobs == pytest.approx(scores, abs=1e-4)
    finally:
        alone.close()


def _soak(loaded: LoadedModel, make_module: MakeModule, count: int, seed: int = 0) -> None:
    """Requests come, are left half-way, and meet modules that come and go; nothing is left behind."""
    rng = random.Random(seed)
    prompts = [tuple(rng.randrange(6, 300) for _ in range(rng.randrange(5, 120))) for _ in range(8)]
    engine = _start(loaded, make_module, queue_limit=16)
    everything = _modules(loaded, make_module)
    finished = 0

    async def client() -> None:
        nonlocal finished
        patience = rng.choice([0, 1, 3, 1000, 1000])
        while True:
            try:
                stream = engine.generate(_request(rng, engine, prompts))
                async for delta in stream:
                    assert delta.error is None
                    patience -= 1
                    if patience <= 0:
                        break
                await stream.aclose()  # type: ignore[attr-defined]
                break
            except (QueueFull, UnknownModule):
                await asyncio.sleep(0.005)
        finished += 1

    async def modules() -> None:
        while finished < count:
            some = [module for module in everything if rng.random() < 0.9]
            await asyncio.wrap_future(engine.sync_modules([(module, module.digest) for module in some]))
            await asyncio.sleep(0.01)

    async def run() -> None:
        changing = asyncio.create_task(modules())
        room = asyncio.Semaphore(20)

        async def one() -> None:
            async with room:
                await client()

        await asyncio.gather(*(one() for _ in range(count)))
        await changing
        assert await asyncio.to_thread(engine.drain, 10)
        assert len(asyncio.all_tasks()) == 1

    try:
        asyncio.run(run())
        assert finished == count
        assert engine.stats().running == engine.stats().waiting == engine.stats().failures == 0
        assert engine.scheduler.slots == [None] * 6 and not engine._outbox
        engine.sync_modules([]).result(10)
        engine.call(engine.modules.collect).result(10)
        assert engine.modules.bank_names() == ()
    finally:
        engine.close()


def test_nothing_is_left_behind(loaded: LoadedModel, make_module: MakeModule) -> None:
    _soak(loaded, make_module, 80)


@pytest.mark.slow
def test_nothing_is_left_behind_by_over_a_thousand(loaded: LoadedModel, make_module: MakeModule) -> None:
    _soak(loaded, make_module, 1200, seed=1)


def test_draining_lets_running_requests_end_and_admits_no_other(engine: EmbeddedEngine) -> None:
    request = GenerationRequest((9,) * 20, Sampling(max_tokens=60, ignore_eos=True))

    async def run() -> list[Delta]:
        stream = engine.generate(request)
        deltas = [await anext(stream)]
        ended = asyncio.create_task(asyncio.to_thread(engine.drain, 10))
        deltas.append(await anext(stream))
        while not engine.draining:
            deltas.append(await anext(stream))
        with pytest.raises(EngineStopped):
            engine.submit(request)
        deltas += [delta async for delta in stream]
        assert await ended
        return deltas

    deltas = asyncio.run(run())
    assert deltas[-1].finish_reason == "length" and sum(len(delta.tokens) for delta in deltas) == 60


def test_draining_gives_up_at_its_timeout(engine: EmbeddedEngine) -> None:
    async def run() -> str | None:
        stream = engine.generate(GenerationRequest((9,) * 20, Sampling(max_tokens=200, ignore_eos=True)))
        await anext(stream)
        assert not await asyncio.to_thread(engine.drain, 0.0)
        await asyncio.to_thread(engine.close)
        return [delta async for delta in stream][-1].finish_reason

    assert asyncio.run(run()) == "error"


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no"), RuntimeError("can't allocate memory: you tried")])
def test_out_of_memory_fails_what_it_concerns_and_says_what_to_do(
    engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    forward = engine.runner.model.forward

    def hungry(input_ids: torch.Tensor, **options: Any) -> Any:
        if input_ids.shape[1] > 20:
            raise error
        return forward(input_ids=input_ids, **options)

    async def run() -> list[Delta]:
        stream = engine.generate(GenerationRequest((9, 8, 7), Sampling(max_tokens=150, ignore_eos=True)))
        deltas = [await anext(stream)]
        monkeypatch.setattr(engine.runner.model, "forward", hungry)
        long = GenerationRequest(tuple(range(20, 60)), Sampling(max_tokens=5))
        failed = [delta async for delta in engine.generate(long)][-1]
        assert failed.error is not None and "out of memory" in failed.error and "--max-slots" in failed.error
        return deltas + [delta async for delta in stream]

    assert sum(len(delta.tokens) for delta in asyncio.run(run())) == 150  # who was running did not notice


def test_slots_are_planned_from_the_free_memory(loaded: LoadedModel) -> None:
    position = 2 * 3 * 2 * 8 * 4  # keys and values, layers, heads, head size, float32
    plenty = plan_memory(loaded.model, free=10**9)
    assert (plenty.position_bytes, plenty.slots, plenty.length) == (position, 16, 512)
    assert plan_memory(loaded.model, length=100, free=2 * 5 * 100 * position).slots == 5
    assert "16 slots x 512 positions" in str(plenty)
    with pytest.raises(DoesNotFit, match="lower --max-slots or --max-model-len"):
        plan_memory(loaded.model, slots=100, length=512, free=10**6)
    with pytest.raises(DoesNotFit, match="the model has 512 positions"):
        plan_memory(loaded.model, length=513)
