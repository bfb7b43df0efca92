"""How fast the engine serves, as ratios against references measured in the same run.

Behind ``unbind bench serve``. Every prompt is of random tokens and new, so that nothing is found in a cache unless the
figure is about the cache; all references alternate, and figures are medians of ratios.
"""

from __future__ import annotations

import random
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from server.bench.filter import NETWORKS, random_module
from server.bench.load import under_load
from server.bench.many import fitted_often
from server.bench.server import served
from server.bench.systems import EngineSystem, HttpSystem, LibraryBatching, StaticBatch, System, vllm_system
from server.bench.telemetry import telemetry_cost
from server.engine.pinned import PinnedSet
from unbind_core.architecture import LoadedModel, numerics
from unbind_core.errors import UnbindError
from unbind_core.progress import Progress, ProgressCallback

WORKLOADS = ("32x16->64", "16x800->64", "32x1500->64")
MODULES = (0, 1, 8, 64, 512)
MODULE_REPEATS = 5  # for one of the others: what modules cost is little beside what a machine's speed differs by
KEYSTROKES, KEYSTROKE_TOKENS = 40, 1500
PARTS = ("throughput", "library", "arrivals", "keystrokes", "modules", "http")
# Only where they are named, as in --parts load --workloads "200x64->192": seconds that probes wait, and what telemetry costs.
LOAD, TELEMETRY = "load", "telemetry"
WITHOUT_A_SERVER = ("throughput", "keystrokes", "modules")


@dataclass(frozen=True)
class Workload:
    """Requests x prompt tokens -> new tokens."""

    requests: int
    prompt: int
    new: int

    @classmethod
    def parse(cls, text: str) -> Workload:
        """``32x16->64``. Raises UnbindError."""
        found = re.fullmatch(r"(\d+)x(\d+)->(\d+)", text.strip())
        if found is None or not all(int(number) for number in found.groups()):
            raise UnbindError(f"--workloads: '{text}' is not REQUESTSxPROMPT->NEW, as in 32x16->64")
        return cls(*(int(number) for number in found.groups()))

    def __str__(self) -> str:
        """As it is written on the command line."""
        return f"{self.requests}x{self.prompt}->{self.new}"


class Bench:
    """One model and the source of its prompts."""

    def __init__(self, loaded: LoadedModel, repeats: int, progress: ProgressCallback) -> None:
        self._loaded = loaded
        self._repeats = repeats
        self._progress = progress
        self._random = random.Random(0)

    def _prompts(self, count: int, length: int) -> list[list[int]]:
        last = len(self._loaded.tokenizer) - 1
        return [[self._random.randint(5, last) for _ in range(length)] for _ in range(count)]

    def _timed(self, work: Callable[[], object]) -> tuple[float, float]:
        """Wall-clock and processor seconds of this process."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - wall, time.process_time() - cpu

    def _alternating(
        self, what: str, systems: dict[str, System], load: Workload, window: float = 0.0
    ) -> dict[str, list[tuple[float, float]]]:
        """Seconds by system, each repeat on prompts of its own; ``window``: arrivals are spread over so many seconds."""
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in systems}
        for repeat in range(self._repeats + 1):  # the first one warms up
            arrivals = [0.0] + [self._random.uniform(0, window) for _ in range(load.requests - 1)]
            names = list(systems)
            self._random.shuffle(names)
            for name in names:
                prompts = self._prompts(load.requests, load.prompt)
                measured = self._timed(partial(systems[name].generate, prompts, load.new, arrivals))
                if repeat:
                    seconds[name].append(measured)
            self._progress(Progress(what, repeat + 1, self._repeats + 1))
        return seconds

    def throughput(self, load: Workload, parts: Sequence[str], vllm: Path | None = None) -> dict[str, Any]:
        """The engine against static ``generate``, the library's continuous batching and vLLM on one workload."""
        length = load.prompt + load.new
        engine = EngineSystem(self._loaded, load.requests, length)
        systems: dict[str, System] = {"engine": engine, "static": StaticBatch(self._loaded)}
        if "library" in parts:
            systems["library"] = LibraryBatching(self._loaded, load.requests, length)
        try:
            with ExitStack() as stack:
                beside = dict(systems)
                if vllm is not None:
                    beside["vllm"] = stack.enter_context(vllm_system(vllm, self._loaded, load.requests, length))
                at_once = self._alternating(str(load), beside, load)
            figures: dict[str, Any] = _ratios(at_once) | {"tokens_per_second": _speeds(at_once, load)}
            if "arrivals" in parts:
                window = statistics.median(wall for wall, _ in at_once["engine"]) / 2
                spread = self._alternating(f"{load}, random arrival", systems, load, window)
                figures["random_arrival"] = _ratios(spread) | {
                    "window_seconds": window,
                    "tokens_per_second": _speeds(spread, load),
                }
        finally:
            engine.close()
        return figures

    def keystrokes(self, count: int = KEYSTROKES, tokens: int = KEYSTROKE_TOKENS) -> dict[str, float]:
        """Time to first token while somebody types: a prompt that grows by 1 to 5 tokens and is edited near its end."""
        engine = EngineSystem(self._loaded, 4, tokens + 5 * count + 8)
        try:
            prompt = self._prompts(1, tokens)[0]
            engine.first_token(prompt)
            warm, cold = [], []
            for done in range(count):
                prompt = prompt + self._prompts(1, self._random.randint(1, 5))[0]
                if done % 4 == 3:
                    prompt[-self._random.randint(2, 20)] = self._prompts(1, 1)[0][0]
                warm.append(engine.first_token(prompt))
                cold.append(engine.first_token(self._prompts(1, len(prompt))[0]))
                self._progress(Progress("keystrokes", done + 1, count))
        finally:
            engine.close()
        ratios = [one / other for one, other in zip(warm, cold, strict=True)]
        return {
            "ratio": statistics.median(ratios),
            "worst_ratio": max(ratios),
            "warm_seconds": statistics.median(warm),
            "cold_seconds": statistics.median(cold),
        }

    def modules(self, load: Workload, counts: Sequence[int] = MODULES, kind: str = "fisher") -> dict[str, float]:
        """Slowdown by number of modules on in the batch, spread over the layers, no two requests with the same set."""
        engine = EngineSystem(self._loaded, load.requests, load.prompt + load.new)
        identity = self._loaded.identity
        table = engine.engine.modules
        running = numerics(self._loaded.model)
        every = [random_module(identity, n, n % identity.num_layers, kind, running) for n in range(max(counts))]
        engine.engine.sync_modules([(module, module.digest) for module in every]).result()
        try:
            names = [module.name for module in every]
            slowdowns: dict[int, list[float]] = {count: [] for count in counts if count}
            repeats = MODULE_REPEATS * self._repeats
            for repeat in range(repeats + 1):
                seconds = {}
                for count in self._random.sample(list(counts), len(counts)):
                    sets = [self._module_set(table.pin, names[:count], row) for row in range(load.requests)]
                    prompts, at_once = self._prompts(load.requests, load.prompt), [0.0] * load.requests
                    seconds[count], _ = self._timed(partial(engine.generate, prompts, load.new, at_once, sets))
                if repeat:
                    for count, found in slowdowns.items():
                        found.append(seconds[count] / seconds[0] - 1)
                self._progress(Progress(f"modules ({kind})", repeat + 1, repeats + 1))
        finally:
            engine.close()
        return {str(count): statistics.median(found) for count, found in slowdowns.items()}

    def _module_set(self, pin: Callable[[dict[str, float]], PinnedSet], names: Sequence[str], row: int) -> PinnedSet:
        """About half of the modules, at a strength that no other row has; every module is on in some row."""
        chosen = [name for i, name in enumerate(names) if (i + row) % 2 == 0] or list(names)
        return pin(dict.fromkeys(chosen, 1 + row / 100))

    def http(self, load: Workload, settings: dict[str, object]) -> dict[str, Any]:
        """Throughput through HTTP streams, one client a request, over the engine's own."""
        length = load.prompt + load.new
        engine = EngineSystem(self._loaded, load.requests, length)
        sizes = {
            "max_slots": load.requests,
            "max_model_len": length,
            "threads": torch.get_num_threads(),
            "worker": False,
        }
        try:
            with tempfile.TemporaryDirectory() as folder, served(settings | sizes, Path(folder)) as server:
                seconds = self._alternating("HTTP", {"engine": engine, "http": HttpSystem(server.url)}, load)
        finally:
            engine.close()
        pairs = zip(seconds["engine"], seconds["http"], strict=True)
        return {
            "ratio": statistics.median(own[0] / through[0] for own, through in pairs),
            "tokens_per_second": _speeds(seconds, load),
        }

    def load(self, load: Workload, settings: dict[str, object]) -> dict[str, Any]:
        """What probes and scrapes wait for while as many clients stream."""
        return under_load(settings, self._prompts(load.requests, load.prompt), load.new, self._progress)

    def telemetry(self, load: Workload, settings: dict[str, object], networks: int = 0) -> dict[str, Any]:
        """Tokens a second with all telemetry over those with as little as can be; ``networks``: modules, 0 for those there are."""
        prompts, modules = partial(self._prompts, load.requests, load.prompt), fitted_often(self._loaded, networks)
        return telemetry_cost(settings, prompts, load.new, self._repeats, self._progress, modules)


def run(
    loaded: LoadedModel,
    *,
    workloads: Sequence[str] = WORKLOADS,
    repeats: int = 5,
    parts: Sequence[str] = PARTS,
    module_counts: Sequence[int] = MODULES,
    keystrokes: int = KEYSTROKES,
    keystroke_tokens: int = KEYSTROKE_TOKENS,
    vllm: Path | None = None,
    networks: int = 0,
    settings: dict[str, object],
    progress: ProgressCallback,
) -> dict[str, Any]:
    """All figures, or those of ``parts``; ``settings`` name the model to the server that is started for HTTP.

    ``vllm``: a Python that has vLLM, to be set against the engine too. ``networks``: modules of the part telemetry. Ratios above 1
    mean that the engine is faster; slowdowns are shares (0.02 is 2 %).
    """
    known = (*PARTS, LOAD, TELEMETRY)
    unknown = set(parts) - set(known)
    if unknown or repeats < 1:
        raise UnbindError(f"--parts: unknown {', '.join(sorted(unknown))}; known: {', '.join(known)}; --repeats from 1")
    bench = Bench(loaded, repeats, progress)
    loads = [Workload.parse(text) for text in workloads]
    figures: dict[str, Any] = {}
    if "throughput" in parts:
        measured = {str(load): bench.throughput(load, parts, vllm) for load in loads}
        figures["vs_static_generate"] = {load: found["vs_static_generate"] for load, found in measured.items()}
        if "library" in parts:
            figures["vs_library_batching"] = {load: found["vs_library_batching"] for load, found in measured.items()}
        if vllm is not None:
            figures["vs_vllm"] = {load: found["vs_vllm"] for load, found in measured.items()}
        figures["workloads"] = measured
    if "keystrokes" in parts:
        typed = bench.keystrokes(keystrokes, keystroke_tokens)
        figures |= {"keystroke_warm_over_cold": typed["ratio"], "keystrokes": typed}
    if "modules" in parts:
        figures["module_slowdown"] = bench.modules(loads[0], sorted({0, *module_counts}))
        fewer = [count for count in module_counts if count <= max(NETWORKS)]
        for key, kind in (("networks", "network"), ("corrections", "network network")):
            figures[f"module_slowdown_{key}"] = bench.modules(loads[0], sorted({0, *fewer}), kind)
    if "http" in parts:
        through = bench.http(loads[0], settings)
        figures |= {"http_over_engine": through["ratio"], "http": through}
    if LOAD in parts:
        figures[LOAD] = {str(load): bench.load(load, settings) for load in loads}
    if TELEMETRY in parts:
        figures[TELEMETRY] = {str(load): bench.telemetry(load, settings, networks) for load in loads}
    parameters = next(loaded.model.parameters())
    return figures | {
        "model": loaded.identity.name,
        "dtype": str(parameters.dtype).removeprefix("torch."),
        "device": str(parameters.device),
        "threads": torch.get_num_threads(),
        "repeats": repeats,
    }


def _ratios(seconds: dict[str, list[tuple[float, float]]]) -> dict[str, float]:
    """Medians over repeats of another system's time over the engine's, by wall clock and by processor time."""
    found = {}
    names = {"static": "vs_static_generate", "library": "vs_library_batching", "vllm": "vs_vllm"}
    for name, key in names.items():
        if name in seconds:
            pairs = list(zip(seconds["engine"], seconds[name], strict=True))
            found[key] = statistics.median(other[0] / own[0] for own, other in pairs)
            if name != "vllm":  # which computes in a process of its own
                found[f"{key}_processor_time"] = statistics.median(other[1] / own[1] for own, other in pairs)
    return found


def _speeds(seconds: dict[str, list[tuple[float, float]]], load: Workload) -> dict[str, float]:
    made = load.requests * load.new
    return {name: made / statistics.median(wall for wall, _ in times) for name, times in seconds.items()}
