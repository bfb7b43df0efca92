"""``unbind bench step``: what the edit of one layer takes in a decode step, by torch and by kernels."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from server.cli.bench import app as bench
from server.cli.console import AsJson, clear_errors, numbers, screen, write_json
from server.cli.models import Device, dtype_of


def step(
    device: Device = "cpu",
    dtype: Annotated[str, typer.Option(help="Of the states: float32, bfloat16.")] = "bfloat16",
    size: Annotated[int, typer.Option(min=16, help="Numbers of a state.")] = 3584,
    requests: Annotated[str, typer.Option(help="Requests of a step, with commas.")] = "1,16,64",
    modules: Annotated[str, typer.Option(help="Modules, with commas.")] = "1,64",
    repeats: Annotated[int, typer.Option(min=3, help="Alternating repeats.")] = 15,
    as_json: AsJson = False,
) -> None:
    """What the edit of one layer takes in a decode step, by operations of torch and by kernels; random modules, no model."""
    import torch

    from server.bench.step import run

    with clear_errors():
        found = run(
            torch.device(device),
            dtype=dtype_of(dtype),
            size=size,
            batches=numbers(requests, int, "--requests", "1,64") or (),
            modules=numbers(modules, int, "--modules", "1,64") or (),
            repeats=repeats,
        )
    if as_json:
        write_json({"step": found})
        return
    table = Table("modules", "gates", "requests", "by", "alone, ms", "until launched", "in a row")
    for one in found:
        for way in ("torch", "kernels"):
            if way in one:
                times = (f"{one[way][name]:.3f}" for name in ("alone_ms", "launched_ms", "in_a_row_ms"))
                table.add_row(str(one["modules"]), one["gates"], str(one["requests"]), way, *times)
    screen.print(table)


def register(_: typer.Typer) -> None:
    """Add the command to ``unbind bench``."""
    bench.command("step")(step)
