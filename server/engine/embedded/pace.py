"""How fast the queue moves, for those who are sent away: measured while requests wait, as only then every slot is at work."""

from __future__ import annotations

import math
from collections import deque

LATEST = 64  # requests that speak for the pace
LEAST, MOST = 1, 120  # seconds; the official clients take no more for an answer


class Pace:
    """Time between requests that leave their slots to others. ``now``: seconds on any one clock."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._gaps: deque[float] = deque(maxlen=LATEST)
        self._since: float | None = None  # when the last one left, or the first began to wait; None while nobody waits

    def look(self, waiting: bool, now: float) -> None:
        """Whether anybody waits, asked at every step."""
        if not waiting:
            self._since = None
        elif self._since is None:
            self._since = now

    def left(self, now: float) -> None:
        """A request has left its slot."""
        if self._since is not None:
            self._gaps.append(now - self._since)
            self._since = now

    def seconds(self, waiting: int, now: float) -> int:
        """Until so many requests have had their turn, within ``LEAST`` .. ``MOST``; any thread may ask.

        Before one has left, those that run are taken to be about to.
        """
        since, gaps = self._since, tuple(self._gaps)
        spent = sum(gaps) + (now - since if since is not None else 0.0)
        return min(MOST, max(LEAST, math.ceil(waiting * spent / (len(gaps) or self._slots))))
