"""``unbind bench cpu``: what each of the processor's devices gains alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from server import demo
from server.cli.bench import app as bench
from server.cli.console import AsJson, clear_errors, progress_bars, screen, write_json
from server.cli.models import Model


def cpu(
    model: Model = None,
    adapter: Annotated[Path | None, typer.Option(help="LoRA adapter folder.")] = None,
    workloads: Annotated[str, typer.Option(help="Requests x prompt tokens -> new tokens, with commas.")] = "",
    repeats: Annotated[int, typer.Option(min=1, help="Alternating repeats of each pair.")] = 15,
    as_json: AsJson = False,
) -> None:
    """The engine with everything that `unbind_core.cpu` has against the engine without one of them."""
    from server.bench import cpu as figures_of

    names = tuple(part.strip() for part in workloads.split(",") if part.strip())
    with clear_errors(), progress_bars(quiet=False) as progress:
        checkpoint = figures_of.Checkpoint(model or demo.BASE, adapter or (None if model else demo.ADAPTER))
        figures = figures_of.run(
            checkpoint, workloads=names or figures_of.WORKLOADS, repeats=repeats, progress=progress
        )
    if as_json:
        write_json(figures)
        return
    table = Table("workload", "seconds", "device", "gain, median", "of the minima")
    for load, found in figures["workloads"].items():
        for name, gain in found["gain"].items():
            table.add_row(load, f"{found['seconds']:.3f}", name, f"{gain['median']:.2f}", f"{gain['of_minima']:.2f}")
    screen.print(table)


def register(_: typer.Typer) -> None:
    """Add the command to ``unbind bench``."""
    bench.command("cpu")(cpu)
