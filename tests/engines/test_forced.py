"""Gates that a guard holds open are so under vLLM as in the embedded engine, in prompts and answers, and in no other's pages."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest

from server.engine.engine import Engine
from server.engine.request import GenerationRequest, Sampling
from tests.engines.both import Engines, shipped
from tests.engines.test_guards import WHOLE
from tests.support.asking import ask, sync
from unbind_core.guard.book import GuardBook, GuardSet
from unbind_core.guard.index import Secret, build_index

NAME, HALF = "shut", "half"


def guards(run: int = 50, name: str = NAME) -> GuardSet:
    secret = Secret(b"a key of the tests")
    found = GuardBook.of(secret, [build_index(WHOLE, name=name, secret=secret, run=run)]).select([name])
    assert found is not None
    return found


@pytest.fixture
def both(engines: Engines) -> Iterator[Engines]:
    """With a module whose detector never fires, and one that fires where it is led to."""
    first, *_ = shipped()
    shut = replace(first, name=NAME, tau=1e6, tau_close=None)
    for engine in engines.both:
        sync(engine, [*shipped(), shut, replace(first, name=HALF, tau=6 * first.tau, tau_close=first.tau_close)])
    yield engines
    for engine in engines.both:
        sync(engine, shipped())


def requests(engines: Engines, held: GuardSet | None, *, report: bool = False) -> list[list[GenerationRequest]]:
    """Of each engine: rows from their prompts and from within, with code before them, and what is no row at all."""
    rows = [engines.ids(text) for text in WHOLE[:6]]
    lead = engines.ids("import os\n" * 12)
    prompts = [*engines.prompts[:6], *(row[len(row) // 3 :][:40] for row in rows), *(lead + row[:90] for row in rows)]
    prompts.append(engines.ids("import os\n\n\ndef listed(folder):\n"))
    sampling = Sampling(max_tokens=70)
    return [
        [engines.request(e, p, [NAME], sampling=sampling, report=report, guards=held) for p in prompts]
        for e in engines.both
    ]


def test_forced_gates_do_the_same_in_both_engines(both: Engines) -> None:
    shut = ask(both.vllm, requests(both, None)[0])
    for _ in range(2):  # the second time from pages that were kept
        ours, theirs = (ask(e, some) for e, some in zip(both.both, requests(both, guards()), strict=True))
        assert [a.tokens for a in ours] == [b.tokens for b in theirs]
    assert ours[-1].tokens == shut[-1].tokens
    assert sum(a.tokens != b.tokens for a, b in zip(ours, shut, strict=True)) >= 8
    again = ask(both.vllm, requests(both, None)[0])
    assert [a.tokens for a in again] == [a.tokens for a in shut]


def test_reports_tell_of_them_alike(both: Engines) -> None:
    ours, theirs = (ask(e, some) for e, some in zip(both.both, requests(both, guards(24), report=True), strict=True))
    for one, other in zip(ours, theirs, strict=True):
        assert one.tokens == other.tokens
        assert [part[NAME] for part in one.whole.activations] == [part[NAME] for part in other.whole.activations]
    assert {part[NAME] for one in ours for part in one.whole.activations} == {0.0, 1.0}


def test_gates_that_open_more_easily_do_the_same_in_both_engines(both: Engines) -> None:
    """Behind pieces of rows too short to hold a gate open; they stay open as far as their scores say so."""
    rows = [both.ids(text) for text in WHOLE[:8]]
    prompts = [row[len(row) // 2 :][:24] for row in rows]
    prompts += [prompt + both.ids("\n\n\ndef listed(folder):\n    names = []\n" * 3) for prompt in prompts[:4]]
    sampling = Sampling(max_tokens=24)

    def answered(held: GuardSet | None) -> list[list[tuple[list[int], list[float]]]]:
        asked = [
            [both.request(e, p, [HALF], sampling=sampling, report=True, guards=held) for p in prompts]
            for e in both.both
        ]
        answers = [ask(e, some) for e, some in zip(both.both, asked, strict=True)]
        return [[(one.tokens, [part[HALF] for part in one.whole.activations]) for one in some] for some in answers]

    shut, *_ = answered(None)
    assert not any(any(activations) for _, activations in shut)
    for _ in range(2):  # the second time from pages that were kept
        ours, theirs = answered(guards(name=HALF))
        assert ours == theirs
    assert sum(any(activations) for _, activations in ours) >= 4 and ours != shut
    again, _ = answered(None)
    assert again == shut


def test_how_much_is_taken_over_tells_nothing_of_what_a_guard_finds(both: Engines) -> None:
    """A word that is guessed right moves a gate where the prompt ends with it, or is gone on with behind whole pages."""
    words = [f"w{number}" for number in range(10, 90)]
    secret = Secret(b"a key of the tests")
    index = build_index([" ".join(words)], name=NAME, secret=secret, run=50)
    held = GuardBook.of(secret, [index]).select([NAME])
    begun, behind = "x " * 150 + " ".join(words[10:34]), " and so on" * 24

    async def reused(engine: Engine, text: str) -> int:
        sampling = Sampling(max_tokens=20)
        flight, deltas = engine.submit(both.request(engine, both.ids(text), [NAME], sampling=sampling, guards=held))
        while (await deltas.get()).finish_reason is None:
            pass
        return flight.cached_tokens

    for engine in both.both:
        found = []
        for guess in (words[34], words[0]):
            texts = (f"{begun} {guess}", f"{begun} {guess}{behind}", f"{begun} {guess}{behind}{behind}")
            found.append([asyncio.run(reused(engine, text)) for text in texts])
        (_, *right), (_, *wrong) = found
        assert right == wrong and 160 <= right[0] < right[1]
