"""What vLLM is asked for is something that it takes, and what its first output tells is told of the request, not of a later leg."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from server.engine.guarding import Guarding
from server.engine.refusals import PromptTooLong
from server.engine.request import Delta, Flight, GenerationRequest, Sampling
from server.engine.vllm.asking import parameters
from server.engine.vllm.engine import VllmEngine
from tests.engines.test_guards import guards


def flying(hollow: VllmEngine, sampling: Sampling) -> Flight:
    async def work() -> Flight:
        return hollow.submit(GenerationRequest((5, 6, 7), sampling, guards=guards("steer")))[0]

    return asyncio.run(work())


@pytest.mark.parametrize(("done", "least"), [(0, 1), (4, 1), (5, 0)])
def test_an_answer_with_a_least_length_goes_on_where_a_token_is_barred(
    hollow: VllmEngine, done: int, least: int
) -> None:
    flight = flying(hollow, Sampling(max_tokens=8, min_tokens=5))
    asked = parameters(flight, "leg", "")
    assert (asked.max_tokens, asked.min_tokens) == (8, 5)
    assert flight.guarding is not None
    flight.output[:], flight.guarding.barred = [9] * done, [50]
    asked = parameters(flight, "leg", "")
    assert (asked.max_tokens, asked.min_tokens, asked._bad_words_token_ids) == (1, least, [[50]])


@pytest.mark.parametrize(("temperature", "told"), [(0.0, 0.0), (0.7, 0.7), (100.0, 2.0)])
def test_every_temperature_that_clients_may_send_is_one_that_vllm_takes(
    hollow: VllmEngine, temperature: float, told: float
) -> None:
    assert parameters(flying(hollow, Sampling(temperature=temperature)), "leg", "").temperature == told


def test_a_prompt_as_long_as_a_request_can_be_is_refused_even_where_no_token_is_wanted(hollow: VllmEngine) -> None:
    async def work(length: int) -> None:
        hollow.submit(GenerationRequest((5,) * length, Sampling(max_tokens=0)))

    asyncio.run(work(hollow.max_length - 1))
    told = "maximum context length is 512 tokens; the prompt of 512 tokens and the 1 that this engine always makes exceed it by 1; "
    with pytest.raises(PromptTooLong, match=told + "shorten the prompt$"):
        asyncio.run(work(hollow.max_length))


def test_tokens_taken_over_and_the_time_in_the_queue_are_those_of_the_first_leg(
    hollow: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    legs: list[int] = []

    async def generate(*_: Any) -> AsyncGenerator[Any, None]:
        legs.append(1)
        part = SimpleNamespace(token_ids=[50], logprobs=None)
        metrics = SimpleNamespace(scheduled_ts=float(len(legs)))
        yield SimpleNamespace(outputs=[part], num_cached_tokens=len(legs), metrics=metrics, prompt_logprobs=None)

    async def work() -> Flight:
        flight, deltas = hollow.submit(GenerationRequest((5, 6, 7), Sampling(max_tokens=1), guards=guards("steer")))
        last: Delta = await asyncio.wait_for(deltas.get(), 5)
        assert last.finish_reason == "length"
        return flight

    stands = iter((False, True))
    monkeypatch.setattr(Guarding, "lets", lambda *_: next(stands))
    monkeypatch.setattr(hollow._model, "generate", generate)
    flight = asyncio.run(work())
    assert (len(legs), flight.cached_tokens, flight.begun_at) == (2, 1, 1.0)
