"""The server of a command: it says what to try once it listens, and drains at the first signal."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterable, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any

import typer
import uvicorn
from fastapi import FastAPI
from rich.panel import Panel
from rich.syntax import Syntax
from rich.text import Text

from server.cli.console import notes, screen, write_json
from server.cli.starting.loading import after_start
from server.collector import leave_out_what_stays
from server.http.connections import ServerConfig, allow_descriptors
from server.settings import Settings

if TYPE_CHECKING:
    from server.base_service import BaseService

log = logging.getLogger("unbind.http")
AS_JSON = inspect.Parameter(
    "as_json",
    inspect.Parameter.KEYWORD_ONLY,
    default=typer.Option(False, "--json", help="announce address and modules as one JSON document"),
    annotation=bool,
)


class AnnouncingServer(uvicorn.Server):
    """uvicorn, which says what to try once it listens."""

    def __init__(
        self,
        application: FastAPI,
        settings: Settings,
        as_json: bool,
        announce: Callable[[str], None],
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """``announce`` says at which address it listens, where that is not to be said as JSON. ``then`` is called once the
        application has started, before it listens.
        """

        def started() -> None:
            then()
            leave_out_what_stays()

        served = after_start(application, started, lambda: self.given_up)
        super().__init__(
            # one second for the last bytes: all requests have ended by then
            ServerConfig(served, settings, host=settings.host, port=settings.port, timeout_graceful_shutdown=1)
        )
        self.settings = settings
        self._application, self._as_json, self._announce = application, as_json, announce
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drain: asyncio.Task[None] | None = None

    @property
    def given_up(self) -> bool:
        """Whether a signal came before it had started; ``should_exit`` of some uvicorns also says so of a start that failed."""
        return bool(self._application.state.given_up)

    async def startup(self, sockets: Any = None) -> None:
        """Listen, then tell."""
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # which nohup asks for
            # A terminal that closes, or a tool that means to have files opened anew: what runs is to end in order all the same.
            signal.signal(signal.SIGHUP, lambda _, frame: self.handle_exit(signal.SIGTERM, frame))
        try:
            await super().startup(sockets)
        except SystemExit:
            if not self.given_up:
                raise
        if not self.started:
            return
        self._loop = asyncio.get_running_loop()
        service: BaseService = self._application.state.service
        port = self.servers[0].sockets[0].getsockname()[1]
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.settings.host, self.settings.host)  # noqa: S104
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        if self._as_json:
            modules = [entry.label for entry in service.modules.current.values()]
            say(lambda: write_json({"url": url, "model": service.title, "modules": modules, "pid": os.getpid()}))
        else:
            say(lambda: self._announce(url))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains while it still listens, so that newcomers hear 503; a second one ends at once. One that comes
        before it has started gives the start up.
        """
        if self._loop is None:
            super().handle_exit(sig, frame)
            self._application.state.given_up = True
            if (starting := getattr(self._application.state, "service", None)) is not None:
                starting.give_up()
            return
        service: BaseService = self._application.state.service
        if self._drain is not None:
            self._loop.call_soon_threadsafe(asyncio.ensure_future, service.end_requests(0))
            self._end(sig, frame)
            return

        async def drain() -> None:
            await service.drain()
            self._end(sig, frame)

        def begin() -> None:
            self._drain = asyncio.ensure_future(drain())

        self._loop.call_soon_threadsafe(begin)

    def _end(self, sig: int, frame: FrameType | None) -> None:
        """Tell uvicorn once: told again, it leaves out what puts everything away, and ends with a traceback."""
        if not self.should_exit:
            super().handle_exit(sig, frame)


def say(what: Callable[[], None]) -> None:
    """Say something on standard output, which is no reason not to serve: its reader may have ended, or its disk be full."""
    try:
        what()
        sys.stdout.flush()
    except (OSError, SystemExit) as error:  # the latter is what rich makes of a pipe without a reader
        reason = error if isinstance(error, OSError) else "nobody reads it"
        log.warning("standard output cannot be written (%s); nothing more is said there", reason)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)


def run(server: AnnouncingServer, listening: socket.socket) -> None:
    """Serve until a signal ends it; ends the command with status 3 where it could not start."""
    allow_descriptors(server.settings)
    try:
        server.run(sockets=[listening])
    except KeyboardInterrupt:  # uvicorn raises it again once everything is put away
        return
    if not server.started and not server.given_up:
        raise typer.Exit(3)


def show(
    service: BaseService, title: str, url: str, facts: Mapping[str, str], commands: Iterable[tuple[str, str]]
) -> None:
    """Where it listens, what there is to know, and commands to copy that show what it does."""
    settings, metrics = service.settings, service.telemetry.port
    kept = f"kept in {settings.data_dir / 'admin.key'}"
    # What is no terminal is often a log. Asked of stdout itself: a variable may tell rich that anything is one.
    shown = f"{service.admin_key}   ({kept})" if sys.stdout.isatty() else kept
    screen.print(
        Panel(Text.assemble((title, "bold"), " at ", (url, "bold")), border_style="green", expand=False),
        highlight=False,
    )
    known = {
        **facts,
        "metrics": f"{url}/metrics" if metrics is None else f"port {metrics}",
        "admin key": "as set" if settings.admin_key else shown,
    }
    for what, value in known.items():
        screen.print(f"  {what:10} {value}", highlight=False, soft_wrap=True)
    for file, reason in {**service.offer.scan.problems, **service.offer.guards.problems}.items():
        notes.print(Text("module file skipped:", style="yellow"), f"{file}: {reason}", highlight=False, soft_wrap=True)
    for what, command in commands:
        screen.print(Text(f"\n{what}", style="bold"))
        if screen.is_terminal:
            screen.print(Syntax(command, "bash", background_color="default"), soft_wrap=True)
        else:
            screen.out(command, highlight=False)
