"""Registry records and a job's files -> the evidence of one takedown. Read only; the admin API hands it out."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from server.evidence.page import page
from server.evidence.signing import sign, signing_key
from server.registry.access import Access
from server.registry.registry import Registry
from server.registry.tables import JobKind, JobState
from server.rules import Rules
from server.settings import Settings


def evidence(registry: Registry, settings: Settings, takedown_id: str, model: dict[str, Any]) -> dict[str, Any]:
    """The signed document. Raises NotThere. What was purged is missing from it, its digest is not."""
    payload = collect(registry, settings, takedown_id, model)
    return sign(payload, page(payload), signing_key(settings.data_dir))


def collect(registry: Registry, settings: Settings, takedown_id: str, model: dict[str, Any]) -> dict[str, Any]:
    """Everything the document says, as plain JSON values."""
    takedown = registry.takedowns.get(takedown_id)
    now = time.time()
    jobs = [registry.jobs.get(job_id, now) for job_id in takedown["jobs"]]
    told = {
        takedown_id,
        *takedown["jobs"],
        *(module["id"] for module in takedown["modules"]),
    }
    payload: dict[str, Any] = {
        "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "software": _software(),
        "model": model,
        "takedown": takedown,
        "jobs": jobs,
        "named_by": _named_by(registry, settings, {module["name"] for module in takedown["modules"]}),
        "audit": registry.audit_of(told),
        "report": None,
        "exhibits": None,
    }
    done = [job for job in jobs if job["kind"] == JobKind.TAKEDOWN and job["state"] == JobState.SUCCEEDED]
    if done:
        folder = settings.data_dir / "jobs" / done[-1]["id"]
        stages = registry.jobs.stages(done[-1]["id"])
        payload["result"] = done[-1]["result"]
        payload["report"] = _read(folder, stages.get("fit"), "report.json")
        payload["exhibits"] = _read(folder, stages.get("verify"), "exhibits.json")
    return payload


def _named_by(registry: Registry, settings: Settings, names: set[str]) -> list[str]:
    """The scopes whose rules demand one of these modules: what may bind requests beside a module's own scope."""
    rules = {"settings": Rules(enforced=settings.enforced), **Access(registry.transactions).current.rules}
    rules |= {f"profile:{name}": profile for name, profile in settings.profiles.items()}
    return sorted(scope for scope, said in rules.items() if names & {*said.modules, *said.enforced})


def _read(folder: Path, stage: dict[str, Any] | None, name: str) -> Any:
    try:
        return json.loads((folder / str((stage or {})["folder"]) / name).read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError):
        return None


def _software() -> str:
    try:
        return f"unbind-server {version('unbind-server')}"
    except PackageNotFoundError:
        return "unbind-server, unreleased"
