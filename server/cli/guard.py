"""``unbind guard``: stand in front of another OpenAI-compatible server, and let no protected run through."""

from __future__ import annotations

import json
import shlex

import typer

from server.cli.console import clear_errors, screen
from server.cli.flags import with_settings
from server.cli.starting.announcing import AS_JSON, AnnouncingServer, run, show
from server.cli.starting.loading import bind
from server.logs import set_up_logging
from server.registry.registry import open_registry
from server.settings import Settings


@with_settings([AS_JSON])
def guard(settings: Settings, as_json: bool) -> None:
    """Guard the server at --upstream: its completions and chats are passed on, and what a takedown protects is not."""
    from server.exposure import check_exposure
    from server.keys import check_keys
    from server.proxy.app import create_guard
    from server.proxy.upstream import checked_address

    set_up_logging(settings.log_level, settings.log_format)
    with clear_errors():
        checked_address(settings.upstream)
        check_exposure(settings)
        open_registry(settings).close()  # a database that cannot be used is told of here
        check_keys(settings)
        listening = bind(settings.host, settings.port)
    app = create_guard(settings)

    def announce(url: str) -> None:
        service = app.state.service
        facts = {"upstream": service.upstream.address, "guards": ", ".join(sorted(service.guards.names)) or "none"}
        asked = json.dumps({"prompt": "def main(", "max_tokens": 32})
        completion = f"curl -s {url}/v1/completions -H 'Content-Type: application/json' -d {shlex.quote(asked)}"
        show(service, "guard", url, facts, [("A completion of the upstream", completion)])
        screen.print("\nCtrl-C ends the guard.", highlight=False)

    run(AnnouncingServer(app, settings, as_json, announce), listening)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("guard")(guard)
