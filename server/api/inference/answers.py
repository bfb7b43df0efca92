"""How answers leave: whole as JSON, or as server-sent events; a client that goes away takes its requests with it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from server.api.inference.generation import Generation, Result
from server.errors import ApiError, error_body, is_anthropic, response

DONE = b"data: [DONE]\n\n"
STREAMED: Any = {
    200: {"content": {"text/event-stream": {}}}
}  # for the description of a route whose answer may be a stream
INLINE = 512  # tokens with scores that the event loop writes itself: some 10 ms
_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
T = TypeVar("T")


def event_bytes(event: Any) -> bytes:
    """One event, ended as the protocol wants it."""
    return b"data: " + _encode(event).encode() + b"\n\n"


def named_bytes(event: Any) -> bytes:
    """One event under the name of its ``type``, as the streams of responses and messages have it."""
    return f"event: {event['type']}\n".encode() + event_bytes(event)


def broken(error: ApiError, path: str = "", done: bytes = DONE) -> bytes:
    """How a stream ends that has begun and failed: as the clients that ask at ``path`` raise it. ``done``: the last line there."""
    body = error_body(error, path)
    return named_bytes(body) if is_anthropic(path) else event_bytes(body) + done


async def whole(request: Request, generation: Generation, shape: Callable[[list[Result]], Any]) -> Response:
    """The answer as JSON."""
    try:
        results = await unless_gone(request, generation.whole())
        if results is None:
            return Response(status_code=499)
        scored = sum(len(result.logprobs) + len(result.prompt_logprobs) for result in results)
        made = await off_loop(scored, lambda: (JSONResponse if scored <= INLINE else _Large)(shape(results)))
        made.headers.update(generation.headers)
        return made
    finally:
        generation.cancel()


async def off_loop(scored: int, work: Callable[[], T]) -> T:
    """``work()``, in a thread where ``scored`` tokens with their alternatives are many: it would hold up everybody else."""
    return work() if scored <= INLINE else await asyncio.to_thread(work)


class _Large(JSONResponse):
    """Written piece by piece: the library writes whole texts at once, and lets no other thread go on meanwhile."""

    def render(self, content: Any) -> bytes:
        """The same bytes."""
        written = bytearray()
        for piece in json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).iterencode(content):
            written += piece.encode()
        return bytes(written)


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """What ``work`` gives; None, and it is ended, where the client goes away before."""
    working = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, gone):
            task.cancel()
            with suppress(asyncio.CancelledError, ApiError):
                await task


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """Server-sent events; whatever ends the connection frees the requests. ``done``: the last line, where there is one;
    ``encode``: an event to its bytes.

    Nothing is sent before the first event is there: what fails until then is an error with its own status.
    """

    def __init__(
        self,
        generation: Generation,
        events: AsyncIterator[dict[str, Any]],
        done: bytes = DONE,
        encode: Callable[[Any], bytes] = event_bytes,
    ) -> None:
        self._generation = generation
        self._events, self._done, self._as_bytes = events, done, encode
        self._path = ""
        headers = {**generation.headers, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__((), media_type="text/event-stream", headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send, and put away."""
        self._path = scope["path"]
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._generation.cancel()

    async def stream_response(self, send: Send) -> None:
        """The first event waited for, then all of them."""
        try:
            first = await anext(self._events)
        except ApiError as error:
            refusal = response(error, self._path)
            await send({"type": "http.response.start", "status": refusal.status_code, "headers": refusal.raw_headers})
            await send({"type": "http.response.body", "body": refusal.body})
            return
        self.body_iterator = self._encoded(first)
        await super().stream_response(send)

    async def _encoded(self, first: dict[str, Any]) -> AsyncIterator[bytes]:
        yield self._as_bytes(first)
        try:
            async for event in self._events:
                yield self._as_bytes(event)
        except ApiError as error:
            yield broken(error, self._path, self._done)
            return
        if self._done:
            yield self._done
