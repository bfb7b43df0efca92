"""``unbind audit``: the audit trail, read from the database itself, whether it is whole, and its end accepted anew."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path

import typer

from server.cli.console import clear_errors, notes, screen, show_lines, write_json
from server.cli.flags import flag, with_settings
from server.registry.audit import Actor
from server.registry.refusals import Refusal
from server.registry.registry import open_registry
from server.registry.trail import read_head
from server.settings import Settings
from unbind_core import UnbindError

AS_JSON = flag("as_json", bool, typer.Option(False, "--json", help="machine-readable output"))
_AFTER = flag("after", int, typer.Option(0, "--after", min=0, max=2**31 - 1, help="entries that follow this number"))
_LIMIT = flag("limit", int, typer.Option(100, "--limit", min=1, max=2**31 - 1, help="at most so many"))
_HEAD = flag(
    "head",
    Path | None,
    typer.Option(None, "--head", help="file with the trail's end, kept elsewhere"),
)
_REASON = flag(
    "reason", str, typer.Option(..., "--reason", help="why the kept end is not that of the trail; kept in it")
)
OPERATOR = Actor("operator", "command line")


@with_settings([_AFTER, _LIMIT, AS_JSON])
def list_entries(settings: Settings, after: int, limit: int, as_json: bool) -> None:
    """What was done, by whom, to what, the oldest first."""
    with clear_errors():
        registry = open_registry(settings, existing=True)
        found = registry.audit(after, limit + 1)
        registry.close()
    if len(rows := found[:limit]) < len(found):
        notes.print(f"there are more: --after {rows[-1]['id']} shows what follows", highlight=False, soft_wrap=True)
    if as_json:
        write_json(rows)
        return
    lines = []
    for row in rows:
        at = datetime.fromtimestamp(row["at"], UTC).strftime("%Y-%m-%d %H:%M:%S")
        lines.append([str(row["id"]), at, row["actor"], row["action"], row["subject"]])
    show_lines(("entry", "time (UTC)", "actor", "action", "subject"), lines)


@with_settings([_HEAD, AS_JSON])
def verify(settings: Settings, head: Path | None, as_json: bool) -> None:
    """Find any entry that was changed, deleted, inserted or moved; ends with code 1 where there is one."""
    with clear_errors():
        given = read_head(head) if head is not None else None
        if head is not None and given is None:
            raise UnbindError(f"--head: {head} is not a file with the end of a trail (number and digest)")
        registry = open_registry(settings, existing=True)
        known = given or registry.trail.kept()[0]
        problems = registry.audit_problems(given)
        registry.close()
    if as_json:
        write_json({"whole": not problems, "head": known[0] if known else None, "problems": problems})
    else:
        held = (
            f"up to entry {known[0]}, the end that was kept"
            if known
            else "no end was kept: missing last entries would not show"
        )
        for line in problems or [f"whole ({held})"]:
            screen.print(line, soft_wrap=True, highlight=False)
    if problems:
        raise typer.Exit(1)


@with_settings([_REASON, AS_JSON])
def accept_head(settings: Settings, reason: str, as_json: bool) -> None:
    """Take the trail's end as it stands for the right one, after an older copy was restored; the trail itself tells of it."""
    with clear_errors():
        if not reason.strip():
            raise UnbindError("--reason: say why; the trail keeps it for good")
        reason.encode()  # bytes that are no text would stay in the trail, and no answer that tells of it could be written
        registry = open_registry(settings, existing=True)
        try:
            accepted = registry.accept_head(OPERATOR, reason, time.time())
        except Refusal as error:
            raise UnbindError(str(error)) from None
        finally:
            registry.close()
    if as_json:
        write_json(accepted)
        return
    (number, digest), kept = accepted["found"], accepted["kept"]
    was = f"entry {kept[0]} ({kept[1]})" if kept else "damaged"
    screen.print(
        f"the head was {was}; entry {number} ({digest}) was the end that is accepted", soft_wrap=True, highlight=False
    )
    screen.print(f"entry {number + 1} of the trail says so", soft_wrap=True, highlight=False)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = typer.Typer(help="The audit trail.", no_args_is_help=True)
    group.command("list")(list_entries)
    group.command("verify")(verify)
    group.command("accept-head")(accept_head)
    app.add_typer(group, name="audit")
