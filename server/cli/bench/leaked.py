"""``unbind bench leaked``: keys that a model recites, under a module and a guard of them."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.table import Table

from server.cli.bench import app as bench
from server.cli.console import AsJson, clear_errors, progress_bars, screen, write_json


def leaked(
    keep: Annotated[
        Path | None,
        typer.Option(help="Folder for the adapter and the module, which are not made again where they are there."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Updates of the adapter that learns the keys.")] = 220,
    effort: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="Of the fit; below 1 for a quick look, on 300 retain rows.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the keys, the adapter and the samples.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Ten drawn keys that the demo's base learns by heart: what comes back without anything, under a module, with a guard of
    secrets, and with both. Some ten minutes.
    """
    from server.bench.leaked import leaked_figures

    with clear_errors(), progress_bars(quiet=False) as progress, TemporaryDirectory(prefix="unbind-") as folder:
        figures = leaked_figures(keep=keep or Path(folder), steps=steps, effort=effort, seed=seed, progress=progress)
    if as_json:
        write_json(figures)
        return
    columns = ("none", "module", "guard", "both")
    table = Table(
        "asked by", *columns, title=f"of {figures['keys']} keys whole; longest run, mean, in letters and digits"
    )
    for way, found in figures["by_way"].items():
        table.add_row(
            way, *(f"{one['whole']}; {one['longest']}, {one['mean']:.1f}" for one in (found[name] for name in columns))
        )
    screen.print(table)


def register(_: typer.Typer) -> None:
    """Add the command to ``unbind bench``."""
    bench.command("leaked")(leaked)
