"""``unbind module``: the modules and guards of a running server and their state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.text import Text

from server.cli.client import LOCAL, Client, Key, Url, address
from server.cli.console import AsJson, clear_errors, notes, screen, show_fields, show_lines, shown_field, write_json
from server.cli.takedown.shown import Watch, follow, show_ended, warn
from server.registry.lifecycle import standing
from unbind_core.errors import UnbindError

Reference = Annotated[
    str,
    typer.Argument(
        help="Id, or a name: its loaded version, else the newest that is neither superseded nor retired, else the newest; "
        "guard:NAME for a guard beside a module."
    ),
]
_SHOWN = ("name", "kind", "version", "state", "loaded", "correction", "policy", "id", "digest")
# command -> what it says of itself
CHANGES = {
    "activate": "Make a version available, and enforce it in its scope; the one before it is superseded.",
    "shadow": "Measure a module without applying it.",
    "suspend": "Take a module out of use for a while.",
    "retire": "Take a module out of use for good.",
    "rollback": "Activate the version before this one.",
}


def list_modules(
    every: Annotated[bool, typer.Option("--all", help="All versions, not only those that are loaded.")] = False,
    url: Url = LOCAL,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """The modules and guards that a request can name, and the files that were refused."""
    with clear_errors():
        answer = Client(url, key).whole(f"/modules?limit=1000&state={'all' if every else 'loaded'}")
    if as_json:
        write_json(answer)
        return
    rows = []
    for module in answer["data"]:
        told = dict.fromkeys(_SHOWN, "") | {
            **module,
            "state": standing(module),
            "digest": module["digest"][:12],
        }
        rows.append([str(told[column]) for column in _SHOWN])
    show_lines(_SHOWN, rows)
    for problem in answer["problems"]:
        screen.print(
            Text("refused:", style="yellow"), f"{problem['file']}: {problem['reason']}", soft_wrap=True, highlight=False
        )


def show(reference: Reference, url: Url = LOCAL, key: Key = None, as_json: AsJson = False) -> None:
    """One module or guard."""
    with clear_errors():
        client = Client(url, key)
        _print(client, client.call(address("modules", reference)), as_json)


def verify(
    reference: Reference,
    adopt: Annotated[
        bool,
        typer.Option(
            "--adopt",
            help="Of a module for another model, dtype or quantisation: measure it as a fit does, and make it one of the model "
            "that runs where it holds.",
        ),
    ] = False,
    watch: Watch = False,
    url: Url = LOCAL,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Measure before and after once more, by a job."""
    with clear_errors():
        client, asked = Client(url, key), address("modules", reference, f"verify{'?adopt=true' if adopt else ''}")
        _print(client, client.call(asked, method="POST"), as_json, watch)


def _change(action: str) -> Callable[..., None]:
    def change(
        reference: Reference,
        override: Annotated[
            bool, typer.Option(help="With activate alone: whatever all active modules cost together.")
        ] = False,
        etag: Annotated[
            str | None, typer.Option(help="Revision that is meant; the present one where none is given.")
        ] = None,
        watch: Watch = False,
        url: Url = LOCAL,
        key: Key = None,
        as_json: AsJson = False,
    ) -> None:
        with clear_errors():
            if override and action != "activate":
                raise UnbindError(
                    f"--override: goes with `unbind module activate`; {action} asks for no budget, so leave it out"
                )
            client = Client(url, key)
            seen = etag or client.call(address("modules", reference))["etag"]
            query = "?override=true" if override else ""
            asked = address("modules", reference, action + query)
            _print(client, client.call(asked, method="POST", headers={"If-Match": seen}), as_json, watch)

    return change


def _print(client: Client, answer: dict[str, Any], as_json: bool, watch: bool = False) -> None:
    by_job = "state" not in answer  # as of activate where what all cost together is measured first
    if not as_json:
        _show(answer)
        if by_job and not watch:
            notes.print(f"a job does it: unbind takedown watch {answer['job_id']}", highlight=False, soft_wrap=True)
        warn({"warnings": answer.get("warnings", ())})
    elif not (by_job and watch):
        write_json(answer)
    if by_job and watch:
        show_ended([follow(client, answer["job_id"], as_json)], as_json)


def _show(answer: dict[str, Any]) -> None:
    told: dict[str, Any] = {}
    for field, value in answer.items():
        if field == "calibrated":
            told[field] = ", ".join(str(part) for part in value.values() if part)
        elif field == "canary":
            told[field] = value["told"]
        elif field != "warnings" and not isinstance(value, dict):
            told[field] = shown_field(field, value)
    show_fields(told.items())


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = typer.Typer(help="Modules and guards on a running server.", no_args_is_help=True)
    group.command("list")(list_modules)
    group.command("show")(show)
    group.command("verify")(verify)
    for action, says in CHANGES.items():
        group.command(action, help=says)(_change(action))
    app.add_typer(group, name="module")
