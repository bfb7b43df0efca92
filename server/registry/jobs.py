"""The queue of work: every change of a job in one transaction; time is a parameter.

The admin API cancels and retries; a worker claims, reports and finishes under its lease and fence.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from server.registry.audit import Actor, append
from server.registry.estimate import Leases, expected_seconds, near_job, near_seconds, past_jobs, remaining_seconds
from server.registry.lifecycle import Action
from server.registry.records import NewModule, add, apply, live_version, module_view
from server.registry.refusals import CancelRequested, LeaseLost, NameTaken, NotAllowed, NotThere, RowsPurged
from server.registry.tables import ENDED, Job, JobKind, JobState, ModuleRow, Takedown, new_job, newest
from server.registry.transactions import Transactions


@dataclass(frozen=True)
class Claim:
    """A job in a worker's hands: what it needs to work and to prove that it may write."""

    job_id: str
    kind: JobKind
    takedown_id: str | None
    module: str
    module_id: str | None
    owner: str
    fence: int
    attempt: int
    forget_digest: str
    stages: Mapping[str, Any]
    options: Mapping[str, Any]


class Jobs:
    """The queue, for any thread and process."""

    def __init__(self, transactions: Transactions, model: str = "") -> None:
        """``model``: fingerprint of the model that modules are made for."""
        self._transactions, self._model, self.leases = transactions, model, Leases()

    # The admin API.

    def get(self, job_id: str, now: float) -> dict[str, Any]:
        """One job as the API shows it. Raises NotThere."""
        with self._transactions.look() as session:
            job = _find(session, job_id)
            return job_view(job, now, near_job(session, job) if job.state == JobState.RUNNING else {})

    def stages(self, job_id: str) -> dict[str, Any]:
        """The finished stages of a job, with the folders that hold what they left. Raises NotThere."""
        with self._transactions.look() as session:
            return dict(_find(session, job_id).stages)

    def newest(self, now: float, limit: int = 100, after: str = "") -> list[dict[str, Any]]:
        """The newest jobs first, or those behind the one with the id ``after``. Raises NotThere."""
        with self._transactions.look() as session:
            jobs = session.scalars(newest(Job, limit, _find(session, after) if after else None)).all()
            return [job_view(job, now, near_job(session, job) if job.state == JobState.RUNNING else {}) for job in jobs]

    def expected(self, rows: int) -> dict[str, float]:
        """Seconds by stage that a takedown of so many rows will take; empty where no past job tells."""
        with self._transactions.look() as session:
            return expected_seconds(near_seconds(rows, past_jobs(session, JobKind.TAKEDOWN)))

    def create(
        self, kind: JobKind, module: Mapping[str, Any], options: dict[str, Any], actor: Actor, now: float
    ) -> dict[str, Any]:
        """Queue work on a module that is there. Raises RowsPurged, and NameTaken where a job is busy with its name."""
        job = new_job(kind, module["takedown_id"], module["name"], now, module_id=module["id"], options=options)
        try:
            with self._transactions.change() as session:
                _check_takedown(session, job, self._model)
                session.add(job)
                session.flush()
                append(session, now, actor, f"job.{kind}", job.id, {"module": module["id"]})
                return job_view(job, now)
        except IntegrityError:
            raise NameTaken(f"a job is busy with module '{module['name']}'; wait for it or cancel it") from None

    def request_cancel(self, job_id: str, actor: Actor, now: float) -> dict[str, Any]:
        """Ask a job to stop; a queued one stops at once, an ended one stays as it is. Raises NotThere."""
        with self._transactions.change() as session:
            job = _find(session, job_id)
            if job.state not in ENDED and not job.cancel_requested:
                job.cancel_requested = True
                append(session, now, actor, "job.cancel", job.id, {})
                if job.state == JobState.QUEUED:
                    job.state, job.finished_at, job.message = JobState.CANCELLED, now, "cancelled before it started"
            session.flush()
            return job_view(job, now)

    def retry(self, job_id: str, actor: Actor, now: float) -> dict[str, Any]:
        """Queue a failed or cancelled job again; it goes on after its last finished stage.

        Raises NotThere, NotAllowed, RowsPurged, NameTaken.
        """
        try:
            with self._transactions.change() as session:
                job = _find(session, job_id)
                if job.state not in (JobState.FAILED, JobState.CANCELLED):
                    raise NotAllowed(f"job {job.id} is {job.state}; only a failed or cancelled job can be retried")
                _check_takedown(session, job, self._model)
                job.state, job.attempt, job.cancel_requested = JobState.QUEUED, 0, False
                job.error, job.message, job.result, job.finished_at, job.started_at = None, "", None, None, None
                job.stage_progress, job.stage_started_at, job.lease_expires = 0.0, None, now
                append(session, now, actor, "job.retry", job.id, {"finished": sorted(job.stages)})
                return job_view(job, now)
        except IntegrityError:
            raise NameTaken("another job is making this module already; wait for it or cancel it") from None

    # The worker.

    def claim(self, owner: str, now: float, lease: float, max_attempts: int) -> Claim | None:
        """Take the oldest job that is queued or whose worker fell silent; None where there is none.

        A job that ``max_attempts`` workers died on is failed instead.
        """
        with self._transactions.look() as session:  # looking costs nothing; claiming takes the writer's lock
            silent = (Job.lease_expires < now) | Job.id.in_(self.leases.unrenewed(session, lease))
            free = (Job.state == JobState.QUEUED) | ((Job.state == JobState.RUNNING) & silent)
            if session.scalar(select(Job.id).where(free).limit(1)) is None:
                return None
        with self._transactions.change() as session:
            for job in session.scalars(
                select(Job).where(free).order_by(Job.created_at).with_for_update(skip_locked=True)
            ):
                if job.cancel_requested:
                    end_job(session, job, JobState.CANCELLED, Actor(owner, "worker"), now)
                elif job.attempt >= max_attempts:
                    reason = f"{job.attempt} workers died on stage '{job.stage}'; see the worker's log"
                    end_job(session, job, JobState.FAILED, Actor(owner, "worker"), now, error=reason)
                else:
                    job.state, job.lease_owner, job.lease_expires = JobState.RUNNING, owner, now + lease
                    job.fence, job.attempt = job.fence + 1, job.attempt + 1
                    job.message = f"attempt {job.attempt}" if job.attempt > 1 else ""  # not what was done before
                    job.started_at = job.started_at or now
                    takedown = session.get(Takedown, job.takedown_id) if job.takedown_id else None
                    return Claim(
                        job_id=job.id,
                        kind=JobKind(job.kind),
                        takedown_id=job.takedown_id,
                        module=job.module,
                        module_id=job.module_id,
                        owner=owner,
                        fence=job.fence,
                        attempt=job.attempt,
                        forget_digest=takedown.forget_digest if takedown else "",
                        stages=dict(job.stages),
                        options={**(takedown.options if takedown else {}), **job.options},
                    )
        return None

    def report(self, claim: Claim, now: float, lease: float, **changes: Any) -> None:
        """Renew the lease and write progress, stage or message. Raises LeaseLost, CancelRequested."""
        with self._transactions.change() as session:
            job = _held(session, claim)
            job.lease_expires = now + lease
            for key, value in changes.items():
                setattr(job, key, value)
            cancelled = job.cancel_requested
        if cancelled:
            raise CancelRequested(f"job {claim.job_id} was cancelled")

    def stage_done(self, claim: Claim, stage: str, done: Mapping[str, Any]) -> None:
        """Record a finished stage ({"seconds", "folder", "files", "result"}), which nobody need repeat. Raises LeaseLost."""
        with self._transactions.change() as session:
            job = _held(session, claim)
            job.stages = {**job.stages, stage: dict(done)}

    def finish(
        self,
        claim: Claim,
        state: JobState,
        now: float,
        *,
        result: Mapping[str, Any] | None = None,
        error: str | None = None,
        module: NewModule | None = None,
        activate: bool = False,
        beside: Collection[str] | None = None,
    ) -> None:
        """End the job; ``module``, whose file is in the store, gets its record and state in the same transaction.

        ``activate`` changes the state of the module that the job was about. ``beside``: digests of the modules in force that its
        joint cost was measured with, None where it is activated whatever that is. Raises LeaseLost, NotAllowed, JointOutdated.
        """
        with self._transactions.change() as session:
            known = session.get(Job, claim.job_id)
            if known is not None and (known.fence, known.state) == (claim.fence, state):
                return  # asked again: it was committed, and the answer was lost
            job = _held(session, claim)
            actor = Actor(claim.owner, "worker")
            ending = dict(result) if result is not None else None
            if module is not None:
                row = add(session, module, module.activation, actor, now, beside)
                job.module_id = row.id
                ending = {**(ending or {}), "outcome": str(row.state), "module_id": row.id, **made(row)}
            if activate and claim.module_id:
                row = apply(session, claim.module_id, Action.ACTIVATE, claim.options.get("etag"), actor, now, beside)
                ending = {**(ending or {}), **made(row)}
            job.result = ending
            end_job(session, job, state, actor, now, error=error)

    def release(self, claim: Claim, now: float, *, died: bool = False) -> None:
        """Put the job back in the queue: its worker leaves in good order, or ``died`` says that its stages were killed."""
        with self._transactions.change() as session:
            try:
                job = _held(session, claim)
            except LeaseLost:
                return
            job.state, job.lease_owner, job.lease_expires = JobState.QUEUED, None, now
            job.stage_started_at = None
            job.attempt -= 0 if died else 1


def _find(session: Session, job_id: str) -> Job:
    job = session.get(Job, job_id)
    if job is None:
        raise NotThere(f"no job '{job_id[:80]}'")
    return job


def _check_takedown(session: Session, job: Job, model: str) -> None:
    """Its rows may be gone, though others may keep the same ones, or its name another takedown's. Raises RowsPurged, NameTaken."""
    if job.kind == JobKind.ACTIVATE or (takedown := session.get(Takedown, job.takedown_id or "")) is None:
        return
    if takedown.purged_at is not None:
        raise RowsPurged(f"the forget rows of takedown {takedown.id} were purged; submit them again")
    live = live_version(session, job.module, model) if job.kind == JobKind.TAKEDOWN else None
    other = session.get(Takedown, live.takedown_id) if live is not None and live.takedown_id != takedown.id else None
    # What ``replace`` spoke of is what had the name then.
    if other is not None and not (takedown.options.get("replace") and other.created_at <= takedown.created_at):
        said = f"name: module '{job.module}' is takedown {other.id}'s by now, and the job would supersede it; submit the rows anew "
        raise NameTaken(f"{said}under another name, or with options.replace")


def _held(session: Session, claim: Claim) -> Job:
    job = session.get(Job, claim.job_id)
    if job is None or job.fence != claim.fence or job.state != JobState.RUNNING or job.lease_owner != claim.owner:
        raise LeaseLost(f"job {claim.job_id} is no longer held under fence {claim.fence}")
    return job


def end_job(session: Session, job: Job, state: JobState, actor: Actor, now: float, error: str | None = None) -> None:
    """Write down how a job ended, within a transaction."""
    job.state, job.finished_at, job.lease_owner, job.error = state, now, None, error
    job.message = {JobState.SUCCEEDED: "done", JobState.CANCELLED: "cancelled", JobState.FAILED: "failed"}[state]
    job.message = (job.result or {}).get("remark") or job.message
    if state == JobState.SUCCEEDED:
        job.progress = job.stage_progress = 1.0
    outcome = (job.result or {}).get("outcome")
    append(session, now, actor, f"job.{state}", job.id, {"outcome": outcome, "error": error}, after=job.result)


def made(row: ModuleRow) -> dict[str, Any]:
    """What a job's result says of the module or guard that it made or activated, as it was then."""
    view = module_view(row)
    return {name: view[name] for name in ("digest", "scope", "in_force", "binds")}


def job_view(job: Job, now: float, near: Mapping[str, Sequence[float]] | None = None) -> dict[str, Any]:
    """A job as the API shows it. ``eta_seconds`` rests on ``near``, past jobs' seconds by stage; None where they do not tell."""
    # A clock that is behind for a moment makes no time of less than none.
    elapsed = max(0.0, (job.finished_at or now) - job.started_at) if job.started_at else 0.0
    eta = None
    if job.state == JobState.RUNNING:
        in_stage = now - job.stage_started_at if job.stage_started_at else 0.0
        eta = remaining_seconds(near or {}, job.stages, job.stage, in_stage)
    return {
        "id": job.id,
        "object": "job",
        "kind": job.kind,
        "takedown_id": job.takedown_id,
        "module": job.module,
        "module_id": job.module_id,
        "state": job.state,
        "stage": job.stage,
        "progress": round(job.progress, 4),
        "message": job.message,
        "eta_seconds": round(eta, 1) if eta is not None else None,
        "eta_basis": "past jobs" if eta is not None else None,
        "elapsed_seconds": round(elapsed, 3),
        "attempt": job.attempt,
        "cancel_requested": job.cancel_requested,
        "timings": {stage: done["seconds"] for stage, done in job.stages.items()},
        "outcome": (job.result or {}).get("outcome"),
        "result": job.result,
        "error": job.error,
        "plan": job.options.get("plan"),
        **{name: getattr(job, name) for name in ("created_at", "started_at", "finished_at")},
    }
