"""``unbind takedown join``: one module in place of those of several takedowns."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from server.cli.client import LOCAL, Client, Key, Url
from server.cli.console import AsJson, clear_errors, write_json
from server.cli.takedown.shown import Watch, follow, show_answer, show_ended, warn
from server.cli.takedown.submit import NO_SCOPE


def join(
    joins: Annotated[list[str], typer.Argument(help="Modules by name, or the takedowns that made them by id.")],
    name: Annotated[str, typer.Option(help="Name of the module that is to stand in for them.")],
    note: Annotated[str | None, typer.Option(help="Why; the evidence says so.")] = None,
    activation: Annotated[str, typer.Option(help="auto, manual or shadow.")] = "auto",
    scope: Annotated[
        str | None,
        typer.Option(help="Enforced for: global, profile:NAME or key:ID. Theirs, where they have one scope."),
    ] = None,
    policy: Annotated[str | None, typer.Option(help="rewrite: other code is written; silent: the answer ends.")] = None,
    protect: Annotated[
        str | None, typer.Option(help="both: a guard of all rows at once, and the module; module: that alone.")
    ] = None,
    replace: Annotated[bool, typer.Option(help="Make the next version of a name that is in use.")] = False,
    dry_run: Annotated[bool, typer.Option(help="Only tell rows, positions, memory, disk and time.")] = False,
    watch: Watch = False,
    url: Url = LOCAL,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Fit one module on the rows of several takedowns. Once it is active, theirs are superseded; their guards and records stay."""
    said = {
        "activation": activation,
        "scope": None if scope == NO_SCOPE else scope,
        "policy": policy,
        "protect": protect,
        "replace": replace or None,
        "dry_run": dry_run or None,
    }
    options: dict[str, Any] = {"joins": joins, **{field: value for field, value in said.items() if value is not None}}
    with clear_errors():
        client = Client(url, key)
        body = {"name": name, "options": options, "notice": {"note": note} if note else {}}
        answer = client.call("/takedowns", body)
        if not as_json:
            show_answer(answer)
            warn(answer)
        ended = [follow(client, answer["job_id"], as_json)] if watch and not dry_run else []
    if ended:
        show_ended(ended, as_json)
    elif as_json:
        write_json(answer)
