"""What this server offers: guards, and the registry's and folders' modules, brought into the engine; what is missing of both."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol

from server.engine.modules import ModuleTable
from server.engine.refusals import EngineStopped
from server.guards import GuardStore
from server.logs import change
from server.registry.access import SERVER_SCOPE, Access
from server.registry.lifecycle import demanded
from server.registry.store import Scan
from server.registry.tables import ModuleState, Origin
from server.settings import Settings
from unbind_core.errors import UnbindError
from unbind_core.module import UnbindModule

log = logging.getLogger("unbind.service")
# after which what could not be loaded is tried again though nothing has changed: at first, and at most
RETRY_SECONDS = (1.0, 60.0)


class Finds(Protocol):
    """Where modules are found."""

    def scan(self) -> Scan:
        """Look."""


class Loads(Protocol):
    """What modules are loaded into."""

    @property
    def modules(self) -> ModuleTable:
        """Those that are loaded."""

    def sync_modules(self, modules: Iterable[tuple[UnbindModule, str]]) -> Future[None]:
        """Have exactly these loaded."""


class Offer:
    """What was found at the last look (``scan``), as far as the engine could load it, and the ``guards``."""

    def __init__(
        self, settings: Settings, store: Finds, guard_store: GuardStore, engine: Loads, access: Access
    ) -> None:
        self.scan, self.guards = Scan({}, {}), guard_store.last
        self._settings, self._store, self._engine, self._access = settings, store, engine, access
        self._guard_store = guard_store
        self._unloadable: dict[tuple[str, str], str] = {}  # name and digest -> why the engine could not take it
        self._retry_at, self._pause = 0.0, RETRY_SECONDS[0]
        self._refreshing = asyncio.Lock()

    async def refresh(self) -> None:
        """Bring the guards and the engine's modules in line with the registry and the folders; what is due by now happens first."""
        async with self._refreshing:
            scan = await asyncio.to_thread(self._store.scan)
            self.guards = await asyncio.to_thread(self._guard_store.scan)
            if scan is self.scan:
                return  # and all of it is loaded
            if {name: m.digest for name, m in scan.modules.items()} != {
                name: entry.digest for name, entry in self._engine.modules.current.items()
            }:
                before = self._labels
                kept = {name: one for name, one in self.scan.modules.items() if name in scan.modules}
                went = {name: one for name, one in self.scan.modules.items() if name not in scan.modules}
                others = {name: one for name, one in kept.items() if one.digest != scan.modules[name].digest}
                # What comes, or another version, may stand in for what goes, as a module that joins others, or for rows that the
                # version before had: no call is to meet neither.
                if (went or others) and scan.modules.keys() - kept.keys():
                    self.scan = await self._load(replace(scan, modules=went | scan.modules | others))
                if went and others:
                    self.scan = await self._load(replace(scan, modules=went | scan.modules))
                # What goes is demanded no longer before it goes, what comes is demanded once it is there: else the calls
                # between would be refused. What was missed is demanded until it is loaded, else calls would do without.
                staying = {name: scan.modules[name] for name in self.scan.modules.keys() & scan.modules.keys()}
                missed = {name: scan.modules[name].record for name in self.scan.absent.keys() & scan.modules.keys()}
                self.scan = replace(scan, modules=staying, absent=scan.absent | missed)
                scan = await self._load(scan)
                if self._labels != before:
                    log.info("modules: %s", change(before, self._labels))
            self.scan = scan

    @property
    def _labels(self) -> list[str]:
        return [entry.label for entry in self._engine.modules.current.values()]

    async def _load(self, scan: Scan) -> Scan:
        """Have the engine offer what was found; one that cannot be loaded keeps no other away, and is absent from then on."""

        async def offer(modules: dict[str, tuple[UnbindModule, str]]) -> None:
            await asyncio.wrap_future(self._engine.sync_modules(modules.values()))

        current = self._engine.modules.current
        present = {name: (entry.module, entry.digest) for name, entry in current.items()}
        wanted = {name: (found.module, found.digest) for name, found in scan.modules.items()}
        refused = {
            name: why
            for (name, digest), why in self._unloadable.items()
            if name in wanted and wanted[name][1] == digest
        }
        # an older version of what is refused stays as it is
        hopeful = {name: present.get(name) if name in refused else one for name, one in wanted.items()}
        loaded = {name: one for name, one in hopeful.items() if one is not None}
        tried: list[str] = []
        changes = _digests(loaded) != _digests(present)
        if changes:
            try:
                await offer(loaded)
            except EngineStopped:
                raise
            except Exception as error:  # noqa: BLE001 - one by one it will show whose it is
                log.debug("not all modules can be loaded at once: %s", error)
                tried = [name for name, one in loaded.items() if _digests(present).get(name) != one[1]]
                loaded = {name: present[name] for name in loaded.keys() & present.keys()}
                if loaded.keys() != present.keys():
                    with suppress(UnbindError):  # what goes does not wait for what comes
                        await offer(loaded)
        if changes or time.monotonic() >= self._retry_at:
            tried, refused = [*tried, *refused], {}
            self._pause = RETRY_SECONDS[0] if changes else min(2 * self._pause, RETRY_SECONDS[1])
            self._retry_at = time.monotonic() + self._pause
        unloadable = dict(refused)
        # takedowns' modules before files, so that a file never takes the room of one
        for name in sorted(tried, key=lambda name: (scan.modules[name].record["origin"] != Origin.TAKEDOWN, name)):
            try:
                await offer(loaded | {name: wanted[name]})
                loaded[name] = wanted[name]
            except EngineStopped:
                raise
            except Exception as error:  # noqa: BLE001 - of this module
                unloadable[name] = str(error)
        before, self._unloadable = self._unloadable, {(name, wanted[name][1]): why for name, why in unloadable.items()}
        for name, _ in self._unloadable.keys() - before.keys():
            log.error("module '%s' cannot be loaded: %s", name, unloadable[name])
        if not unloadable:
            return scan
        return replace(
            scan,
            modules={name: found for name, found in scan.modules.items() if name not in unloadable},
            problems=scan.problems | {scan.modules[name].path: reason for name, reason in unloadable.items()},
            absent=scan.absent | {name: scan.modules[name].record for name in unloadable},
        )

    @property
    def missing_modules(self) -> list[str]:
        """Names that every request must run under and that stand for nothing that is active here, or for something missing."""
        return sorted(self.demanded_of_all - self.applicable)

    @property
    def missing_enforced(self) -> list[str]:
        """``missing_modules``, and what is active, could not be loaded and is demanded by any key or profile."""
        named = self._named
        scoped = {record["name"] for record in self._absent if record["scope"] or record["name"] in named}
        return sorted({*self.missing_modules, *(scoped & set(self.missing_active))})

    @property
    def enforced(self) -> dict[str, bool]:
        """Name -> whether it applies, of the modules that any scope enforces; names that a guard alone stands for are left out, as
        that of a module in shadow, unless that guard is missed: calls are refused for it as for a module.
        """
        names = self.demanded_of_all | self._named
        records = [*(stored.record for stored in self.scan.modules.values()), *self.scan.absent.values()]
        names |= {record["name"] for record in records if record.get("scope") and demanded(record, [record["scope"]])}
        fitted = (self._engine.modules.current.keys() - self.scan.shadow) | self.scan.absent.keys()
        told = {name: name in self.applicable for name in names if name in fitted or name not in self.guards.records}
        return told | dict.fromkeys(self.missing_enforced, False)

    @property
    def missing_active(self) -> list[str]:
        """Names of active modules and guards that could not be loaded: a request that names one is refused."""
        return sorted({record["name"] for record in self._absent if record["state"] == ModuleState.ACTIVE})

    @property
    def demanded_of_all(self) -> set[str]:
        """Names that every request must run under."""
        rules = self._access.current.of(SERVER_SCOPE)
        standing = {*self.scan.enforced([SERVER_SCOPE]), *self.guards.enforced([SERVER_SCOPE])}
        return {*self._settings.enforced, *rules.enforced, *rules.modules, *standing}

    @property
    def _named(self) -> set[str]:
        """What the rules of any scope turn on."""
        scopes = [*self._access.current.rules.values(), *self._settings.profiles.values()]
        return {name for rules in scopes for name in (*rules.enforced, *rules.modules)}

    @property
    def _absent(self) -> list[dict[str, Any]]:
        return [*self.scan.absent.values(), *self.guards.absent.values()]

    @property
    def applicable(self) -> set[str]:
        """The names that a policy can apply: of a module or a guard that is loaded and not in shadow, and of none that could not be
        loaded.
        """
        live = (self._engine.modules.current.keys() - self.scan.shadow) | (self.guards.book.names - self.guards.shadow)
        return live - {record["name"] for record in self._absent}


def _digests(modules: dict[str, tuple[UnbindModule, str]]) -> dict[str, str]:
    return {name: digest for name, (_, digest) in modules.items()}
