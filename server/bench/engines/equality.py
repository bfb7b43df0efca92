"""Whether both engines say the same, and whether requests under different sets of modules keep apart."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from typing import Any

from server.bench.engines.subject import LENGTH, Subject, answered, running
from unbind_core.module import UnbindModule
from unbind_core.progress import Progress, ProgressCallback

PAGES = 12_000_000  # bytes of keys and values where requests are to be preempted: one long request and a little
COPIED = 0.25  # of the requests repeat the one before
Sets = Sequence[Mapping[str, float]]


def sets_of(modules: Sequence[UnbindModule]) -> Sets:
    """Sets of both kinds of detectors, some of them measured only or at another strength."""
    names = [module.name for module in modules]
    return [
        {},
        *({name: 1.0} for name in names),
        {names[0]: 0.5, names[-1]: 1.0},
        {names[0]: 0.0},
        dict.fromkeys(names, 1.0),
    ]


def mixed(subject: Subject, count: int) -> list[tuple[Sequence[int], Mapping[str, float], int]]:
    """Prompts of 1 to 1,500 tokens, many with a common beginning, some asked several times at once, with sets of modules, and the
    tokens that they want.
    """
    drawn, sets = random.Random(0), sets_of(subject.modules)
    text = [token for prompt in subject.prompts for token in prompt]
    while len(text) < 2 * LENGTH:
        text += text
    found: list[tuple[Sequence[int], Mapping[str, float], int]] = []
    while len(found) < count:
        if found and drawn.random() < COPIED:
            found.append(found[-1])
            continue
        prompt = list(drawn.choice(subject.prompts))
        kind = drawn.random()
        if kind < 0.1:
            start = drawn.randrange(LENGTH)
            prompt = text[start : start + drawn.randrange(1, 1500)]
        elif kind < 0.4:
            prompt = [*drawn.choice(subject.prompts), *prompt]
        found.append((prompt[:1500], drawn.choice(sets), drawn.choice((1, 8, 32, 64))))
    return found


def equal(subject: Subject, count: int, progress: ProgressCallback) -> dict[str, Any]:
    """Greedy tokens of the same requests in both engines; vLLM with so little memory that it preempts."""
    wanted = mixed(subject, count)
    found = {}
    figures: dict[str, Any] = {}
    for number, name in enumerate(("embedded", "vllm")):
        with running(subject, name, PAGES) as engine:
            found[name], cached = asyncio.run(answered(engine, wanted))
            if name == "vllm":
                figures["cached_share"] = cached / sum(len(prompt) for prompt, _, _ in wanted)
                figures["preemptions"] = engine.stats().preemptions
        progress(Progress("equal tokens", number + 1, 2))
    same = sum(one == other for one, other in zip(*found.values(), strict=True))
    return {"equal_tokens": same, "of_requests": count, **figures}


def isolation(subject: Subject, pairs: int, progress: ProgressCallback) -> dict[str, Any]:
    """Pairs of requests with equal prompts and different sets, prefixes reused: answers that are not their own set's."""
    sets, prompts, drawn = sets_of(subject.modules), subject.prompts[:8], random.Random(1)
    own = {(i, j): (prompt, chosen, 16) for i, prompt in enumerate(prompts) for j, chosen in enumerate(sets)}
    with running(subject, "embedded") as engine:
        expected = dict(zip(own, asyncio.run(answered(engine, list(own.values())))[0], strict=True))
    progress(Progress("isolation", 1, 2))
    asked = []
    for _ in range(pairs):
        prompt = drawn.randrange(len(prompts))
        asked += [(prompt, chosen) for chosen in drawn.sample(range(len(sets)), 2)]
    with running(subject, "vllm") as engine:
        answers, cached = asyncio.run(answered(engine, [own[one] for one in asked]))
    progress(Progress("isolation", 2, 2))
    wrong = sum(answer != expected[one] for answer, one in zip(answers, asked, strict=True))
    share = cached / sum(len(prompts[prompt]) for prompt, _ in asked)
    return {"pairs": pairs, "mixed_up": wrong, "cached_share": share}
