"""Requests that arrive together are begun a few at a turn of the event loop.

Reading and checking one takes milliseconds: of hundreds in one turn, whoever asks ``/health`` then would wait for all.
"""

from __future__ import annotations

import asyncio
from collections import deque

AT_A_TURN = 8


class Turnstile:
    """Lets ``AT_A_TURN`` pass at each turn of the loop, in the order in which they came."""

    def __init__(self) -> None:
        self._passed = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def through(self) -> None:
        """At once where few came in this turn of the loop; else in one of the next."""
        if not self._passed:
            asyncio.get_running_loop().call_soon(self._turn)
        if self._passed < AT_A_TURN:
            self._passed += 1
            return
        place = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        await place

    def _turn(self) -> None:
        """The next ones. Who has left meanwhile takes nobody's place."""
        self._passed = 0
        while self._waiting and self._passed < AT_A_TURN:
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(None)
                self._passed += 1
        if self._passed:
            asyncio.get_running_loop().call_soon(self._turn)
