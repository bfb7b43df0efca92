"""Who is let in before a body is read: under which name the server was asked, and with which key.

Pure ASGI, so that nothing is received or parsed for a client that is refused.
"""

from __future__ import annotations

from fastapi import FastAPI, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from server.api.caller import admit, identified_administrator, keys_needed
from server.api.middleware import ADMINISTRATION
from server.api.turnstile import Turnstile
from server.base_service import BaseService
from server.errors import ApiError, response
from server.exposure import is_own_name, on_loopback

WITHOUT_BODY = ("GET", "HEAD", "OPTIONS")  # their routes ask for keys themselves: some are open to all


class OwnName:
    """403 where a page in a browser on this machine had its own name resolve to loopback, to read what needs no key."""

    def __init__(self, app: ASGIApp, owner: FastAPI) -> None:
        self._app, self._owner = app, owner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] == "http":
            served: BaseService = self._owner.state.service
            named = Request(scope).headers.get("host")
            asked_openly = on_loopback(served.settings) and not keys_needed(served)
            if asked_openly and named is not None and not is_own_name(named, served.settings):
                text = (
                    f"'{named[:100]}' is not a name of this server, which asks for no key: use localhost or 127.0.0.1, "
                    "add the name to the setting allowed_hosts, or make a key"
                )
                await response(ApiError(403, text, code="host_not_allowed"), scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)


class KeyFirst:
    """401, 403 and 429 before the body of a request is read; the route's dependency takes the caller found here.

    Those who are let in go on a few at a time.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app, self._turnstile = app, Turnstile()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] == "http" and scope["method"] not in WITHOUT_BODY:
            request = Request(scope)
            try:
                if scope["path"].startswith(ADMINISTRATION):
                    identified_administrator(request)
                else:
                    admit(request)
            except ApiError as error:
                await response(error, scope["path"])(scope, receive, send)
                return
            await self._turnstile.through()
        await self._app(scope, receive, send)
