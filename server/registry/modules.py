"""The records of modules: their versions, their life, and who changed them. Files are ``store.py``'s.

Every change is conditional on the revision that its caller saw, obeys ``lifecycle.py`` and is told of in the audit trail.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Select, func, select
from sqlalchemy.exc import IntegrityError, OperationalError
from sqlalchemy.orm import Session

from server.registry.audit import Actor, append
from server.registry.lifecycle import ALLOWED, LIVE, Action, binds, follow, in_force
from server.registry.refusals import JointOutdated, NotAllowed, NotThere, Stale, Unconditional
from server.registry.tables import Job, JobKind, JobState, ModuleRow, ModuleState, Origin, Takedown, new_job
from server.registry.transactions import Transactions

log = logging.getLogger("unbind.modules")
CLOCK = Actor("clock", "registry")


@dataclass(frozen=True)
class NewModule:
    """A module whose file is in its place and that is to get a record."""

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


def etag(row: ModuleRow) -> str:
    """What If-Match must say for a change to this record."""
    return f'"{row.id}-{row.revision}"'


def module_view(row: ModuleRow) -> dict[str, Any]:
    """A module's record as the API shows it: with what it binds, which follows from the rest."""
    return {**_record(row), "in_force": in_force(row.state, row.scope), "binds": binds(row.state, row.scope)}


def _record(row: ModuleRow) -> dict[str, Any]:
    """What the audit trail keeps the digests of."""
    return {
        "id": row.id,
        "object": "module",
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


class Modules:
    """The records, for any thread."""

    def __init__(self, transactions: Transactions) -> None:
        self._transactions = transactions
        # Suspensions that could not be written, by module id: by whom and when. They hold in this process alone.
        self.withheld: dict[str, tuple[Actor, float]] = {}

    def versions(self, name: str | None = None) -> list[dict[str, Any]]:
        """Every version, by name and age."""
        query = select(ModuleRow).order_by(ModuleRow.name, ModuleRow.version)
        with self._transactions.look() as session:
            return [module_view(row) for row in session.scalars(query if name is None else query.filter_by(name=name))]

    def live(self, fingerprint: str) -> list[dict[str, Any]]:
        """The versions that servers of this model load: active or in shadow."""
        query = select(ModuleRow).where(ModuleRow.state.in_(LIVE), ModuleRow.fingerprint == fingerprint)
        with self._transactions.look() as session:
            rows = session.scalars(query.order_by(ModuleRow.name))
            return [module_view(row) for row in rows if row.id not in self.withheld]

    def get(self, reference: str) -> dict[str, Any]:
        """The module with this id; of a name, the version that is loaded, else the newest. Raises NotThere."""
        with self._transactions.look() as session:
            return module_view(_find(session, reference))

    def in_force(self) -> list[dict[str, Any]]:
        """The active modules that promise something together: a new one's cost is measured beside those of its model."""
        with self._transactions.look() as session:
            return [module_view(row) for row in session.scalars(_in_force().order_by(ModuleRow.name))]

    def act(
        self, reference: str, action: Action, expected: str | None, actor: Actor, now: float,
        beside: Collection[str] | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Change a module's state. Raises NotThere, Unconditional, Stale, NotAllowed; JointOutdated where it is activated
        and the modules in force are not those of the digests ``beside`` (None: whichever they are).
        """
        with self._transactions.change() as session:
            return module_view(apply(session, reference, action, expected, actor, now, beside))

    def withhold(self, reference: str, expected: str | None, actor: Actor, now: float) -> dict[str, Any]:
        """Suspend a module where nothing can be written: in this process, at once; ``pass_time`` writes it as soon as it can.

        Returns the record as it is written now. Raises as ``act``.
        """
        with self._transactions.look() as session:
            row = _find(session, reference)
            if row.state != ModuleState.SUSPENDED:  # else it was written, and the failure came after
                check_revision(module_view(row), expected)
                follow(ModuleState(row.state), Action.SUSPEND)
                self.withheld[row.id] = (actor, now)
                log.warning("module '%s' is suspended in this process; it is written once it can be", row.name)
            return module_view(row)

    def _write_withheld(self, now: float) -> None:
        for identifier, (actor, asked) in list(self.withheld.items()):
            with self._transactions.change() as session:
                row = session.get(ModuleRow, identifier)
                if row is not None and row.state in LIVE:
                    _move(session, row, Action.SUSPEND, actor, now, asked_at=asked)
            del self.withheld[identifier]
            log.info("the suspension of module %s is written", identifier)

    def rollback(self, name: str, expected: str | None, actor: Actor, now: float) -> dict[str, Any]:
        """Activate the version before the one that is active. Raises as ``act``; NotAllowed where there is none."""
        with self._transactions.change() as session:
            row = _find(session, name)
            check_revision(module_view(row), expected)
            former = session.scalar(
                select(ModuleRow)
                .where(
                    ModuleRow.name == row.name, ModuleRow.fingerprint == row.fingerprint,
                    ModuleRow.version < row.version, ModuleRow.state == ModuleState.SUPERSEDED,
                )
                .order_by(ModuleRow.version.desc())
                .limit(1)
            )  # fmt: skip
            if former is None:
                raise NotAllowed(f"module '{row.name}' has no superseded version before version {row.version}")
            _move(session, former, Action.ACTIVATE, actor, now, rolled_back_from=row.id)
            return module_view(former)

    def adopt(self, new: NewModule, now: float) -> dict[str, Any]:
        """The record of a found file, made if there is none.

        A new file is activated, unless another file stands for the name or a takedown ever did: then it waits as ``calibrated``.
        A shipped file that was replaced supersedes the one before.
        """
        try:
            with self._transactions.change() as session:
                row = session.scalar(select(ModuleRow).where(ModuleRow.digest == new.digest))
                if row is None:
                    live = _live(session, new.name, new.fingerprint)
                    waits = live is not None and (live.origin, live.file) != (new.origin, new.file)
                    waits |= new.origin != Origin.TAKEDOWN and _of_takedown(session, new.name) is not None
                    row = add(session, new, "manual" if waits else "auto", Actor("folder", new.origin), now)
                elif not row.fingerprint or (row.file != new.file and new.origin == Origin.DROPPED):
                    row.fingerprint, row.file = new.fingerprint, new.file
                return module_view(row)
        except IntegrityError:  # another server adopted it at the same moment
            with self._transactions.look() as session:
                return module_view(session.scalars(select(ModuleRow).where(ModuleRow.digest == new.digest)).one())

    def held(self, name: str, digest: str) -> bool:
        """Whether a takedown's record holds the name, so that a file of this digest, which is not known, cannot have it."""
        with self._transactions.look() as session:
            known = session.scalar(select(ModuleRow.id).where(ModuleRow.digest == digest))
            return known is None and _of_takedown(session, name) is not None

    def pass_time(self, now: float) -> None:
        """Activate what is due, retire what has expired, and supersede files whose name has become a takedown's.

        What is due is measured first, by a job, where its cost was not measured beside the modules that are in force by now.
        """
        due = (ModuleRow.state == ModuleState.CALIBRATED) & (ModuleRow.effective_at <= now)
        over = ModuleRow.state.in_(LIVE) & (ModuleRow.expires_at <= now)
        query = select(ModuleRow.id).where(due | over)
        if self.withheld:
            try:
                self._write_withheld(now)
            except (OperationalError, OSError):
                return  # what is due cannot be written either
        with self._transactions.look() as session:
            waiting = list(session.scalars(query))
        for identifier in waiting:
            with self._transactions.change() as session:
                row = session.scalar(select(ModuleRow).where(ModuleRow.id == identifier, due | over).with_for_update())
                if row is None:
                    continue
                if row.expires_at is not None and row.expires_at <= now:
                    _move(session, row, Action.RETIRE, CLOCK, now)
                    continue
                try:
                    _move(session, row, Action.ACTIVATE, CLOCK, now, _measured_beside(session, row))
                except JointOutdated:
                    _measure_first(session, row, now)
        self._supersede_files(now)

    def _supersede_files(self, now: float) -> None:
        theirs = select(ModuleRow.name).where(ModuleRow.origin == Origin.TAKEDOWN)
        found = ModuleRow.state.in_(LIVE) & (ModuleRow.origin != Origin.TAKEDOWN) & ModuleRow.name.in_(theirs)
        with self._transactions.look() as session:
            waiting = list(session.scalars(select(ModuleRow.id).where(found)))
        for identifier in waiting:
            with self._transactions.change() as session:
                row = session.scalar(select(ModuleRow).where(ModuleRow.id == identifier, found).with_for_update())
                if row is not None:
                    holder = _of_takedown(session, row.name)
                    _set(session, row, ModuleState.SUPERSEDED, "module.superseded", CLOCK, now, by=holder)


def add(
    session: Session, new: NewModule, activation: str, actor: Actor, now: float, beside: Collection[str] | None = None
) -> ModuleRow:
    """A record for the next version of the name, in the state that ``activation`` asks for, within a transaction.

    Raises JointOutdated as ``act``.
    """
    mine = (ModuleRow.name == new.name) & (ModuleRow.fingerprint == new.fingerprint)
    version = session.scalar(select(func.max(ModuleRow.version)).where(mine)) or 0
    later = activation == "auto" and new.effective_at is not None and new.effective_at > now
    row = ModuleRow(
        id=f"mod_{uuid.uuid4().hex[:16]}", name=new.name, version=version + 1, digest=new.digest,
        state=ModuleState.CALIBRATED, revision=1, origin=new.origin, fingerprint=new.fingerprint, file=new.file,
        job_id=new.job_id, takedown_id=new.takedown_id, scope=new.scope, expires_at=new.expires_at,
        effective_at=new.effective_at if later else None, created_at=now, changed_at=now,
    )  # fmt: skip
    session.add(row)
    session.flush()
    append(session, now, actor, "module.add", row.id, {"name": row.name, "digest": row.digest}, after=_record(row))
    shadowed = activation == "shadow" and _live(session, new.name, new.fingerprint) is None
    if shadowed or (activation == "auto" and not later):
        _move(session, row, Action.SHADOW if shadowed else Action.ACTIVATE, actor, now, beside)
    return row


def apply(
    session: Session, reference: str, action: Action, expected: str | None, actor: Actor, now: float,
    beside: Collection[str] | None = None,
) -> ModuleRow:  # fmt: skip
    """Change a module's state within a transaction. Raises as ``act``."""
    row = _find(session, reference)
    check_revision(module_view(row), expected)
    _move(session, row, action, actor, now, beside)
    return row


def _find(session: Session, reference: str) -> ModuleRow:
    row = session.get(ModuleRow, reference, with_for_update=True)
    if row is None:
        rows = session.scalars(
            select(ModuleRow).where(ModuleRow.name == reference).order_by(ModuleRow.version).with_for_update()
        ).all()
        row = next((found for found in rows if found.state in LIVE), rows[-1] if rows else None)
    if row is None:
        raise NotThere(f"no module '{reference[:80]}'")
    return row


def check_revision(record: Mapping[str, Any], expected: str | None) -> None:
    """Let a change through that is meant for the record as it is. Raises Unconditional, Stale."""
    if expected is None:
        raise Unconditional(f"If-Match: say which revision is meant; it is {record['etag']} now")
    if expected.strip() not in ("*", record["etag"]):
        raise Stale(f"If-Match: module {record['id']} has changed since ({record['etag']} now); look at it again")


def _live(session: Session, name: str, fingerprint: str) -> ModuleRow | None:
    return session.scalar(
        select(ModuleRow).where(
            ModuleRow.name == name, ModuleRow.fingerprint == fingerprint, ModuleRow.state.in_(LIVE)
        )
    )  # fmt: skip


def _of_takedown(session: Session, name: str) -> str | None:
    """The newest of the takedowns' modules of this name, whatever its state and model. No file ever stands in for one."""
    mine = (ModuleRow.name == name) & (ModuleRow.origin == Origin.TAKEDOWN)
    return session.scalar(select(ModuleRow.id).where(mine).order_by(ModuleRow.version.desc()).limit(1))


def _in_force() -> Select[ModuleRow]:
    """Files that were only put into the folder apply where a request names them, and promise nothing together."""
    promised = ModuleRow.takedown_id.is_not(None) | (ModuleRow.scope != "")
    return select(ModuleRow).where(ModuleRow.state == ModuleState.ACTIVE, promised)


def _measured_beside(session: Session, row: ModuleRow) -> Collection[str] | None:
    """The digests beside which a module's joint cost was measured when it was made; None where that decides nothing."""
    takedown = session.get(Takedown, row.takedown_id) if row.takedown_id else None
    if takedown is None or takedown.options.get("override"):
        return None
    job = session.get(Job, row.job_id) if row.job_id else None
    joint = ((job.result if job else None) or {}).get("joint") or {}
    return joint.get("beside") or ()


def _measure_first(session: Session, row: ModuleRow, now: float) -> None:
    """Queue the job that measures what a module costs beside those in force and then activates it; once the name is free."""
    if session.scalar(select(Job.id).where(Job.module == row.name, Job.state.in_((JobState.QUEUED, JobState.RUNNING)))):
        return
    _set(session, row, ModuleState(row.state), "module.due", CLOCK, now)
    job = new_job(
        JobKind.ACTIVATE, row.takedown_id, row.name, now, module_id=row.id, options={"etag": etag(row)}
    )  # fmt: skip
    session.add(job)
    session.flush()
    append(session, now, CLOCK, f"job.{job.kind}", job.id, {"module": row.id})


def _move(
    session: Session, row: ModuleRow, action: Action, actor: Actor, now: float, beside: Collection[str] | None = None,
    **detail: Any,
) -> None:  # fmt: skip
    """Change the state; what stood in its place is superseded in the same transaction."""
    state = follow(ModuleState(row.state), action)
    if state in LIVE and row.origin != Origin.TAKEDOWN and (holder := _of_takedown(session, row.name)) is not None:
        raise NotAllowed(
            f"version {row.version} of '{row.name}' came as a file, and the name is a takedown's ({holder}): a file never stands "
            "in for it; activate the takedown's module, or bring the file under another name"
        )
    if state == ModuleState.ACTIVE and beside is not None:
        others = session.scalars(
            _in_force().where(ModuleRow.fingerprint == row.fingerprint, ModuleRow.name != row.name)
        ).all()
        if {other.digest for other in others} != set(beside):
            names = ", ".join(sorted(other.name for other in others)) or "none"
            raise JointOutdated(f"beside module '{row.name}' these are in force by now: {names}")
    other = _live(session, row.name, row.fingerprint) if state in LIVE else None
    if other is not None and other is not row:
        if state == ModuleState.SHADOW:
            raise NotAllowed(
                f"version {other.version} of '{row.name}' is {other.state}, and one version of a name is loaded at a time; "
                "suspend that one first, or make the new version under another name"
            )
        _set(session, other, ModuleState.SUPERSEDED, "module.superseded", actor, now, by=row.id)
    _set(session, row, state, f"module.{action}", actor, now, **detail)


def _set(
    session: Session, row: ModuleRow, state: ModuleState, what: str, actor: Actor, now: float, **detail: Any
) -> None:
    before = _record(row)
    row.state, row.revision, row.changed_at, row.effective_at = state, row.revision + 1, now, None
    session.flush()
    append(session, now, actor, what, row.id, {"name": row.name, **detail}, before=before, after=_record(row))
