"""What this server offers: guards, and the registry's and folders' modules, brought into the engine; what is missing of both."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Protocol

from server.engine.engine import EngineStopped
from server.engine.modules import ModuleTable
from server.guards import GuardStore
from server.registry.access import SERVER_SCOPE, Access
from server.registry.lifecycle import demanded
from server.registry.store import Scan
from server.registry.tables import ModuleState, Origin
from server.settings import Settings
from unbind_core.module import UnbindModule

log = logging.getLogger("unbind.service")


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
        self._unloadable: dict[str, str] = {}  # name -> why the engine could not take it
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
                # What goes is demanded no longer before it goes, what comes is demanded once it is there: else the calls
                # between would be refused. What was missed is demanded until it is loaded, else calls would do without.
                staying = {name: scan.modules[name] for name in self.scan.modules.keys() & scan.modules.keys()}
                missed = {name: scan.modules[name].record for name in self.scan.absent.keys() & scan.modules.keys()}
                self.scan = replace(scan, modules=staying, absent=scan.absent | missed)
                before = self._labels
                scan = await self._load(scan)
                if self._labels != before:
                    log.info("modules: %s", ", ".join(self._labels) or "none")
            self.scan = scan

    @property
    def _labels(self) -> list[str]:
        return [entry.label for entry in self._engine.modules.current.values()]

    async def _load(self, scan: Scan) -> Scan:
        """Have the engine offer what was found; one that cannot be loaded keeps no other away, and is absent from then on."""

        async def offer(modules: dict[str, tuple[UnbindModule, str]]) -> None:
            await asyncio.wrap_future(self._engine.sync_modules(modules.values()))

        wanted = {name: (found.module, found.digest) for name, found in scan.modules.items()}
        try:
            await offer(wanted)
        except EngineStopped:
            raise
        except Exception as error:  # noqa: BLE001 - one by one it will show whose it is
            log.debug("not all modules can be loaded at once: %s", error)
        else:
            self._unloadable = {}
            return scan
        present = self._engine.modules.current
        loaded = {name: (present[name].module, present[name].digest) for name in present.keys() & wanted.keys()}
        unloadable: dict[str, str] = {}
        # takedowns' modules before files, so that a file never takes the room of one
        for name in sorted(wanted, key=lambda name: (scan.modules[name].record["origin"] != Origin.TAKEDOWN, name)):
            try:
                await offer(loaded | {name: wanted[name]})
                loaded[name] = wanted[name]
            except EngineStopped:
                raise
            except Exception as error:  # noqa: BLE001 - of this module
                unloadable[name] = str(error)
        for name in unloadable.keys() - self._unloadable.keys():
            log.error("module '%s' cannot be loaded: %s", name, unloadable[name])
        self._unloadable = unloadable
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
        """Name -> whether it applies, of the modules that any scope enforces; names that a guard alone stands for are left out."""
        names = self.demanded_of_all | self._named
        records = [*(stored.record for stored in self.scan.modules.values()), *self.scan.absent.values()]
        names |= {record["name"] for record in records if record.get("scope") and demanded(record, [record["scope"]])}
        fitted = self._engine.modules.current.keys() | self.scan.absent.keys()
        return {name: name in self.applicable for name in names if name in fitted or name not in self.guards.records}

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
