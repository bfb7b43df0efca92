"""``unbind worker``: a takedown worker of its own, beside those that servers run."""

from __future__ import annotations

import os

import typer

from server.cli.flags import with_settings
from server.settings import Settings
from server.worker.process import WORKER, environment_of


@with_settings([])
def worker(settings: Settings) -> None:
    """Run a takedown worker alone, against the same database, store and data folder as a server."""
    # In place of this process, whose imports a worker has no use for.
    os.execve(WORKER[0], WORKER, environment_of(settings))  # noqa: S606


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("worker")(worker)
