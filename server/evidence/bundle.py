"""Registry records and a job's files -> the evidence of one takedown. Read only; the admin API hands it out."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from server.evidence.page import page
from server.evidence.signing import sign, signing_key
from server.registry.access import Access, Snapshot
from server.registry.lifecycle import InForce
from server.registry.private.files import TakedownFiles
from server.registry.registry import Registry
from server.registry.tables import JobKind, JobState, ModuleState
from server.registry.takedowns import Unreached
from server.rules import Rules
from server.settings import Settings


def evidence(registry: Registry, settings: Settings, takedown_id: str, model: dict[str, Any]) -> dict[str, Any]:
    """The signed document. Raises NotThere. What was purged is missing from it, its digest is not."""
    payload = collect(registry, settings, takedown_id, model)
    return sign(payload, page(payload), signing_key(settings.data_dir))


def collect(registry: Registry, settings: Settings, takedown_id: str, model: dict[str, Any]) -> dict[str, Any]:
    """Everything the document says, as plain JSON values."""
    now, access = time.time(), Access(registry.transactions).current

    def unreached(scope: str) -> str:
        return access.unreached(scope, now, settings.profiles)

    takedown = registry.takedowns.get(takedown_id, unreached)
    jobs = [registry.jobs.get(job_id, now) for job_id in takedown["jobs"]]
    made = [*takedown["modules"], *([takedown["guard"]] if takedown["guard"] else [])]
    told = {takedown_id, *takedown["jobs"], *(record["id"] for record in made)}
    payload: dict[str, Any] = {
        "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "software": _software(),
        "model": model,
        "takedown": takedown,
        "jobs": jobs,
        "named_by": named_by(access, settings, {record["name"] for record in made}),
        "successors": _successors(registry, takedown, made, unreached),
        "audit": registry.audit_of(told),
        "report": None,
        "exhibits": None,
    }
    if (done := _told_of(jobs, model)) is not None:
        job_id = done["id"]
        files, stages = TakedownFiles(settings), registry.jobs.stages(job_id)
        payload["result"] = done["result"]
        payload["report"] = _read(files, job_id, stages.get("fit"), "report.json")
        payload["exhibits"] = _read(files, job_id, stages.get("verify"), "exhibits.json")
    return payload


def _told_of(jobs: list[dict[str, Any]], model: dict[str, Any]) -> dict[str, Any] | None:
    """The newest job that made the takedown's module for this very model, by a fit or by adopting it; else its newest takedown."""
    made = [job for job in jobs if job["state"] == JobState.SUCCEEDED and _made_for(job) == model.get("fingerprint")]
    ended = [job for job in jobs if job["state"] == JobState.SUCCEEDED and job["kind"] == JobKind.TAKEDOWN]
    return next(iter([*made[::-1], *ended[::-1]]), None)


def _made_for(job: dict[str, Any]) -> Any:
    return ((job["result"] or {}).get("publish") or {}).get("fingerprint", "")


def named_by(access: Snapshot, settings: Settings, names: set[str]) -> list[str]:
    """The scopes whose rules demand one of these names: what may bind requests beside a record's own scope."""
    rules = {"settings": Rules(enforced=settings.enforced), **access.rules}
    rules |= {f"profile:{name}": profile for name, profile in settings.profiles.items()}
    return sorted(scope for scope, said in rules.items() if names & {*said.modules, *said.enforced})


def _successors(
    registry: Registry, takedown: dict[str, Any], made: list[dict[str, Any]], unreached: Unreached
) -> list[dict[str, Any]]:
    """What is in force, by another takedown of the very same rows or of these among others, in place of what this one ``made`` and
    was superseded.
    """
    joined = (view for one in takedown["joined_by"] for view in registry.takedowns.get(one, unreached)["modules"])
    found = [view for view in joined if view["in_force"] != InForce.NONE]
    for name, kind in ((own["name"], own["kind"]) for own in made if own["state"] == ModuleState.SUPERSEDED):
        for beside in registry.modules.versions(name):
            if beside["kind"] != kind or beside["state"] != ModuleState.ACTIVE or beside["takedown_id"] is None:
                continue
            other = registry.takedowns.get(beside["takedown_id"], unreached)
            if other["forget_digest"] == takedown["forget_digest"]:
                views = (*other["modules"], *([other["guard"]] if other["guard"] else []))
                found += [view for view in views if view["id"] == beside["id"] and view["in_force"] != InForce.NONE]
    return list({view["id"]: view for view in found}.values())


def _read(files: TakedownFiles, job_id: str, stage: dict[str, Any] | None, name: str) -> Any:
    return files.read_json(job_id, str(stage["folder"]), name) if stage and "folder" in stage else None


def _software() -> str:
    try:
        return f"unbind-server {version('unbind-server')}"
    except PackageNotFoundError:
        return "unbind-server, unreleased"
