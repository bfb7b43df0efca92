"""Records of modules and guards within a transaction: found, added and changed. ``modules.py`` opens the transactions.

Every change is conditional on the revision that its caller saw, obeys ``lifecycle.py`` and is told of in the audit trail.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row, Select, func, select
from sqlalchemy.orm import Session

from server.registry.audit import Actor, append, last_word
from server.registry.joining import left, replaced, superseding
from server.registry.lifecycle import (
    ALLOWED,
    LIVE,
    Action,
    binds,
    check_revision,
    ended_at,
    expired,
    follow,
    in_force,
    over,
)
from server.registry.refusals import JointOutdated, NotAllowed, NotThere
from server.registry.tables import Job, JobKind, JobState, Kind, ModuleRow, ModuleState, Origin, Takedown, new_job

CLOCK = Actor("clock", "registry")
GUARD_PREFIX = "guard:"  # of a reference that means the guard of a name, where a module has it too
_PREFIX = {Kind.MODULE: "mod", Kind.GUARD: "grd"}  # of ids


@dataclass(frozen=True)
class NewModule:
    """A module or a guard whose file is in its place and that is to get a record."""

    name: str
    digest: str
    fingerprint: str
    file: str
    origin: Origin
    activation: str = "auto"
    job_id: str | None = None
    takedown_id: str | None = None
    scope: str = ""
    effective_at: float | None = None
    expires_at: float | None = None
    kind: Kind = Kind.MODULE
    facts: Mapping[str, Any] | None = None


def etag(row: ModuleRow | Row[Any]) -> str:
    """What If-Match must say for a change to this record."""
    return f'"{row.id}-{row.revision}"'


def module_view(row: ModuleRow | Row[Any]) -> dict[str, Any]:
    """A record as the API shows it: with what a guard says of itself, and what it binds, which follows from the rest."""
    facts = row.facts or {}
    acts = facts.get("action") != "report"
    said = {"in_force": in_force(row.state, row.scope, acts), "binds": binds(row.state, row.scope, acts)}
    return over({**facts, **_record(row), **said}, time.time())


def _record(row: ModuleRow | Row[Any]) -> dict[str, Any]:
    """What the audit trail keeps the digests of."""
    return {
        "id": row.id,
        "object": "module",
        "kind": row.kind,
        "name": row.name,
        "version": row.version,
        "digest": row.digest,
        "state": row.state,
        "etag": etag(row),
        "origin": row.origin,
        "fingerprint": row.fingerprint,
        "file": row.file,
        "job_id": row.job_id,
        "takedown_id": row.takedown_id,
        "scope": row.scope or None,
        "effective_at": row.effective_at,
        "expires_at": row.expires_at,
        "created_at": row.created_at,
        "changed_at": row.changed_at,
        "allowed": sorted(ALLOWED[ModuleState(row.state)]),
    }


def add(
    session: Session, new: NewModule, activation: str, actor: Actor, now: float, beside: Collection[str] | None = None
) -> ModuleRow:
    """A record for the next version of the name, in the state that ``activation`` asks for, within a transaction.

    One that has expired by now stays calibrated, and what is live stays so. Raises JointOutdated as ``act``.
    """
    mine = (ModuleRow.name == new.name) & (ModuleRow.kind == new.kind) & (ModuleRow.fingerprint == new.fingerprint)
    version = session.scalar(select(func.max(ModuleRow.version)).where(mine)) or 0
    later = activation == "auto" and new.effective_at is not None and new.effective_at > now
    row = ModuleRow(
        id=f"{_PREFIX[new.kind]}_{uuid.uuid4().hex[:16]}",
        name=new.name,
        kind=new.kind,
        facts=dict(new.facts) if new.facts is not None else None,
        version=version + 1,
        digest=new.digest,
        state=ModuleState.CALIBRATED,
        revision=1,
        origin=new.origin,
        fingerprint=new.fingerprint,
        file=new.file,
        job_id=new.job_id,
        takedown_id=new.takedown_id,
        scope=new.scope,
        expires_at=new.expires_at,
        effective_at=new.effective_at if later else None,
        created_at=now,
        changed_at=now,
    )
    session.add(row)
    session.flush()
    detail = {"name": row.name, "digest": row.digest}
    append(session, now, actor, f"{row.kind}.add", row.id, detail, after=_record(row))
    if expired(row.expires_at, now):
        return row
    shadowed = activation == "shadow" and live_version(session, new.name, new.fingerprint, new.kind) is None
    if shadowed or (activation == "auto" and not later):
        move(session, row, Action.SHADOW if shadowed else Action.ACTIVATE, actor, now, beside)
    return row


def place(session: Session, row: ModuleRow, new: NewModule, actor: Actor, now: float) -> None:
    """Write down that a module's file lies elsewhere, or for which model it is, within a transaction."""
    before = _record(row)
    row.fingerprint, row.file = new.fingerprint, new.file
    append(session, now, actor, f"{row.kind}.place", row.id, {"name": row.name}, before=before, after=_record(row))


def apply(
    session: Session,
    reference: str,
    action: Action,
    expected: str | None,
    actor: Actor,
    now: float,
    beside: Collection[str] | None = None,
    model: str = "",
) -> ModuleRow:
    """Change a module's state within a transaction; ``model`` as for ``find``. Raises as ``act``."""
    row = find(session, reference, model)
    check_revision(module_view(row), expected)
    move(session, row, action, actor, now, beside)
    return row


def find(session: Session, reference: str, model: str = "") -> ModuleRow:
    """The row of this id, else of this name: of the versions for the model of this fingerprint, or where there are none of all,
    the one that is loaded, or the newest that none has superseded and that is not retired, or the newest. Raises NotThere.

    A name means its module, and its guard where there is no module; ``guard:NAME`` means the guard.
    """
    row = session.get(ModuleRow, reference)
    name, kinds = reference, [Kind.MODULE, Kind.GUARD]
    if reference.startswith(GUARD_PREFIX):
        name, kinds = reference.removeprefix(GUARD_PREFIX), [Kind.GUARD]
    while row is None and kinds:
        mine = (ModuleRow.name == name) & (ModuleRow.kind == kinds.pop(0))
        rows = session.scalars(select(ModuleRow).where(mine)).all()
        row = max(rows, key=lambda found: _standing(found, model), default=None)
    if row is None:
        raise NotThere(f"no module '{reference[:80]}'")
    return row


def _standing(row: ModuleRow, model: str) -> tuple[bool, bool, bool, float, int]:
    over = row.state in (ModuleState.SUPERSEDED, ModuleState.RETIRED)
    return row.fingerprint == model, row.state in LIVE, not over, row.created_at, row.version


def live_version(session: Session, name: str, fingerprint: str, kind: str = Kind.MODULE) -> ModuleRow | None:
    """The version of the name that servers of this model load."""
    mine = (ModuleRow.name == name) & (ModuleRow.kind == kind) & (ModuleRow.fingerprint == fingerprint)
    return session.scalar(select(ModuleRow).where(mine, ModuleRow.state.in_(LIVE)))


def takedown_holding(session: Session, name: str) -> str | None:
    """The newest of the takedowns' modules of this name, whatever its state and model. No file ever stands in for one."""
    mine = (ModuleRow.name == name) & (ModuleRow.origin == Origin.TAKEDOWN) & (ModuleRow.kind == Kind.MODULE)
    return session.scalar(select(ModuleRow.id).where(mine).order_by(ModuleRow.version.desc()).limit(1))


def those_in_force() -> Select[ModuleRow]:
    """The active modules that promise something together; a guard costs nothing, and is none of them.

    Files that were only put into the folder apply where a request names them, and promise nothing together.
    """
    promised = ModuleRow.takedown_id.is_not(None) | (ModuleRow.scope != "")
    return select(ModuleRow).where(ModuleRow.state == ModuleState.ACTIVE, ModuleRow.kind == Kind.MODULE, promised)


def measured_beside(session: Session, row: ModuleRow) -> Collection[str] | None:
    """The digests beside which a module's joint cost was measured when it was made; None where that decides nothing."""
    takedown = session.get(Takedown, row.takedown_id) if row.takedown_id else None
    if takedown is None or takedown.options.get("override"):
        return None
    job = session.get(Job, row.job_id) if row.job_id else None
    joint = ((job.result if job else None) or {}).get("joint") or {}
    return joint.get("beside") or ()


def measure_first(session: Session, row: ModuleRow, now: float) -> None:
    """Queue the job that measures what a module costs beside those in force and then activates it; once the name is free."""
    if session.scalar(select(Job.id).where(Job.module == row.name, Job.state.in_((JobState.QUEUED, JobState.RUNNING)))):
        return
    set_state(session, row, ModuleState(row.state), "due", CLOCK, now)
    job = new_job(JobKind.ACTIVATE, row.takedown_id, row.name, now, module_id=row.id, options={"etag": etag(row)})
    session.add(job)
    session.flush()
    append(session, now, CLOCK, f"job.{job.kind}", job.id, {"module": row.id})


def move(
    session: Session,
    row: ModuleRow,
    action: Action,
    actor: Actor,
    now: float,
    beside: Collection[str] | None = None,
    **detail: Any,
) -> None:
    """Change the state; what stood in its place, and what it joins, is superseded with it; what only that stood in for is back."""
    state = follow(ModuleState(row.state), action, row.kind)
    if state in LIVE and expired(row.expires_at, now):
        raise NotAllowed(
            f"version {row.version} of '{row.name}' expired at {ended_at(row.expires_at)} and does not come back; activate another "
            "version by its id, or submit the rows again with options.replace and a later options.expires_at"
        )
    if state in LIVE and row.origin != Origin.TAKEDOWN and (holder := takedown_holding(session, row.name)) is not None:
        raise NotAllowed(
            f"version {row.version} of '{row.name}' came as a file, and the name is a takedown's ({holder}): a file never stands "
            "in for it; activate the takedown's module, or bring the file under another name"
        )
    stood = replaced(row, superseding(session, row.takedown_id) if state == ModuleState.ACTIVE else ())
    if state == ModuleState.ACTIVE and beside is not None and row.kind == Kind.MODULE:
        same_model = those_in_force().where(ModuleRow.fingerprint == row.fingerprint, ModuleRow.id != row.id)
        stay = session.scalars(same_model.where(~stood)).all()
        if {other.digest for other in stay} != set(beside):
            names = ", ".join(sorted(other.name for other in stay)) or "none"
            raise JointOutdated(f"beside module '{row.name}' these are in force by now: {names}")
    others = session.scalars(select(ModuleRow).where(stood)).all() if state in LIVE else ()
    for other in others:
        if state == ModuleState.SHADOW:
            raise NotAllowed(
                f"version {other.version} of '{row.name}' is {other.state}, and one version of a name is loaded at a time; "
                "suspend that one first, or make the new version under another name"
            )
        set_state(session, other, ModuleState.SUPERSEDED, "superseded", actor, now, by=row.id)
    set_state(session, row, state, action, actor, now, **detail)
    for one in (one for other in others for one in left(session, other)):
        set_state(session, one, ModuleState.ACTIVE, "return", actor, now, by=row.id)


def expire(session: Session, row: ModuleRow, now: float) -> None:
    """Retire a record whose time is over; the trail keeps how it stood."""
    move(session, row, Action.RETIRE, CLOCK, now, was=row.state, effective_at=row.effective_at)


def come_back(session: Session, row: ModuleRow, now: float) -> bool:
    """Whether a record that a clock which was ahead retired stands again as it did: if nobody has changed a version of it since."""
    mine = (ModuleRow.name == row.name) & (ModuleRow.kind == row.kind) & (ModuleRow.fingerprint == row.fingerprint)
    versions = session.scalars(select(ModuleRow.id).where(mine)).all()
    stood = last_word(session, CLOCK, f"{row.kind}.retire", row.id, versions) or {}
    if "was" in stood:
        set_state(session, row, ModuleState(stood["was"]), "return", CLOCK, now, due=stood["effective_at"])
    return "was" in stood


def set_state(
    session: Session,
    row: ModuleRow,
    state: ModuleState,
    what: str,
    actor: Actor,
    now: float,
    due: float | None = None,
    **detail: Any,
) -> None:
    """Write a state down, when it is ``due`` to be active, and who did what that led to it."""
    before = _record(row)
    row.state, row.revision, row.changed_at, row.effective_at = state, row.revision + 1, now, due
    session.flush()
    said = {"name": row.name, **detail}
    append(session, now, actor, f"{row.kind}.{what}", row.id, said, before=before, after=_record(row))
