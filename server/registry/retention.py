"""Deletes forget rows: on request, and of themselves once they are older than the settings allow. The digest stays. And, on request
alone, files of the store that nothing needs any more.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from server.registry.audit import Actor, append
from server.registry.objects import ObjectStore
from server.registry.private.files import TakedownFiles
from server.registry.refusals import NotAllowed
from server.registry.registry import Registry
from server.registry.tables import Job, JobKind, ModuleRow, ModuleState, Takedown
from server.registry.takedowns import PENDING
from server.settings import Settings

log = logging.getLogger("unbind.service")
DAY = 86_400.0
CLOCK_SECONDS = 3600.0  # for which rows must have been too old to one server: clocks jump, and are put right
SWEEP_SECONDS = 3600.0  # between looks for rows without a takedown, which go once they have been found so for a day
RETENTION = Actor("retention", "registry")


class Retention:
    """One server's; ``go_on`` is called again and again."""

    def __init__(self, registry: Registry, settings: Settings) -> None:
        self._registry, self._settings = registry, settings
        self._unrecorded: dict[str, float] = {}  # since when, by the monotonic clock
        self._overdue: dict[str, float] = {}  # takedowns whose rows are too old, since when, by the monotonic clock
        self._next = 0.0

    def go_on(self) -> None:
        """Purge what is too old, and look for rows without a takedown where it is time. Raises OSError, StoreUnreachable."""
        try:
            self.purge_old()
        finally:
            if time.monotonic() >= self._next:
                self._next = (
                    time.monotonic() + SWEEP_SECONDS
                )  # first: a store that fails is not to be listed every second
                self.sweep()

    def purge_old(self, now: float | None = None) -> list[str]:
        """The takedowns whose rows are gone now: they have been older than ``forget_retention_days`` for an hour, by the monotonic
        clock, so that a clock which is ahead for less deletes nothing.

        One that cannot be purged keeps no other: what was raised for the first of them is raised at the end.
        """
        if not self._settings.forget_retention_days:
            return []
        now = time.monotonic() if now is None else now
        old = self._registry.takedowns.purgeable(time.time() - self._settings.forget_retention_days * DAY)
        self._overdue = {takedown_id: self._overdue.get(takedown_id, now) for takedown_id in old}
        gone, failed = [], list[Exception]()
        for takedown_id in old:
            if now - self._overdue[takedown_id] < CLOCK_SECONDS:
                continue
            try:
                purge(self._registry, self._settings, takedown_id, RETENTION)
                gone.append(takedown_id)
            except Exception as error:  # noqa: BLE001 - raised below
                failed.append(error)
        if failed:
            raise failed[0]
        return gone

    def sweep(self, now: float | None = None) -> list[str]:
        """Delete the rows that no takedown has had for a day, by the monotonic clock, and what jobs left that no takedown with rows
        has; which digests and jobs these were.

        A POST that died before its takedown was recorded leaves such rows, a worker that was taken for dead may write what it
        made of rows that were purged meanwhile. The day is for whoever opened another registry than the one that these are
        recorded in, or went back to a copy of it. What was left half written is of no use to anybody, and goes at once.
        """
        now = time.monotonic() if now is None else now
        kept, takedowns = TakedownFiles(self._settings), self._registry.takedowns
        kept.tidy()
        rows, jobs = takedowns.unrecorded(kept.kept_forget()), self._spent(kept.kept_jobs())
        for what, found in (("forget rows", rows), ("files of job", jobs)):
            for one in found:
                if one not in self._unrecorded:
                    told = (
                        f"{what} %.20s belong to no takedown of this registry that has rows; they are deleted in a day"
                    )
                    log.warning(told, one)
        self._unrecorded = {one: self._unrecorded.get(one, now) for one in (*rows, *jobs)}
        old = {one for one, since in self._unrecorded.items() if now - since >= DAY}
        gone = takedowns.drop_unrecorded(old.intersection(rows), kept.purge) if old.intersection(rows) else []
        gone += self._drop_spent(old.intersection(jobs), kept) if old.intersection(jobs) else []
        for one in gone:
            log.info("%.20s, which belonged to no takedown that has rows, is deleted", one)
        return gone

    def _spent(self, jobs: Collection[str]) -> list[str]:
        with self._registry.transactions.look() as session:
            return _spent(session, jobs)

    def _drop_spent(self, jobs: Collection[str], kept: TakedownFiles) -> list[str]:
        gone = []
        for job in sorted(jobs):  # each by itself: a slow store is not to hold up others for all of them
            with self._registry.transactions.change() as session:
                if found := _spent(session, [job]):
                    kept.purge("", found)
                    gone += found
        return gone


def _spent(session: Session, jobs: Collection[str]) -> list[str]:
    """Those of these jobs whose files no takedown needs: none has them, or one that was purged and for which none is at work."""
    needed = (
        Takedown.purged_at.is_(None) | Job.state.in_(PENDING) | (Job.kind == JobKind.ACTIVATE)
    )  # which leaves no row
    query = select(Job.id).join(Takedown, Takedown.id == Job.takedown_id, isouter=True).where(needed)
    return sorted(set(jobs).difference(session.scalars(query)))


def purge(registry: Registry, settings: Settings, takedown_id: str, actor: Actor) -> dict[str, Any]:
    """Delete a takedown's rows and what its jobs left of them. Raises NotThere, NotAllowed, StoreUnreachable."""
    kept = TakedownFiles(settings)
    kept.has_forget("")  # a store that does not answer is to hold up no change of others: the purge is one transaction
    return registry.takedowns.purge(takedown_id, kept.purge, actor, time.time())


@dataclass(frozen=True)
class Spare:
    """A file of the store that nothing needs: its key, its size in bytes, and the records that name it, all retired."""

    file: str
    bytes: int
    records: list[str]


def spare_files(registry: Registry, store: ObjectStore) -> list[Spare]:
    """The files that no record names but those of versions that were retired over a day ago, and that were put into the store over
    a day ago: a file is put there before its record, and what a clock that was ahead retired comes back once it is right.

    Raises NotAllowed where no record names any file: the registry is another's. OSError, StoreUnreachable.
    """
    before = time.time() - DAY
    sizes = store.sizes()
    naming: dict[str, list[dict[str, Any]]] = {}
    for record in registry.modules.versions():
        naming.setdefault(str(record["file"]), []).append(record)
    if sizes and not any(key in naming for key in sizes):
        raise NotAllowed(
            f"the registry names none of the {len(sizes)} files in {store.where}: it is another's, or a copy from before they were "
            "made; see database_url, data_dir and module_store"
        )
    return [
        Spare(key, size, [record["id"] for record in naming.get(key, [])])
        for key, size in sizes.items()
        if not any(_needed(record["state"], record["changed_at"], before) for record in naming.get(key, []))
        and _old(store, key, before)
    ]


def sweep_files(registry: Registry, store: ObjectStore, files: Sequence[Spare], actor: Actor) -> list[Spare]:
    """Delete those of these files that nothing needs still; which these were. Raises OSError, StoreUnreachable."""
    return [file for file in files if _sweep(registry, store, file, actor)]


def drop_file(registry: Registry, store: ObjectStore, key: str) -> None:
    """Delete a file that was put into the store for a record that was not written, unless another record names it."""
    with registry.transactions.change() as session:  # no record comes meanwhile
        if session.scalar(select(ModuleRow.id).where(ModuleRow.file == key).limit(1)) is None:
            store.delete(key)


def _sweep(registry: Registry, store: ObjectStore, file: Spare, actor: Actor) -> bool:
    now = time.time()
    with registry.transactions.change() as session:  # no record comes meanwhile
        rows = session.scalars(select(ModuleRow).where(ModuleRow.file == file.file)).all()
        if any(_needed(row.state, row.changed_at, now - DAY) for row in rows) or not _old(store, file.file, now - DAY):
            return False
        store.delete(file.file)
        append(session, now, actor, "store.sweep", file.file, {"bytes": file.bytes, "records": file.records})
        return True


def _needed(state: str, changed_at: float, before: float) -> bool:
    return state != ModuleState.RETIRED or changed_at >= before


def _old(store: ObjectStore, key: str, before: float) -> bool:
    try:
        return store.put_at(key) < before
    except FileNotFoundError:  # another sweep was quicker
        return False
