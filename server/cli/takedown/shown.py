"""How takedowns and jobs are told to people."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from server.cli.client import Away, Client, address
from server.cli.console import notes, screen, show_lines, shown_field, visible, write_json
from server.registry.lifecycle import standing
from unbind_core import UnbindError
from unbind_core.files import told

AWAY_SECONDS = 300.0  # in which a server that is started anew has loaded its model
AGAIN_SECONDS = 1.0
ENDED = ("succeeded", "failed", "cancelled")
Watch = Annotated[bool, typer.Option("--watch", help="Follow the job to its end.")]


def show_answer(answer: Mapping[str, Any]) -> None:
    """Field by field; its warnings apart."""
    for field, value in answer.items():
        if field != "warnings":
            shown = {"guard": _guard, "plan": _plan}.get(field)
            said = shown(value) if shown is not None and value is not None else shown_field(field, value)
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
    unit = "characters of secrets" if guard.get("secrets") else "lexemes"
    return f"{known}{guard['action']} at runs of {guard['run']} {unit}, {guard['too_short']} rows too short"


def warn(answer: Mapping[str, Any]) -> None:
    """What whoever posted may not have meant."""
    for warning in answer["warnings"]:
        notes.print(Text("warning:", style="yellow"), warning, highlight=False, soft_wrap=True)


def follow(client: Client, job_id: str, quietly: bool) -> dict[str, Any]:
    """The job when it has ended; meanwhile how far it is. Raises UnbindError where the server went away and does not come back."""
    columns = (
        TextColumn("{task.description:10}", markup=False),
        BarColumn(),
        TextColumn("{task.percentage:3.0f} % {task.fields[note]}", markup=False),
    )
    job: dict[str, Any] = {}
    with Progress(
        *columns, TimeElapsedColumn(), console=notes, transient=True, disable=quietly or not notes.is_terminal
    ) as bars:
        bar = bars.add_task("waiting", total=1.0, note="")
        for job in _states(client, job_id):
            left = f"{job['eta_seconds']:.0f} s left ({job['eta_basis']})  " if job["eta_seconds"] is not None else ""
            bars.update(
                bar,
                description=job["stage"] or job["state"],
                completed=job["progress"],
                note=f"{left}{visible(job['message'])}",
            )
    return job


def _states(client: Client, job_id: str) -> Iterator[dict[str, Any]]:
    """What a job becomes, to its end; a server that is started anew meanwhile is waited for."""
    job: dict[str, Any] = {}
    left: float | None = None  # when the server went away
    while True:
        try:
            for job in client.events(address("jobs", job_id, "events")):
                left = None
                yield job
        except Away:
            if not job:
                raise
        if job.get("state") in ENDED:
            return
        if left is None:
            left = time.monotonic()
            notes.print(f"the server went away; waiting for it, as job {job_id} goes on then", soft_wrap=True)
        if time.monotonic() - left >= AWAY_SECONDS:
            raise UnbindError(
                f"the server went away while job {job_id} was running, and is not back; the job goes on when it is, and "
                f"`unbind takedown watch {job_id}` follows it again"
            )
        time.sleep(AGAIN_SECONDS)


def show_ended(jobs: list[dict[str, Any]], as_json: bool, one: bool = True) -> None:
    """Jobs that were followed; ``one``: as JSON by itself and in no list. Raises Exit where one has failed."""
    if as_json:
        write_json(jobs[0] if one else jobs)
    else:
        show_jobs(jobs)
    if any(job["state"] != "succeeded" for job in jobs):
        raise typer.Exit(1)


def show_jobs(jobs: Sequence[Mapping[str, Any]]) -> None:
    """A line a job."""
    show_lines(_COLUMNS, ([told[column] for column in _COLUMNS] for told in map(_told, jobs)))


def show_job(job: Mapping[str, Any]) -> None:
    """One job field by field, with its takedown."""
    show_answer({field: text for field, text in _told(job).items() if text})


_MADE_NOTHING = {
    "ineffective": "no gate met the budgets, so that there is no module; give fewer rows in one takedown, or, through the API, "
    "wider options.budgets",
    "nothing_to_remove": "the model does not recite these rows, so that there is no module",
}
_COLUMNS = ("job", "module", "state", "stage", "progress", "left", "outcome")


def _told(job: Mapping[str, Any]) -> dict[str, str]:
    """What people are told of a job, by name; empty where there is nothing to tell."""
    outcome, made = job["outcome"] or "", job["result"] or {}
    if made.get("in_force"):
        outcome = outcome if "guard_id" in made else standing({"state": outcome, **made})
    told = _MADE_NOTHING.get(outcome), made.get("joint_verdict"), made.get("remark")
    said = str(job["error"] or "; ".join(filter(None, (outcome, *told))))
    return {
        "job": job["id"],
        "takedown": job["takedown_id"] or "",
        "module": job["module"],
        "state": job["state"],
        "stage": job["stage"] or "",
        "progress": f"{100 * job['progress']:.0f} %",
        "left": "" if job["eta_seconds"] is None else f"{job['eta_seconds']:.0f} s",
        "outcome": " ".join(said.split()),
    }
