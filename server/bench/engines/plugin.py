"""What edits cost vLLM: with them, idle and with modules on every request, and without; above 1 it is quicker with them."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from server.bench.engines.speed import Work, alternating, drawn_prompts
from server.bench.engines.subject import LENGTH, ROOM, SLOTS, Subject
from server.bench.filter import random_module
from server.bench.scale.world import bare as bare_model
from server.bench.serve import Workload
from server.bench.step import CLOSED
from unbind_core.identity import ModelIdentity
from unbind_core.module import UnbindModule
from unbind_core.progress import ProgressCallback

MODULE_COUNTS = (0, 1, 64)
SHAPE = Workload(32, 64, 64)
EVERY = "each"  # all modules on every request
PAGES = 8_000_000_000  # bytes of keys and values on a GPU


@dataclass(frozen=True)
class Plain:
    """What vLLM runs to be measured: a checkpoint's ``folder``, or a configuration's with ``flags`` that have weights made up; who
    the model is, how it runs, and a ``module`` of which copies are put on its requests, whose prompts are ids up to ``last``.
    """

    folder: Path
    identity: ModelIdentity
    module: UnbindModule
    last: int
    dtype: str = "float32"
    device: str = "cpu"
    flags: tuple[str, ...] = ()
    layers: tuple[int, ...] = ()


@contextmanager
def saved(subject: Subject) -> Iterator[Plain]:
    """The subject, written out."""
    first = next(module for module in subject.modules if module.heads is not None)
    loaded = subject.load()
    with tempfile.TemporaryDirectory() as folder:
        model: Any = loaded.model
        model.save_pretrained(folder)
        loaded.tokenizer.save_pretrained(folder)
        yield Plain(Path(folder), first.model, first, max(max(prompt) for prompt in subject.prompts))


@contextmanager
def shaped(config: str, dtype: torch.dtype, device: str, layers: Sequence[int] = ()) -> Iterator[Plain]:
    """An architecture of ``bench scale`` with weights that vLLM makes up, and a network whose gate stays closed: at the first of
    the ``layers`` behind which modules may stand (below 0 from the end), in its middle where none are named. Raises DataError where
    there is no such architecture.
    """
    model, named = bare_model(config, dtype), str(dtype).removeprefix("torch.")
    found: Any = model.config
    found.architectures = [type(model).__name__]
    identity = ModelIdentity("0" * 64, config, int(found.hidden_size), int(found.num_hidden_layers))
    behind = tuple(layer % identity.num_layers for layer in layers)
    at, running = behind[0] if behind else identity.num_layers // 2, {"dtype": named, "quantisation": None}
    module = replace(random_module(identity, 0, at, "network network", running), s_ref=CLOSED)
    with tempfile.TemporaryDirectory() as folder:
        found.save_pretrained(folder)
        flags = ["load-format=dummy"]
        if device != "cpu":
            flags.append("gpu-memory-utilization=0.42")  # of two engines; the pages are said apart
        yield Plain(Path(folder), identity, module, int(found.vocab_size) - 1, named, device, tuple(flags), behind)


def plugin(
    plain: Plain,
    loads: Sequence[Workload],
    repeats: int,
    progress: ProgressCallback,
    counts: Sequence[int] = MODULE_COUNTS,
) -> dict[str, Any]:
    """vLLM with the edits, idle and with modules on every request, against vLLM as it comes: the same requests, asked alike.

    ``plugin_over_bare`` is of the first load, by the number of modules, of which each request asks for one; ``workloads`` has all
    of them, and the largest number on every request: the quartiles of the ratio by repeat.
    """
    from server.engine.vllm import asking
    from server.engine.vllm.arguments import Arguments
    from server.engine.vllm.model import Model
    from server.engine.vllm.remote import PROBE_COLUMNS

    copies = {f"m{i}": replace(plain.module, name=f"m{i}") for i in range(max(counts))}
    sets = {name: {name: 1.0} for name in copies} | {EVERY: dict.fromkeys(copies, 1.0)}
    serial = itertools.count()

    def work(model: Model, load: Workload, names: Sequence[str]) -> Work:
        async def one(chosen: str, prompt: list[int]) -> None:
            if chosen:
                await model.know(chosen, sets[chosen], Counter())
            asked = asking.plain(load.new, chosen)
            async for _ in model.generate(
                {"prompt_token_ids": prompt, "cache_salt": chosen or "none"}, asked, f"b{next(serial)}"
            ):
                pass

        async def run(repeat: int) -> None:
            chosen = [names[(i + repeat) % len(names)] for i in range(load.requests)]
            await asyncio.gather(*map(one, chosen, drawn_prompts(plain.last, load, repeat)))

        return run

    async def measure(load: Workload, bare: Model, edited: Model) -> dict[str, list[float]]:
        works = {"bare": work(bare, load, [""])}
        works |= {str(count): work(edited, load, list(copies)[:count] or [""]) for count in counts}
        works[f"{max(counts)} {EVERY}"] = work(edited, load, [EVERY])
        return await alternating(f"edits beside none, {load}", works, repeats, progress)

    async def all_of() -> dict[str, dict[str, list[float]]]:
        assert plain.module.heads is not None
        columns = (len(plain.module.heads) + 1) * len(copies) + PROBE_COLUMNS * plain.identity.num_layers
        length, slots, pages = max(LENGTH, *(load.prompt + load.new for load in loads)), SLOTS, ROOM
        if plain.device != "cpu":
            slots, pages = max(load.requests for load in loads), PAGES
        flags = (f"kv-cache-memory-bytes={pages}", *plain.flags)
        edits = Arguments(
            str(plain.folder), plain.dtype, length, slots, columns, plain.device, flags, layers=plain.layers
        )
        bare = await Model.started(replace(edits, edits=False), plain.identity)
        try:
            edited = await Model.started(edits, plain.identity)
            try:
                await edited.hold(copies)
                return {str(load): await measure(load, bare, edited) for load in loads}
            finally:
                await edited.close()
        finally:
            await bare.close()

    seconds = asyncio.run(all_of())
    found = {str(load): beside(load, seconds[str(load)]) for load in loads}
    first = found[str(loads[0])]
    return {
        "model": plain.identity.name,
        "plugin_over_bare": {str(count): first[str(count)]["of_bare"][1] for count in counts},
        "workloads": found,
    }


def beside(load: Workload, seconds: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """By what was asked: tokens a second, and the quartiles of bare vLLM's seconds over its own."""
    found = {}
    for name, own in seconds.items():
        ratios = [bare / one for bare, one in zip(seconds["bare"], own, strict=True)]
        quartiles = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
        rate = load.requests * load.new / statistics.median(own)
        found[name] = {"tokens_per_second": rate, "of_bare": quartiles}
    return found
