"""What edits cost vLLM, and which engine is quicker: medians over alternating repeats; above 1 the first named is quicker."""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from server.bench.engines.subject import LENGTH, ROOM, SLOTS, Subject, running
from server.bench.serve import Workload
from server.engine.engine import Engine
from server.engine.request import GenerationRequest, Sampling
from unbind_core.progress import Progress, ProgressCallback

MODULE_COUNTS = (0, 1, 64)
SHAPE = Workload(32, 64, 64)
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
