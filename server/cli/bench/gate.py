"""``unbind bench gate``: what gates and corrections reach on forget sets of growing size."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from server.cli.bench import app as bench
from server.cli.console import AsJson, clear_errors, notes, numbers, progress_bars, screen, write_json
from server.cli.models import Device, load
from unbind_core import UnbindError


def gate(
    sizes: Annotated[str, typer.Option(help="Sizes of the forget sets, as in 24,40.")] = "5,12,24,40,120,300",
    gates: Annotated[
        str, typer.Option(help="Of paper, paper-strict and auto, as in paper,auto; empty: models alone.")
    ] = "paper,auto",
    attempts: Annotated[
        int, typer.Option(min=1, help="Completions a row and way to ask, under gate auto; 5 is the paper's.")
    ] = 5,
    policy: Annotated[str | None, typer.Option(help="What gate auto aims at: rewrite or silent.")] = None,
    reference: Annotated[
        str,
        typer.Option(
            help="What gate auto leads towards: named, the demo's adapter that was trained on the retained rows alone; base, its "
            "model without an adapter; or itself, as where a model has none."
        ),
    ] = "named",
    joint: Annotated[bool, typer.Option(help="Ten modules together as well.")] = True,
    overlap: Annotated[bool, typer.Option(help="Two modules that share rows as well.")] = False,
    many: Annotated[str, typer.Option(help="Numbers of modules of few rows each, as in 1,5,20,60.")] = "",
    many_rows: Annotated[int, typer.Option(min=1, max=300, help="Rows of each of those.")] = 5,
    cache: Annotated[Path | None, typer.Option(help="Folder for what depends on the retain rows alone.")] = None,
    keep: Annotated[Path | None, typer.Option(help="Folder for the modules and each size's figures.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fit and measure on a third of the retain rows: a look, coarser figures.")
    ] = False,
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """The paper's gate and the measured choice on forget sets of growing size; with all sizes it takes an hour or two."""
    from server.bench.gate.figures import gate_figures
    from unbind_core.fitting.corrections.reference import Kind

    with clear_errors():
        chosen = numbers(sizes or None, int, "--sizes", "24,40") or ()
        counts = numbers(many or None, int, "--many", "1,5,20") or ()
        if not (chosen or joint or overlap or counts) or any(not 3 <= size <= 300 for size in chosen):
            raise UnbindError(
                "--sizes: whole numbers from 3 to 300, as in 24,40; empty for --joint, --overlap or --many"
            )
        if any(not 1 <= count <= 300 // many_rows for count in counts):
            raise UnbindError(f"--many: whole numbers from 1 to {300 // many_rows}, as set C has 300 rows")
        wanted = [gate.strip() for gate in gates.split(",") if gate.strip()]
        if not set(wanted) <= {"paper", "paper-strict", "auto"}:
            raise UnbindError(f"--gates: '{gates}' holds another than paper, paper-strict and auto")
        if reference not in list(Kind):
            raise UnbindError(f"--reference: '{reference}' is none of named, base and itself")
        if keep is not None:
            keep.mkdir(parents=True, exist_ok=True)
        loaded = load(None, None, "float32", device)
        with progress_bars(as_json) as progress:
            table = gate_figures(
                loaded,
                sizes=chosen,
                gates=wanted,
                policy=policy,
                reference=Kind(reference),
                attempts=attempts,
                joint=joint,
                overlap=overlap,
                many=counts,
                many_rows=many_rows,
                cache=cache,
                keep=keep,
                quick=quick,
                progress=progress,
                report=notes.print,
            )
    if as_json:
        write_json(table)
        return
    for size, entry in table["sizes"].items():
        _show(f"{size} rows", {gate: entry[gate] for gate in wanted})
        others = {name: entry[name] for name in ("retrained", "reference") if name in entry}
        written = {name: entry[name]["output"] for name in ("before", *wanted)} | others
        _show(f"{size} rows: what is written in their place", written)
    if joint:
        screen.print({key: value for key, value in table["joint"].items() if key != "modules"})
    if overlap:
        screen.print(table["overlap"])
    for count, entry in table.get("many", {}).items():
        screen.print({f"{count} modules": entry})


def _show(title: str, systems: Mapping[str, Mapping[str, Any]]) -> None:
    """A line a measure, a column a system."""
    rows = Table("measure", *systems, title=title)
    for key, value in next(iter(systems.values()), {}).items():
        if not isinstance(value, dict | list):
            rows.add_row(key, *(_cell(system[key]) for system in systems.values()))
    if rows.row_count:
        screen.print(rows)


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def register(_: typer.Typer) -> None:
    """Add the command to ``unbind bench``."""
    bench.command("gate")(gate)
