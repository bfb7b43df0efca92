"""``unbind bench``: performance claims, as ratios against a reference measured in the same run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from server import demo
from server.cli.console import clear_errors, numbers, progress_bars, screen, write_json
from server.cli.models import Device, Model, dtype_of, load
from unbind_core.errors import UnbindError

if TYPE_CHECKING:
    from unbind_core.architecture import LoadedModel

app = typer.Typer(no_args_is_help=True, help="Measure, as ratios against a reference in the same run.")
CONFIG_HELP = "An architecture with random weights in place of a checkpoint, as qwen2.5-coder-7b; see bench scale."
Config = Annotated[str | None, typer.Option(help=CONFIG_HELP)]


@app.command("fit")
def bench_fit(
    model: Model = None,
    adapter: Annotated[Path | None, typer.Option(help="LoRA adapter folder.")] = None,
    windows: Annotated[
        int, typer.Option(min=1, max=8, help="Windows for which every target has an autograd call of its own.")
    ] = 2,
    dtype: Annotated[str, typer.Option(help="float32 or float64.")] = "float32",
    device: Device = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """One-pass gradients against one autograd call a target: accuracy and speed."""
    from server.bench.gradients import fit_figures

    with clear_errors(), progress_bars(as_json) as progress:
        figures = fit_figures(load(model, adapter, dtype, device), oracle_windows=windows, progress=progress)
    if as_json:
        write_json(figures)
        return
    for key, value in figures.items():
        screen.print(f"{key:22} {value:.3g}" if isinstance(value, float) else f"{key:22} {value}")


@app.command("filter")
def bench_filter(
    model: Model = None,
    adapter: Annotated[Path | None, typer.Option(help="LoRA adapter folder.")] = None,
    config: Config = None,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    device: Device = "cpu",
    parts: Annotated[str, typer.Option(help="cost, many, with commas; both where empty.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """What modules cost: the bank's time as a share of a forward pass, and decode steps under 64 and 1,000 networks."""
    from server.bench.filter import run
    from server.bench.many import many

    with clear_errors():
        if unknown := set(names(parts)) - {"cost", "many"}:
            raise UnbindError(f"--parts: no part {', '.join(sorted(unknown))}; there are cost and many")
        wanted, loaded = names(parts) or ("cost", "many"), subject(model, adapter, config, dtype, device)
        figures = run(loaded) if "cost" in wanted else {}
        figures |= {"many": many(loaded)} if "many" in wanted else {}
    if as_json:
        write_json(figures)
        return
    if "cost" in figures:
        table = Table("modules", "kind", "placement", "phase", "share of a forward pass")
        for row in figures["cost"]:
            table.add_row(
                str(row["modules"]), row["kind"], row["placement"], row["phase"], f"{100 * row['share']:.2f} %"
            )
        screen.print(table)
    if "many" in figures:
        table = Table("modules", "kind", "decode step, of one without", "bytes a token", "packed, ms", "one more, ms")
        for row in figures["many"]:
            cells = [f"{row['over_none']:.2f}", f"{row['bytes_a_token']:,}"]
            cells += [f"{row[name]:.0f}" for name in ("first_ms", "change_ms")]
            table.add_row(str(row["modules"]), row["kind"], *cells)
        screen.print(table)


@app.command("serve")
def bench_serve(
    model: Model = None,
    adapter: Annotated[Path | None, typer.Option(help="LoRA adapter folder.")] = None,
    config: Config = None,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    device: Device = "cpu",
    workloads: Annotated[str, typer.Option(help="Requests x prompt tokens -> new tokens, with commas.")] = "",
    repeats: Annotated[int, typer.Option(min=1, help="Alternating repeats; figures are their medians.")] = 5,
    parts: Annotated[
        str, typer.Option(help="What to measure, with commas; where empty, everything but load and telemetry.")
    ] = "",
    module_counts: Annotated[str | None, typer.Option(help="Numbers of modules, with commas.")] = None,
    keystrokes: Annotated[int, typer.Option(min=1, help="How many keystrokes to replay.")] = 40,
    keystroke_tokens: Annotated[int, typer.Option(min=32, help="Length of the prompt that is typed on.")] = 1500,
    vllm: Annotated[Path | None, typer.Option(help="A Python that has vLLM, to measure it beside the engine.")] = None,
    networks: Annotated[
        int, typer.Option(min=0, help="Modules of the part telemetry, made of a shipped one; 0: those that are there.")
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """How fast the engine serves, against the library's static and continuous batching; prefix reuse; HTTP."""
    from server.bench import serve as figures_of

    named = {"model": model, "adapter": adapter or (None if model else demo.ADAPTER), "dtype": dtype, "device": device}
    settings: dict[str, object] = {key: value for key, value in named.items() if value is not None}
    if model is None:
        settings["model"] = demo.BASE
    with clear_errors(), progress_bars(quiet=False) as progress:
        wanted = names(parts) or (figures_of.WITHOUT_A_SERVER if config else figures_of.PARTS)
        if config and (served := set(wanted) - {*figures_of.WITHOUT_A_SERVER}):
            raise UnbindError(
                f"--parts: {', '.join(sorted(served))} starts a server, which needs a checkpoint; leave --config out"
            )
        figures = figures_of.run(
            subject(model, adapter, config, dtype, device),
            workloads=names(workloads) or figures_of.WORKLOADS,
            repeats=repeats,
            parts=wanted,
            module_counts=numbers(module_counts, int, "--module-counts", "0,1,64") or figures_of.MODULES,
            keystrokes=keystrokes,
            keystroke_tokens=keystroke_tokens,
            vllm=vllm,
            networks=networks,
            settings=settings,
            progress=progress,
        )
    if as_json:
        write_json(figures)
        return
    show(figures)


def show(figures: dict[str, Any]) -> None:
    """Figures, and those of their parts, in a table; what lies deeper is for ``--json``."""
    table = Table("figure", "", "")
    for key, value in figures.items():
        for name, number in value.items() if isinstance(value, dict) else [("", value)]:
            if not isinstance(number, dict):
                table.add_row(key, name, f"{number:.3f}" if isinstance(number, float) else str(number))
    screen.print(table)


def subject(model: Path | None, adapter: Path | None, config: str | None, dtype: str, device: str) -> LoadedModel:
    """The model named, an architecture with random weights, or the demo model. Raises UnbindError."""
    from server.bench.scale.world import with_weights

    if config is None:
        return load(model, adapter, dtype, device)
    if model or adapter:
        raise UnbindError("--config: stands in place of --model and --adapter; give one or the other")
    return with_weights(config, dtype_of(dtype), device)


def names(text: str) -> tuple[str, ...]:
    """The names of a comma-separated option."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def register(parent: typer.Typer) -> None:
    """Add ``unbind bench``."""
    parent.add_typer(app, name="bench")
