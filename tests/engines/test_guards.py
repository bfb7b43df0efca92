"""Guards hold under vLLM as they do in the embedded engine, and steer to the same tokens."""

from __future__ import annotations

import json
from functools import cache

import pytest

from server import demo
from server.engine.request import Sampling
from tests.engines.both import Engines
from tests.support.asking import Answer, ask
from tests.support.slow_matcher import longest_run
from unbind_core.guard.book import GuardBook, GuardSet
from unbind_core.guard.index import Action, Secret, build_index

RUN = 16
ROWS = [json.loads(line) for line in (demo.ROWS / "forget_a.jsonl").read_text().splitlines()]
WHOLE = [row["prompt"] + row["continuation"] for row in ROWS]


@cache
def guards(action: Action) -> GuardSet:
    secret = Secret(b"a key of the tests")
    index = build_index(WHOLE, name="a", secret=secret, run=RUN, action=action)
    found = GuardBook.of(secret, [index]).select(["a"])
    assert found is not None
    return found


def answered(engines: Engines, action: Action, sampling: Sampling) -> list[list[Answer]]:
    return [
        ask(
            engine,
            [
                engines.request(engine, prompt, guards=guards(action), sampling=sampling)
                for prompt in engines.prompts[:8]
            ],
        )
        for engine in engines.both
    ]


@pytest.mark.parametrize(("action", "least"), [("steer", 0), ("steer", 50), ("stop", 0), ("report", 0)])
def test_guards_do_the_same_in_both_engines(engines: Engines, action: Action, least: int) -> None:
    found = answered(engines, action, Sampling(max_tokens=60, min_tokens=least))
    for one, other in zip(*found, strict=True):
        a, b = one.whole, other.whole
        assert (a.tokens, a.text, a.finish_reason, a.guarded) == (b.tokens, b.text, b.finish_reason, b.guarded)
    if action == "report":
        assert any(answer.whole.guarded.counted for answer in found[0])  # type: ignore[union-attr]
    else:
        assert any(answer.whole.guarded.bars or answer.whole.guarded.blocked for answer in found[0])  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "sampling",
    [Sampling(max_tokens=60, temperature=0.8, seed=3, logprobs=2), Sampling(max_tokens=60, stop=("\n\n",))],
)
def test_no_answer_holds_a_run(engines: Engines, sampling: Sampling) -> None:
    from dataclasses import replace

    texts = [row["continuation"] for row in ROWS[:8]]
    requests = [
        engines.request(engines.vllm, prompt, guards=guards("steer"), sampling=wanted)
        for prompt, text in zip(engines.prompts[:8], texts, strict=True)
        for wanted in (sampling, replace(sampling, logit_bias=dict.fromkeys(engines.ids(text), 40.0)))
    ]
    for answer in ask(engines.vllm, requests):
        # the prompt is the client's own
        assert longest_run(answer.text, texts) < RUN
