"""``unbind bench takedown``: from the POST of a forget set to an active module, and what it costs the streams meanwhile."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from server.cli.bench import app as bench
from server.cli.console import AsJson, clear_errors, notes, screen, write_json
from server.settings import DEMO


def takedown(
    rows: Annotated[int, typer.Option(min=1, help="Rows of the demo's set C to forget.")] = 40,
    streams: Annotated[int, typer.Option(min=1, help="Streams beside it.")] = 8,
    quiet: Annotated[float, typer.Option(min=0, help="Seconds to measure the streams alone.")] = 20.0,
    first_rows: Annotated[
        int, typer.Option(min=1, help="Rows of the demo's set B in the takedown before it, with no cache.")
    ] = 12,
    worker_threads: Annotated[int, typer.Option(min=1, help="Torch threads of the worker.")] = 2,
    as_json: AsJson = False,
) -> None:
    """Time two takedowns on a running service with the demo model: one with no cache, one beside streams."""
    from server.bench.takedown import measure_takedown

    def read(name: str) -> list[dict[str, Any]]:
        lines = (DEMO / "rows" / name).read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines if line.strip()]

    with clear_errors():
        prompts = [row["text"][:400] for row in read("retain_test.jsonl")[:64]]
        measured = measure_takedown(
            read("forget_c.jsonl")[:rows],
            read("forget_b.jsonl")[:first_rows],
            prompts,
            streams,
            quiet,
            lambda text: notes.print(text, highlight=False),
            {"worker_threads": str(worker_threads)},
        )
    if as_json:
        write_json(measured)
        return
    for field, value in measured.items():
        screen.print(f"{field:16} {value}", highlight=False, soft_wrap=True)


def register(_: typer.Typer) -> None:
    """Add the command to ``unbind bench``."""
    bench.command("takedown")(takedown)
