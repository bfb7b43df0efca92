"""Every answer ends, whatever becomes of the request: the engine's own side, with nothing behind it that computes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from server.engine.guarding import Guarding
from server.engine.refusals import EngineStopped
from server.engine.request import Delta, Flight, GenerationRequest, Sampling
from server.engine.vllm.engine import VllmEngine
from tests.engines.test_guards import guards


class Panic(BaseException):
    """As a library's Rust raises it."""


async def end(deltas: asyncio.Queue[Delta]) -> Delta:
    while (delta := await asyncio.wait_for(deltas.get(), 5)).finish_reason is None:
        pass
    return delta


def asked(tokens: int = 8, **others: Any) -> GenerationRequest:
    return GenerationRequest((5, 6, 7), Sampling(max_tokens=tokens), **others)


def ended(engine: VllmEngine) -> bool:
    return engine.drain(5) and not engine._tasks


def test_an_answer_whose_task_is_cancelled_before_it_begins_ends(
    hollow: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    admit = hollow._admit

    def at_once(flight: Flight) -> None:
        admit(flight)
        hollow._cancel(flight)

    async def work() -> Delta:
        return await end(hollow.submit(asked())[1])

    monkeypatch.setattr(hollow, "_admit", at_once)
    assert asyncio.run(work()).finish_reason == "cancelled"
    assert ended(hollow) and hollow.stats().cancelled == 1


def test_a_request_that_comes_as_the_processes_end_is_told_and_asks_for_nothing(
    hollow: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    admit = hollow._admit

    def late(flight: Flight) -> None:
        hollow._up = False  # since it was let in
        admit(flight)

    async def work() -> Delta:
        return await end(hollow.submit(asked())[1])

    monkeypatch.setattr(hollow, "_admit", late)
    delta = asyncio.run(work())
    assert (delta.finish_reason, "try again" in (delta.error or "")) == ("error", True)
    assert ended(hollow) and hollow._model.asked == 0  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", [ValueError, Panic])
def test_what_a_text_or_a_guard_raises_ends_that_answer_and_no_other(
    hollow: VllmEngine, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    def fails(*_: Any) -> None:
        raise kind("of the tests")

    async def work() -> tuple[Delta, Delta, Delta]:
        flight, deltas = hollow.submit(asked())
        flight.text.push = fails  # type: ignore[assignment, method-assign]
        guarded, others = hollow.submit(asked(guards=guards("steer")))
        assert guarded.guarding is not None
        monkeypatch.setattr(Guarding, "outcome", property(fails))
        _, whole = hollow.submit(asked())
        return await end(deltas), await end(others), await end(whole)

    one, other, whole = asyncio.run(work())
    for delta in (one, other):
        assert delta.finish_reason == "error" and kind.__name__ in (delta.error or "")
    assert whole.finish_reason == "length"
    assert ended(hollow)


def test_nobody_is_let_in_once_the_engine_drains(hollow: VllmEngine) -> None:
    assert hollow.drain(1)

    async def late() -> None:
        hollow.submit(asked())

    with pytest.raises(EngineStopped, match="shutting down"):
        asyncio.run(late())
