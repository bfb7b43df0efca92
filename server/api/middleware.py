"""Pure ASGI middleware, so that disconnects reach the routes.

From the outside in: request ids, metrics and log lines; the profile in the path; size and time limits of the body; a time limit.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from operator import itemgetter

from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.api.inference.answers import broken
from server.api.profiles import PROFILE_KEY
from server.errors import REFUSED_KEY, ApiError, is_anthropic, response
from server.exporting.requests import TRACE_KEY, RequestTrace
from server.settings import Settings

log = logging.getLogger("unbind.http")
REQUEST_ID = "x-request-id"
LEFT = 499  # the status of what a client did not wait for
ADMINISTRATION = "/admin/"  # where the paths of the administrator begin
_ACCEPTABLE = re.compile(r"[A-Za-z0-9._-]{1,128}")


class RequestLog:
    """Gives every request an id (the client's, where it is a sane one), and counts and times it by route."""

    def __init__(self, app: ASGIApp, owner: FastAPI) -> None:
        self._app, self._owner = app, owner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID, "")
        request_id = given if _ACCEPTABLE.fullmatch(given) else uuid.uuid4().hex
        status, left, started = 0, False, time.perf_counter()
        self._trace(scope)

        async def noticing() -> Message:
            nonlocal left
            message = await receive()
            left = left or message["type"] == "http.disconnect"
            return message

        async def with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                # a body that never came is no bad one; what went wrong here stays told, whoever waits
                status = LEFT if left and message["status"] < 500 else message["status"]
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID] = request_id
                if is_anthropic(scope["path"]):
                    headers["request-id"] = request_id  # as those clients read it
            await send(message)

        try:
            await self._app(scope, noticing, with_id)
        except asyncio.CancelledError:
            if self._owner.state.service.ready:
                raise
            # the server ends, and the client has not taken its answer in time: nothing that a traceback would explain
        finally:
            route = getattr(scope.get("route"), "path", "unknown")
            seconds = time.perf_counter() - started
            status = status or (LEFT if left else 500)  # a stream that nobody waits for ends before it begins
            telemetry = self._owner.state.service.telemetry
            telemetry.requests.labels(route, str(status)).inc()
            telemetry.seconds.labels(route).observe(seconds)
            telemetry.denied(scope.get(REFUSED_KEY))
            fields = {
                "request_id": request_id,
                "method": scope["method"],
                "route": route,
                "status": status,
                "seconds": round(seconds, 4),
                "profile": scope.get(PROFILE_KEY),
            }
            if (trace := scope.get(TRACE_KEY)) is not None:
                trace.end(route, status, request_id)
            log.info("%s %s %d %.3fs id=%s", scope["method"], route, status, seconds, request_id, extra=fields)

    def _trace(self, scope: Scope) -> None:
        """Have the requests of clients followed, where somebody listens."""
        service = self._owner.state.service
        if service.tracing is not None and scope["method"] == "POST" and not scope["path"].startswith(ADMINISTRATION):
            parent = Headers(scope=scope).get("traceparent")
            settings = service.settings
            scope[TRACE_KEY] = RequestTrace(
                service.tracing, parent, settings.host, settings.served_name, time.time_ns()
            )


class ProfilePath:
    """``/p/NAME/v1/...`` is ``/v1/...`` under the profile NAME. Clients that can set nothing but an address reach it."""

    _pattern = re.compile(r"/p/([^/]+)(/(?!p/|admin/|console/).+)")

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] == "http" and (found := self._pattern.fullmatch(scope["path"])):
            scope[PROFILE_KEY], scope["path"] = found[1], found[2]
            scope["raw_path"] = found[2].encode()
        await self._app(scope, receive, send)


class TimeLimit:
    """504 for a request that takes too long; a stream that has begun ends with the error as its last event."""

    def __init__(self, app: ASGIApp, seconds: float) -> None:
        self._app, self._seconds = app, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request. Those of the administrator may follow a job for as long as it takes."""
        if scope["type"] != "http" or scope["path"].startswith(ADMINISTRATION):
            await self._app(scope, receive, send)
            return
        content_type: str | None = None
        ended = False

        async def noticing(message: Message) -> None:
            nonlocal content_type, ended
            if message["type"] == "http.response.start":
                content_type = Headers(raw=message["headers"]).get("content-type", "")
            elif message["type"] == "http.response.body":
                ended = not message.get("more_body", False)
            await send(message)

        try:
            async with asyncio.timeout(self._seconds) as limit:
                await self._app(scope, receive, noticing)
        except TimeoutError:
            if not limit.expired() or ended:
                raise
            took = f"the request took longer than {self._seconds:g} s, its wait in the queue counted, and was given up"
            text = f"{took}; ask for fewer tokens, or when fewer requests wait"
            error = ApiError(504, text, code="request_timeout")
            if content_type is None:
                await response(error, scope["path"])(scope, receive, send)
                return
            if content_type.startswith("text/event-stream"):
                last = broken(error, scope["path"])
                await send({"type": "http.response.body", "body": last, "more_body": False})
                return
            raise


class BodyLimit:
    """413 for a body larger than the limit, announced or not; 408 for one that does not arrive; 415 for one that is compressed,
    whose size is not known.

    What the administrator posts may be larger: uploads are, and requests for inference are held by everybody.
    """

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app, self._seconds = app, settings.body_timeout
        self._uploads = ("max_body_bytes", settings.max_body_bytes)
        self._others = min(("max_inference_bytes", settings.max_inference_bytes), self._uploads, key=itemgetter(1))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name, limit = self._uploads if scope["path"].startswith(ADMINISTRATION) else self._others
        too_large = ApiError(413, f"the body is larger than {limit} bytes ({name})", code="body_too_large")
        headers = Headers(scope=scope)
        if headers.get("content-encoding", "").strip().lower() not in ("", "identity"):
            await response(_compressed(), scope["path"])(scope, receive, send)
            return
        announced = headers.get("content-length", "0")
        if announced.isdigit() and int(announced) > limit:
            await response(too_large, scope["path"])(scope, receive, send)
            return
        taken, whole, started = 0, False, False
        deadline = asyncio.get_running_loop().time() + self._seconds

        async def limited() -> Message:
            nonlocal taken, whole
            if whole:  # what comes now is that the client leaves
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                text = f"the body did not arrive within {self._seconds:g} s (body_timeout)"
                raise _Refused(ApiError(408, text, code="body_timeout", headers={"Connection": "close"})) from None
            taken += len(message.get("body", b""))
            if taken > limit:
                raise _Refused(too_large)
            whole = not message.get("more_body", False)
            return message

        async def noticing(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, limited, noticing)
        except _Refused as refused:
            if started:
                raise
            await response(refused.error, scope["path"])(scope, receive, send)


def _compressed() -> ApiError:
    text = "a compressed body is not read; send it as it is, without the header Content-Encoding"
    return ApiError(415, text, code="unsupported_encoding")


class _Refused(BaseException):
    """Passes through the application, which would take an ordinary exception for an error of its own."""

    def __init__(self, error: ApiError) -> None:
        self.error = error
