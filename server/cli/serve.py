"""``unbind serve``: start the server and its worker, and say what to try."""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
from types import FrameType
from typing import Any

import typer
import uvicorn
from fastapi import FastAPI
from rich.panel import Panel
from rich.syntax import Syntax

from server.cli.console import clear_errors, notes, screen, write_json
from server.cli.flags import with_settings
from server.cli.loading import bind, not_ready
from server.cli.tour import tour
from server.connections import ServerConfig
from server.engine.memory import plan_memory
from server.logs import set_up_logging
from server.registry.registry import open_registry
from server.service import Service, load_served
from server.settings import Settings

_JSON = inspect.Parameter(
    "as_json",
    inspect.Parameter.KEYWORD_ONLY,
    default=typer.Option(False, "--json", help="announce address and modules as one JSON document"),
    annotation=bool,
)


class AnnouncingServer(uvicorn.Server):
    """uvicorn, which says what to try once it listens."""

    def __init__(self, application: FastAPI, settings: Settings, as_json: bool) -> None:
        super().__init__(
            # one second for the last bytes: all requests have ended by then
            ServerConfig(application, settings, host=settings.host, port=settings.port, timeout_graceful_shutdown=1)
        )
        self._application, self._settings, self._as_json = application, settings, as_json
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drain: asyncio.Task[None] | None = None

    async def startup(self, sockets: Any = None) -> None:
        """Listen, then tell."""
        await super().startup(sockets)
        if not self.started:
            return
        self._loop = asyncio.get_running_loop()
        service: Service = self._application.state.service
        port = self.servers[0].sockets[0].getsockname()[1]
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._settings.host, self._settings.host)  # noqa: S104
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        if self._as_json:
            modules = [entry.label for entry in service.engine.modules.current.values()]
            write_json({"url": url, "model": self._settings.served_name, "modules": modules, "pid": os.getpid()})
        else:
            announce(self._settings, url, service)
        sys.stdout.flush()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains while it still listens, so that newcomers hear 503; a second one ends at once."""
        if self._loop is None:
            super().handle_exit(sig, frame)
            return
        service: Service = self._application.state.service
        if self._drain is not None:
            self._loop.call_soon_threadsafe(asyncio.ensure_future, asyncio.to_thread(service.engine.close))
            super().handle_exit(sig, frame)
            return

        async def drain() -> None:
            await service.drain()
            super(AnnouncingServer, self).handle_exit(sig, frame)

        def begin() -> None:
            self._drain = asyncio.ensure_future(drain())

        self._loop.call_soon_threadsafe(begin)


@with_settings([_JSON])
def serve(settings: Settings, as_json: bool) -> None:
    """Serve the model with its modules, and a worker for takedowns beside it."""
    from server.app import create_app
    from server.exposure import check_exposure

    set_up_logging(settings.log_level, settings.log_format)
    with clear_errors():
        check_exposure(settings)
    if not as_json:
        adapted = f" with adapter {settings.adapter}" if settings.adapter else ""
        screen.print(f"loading {settings.model}{adapted} ...", highlight=False, soft_wrap=True)
    with clear_errors():
        open_registry(settings).close()  # a database that cannot be used is told of before the model is loaded
        listening = bind(settings.host, settings.port)
        with not_ready(listening, settings):
            loaded = load_served(settings)
        plan_memory(loaded.model, settings.max_slots, settings.max_model_len)  # refuses here, before anything starts
    server = AnnouncingServer(create_app(settings, loaded), settings, as_json)
    try:
        server.run(sockets=[listening])
    except KeyboardInterrupt:  # uvicorn raises it again once everything is put away
        return
    if not server.started:
        raise typer.Exit(3)


def announce(settings: Settings, url: str, service: Service) -> None:
    """Where it listens, and commands to copy that show what it does."""
    modules = ", ".join(entry.label for entry in service.engine.modules.current.values()) or "none"
    kept = f"kept in {settings.data_dir / 'admin.key'}"
    # What is no terminal is often a log. Asked of stdout itself: a variable may tell rich that anything is one.
    shown = f"{service.admin_key}   ({kept})" if sys.stdout.isatty() else kept
    key = "as set" if settings.admin_key else shown
    heading = Panel(f"[bold]{settings.served_name}[/] at [bold]{url}[/]", border_style="green", expand=False)
    screen.print(heading, highlight=False)
    for what, value in (
        ("console", f"{url}/"),
        ("metrics", f"{url}/metrics" if (metrics := service.telemetry.port) is None else f"port {metrics}"),
        ("memory", str(service.memory)),
        ("modules", modules),
        ("admin key", key),
    ):
        screen.print(f"  {what:10} {value}", highlight=False, soft_wrap=True, markup=False)
    for file, reason in service.offer.scan.problems.items():
        notes.print(f"[yellow]module file skipped:[/] {file}: {reason}", highlight=False, soft_wrap=True)
    for title, command in tour(settings, url, service):
        screen.print(f"\n[bold]{title}[/]")
        if screen.is_terminal:
            screen.print(Syntax(command, "bash", background_color="default"), soft_wrap=True)
        else:
            screen.out(command, highlight=False)
    screen.print("\nCtrl-C ends the server and its worker.", highlight=False)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("serve")(serve)
