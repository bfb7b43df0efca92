"""Gates that a guard holds open are so under vLLM as in the embedded engine, in prompts and answers, and in no other's pages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from server.engine.request import GenerationRequest, Sampling
from tests.engines.both import Engines, shipped
from tests.engines.test_guards import WHOLE
from tests.support.asking import ask, sync
from unbind_core.guard.book import GuardBook, GuardSet
from unbind_core.guard.index import Secret, build_index

NAME = "shut"


def guards(run: int = 50) -> GuardSet:
    secret = Secret(b"a key of the tests")
    found = GuardBook.of(secret, [build_index(WHOLE, name=NAME, secret=secret, run=run)]).select([NAME])
    assert found is not None
    return found


@pytest.fixture
def both(engines: Engines) -> Iterator[Engines]:
    """With a module whose detector never fires."""
    first, *_ = shipped()
    for engine in engines.both:
        sync(engine, [*shipped(), replace(first, name=NAME, tau=1e6, tau_close=None)])
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
