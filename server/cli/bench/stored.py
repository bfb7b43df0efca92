"""``unbind bench stored``: a server started on thousands of stored takedowns."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from server.cli.bench import app as bench
from server.cli.console import AsJson, clear_errors, progress_bars, screen, write_json
from unbind_core.errors import UnbindError
from unbind_core.files import told


def stored(
    modules: Annotated[int, typer.Option(min=1, help="Stored modules, 685 KB of disk each.")] = 10_000,
    in_force: Annotated[
        int | None, typer.Option(min=0, help="How many of them bind every request; all where none is given.")
    ] = None,
    guards: Annotated[int, typer.Option(min=0, help="Guards beside them, which bind every request.")] = 0,
    repeats: Annotated[int, typer.Option(min=1, help="Starts; the first with its files out of memory.")] = 3,
    slots: Annotated[int, typer.Option(min=1, help="--max-slots of the server.")] = 4,
    length: Annotated[int, typer.Option(min=16, help="--max-model-len of the server.")] = 1024,
    folder: Annotated[
        Path | None, typer.Option(help="Where all of it lies, and is kept for a next run; else a temporary one.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Seconds from start to ready, memory, one more takedown and one answer, beside the same server without any."""
    from server.bench.stored.start import stored_figures

    with clear_errors(), progress_bars(quiet=False) as progress:
        if in_force is not None and in_force > modules:
            raise UnbindError(f"--in-force: {in_force} of {modules} modules; give at most --modules")
        figures = stored_figures(
            {"max_slots": slots, "max_model_len": length},
            modules=modules,
            in_force=modules if in_force is None else in_force,
            guards=guards,
            repeats=repeats,
            folder=folder,
            progress=progress,
        )
    if as_json:
        write_json(figures)
        return
    for name in ("modules", "in_force", "guards", "read_alone_ms", "stored_seconds", "stored_processor_seconds"):
        screen.print(f"{name:28} {figures[name]:.4g}", highlight=False)
    for kind, starts in (("without", figures["bare"]), ("with", figures["starts"])):
        for start in starts:
            screen.print(
                f"start {kind:8} {start['seconds']:.2f} s, {told(start['resident_bytes'])}, an answer "
                f"{start['answer_seconds'][-1]:.2f} s",
                highlight=False,
            )


def register(_: typer.Typer) -> None:
    """Add the command to ``unbind bench``."""
    bench.command("stored")(stored)
