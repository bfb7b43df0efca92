"""What completions of fits and measurements take, against the library's own ``generate`` for the same prompts, in turns.

Behind ``unbind bench complete``.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from server.bench.cpu import alternate, gain
from server.bench.serve import Workload
from unbind_core.architecture import LoadedModel
from unbind_core.cpu.linears import packed_linears
from unbind_core.progress import Progress, ProgressCallback
from unbind_core.running.device import forget_peak, peak_bytes
from unbind_core.running.generation import Sampling, complete

OURS, LIBRARY = "ours", "library"
TOP_P = 0.95
Generate = Callable[[Sequence[Sequence[int]]], object]


def run(
    loaded: LoadedModel, load: Workload, *, temperature: float, repeats: int, progress: ProgressCallback
) -> dict[str, Any]:
    """``greedy`` and ``sampled``: of either ``seconds`` (median) and ``memory_bytes`` (the most, beside what was held before), and
    the ``gain``. Nothing ends an answer; ours has packed weights on a CPU, as in a fit.
    """
    draw, last = random.Random(0), len(loaded.tokenizer) - 1
    prompts = [[draw.randint(5, last) for _ in range(load.prompt)] for _ in range(load.requests)]
    found = {}
    for name, heat in (("greedy", 0.0), ("sampled", temperature)):
        ways = {OURS: ours(loaded, load.new, heat), LIBRARY: library(loaded, load.new, heat)}
        seconds = alternate(
            {way: partial(_seconds, go, prompts) for way, go in ways.items()},
            repeats,
            partial(_told, progress, name, repeats + 1),
        )
        memory = {way: _most(loaded, go, prompts) for way, go in ways.items()}
        found[name] = {
            way: {"seconds": statistics.median(seconds[way]), "memory_bytes": memory[way]} for way in ways
        } | {"gain": gain(seconds[LIBRARY], seconds[OURS])}
    return {"model": loaded.identity.name, "workload": str(load), "threads": torch.get_num_threads(), **found}


def ours(loaded: LoadedModel, new: int, temperature: float) -> Generate:
    """As fits and measurements complete."""

    def go(prompts: Sequence[Sequence[int]]) -> object:
        with packed_linears(loaded.model):
            return complete(loaded.model, prompts, Sampling(new, temperature, TOP_P), pad=0, end=None)

    return go


def library(loaded: LoadedModel, new: int, temperature: float) -> Generate:
    """transformers' ``generate`` of the whole batch."""
    model: Any = loaded.model
    sampled: dict[str, Any] = {"do_sample": temperature > 0, "temperature": None, "top_p": None, "top_k": None}
    if temperature > 0:
        sampled |= {"temperature": temperature, "top_p": TOP_P, "top_k": 0}

    def go(prompts: Sequence[Sequence[int]]) -> object:
        ids = torch.tensor(prompts, device=model.device)
        with torch.no_grad():
            return model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new,
                eos_token_id=None,
                pad_token_id=0,
                repetition_penalty=1.0,
                **sampled,
            )

    return go


def _told(progress: ProgressCallback, name: str, count: int, done: int) -> None:
    progress(Progress(name, done, count))


def _seconds(go: Generate, prompts: Sequence[Sequence[int]]) -> float:
    begun = time.perf_counter()
    go(prompts)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def _most(loaded: LoadedModel, go: Generate, prompts: Sequence[Sequence[int]]) -> int:
    where = next(loaded.model.parameters()).device
    gc.collect()
    forget_peak(where)
    before = peak_bytes(where)
    go(prompts)
    return peak_bytes(where) - before
