"""``unbind bench fleet``: several servers behind a proxy, restarted and killed under load."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

from server.cli.bench import app as bench
from server.cli.console import AsJson, clear_errors, progress_bars, screen, write_json
from server.cli.models import Model


def fleet(
    kills: Annotated[int, typer.Option(min=0, help="How many parts to kill, at random instants.")] = 100,
    model: Model = None,
    clients: Annotated[int, typer.Option(min=1, help="Clients that complete meanwhile.")] = 2,
    pause: Annotated[float, typer.Option(min=0.1, help="Seconds between two kills, on average.")] = 4.0,
    seed: Annotated[
        int | None, typer.Option(help="Of the instants and the victims; the clock where none is given.")
    ] = None,
    keep: Annotated[Path | None, typer.Option(help="Folder for the logs of all processes.")] = None,
    as_json: AsJson = False,
) -> None:
    """Two servers and two workers on PostgreSQL and an S3 store behind nginx: a rolling restart, then kills; what was lost."""
    from server.bench.fleet import drive
    from server.bench.fleet.fleet import fleet as parts
    from server.bench.fleet.parts import s3_python

    chosen = int(time.time()) if seed is None else seed
    with clear_errors(), tempfile.TemporaryDirectory() as folder, progress_bars(quiet=False) as progress:
        python = s3_python()
        where = keep or Path(folder)
        where.mkdir(parents=True, exist_ok=True)
        with parts(where.resolve(), model, python) as running:
            figures = {
                "store": "folder" if python is None else "s3",
                "start_seconds": round(running.start(), 1),
                "rolling": drive.rolling_restart(running, clients),
                **drive.kills(running, kills, seed=chosen, clients=clients, pause=pause, progress=progress),
            }
    if as_json:
        write_json(figures)
        return
    for name, value in figures.items():
        screen.print(f"{name:20} {value}", highlight=False, soft_wrap=True)


def register(_: typer.Typer) -> None:
    """Add the command to ``unbind bench``."""
    bench.command("fleet")(fleet)
