"""``unbind takedown``: submit a forget set to a running server, see what it binds, follow its job, stop it, try it again."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from server.cli.client import LOCAL, Client, Key, Url
from server.cli.console import clear_errors, notes, screen, write_json
from server.registry.lifecycle import SCOPE, standing
from unbind_core import UnbindError
from unbind_core.files import told

AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable output on stdout.")]
JobId = Annotated[str, typer.Argument(help="Job id, as submit printed it.")]
Field = Annotated[str | None, typer.Option()]
ENDED = ("succeeded", "failed", "cancelled")
NO_SCOPE = "none"
NONE_GIVEN = "options.scope: none was given"  # how the warning begins that is for those who said nothing


def submit(
    file: Annotated[Path, typer.Argument(help="JSONL of rows, or .zip or .tar.gz of source files.", exists=True)],
    name: Annotated[str, typer.Option(help="Name of the module.")],
    claimant: Field = None,
    work: Field = None,
    reference: Field = None,
    received_at: Field = None,
    include: Annotated[str | None, typer.Option(help="Glob of files in an archive; * matches / too.")] = None,
    exclude: Annotated[str | None, typer.Option(help="Glob of files to leave out.")] = None,
    activation: Annotated[str, typer.Option(help="auto, manual or shadow.")] = "auto",
    scope: Annotated[
        str | None,
        typer.Option(help="Enforced for: global, profile:NAME or key:ID; none: for no request that does not name it."),
    ] = None,
    effective_at: Annotated[str | None, typer.Option(help="ISO 8601 with a zone.")] = None,
    expires_at: Annotated[str | None, typer.Option(help="ISO 8601 with a zone.")] = None,
    seed: int = 0,
    gate: Annotated[
        str, typer.Option(help="auto; paper for the paper's gate; paper-strict for exactly the published fit.")
    ] = "auto",
    policy: Annotated[
        str | None,
        typer.Option(help="rewrite: other code is written; silent: the answer ends. rewrite with gate auto."),
    ] = None,
    effort: Annotated[
        float, typer.Option(help="Share of the training steps; below 1 for a quick look. Of gate auto.")
    ] = 1.0,
    protect: Annotated[
        str | None, typer.Option(help="both, guard or module; both where a row is long enough for a guard.")
    ] = None,
    guard_action: Annotated[str | None, typer.Option(help="steer, stop or report; steer where none is given.")] = None,
    guard_run: Annotated[int | None, typer.Option(help="Lexemes of a run that no answer holds; 50.")] = None,
    guard_bars: Annotated[int | None, typer.Option(help="Tokens that steering bars before it stops; 3.")] = None,
    guard_fold: Annotated[bool, typer.Option(help="Runs with other names are the same run.")] = False,
    replace: Annotated[bool, typer.Option(help="Make the next version of a name that is in use.")] = False,
    dry_run: Annotated[bool, typer.Option(help="Only tell rows, positions, memory, disk and time.")] = False,
    idempotency_key: Field = None,
    watch: Annotated[bool, typer.Option("--watch", help="Follow the job to its end.")] = False,
    url: Url = LOCAL,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Post a forget set, whose guard holds from then on; prints the job that makes its module."""
    if scope is None and not as_json and at_terminal():
        scope = _ask_scope()
    notice = {"claimant": claimant, "work": work, "reference": reference, "received_at": received_at}
    asked = {"action": guard_action, "run": guard_run, "bars": guard_bars, "fold": guard_fold or None}
    guard = {name: value for name, value in asked.items() if value is not None} or None
    options = {
        "protect": protect,
        "guard": guard,
        "activation": activation,
        "scope": None if scope == NO_SCOPE else scope,
        "effective_at": effective_at,
        "expires_at": expires_at,
        "seed": seed,
        "gate": gate,
        "policy": policy,
        "effort": effort if effort != 1 else None,
        "replace": replace,
        "dry_run": dry_run,
    }
    fields = {
        "name": name,
        "notice": _given(notice),
        "options": _given(options),
        **({"include": include} if include else {}),
        **({"exclude": exclude} if exclude else {}),
    }
    headers = {"Idempotency-Key": idempotency_key} if idempotency_key else {}
    with clear_errors():
        client = Client(url, key)
        answer = client.upload("/takedowns", fields, file, headers)
        if scope == NO_SCOPE:  # as was said; that a version which binds is superseded is still told
            answer["warnings"] = [said for said in answer["warnings"] if not said.startswith(NONE_GIVEN)]
        if watch and not dry_run:
            _warn(answer)
            _watch(client, answer["job_id"], as_json)
            return
    if as_json:
        write_json(answer)
        return
    _print(answer)
    _warn(answer)


def show(
    takedown_id: Annotated[str, typer.Argument(help="Takedown id.")],
    url: Url = LOCAL,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """One takedown: what was asked, its modules and its guard, and which requests they bind."""
    with clear_errors():
        answer = Client(url, key).call(f"/takedowns/{takedown_id}")
    if as_json:
        write_json(answer)
        return
    _print({name: value for name, value in answer.items() if name != "modules"})
    for module in answer["modules"]:
        said = f"{module['name']} version {module['version']}: {standing(module)}"
        screen.print(f"{'module':18} {said}", highlight=False, soft_wrap=True)


def status(
    job_id: Annotated[str | None, typer.Argument(help="Job id; the newest jobs where none is given.")] = None,
    url: Url = LOCAL,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Where a job is, or a table of jobs."""
    with clear_errors():
        client = Client(url, key)
        jobs = [client.call(f"/jobs/{job_id}")] if job_id else client.call("/jobs?limit=20")["data"]
    if as_json:
        write_json(jobs[0] if job_id else jobs)
    else:
        screen.print(_table(jobs))


def watch(job_id: JobId, url: Url = LOCAL, key: Key = None, as_json: AsJson = False) -> None:
    """Follow a job to its end; ends with code 1 where it failed."""
    with clear_errors():
        _watch(Client(url, key), job_id, as_json)


def cancel(job_id: JobId, url: Url = LOCAL, key: Key = None, as_json: AsJson = False) -> None:
    """Ask a job to stop."""
    _post(job_id, "cancel", url, key, as_json)


def retry(job_id: JobId, url: Url = LOCAL, key: Key = None, as_json: AsJson = False) -> None:
    """Queue a failed or cancelled job again; it goes on after its last finished stage."""
    _post(job_id, "retry", url, key, as_json)


def purge(
    takedown_id: Annotated[str, typer.Argument(help="Takedown id.")],
    url: Url = LOCAL,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Delete a takedown's rows; record, digest and module stay."""
    with clear_errors():
        answer = Client(url, key).call(f"/takedowns/{takedown_id}/purge", method="POST")
    if as_json:
        write_json(answer)
    else:
        screen.print(
            f"the rows of {takedown_id} are deleted; their digest was {answer['forget_digest']}", soft_wrap=True
        )


def _post(job_id: str, what: str, url: str, key: str | None, as_json: bool) -> None:
    with clear_errors():
        job = Client(url, key).call(f"/jobs/{job_id}/{what}", method="POST")
    if as_json:
        write_json(job)
    else:
        screen.print(_table([job]))


def at_terminal() -> bool:
    """Whether somebody sits there to be asked: never in a pipe, a cron job or a service."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def _ask_scope() -> str:
    """The scope, asked for on a terminal; ``none`` for none."""
    screen.print(
        "Which requests must it bind?\n"
        "  none           only those that name it: it is available, not enforced\n"
        "  global         every request\n"
        "  profile:NAME   every request under a profile\n"
        "  key:ID         every request with a key",
        highlight=False,
    )
    while True:
        scope = str(typer.prompt("scope", default=NO_SCOPE)).strip()
        if scope == NO_SCOPE or re.fullmatch(SCOPE, scope):
            return scope
        screen.print(f"'{scope}' is none of these", highlight=False)


def _print(answer: Mapping[str, Any]) -> None:
    for field, value in answer.items():
        if field != "warnings":
            shown = {"guard": _guard, "plan": _plan}.get(field)
            said = shown(value) if shown is not None and value is not None else value
            screen.print(f"{field:18} {said}", highlight=False, soft_wrap=True)


def _plan(plan: Mapping[str, Any]) -> str:
    fits = "fits" if plan["fits"] else "does not fit"
    memory, disk = (
        f"{told(plan[f'{what}_bytes'])} of {told(plan[f'free_{what}_bytes'])} free" for what in ("memory", "disk")
    )
    return f"{fits}: at most {memory} on {plan['device']}, {disk} on disk; about {plan['seconds']:.0f} s"


def _guard(guard: Mapping[str, Any]) -> str:
    known = (
        f"version {guard['version']}: {standing(guard)}; " if "version" in guard else ""
    )  # not of one that is only tried
    return f"{known}{guard['action']} at runs of {guard['run']} lexemes, {guard['too_short']} rows too short"


def _warn(answer: Mapping[str, Any]) -> None:
    for warning in answer["warnings"]:
        notes.print(Text("warning:", style="yellow"), warning, highlight=False, soft_wrap=True)


def _given(values: dict[str, Any]) -> str:
    return json.dumps({name: value for name, value in values.items() if value is not None})


def _watch(client: Client, job_id: str, as_json: bool) -> None:
    columns = (
        TextColumn("{task.description:10}", markup=False),
        BarColumn(),
        TextColumn("{task.percentage:3.0f} % {task.fields[note]}", markup=False),
    )
    job: dict[str, Any] = {}
    with Progress(
        *columns, TimeElapsedColumn(), console=notes, transient=True, disable=as_json or not notes.is_terminal
    ) as bars:
        bar = bars.add_task("waiting", total=1.0, note="")
        for job in client.events(f"/jobs/{job_id}/events"):
            left = f"{job['eta_seconds']:.0f} s left ({job['eta_basis']})  " if job["eta_seconds"] is not None else ""
            bars.update(
                bar, description=job["stage"] or job["state"], completed=job["progress"], note=f"{left}{job['message']}"
            )
    if job.get("state") not in ENDED:
        raise UnbindError(f"the server went away while job {job_id} was running; it goes on when the server is back")
    if as_json:
        write_json(job)
    else:
        screen.print(_table([job]))
    if job["state"] != "succeeded":
        raise typer.Exit(1)


def _table(jobs: list[dict[str, Any]]) -> Table:
    table = Table("job", "module", "state", "stage", "progress", "left", "outcome", box=None)
    for job in jobs:
        left = "" if job["eta_seconds"] is None else f"{job['eta_seconds']:.0f} s"
        outcome = job["outcome"] or ""
        if (made := job["result"] or {}).get("in_force"):
            outcome = outcome if "guard_id" in made else standing({"state": outcome, **made})
        table.add_row(
            job["id"],
            job["module"],
            job["state"],
            job["stage"],
            f"{100 * job['progress']:.0f} %",
            left,
            job["error"] or (job["result"] or {}).get("remark") or outcome,
        )
    return table


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = typer.Typer(help="Takedowns on a running server.", no_args_is_help=True)
    for command in (submit, show, status, watch, cancel, retry, purge):
        group.command(command.__name__)(command)
    app.add_typer(group, name="takedown")
