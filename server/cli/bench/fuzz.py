"""``unbind bench fuzz``: hostile requests to a real server; ends with 1 where one broke it or ``/health`` was slow."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from server.cli.bench import app as bench
from server.cli.console import AsJson, clear_errors, notes, screen, write_json
from server.cli.models import Model


def fuzz(
    requests: Annotated[int, typer.Option(min=1, help="How many to send.")] = 2000,
    connections: Annotated[int, typer.Option(min=1, max=256, help="From how many connections at once.")] = 4,
    seed: Annotated[
        int, typer.Option(help="The same seed draws the same requests, up to ids that the server makes.")
    ] = 0,
    model: Model = None,
    keep: Annotated[Path, typer.Option(help="Folder for the requests that failed, with their answers.")] = Path(
        "fuzz-failures"
    ),
    as_json: AsJson = False,
) -> None:
    """Spoilt bodies, uploads and HTTP to every route of a server: no 5xx but 503, and /health within half a second."""
    from server.bench.fuzz import run

    settings: dict[str, object] = {"model": model} if model is not None else {}
    with clear_errors():
        figures = run(
            requests=requests, connections=connections, seed=seed, keep=keep, settings=settings, tell=notes.print
        )
    if as_json:
        write_json(figures)
    else:
        for key, value in figures.items():
            if key != "failures":
                screen.print(f"{key:22} {value}", highlight=False)
        for failure in figures["failures"]:
            screen.print(f"{failure['what']}: {failure['request']} in {failure['file']}", highlight=False)
    if not figures["sound"]:
        raise typer.Exit(1)


def register(_: typer.Typer) -> None:
    """Add the command to ``unbind bench``."""
    bench.command("fuzz")(fuzz)
