"""HTTP connections with the limits that uvicorn's protocol lacks: size, number and time of headers, and how many clients.

Every port of the service is served through ``ServerConfig``, also while the model loads. Bodies are limited by the
middleware, which can answer as any refusal does; here only what comes of a body after its answer has left is.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from enum import Enum, auto
from typing import Any

import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle
from uvicorn.server import ServerState

from server.errors import ApiError, response
from server.http.framing import Parser, framed
from server.http.half_closed import HalfClosedProtocol
from server.http.unread import UnreadProtocol
from server.settings import Settings

log = logging.getLogger("unbind.http")
OTHER_DESCRIPTORS = 200  # the database, the store, the worker's pipes and what is read for a moment
MOST_PIPELINED = 64  # requests that wait on one connection behind the one that is answered
LINGER_SECONDS = 2.0  # so long a refused client may go on sending, else the refusal would be lost on its way,
LINGER_BYTES = 1024 * 1024  # and so much
ALWAYS_ANSWERED = "/health"  # or a full server would be taken for a dead one, and ended


class ServerConfig(uvicorn.Config):
    """uvicorn's configuration with the limits of the settings; ``more`` goes to uvicorn."""

    def __init__(self, application: Any, settings: Settings, **more: Any) -> None:
        super().__init__(
            application,
            http=BoundedProtocol,
            ws="none",
            log_config=None,
            access_log=False,
            timeout_keep_alive=settings.keep_alive_timeout,
            **more,
        )
        self.limits = settings


def allow_descriptors(settings: Settings) -> None:
    """Have this process open as many files as its connections may take, as far as it may say so itself; warn where it may not.

    What systems allow at first, often 1,024, is less than twice the default of ``max_connections``.
    """
    wanted = 2 * settings.max_connections + OTHER_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < wanted:
        log.warning(
            "max_connections: %d connections may take %d open files, and %d are allowed: raise the limit (ulimit -n, LimitNOFILE) "
            "or lower max_connections; once they are used up, nobody is answered",
            settings.max_connections,
            wanted,
            allowed,
        )


class _Part(Enum):
    BETWEEN = auto()  # requests, or before the first
    HEAD = auto()
    BODY = auto()


class BoundedProtocol(UnreadProtocol, HalfClosedProtocol):
    """One connection. What goes over a limit is answered with an error object, where an answer can still be sent."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        assert isinstance(config, ServerConfig)
        self.parser = Parser(self)
        self._limits = config.limits
        self.patience = config.limits.request_timeout
        self._again = False  # the head that is parsed is ``head_again``
        self._timer: asyncio.TimerHandle | None = None
        self._part = _Part.BETWEEN
        self._headers = self._head_bytes = 0  # of the request that arrives, as far as they are parsed
        self._fed = self._body_bytes = 0  # bytes given to the parser, and those of them that were a body's
        self._moved = False  # this read ended a head or a body, or what it brought was refused
        self._untouched = True  # nothing has ever come
        self._refusal: ApiError | None = None
        self._lingering = False

    # The transport's calls.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a head."""
        super().connection_made(transport)
        if len(self.connections) > 2 * self._limits.max_connections:
            transport.abort()
            return
        self._wait(self._limits.header_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        """Put the timer away."""
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse, then look at what has not become a request yet."""
        if self._lingering:
            self._fed += len(data)
            if self._fed > LINGER_BYTES:
                self.transport.abort()
            return
        self._untouched = self._moved = False
        super().data_received(data)
        if self._moved or self.transport.is_closing():
            return
        # Nothing was completed, so all of it lies in a head, in a body or around its chunks, or is blank lines.
        self._fed += len(data)
        if self._fed > 2 * self._limits.max_header_bytes + 8 * self._body_bytes:
            self._refuse(self._too_large())
        elif self._part is not _Part.BODY and self._timer is None:
            self._wait(self._limits.header_timeout)

    # The parser's calls. What they raise ends in ``send_400_response``.

    def on_message_begin(self) -> None:
        """The first byte of a head."""
        if self._again:
            return
        super().on_message_begin()
        self._part = _Part.HEAD
        self._headers = self._head_bytes = 0
        self._wait(self._limits.header_timeout)

    def on_url(self, url: bytes) -> None:
        """A part of the address."""
        if self._again:
            return
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or a trailer behind a body, which counts and is no header."""
        if self._again:
            return
        self._headers += 1
        self._count(len(name) + len(value) + len(b": \r\n"))
        if self._part is not _Part.BODY:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is whole: the request begins, or waits for those before it."""
        if self._again:
            self._again = False
            return
        if len(self.pipeline) >= MOST_PIPELINED:
            text = f"more than {MOST_PIPELINED} requests at once on one connection"
            self._raise(ApiError(400, text, code="pipelined"))
        self._stop_waiting()
        self._enter(_Part.BODY)
        self.expect_100_continue &= self.parser.get_http_version() != "1.0"  # who would take that for the answer
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request has come whole."""
        if self.parser.should_upgrade() and self._framing:  # its body is still to come, behind ``head_again``
            return
        super().on_message_complete()
        self._enter(_Part.BETWEEN)
        if self.cycle.response_complete:  # its answer left before; from now on the connection is idle
            self._stop_waiting()
            self._unset_keepalive_if_required()
            left = self.timeout_keep_alive if self.parser.should_keep_alive() else 0
            self.timeout_keep_alive_task = self.loop.call_later(left, self.timeout_keep_alive_handler)

    @property
    def _framing(self) -> list[tuple[bytes, bytes]]:
        """The headers that say how long the body is; none where there is no body."""
        return [(name, value) for name, value in self.headers if name in (b"content-length", b"transfer-encoding")]

    def head_again(self) -> bytes:
        """What is parsed before the body of a request that offered another protocol; empty where it has none."""
        framing = b"".join(name + b": " + value + b"\r\n" for name, value in self._framing)
        self._again = bool(framing)
        version = self.parser.get_http_version().encode()
        return b"POST / HTTP/" + version + b"\r\n" + framing + b"\r\n" if framing else b""

    def on_response_complete(self) -> None:
        """An answer has left. What still comes of its body is taken in for a while, and thrown away."""
        super().on_response_complete()
        if self._part is _Part.BODY and self.cycle.response_complete and not self.transport.is_closing():
            self._wait(self._limits.body_timeout)

    def send_400_response(self, msg: str) -> None:
        """Answer what is no request, or more than one may be."""
        del msg  # uvicorn's own words
        self._refuse(self._refusal or ApiError(400, "this is not a valid HTTP request", code="invalid_http"))

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        limit = self._limits.max_connections
        full = len(self.connections) > limit or len(self.tasks) >= limit
        answering: Any = _full if full and cycle.scope["path"] != ALWAYS_ANSWERED else app
        super()._start_asgi_task(cycle, framed(cycle, answering))

    # Limits.

    def _enter(self, part: _Part) -> None:
        self._part, self._moved = part, True
        self._fed = self._body_bytes = 0

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > self._limits.max_header_bytes or self._headers > self._limits.max_headers:
            self._raise(self._too_large())

    def _too_large(self) -> ApiError:
        most, count = self._limits.max_header_bytes, self._limits.max_headers
        return ApiError(
            431,
            f"the request's head is larger than {most} bytes (max_header_bytes) or {count} headers (max_headers)",
            code="headers_too_large",
        )

    def _raise(self, refusal: ApiError) -> None:
        self._refusal = refusal
        raise refusal

    def _wait(self, seconds: float) -> None:
        self._stop_waiting()
        self._timer = self.loop.call_later(seconds, self._late)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @property
    def _answering(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not cycle.response_complete

    def _late(self) -> None:
        self._timer = None
        if self._lingering:
            self.transport.abort()
        elif self.transport.is_closing():
            return
        elif self._answering:  # an answer still runs, and the client may well send its next request after it
            self._wait(self._limits.header_timeout)
        elif self._untouched or self._part is _Part.BODY:
            self.transport.close()
        else:
            text = f"the request's head did not arrive within {self._limits.header_timeout:g} s (header_timeout)"
            self._refuse(ApiError(408, text, code="header_timeout"))

    def _refuse(self, error: ApiError) -> None:
        """Say why, where no other answer is being sent, and close once the client has had time to read it."""
        self._unset_keepalive_if_required()
        self._lingering = self._moved = True
        if self._answering and (self.cycle.response_started or self._part is not _Part.BODY or self.pipeline):
            self.transport.close()
            return
        answer = response(error)
        head = b"".join(name + b": " + value + b"\r\n" for name, value in answer.raw_headers)
        self.transport.write(STATUS_LINE[error.status] + head + b"connection: close\r\n\r\n" + bytes(answer.body))
        if self._answering:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._fed = 0
        self.flow.resume_reading()
        self.transport.write_eof()
        self._wait(LINGER_SECONDS)


async def _full(scope: Scope, receive: Receive, send: Send) -> None:
    """503 for a client that is one too many."""
    error = ApiError(
        503,
        "the server has as many connections as it takes (max_connections); try again",
        code="too_many_connections",
        headers={"Retry-After": "2", "Connection": "close"},
    )
    await response(error, scope["path"])(scope, receive, send)
