"""Who computes what when: integers and deques, no model."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from server.engine.embedded.scheduler import Scheduler, side_by_side
from server.engine.refusals import PromptTooLong, QueueFull
from server.engine.request import Flight, GenerationRequest, Status


def make_flight(tokens: Iterable[int], owner: str = "") -> Flight:
    """A request for the scheduler alone."""
    text: Any = None  # the scheduler never looks at it
    return Flight(GenerationRequest(tuple(tokens), owner=owner), text, lambda _: None, lambda: 0.0)


_beginnings = itertools.count(step=10_000)


def _flight(tokens: int, owner: str = "") -> Flight:
    """Of a prompt that has nothing in common with any other's."""
    first = next(_beginnings)
    return make_flight(range(first, first + tokens), owner)


def _scheduler(**changes: int) -> Scheduler:
    return Scheduler(**{"slots": 2, "max_length": 100, "queue_limit": 3, "chunk_tokens": 10, **changes})


def test_a_long_prompt_is_prefilled_in_chunks_while_others_decode() -> None:
    scheduler = _scheduler()
    short, long = _flight(4), _flight(25)
    scheduler.waiting.extend([short, long])
    plan = scheduler.schedule()
    assert [(c.flight, c.start, c.count) for c in plan.prefill] == [(short, 0, 4), (long, 0, 6)]
    scheduler.computed(plan)
    assert (short.status, long.status) == (Status.RUNNING, Status.PREFILLING)
    for start, count in ((6, 10), (16, 9)):
        plan = scheduler.schedule()
        assert plan.decode == (short,) and [(c.start, c.count) for c in plan.prefill] == [(start, count)]
        scheduler.computed(plan)
    assert long.status is Status.RUNNING and scheduler.schedule().decode == (short, long)


def test_first_come_first_served_and_a_finished_request_makes_room() -> None:
    scheduler = _scheduler()
    flights = [_flight(3) for _ in range(4)]
    scheduler.waiting.extend(flights)
    scheduler.computed(scheduler.schedule())
    assert [f.status for f in flights] == [Status.RUNNING, Status.RUNNING, Status.WAITING, Status.WAITING]
    scheduler.finish(flights[0])
    scheduler.finish(flights[2])  # still waiting
    scheduler.schedule()
    assert flights[3].slot == 0 and list(scheduler.waiting) == []
    assert not scheduler.idle


def test_the_queue_holds_what_fits_the_free_slots_and_the_limit() -> None:
    scheduler = _scheduler()
    for arriving in range(5):
        scheduler.check_room([_flight(1)] * arriving)
    with pytest.raises(QueueFull):
        scheduler.check_room([_flight(1)] * 5)
    scheduler.waiting.extend([_flight(1), _flight(1)])
    scheduler.schedule()
    scheduler.check_room([_flight(1)] * 2)
    with pytest.raises(QueueFull):
        scheduler.check_room([_flight(1)] * 3)


def test_one_key_neither_fills_the_queue_nor_takes_every_slot_that_comes_free() -> None:
    scheduler = _scheduler(queue_limit=8)
    greedy = [_flight(1, "a") for _ in range(8)]
    for place in range(8):  # two slots, and three quarters of the queue
        scheduler.check_room(greedy[:place], "a")
    with pytest.raises(QueueFull, match="6 requests of this key wait already, and 75% of the queue's 8 places"):
        scheduler.check_room(greedy, "a")
    scheduler.check_room(greedy, "b")
    scheduler.waiting.extend(greedy)
    scheduler.computed(scheduler.schedule())
    other, late = _flight(1, "b"), _flight(1, "b")
    scheduler.waiting.extend([other, late])
    scheduler.finish(greedy[0])
    scheduler.schedule()
    assert other.slot == 0 and late in scheduler.waiting  # before six that came first
    scheduler.finish(greedy[1])
    scheduler.schedule()
    assert greedy[2].slot == 1 and late in scheduler.waiting  # then in turns


def test_prompts_of_all_lengths_and_running_requests_share_a_pass() -> None:
    scheduler = _scheduler(slots=5, chunk_tokens=1000, max_length=500)
    running, *flights = [_flight(9), _flight(4), _flight(30), _flight(400), _flight(7)]
    scheduler.waiting.append(running)
    scheduler.computed(scheduler.schedule())
    scheduler.waiting.extend(flights)
    plan = scheduler.schedule()
    (shared,) = plan.passes()
    assert shared.flights == (*flights, running)
    apart = [one.flights for one in plan.passes(mixed=False)]
    assert apart == [(running,), *((flight,) for flight in flights)]


def test_two_long_prompts_share_a_step_in_passes_of_their_own() -> None:
    scheduler = _scheduler(slots=3, chunk_tokens=512, max_length=1500, lanes=2)
    first, second, third = flights = [_flight(1000), _flight(1000), _flight(1000)]
    scheduler.waiting.extend(flights)
    plan = scheduler.schedule()
    assert [(chunk.flight, chunk.count) for chunk in plan.prefill] == [(first, 256), (second, 256)]
    passes = plan.passes(2)
    assert [one.flights for one in passes] == [(first,), (second,)] and side_by_side(passes)
    assert [one.decode for one in replace(plan, decode=(third,)).passes(2)] == [(third,), ()]  # in one of them
    assert [one.flights for one in plan.passes(1)] == [(first, second)]
    scheduler.computed(plan)
    for flight in (first, third):
        scheduler.finish(flight)
    (alone,) = scheduler.schedule().prefill
    assert (alone.flight, alone.start, alone.count) == (second, 256, 512)  # nobody else wants any


def test_what_others_leave_of_a_step_goes_to_a_long_prompt() -> None:
    scheduler = _scheduler(chunk_tokens=512, max_length=1500, lanes=2)
    flights = [_flight(40), _flight(1000)]
    scheduler.waiting.extend(flights)
    plan = scheduler.schedule()
    assert [chunk.count for chunk in plan.prefill] == [40, 472]
    assert plan.passes(2) == [plan]  # nearly all of it is one chunk, which all threads have done sooner


def test_what_a_prompt_leaves_of_a_step_goes_to_the_next_one() -> None:
    scheduler = _scheduler(slots=3, chunk_tokens=512, max_length=1500)
    first, second, short = flights = [_flight(801), _flight(801), _flight(30)]
    scheduler.waiting.extend(flights)
    steps = []
    while first.status is not Status.RUNNING or second.status is not Status.RUNNING:
        plan = scheduler.schedule()
        steps.append([(chunk.flight, chunk.count) for chunk in plan.prefill])
        scheduler.computed(plan)
    assert steps == [[(first, 512)], [(first, 289), (second, 223)], [(second, 512)], [(second, 66), (short, 30)]]


def test_many_short_prompts_make_equal_passes_and_few_make_one() -> None:
    scheduler = _scheduler(slots=32, chunk_tokens=512, lanes=2, queue_limit=40)
    scheduler.waiting.extend(_flight(16) for _ in range(32))
    assert [len(one.flights) for one in scheduler.schedule().passes(2)] == [16, 16]
    scheduler = _scheduler(slots=8, chunk_tokens=512, lanes=2)
    scheduler.waiting.extend(_flight(16) for _ in range(8))
    assert [len(one.flights) for one in scheduler.schedule().passes(2)] == [8]


def test_what_does_not_fit_is_told_by_how_many_tokens() -> None:
    _scheduler().check_fits(60, 40)
    with pytest.raises(PromptTooLong, match=r"max_tokens 41 exceed it by 1; shorten the prompt or lower max_tokens$"):
        _scheduler().check_fits(60, 41)
    with pytest.raises(
        PromptTooLong, match=r"exceed it by 2; shorten the prompt$"
    ):  # a lower number of tokens is no remedy
        _scheduler().check_fits(101, 1)


def test_the_servers_own_requests_one_after_the_other_put_out_one_conversation_at_most() -> None:
    scheduler = _scheduler(slots=4)

    def asked(first: int, internal: bool = False) -> int:
        flight = make_flight(range(first, first + 10))
        flight.request = replace(flight.request, internal=internal, owner="itself" if internal else "")
        scheduler.waiting.append(flight)
        scheduler.computed(scheduler.schedule())
        known = flight.cached_tokens
        scheduler.finish(flight)
        return known

    assert [asked(100 * client) for client in range(4)] == [0] * 4
    assert [asked(100 * canary, internal=True) for canary in (5, 6, 7, 8, 0)] == [0] * 5
    assert [asked(100 * client) for client in (3, 2, 1, 0)] == [9, 9, 9, 0]


def test_answers_to_one_prompt_compute_it_once() -> None:
    scheduler = _scheduler(slots=4, max_length=1000, chunk_tokens=100, lanes=2)
    answers, other = [make_flight(range(200)) for _ in range(3)], _flight(30)
    scheduler.waiting.extend([*answers, other])
    plan = scheduler.schedule()
    assert [(c.flight, c.count) for c in plan.prefill] == [(answers[0], 70), (other, 30)] and not plan.copies
    scheduler.computed(plan)
    assert list(scheduler.waiting) == answers[1:] and not scheduler.full  # a slot is free, and nobody waits for one
    for _ in range(2):
        plan = scheduler.schedule()
        assert not plan.copies and answers[1].status is Status.WAITING
        scheduler.computed(plan)
    plan = scheduler.schedule()
    assert plan.decode == (answers[0], other) and plan.copies == ((answers[1], 0), (answers[2], answers[1].slot))
    assert [(c.start, c.count) for c in plan.prefill] == [(199, 1)] * 2
    assert answers[2].cached_tokens == 199


def test_a_prompt_that_is_short_or_that_nobody_computes_any_more_is_waited_for_by_nobody() -> None:
    scheduler = _scheduler(slots=4, max_length=1000, chunk_tokens=100, lanes=2)
    scheduler.waiting.extend(make_flight(range(20)) for _ in range(2))
    assert len(scheduler.schedule().prefill) == 2
    scheduler = _scheduler(slots=4, max_length=1000, chunk_tokens=100, lanes=2)
    answers = [make_flight(range(200)) for _ in range(2)]
    scheduler.waiting.extend([*answers, make_flight(range(200), owner="another")])
    plan = scheduler.schedule()
    assert [c.flight.request.owner for c in plan.prefill] == ["", "another"]
    scheduler.computed(plan)
    scheduler.finish(answers[0])  # cancelled: as far as it came it is known
    assert scheduler.schedule().copies == () and answers[1].cached_tokens == 50 and answers[1].slot == 0


def test_what_a_running_request_knows_is_copied_and_stays_with_it() -> None:
    scheduler = _scheduler(slots=2, max_length=1000, chunk_tokens=100)
    first, second = make_flight(range(50)), make_flight((*range(40), 99, 98))
    scheduler.waiting.append(first)
    scheduler.computed(scheduler.schedule())
    scheduler.waiting.append(second)
    plan = scheduler.schedule()
    assert plan.copies == ((second, first.slot),) and (first.slot, second.slot, second.cached_tokens) == (0, 1, 40)


def test_a_request_that_gets_its_slot_is_never_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, seen = _scheduler(), []
    choose = scheduler._choose_slot

    def watched(flight: Flight) -> Any:
        seen.append(scheduler.idle)  # as a thread that drains may ask meanwhile
        return choose(flight)

    monkeypatch.setattr(scheduler, "_choose_slot", watched)
    scheduler.waiting.append(_flight(4))
    scheduler.schedule()
    assert seen == [False] and not scheduler.waiting and not scheduler.idle
