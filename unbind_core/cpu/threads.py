"""How many threads a forward pass is given: measured while it serves, for no number suits all passes.

Threads that sleep while they wait, as they must where a server shares its cores with a fit, cost 0.1 ms whenever work is
split among them, and a pass splits it a hundred times. A step of few rows is done sooner by one thread, a long prompt by all.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

TRIED = 3  # passes of a size with each number of threads before they are compared
AGAIN = 32  # and every so many passes the other one is tried, as other work on the machine comes and goes
LONG = 0.05  # seconds; what takes longer has nothing to gain from one thread
KEPT = 5  # the latest passes with each number; the quickest speaks for it, for others were interrupted


class ThreadChoice:
    """One thread or all that the calling Python thread has, for passes of about the same size."""

    def __init__(self, device: torch.device) -> None:
        self._on_cpu = device.type == "cpu"
        self._seen: dict[tuple[int, int, int], dict[int, deque[float]]] = {}
        self._passes: Counter[tuple[int, int, int]] = Counter()

    @contextmanager
    def __call__(self, tokens: int, length: int) -> Iterator[None]:
        """Around a pass over so many tokens, the longest row being ``length`` positions long by then."""
        every = torch.get_num_threads() if self._on_cpu else 1
        if every == 1:
            yield
            return
        size = every, tokens.bit_length(), length.bit_length()
        seen = self._seen.setdefault(size, {1: deque(maxlen=KEPT), every: deque(maxlen=KEPT)})
        self._passes[size] += 1
        count = self._chosen(seen, every, self._passes[size])
        torch.set_num_threads(count)
        begun = time.perf_counter()
        try:
            yield
        finally:
            torch.set_num_threads(every)
        seen[count].append(time.perf_counter() - begun)

    @staticmethod
    def _chosen(seen: dict[int, deque[float]], count: int, passes: int) -> int:
        one, every = list(seen[1]), list(seen[count])
        if len(every) < TRIED or min(every) > LONG:
            return count
        if len(one) < TRIED:
            return 1
        one_is_quicker = min(one) < min(every)
        return 1 if one_is_quicker != (passes % AGAIN == 0) else count
