"""``unbind bench engines``: vLLM as the engine beside the embedded one."""

from __future__ import annotations

import json
from functools import partial
from typing import Annotated, Any

import typer

from server import demo
from server.cli.bench import Config, names, show
from server.cli.bench import app as bench
from server.cli.console import AsJson, clear_errors, numbers, progress_bars, write_json
from server.cli.models import dtype_of
from server.settings import HERE
from unbind_core.errors import UnbindError

MODULES = ("demo-a", "demo-a-silent", "demo-a-paper")


def engines(
    requests: Annotated[int, typer.Option(min=1, help="Mixed requests whose tokens are compared.")] = 1000,
    pairs: Annotated[int, typer.Option(min=1, help="Pairs of equal prompts under different sets.")] = 10_000,
    repeats: Annotated[int, typer.Option(min=1, help="Alternating repeats; figures are their medians.")] = 5,
    kills: Annotated[int, typer.Option(min=1, help="vLLM's processes that are killed, at random instants.")] = 30,
    seed: Annotated[int, typer.Option(help="Of these instants and victims.")] = 0,
    parts: Annotated[
        str, typer.Option(help="equal, isolation, plugin, workloads, kills, with commas; all where empty.")
    ] = "",
    config: Config = None,
    workloads: Annotated[
        str, typer.Option(help="With --config: REQUESTSxPROMPT->NEW, with commas.")
    ] = "1x32->256,64x32->256",
    device: Annotated[str, typer.Option(help="With --config: cpu or cuda.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="With --config: float32, bfloat16.")] = "bfloat16",
    layers: Annotated[
        str | None, typer.Option(help="With --config: behind which layers modules may stand, as in 14; else all.")
    ] = None,
    modules: Annotated[str, typer.Option(help="With --config: numbers of modules, of which 0 is none.")] = "0,1,64",
    as_json: AsJson = False,
) -> None:
    """On the demo model: equal tokens, isolation, what the edits cost vLLM, which engine is quicker, and vLLM's processes killed
    under load. With --config, the part plugin alone, on an architecture with weights that vLLM makes up. Needs vLLM installed.
    """
    from server.bench.engines import figures as figures_of
    from server.bench.engines.plugin import plugin, shaped
    from server.bench.engines.subject import Subject
    from server.bench.serve import Workload
    from unbind_core.architecture import load_model
    from unbind_core.module import UnbindModule

    with clear_errors(), progress_bars(quiet=False) as progress:
        unknown = set(names(parts)) - set(figures_of.PARTS)
        if unknown:
            raise UnbindError(f"--parts: no part {', '.join(sorted(unknown))}; there are {', '.join(figures_of.PARTS)}")
        if config is not None:
            if names(parts) != ("plugin",):
                raise UnbindError(
                    "--config: weights that are made up say nothing but how long work takes; add --parts plugin"
                )
            loads = [Workload.parse(text) for text in workloads.split(",")]
            behind = numbers(layers, int, "--layers", "14") or ()
            counts = numbers(modules, int, "--modules", "0,1,64") or ()
            if min(counts) < 0 or max(counts) < 1:
                raise UnbindError("--modules: give numbers from 0 on, one of them above 0, as in 0,1,64")
            with shaped(config, dtype_of(dtype), device, behind) as plain:
                _told(plugin(plain, loads, repeats, progress, counts), as_json)
            return
        loader = partial(load_model, demo.BASE, demo.ADAPTER)
        tokenizer = loader().tokenizer
        rows = [json.loads(line) for line in (demo.ROWS / "forget_a.jsonl").read_text().splitlines()]
        subject = Subject(
            demo.BASE,
            demo.ADAPTER,
            loader,
            [UnbindModule.load(HERE.parent / "modules" / f"{name}.safetensors") for name in MODULES],
            [tokenizer(row["prompt"], add_special_tokens=False)["input_ids"] for row in rows],
        )
        figures = figures_of.run(
            subject,
            requests=requests,
            pairs=pairs,
            repeats=repeats,
            kills=kills,
            seed=seed,
            parts=names(parts) or figures_of.PARTS,
            progress=progress,
        )
    _told(figures, as_json)


def _told(figures: dict[str, Any], as_json: bool) -> None:
    write_json(figures) if as_json else show(figures)


def register(_: typer.Typer) -> None:
    """Add the command to ``unbind bench``."""
    bench.command("engines")(engines)
