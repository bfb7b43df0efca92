"""Where a message's body begins and ends, for clients whose HTTP is not what uvicorn's protocol expects: 1.0, or an offer of 2."""

from __future__ import annotations

from typing import Any, Protocol

import httptools
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


class Reader(Protocol):
    """Whom a parser calls; beside httptools' own ``on_...``."""

    def head_again(self) -> bytes:
        """The head to parse before the body of a request that offered another protocol; empty where it has no body."""


class Parser(httptools.HttpRequestParser):
    """Takes a request that offers another protocol for one without the offer, which no server has to take up.

    Java's client offers HTTP/2 with its first request. httptools ends such a request with its head and leaves the rest to the
    other protocol: so the rest is parsed behind a head that announces the body alone.
    """

    def __init__(self, protocol: Reader) -> None:
        self._protocol = protocol
        self._begin()

    def _begin(self) -> None:
        super().__init__(self._protocol)
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn has it

    def feed_data(self, data: Any) -> None:
        """Parse bytes, with the protocol's ``on_...`` called on the way."""
        while data:
            try:
                super().feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                data = self._protocol.head_again() + data[offer.args[0] :]
                self._begin()  # what has read a head that ends the connection would pass over all that follows


def framed(cycle: RequestResponseCycle, app: Any) -> Any:
    """``app`` for the client of a request: for what it knows of HTTP, and for what it still sends."""
    if cycle.scope["http_version"] == "1.0":
        app = without_chunks(cycle, app)
    return app if cycle.keep_alive else open_for_the_body(cycle, app)


def open_for_the_body(cycle: RequestResponseCycle, app: Any) -> Any:
    """``app`` for a client that has the connection closed behind the answer: not before its body has come.

    A connection that is closed on bytes nobody has read is reset, and who still sends then never reads why it was refused.
    """

    async def answering(scope: Scope, receive: Receive, send: Send) -> None:
        async def sending(message: Message) -> None:
            if cycle.more_body and message["type"] == "http.response.body" and not message.get("more_body"):
                cycle.keep_alive = True  # or uvicorn closes at once; the head has said before that it will be closed
            await send(message)

        await app(scope, receive, sending)

    return answering


def without_chunks(cycle: RequestResponseCycle, app: Any) -> Any:
    """``app`` for a client of HTTP/1.0, which knows no chunks: an answer without a length ends where the connection does."""

    async def answering(scope: Scope, receive: Receive, send: Send) -> None:
        has_length = False

        async def sending(message: Message) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                has_length = any(name.lower() == b"content-length" for name, _ in message["headers"])
                cycle.chunked_encoding = None if has_length else False  # what uvicorn has decided when it is not None
            elif not has_length:
                cycle.expected_content_length = len(message.get("body", b""))  # uvicorn compares each part with it
            await send(message)

        await app(scope, receive, sending)

    return answering
