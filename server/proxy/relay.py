"""Answers of the other server on their way to the client: whole, or as a stream that begins once its first event is there."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from typing import Any, TypeVar

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from server.api.inference.answers import DONE, broken
from server.api.inference.written import rewritable
from server.errors import ApiError, response
from server.outage import apart
from server.proxy.events import DONE as DONE_DATA
from server.proxy.events import events, parsed
from server.proxy.following import Following
from server.proxy.refusal import Unguardable
from server.proxy.service import GuardService
from server.proxy.upstream import EVENTS, JSON, Refused, Upstream, broken_off, failures, refusal_of, whole

LONG_BODY = 100_000  # bytes of a request from which on reading what the client sent may take long
T = TypeVar("T")


class Relay:
    """One call: what is asked of the other server, and how its answer is followed.

    ``checked`` gives of a message of the other server what a client may read; ``ended`` is told at the end, whatever it was.
    """

    def __init__(
        self,
        served: GuardService,
        path: str,
        body: bytes,
        following: Following,
        *,
        headers: Mapping[str, str],
        checked: Callable[[str], str],
        ended: Callable[[Relay], None],
    ) -> None:
        self.following, self.headers, self.body = following, dict(headers), body
        self._served, self._path = served, path
        self._checked, self._ended = checked, ended
        self._started = time.perf_counter()

    async def answer(self) -> bytes:
        """The answer at once. Raises ApiError."""
        try:
            with refusals(self._checked):
                async with self._served.running(), self._served.upstream.asked(self._path, self.body, JSON) as answer:
                    raw = await whole(answer)
                return await self._followed(self.following.whole, raw, raw)
        finally:
            self._ended(self)

    async def stream(self, *, to_the_end: bool) -> AsyncGenerator[bytes]:
        """The answer in parts; where guards have ended all of it the rest is waited for only if ``to_the_end``. Raises ApiError."""
        following, first = self.following, True
        try:
            with refusals(self._checked):
                async with (
                    self._served.running(),
                    self._served.upstream.asked(self._path, self.body, EVENTS) as answer,
                    aclosing(events(answer.aiter_raw())) as found,
                ):
                    async for event in found:
                        following.pass_by(event.beside)
                        if event.data is None:
                            yield event.raw
                            continue
                        if event.data == DONE_DATA:
                            for part in following.finish():
                                yield part
                            yield event.raw
                            return
                        for part in await self._followed(following.take, event.data, event.raw):
                            if first:
                                self._served.telemetry.first_token.observe(time.perf_counter() - self._started)
                            first = False
                            yield part
                        if following.cut_short and not to_the_end:
                            yield DONE
                            return
                if not following.all_ended:
                    raise broken_off("the upstream ended its stream in the middle of an answer; try again")
        finally:
            self._ended(self)

    async def _followed(self, work: Callable[[dict[str, Any], bytes], T], data: str | bytes, raw: bytes) -> T:
        """``work`` of what is read of ``data``; on a thread where both may take so long that others would wait."""

        def read() -> T:
            try:
                return work(_no_error(parsed(data)), raw)
            except RecursionError:
                raise Unguardable("it is nested too deeply") from None

        return await apart(read) if len(self.body) > LONG_BODY or len(raw) > LONG_BODY else read()


def _no_error(document: dict[str, Any]) -> dict[str, Any]:
    """The document, where it does not say that it failed, whatever its status. Raises Refused."""
    if document.get("error") or document.get("object") == "error":
        raise refusal_of(document, 502)
    return document


@contextmanager
def refusals(checked: Callable[[str], str] = str) -> Iterator[None]:
    """What the other server refuses, what cannot be followed and what fails on the way, as errors of this API."""
    try:
        with failures():
            yield
    except Refused as refused:
        raise refused.told(checked(refused.message)) from None
    except Unguardable as error:
        text = f"the upstream's answer cannot be followed, so it is not passed on: {error}"
        raise ApiError(502, text, code="unguardable_answer") from None


async def models(upstream: Upstream, path: str) -> dict[str, Any]:
    """What the other server says of its models. Raises ApiError."""
    with refusals():
        async with upstream.asked(path, None, JSON) as answer:
            raw = await whole(answer)
        try:
            rewritable(raw.decode("utf-8-sig"))
        except ValueError:
            raise Unguardable("it is no JSON that can be written again") from None
        return parsed(raw)


class PassedEvents(StreamingResponse):
    """Events as bytes. What fails before the first is an error with its own status, what fails later the last event."""

    def __init__(self, relay: Relay, *, to_the_end: bool) -> None:
        self._parts = relay.stream(to_the_end=to_the_end)
        headers = {**relay.headers, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__((), media_type=EVENTS, headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send; whatever ends it, the other server is let go."""
        async with aclosing(self._parts):
            await super().__call__(scope, receive, send)

    async def stream_response(self, send: Send) -> None:
        """The first event waited for, then all of them."""
        try:
            first = await anext(self._parts, b"")
        except ApiError as error:
            refusal = response(error)
            await send({"type": "http.response.start", "status": refusal.status_code, "headers": refusal.raw_headers})
            await send({"type": "http.response.body", "body": refusal.body})
            return
        self.body_iterator = self._all(first)
        await super().stream_response(send)

    async def _all(self, first: bytes) -> AsyncIterator[bytes]:
        yield first
        try:
            async for part in self._parts:
                yield part
        except ApiError as error:
            yield broken(error)
