"""Which engine is quicker: medians over alternating repeats; above 1 the embedded one is."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from server.bench.engines.subject import Subject, running
from server.bench.serve import Workload
from server.engine.engine import Engine
from server.engine.request import GenerationRequest, Sampling
from unbind_core.progress import Progress, ProgressCallback

Work = Callable[[int], Awaitable[object]]


async def alternating(
    what: str, works: Mapping[str, Work], repeats: int, progress: ProgressCallback
) -> dict[str, list[float]]:
    """Seconds of each by repeat, in an order that is drawn anew every time."""
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


def drawn_prompts(last: int, load: Workload, repeat: int) -> list[list[int]]:
    """Prompts of ids up to ``last`` that share nothing, alike for every system of a repeat."""
    drawn = random.Random(repeat)
    return [[drawn.randint(5, last) for _ in range(load.prompt)] for _ in range(load.requests)]


def workloads(subject: Subject, loads: Sequence[Workload], repeats: int, progress: ProgressCallback) -> dict[str, Any]:
    """The embedded engine against vLLM with the edits idle, both asked by the same code."""
    found: dict[str, Any] = {}
    with running(subject, "embedded") as embedded, running(subject, "vllm") as vllm:
        last = max(max(prompt) for prompt in subject.prompts)

        def work(engine: Engine, load: Workload) -> Work:
            async def run(repeat: int) -> None:
                async def one(prompt: list[int]) -> None:
                    sampling = Sampling(max_tokens=load.new, ignore_eos=True)
                    async for _ in engine.generate(GenerationRequest(tuple(prompt), sampling)):
                        pass

                await asyncio.gather(*(one(prompt) for prompt in drawn_prompts(last, load, repeat)))

            return run

        for load in loads:
            works = {"embedded": work(embedded, load), "vllm": work(vllm, load)}
            seconds = asyncio.run(alternating(str(load), works, repeats, progress))
            medians = {name: statistics.median(times) for name, times in seconds.items()}
            found[str(load)] = medians["vllm"] / medians["embedded"]
    return {"embedded_over_vllm": found}
