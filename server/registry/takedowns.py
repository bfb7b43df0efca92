"""What was asked to be forgotten: takedowns and the jobs they start. The rows themselves are files (``files.py``)."""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from server.registry.audit import Actor, append, one_at_a_time
from server.registry.jobs import end_job, job_view, made
from server.registry.joining import check_rows, joiners, keepers
from server.registry.lifecycle import BY_WEIGHT, InForce, bound, here, reached
from server.registry.records import NewModule, add, module_view
from server.registry.refusals import KeyReused, NameTaken, NotAllowed, NotThere
from server.registry.tables import Job, JobKind, JobState, Kind, ModuleRow, ModuleState, Takedown, new_job, received
from server.registry.transactions import Transactions

PENDING = (JobState.QUEUED, JobState.RUNNING)
Views = list[dict[str, Any]]
Unreached = Callable[[str], str]  # a scope -> why no request comes under it, "" where requests do
GUARDED = "guarded"  # the outcome of a job that had a guard to make and no module, where the guard is active


class Takedowns:
    """The records, for any thread."""

    def __init__(self, transactions: Transactions, model: str | None = None) -> None:
        """``model``: fingerprint of the model that runs here, the modules of others binding nothing; None: it is not known."""
        self._transactions, self._model = transactions, model

    def known(
        self, name: str, fingerprint: str, replace: bool, idempotency_key: str | None, request_digest: str, now: float
    ) -> dict[str, Any] | None:
        """The job that the same request made before, else None; so that nothing is made for a takedown that will be refused.

        Raises as ``submit``, which looks again.
        """
        with self._transactions.look() as session:
            same = _same(session, idempotency_key, request_digest)
            if same is None:
                _check_name(session, name, fingerprint, replace)
            return job_view(same, now) if same is not None else None

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
        fingerprint: str,
        actor: Actor,
        now: float,
        guard: NewModule | None = None,
        plan: Mapping[str, Any] | None = None,
        served: Mapping[str, str] | None = None,
        module: bool = True,
        keep: Callable[[], object] = lambda: None,
    ) -> tuple[dict[str, Any], bool]:
        """Record a takedown and queue its job; (job, whether it is new). The same key and body give the same job.

        ``keep`` puts the rows into their place where they are not there: while it is asked nobody deletes any, and from then on
        they are this takedown's.
        ``plan`` is what the job's record shows of what it will take, ``served`` what the server runs: model and dtype.
        ``guard``, whose file is in the store, gets its record and state in the same transaction. Without a ``module`` to make
        the job has ended by then.
        Raises KeyReused, NameTaken where the name is in use and ``options.replace`` does not say that it may be, and NotAllowed
        where rows that it joins have been purged.
        """
        with self._transactions.change() as session:
            one_at_a_time(session)  # of two posts with one key, the second sees what the first made
            same = _same(session, idempotency_key, request_digest)
            if same is not None:
                return job_view(same, now), False
            _check_name(session, name, fingerprint, bool(options.get("replace")))
            check_rows(session, options)
            keep()
            takedown = Takedown(
                id=f"td_{uuid.uuid4().hex[:16]}",
                name=name,
                row_count=row_count,
                forget_digest=forget_digest,
                notice=notice,
                options=options,
                created_at=now,
            )
            job = new_job(
                JobKind.TAKEDOWN,
                takedown.id,
                name,
                now,
                idempotency_key=idempotency_key,
                request_digest=request_digest,
                options={name: dict(said) for name, said in (("plan", plan), ("served", served)) if said},
            )
            if not module:
                job.state, job.started_at = JobState.RUNNING, now  # never to be claimed
            session.add(takedown)
            session.flush()
            session.add(job)
            session.flush()
            append(
                session,
                now,
                actor,
                "takedown.submit",
                takedown.id,
                {"job": job.id, "rows": row_count, "forget_digest": forget_digest},
                after=takedown_view(takedown),
            )
            if guard is not None:
                row = add(session, replace(guard, takedown_id=takedown.id), guard.activation, actor, now)
                if not module:
                    outcome = GUARDED if row.state == ModuleState.ACTIVE else str(row.state)
                    job.result = {"outcome": outcome, "guard_id": row.id, **made(row)}
                    end_job(session, job, JobState.SUCCEEDED, actor, now)
            return job_view(job, now), True

    def get(self, takedown_id: str, unreached: Unreached = lambda _: "") -> dict[str, Any]:
        """One takedown with its jobs, modules and guard, and what these bind now. Raises NotThere."""
        with self._transactions.look() as session:
            takedown = _find(session, takedown_id)
            jobs = session.scalars(select(Job).where(Job.takedown_id == takedown_id).order_by(Job.created_at)).all()
            joining = joiners(session).get(takedown_id, ())
            made_of = self._made_of(session, [takedown_id, *joining], unreached)
            views = made_of[takedown_id]
            return {
                **takedown_view(takedown),
                "rows_kept_by": [one for kept in keepers(session, takedown, joining) for one in kept],
                "joined_by": list(joining),
                **_binding(takedown, jobs, _holding(made_of, takedown_id, joining)),
                "jobs": [job.id for job in jobs],
                "modules": [view for view in views if view["kind"] == Kind.MODULE],
                "guard": next((view for view in views if view["kind"] == Kind.GUARD), None),
            }

    def newest(self, limit: int = 100, unreached: Unreached = lambda _: "", after: str = "", find: str = "") -> Views:
        """The newest takedowns first, or those behind the one with the id ``after``, with what each binds now and where its newest
        job is; those whose name or notice holds ``find``. Raises NotThere.
        """
        with self._transactions.look() as session:
            found = session.scalars(received(limit, _find(session, after) if after else None, find)).all()
            ids = [takedown.id for takedown in found]
            jobs, joining = defaultdict[str, list[Job]](list), joiners(session)
            for job in session.scalars(select(Job).where(Job.takedown_id.in_(ids)).order_by(Job.created_at)):
                jobs[str(job.takedown_id)].append(job)
            made_of = self._made_of(session, {*ids, *(by for one in ids for by in joining.get(one, ()))}, unreached)
            return [
                {
                    **takedown_view(one),
                    **_binding(one, jobs[one.id], _holding(made_of, one.id, joining.get(one.id, ()))),
                    "job": _in_brief(jobs[one.id][-1]),
                }
                for one in found
            ]

    def _made_of(self, session: Session, takedowns: Collection[str], unreached: Unreached) -> Mapping[str, Views]:
        """Modules and guards by takedown."""
        found = defaultdict[str, list[dict[str, Any]]](list)
        for row in session.scalars(select(ModuleRow).where(ModuleRow.takedown_id.in_(takedowns))):
            found[str(row.takedown_id)].append(here(reached(module_view(row), unreached(row.scope)), self._model))
        return found

    def purge(
        self, takedown_id: str, delete: Callable[[str, list[str]], None], actor: Actor, now: float
    ) -> dict[str, Any]:
        """Delete a takedown's rows for good; record, digest and module stay. Raises NotThere, NotAllowed while a job runs.

        ``delete`` gets the digest of the set and the job ids. The digest is empty where other takedowns have the same rows and keep
        them: ``rows_kept_by`` says which, and which have them among others.
        """
        with self._transactions.change() as session:
            takedown = _find(session, takedown_id)
            jobs = session.scalars(select(Job).where(Job.takedown_id == takedown_id)).all()
            if any(job.state in PENDING for job in jobs):
                raise NotAllowed(f"takedown {takedown_id} is being worked on; cancel its job first")
            same, among = keepers(session, takedown, joiners(session).get(takedown_id, ()))
            if takedown.purged_at is None:
                before = takedown_view(takedown)
                takedown.purged_at = now
                append(
                    session, now, actor, "takedown.purge", takedown_id, {}, before=before, after=takedown_view(takedown)
                )
            delete("" if same else takedown.forget_digest, [job.id for job in jobs])
            return {**takedown_view(takedown), "rows_kept_by": [*same, *among]}

    def unrecorded(self, digests: Collection[str]) -> list[str]:
        """Those of these forget sets that no takedown has, or only purged ones."""
        with self._transactions.look() as session:
            return _unrecorded(session, digests)

    def drop_unrecorded(self, digests: Collection[str], delete: Callable[[str, list[str]], None]) -> list[str]:
        """Delete those of these forget sets that no takedown has; which these were. ``delete`` as for ``purge``."""
        with self._transactions.change() as session:
            found = _unrecorded(session, digests)
            for digest in found:
                delete(digest, [])
            return found

    def purgeable(self, before: float) -> list[str]:
        """Takedowns from before this time whose rows are still kept and whose work has ended."""
        busy = select(Job.takedown_id).where(Job.state.in_(PENDING), Job.takedown_id.is_not(None))
        query = select(Takedown.id).where(
            Takedown.created_at < before, Takedown.purged_at.is_(None), Takedown.id.not_in(busy)
        )
        with self._transactions.look() as session:
            return list(session.scalars(query))


def takedown_view(takedown: Takedown) -> dict[str, Any]:
    """A takedown as the API shows it, without its rows."""
    return {
        "id": takedown.id,
        "object": "takedown",
        "name": takedown.name,
        "row_count": takedown.row_count,
        "forget_digest": takedown.forget_digest,
        "notice": takedown.notice,
        "options": takedown.options,
        "created_at": takedown.created_at,
        "purged_at": takedown.purged_at,
    }


def _in_brief(job: Job) -> dict[str, Any]:
    named = ("id", "kind", "state", "stage", "progress", "error")
    return {**{name: getattr(job, name) for name in named}, "outcome": (job.result or {}).get("outcome")}


def _binding(takedown: Takedown, jobs: Sequence[Job], views: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Whether the service keeps from giving the rows back now, in which scope, and on which requests, in words.

    By the one of ``views`` that binds most: its modules, its guard and the modules that join it.
    """
    pending = any(job.state in PENDING for job in jobs)
    most = max(views, key=lambda view: (BY_WEIGHT.index(view["in_force"]), view["created_at"]), default=None)
    if most is not None and not (pending and most["in_force"] == InForce.NONE):
        return {name: most[name] for name in ("scope", "in_force", "binds")}
    scope = takedown.options.get("scope")
    said = (
        f"nothing yet; once its module is active, {bound(scope)}"
        if pending
        else "nothing: it has neither module nor guard"
    )
    return {"scope": scope, "in_force": InForce.NONE, "binds": said}


def _holding(
    made_of: Mapping[str, list[dict[str, Any]]], takedown: str, joining: Collection[str]
) -> list[dict[str, Any]]:
    """What was made of a takedown's rows: its own, and the modules of those that join it."""
    others = (view for one in joining for view in made_of.get(one, ()) if view["kind"] == Kind.MODULE)
    return [*made_of.get(takedown, ()), *others]


def _find(session: Session, takedown_id: str) -> Takedown:
    takedown = session.get(Takedown, takedown_id)
    if takedown is None:
        raise NotThere(f"no takedown '{takedown_id[:80]}'")
    return takedown


def _unrecorded(session: Session, digests: Collection[str]) -> list[str]:
    held = set(session.scalars(select(Takedown.forget_digest).where(Takedown.purged_at.is_(None)).distinct()))
    return sorted(set(digests) - held)


def _same(session: Session, key: str | None, request_digest: str) -> Job | None:
    job = session.scalar(select(Job).where(Job.idempotency_key == key)) if key is not None else None
    if job is not None and job.request_digest != request_digest:
        raise KeyReused("Idempotency-Key was used with another body; use a new key for a new takedown")
    return job


def _check_name(session: Session, name: str, fingerprint: str, replacing: bool) -> None:
    busy = session.scalar(select(Job.id).where(Job.module == name, Job.state.in_(PENDING)))
    if busy is not None:
        raise NameTaken(f"name: job {busy} is making module '{name}' already; wait for it or choose another name")
    for_this_model = (ModuleRow.fingerprint == fingerprint) | (ModuleRow.kind == Kind.GUARD)
    there = session.scalar(
        select(ModuleRow.kind)
        .where(ModuleRow.name == name, for_this_model, ModuleRow.state != ModuleState.RETIRED)
        .order_by(ModuleRow.kind.desc())
        .limit(1)
    )
    if there is not None and not replacing:
        raise NameTaken(
            f"name: {there} '{name}' exists already; choose another name, or set options.replace to make its next version"
        )
