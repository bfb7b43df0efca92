"""What telemetry costs: the part ``telemetry`` of ``unbind bench serve``.

Two servers, asked in turns: one with every histogram and name, scraped each second; one with counters alone, which nobody scrapes.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import torch

from server.bench.load import answered
from server.bench.server import served
from server.bench.systems import HttpSystem, Prompts
from unbind_core.module import UnbindModule
from unbind_core.progress import Progress, ProgressCallback

EVERY_SECONDS = 1.0  # between scrapes
KINDS = {"on": {"metrics_detail": True, "metrics_vllm_names": True}, "off": {"metrics_detail": False}}


def telemetry_cost(
    settings: dict[str, object],
    prompts: Callable[[], Prompts],
    new: int,
    repeats: int,
    progress: ProgressCallback,
    modules: Sequence[UnbindModule] = (),
) -> dict[str, Any]:
    """``ratio``: the median over repeats of tokens a second with telemetry over without, a stream for each of ``prompts()``, under
    all modules that are loaded, or under ``modules``; ``processor_ratio``, the same of tokens a second of the servers' processor
    time, which other work on the machine touches less; by kind, tokens a second; ``scrape_seconds``, the median and worst of the
    scrapes.
    """
    first = prompts()
    sizes = {
        "max_slots": len(first),
        "max_model_len": max(map(len, first)) + new,
        "threads": torch.get_num_threads(),
        "worker": False,
        "when_open": "allow",  # else answers would end where their gates open
    }
    scrapes: list[float] = []
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    busy: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with ExitStack() as stack:
        urls, processes = {}, {}
        if modules:
            kept = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            for module in modules:
                module.save(kept / f"{module.name}.safetensors")
            settings = settings | {"modules_dir": kept}
        for kind, own in KINDS.items():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            running = stack.enter_context(served(settings | sizes | own, folder))
            urls[kind], processes[kind] = running.url, psutil.Process(running.process.pid)
        for repeat in range(repeats + 1):  # the first one warms up
            asked = prompts()
            for kind in random.sample(sorted(KINDS), len(KINDS)):
                ended = threading.Event()
                scraper = threading.Thread(target=_scrape, args=(urls[kind], ended, scrapes), daemon=True)
                if kind == "on":
                    scraper.start()
                begun, taken = time.perf_counter(), _processor(processes[kind])
                HttpSystem(urls[kind], every_module=True).generate(asked, new, [0.0] * len(asked))
                spent, taken = time.perf_counter() - begun, _processor(processes[kind]) - taken
                ended.set()
                if kind == "on":
                    scraper.join()
                if repeat:
                    seconds[kind].append(spent)
                    busy[kind].append(taken)
            progress(Progress("telemetry", repeat + 1, repeats + 1))
    tokens = len(first) * new
    return {
        "ratio": _ratio(seconds),
        "processor_ratio": _ratio(busy),
        "tokens_per_second": {kind: tokens / statistics.median(spent) for kind, spent in seconds.items()},
        "scrape_seconds": {"median": statistics.median(scrapes), "worst": max(scrapes)},
    }


def _ratio(found: dict[str, list[float]]) -> float:
    return statistics.median(off / on for on, off in zip(found["on"], found["off"], strict=True))


def _processor(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _scrape(url: str, ended: threading.Event, found: list[float]) -> None:
    while True:
        found.append(answered(url, "/metrics"))
        if ended.wait(EVERY_SECONDS):
            return
