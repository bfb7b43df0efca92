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
    """One thread or all of them, for passes of about the same size; to be used by one Python thread."""

    def __init__(self, device: torch.device) -> None:
        self._all = torch.get_num_threads() if device.type == "cpu" else 1
        self._seen: dict[tuple[int, int], dict[int, deque[float]]] = {}
        self._passes: Counter[tuple[int, int]] = Counter()

    @contextmanager
    def __call__(self, tokens: int, length: int) -> Iterator[None]:
        """Around a pass over so many tokens, the longest row being ``length`` positions long by then."""
        if self._all == 1:
            yield
            return
        size = tokens.bit_length(), length.bit_length()
        seen = self._seen.setdefault(size, {1: deque(maxlen=KEPT), self._all: deque(maxlen=KEPT)})
        self._passes[size] += 1
        count = self._chosen(seen, self._passes[size])
        torch.set_num_threads(count)
        begun = time.perf_counter()
        try:
            yield
        finally:
            torch.set_num_threads(self._all)
        seen[count].append(time.perf_counter() - begun)

    def _chosen(self, seen: dict[int, deque[float]], passes: int) -> int:
        one, every = seen[1], seen[self._all]
        if len(every) < TRIED or min(every) > LONG:
            return self._all
        if len(one) < TRIED:
            return 1
        one_is_quicker = min(one) < min(every)
        return 1 if one_is_quicker != (passes % AGAIN == 0) else self._all
