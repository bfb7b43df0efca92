"""Clients that take nothing more of their answer and do not leave: a system that answers for them keeps such a connection for ever.

Neither a request's time limit nor that of an idle connection ends it: both wait until what was written before has been taken.
"""

from __future__ import annotations

import asyncio
import socket
import struct

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class UnreadProtocol(HttpToolsProtocol):
    """uvicorn's protocol, but that a client which has taken nothing of what waits for it for ``patience`` seconds is given up."""

    patience: float
    _unread = 0  # bytes that waited when it was last looked
    _looking: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Be told of every byte that waits: few are as hard to send as many."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)

    def connection_lost(self, exc: Exception | None) -> None:
        """Look no more."""
        self._stop_looking()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The client's system takes no more for now."""
        super().pause_writing()
        self._look()

    def resume_writing(self) -> None:
        """It has taken all that waited."""
        self._stop_looking()
        super().resume_writing()

    def _look(self) -> None:
        self._unread = self.transport.get_write_buffer_size()
        self._looking = self.loop.call_later(self.patience, self._taken)

    def _taken(self) -> None:
        if self.transport.get_write_buffer_size() < self._unread:
            self._look()
            return
        # Reset, or the system would go on offering what nobody takes, and keep it.
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def _stop_looking(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None
