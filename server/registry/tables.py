"""The tables of the registry. Only ``server/registry`` writes SQL; times are UTC seconds since the epoch.

What is declared here and what the migrations build is the same: a test compares them.
"""

from __future__ import annotations

import uuid
from enum import StrEnum
from typing import Any, TypeVar

from sqlalchemy import JSON, ForeignKey, Index, Select, String, case, cast, or_, select, text, tuple_
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class JobState(StrEnum):
    """A job's life: queued -> running -> one of the three ends; a lost lease takes it back to queued."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


ENDED = (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)


class JobKind(StrEnum):
    """What a job is for; ``server/worker/stages.py`` says by which stages."""

    TAKEDOWN = "takedown"
    VERIFY = "verify"
    ADOPT = "adopt"
    ACTIVATE = "activate"
    PREPARE = "prepare"  # a worker's own, while nothing waits; never in the table


class Kind(StrEnum):
    """What a record of the table ``modules`` is of: both kinds stand under a takedown's name, and live by the same rules."""

    MODULE = "module"
    GUARD = "guard"


class ModuleState(StrEnum):
    """A module's life; ``lifecycle.py`` says what may follow what."""

    CALIBRATED = "calibrated"
    SHADOW = "shadow"
    ACTIVE = "active"
    SUSPENDED = "suspended"
    SUPERSEDED = "superseded"
    RETIRED = "retired"


class Origin(StrEnum):
    """Where a module came from: made by a takedown, or found as a file in the shipped or the published folder."""

    TAKEDOWN = "takedown"
    SHIPPED = "shipped"
    DROPPED = "dropped"


class Base(DeclarativeBase):
    """Column types by Python type."""

    type_annotation_map = {dict[str, Any]: JSON}  # noqa: RUF012 - how SQLAlchemy is told


NOTICE = ("claimant", "work", "received_at", "reference", "note")  # on whose word, about what


class Takedown(Base):
    """What somebody asked to have forgotten. The rows themselves are a file under the data directory, mode 0600."""

    __tablename__ = "takedowns"
    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(index=True)
    row_count: Mapped[int]
    forget_digest: Mapped[str]
    notice: Mapped[dict[str, Any]]
    options: Mapped[dict[str, Any]]
    created_at: Mapped[float]
    purged_at: Mapped[float | None] = mapped_column(default=None)  # when the rows were deleted; the digest stays


class Job(Base):
    """The work a takedown makes. ``fence`` grows with every claim; a worker with an old one may change nothing."""

    __tablename__ = "jobs"
    id: Mapped[str] = mapped_column(primary_key=True)
    takedown_id: Mapped[str | None] = mapped_column(ForeignKey("takedowns.id"), index=True)
    kind: Mapped[str] = mapped_column(default=JobKind.TAKEDOWN)
    module: Mapped[str] = mapped_column(index=True)
    module_id: Mapped[str | None] = mapped_column(default=None)
    state: Mapped[str] = mapped_column(index=True)
    stage: Mapped[str] = mapped_column(default="")
    stage_progress: Mapped[float] = mapped_column(default=0.0)
    stage_started_at: Mapped[float | None] = mapped_column(default=None)
    progress: Mapped[float] = mapped_column(default=0.0)
    message: Mapped[str] = mapped_column(default="")
    attempt: Mapped[int] = mapped_column(default=0)
    fence: Mapped[int] = mapped_column(default=0)
    lease_owner: Mapped[str | None] = mapped_column(default=None)
    lease_expires: Mapped[float] = mapped_column(default=0.0)
    cancel_requested: Mapped[bool] = mapped_column(default=False)
    idempotency_key: Mapped[str | None] = mapped_column(unique=True, default=None)
    request_digest: Mapped[str] = mapped_column(default="")
    stages: Mapped[dict[str, Any]] = mapped_column(default=dict)  # finished stage -> its seconds, folder and result
    options: Mapped[dict[str, Any]] = mapped_column(default=dict)
    result: Mapped[dict[str, Any] | None] = mapped_column(JSON, default=None)
    error: Mapped[str | None] = mapped_column(default=None)
    created_at: Mapped[float]
    started_at: Mapped[float | None] = mapped_column(default=None)
    finished_at: Mapped[float | None] = mapped_column(default=None)


class ModuleRow(Base):
    """One version of a module or a guard. ``revision`` grows with every change and is its ETag."""

    __tablename__ = "modules"
    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(index=True)
    version: Mapped[int]
    kind: Mapped[str] = mapped_column(default=Kind.MODULE)
    digest: Mapped[str]
    state: Mapped[str]
    revision: Mapped[int] = mapped_column(default=1)
    origin: Mapped[str]
    fingerprint: Mapped[str]  # of the model it was fitted on; empty for a guard, which holds for any
    file: Mapped[str]  # key in the store, or the path of a shipped file
    job_id: Mapped[str | None] = mapped_column(ForeignKey("jobs.id"), unique=True)
    takedown_id: Mapped[str | None] = mapped_column(ForeignKey("takedowns.id"))
    scope: Mapped[str] = mapped_column(default="")
    effective_at: Mapped[float | None] = mapped_column(default=None)
    expires_at: Mapped[float | None] = mapped_column(default=None)
    created_at: Mapped[float]
    changed_at: Mapped[float]
    facts: Mapped[dict[str, Any] | None] = mapped_column(
        JSON, default=None
    )  # of a guard: what its file says, and the notice's reference


class KeyRow(Base):
    """A key, known by the SHA-256 of its text. Revoked keys stay: what was once locked never falls open."""

    __tablename__ = "api_keys"
    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    digest: Mapped[str] = mapped_column(unique=True)
    scopes: Mapped[list[str]] = mapped_column(JSON)
    profile: Mapped[str | None] = mapped_column(default=None)
    per_minute: Mapped[float | None] = mapped_column(default=None)
    burst: Mapped[int] = mapped_column(default=1)
    tokens_per_minute: Mapped[float | None] = mapped_column(default=None)
    created_at: Mapped[float]
    expires_at: Mapped[float | None] = mapped_column(default=None)
    revoked_at: Mapped[float | None] = mapped_column(default=None)


class RulesRow(Base):
    """The rules of a scope: ``global``, ``key:ID`` or ``profile:NAME``."""

    __tablename__ = "policies"
    scope: Mapped[str] = mapped_column(primary_key=True)
    rules: Mapped[dict[str, Any]]
    updated_at: Mapped[float]


class AuditRow(Base):
    """What was done, by whom, to what. Rows are added, never changed: the database refuses it."""

    __tablename__ = "audit"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    at: Mapped[float]
    actor: Mapped[str]
    source: Mapped[str]
    action: Mapped[str]
    subject: Mapped[str]
    detail: Mapped[dict[str, Any]]
    before: Mapped[str]
    after: Mapped[str]
    previous: Mapped[str]
    digest: Mapped[str]


def new_job(kind: JobKind, takedown_id: str | None, module: str, now: float, **fields: Any) -> Job:
    """A job that waits to be claimed, not yet in any session."""
    return Job(
        id=f"job_{uuid.uuid4().hex[:16]}",
        kind=kind,
        takedown_id=takedown_id,
        module=module,
        state=JobState.QUEUED,
        created_at=now,
        stages={},
        stage="",
        stage_progress=0.0,
        progress=0.0,
        message="",
        attempt=0,
        fence=0,
        lease_expires=0.0,
        cancel_requested=False,
        **{"request_digest": "", "options": {}, **fields},
    )


_LIVE = text("state IN ('active', 'shadow')")
_FITTED = text("kind = 'module'")
_MAKING = text("state IN ('queued', 'running')")
Index("jobs_claim", Job.state, Job.created_at)
# One job at a time makes a module or changes it, and one version of a name is loaded: the database itself sees to it.
Index("jobs_making", Job.module, unique=True, sqlite_where=_MAKING, postgresql_where=_MAKING)
_THING = (ModuleRow.name, ModuleRow.kind, ModuleRow.fingerprint)
Index("modules_version", *_THING, ModuleRow.version, unique=True)
Index("modules_live", *_THING, unique=True, sqlite_where=_LIVE, postgresql_where=_LIVE)
# A module's file tells when it was made; the same rows, posted again, make the same guard.
Index("modules_digest", ModuleRow.digest, unique=True, sqlite_where=_FITTED, postgresql_where=_FITTED)


Listed = TypeVar("Listed", Job, Takedown)


def newest(table: type[Listed], limit: int, behind: Listed | None = None) -> Select[Listed]:
    """The newest records first, or what follows the one ``behind`` which the list goes on."""
    query = select(table).order_by(table.created_at.desc(), table.id.desc()).limit(limit)
    if behind is not None:  # of those that came at one moment each has its place
        query = query.where(tuple_(table.created_at, table.id) < tuple_(behind.created_at, behind.id))
    return query


def received(limit: int, behind: Takedown | None, find: str) -> Select[Takedown]:
    """The newest takedowns as ``newest`` has them: those whose name, or a part of whose notice, holds this text, with a to z in
    capitals or not.
    """
    # PostgreSQL reads no text with a NUL in it out of JSON, and refuses the whole search: such a notice is of an older version.
    plain = ~cast(Takedown.notice, String).contains(r"\u0000", autoescape=True)
    parts = [Takedown.name, *(case((plain, Takedown.notice[part].as_string()), else_="") for part in NOTICE)]
    query = newest(Takedown, limit, behind)
    return query.where(or_(*(part.icontains(find, autoescape=True) for part in parts))) if find else query


def by_name(query: Select[Any], name: str | None = None, behind: ModuleRow | None = None) -> Select[Any]:
    """Every version, or those of a name, by name and age, its modules before its guards; or what follows the one ``behind``."""
    of, kind, place = ModuleRow.name, ModuleRow.kind, tuple_(ModuleRow.version, ModuleRow.id)
    query = query.order_by(of, kind.desc(), ModuleRow.version, ModuleRow.id)
    if name is not None:
        query = query.where(of == name)
    if behind is not None:
        later = (kind < behind.kind) | ((kind == behind.kind) & (place > tuple_(behind.version, behind.id)))
        query = query.where(of >= behind.name, (of > behind.name) | later)
    return query


def of_digest(digest: str) -> Select[ModuleRow]:
    """The module, which no other has the bytes of."""
    return select(ModuleRow).where(ModuleRow.digest == digest, ModuleRow.kind == Kind.MODULE)
