"""Every setting as a flag, made from the settings class, so that no flag is forgotten or says something else."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from server import sources
from server.cli.console import show_error
from server.settings import DEMO, FROM_FILES, Settings

Parameters = list[inspect.Parameter]


def setting_flags() -> Parameters:
    """One option for each setting, None where it is not given; the settings class checks the value."""
    flags = [
        flag("config", Path | None, typer.Option(None, "--config", help="TOML file of settings", show_default=False))
    ]
    for name, field in Settings.model_fields.items():
        option = name.replace("_", "-")
        if field.annotation is bool:
            given = typer.Option(
                None, f"--{option}/--no-{option}", help=field.description, show_default="on" if field.default else "off"
            )
            flags.append(flag(name, bool | None, given))
        else:
            metavar = "NUMBER" if field.annotation in (int, float) else "VALUE"
            given = typer.Option(
                None, f"--{option}", help=field.description, show_default=_shown(field.default), metavar=metavar
            )
            flags.append(flag(name, str | None, given))
        if name in FROM_FILES:
            text = f"file that holds {name}, such as a mounted secret"
            given = typer.Option(None, f"--{option}-file", help=text, show_default=False, metavar="FILE")
            flags.append(flag(f"{name}_file", str | None, given))
    return flags


def _shown(default: Any) -> str | bool:
    """What holds where flags, environment and file say nothing, False for nothing. The flag's own default is None, as it has to
    leave the setting to these. A path of the installation is cut in a help text, and says nobody anything.
    """
    if isinstance(default, Path) and default.is_absolute():
        return "the demo's" if default.is_relative_to(DEMO) else default.name
    return False if default in (None, "", (), {}) else str(default)


def flag(name: str, kind: Any, option: Any) -> inspect.Parameter:
    """An option of a command that also takes every setting."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=kind)


def with_settings(own: Parameters) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate ``command(settings, **own)``: the options on the command line are all settings and those of ``own``."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def run(settings: Settings, _: dict[str, str], **kept: Any) -> None:
            command(settings, **kept)

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        return with_sources(own)(run)

    return decorate


def with_sources(own: Parameters) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """``with_settings``, for a ``command(settings, source, **own)`` that is told which source gives each setting."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def run(**given: Any) -> None:
            kept = {parameter.name: given.pop(parameter.name) for parameter in own}
            command(*_read(given.pop("config"), given), **kept)

        parameters = [*setting_flags(), *own]
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def settings_from(config: Path | None, **flags: Any) -> Settings:
    """Settings from flags, environment and file; ends the command with code 2 where one is wrong."""
    return _read(config, flags)[0]


def _read(config: Path | None, flags: dict[str, Any]) -> tuple[Settings, dict[str, str]]:
    try:
        return sources.with_sources(flags, os.environ, config)
    except sources.SettingsError as error:
        show_error(error)
        raise typer.Exit(2) from None
