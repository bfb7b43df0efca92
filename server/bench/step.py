"""What the edit of one layer takes in a decode step, apart from the model: by operations of torch and by kernels.

Behind ``unbind bench step``. Modules are random networks with such corrections, states are random, and the gates' memory is in
pages, as under vLLM.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from server.bench.filter import random_module
from server.engine.vllm.pages import LastPositions, PagedMemory
from unbind_core.applying.bank import ModuleBank
from unbind_core.applying.passes import Pass
from unbind_core.errors import UnbindError
from unbind_core.identity import ModelIdentity

LAYER, PAGE, POSITION, TOGETHER = 0, 16, 40, 20
CLOSED = 1000.0  # a reference that no score of a random network comes near


class Step:
    """A bank, its memory and one batch, ready for a step as an engine makes it."""

    def __init__(self, bank: ModuleBank, device: torch.device, dtype: torch.dtype, size: int, count: int) -> None:
        """``count`` requests with one token each, all of which ask for every module of the bank; states of ``size`` numbers."""
        self.bank, self._device = bank, device
        pages = POSITION // PAGE + 1
        self._memory = PagedMemory(count * pages, PAGE, max(bank.columns.values()), device)
        self._tables = torch.arange(count * pages, dtype=torch.int32, device=device).view(count, pages)
        self._lengths = torch.full((count,), POSITION + 1, dtype=torch.int32, device=device)
        self._slots = (self._tables[:, -1] * PAGE + POSITION % PAGE).long()
        generator = torch.Generator().manual_seed(count)
        self._hidden, self._residual = torch.randn(2, count, size, generator=generator).to(device, dtype)
        self._selection = bank.select([dict.fromkeys(bank.names, 1.0)] * count)
        self._names = [str(i) for i in range(count)]

    @torch.inference_mode()
    def __call__(self) -> None:
        """One step's edit, which nobody waits for."""
        selection, requests = self._selection, self.bank.requests
        if selection is None or requests is None:
            raise UnbindError("modules: there is none; give at least 1")
        places = LastPositions(self._memory, self._tables, self._lengths, self._slots)
        pass_ = Pass(places=places, phase="decode", requests=requests.rows(self._names))
        states = torch.add(
            self._hidden, self._residual, out=self._hidden.new_empty(self._hidden.shape, dtype=torch.float32)
        )
        edited = selection.edit(LAYER, states, pass_, to=self._hidden, in_place=True).states
        if edited is not self._hidden:
            self._hidden.copy_(edited)

    def milliseconds(self) -> tuple[float, float, float]:
        """Of one step until the device is done; until its last operation is launched; and of one among many in a row."""
        self._wait()
        begun = time.perf_counter()
        self()
        launched = time.perf_counter()
        self._wait()
        alone = time.perf_counter()
        for _ in range(TOGETHER):
            self()
        self._wait()
        return 1e3 * (alone - begun), 1e3 * (launched - begun), 1e3 * (time.perf_counter() - alone) / TOGETHER

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def run(
    device: torch.device,
    *,
    dtype: torch.dtype = torch.bfloat16,
    size: int = 3584,
    batches: Sequence[int] = (1, 16, 64),
    modules: Sequence[int] = (1, 64),
    repeats: int = 15,
) -> list[dict[str, Any]]:
    """Medians of repeats that alternate between torch and kernels, for gates that are all closed and all open; the default ``size``
    is that of a model of 7B. Without a CUDA device there are no kernels to compare with.
    """
    found = []
    identity = ModelIdentity("0" * 64, "random", size, 1)
    ways = {"torch": False, "kernels": None} if device.type == "cuda" else {"torch": False}
    for many in modules:
        made = [random_module(identity, number, LAYER, "network network") for number in range(many)]
        for gates, reference in (("closed", CLOSED), ("open", -CLOSED)):
            banks = {
                way: ModuleBank(device, one_table=True, requests=4 * max(batches), kernels=kernels, dtype=dtype)
                for way, kernels in ways.items()
            }
            for bank in banks.values():
                for one in made:
                    bank.add(replace(one, s_ref=reference))
            for count in batches:
                steps = {way: Step(bank, device, dtype, size, count) for way, bank in banks.items()}
                times: dict[str, list[tuple[float, float, float]]] = {way: [] for way in ways}
                for _ in range(repeats):
                    for way, step in steps.items():
                        times[way].append(step.milliseconds())
                one_found: dict[str, Any] = {"modules": many, "gates": gates, "requests": count}
                for way, all_times in times.items():
                    names = ("alone_ms", "launched_ms", "in_a_row_ms")
                    medians = (statistics.median(some) for some in zip(*all_times[2:], strict=True))
                    one_found[way] = {name: round(value, 4) for name, value in zip(names, medians, strict=True)}
                found.append(one_found)
    return found
