"""``unbind bench guard``: whether anything gets past the guard, what it bars without need, what it costs and what it stops."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from server.cli.bench import app as bench
from server.cli.bench import names
from server.cli.console import AsJson, clear_errors, notes, numbers, progress_bars, screen, write_json
from unbind_core import UnbindError


def guard(
    parts: Annotated[str, typer.Option(help="What to measure, with commas.")] = "tries,ordinary,cost",
    tries: Annotated[int | None, typer.Option(min=1, help="Answers to try in process.")] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="Requests to try over HTTP.")] = None,
    completions: Annotated[int | None, typer.Option(min=1, help="Completions of ordinary code.")] = None,
    sizes: Annotated[str, typer.Option(help="Numbers of protected rows to measure the cost of.")] = "1,1000,100000",
    repeats: Annotated[int, typer.Option(min=1, help="Alternating repeats of what is timed.")] = 15,
    attacks: Annotated[
        str | None, typer.Option(help="Names of attacks, with commas; all where none are given.")
    ] = None,
    rows: Annotated[
        int | None, typer.Option(min=1, help="Ask for at most so many rows, in attacks and opening.")
    ] = None,
    module: Annotated[
        Path | None, typer.Option(help="A module of one of the demo's sets, to stand beside the guard; else demo-a.")
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed draws the same tries.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Try to get protected runs past the guard (tries, http), and measure what it does to ordinary code (ordinary), what it costs
    (cost), where a module's gate opens beside it (opening), and what it stops of the attacks beside a module and a filter of
    prompts (attacks). Ends with 1 where a run got out or ordinary code was barred.
    """
    from server import demo
    from server.bench.guard.figures import guard_figures

    with clear_errors(), progress_bars(quiet=False) as progress:
        counts = numbers(sizes, int, "--sizes", "1,1000") or ()
        if not counts or min(counts) < 1:
            raise UnbindError("--sizes: numbers of rows from 1 on, as in 1,1000")
        figures = guard_figures(
            names(parts),
            tries=tries,
            requests=requests,
            completions=completions,
            sizes=counts,
            repeats=repeats,
            attacks=None if attacks is None else names(attacks),
            rows=rows,
            module=module or demo.MODULE,
            seed=seed,
            progress=progress,
            report=lambda line: notes.print(line, highlight=False, soft_wrap=True),
        )
    if as_json:
        write_json(figures)
    else:
        shown = {key: value for key, value in figures.items() if key != "parts"} | figures["parts"]
        for key, value in shown.items():
            for name, one in value.items() if isinstance(value, dict) else [("", value)]:
                screen.print(f"{key:22} {name:24} {one}", highlight=False, soft_wrap=True)
    if figures.get("violations") or figures.get("false_bars"):
        raise typer.Exit(1)


def register(_: typer.Typer) -> None:
    """Add the command to ``unbind bench``."""
    bench.command("guard")(guard)
