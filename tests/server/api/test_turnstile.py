"""Requests that arrive together begin a few at a turn of the event loop, in order, and who leaves holds nobody up."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from server.api.turnstile import AT_A_TURN, Turnstile


def begun(count: int, leaving: frozenset[int] = frozenset()) -> list[tuple[int, int]]:
    """(number, turn of the loop) of each that passed, in that order; those that leave do so while they wait."""

    async def run() -> list[tuple[int, int]]:
        turnstile, turn, passed = Turnstile(), 0, []

        async def one(number: int) -> None:
            await turnstile.through()
            passed.append((number, turn))

        tasks = [asyncio.create_task(one(number)) for number in range(count)]
        await asyncio.sleep(0)
        for number in leaving:
            tasks[number].cancel()
        while not all(task.done() for task in tasks):
            turn += 1
            await asyncio.sleep(0)
        for number in leaving:
            with suppress(asyncio.CancelledError):
                await tasks[number]
        return passed

    return asyncio.run(run())


def test_a_few_pass_at_each_turn_and_in_order() -> None:
    passed = begun(5 * AT_A_TURN)
    assert [number for number, _ in passed] == list(range(5 * AT_A_TURN))
    turns = [turn for _, turn in passed]
    assert max(turns.count(turn) for turn in turns) == AT_A_TURN


def test_few_requests_wait_for_nothing() -> None:
    assert {turn for _, turn in begun(AT_A_TURN)} == {0}


def test_who_leaves_takes_nobody_s_place() -> None:
    leaving = frozenset(range(AT_A_TURN, 2 * AT_A_TURN))
    passed = begun(3 * AT_A_TURN, leaving)
    assert [number for number, _ in passed] == [n for n in range(3 * AT_A_TURN) if n not in leaving]
    assert [turn for _, turn in passed] == [0] * AT_A_TURN + [passed[-1][1]] * AT_A_TURN
