"""``unbind show`` and ``unbind verify``: look at a module file, measure what the module does."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from server import demo
from server.cli.console import AsJson, clear_errors, notes, progress_bars, screen, show_fields, write_json
from server.cli.fit import Adapter, Dtype
from server.cli.models import Device, FimTemplate, Model, forget_rows, load, retain_rows
from unbind_core.errors import UnbindError


def show(path: Annotated[Path, typer.Argument(help="Module file.")], as_json: AsJson = False) -> None:
    """Show what a module file holds; a damaged or edited file is refused with the reason."""
    from unbind_core.module import UnbindModule

    with clear_errors():
        module = UnbindModule.load(path)
    described = module.describe()
    if as_json:
        write_json(described)
        return
    for key, value in described.items():
        if isinstance(value, dict):
            described[key] = ", ".join(f"{k} {len(v) if isinstance(v, list | tuple) else v}" for k, v in value.items())
    show_fields(described.items())


def verify_command(
    path: Annotated[Path, typer.Argument(help="Module file.")],
    model: Model = None,
    adapter: Adapter = None,
    forget: Annotated[Path | None, typer.Option(help="Forget rows; the demo's set A where none is given.")] = None,
    retain: Annotated[
        Path | None, typer.Option(help="Retain rows; the demo's held-out test rows where none is given.")
    ] = None,
    reference: Annotated[
        Path | None, typer.Option(help="Adapter trained without the forget rows, as a third column.")
    ] = None,
    attempts: Annotated[
        int, typer.Option(help="Completions a row and access condition: 1 greedy; 5 is the paper's.")
    ] = 1,
    fim_template: FimTemplate = "",
    dtype: Dtype = "float32",
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Measure reproduction of the forget rows and quality on retain rows, before and after the module."""
    from unbind_core.evaluation.verify import measure, verify
    from unbind_core.module import UnbindModule

    with clear_errors():
        if attempts < 1:
            raise UnbindError("--attempts: at least 1")
        if model is not None and (forget is None or retain is None):
            raise UnbindError("--forget and --retain are needed with --model")
        # before the model, which may take minutes to load
        forget_set = forget_rows(forget or demo.ROWS / "forget_a.jsonl")
        retain_set = retain_rows(retain or demo.ROWS / "retain_test.jsonl")
        for option, named, rows in (("--forget", forget, forget_set), ("--retain", retain, retain_set)):
            if not rows:
                raise UnbindError(
                    f"{option}: {named} holds no row, so there is nothing to measure; name a JSONL file of rows"
                )
        loaded = load(model, adapter, dtype, device, fim_template)
        # here, not where it is measured: nothing may be wrong with it once minutes went into the other columns
        other = load(model, reference, dtype, device) if reference is not None else None
        module = UnbindModule.load(path, loaded.identity)
        with progress_bars(as_json) as progress:
            table = verify(
                loaded.model,
                loaded.tokenizer,
                module,
                forget_set,
                retain_set,
                identity=loaded.identity,
                attempts=attempts,
                progress=progress,
            )
            if other is not None:
                table["reference"] = measure(
                    other.model, other.tokenizer, forget_set, retain_set, attempts=attempts, progress=progress
                )
    if as_json:
        write_json(table)
        return
    screen.print(_before_after(module.name, table))
    if "fitted" not in table["before"]:
        notes.print("These are not the rows that the module was fitted on, so they are not reported apart by role.")


def _before_after(name: str, columns: dict[str, Any]) -> Table:
    table = Table("rows", "measure", *columns, title=f"module {name}")
    for group, measures in columns["before"].items():
        if measures.get("rows") == 0:  # gate auto keeps no forget rows back
            continue
        for key, before in measures.items():
            cells = [columns[column].get(group, {}).get(key) for column in columns]
            table.add_row(
                group,
                key,
                *("" if cell is None else f"{cell:.4g}" if isinstance(before, float) else str(cell) for cell in cells),
            )
        table.add_section()
    return table


def register(app: typer.Typer) -> None:
    """Add the commands of this file to ``unbind``."""
    app.command()(show)
    app.command("verify")(verify_command)
