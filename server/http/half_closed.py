"""Clients that close their half of a connection behind what they asked: they wait for the answer, or have left.

Which of the two, only a write tells: the system of a client that has left resets the connection, and the write after that fails.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

CONTINUE = (
    b"HTTP/1.1 100 Continue\r\n\r\n"  # which clients of HTTP/1.1 pass over, asked for or not (RFC 9110, section 15.2)
)
FIRST_ASKED = (
    0.1  # seconds until a client is asked whether it is still there; each time it waits, twice as long until the next
)
LAST_ASKED = 5.0
GRACE = 2.0  # so long an answer may take to begin for a client of HTTP/1.0, which cannot be asked


class HalfClosedProtocol(HttpToolsProtocol):
    """uvicorn's protocol, but that what a half-closed connection has asked is answered; uvicorn closes it unanswered."""

    _running: RequestResponseCycle | None = None  # the first that is not answered, or the last that is
    _asking: asyncio.TimerHandle | None = None

    def connection_lost(self, exc: Exception | None) -> None:
        """Ask no more."""
        if self._asking is not None:
            self._asking.cancel()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more. True, to keep the connection open, where its requests have come whole and no answer has begun.

        Who closes its half within an answer has read some of it, and had enough.
        """
        if self._running is None or self._running.response_started or self.cycle.more_body or self.cycle.disconnected:
            return False
        self.cycle.keep_alive = False
        if self.cycle.scope["http_version"] == "1.0":
            self._asking = self.loop.call_later(GRACE, self._leave)
        else:
            self._asking = self.loop.call_later(FIRST_ASKED, self._ask, FIRST_ASKED)
        return True

    def _ask(self, waited: float) -> None:
        if self._running is not None and not self._running.response_started:  # else its own parts tell
            self.transport.write(CONTINUE)
        pause = min(2 * waited, LAST_ASKED)
        self._asking = self.loop.call_later(pause, self._ask, pause)

    def _leave(self) -> None:
        if self._running is not None and not self._running.response_started:
            self.transport.close()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)
