"""How many threads a stage computes with: those for which there are cores, looked at again every second.

Beside streams that keep a core busy a second thread hinders: parallel work waits for the slower one, which gets what the server
leaves at its lower priority. When the server is idle, one thread leaves a core unused.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil
import torch

from unbind_core.progress import Progress, ProgressCallback

SECONDS = 1.0  # between two looks
SLACK = 0.4  # of a core: a thread that gets six tenths of one is worth having


@dataclass(frozen=True)
class Moment:
    """Seconds on the clock, of this process on all processors, and of all processors without work."""

    clock: float
    used: float
    idle: float

    @classmethod
    def now(cls) -> Moment:
        """As the system tells it."""
        return cls(time.monotonic(), time.process_time(), psutil.cpu_times().idle)


class Share:
    """One stage's; ``watching`` wraps the callback that the stage calls from its computing thread all the time."""

    def __init__(self, most: int, now: Callable[[], Moment] = Moment.now) -> None:
        """``most`` threads, if there are cores for them; ``now`` tells how busy the machine has been."""
        self.most = most
        self._now = now
        self._last = now()

    def watching(self, progress: ProgressCallback) -> ProgressCallback:
        """The same callback, which also sets the number of threads."""

        def tell(made: Progress) -> None:
            self._look()
            progress(made)

        return tell

    def _look(self) -> None:
        before, found = self._last, self._now()
        passed = found.clock - before.clock
        if passed < SECONDS:
            return
        self._last = found
        free = (self._last.used - before.used + self._last.idle - before.idle) / passed
        torch.set_num_threads(threads(free, self.most))


def threads(cores: float, most: int) -> int:
    """For so many cores that are this process's or nobody's: 1 to ``most``."""
    return max(1, min(most, int(cores + SLACK)))
