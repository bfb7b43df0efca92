"""``unbind serve``: start the server and its worker, and say what to try."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import typer

from server.cli.console import clear_errors, screen
from server.cli.flags import with_settings
from server.cli.starting.announcing import AS_JSON, AnnouncingServer, run, say, show
from server.cli.starting.loading import bind, not_ready
from server.logs import set_up_logging
from server.registry.registry import open_registry
from server.settings import Settings
from unbind_core.errors import UnbindError

if TYPE_CHECKING:
    from server.service import Service


@with_settings([AS_JSON])
def serve(settings: Settings, as_json: bool) -> None:
    """Serve the model with its modules, and a worker for takedowns beside it."""
    from server.app import create_app
    from server.exposure import check_exposure
    from server.keys import check_keys
    from server.service import load_served, planned

    set_up_logging(settings.log_level, settings.log_format)
    with clear_errors():
        if settings.upstream:
            raise UnbindError("upstream: goes with `unbind guard`; this command serves a model of its own")
        check_exposure(settings)
    if not as_json:
        adapted = f" with adapter {settings.adapter}" if settings.adapter else ""
        say(lambda: screen.print(f"loading {settings.model}{adapted} ...", highlight=False, soft_wrap=True))
    with ExitStack() as loading:
        with clear_errors():
            open_registry(settings).close()  # a database that cannot be used is told of before the model is loaded
            check_keys(settings)
            listening = bind(settings.host, settings.port)
            loading.enter_context(not_ready(listening, settings))
            loaded = load_served(settings)
            planned(settings, loaded)  # refuses here, before anything starts
        app = create_app(settings, loaded)

        def told(url: str) -> None:
            announce(settings, url, app.state.service)

        # An engine may take minutes to start, as vLLM does
        run(AnnouncingServer(app, settings, as_json, told, then=loading.close), listening)


def announce(settings: Settings, url: str, service: Service) -> None:
    """Where it listens, and commands to copy that show what it does."""
    from server.cli.starting.tour import tour

    modules = ", ".join(entry.label for entry in service.engine.modules.current.values()) or "none"
    facts = {"console": f"{url}/", "memory": str(service.memory), "modules": modules}
    show(service, settings.served_name, url, facts, tour(settings, url, service))
    screen.print(f"\nCtrl-C ends the server{' and its worker' if settings.worker else ''}.", highlight=False)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("serve")(serve)
