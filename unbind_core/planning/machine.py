"""What a device does in a second, measured in a moment: what turns multiplications and bytes into time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

REPEATS = 5
SIDE = 2048  # of the square matrix that is multiplied with
ROWS = 512  # that it is multiplied with, at most
MOMENT = 0.02  # seconds that a product may take before more rows are tried: without instructions for a dtype one row takes longer
LIBRARIES = 1 << 27  # bytes: workspaces of CUDA's libraries in both threads that multiply; guessed high, not measured


@dataclass(frozen=True)
class Machine:
    """``products``: multiplications a second of large products; ``reads``: bytes of weights a second where rows are few;
    ``libraries``: bytes that the device's own libraries take.
    """

    products: float
    reads: float
    libraries: int = 0

    @classmethod
    def measured(cls, device: torch.device, dtype: torch.dtype) -> Machine:
        """Of a device in one precision, with the threads that this process has now; a few hundred milliseconds, once."""
        return _measured(str(device), dtype, torch.get_num_threads())


@cache
def _measured(device: str, dtype: torch.dtype, _threads: int) -> Machine:
    weight = torch.ones((SIDE, SIDE), dtype=dtype, device=device)
    rows = torch.ones((ROWS, SIDE), dtype=dtype, device=device)

    def seconds(count: int) -> float:
        return _seconds(lambda: rows[:count] @ weight, device)

    one = seconds(1)
    count, many = _most(seconds, one)
    libraries = LIBRARIES if device.startswith("cuda") else 0
    return Machine(count * SIDE * SIDE / many, SIDE * SIDE * dtype.itemsize / one, libraries)


def _most(seconds: Callable[[int], float], one: float) -> tuple[int, float]:
    """Up to ROWS rows, eight times as many while they take less than a moment, and the seconds that they take; ``one``: of one."""
    count, taken = 1, one
    while count < ROWS and taken < MOMENT:
        count = min(ROWS, 8 * count)
        taken = seconds(count)
    return count, taken


def _seconds(work: Callable[[], object], device: str) -> float:
    def once() -> float:
        begun = time.perf_counter()
        work()
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)
        return time.perf_counter() - begun

    once()
    return statistics.median(once() for _ in range(REPEATS))
