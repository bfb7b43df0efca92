"""What the port answers while the model is loaded and the engine starts: alive, not ready, come back.

``unbind serve`` binds before it loads, so that nobody meets a closed port, and hands the same socket on to the server.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import uvicorn
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import ApiError, response
from server.http.connections import ServerConfig
from server.settings import Settings
from unbind_core.errors import UnbindError

ASKED_SECONDS = 1.0  # for who has connected to send a request, before the connection is closed unanswered
LOOK_SECONDS = 0.005  # between two looks at who has


class _Loading(uvicorn.Server):
    """Ends once it has answered whoever it accepted: it may have been a moment before."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept nobody else, then answer, then end."""
        for server in self.servers:
            server.close()
        for _ in range(round(ASKED_SECONDS / LOOK_SECONDS)):
            if all(one.cycle is not None for one in self.server_state.connections):  # type: ignore[union-attr]
                break
            await asyncio.sleep(LOOK_SECONDS)
        await super().shutdown(sockets)


async def _not_ready(scope: Scope, receive: Receive, send: Send) -> None:
    """The whole application."""
    if scope["path"] == "/health":
        await JSONResponse({"status": "ok"})(scope, receive, send)
        return
    error = ApiError(503, "the server is loading its model", code="not_ready", headers={"Retry-After": "2"})
    await response(error, scope["path"])(scope, receive, send)


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address, port 0 for any free one. Raises UnbindError that names the address and the remedy."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with ExitStack() as unless_bound:
            bound = unless_bound.enter_context(socket.socket(family, kind, protocol))
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            unless_bound.pop_all()
    except OSError as error:
        raise UnbindError(
            f"cannot listen on {host}:{port} ({error.strerror}); choose another --host or --port"
        ) from None
    return bound


@contextmanager
def not_ready(bound: socket.socket, settings: Settings) -> Iterator[None]:
    """Answer 200 at ``/health`` and 503 at everything else inside the block; afterwards connections wait for who comes next."""
    bound.listen(2048)
    server = _Loading(ServerConfig(_not_ready, settings, lifespan="off", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, args=([bound.dup()],), name="unbind-loading", daemon=True)
    thread.start()
    while thread.is_alive() and not server.started:  # else it would not hear that it is to end
        time.sleep(0.005)
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()


def after_start(application: ASGIApp, then: Callable[[], None], ends: Callable[[], bool] = lambda: False) -> ASGIApp:
    """The application, which calls ``then``, in a thread, once it has started and before anybody listens for it. A start that
    fails as the server ``ends`` is told of in a line, without the traceback of what broke off.
    """

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        async def told(message: Message) -> None:
            if message["type"] == "lifespan.startup.complete":
                await asyncio.to_thread(then)
            elif message["type"] == "lifespan.startup.failed" and ends():
                message = {**message, "message": "a signal came while the server started: the start was given up"}
            await send(message)

        await application(scope, receive, told if scope["type"] == "lifespan" else send)

    return wrapped
