"""``unbind lab``: the paper's systems and the strongest rivals beside Unbind, measured here."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from server.cli.console import clear_errors, notes, progress_bars, require_target
from unbind_core.errors import UnbindError
from unbind_core.files import write_text

OUT, WORLDS = Path(".unbind/lab"), Path(".unbind/worlds")
app = typer.Typer(help="The paper's systems and the strongest rivals beside Unbind.", no_args_is_help=True)
SettingName = Annotated[
    str, typer.Argument(help="A setting: demo, one that was built, or the path of a TOML file like it.")
]
Device = Annotated[str, typer.Option(help="Where models are computed: cpu, or cuda where there is one.")]
Out = Annotated[Path, typer.Option(help="Folder of the run: what is there is not made again.")]


def run(
    setting: SettingName,
    systems: Annotated[
        str | None,
        typer.Option(help="Names of systems, with commas; all where none are given, m-full beside your own."),
    ] = None,
    own: Annotated[
        list[Path] | None,
        typer.Option(help="A Python file that defines systems of your own, to be run beside those that are named."),
    ] = None,
    protocols: Annotated[str, typer.Option(help="Names of protocols, with commas.")] = "main",
    configurations: Annotated[
        str, typer.Option(help="Of each system: as shipped, as in the paper, tuned; with commas.")
    ] = "shipped,paper,tuned",
    out: Out = OUT,
    device: Device = "cpu",
    evalplus: Annotated[
        Path | None,
        typer.Option(
            help="Folder of EvalPlus's files, for the protocol evalplus: HumanEval+ and MBPP+ are not shipped."
        ),
    ] = None,
) -> None:
    """Make, tune and measure systems. May be killed and run again at any time."""
    from unbind_lab import systems as known
    from unbind_lab.lab import Lab
    from unbind_lab.setting import Setting

    with clear_errors(), progress_bars(quiet=False) as progress:
        yours = [one for path in own or () for one in known.own(path)]
        named = known.chosen(systems.split(",") if systems is not None else ["m-full"] if yours else None)
        wanted = [*named, *yours]
        found = Setting.load(setting)
        if evalplus is not None:
            found = replace(found, evalplus=evalplus)
        require_target("--out", out, folder=True)
        report = lambda line: notes.print(line, highlight=False, soft_wrap=True)  # noqa: E731
        Lab(found, out, device=device, report=report, progress=progress).run(
            wanted, protocols.split(","), configurations.split(",")
        )


def build(
    recipe: Annotated[
        str, typer.Argument(help="A recipe: micro-python, micro-javascript, one of the paper's, or the path of one.")
    ],
    out: Annotated[Path, typer.Option(help="Folder of worlds; what is there is not made again.")] = WORLDS,
    manifests: Annotated[
        Path | None, typer.Option(help="Folder of the JSONL files that a recipe of the paper has its rows from.")
    ] = None,
    base: Annotated[
        Path | None, typer.Option(help="Checkpoint folder of the base model, in place of the recipe's.")
    ] = None,
    device: Device = "cpu",
) -> None:
    """Make the models, rows and modules of a setting. May be killed and run again at any time."""
    with clear_errors(), progress_bars(quiet=False) as progress:
        try:
            from unbind_lab.building.build import World
            from unbind_lab.building.recipe import Recipe
        except ModuleNotFoundError as error:
            raise _absent(error) from None
        report = lambda line: notes.print(line, highlight=False, soft_wrap=True)  # noqa: E731
        found = Recipe.load(recipe)
        require_target("--out", out, folder=True)
        if base is not None:
            found = replace(found, base=replace(found.base, folder=str(base.resolve())))
        world = World(
            found, out, out / "packages", manifests=manifests, device=device, report=report, progress=progress
        )
        setting = world.build()
        notes.print(f"built; unbind lab run {setting.stem if out == WORLDS else setting}")


def table(
    settings: Annotated[
        list[str], typer.Argument(metavar="SETTING...", help="A setting; several: FR, UR and FU-H side by side.")
    ],
    out: Out = OUT,
    html: Annotated[Path | None, typer.Option(help="Write it there as a page instead.")] = None,
) -> None:
    """What was measured, as Markdown or as HTML, beside the paper's own numbers."""
    from unbind_lab import table as tables

    with clear_errors():
        folders = [_measured(setting, out) for setting in settings]
        commands = {folder: _run_again(setting, out) for folder, setting in zip(folders, settings, strict=True)}
        if html is None:
            typer.echo(tables.markdown(*folders, commands=commands), nl=False)
        else:
            write_text(html, tables.html(*folders, commands=commands), mode=0o644)
            notes.print(f"written to {html}", highlight=False)


def plot(
    setting: SettingName,
    out: Out = OUT,
    folder: Annotated[
        Path | None, typer.Option(help="Where figures go; beside the tables where none is given.")
    ] = None,
) -> None:
    """Figures of what was measured, as SVG: forgetting over utility, what attacks recover, by strength, by layer."""
    with clear_errors():
        try:
            from unbind_lab.plots import draw
        except ModuleNotFoundError as error:
            raise _absent(error) from None
        measured = _measured(setting, out)
        for path in draw(measured, folder or measured / "figures", {measured: _run_again(setting, out)}):
            notes.print(f"written to {path}", highlight=False)


def _measured(setting: str, out: Path) -> Path:
    """The folder of a run. Where it is there under the setting's name, the setting itself need not be: records are read alone."""
    from unbind_lab.setting import Setting

    folder = out / setting
    return folder if (folder / "main").is_dir() else out / Setting.load(setting).name


def _run_again(setting: str, out: Path) -> str:
    """The command that measures more of it, named as this one was: a file is no name, and a folder of runs has to be said again."""
    return shlex.join(["unbind", "lab", "run", setting, *(["--out", str(out)] if out != OUT else [])])


def _absent(error: ModuleNotFoundError) -> UnbindError:
    return UnbindError(f"{error.name} is not installed; the extra has it: pip install 'unbind-server[lab]'")


def register(root: typer.Typer) -> None:
    """Add the group to ``unbind``."""
    app.command("build")(build)
    app.command("run")(run)
    app.command("table")(table)
    app.command("plot")(plot)
    root.add_typer(app, name="lab")
