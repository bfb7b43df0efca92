"""The commands of ``unbind takedown``."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any
from urllib.parse import urlencode

import typer

from server.cli.client import LOCAL, Client, Key, Url, address
from server.cli.console import AsJson, clear_errors, notes, screen, show_lines, write_json
from server.cli.takedown.join import join
from server.cli.takedown.shown import ENDED, Watch, follow, show_answer, show_ended, show_job, show_jobs
from server.cli.takedown.submit import submit
from server.registry.lifecycle import InForce, standing

NEWEST = 20
JobId = Annotated[str, typer.Argument(help="Job id, as submit printed it.")]


def list_takedowns(
    find: Annotated[str, typer.Option(help="Only those whose name or notice holds this text.")] = "",
    url: Url = LOCAL,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """All takedowns, the newest first: whom each binds now, and where its newest job is."""
    with clear_errors():
        found = Client(url, key).whole(f"/takedowns?limit=1000&{urlencode({'find': find})}")["data"]
    if as_json:
        write_json(found)
        return
    lines = []
    for takedown in found:
        at = datetime.fromtimestamp(takedown["created_at"], UTC).strftime("%Y-%m-%d %H:%M:%S")
        scope = f" ({takedown['scope']})" if takedown["in_force"] == InForce.ENFORCED else ""
        job = takedown["job"]
        lines.append([takedown["id"], takedown["name"], at, f"{takedown['in_force']}{scope}", job["id"], job["state"]])
    show_lines(("takedown", "name", "received (UTC)", "in force", "job", "state"), lines)


def show(
    takedown_id: Annotated[str, typer.Argument(help="Takedown id.")],
    url: Url = LOCAL,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """One takedown: what was asked, its modules and its guard, and which requests they bind."""
    with clear_errors():
        answer = Client(url, key).call(address("takedowns", takedown_id))
    if as_json:
        write_json(answer)
        return
    show_answer({name: value for name, value in answer.items() if name != "modules"})
    for module in answer["modules"]:
        said = f"{module['name']} version {module['version']}: {standing(module)}"
        screen.print(f"{'module':18} {said}", highlight=False, soft_wrap=True)


def status(
    job_id: Annotated[str | None, typer.Argument(help="Job id; the newest jobs where none is given.")] = None,
    url: Url = LOCAL,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Where a job is, and its takedown; or all jobs that have not ended, with the newest that have."""
    with clear_errors():
        client = Client(url, key)
        if job_id is not None:
            jobs = [client.call(address("jobs", job_id))]
        else:  # however many wait, the one that has the device is among them
            newest = client.call("/jobs?limit=1000")["data"]
            jobs = [job for place, job in enumerate(newest) if place < NEWEST or job["state"] not in ENDED]
    if as_json:
        write_json(jobs[0] if job_id is not None else jobs)
    elif job_id is not None:
        show_job(jobs[0])
    else:
        show_jobs(jobs)


def watch(job_id: JobId, url: Url = LOCAL, key: Key = None, as_json: AsJson = False) -> None:
    """Follow a job to its end; ends with code 1 where it failed."""
    with clear_errors():
        job = follow(Client(url, key), job_id, as_json)
    show_ended([job], as_json)


def cancel(job_id: JobId, url: Url = LOCAL, key: Key = None, as_json: AsJson = False) -> None:
    """Ask a job to stop; one that has ended stays as it is."""
    job = _post(job_id, "cancel", url, key, as_json)
    if job["state"] in ENDED and job["state"] != "cancelled":
        notes.print(f"job {job['id']} has {job['state']} already: nothing was cancelled", soft_wrap=True)


def retry(job_id: JobId, watch: Watch = False, url: Url = LOCAL, key: Key = None, as_json: AsJson = False) -> None:
    """Queue a failed or cancelled job again; it goes on after its last finished stage."""
    _post(job_id, "retry", url, key, as_json, quietly=watch)
    if watch:
        with clear_errors():
            job = follow(Client(url, key), job_id, as_json)
        show_ended([job], as_json)


def purge(
    takedown_id: Annotated[str, typer.Argument(help="Takedown id.")],
    url: Url = LOCAL,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Delete a takedown's rows; record, digest and module stay."""
    with clear_errors():
        answer = Client(url, key).call(address("takedowns", takedown_id, "purge"), method="POST")
    if as_json:
        write_json(answer)
    else:
        kept = ", ".join(answer["rows_kept_by"])
        done = f"kept on for {kept}, which has them too: purge that as well" if kept else "deleted"
        screen.print(f"the rows of {takedown_id} are {done}; their digest is {answer['forget_digest']}", soft_wrap=True)


def _post(job_id: str, what: str, url: str, key: str | None, as_json: bool, quietly: bool = False) -> dict[str, Any]:
    with clear_errors():
        job: dict[str, Any] = Client(url, key).call(address("jobs", job_id, what), method="POST")
    if as_json and not quietly:
        write_json(job)
    elif not quietly:
        show_jobs([job])
    return job


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = typer.Typer(help="Takedowns on a running server.", no_args_is_help=True)
    group.command("list")(list_takedowns)
    for command in (submit, join, show, status, watch, cancel, retry, purge):
        group.command(command.__name__)(command)
    app.add_typer(group, name="takedown")
