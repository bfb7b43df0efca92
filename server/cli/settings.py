"""``unbind settings``: what is in force with these flags, in this environment and by this file, and what each comes from."""

from __future__ import annotations

import json
import re
from typing import Any

import typer

from server.cli.audit import AS_JSON
from server.cli.console import show_lines, write_json
from server.cli.flags import flag, with_sources
from server.settings import SECRETS, Settings

_PASSWORD = re.compile(r"(://[^/:\s]*:)[^/\s]*(?=@)|(?<=password=)[^&\s]*")  # of an address
_ALL = flag("every", bool, typer.Option(False, "--all", help="those that have their default too"))


@with_sources([_ALL, AS_JSON])
def show(settings: Settings, source: dict[str, str], every: bool, as_json: bool) -> None:
    """The settings that a server or worker started here would have, and what gives each; no secret is shown. Ends with code 2 where
    one is wrong.
    """
    told = {
        name: {"value": _shown(name, value), "from": source.get(name, _given_by_none(name, settings))}
        for name, value in settings.model_dump(mode="json").items()
    }
    chosen = told if every else {name: one for name, one in told.items() if one["from"] != "default"}
    if as_json:
        write_json(chosen)
    elif chosen:
        rows = [(name, _text(one["value"]), str(one["from"])) for name, one in chosen.items()]
        show_lines(("setting", "value", "from"), rows)


def _given_by_none(name: str, settings: Settings) -> str:
    """Where a setting comes from that no source gives: an adapter follows from the demo's model, say."""
    same = getattr(settings, name) == Settings.model_fields[name].default
    return "default" if same else "other settings"


def _shown(name: str, value: Any) -> Any:
    if name in SECRETS:
        return "(secret)" if value else value
    return _PASSWORD.sub(r"\1***", value) if isinstance(value, str) else value


def _text(value: Any) -> str:
    if value in (None, "", [], {}):
        return "none"
    if isinstance(value, dict):
        return json.dumps(value)  # as the environment takes it
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("settings")(show)
