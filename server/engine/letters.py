"""Deltas from the engine's thread to the streams of an event loop, a few streams at a turn.

Where hundreds of answers end in one step, waking all their streams at once would hold up whoever else the loop serves.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence

from server.engine.request import Delta

AT_A_TURN = 8  # streams: each takes a millisecond or so


class Letters:
    """What is still to be handed over in one event loop, in order. Used in that loop alone."""

    def __init__(self) -> None:
        self._left: deque[tuple[asyncio.Queue[Delta], Sequence[Delta]]] = deque()

    def take(self, letters: Mapping[asyncio.Queue[Delta], Sequence[Delta]]) -> None:
        """Hand these over after what is left of the earlier ones."""
        idle = not self._left
        self._left.extend(letters.items())
        if idle:
            self._hand_over()

    def _hand_over(self) -> None:
        for _ in range(min(AT_A_TURN, len(self._left))):
            queue, deltas = self._left.popleft()
            for delta in deltas:
                queue.put_nowait(delta)
        if self._left:
            asyncio.get_running_loop().call_soon(self._hand_over)
