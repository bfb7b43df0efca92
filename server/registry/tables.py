"""The tables of the registry. Only ``server/registry`` writes SQL; times are UTC seconds since the epoch."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Any

from sqlalchemy import JSON, Engine, ForeignKey, Index, create_engine, event
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class JobState(StrEnum):
    """A job's life: queued -> running -> one of the three ends; a lost lease takes it back to queued."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


ENDED = (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)


class Base(DeclarativeBase):
    """Column types by Python type."""

    type_annotation_map = {dict[str, Any]: JSON}  # noqa: RUF012 - how SQLAlchemy is told


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


class Job(Base):
    """The work a takedown makes. ``fence`` grows with every claim; a worker with an old one may change nothing."""

    __tablename__ = "jobs"
    id: Mapped[str] = mapped_column(primary_key=True)
    takedown_id: Mapped[str] = mapped_column(ForeignKey("takedowns.id"), index=True)
    module: Mapped[str] = mapped_column(index=True)
    state: Mapped[str] = mapped_column(index=True)
    stage: Mapped[str] = mapped_column(default="")
    progress: Mapped[float] = mapped_column(default=0.0)
    message: Mapped[str] = mapped_column(default="")
    attempt: Mapped[int] = mapped_column(default=0)
    fence: Mapped[int] = mapped_column(default=0)
    lease_owner: Mapped[str | None] = mapped_column(default=None)
    lease_expires: Mapped[float] = mapped_column(default=0.0)
    cancel_requested: Mapped[bool] = mapped_column(default=False)
    idempotency_key: Mapped[str | None] = mapped_column(unique=True, default=None)
    request_digest: Mapped[str] = mapped_column(default="")
    stages: Mapped[dict[str, Any]] = mapped_column(default=dict)  # finished stage -> its seconds and result
    result: Mapped[dict[str, Any] | None] = mapped_column(JSON, default=None)
    error: Mapped[str | None] = mapped_column(default=None)
    created_at: Mapped[float]
    started_at: Mapped[float | None] = mapped_column(default=None)
    finished_at: Mapped[float | None] = mapped_column(default=None)


class ModuleRow(Base):
    """A module that a takedown made."""

    __tablename__ = "modules"
    digest: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(index=True)
    state: Mapped[str]
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), unique=True)
    takedown_id: Mapped[str] = mapped_column(ForeignKey("takedowns.id"))
    file: Mapped[str]
    created_at: Mapped[float]


class AuditRow(Base):
    """What was done, by whom, to what. Rows are added, never changed."""

    __tablename__ = "audit"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    at: Mapped[float]
    actor: Mapped[str]
    action: Mapped[str]
    subject: Mapped[str]
    detail: Mapped[dict[str, Any]]


Index("jobs_claim", Job.state, Job.created_at)


def open_database(path: Path) -> Engine:
    """The database at ``path``, made where it is missing, for its owner alone; write-ahead log, 10 s lock wait."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    engine = create_engine(f"sqlite:///{path}", connect_args={"timeout": 10})

    @event.listens_for(engine, "connect")
    def _prepare(connection: Any, _: Any) -> None:
        # transactions are begun below, not by the driver
        connection.isolation_level = None
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("PRAGMA foreign_keys=ON")

    @event.listens_for(engine, "begin")
    def _begin(connection: Any) -> None:
        # A writer takes the lock before it reads, so that what it decided on still holds when it writes.
        reading = connection.get_execution_options().get("reading", False)
        connection.exec_driver_sql("BEGIN" if reading else "BEGIN IMMEDIATE")

    Base.metadata.create_all(engine)
    path.chmod(0o600)
    return engine
