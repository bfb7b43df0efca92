"""Pure ASGI middleware, so that disconnects reach the routes: request ids, metrics and log lines; a body size limit."""

from __future__ import annotations

import logging
import re
import time
import uuid

from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import ApiError, response

log = logging.getLogger("unbind.http")
REQUEST_ID = "x-request-id"
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
        status, started = 500, time.perf_counter()

        async def with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)

        try:
            await self._app(scope, receive, with_id)
        finally:
            route = getattr(scope.get("route"), "path", "unknown")
            seconds = time.perf_counter() - started
            telemetry = self._owner.state.service.telemetry
            telemetry.requests.labels(route, str(status)).inc()
            telemetry.seconds.labels(route).observe(seconds)
            log.info("%s %s %d %.3fs id=%s", scope["method"], route, status, seconds, request_id)


class BodyLimit:
    """413 for a body larger than the limit, whether its length is announced or not."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app, self._limit = app, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "0")
        refusal = response(ApiError(413, f"the body is larger than {self._limit} bytes", code="body_too_large"))
        if announced.isdigit() and int(announced) > self._limit:
            await refusal(scope, receive, send)
            return
        taken, started = 0, False

        async def limited() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self._limit:
                raise _TooLarge
            return message

        async def noticing(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, limited, noticing)
        except _TooLarge:
            if started:
                raise
            await refusal(scope, receive, send)


class _TooLarge(BaseException):
    """Passes through the application, which would take an ordinary exception for an error of its own."""
