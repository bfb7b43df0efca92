"""``unbind bench attack``: what clients get out of protected rows that should not."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from server.cli.bench import app as bench
from server.cli.bench import names
from server.cli.console import AsJson, clear_errors, notes, numbers, progress_bars, screen, write_json
from server.cli.models import Device, load
from unbind_core.errors import UnbindError

MODULE_HELP = "A module of one of the demo's sets, to attack as it is; may be given again."
SIZES_HELP = "Sizes of demo sets to fit first, as in 5,24; 24 where neither this nor --module is given."


def attack(
    module: Annotated[list[Path] | None, typer.Option(help=MODULE_HELP)] = None,
    sizes: Annotated[str | None, typer.Option(help=SIZES_HELP)] = None,
    rows: Annotated[
        int | None, typer.Option(min=1, help="Attack at most so many rows of a set, spread over it.")
    ] = None,
    policy: Annotated[str | None, typer.Option(help="What fitted modules aim at: rewrite or silent.")] = None,
    split: Annotated[
        int | None, typer.Option(min=1, help="Fit modules of at most so many rows each, to be attacked together.")
    ] = None,
    attacks: Annotated[
        str | None, typer.Option(help="Names of attacks, with commas; all where none are given.")
    ] = None,
    keep: Annotated[
        Path | None, typer.Option(help="Folder for fitted modules, which are not fitted again, and each set's figures.")
    ] = None,
    cache: Annotated[Path | None, typer.Option(help="Folder for what does not depend on a module.")] = None,
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Attack modules: without a module, with it, and a model retrained without the rows, side by side."""
    from server.bench.attacks.figures import COLUMNS, attack_figures, compared
    from server.bench.attacks.registry import ATTACKS, chosen
    from unbind_core.module import UnbindModule

    with clear_errors():
        wanted = numbers(sizes, int, "--sizes", "5,24") or (() if module else (24,))
        chosen(None if attacks is None else names(attacks))  # refuses what is unknown before anything is loaded
        if any(not 1 <= size <= 300 for size in wanted):
            raise UnbindError("--sizes: whole numbers from 1 to 300, as in 5,24")
        if policy not in (None, "rewrite", "silent"):
            raise UnbindError(f"--policy: '{policy}' is unknown; choose rewrite or silent")
        modules = [UnbindModule.load(path) for path in module or ()]
        for folder in (keep, cache):
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
        loaded = load(None, None, "float32", device)
        with progress_bars(as_json) as progress:
            table = attack_figures(
                loaded,
                modules=modules,
                sizes=wanted,
                rows=rows,
                policy=policy,
                split=split,
                attacks=None if attacks is None else names(attacks),
                cache=cache,
                keep=keep,
                progress=progress,
                report=lambda line: notes.print(line, highlight=False, soft_wrap=True),
            )
    if as_json:
        write_json(table)
        return
    what = {one.name: one.what for one in ATTACKS}
    for size, entry in table["sizes"].items():
        shown = Table("attack", "the client", *COLUMNS, title=_title(size, entry), caption=_caption(entry))
        for name, each in entry["attacks"].items():
            shown.add_row(name, what[name], *(compared(each, column) for column in COLUMNS))
        screen.print(shown)


def _title(size: str, entry: dict[str, Any]) -> str:
    return f"{entry['module']}: {entry['rows']} rows of the set of {size}; no module / module / retrained"


def _caption(entry: dict[str, Any]) -> str:
    from server.bench.attacks.figures import line

    shown = ("opens_within", "opens_mid_row", "opens_in_text", "kl", "membership_auc")
    return "\n".join(f"{key}: {line(entry[key])}" for key in shown if key in entry)


def register(_: typer.Typer) -> None:
    """Add the command to ``unbind bench``."""
    bench.command("attack")(attack)
