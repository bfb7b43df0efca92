"""Prefix reuse: a slot's keys and values serve the next request under the same modules, and no other."""

from __future__ import annotations

import asyncio
import itertools
import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from server.engine.embedded.engine import EmbeddedEngine
from server.engine.embedded.kept import Kept, common_prefix
from server.engine.embedded.scheduler import Plan, Scheduler
from server.engine.request import Flight, GenerationRequest, Sampling
from server.engine.text import TextStream
from tests.server.conftest import MakeModule
from tests.server.engine.test_scheduler import make_flight
from unbind_core.architecture import LoadedModel

PROMPT = tuple(range(20, 90))


def _run(
    engine: EmbeddedEngine, prompt: Sequence[int], names: Sequence[str], new: int = 6
) -> tuple[Flight, list[Tensor]]:
    """One request through a stopped engine's own steps; the logits from which each token was chosen."""
    made: list[Tensor] = []
    runner: Any = engine.runner
    forward = runner.__class__.forward.__get__(runner)

    def recorded(plan: Plan) -> Tensor:
        logits: Tensor = forward(plan)
        made.append(logits[0].clone())
        return logits

    runner.forward = recorded
    request = GenerationRequest(tuple(prompt), Sampling(max_tokens=new, ignore_eos=True), engine.modules.pin(names))
    flight = Flight(request, TextStream(engine.tokenizer, ()), lambda _: None, lambda: 0.5)
    engine.scheduler.waiting.append(flight)
    while not engine.scheduler.idle:
        engine.stepper.step(lambda: None)
    return flight, made[-new:]


MakeEngine = Callable[[], EmbeddedEngine]


@pytest.fixture
def cold_engine(loaded: LoadedModel, make_module: MakeModule) -> Iterator[MakeEngine]:
    """Engines that are stepped by hand, on one model."""
    made: list[EmbeddedEngine] = []

    def make() -> EmbeddedEngine:
        while made:
            made.pop().close()
        engine = EmbeddedEngine(loaded.model, loaded.tokenizer, max_slots=2, max_length=256, chunk_tokens=24)
        modules = [make_module("one"), make_module("two", layer=2, seed=1)]
        engine.modules.sync([(module, module.digest) for module in modules])
        made.append(engine)
        return engine

    yield make
    while made:
        made.pop().close()


@pytest.mark.parametrize("order", list(itertools.permutations([("one",), ("two",), ()])))
def test_no_set_of_modules_ever_sees_the_states_of_another(
    cold_engine: MakeEngine, order: Sequence[Sequence[str]]
) -> None:
    cold = {tuple(names): _run(cold_engine(), PROMPT, names)[1] for names in order}
    engine = cold_engine()
    for names in (*order, *reversed(order)):
        _, logits = _run(engine, PROMPT, names)
        torch.testing.assert_close(torch.stack(logits), torch.stack(cold[tuple(names)]), atol=1e-4, rtol=0)
    assert (torch.stack(cold["one",]) - torch.stack(cold[()])).abs().max() > 1e-2  # the sets do differ


def test_a_keystroke_computes_only_what_is_new(cold_engine: MakeEngine) -> None:
    engine = cold_engine()
    first, _ = _run(engine, PROMPT, ["one"])
    assert first.cached_tokens == 0
    typed = (*PROMPT, *first.output[:3], 7, 8)
    again, logits = _run(engine, typed, ["one"])
    assert again.cached_tokens == len(PROMPT) + 3  # generated tokens count as well
    expected = _run(cold_engine(), typed, ["one"])[1]
    torch.testing.assert_close(torch.stack(logits), torch.stack(expected), atol=1e-4, rtol=0)


def test_the_same_prompt_again_leaves_one_position_to_compute(cold_engine: MakeEngine) -> None:
    engine = cold_engine()
    _run(engine, PROMPT, [])
    again, _ = _run(engine, PROMPT, [])
    assert again.cached_tokens == len(PROMPT) - 1


def test_a_new_version_of_a_module_finds_nothing_of_the_old_one(
    cold_engine: MakeEngine, make_module: MakeModule
) -> None:
    engine = cold_engine()
    _run(engine, PROMPT, ["one"])
    other = make_module("one", layer=0, seed=9)
    engine.modules.sync([(other, other.digest)])
    assert _run(engine, PROMPT, ["one"])[0].cached_tokens == 0


def test_other_strengths_are_another_set(cold_engine: MakeEngine) -> None:
    engine = cold_engine()
    _run(engine, PROMPT, ["one"])
    request = GenerationRequest(PROMPT, Sampling(max_tokens=1), engine.modules.pin({"one": 0.5}))
    assert engine.scheduler.kept[0].common(Flight(request, *_nobody())) == 0


def _nobody() -> tuple[Any, Any, Any]:
    return None, lambda _: None, lambda: 0.0


def test_the_longest_common_prefix_wins_then_empty_slots_then_the_oldest() -> None:
    scheduler = Scheduler(slots=3, max_length=100, queue_limit=3, chunk_tokens=100)

    def serve(tokens: Sequence[int]) -> tuple[int, int]:
        flight = make_flight(tokens)
        scheduler.waiting.append(flight)
        scheduler.computed(scheduler.schedule())
        chosen = flight.slot
        scheduler.finish(flight)
        return chosen, flight.cached_tokens

    a, b = tuple(range(30)), tuple(range(50, 80))
    assert serve(a) == (0, 0)
    assert serve(b) == (1, 0)  # an empty slot rather than what the first one knows
    assert serve((*a, 99)) == (0, 30)
    assert serve((*b[:20], 99)) == (1, 20)
    assert serve((1, 2, 3)) == (2, 0)
    assert serve((4, 5, 6)) == (0, 0)  # unused for longest
    assert serve((*a[:4], 98)) == (1, 0)  # four common tokens decide nothing: the oldest slot again


def test_conversations_that_begin_alike_keep_their_slots() -> None:
    scheduler = Scheduler(slots=4, max_length=500, queue_limit=3, chunk_tokens=500)
    system = tuple(range(20))

    def serve(tokens: Sequence[int]) -> tuple[int, int, tuple[tuple[Flight, int], ...]]:
        flight = make_flight(tokens)
        scheduler.waiting.append(flight)
        scheduler.computed(plan := scheduler.schedule())
        chosen = flight.slot
        scheduler.finish(flight)
        return chosen, flight.cached_tokens, tuple((one.cached_tokens, slot) for one, slot in plan.copies)

    a, b, c = ((*system, *range(first, first + 100)) for first in (1000, 2000, 3000))
    assert serve(a) == (0, 0, ())
    assert serve(b) == (1, 20, ((20, 0),))  # what both have is copied, and neither loses anything
    for _ in range(3):
        a, b = (*a, 7), (*b, 8)
        assert serve(a) == (0, len(a) - 1, ()) and serve(b) == (1, len(b) - 1, ())
    assert serve((*system, 9)) == (2, 20, ((20, 0),))  # the shorter of two that hold as much
    assert serve((*system, 10)) == (2, 20, ())  # nothing but the beginning stood there
    assert serve(c) == (2, 20, ()) and serve((5, 5, 5)) == (3, 0, ())
    assert serve((*system, 11)) == (0, 20, ())  # all are taken: the one unused for longest, which knows it too
    assert serve((*b, 12)) == (1, len(b), ()) and serve((*c, 13)) == (2, len(c), ())
    assert serve((*b[:30], 14)) == (3, 30, ((30, 1),))  # unused for longest


def test_the_longest_prefix_is_found_whatever_else_slots_hold() -> None:
    draw = random.Random(0)
    for _ in range(200):
        scheduler = Scheduler(slots=6, max_length=100, queue_limit=3, chunk_tokens=100)
        stem = [draw.randrange(3) for _ in range(40)]

        def varied(stem: Sequence[int] = stem) -> list[int]:
            return [*stem[: draw.randrange(40)], *(draw.randrange(3) for _ in range(draw.randrange(1, 30)))]

        scheduler.kept = [Kept(array("q", varied()), since=slot) for slot in range(6)]
        prompt = varied()
        common = [min(common_prefix(kept.tokens, array("q", prompt)), len(prompt) - 1) for kept in scheduler.kept]
        slot, source, found = scheduler._choose_slot(make_flight(prompt))
        assert found == common[source] and (found == max(common) if max(common) >= 8 else slot == source == 0)
        assert slot in (source, 0)


def test_the_slot_that_knows_most_is_chosen_among_many_long_ones() -> None:
    scheduler, length = Scheduler(slots=128, max_length=9000, queue_limit=3, chunk_tokens=9000), 8000
    same = list(range(length))
    for slot in range(128):  # each has a little more in common than the one before
        known = [*same[: length - 128 + slot], *range(10**6, 10**6 + 128)]
        scheduler.kept[slot] = Kept(array("q", known), since=slot)
    flight = make_flight([*same, 1])
    assert scheduler._choose_slot(flight) == (127, 127, length - 1)


def test_a_failed_request_leaves_nothing_to_reuse() -> None:
    scheduler = Scheduler(slots=1, max_length=100, queue_limit=3, chunk_tokens=100)
    for _ in range(2):
        flight = make_flight(range(30))
        scheduler.waiting.append(flight)
        scheduler.computed(scheduler.schedule())
        assert flight.cached_tokens == 0
        scheduler.finish(flight, keep=False)


def test_a_prompt_cut_short_is_known_as_far_as_it_was_computed() -> None:
    scheduler = Scheduler(slots=1, max_length=100, queue_limit=3, chunk_tokens=20)
    flight = make_flight(range(50))
    scheduler.waiting.append(flight)
    scheduler.computed(scheduler.schedule())
    scheduler.finish(flight)
    again = make_flight(range(50))
    scheduler.waiting.append(again)
    scheduler.schedule()
    assert again.cached_tokens == 20


@pytest.mark.parametrize("names", [(), ("one", "two")])
def test_a_prefix_that_is_copied_gives_what_computing_it_gives(cold_engine: MakeEngine, names: Sequence[str]) -> None:
    other = (*PROMPT[:20], *range(120, 150))
    cold, expected = _run(cold_engine(), other, names)
    engine = cold_engine()
    _run(engine, PROMPT, names)
    copied, logits = _run(engine, other, names)
    assert copied.cached_tokens == 20 and [len(kept.tokens) for kept in engine.scheduler.kept] == [75, 55]
    assert copied.output == cold.output
    torch.testing.assert_close(torch.stack(logits), torch.stack(expected), atol=1e-4, rtol=0)
    assert _run(engine, PROMPT, names)[0].cached_tokens == len(PROMPT) - 1


@pytest.mark.parametrize("names", [(), ("one", "two")])
def test_answers_of_one_call_are_those_of_calls_of_their_own(cold_engine: MakeEngine, names: Sequence[str]) -> None:
    """Their prompt is computed for the first alone, and copied from it while it runs."""
    prompt = tuple(range(20, 220))
    _, expected = _run(cold_engine(), prompt, names)
    engine = cold_engine()
    request = GenerationRequest(prompt, Sampling(max_tokens=6, ignore_eos=True), engine.modules.pin(names))
    nothing = TextStream(engine.tokenizer, ())
    flights = [Flight(request, nothing, lambda _: None, lambda: 0.5) for _ in range(2)]
    engine.scheduler.waiting.extend(flights)
    made: list[Tensor] = []
    forward = engine.runner.forward

    def seen(plan: Plan) -> Tensor:
        logits = forward(plan)
        made.extend(
            row.clone()
            for flight, row in zip(plan.flights, logits, strict=True)
            if flight in plan.decode and flight is flights[1]
        )
        return logits

    engine.runner.forward = seen  # type: ignore[method-assign]
    while not engine.scheduler.idle:
        engine.stepper.step(lambda: None)
    assert [flight.cached_tokens for flight in flights] == [0, 199]
    assert flights[1].output == flights[0].output
    torch.testing.assert_close(torch.stack(made), torch.stack(expected[1:]), atol=1e-4, rtol=0)


def test_log_probabilities_of_prompts_in_one_pass_are_each_its_own(cold_engine: MakeEngine) -> None:
    """Whoever shares a pass with such a prompt has one row of logits in it, and the prompt one of each position."""
    prompts = (tuple(range(20, 29)), tuple(range(40, 51)))

    def told(*together: tuple[int, ...]) -> list[tuple[list[int], list[float]]]:
        engine = cold_engine()
        asks = Sampling(max_tokens=2, ignore_eos=True, prompt_logprobs=1)
        nothing = TextStream(engine.tokenizer, ())
        flights = [Flight(GenerationRequest(one, asks), nothing, lambda _: None, lambda: 0.5) for one in together]
        engine.scheduler.waiting.extend(flights)
        plan = engine.scheduler.schedule()
        assert plan.flights == tuple(flights) and len(plan.passes()) == 1
        engine.stepper.step(lambda: None)
        return [
            ([one.token for one in flight.prompt_logprobs], [one.logprob for one in flight.prompt_logprobs])
            for flight in flights
        ]

    for found, prompt in zip(told(*prompts), prompts, strict=True):
        ((tokens, expected),) = told(prompt)
        assert found[0] == tokens == list(prompt[1:])
        assert found[1] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("length", [0, 1, 7, 64, 65])
def test_common_prefix_is_exact(length: int) -> None:
    one, other = tuple(range(65)), (*range(length), -1, *range(length + 1, 65))
    assert common_prefix(one, other[: max(65, length)]) == length
    assert common_prefix(one, one[:length]) == length


def test_cached_tokens_are_known_to_the_caller(engine: EmbeddedEngine) -> None:
    async def run() -> int:
        for _ in range(2):
            flight, deltas = engine.submit(GenerationRequest(PROMPT, Sampling(max_tokens=0)))
            assert (await deltas.get()).finish_reason == "length"
        return flight.cached_tokens

    assert asyncio.run(run()) == len(PROMPT) - 1
