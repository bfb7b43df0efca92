"""``unbind bench scale``: what a takedown takes at real model sizes, measured in part and predicted for the rest."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from server.cli.bench import app as bench
from server.cli.console import AsJson, clear_errors, notes, numbers, progress_bars, screen, write_json
from server.cli.models import dtype_of
from unbind_core.errors import DataError
from unbind_core.files import told


def scale(
    config: Annotated[
        str, typer.Option(help="Architecture: qwen2.5-coder-0.5b, -1.5b, -7b, starcoder2-3b, codellama-7b.")
    ] = "qwen2.5-coder-0.5b",
    layers: Annotated[str, typer.Option(help="Decoder layers that are measured, with commas; rows grow along.")] = "1",
    forget_rows: Annotated[int, typer.Option(min=1, help="Forget rows of the first measurement.")] = 12,
    retain_rows: Annotated[int, typer.Option(min=10, help="Retain rows of the first measurement.")] = 24,
    tokens: Annotated[int, typer.Option(min=16, help="Tokens of a row that is measured.")] = 32,
    full: Annotated[str, typer.Option(help="Forget rows, retain rows and tokens that are predicted.")] = "300,2700,512",
    modules: Annotated[str, typer.Option(help="Numbers of modules whose filter is timed.")] = "1,64,1000",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    as_json: AsJson = False,
) -> None:
    """Seconds, peak memory and disk of every stage by layers and rows, with random weights and no download."""
    from server.bench.scale import figures as figures_of
    from server.bench.scale.world import known

    with clear_errors(), progress_bars(quiet=False) as progress:
        known(config)
        wanted = dtype_of(dtype)
        counts = numbers(layers, int, "--layers", "1,2") or (1,)
        whole = numbers(full, int, "--full", "300,2700,512") or ()
        if len(whole) != 3 or min((*whole, *counts)) < 1:
            raise DataError(
                "full: give forget rows, retain rows and tokens of a row, as in 300,2700,512; layers from 1 on"
            )
        sizes = [
            figures_of.Size(count, forget_rows * (i + 1), retain_rows * (i + 1), tokens)
            for i, count in enumerate(counts)
        ]
        figures = figures_of.figures(
            config,
            sizes,
            figures_of.Size(0, *whole),
            dtype=wanted,
            device=device,
            modules=numbers(modules, int, "--modules", "1,64,1000") or (),
            progress=progress,
            report=lambda line: notes.print(line, highlight=False, soft_wrap=True),
        )
    if as_json:
        write_json(figures)
        return
    table = Table("layers", "rows", "stage", "seconds", "planned", "memory", "planned ")
    for one in figures["measured"]:
        for name, stage in one["stages"].items():
            table.add_row(
                str(one["layers"]),
                f"{one['forget']} / {one['retain']}",
                name,
                f"{stage['seconds']:.1f}",
                f"{stage['planned_seconds']:.1f}",
                told(stage["memory_bytes"]),
                told(stage["planned_memory_bytes"]),
            )
    screen.print(table)
    made = figures["predicted"]
    screen.print(
        f"predicted of {made['layers']} layers, {made['forget']} forget and {made['retain']} retain rows of {made['length']} "
        f"tokens: {told(made['memory_bytes'])} on {device} at most, {told(made['disk_bytes'])} of cache, {made['seconds']:.0f} s"
    )
    edits = Table("filter", "kind", "modules", "edit, ms", "over a layer", "over a step")
    for cost in figures["filter"]:
        edits.add_row(
            cost["phase"],
            cost["kind"],
            str(cost["modules"]),
            f"{cost['edit_ms']:.2f}",
            f"{cost['over_a_layer']:.2f}",
            f"{cost['over_a_step']:.3f}",
        )
    screen.print(edits)


def register(_: typer.Typer) -> None:
    """Add the command to ``unbind bench``."""
    bench.command("scale")(scale)
