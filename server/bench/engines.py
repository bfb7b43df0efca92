"""The engines against each other: equal tokens on mixed requests, what edits cost vLLM, and which of the two is quicker.

Needs vLLM in the environment that runs it. Ratios are medians over alternating repeats; above 1 the first named is quicker.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from server.bench.serve import WORKLOADS, Workload
from server.engine.choice import EngineOptions, build_engine, plan_engine
from server.engine.engine import Engine
from server.engine.request import GenerationRequest, Sampling
from unbind_core.architecture import LoadedModel
from unbind_core.module import UnbindModule
from unbind_core.progress import Progress, ProgressCallback

PARTS = ("equal", "isolation", "plugin", "workloads", "kills")
LENGTH = 1600
SLOTS = 16
PAGES = 12_000_000  # bytes of keys and values where requests are to be preempted: one long request and a little
ROOM = 512_000_000  # where they are not
MODULE_COUNTS = (0, 1, 64)
SHAPE = Workload(32, 64, 64)


@dataclass(frozen=True)
class Subject:
    """What is compared: a checkpoint (its adapter or none), how it is loaded, modules for it, and prompts of its own kind."""

    model: Path
    adapter: Path | None
    load: Callable[[], LoadedModel]
    modules: Sequence[UnbindModule]
    prompts: Sequence[Sequence[int]]


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


@contextmanager
def running(subject: Subject, name: str, memory: int = ROOM, columns: int = 256) -> Iterator[Engine]:
    """An engine on the subject, with its modules."""
    loaded = subject.load()
    with tempfile.TemporaryDirectory() as folder:
        device = next(iter(loaded.model.parameters())).device.type
        options = EngineOptions(
            model=subject.model,
            adapted=subject.adapter is not None,
            dtype=str(next(iter(loaded.model.parameters())).dtype).removeprefix("torch."),
            device=device,
            slots=SLOTS,
            length=LENGTH,
            queue_limit=100_000,
            chunk_tokens=512,
            folder=Path(folder),
            columns=columns,
            flags=(f"kv-cache-memory-bytes={memory}", "max-num-batched-tokens=512", "block-size=32"),
        )
        engine = build_engine(name, loaded, plan_engine(name, loaded, options), options)
        engine.start()
        try:
            engine.sync_modules([(module, module.digest) for module in subject.modules]).result(300)
            yield engine
        finally:
            engine.close()


async def answered(
    engine: Engine, wanted: Sequence[tuple[Sequence[int], Mapping[str, float], int]]
) -> tuple[list[tuple[int, ...]], int]:
    """Tokens of each, and how many prompt tokens were taken over."""
    turn, cached = asyncio.Semaphore(64), 0

    async def one(prompt: Sequence[int], modules: Mapping[str, float], new: int) -> tuple[int, ...]:
        nonlocal cached
        request = GenerationRequest(tuple(prompt), Sampling(max_tokens=new), engine.modules.pin(modules))
        async with turn:
            flight, deltas = engine.submit(request)
            while (await deltas.get()).finish_reason is None:
                pass
        cached += flight.cached_tokens
        return tuple(flight.output)

    return list(await asyncio.gather(*(one(*each) for each in wanted))), cached


def mixed(subject: Subject, count: int, seed: int = 0) -> list[tuple[Sequence[int], Mapping[str, float], int]]:
    """Prompts of 1 to 1,500 tokens, many with a common beginning, with sets of modules, and the tokens that they want."""
    drawn, sets = random.Random(seed), sets_of(subject.modules)
    text = [token for prompt in subject.prompts for token in prompt]
    while len(text) < 2 * LENGTH:
        text += text
    found: list[tuple[Sequence[int], Mapping[str, float], int]] = []
    for _ in range(count):
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


Work = Callable[[int], Awaitable[object]]


async def _alternating(
    what: str, works: Mapping[str, Work], repeats: int, progress: ProgressCallback
) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in works}
    drawn = random.Random(0)
    for repeat in range(repeats + 1):  # the first one warms up
        names = list(works)
        drawn.shuffle(names)
        for name in names:
            begun = time.perf_counter()
            await works[name](repeat)
            if repeat:
                seconds[name].append(time.perf_counter() - begun)
        progress(Progress(what, repeat + 1, repeats + 1))
    return seconds


def _drawn(subject: Subject, load: Workload, repeat: int) -> list[list[int]]:
    """Prompts that share nothing, alike for every system of a repeat."""
    drawn = random.Random(repeat)
    last = max(max(prompt) for prompt in subject.prompts)
    return [[drawn.randint(5, last) for _ in range(load.prompt)] for _ in range(load.requests)]


def plugin(
    subject: Subject, repeats: int, progress: ProgressCallback, counts: Sequence[int] = MODULE_COUNTS
) -> dict[str, Any]:
    """vLLM with the edits, idle and with modules on every request, against vLLM as it comes: the same requests, asked alike."""
    from server.engine.vllm.arguments import Arguments
    from server.engine.vllm.asking import plain
    from server.engine.vllm.model import Model

    first = next(module for module in subject.modules if module.heads is not None)
    assert first.heads is not None
    copies = {f"m{i}": replace(first, name=f"m{i}") for i in range(max(counts))}
    columns = (len(first.heads) + 1) * len(copies) + 2
    serial = itertools.count()

    def work(model: Model, count: int) -> Work:
        async def one(chosen: str, prompt: list[int]) -> None:
            if chosen:
                await model.know(chosen, {chosen: 1.0}, Counter())
            asked = plain(SHAPE.new, chosen)
            async for _ in model.generate(
                {"prompt_token_ids": prompt, "cache_salt": chosen or "none"}, asked, f"b{next(serial)}"
            ):
                pass

        async def run(repeat: int) -> None:
            names = [f"m{(i + repeat) % count}" if count else "" for i in range(SHAPE.requests)]
            await asyncio.gather(*map(one, names, _drawn(subject, SHAPE, repeat)))

        return run

    async def measure(folder: Path) -> dict[str, list[float]]:
        edits = Arguments(str(folder), "float32", LENGTH, SLOTS, columns, "cpu", (f"kv-cache-memory-bytes={ROOM}",))
        models = [await Model.started(one, first.model) for one in (replace(edits, edits=False), edits)]
        try:
            await models[1].hold(copies)
            works = {"bare": work(models[0], 0), **{str(count): work(models[1], count) for count in counts}}
            return await _alternating("edits beside none", works, repeats, progress)
        finally:
            for model in models:
                await model.close()

    with tempfile.TemporaryDirectory() as folder:
        seconds = asyncio.run(measure(_saved(subject, Path(folder))))
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    tokens = SHAPE.requests * SHAPE.new
    return {
        "workload": str(SHAPE),
        "plugin_over_bare": {name: medians["bare"] / median for name, median in medians.items() if name != "bare"},
        "tokens_per_second": {name: tokens / median for name, median in medians.items()},
    }


def _saved(subject: Subject, folder: Path) -> Path:
    loaded = subject.load()
    model: Any = loaded.model
    model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return folder


def workloads(subject: Subject, loads: Sequence[Workload], repeats: int, progress: ProgressCallback) -> dict[str, Any]:
    """The embedded engine against vLLM with the edits idle, both asked by the same code."""
    found: dict[str, Any] = {}
    with running(subject, "embedded") as embedded, running(subject, "vllm") as vllm:

        def work(engine: Engine, load: Workload) -> Work:
            async def run(repeat: int) -> None:
                async def one(prompt: list[int]) -> None:
                    sampling = Sampling(max_tokens=load.new, ignore_eos=True)
                    async for _ in engine.generate(GenerationRequest(tuple(prompt), sampling)):
                        pass

                await asyncio.gather(*(one(prompt) for prompt in _drawn(subject, load, repeat)))

            return run

        for load in loads:
            works = {"embedded": work(embedded, load), "vllm": work(vllm, load)}
            seconds = asyncio.run(_alternating(str(load), works, repeats, progress))
            medians = {name: statistics.median(times) for name, times in seconds.items()}
            found[str(load)] = medians["vllm"] / medians["embedded"]
    return {"embedded_over_vllm": found}


def run(
    subject: Subject,
    *,
    requests: int,
    pairs: int,
    repeats: int,
    kills: int,
    seed: int,
    parts: Sequence[str] = PARTS,
    progress: ProgressCallback,
) -> dict[str, Any]:
    """All figures by part; ``version`` is vLLM's."""
    figures: dict[str, Any] = {"version": importlib.import_module("vllm").__version__}
    if "equal" in parts:
        figures |= equal(subject, requests, progress)
    if "isolation" in parts:
        figures["isolation"] = isolation(subject, pairs, progress)
    if "plugin" in parts:
        figures |= plugin(subject, repeats, progress)
    if "workloads" in parts:
        figures |= workloads(subject, [Workload.parse(text) for text in WORKLOADS], repeats, progress)
    if "kills" in parts:
        from server.bench.engine_kills import killed

        figures["killed"] = killed(subject, kills, seed, progress)
    return figures
