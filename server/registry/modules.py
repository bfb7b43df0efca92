"""The records of modules and guards for any thread: their versions, their life, and who changed them.

Files are ``store.py``'s and ``guards.py``'s. A method is a transaction; what happens within one is in ``records.py``.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from sqlalchemy import ColumnElement, Row, func, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from server.registry import records
from server.registry.audit import Actor, Mark, mark_of
from server.registry.lifecycle import LIVE, Action, check_revision, follow
from server.registry.records import CLOCK, GUARD_PREFIX, NewModule, module_view
from server.registry.refusals import AWAY, JointOutdated, NotAllowed, NotThere
from server.registry.tables import Kind, ModuleRow, ModuleState, Origin, by_name, of_digest
from server.registry.transactions import Transactions

log = logging.getLogger("unbind.modules")
SKEW_SECONDS = 60.0  # by which the clocks of servers may differ and none undoes what another did
RETURN_SECONDS = 60.0  # between two times at which one record comes back


@dataclass
class _Viewed:
    """The records that were found when the registry was as ``mark`` says, and the rows that they are views of, by id."""

    mark: Mark | None = None
    by_id: dict[str, tuple[Row[Any], dict[str, Any]]] = field(default_factory=dict)


class Modules:
    """The records, for any thread."""

    def __init__(self, transactions: Transactions, model: str = "") -> None:
        """``model``: fingerprint of the model that names are said of."""
        self._transactions, self._model = transactions, model
        # Suspensions that could not be written, by module id: by whom and when. They hold in this process alone.
        self.withheld: dict[str, tuple[Actor, float]] = {}
        self._viewed: dict[str, _Viewed] = {}  # by what was looked for
        # What the registry was as when nothing was left to do, at what time, and until when nothing is due.
        self._passed: tuple[Mark, float, float] | None = None
        # By id, when a record came back last as the clock had gone back; monotonic.
        self._returned: dict[str, float] = {}

    def versions(self, name: str | None = None) -> list[dict[str, Any]]:
        """Every version, by name and age; a name's modules before its guards."""
        with self._transactions.look() as session:
            return [module_view(row) for row in session.scalars(by_name(select(ModuleRow), name))]

    def listed(
        self, name: str | None, limit: int, after: str = "", wanted: Callable[[Any], bool] | None = None
    ) -> list[dict[str, Any]]:
        """The first ``versions``, or those behind the id ``after``, whose brief rows are ``wanted``. Raises NotThere."""
        brief: Any = select(ModuleRow.id, ModuleRow.kind, ModuleRow.name, ModuleRow.digest, ModuleRow.state)
        with self._transactions.look() as session:
            behind = session.get(ModuleRow, after) if after else None
            if after and (behind is None or name not in (None, behind.name) or (wanted and not wanted(behind))):
                raise NotThere(f"no module '{after}'")
            found = session.execute(by_name(brief, name, behind).limit(limit if wanted is None else None))
            ids = [row.id for row in islice(filter(wanted, found), limit)]
            rows = {row.id: row for row in session.scalars(select(ModuleRow).where(ModuleRow.id.in_(ids)))}
            return [module_view(rows[identifier]) for identifier in ids]

    def live(self, fingerprint: str) -> list[dict[str, Any]]:
        """The modules that servers of this model load: active or in shadow."""
        return self._live(
            f"module of {fingerprint}", (ModuleRow.kind == Kind.MODULE) & (ModuleRow.fingerprint == fingerprint)
        )

    def live_of_others(self, fingerprint: str) -> list[str]:
        """The names of active modules, shipped ones apart, that are for another model than this one."""
        foreign = (ModuleRow.kind == Kind.MODULE) & (ModuleRow.fingerprint != fingerprint)
        posted = (ModuleRow.origin != Origin.SHIPPED) & (ModuleRow.state == ModuleState.ACTIVE)
        return [str(record["name"]) for record in self._live(f"none of {fingerprint}", foreign & posted)]

    def live_guards(self) -> list[dict[str, Any]]:
        """The guards that every server loads: active or in shadow."""
        return self._live("guard", ModuleRow.kind == Kind.GUARD)

    def _live(self, what: str, which: ColumnElement[bool]) -> list[dict[str, Any]]:
        """Servers ask each second for thousands of records that hardly ever change: what nothing has changed is not read again, and
        the views of rows that are as before stay.
        """
        columns = ModuleRow.__table__.columns  # and no objects of rows, which take longer than the database
        query = select(*columns).where(ModuleRow.state.in_(LIVE), which).order_by(ModuleRow.name)
        before = self._viewed.get(what, _Viewed())
        try:
            with self._transactions.look() as session:
                now = _Viewed(mark_of(session))
                if now.mark == before.mark:
                    now = before
                else:
                    rows = session.execute(query).all()
        except AWAY:
            if not self.withheld or what not in self._viewed:
                raise
            now = before  # what is withheld goes though nothing can be read
        if now is not before:
            for row in rows:
                known = before.by_id.get(row.id)
                now.by_id[row.id] = known if known is not None and known[0] == row else (row, module_view(row))
            self._viewed[what] = now
        return [view for identifier, (_, view) in now.by_id.items() if identifier not in self.withheld]

    def get(self, reference: str) -> dict[str, Any]:
        """What has this id; of a name (or ``guard:NAME``) the version for this model that is loaded, else its newest, else that of
        another model. Raises NotThere.
        """
        with self._transactions.look() as session:
            return module_view(records.find(session, reference, self._model))

    def in_force(self) -> list[dict[str, Any]]:
        """The active modules that promise something together: a new one's cost is measured beside those of its model."""
        with self._transactions.look() as session:
            return [module_view(row) for row in session.scalars(records.those_in_force().order_by(ModuleRow.name))]

    def act(
        self,
        reference: str,
        action: Action,
        expected: str | None,
        actor: Actor,
        now: float,
        beside: Collection[str] | None = None,
    ) -> dict[str, Any]:
        """Change a module's state. Raises NotThere, Unconditional, Stale, NotAllowed; JointOutdated where it is activated
        and the modules in force are not those of the digests ``beside`` (None: whichever they are).
        """
        with self._transactions.change() as session:
            return module_view(records.apply(session, reference, action, expected, actor, now, beside, self._model))

    def withhold(self, reference: str, expected: str | None, actor: Actor, now: float) -> dict[str, Any]:
        """Suspend a module where nothing can be written: in this process, at once; ``pass_time`` writes it as soon as it can.

        Returns the record as it is written now, or, where nothing can be read either, as it was read last. Raises as ``act``.
        """
        try:
            found = self.get(reference)
        except AWAY:
            found = self._remembered(reference) or {}
            if not found:
                raise
        if found["state"] != ModuleState.SUSPENDED:  # else it was written, and the failure came after
            check_revision(found, expected)
            follow(ModuleState(found["state"]), Action.SUSPEND, found["kind"])
            self.withheld[found["id"]] = (actor, now)
            log.warning(
                "%s '%s' is suspended in this process; it is written once it can be", found["kind"], found["name"]
            )
        return found

    def _remembered(self, reference: str) -> dict[str, Any] | None:
        """What ``get`` would find among the records that are loaded here, as they were read last."""
        views = [view for viewed in self._viewed.values() for _, view in viewed.by_id.values()]
        here = [view for view in views if view["kind"] == Kind.GUARD or view["fingerprint"] == self._model]
        name = reference.removeprefix(GUARD_PREFIX)
        kinds = (Kind.GUARD,) if name != reference else (Kind.MODULE, Kind.GUARD)
        named = [view for kind in kinds for view in here if view["kind"] == kind and view["name"] == name]
        return next(iter([*(view for view in here if view["id"] == reference), *named]), None)

    def _write_withheld(self, now: float) -> None:
        for identifier, (actor, asked) in list(self.withheld.items()):
            with self._transactions.change() as session:
                row = session.get(ModuleRow, identifier)
                if row is not None and row.state in LIVE:
                    records.move(session, row, Action.SUSPEND, actor, now, asked_at=asked)
            del self.withheld[identifier]
            log.info("the suspension of %s is written", identifier)

    def rollback(
        self,
        name: str,
        expected: str | None,
        actor: Actor,
        now: float,
        check: Callable[[Mapping[str, Any]], None] = lambda _: None,
    ) -> dict[str, Any]:
        """Activate the version before the active one, if ``check`` takes it. Raises as that and ``act``; NotAllowed without one."""
        with self._transactions.change() as session:
            row = records.find(session, name, self._model)
            check_revision(module_view(row), expected)
            mine = (ModuleRow.name == row.name) & (ModuleRow.kind == row.kind)
            mine &= (ModuleRow.fingerprint == row.fingerprint) & (ModuleRow.version < row.version)
            superseded = select(ModuleRow).where(mine, ModuleRow.state == ModuleState.SUPERSEDED)
            former = session.scalar(superseded.order_by(ModuleRow.version.desc()).limit(1))
            if former is None:
                raise NotAllowed(f"{row.kind} '{row.name}' has no superseded version before version {row.version}")
            check(module_view(former))
            records.move(session, former, Action.ACTIVATE, actor, now, rolled_back_from=row.id)
            return module_view(former)

    def adopt(self, new: NewModule, now: float) -> dict[str, Any]:
        """The record of a found file, made if there is none.

        A new file is activated, unless another file stands for the name or a takedown ever did: then it waits as ``calibrated``.
        A shipped file that was replaced supersedes the one before.
        """
        try:
            with self._transactions.change() as session:
                row = session.scalar(of_digest(new.digest))
                if row is None:
                    live = records.live_version(session, new.name, new.fingerprint)
                    waits = live is not None and (live.origin, live.file) != (new.origin, new.file)
                    waits |= new.origin != Origin.TAKEDOWN and records.takedown_holding(session, new.name) is not None
                    row = records.add(session, new, "manual" if waits else "auto", Actor("folder", new.origin), now)
                elif not row.fingerprint or (row.file != new.file and new.origin == Origin.DROPPED):
                    records.place(session, row, new, Actor("folder", new.origin), now)
                return module_view(row)
        except IntegrityError:  # another server adopted it at the same moment
            with self._transactions.look() as session:
                return module_view(session.scalars(of_digest(new.digest)).one())

    def held(self, name: str, digest: str) -> bool:
        """Whether a takedown's record holds the name, so that a file of this digest, which is not known, cannot have it."""
        with self._transactions.look() as session:
            known = session.scalar(of_digest(digest))
            return known is None and records.takedown_holding(session, name) is not None

    def pass_time(self, now: float) -> None:
        """Activate what is due, retire what has expired, and supersede files whose name has become a takedown's.

        What is due is measured first, by a job, where its cost was not measured beside the modules that are in force by now.
        What a clock that was ahead has retired comes back.
        """
        due = (ModuleRow.state == ModuleState.CALIBRATED) & (ModuleRow.effective_at <= now)
        over = ModuleRow.state.in_(LIVE) & (ModuleRow.expires_at <= now)
        if self.withheld:
            try:
                self._write_withheld(now)
            except (*AWAY, OSError):
                return  # what is due cannot be written either
        with self._transactions.look() as session:
            mark = mark_of(session)
            if self._passed is not None and self._passed[0] == mark and self._passed[1] <= now < self._passed[2]:
                return
            waiting = list(session.scalars(select(ModuleRow.id).where(due | over)))
            early = (ModuleRow.expires_at > now + SKEW_SECONDS) & (ModuleRow.changed_at >= ModuleRow.expires_at)
            retired = list(session.scalars(select(ModuleRow.id).where(early, ModuleRow.state == ModuleState.RETIRED)))
            until = _next_due(session)
        for identifier in waiting:
            with self._transactions.change() as session:
                row = session.scalar(select(ModuleRow).where(ModuleRow.id == identifier, due | over))
                if row is None:
                    continue
                if row.expires_at is not None and row.expires_at <= now:
                    records.expire(session, row, now)
                    continue
                try:
                    records.move(session, row, Action.ACTIVATE, CLOCK, now, records.measured_beside(session, row))
                except JointOutdated:
                    records.measure_first(session, row, now)
        self._bring_back(retired, now)
        self._supersede_files(now)
        self._passed = mark, now, until

    def _bring_back(self, retired: Collection[str], now: float) -> None:
        """Undo what a clock that was ahead did to these; seldom, as a machine of the registry's may have such a clock still."""
        for identifier in retired:
            if time.monotonic() < self._returned.get(identifier, -math.inf) + RETURN_SECONDS:
                continue
            with self._transactions.change() as session:
                row = session.get_one(ModuleRow, identifier)
                if row.state != ModuleState.RETIRED or not records.come_back(session, row, now):
                    continue
                self._returned[identifier] = time.monotonic()
                log.warning(
                    "%s '%s' was retired by a clock that was ahead; it is %s again", row.kind, row.name, row.state
                )

    def _supersede_files(self, now: float) -> None:
        theirs = select(ModuleRow.name).where(ModuleRow.origin == Origin.TAKEDOWN, ModuleRow.kind == Kind.MODULE)
        found = ModuleRow.state.in_(LIVE) & (ModuleRow.origin != Origin.TAKEDOWN) & ModuleRow.name.in_(theirs)
        with self._transactions.look() as session:
            waiting = list(session.scalars(select(ModuleRow.id).where(found)))
        for identifier in waiting:
            with self._transactions.change() as session:
                row = session.scalar(select(ModuleRow).where(ModuleRow.id == identifier, found))
                if row is not None:
                    holder = records.takedown_holding(session, row.name)
                    records.set_state(session, row, ModuleState.SUPERSEDED, "superseded", CLOCK, now, by=holder)


def _next_due(session: Session) -> float:
    """When the clock alone changes a record next."""
    waits = select(func.min(ModuleRow.effective_at)).where(ModuleRow.state == ModuleState.CALIBRATED)
    ends = select(func.min(ModuleRow.expires_at)).where(ModuleRow.state.in_(LIVE))
    return min((at for at in (session.scalar(waits), session.scalar(ends)) if at is not None), default=math.inf)
