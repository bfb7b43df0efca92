"""What one engine answers the other answers, token for token where nothing is drawn."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from dataclasses import replace

import pytest

from server.engine.refusals import PromptTooLong, QueueFull
from server.engine.request import Sampling
from tests.engines.both import SHIPPED, Engines, shipped
from tests.support.asking import ask, sync

SETS: list[Mapping[str, float]] = [
    {},
    {"demo-a": 1.0},
    {"demo-a-silent": 1.0},
    {"demo-a-paper": 1.0},
    {"demo-a": 0.5, "demo-a-paper": 1.0},
    {"demo-a": 0.0},
    dict.fromkeys(SHIPPED, 1.0),
]


def mixed(engines: Engines, count: int) -> list[tuple[tuple[int, ...], Mapping[str, float], int]]:
    """Prompts of 1 to 600 tokens, many of them with a common beginning, their modules, and how many tokens they want."""
    drawn = random.Random(0)
    text = [token for prompt in engines.prompts for token in prompt]
    found = []
    for _ in range(count):
        prompt = drawn.choice(engines.prompts)
        kind = drawn.random()
        if kind < 0.2:
            start = drawn.randrange(len(text) - 600)
            prompt = tuple(text[start : start + drawn.randrange(1, 600)])
        elif kind < 0.4:
            prompt = (*drawn.choice(engines.prompts), *prompt)
        found.append((prompt, drawn.choice(SETS), drawn.choice([1, 8, 32, 64])))
    return found


def test_greedy_answers_are_equal_whatever_runs_beside_them(engines: Engines) -> None:
    wanted = mixed(engines, 160)
    found = []
    for engine in engines.both:
        requests = [
            engines.request(engine, prompt, modules, sampling=Sampling(max_tokens=tokens))
            for prompt, modules, tokens in wanted
        ]
        found.append([(answer.tokens, answer.text, answer.whole.finish_reason) for answer in ask(engine, requests)])
    assert found[0] == found[1]


SAMPLINGS = {
    "logprobs": Sampling(max_tokens=16, logprobs=3),
    "prompt": Sampling(max_tokens=4, logprobs=0, prompt_logprobs=2),
    "prompt alone": Sampling(max_tokens=0, prompt_logprobs=1),
    "warm": Sampling(max_tokens=0),
    "stop": Sampling(max_tokens=40, stop=("self", "\n\n")),
    "stop after": Sampling(max_tokens=40, stop=(" ",), min_tokens=7),
    "stop token": Sampling(max_tokens=40, stop_token_ids=(13, 199, 222)),
    "no end": Sampling(max_tokens=48, ignore_eos=True),
    "bias": Sampling(max_tokens=16, logit_bias={199: 4.0, 225: -100.0}, logprobs=1),
    "repetition": Sampling(max_tokens=16, repetition_penalty=1.3),
    "presence": Sampling(max_tokens=16, presence_penalty=0.7, frequency_penalty=0.3),
    "least": Sampling(max_tokens=24, min_tokens=20),
    "indent": Sampling(max_tokens=40, least_indent=4),
}


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("strips", [False, True])
def test_whatever_a_request_says_it_is_answered_alike(engines: Engines, name: str, strips: bool) -> None:
    found = []
    for engine in engines.both:
        requests = [
            engines.request(engine, prompt, modules, sampling=SAMPLINGS[name], strips=strips)
            for prompt in engines.prompts[:6]
            for modules in ({}, {"demo-a": 1.0}, {"demo-a-paper": 1.0})
        ]
        found.append(ask(engine, requests))
    for one, other in zip(*found, strict=True):
        a, b = one.whole, other.whole
        assert (a.tokens, a.text, a.finish_reason, a.stop_reason) == (b.tokens, b.text, b.finish_reason, b.stop_reason)
        for entries in ("logprobs", "prompt_logprobs"):
            mine, theirs = getattr(a, entries), getattr(b, entries)
            assert len(mine) == len(theirs)
            for left, right in zip(mine, theirs, strict=True):
                if left is None or right is None or left.logprob is None or right.logprob is None:
                    assert (left is None) == (right is None)
                    assert left is None or (left.logprob is None) == (right.logprob is None)  # type: ignore[union-attr]
                    continue
                assert left.token == right.token and left.rank == right.rank
                assert left.logprob == pytest.approx(right.logprob, abs=2e-4)
                assert [token for token, _ in left.top] == [token for token, _ in right.top]


def test_reports_tell_the_same_activations(engines: Engines) -> None:
    found = []
    for engine in engines.both:
        requests = [
            engines.request(engine, prompt, {"demo-a": 1.0, "demo-a-paper": 1.0}, report=True)
            for prompt in engines.prompts[:8]
        ]
        found.append([answer.whole.activations for answer in ask(engine, requests)])
    assert any(value for answer in found[0] for each in answer for value in each.values())
    for one, other in zip(*found, strict=True):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert dict(left) == pytest.approx(dict(right), abs=2e-3)


def test_gates_are_counted_as_in_the_embedded_engine(engines: Engines) -> None:
    """Of prompts that nobody has asked before, so that no engine reuses what another set or request has computed."""
    before = [engine.gates().result(60) for engine in engines.both]
    for engine in engines.both:
        requests = [
            engines.request(
                engine, (7 + i, *prompt), {"demo-a": 1.0}, sampling=Sampling(max_tokens=12, ignore_eos=True)
            )
            for i, prompt in enumerate(engines.prompts[:5])
        ]
        ask(engine, requests, at_once=1)
        ask(
            engine,
            [engines.request(engine, (3, *engines.prompts[0]), {"demo-a": 1.0}, sampling=Sampling(max_tokens=0))],
        )
    after = [engine.gates().result(60) for engine in engines.both]
    grown = [
        {
            phase: tuple(b - a for a, b in zip(old.counts["demo-a"][phase], new.counts["demo-a"][phase], strict=True))
            for phase in ("prefill", "decode")
        }
        for old, new in zip(before, after, strict=True)
    ]
    assert grown[0] == grown[1] and grown[0]["decode"][0] == 5 * 11
    looks = [(old.looks["demo-a"], new.looks["demo-a"]) for old, new in zip(before, after, strict=True)]
    (positions, requests), other = ((new.positions - old.positions, new.requests - old.requests) for old, new in looks)
    assert (positions, requests) == other and positions == sum(evaluated for evaluated, _ in grown[0].values())
    below = [[b - a for a, b in zip(old.below, new.below, strict=True)] for old, new in looks]
    assert max(below[0]) > 0 and below[0] == pytest.approx(below[1], abs=3)  # a score may lie on a boundary


def test_equal_prompts_under_different_sets_never_share_what_was_computed(engines: Engines) -> None:
    drawn = random.Random(5)
    alone = {}
    for number, modules in enumerate(SETS):
        requests = [engines.request(engines.embedded, prompt, modules) for prompt in engines.prompts[:6]]
        alone[number] = [answer.tokens for answer in ask(engines.embedded, requests)]
    pairs = [(drawn.randrange(6), drawn.randrange(len(SETS))) for _ in range(200)]
    requests = [engines.request(engines.vllm, engines.prompts[prompt], SETS[number]) for prompt, number in pairs]
    answers = ask(engines.vllm, requests)
    assert [answer.tokens for answer in answers] == [alone[number][prompt] for prompt, number in pairs]


def test_copies_of_a_prompt_that_wait_together_are_each_answered_under_the_module(engines: Engines) -> None:
    """They are scheduled in one step, where vLLM would have all but one take a prefix over that is not computed yet."""
    module, copies = ["demo-a-silent"], 4
    for number, prompt in enumerate(engines.prompts):
        ahead = tuple(5 + (7 * j + number) % 900 for j in range(1200))  # a prompt that they wait behind
        asked = (*prompt, *engines.prompts[number - 1], *prompt)
        alone = ask(engines.embedded, [engines.request(engines.embedded, asked, module)])[0].tokens
        requests = [engines.request(engines.vllm, ahead, sampling=Sampling(max_tokens=1))]
        requests += [engines.request(engines.vllm, asked, module) for _ in range(copies)]
        found = [answer.tokens for answer in ask(engines.vllm, requests)[1:]]
        assert found == [alone] * copies, number


def test_a_running_request_keeps_the_version_it_began_with(engines: Engines) -> None:
    import asyncio

    one, *others = shipped()
    weaker = replace(one, kappa=one.kappa * 0.25)
    prompt = engines.prompts[0]
    sampling = Sampling(max_tokens=60, ignore_eos=True)
    request = engines.request(engines.vllm, prompt, ["demo-a"], sampling=sampling)
    expected = ask(engines.vllm, [request])[0].tokens

    async def meanwhile() -> tuple[int, ...]:
        tokens: tuple[int, ...] = ()
        changed = None
        async for delta in engines.vllm.generate(request):
            tokens += delta.tokens
            if changed is None:
                changed = asyncio.wrap_future(engines.vllm.sync_modules([(m, m.digest) for m in (weaker, *others)]))
        assert changed is not None
        await changed
        return tokens

    assert asyncio.run(meanwhile()) == expected
    found = ask(engines.vllm, [engines.request(engines.vllm, prompt, ["demo-a"], sampling=sampling)])[0].tokens
    sync(engines.embedded, [weaker, *others])
    again = ask(engines.embedded, [engines.request(engines.embedded, prompt, ["demo-a"], sampling=sampling)])[0].tokens
    for engine in engines.both:
        sync(engine, shipped())
    assert found == again


def test_a_request_that_does_not_fit_is_refused(engines: Engines) -> None:
    for engine in engines.both:
        with pytest.raises(PromptTooLong, match="maximum context length is 2048 tokens"):
            ask(engine, [engines.request(engine, (5,) * 2000, sampling=Sampling(max_tokens=100))])


def test_a_request_that_nobody_waits_for_ends(engines: Engines) -> None:
    async def leave() -> None:
        request = engines.request(engines.vllm, engines.prompts[1], sampling=Sampling(max_tokens=1000, ignore_eos=True))
        async for _ in engines.vllm.generate(request):
            break
        for _ in range(100):
            if not engines.vllm.stats().running:
                return
            await asyncio.sleep(0.1)
        raise AssertionError("it still runs")

    asyncio.run(leave())


def test_a_burst_beyond_the_queue_is_refused_at_once(engines: Engines) -> None:
    async def burst() -> None:
        request = engines.request(engines.vllm, engines.prompts[2], sampling=Sampling(max_tokens=500, ignore_eos=True))
        room = engines.vllm.slots + 200
        flights = [engines.vllm.submit(request)[0] for _ in range(room)]
        with pytest.raises(QueueFull, match="200 requests wait already, and the queue holds 200"):
            engines.vllm.submit(request)
        for flight in flights:
            engines.vllm.cancel(flight)
        for _ in range(200):
            stats = engines.vllm.stats()
            if not stats.running + stats.waiting:
                return
            await asyncio.sleep(0.1)
        raise AssertionError("some of them still run")

    asyncio.run(burst())
