"""Every change of takedowns and jobs, each in one transaction; time is a parameter.

The admin API creates and cancels; the worker claims, reports and finishes under its lease and fence.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Engine, select, update
from sqlalchemy.orm import Session

from server.registry.tables import ENDED, AuditRow, Job, JobState, ModuleRow, Takedown


class LeaseLost(Exception):
    """Another worker has the job, or nobody: whatever this one still does must not be written."""


class CancelRequested(Exception):
    """Somebody asked for the job to stop."""


class KeyReused(Exception):
    """An Idempotency-Key came back with another body."""


class NameTaken(Exception):
    """A module of this name exists or is being made."""


class NotThere(Exception):
    """No such record."""


@dataclass(frozen=True)
class Claim:
    """A job in a worker's hands: what it needs to work and to prove that it may write."""

    job_id: str
    takedown_id: str
    module: str
    owner: str
    fence: int
    attempt: int
    forget_digest: str
    stages: Mapping[str, Any]
    options: Mapping[str, Any]


class Registry:
    """The records, behind one lock-free object that any thread may use."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._reading = engine.execution_options(reading=True)

    def close(self) -> None:
        """Give the connections back."""
        self._engine.dispose()

    # The admin API.

    def submit(
        self,
        *,
        name: str,
        row_count: int,
        forget_digest: str,
        notice: dict[str, Any],
        options: dict[str, Any],
        request_digest: str,
        idempotency_key: str | None,
        existing: Collection[str] = (),
        now: float,
    ) -> tuple[dict[str, Any], bool]:
        """Record a takedown and queue its job; (job, whether it is new). The same key and body give the same job.

        ``existing``: modules that are there already. Raises KeyReused, NameTaken.
        """
        with Session(self._engine) as session, session.begin():
            if idempotency_key is not None:
                same = session.scalar(select(Job).where(Job.idempotency_key == idempotency_key))
                if same is not None:
                    if same.request_digest != request_digest:
                        raise KeyReused("Idempotency-Key was used with another body; use a new key for a new takedown")
                    return job_view(same, now), False
            busy = session.scalar(
                select(Job).where(Job.module == name, Job.state.in_([JobState.QUEUED, JobState.RUNNING]))
            )
            if name in existing:
                raise NameTaken(f"name: a module '{name}' is loaded already; choose another name")
            if busy is not None:
                raise NameTaken(
                    f"name: job {busy.id} is making module '{name}' already; wait for it or choose another name"
                )
            takedown = Takedown(
                id=f"td_{uuid.uuid4().hex[:16]}", name=name, row_count=row_count, forget_digest=forget_digest,
                notice=notice, options=options, created_at=now,
            )  # fmt: skip
            job = Job(
                id=f"job_{uuid.uuid4().hex[:16]}", takedown_id=takedown.id, module=name, state=JobState.QUEUED,
                idempotency_key=idempotency_key, request_digest=request_digest, created_at=now, stages={},
            )  # fmt: skip
            session.add(takedown)
            session.flush()
            session.add(job)
            _audit(session, now, "admin", "takedown.submit", takedown.id, {"job": job.id, "rows": row_count})
            session.flush()
            return job_view(job, now), True

    def job(self, job_id: str, now: float) -> dict[str, Any]:
        """One job as the API shows it. Raises NotThere."""
        with Session(self._reading) as session:
            job = session.get(Job, job_id)
            if job is None:
                raise NotThere(f"no job '{job_id[:80]}'")
            return job_view(job, now)

    def jobs(self, now: float, limit: int = 100) -> list[dict[str, Any]]:
        """The newest jobs first."""
        with Session(self._reading) as session:
            return [
                job_view(job, now) for job in session.scalars(select(Job).order_by(Job.created_at.desc()).limit(limit))
            ]

    def request_cancel(self, job_id: str, now: float) -> dict[str, Any]:
        """Ask a job to stop; a queued one stops at once, an ended one stays as it is. Raises NotThere."""
        with Session(self._engine) as session, session.begin():
            job = session.get(Job, job_id)
            if job is None:
                raise NotThere(f"no job '{job_id[:80]}'")
            if job.state not in ENDED:
                job.cancel_requested = True
                _audit(session, now, "admin", "job.cancel", job.id, {})
                if job.state == JobState.QUEUED:
                    job.state, job.finished_at, job.message = JobState.CANCELLED, now, "cancelled before it started"
            session.flush()
            return job_view(job, now)

    def modules(self) -> list[dict[str, Any]]:
        """Modules that takedowns made."""
        with Session(self._reading) as session:
            return [
                {"name": m.name, "digest": m.digest, "state": m.state, "job_id": m.job_id, "takedown_id": m.takedown_id}
                for m in session.scalars(select(ModuleRow).order_by(ModuleRow.created_at))
            ]

    # The worker.

    def claim(self, owner: str, now: float, lease: float, max_attempts: int) -> Claim | None:
        """Take the oldest job that is queued or whose worker fell silent; None where there is none.

        A job that ``max_attempts`` workers died on is failed instead.
        """
        with Session(self._engine) as session, session.begin():
            free = (Job.state == JobState.QUEUED) | ((Job.state == JobState.RUNNING) & (Job.lease_expires < now))
            for job in session.scalars(select(Job).where(free).order_by(Job.created_at)):
                if job.cancel_requested:
                    job.state, job.finished_at, job.message = JobState.CANCELLED, now, "cancelled"
                elif job.attempt >= max_attempts:
                    job.state, job.finished_at = JobState.FAILED, now
                    job.error = f"{job.attempt} workers died on stage '{job.stage}'; see the worker's log"
                    _audit(session, now, owner, "job.failed", job.id, {"error": job.error})
                else:
                    job.state, job.lease_owner, job.lease_expires = JobState.RUNNING, owner, now + lease
                    job.fence += 1
                    job.attempt += 1
                    job.started_at = job.started_at or now
                    takedown = session.get_one(Takedown, job.takedown_id)
                    return Claim(
                        job_id=job.id,
                        takedown_id=takedown.id,
                        module=job.module,
                        owner=owner,
                        fence=job.fence,
                        attempt=job.attempt,
                        forget_digest=takedown.forget_digest,
                        stages=dict(job.stages),
                        options=dict(takedown.options),
                    )
        return None

    def report(self, claim: Claim, now: float, lease: float, **changes: Any) -> None:
        """Renew the lease and write ``stage``, ``progress`` or ``message``. Raises LeaseLost, CancelRequested."""
        with Session(self._engine) as session, session.begin():
            job = self._held(session, claim)
            job.lease_expires = now + lease
            for key, value in changes.items():
                setattr(job, key, value)
            if job.cancel_requested:
                raise CancelRequested(f"job {claim.job_id} was cancelled")

    def stage_done(self, claim: Claim, stage: str, seconds: float, result: Mapping[str, Any]) -> None:
        """Record a finished stage, which another worker then need not repeat. Raises LeaseLost."""
        with Session(self._engine) as session, session.begin():
            job = self._held(session, claim)
            job.stages = {**job.stages, stage: {"seconds": round(seconds, 3), "result": dict(result)}}

    def finish(
        self, claim: Claim, state: JobState, now: float, *, result: Mapping[str, Any] | None = None,
        error: str | None = None, publish: Callable[[], Mapping[str, str]] | None = None,
    ) -> None:  # fmt: skip
        """End the job. ``publish`` puts the module into the store and returns its digest and file.

        It is called while the lock is held and the fence is checked, so a stale worker never publishes. The module
        becomes active in the same transaction. Raises LeaseLost.
        """
        with Session(self._engine) as session, session.begin():
            job = self._held(session, claim)
            job.state, job.finished_at, job.lease_owner = state, now, None
            job.result, job.error = dict(result) if result is not None else None, error
            if state == JobState.SUCCEEDED:
                job.progress, job.message = 1.0, "done"
            published = publish() if publish is not None else None
            if published is not None:
                session.execute(update(ModuleRow).where(ModuleRow.name == claim.module).values(state="superseded"))
                session.merge(
                    ModuleRow(
                        digest=published["digest"],
                        name=claim.module,
                        state="active",
                        job_id=job.id,
                        takedown_id=job.takedown_id,
                        file=published["file"],
                        created_at=now,
                    )
                )
            _audit(session, now, claim.owner, f"job.{state}", job.id, {"error": error, **(published or {})})

    def release(self, claim: Claim, now: float) -> None:
        """Put the job back in the queue: its worker leaves in good order. Not counted as a death."""
        with Session(self._engine) as session, session.begin():
            try:
                job = self._held(session, claim)
            except LeaseLost:
                return
            job.state, job.lease_owner, job.lease_expires = JobState.QUEUED, None, now
            job.attempt -= 1

    @staticmethod
    def _held(session: Session, claim: Claim) -> Job:
        job = session.get(Job, claim.job_id)
        if job is None or job.fence != claim.fence or job.state != JobState.RUNNING or job.lease_owner != claim.owner:
            raise LeaseLost(f"job {claim.job_id} is no longer held under fence {claim.fence}")
        return job


def _audit(session: Session, now: float, actor: str, action: str, subject: str, detail: dict[str, Any]) -> None:
    session.add(AuditRow(at=now, actor=actor, action=action, subject=subject, detail=detail))


def job_view(job: Job, now: float) -> dict[str, Any]:
    """A job as the API shows it. ``eta_seconds`` extrapolates the time so far; None while there is nothing to go by."""
    elapsed = (job.finished_at or now) - job.started_at if job.started_at else 0.0
    running = job.state == JobState.RUNNING
    eta = elapsed * (1 - job.progress) / job.progress if running and job.progress > 0.02 else None
    return {
        "id": job.id,
        "object": "job",
        "takedown_id": job.takedown_id,
        "module": job.module,
        "state": job.state,
        "stage": job.stage,
        "progress": round(job.progress, 4),
        "message": job.message,
        "eta_seconds": round(eta, 1) if eta is not None else None,
        "elapsed_seconds": round(elapsed, 3),
        "attempt": job.attempt,
        "cancel_requested": job.cancel_requested,
        "timings": {stage: done["seconds"] for stage, done in job.stages.items()},
        "outcome": (job.result or {}).get("outcome"),
        "result": job.result,
        "error": job.error,
        "created_at": job.created_at,
        "started_at": job.started_at,
        "finished_at": job.finished_at,
    }
