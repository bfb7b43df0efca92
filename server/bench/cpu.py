"""What each of the processor's devices gains alone: the engine with all of them against the engine without one.

Behind ``unbind bench cpu``. Engines alternate in random order, each on a model and prompts of its own. The allocator is
the whole process's, so its pair are two child processes, each with one engine, that take turns.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from server.bench.serve import Workload
from server.bench.systems import EngineSystem
from unbind_core.architecture import LoadedModel, load_model
from unbind_core.cpu.allocator import KEEPING
from unbind_core.cpu.speedups import EVERY, Speedups
from unbind_core.errors import UnbindError
from unbind_core.progress import Progress, ProgressCallback

WORKLOADS = ("8x16->64", "32x16->64", "16x800->64")
ALL = "all"
WITHOUT = {name: replace(EVERY, **{name: False}) for name in Speedups.__dataclass_fields__}
Timed = Callable[[], float]  # generates once and gives seconds


@dataclass(frozen=True)
class Checkpoint:
    """The model that every engine loads anew, as no two can share one."""

    model: Path
    adapter: Path | None = None

    def load(self) -> LoadedModel:
        """The model on the CPU."""
        return load_model(self.model, self.adapter)


class _Engine:
    """One engine and the source of its prompts."""

    def __init__(self, checkpoint: Checkpoint, load: Workload, speedups: Speedups) -> None:
        loaded = checkpoint.load()
        self._load, self._random = load, random.Random(0)
        self._last = len(loaded.tokenizer) - 1
        self._system = EngineSystem(loaded, load.requests, load.prompt + load.new, speedups)
        self.close = self._system.close

    def __call__(self) -> float:
        load = self._load
        prompts = [[self._random.randint(5, self._last) for _ in range(load.prompt)] for _ in range(load.requests)]
        begun = time.perf_counter()
        self._system.generate(prompts, load.new, [0.0] * load.requests)
        return time.perf_counter() - begun


class _Child:
    """The engine with every device in a process of its own, whose C library keeps freed memory or does not."""

    def __init__(self, checkpoint: Checkpoint, load: Workload, keeps: bool) -> None:
        told = {
            "checkpoint": [str(checkpoint.model), *([str(checkpoint.adapter)] if checkpoint.adapter else [])],
            "load": [load.requests, load.prompt, load.new],
            "threads": torch.get_num_threads(),
        }
        environment = {name: value for name, value in os.environ.items() if name not in KEEPING}
        if keeps:
            environment |= {name: str(value) for name, value in KEEPING.items()}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, json.dumps(told)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self) -> float:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise UnbindError("a child process of the bench ended; its reason is above")
        return float(answer)

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def _serve(told: str) -> None:
    """In the child: a line on stdin, one run; seconds on stdout."""
    given = json.loads(told)
    torch.set_num_threads(given["threads"])
    engine = _Engine(Checkpoint(*map(Path, given["checkpoint"])), Workload(*given["load"]), EVERY)
    try:
        for _ in sys.stdin:
            sys.stdout.write(f"{engine()}\n")
            sys.stdout.flush()
    finally:
        engine.close()


def alternate(timed: dict[str, Timed], repeats: int, told: Callable[[int], object]) -> dict[str, list[float]]:
    """Seconds by name, each repeat in an order of its own; the first, which warms up, is not among them."""
    order, shuffle = list(timed), random.Random(0).shuffle
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    for repeat in range(repeats + 1):
        shuffle(order)
        for name in order:
            taken = timed[name]()
            if repeat:
                seconds[name].append(taken)
        told(repeat + 1)
    return seconds


def gain(without: Sequence[float], everything: Sequence[float]) -> dict[str, float]:
    """Time without over time with: above 1 the device gains. The median of the repeats' ratios; the ratio of the minima."""
    ratios = [one / other for one, other in zip(without, everything, strict=True)]
    return {"median": statistics.median(ratios), "of_minima": min(without) / min(everything)}


def _measured(
    what: str, timed: dict[str, Callable[[], Any]], repeats: int, progress: ProgressCallback
) -> dict[str, list[float]]:
    """As ``alternate``, of engines that are built here and closed in the end."""
    with ExitStack() as open_engines:
        engines: dict[str, Timed] = {}
        for name, build in timed.items():
            engines[name] = engine = build()
            open_engines.callback(engine.close)
        return alternate(engines, repeats, lambda done: progress(Progress(what, done, repeats + 1)))


def run(
    checkpoint: Checkpoint, *, workloads: Sequence[str] = WORKLOADS, repeats: int = 15, progress: ProgressCallback
) -> dict[str, Any]:
    """By workload: ``seconds`` (median) of the engine with every device, and ``gain`` of each device alone.

    Raises UnbindError where a workload cannot be read or a child process ends.
    """
    figures: dict[str, Any] = {}
    for load in map(Workload.parse, workloads):
        engines = {ALL: EVERY} | WITHOUT
        seconds = _measured(
            str(load),
            {name: partial(_Engine, checkpoint, load, speedups) for name, speedups in engines.items()},
            repeats,
            progress,
        )
        pair: dict[str, Callable[[], Any]] = {
            name: partial(_Child, checkpoint, load, name == ALL) for name in (ALL, "allocator")
        }
        children = _measured(f"{load}, allocator", pair, repeats, progress)
        gains = {name: gain(seconds[name], seconds[ALL]) for name in WITHOUT}
        gains["allocator"] = gain(children["allocator"], children[ALL])
        figures[str(load)] = {"seconds": statistics.median(seconds[ALL]), "gain": gains}
    return {"workloads": figures, "threads": torch.get_num_threads(), "repeats": repeats}


if __name__ == "__main__":
    _serve(sys.argv[1])
