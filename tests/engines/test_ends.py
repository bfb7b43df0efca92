"""Every answer ends, whatever becomes of the request: the engine's own side, with nothing behind it that computes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from server import demo
from server.engine.engine import EngineStopped
from server.engine.guarding import Guarding
from server.engine.request import Delta, Flight, GenerationRequest, Sampling
from server.engine.vllm.arguments import Arguments
from server.engine.vllm.engine import VllmEngine
from server.engine.vllm.gates import GateReports
from tests.engines.test_guards import guards
from unbind_core.identity import ModelIdentity


class Panic(BaseException):
    """As a library's Rust raises it."""


class Computing:
    """Gives a token every hundredth of a second."""

    preemptions = steps = 0
    kv_usage = None

    def __init__(self, reports: GateReports) -> None:
        self.reports, self.asked = reports, 0

    async def generate(self, prompt: Any, parameters: Any, name: str) -> AsyncGenerator[Any, None]:
        self.asked += 1
        while True:
            await asyncio.sleep(0.01)
            part = SimpleNamespace(token_ids=[50], logprobs=None)
            yield SimpleNamespace(outputs=[part], num_cached_tokens=0, metrics=None, prompt_logprobs=None)


@pytest.fixture
def engine() -> Iterator[VllmEngine]:
    tokenizer, identity = AutoTokenizer.from_pretrained(demo.BASE), ModelIdentity("f" * 64, "", 6, 8, 8192)
    made = VllmEngine(Arguments("", "float32", 512, 2, 64, "cpu"), tokenizer, identity, {}, 8192, 4)
    made._thread.start()

    async def up() -> None:
        made._model, made._up = Computing(GateReports()), True  # type: ignore[assignment]

    made._await(up())
    yield made

    async def down() -> None:
        await made._model.reports.close()  # type: ignore[union-attr]
        made._model = None

    made._await(down())
    made.close()


async def end(deltas: asyncio.Queue[Delta]) -> Delta:
    while (delta := await asyncio.wait_for(deltas.get(), 5)).finish_reason is None:
        pass
    return delta


def asked(tokens: int = 8, **others: Any) -> GenerationRequest:
    return GenerationRequest((5, 6, 7), Sampling(max_tokens=tokens), **others)


def ended(engine: VllmEngine) -> bool:
    return engine.drain(5) and not engine._tasks


def test_an_answer_whose_task_is_cancelled_before_it_begins_ends(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    admit = engine._admit

    def at_once(flight: Flight) -> None:
        admit(flight)
        engine._cancel(flight)

    async def work() -> Delta:
        return await end(engine.submit(asked())[1])

    monkeypatch.setattr(engine, "_admit", at_once)
    assert asyncio.run(work()).finish_reason == "cancelled"
    assert ended(engine) and engine.stats().cancelled == 1


def test_a_request_that_comes_as_the_processes_end_is_told_and_asks_for_nothing(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    admit = engine._admit

    def late(flight: Flight) -> None:
        engine._up = False  # since it was let in
        admit(flight)

    async def work() -> Delta:
        return await end(engine.submit(asked())[1])

    monkeypatch.setattr(engine, "_admit", late)
    delta = asyncio.run(work())
    assert (delta.finish_reason, "try again" in (delta.error or "")) == ("error", True)
    assert ended(engine) and engine._model.asked == 0  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", [ValueError, Panic])
def test_what_a_text_or_a_guard_raises_ends_that_answer_and_no_other(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    def fails(*_: Any) -> None:
        raise kind("of the tests")

    async def work() -> tuple[Delta, Delta, Delta]:
        flight, deltas = engine.submit(asked())
        flight.text.push = fails  # type: ignore[assignment, method-assign]
        guarded, others = engine.submit(asked(guards=guards("steer")))
        assert guarded.guarding is not None
        monkeypatch.setattr(Guarding, "outcome", property(fails))
        _, whole = engine.submit(asked())
        return await end(deltas), await end(others), await end(whole)

    one, other, whole = asyncio.run(work())
    for delta in (one, other):
        assert delta.finish_reason == "error" and kind.__name__ in (delta.error or "")
    assert whole.finish_reason == "length"
    assert ended(engine)


def test_nobody_is_let_in_once_the_engine_drains(engine: VllmEngine) -> None:
    assert engine.drain(1)

    async def late() -> None:
        engine.submit(asked())

    with pytest.raises(EngineStopped, match="shutting down"):
        asyncio.run(late())
