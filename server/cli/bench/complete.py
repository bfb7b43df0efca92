"""``unbind bench complete``: completions of fits and measurements against the library's own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from server.cli.bench import Config, subject
from server.cli.bench import app as bench
from server.cli.console import AsJson, clear_errors, progress_bars, screen, write_json
from server.cli.models import Device, Model
from unbind_core.errors import UnbindError
from unbind_core.files import told


def complete(
    model: Model = None,
    adapter: Annotated[Path | None, typer.Option(help="LoRA adapter folder.")] = None,
    config: Config = None,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    device: Device = "cpu",
    workload: Annotated[str, typer.Option(help="Rows x prompt tokens -> new tokens.")] = "24x64->64",
    temperature: Annotated[float, typer.Option(help="Of the sampled ones, above 0.")] = 0.8,
    repeats: Annotated[int, typer.Option(min=1, help="Alternating repeats; figures are their medians.")] = 5,
    as_json: AsJson = False,
) -> None:
    """How fits and measurements complete, against the library's generate: seconds and memory, greedy and sampled."""
    from server.bench import completing
    from server.bench.serve import Workload

    with clear_errors(), progress_bars(quiet=False) as progress:
        load = Workload.parse(workload)
        if not temperature > 0:
            raise UnbindError(f"--temperature: {temperature} is not above 0; greedy completions are measured anyway")
        figures = completing.run(
            subject(model, adapter, config, dtype, device),
            load,
            temperature=temperature,
            repeats=repeats,
            progress=progress,
        )
    if as_json:
        write_json(figures)
        return
    table = Table("completions", "seconds", "library", "gain, median", "of the minima", "memory", "library ")
    for name in ("greedy", "sampled"):
        found = figures[name]
        ways = [found[way] for way in (completing.OURS, completing.LIBRARY)]
        table.add_row(
            name,
            *(f"{way['seconds']:.2f}" for way in ways),
            *(f"{found['gain'][which]:.2f}" for which in ("median", "of_minima")),
            *(told(way["memory_bytes"]) for way in ways),
        )
    screen.print(table)


def register(_: typer.Typer) -> None:
    """Add the command to ``unbind bench``."""
    bench.command("complete")(complete)
