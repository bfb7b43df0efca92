"""What one server process holds, whoever makes its answers: registry, keys, offer, telemetry, worker, and its clockwork.

``Service`` adds a model and its engine, ``server/proxy`` another server. Routes that both have reach it through ``base_service``.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastapi import Request

from server.engine.modules import Gates, ModuleTable
from server.engine.refusals import EngineStopped
from server.exporting.audit import AuditFeeds
from server.exporting.otel import open_tracing
from server.guarding import guard_secret
from server.guards import GuardStore
from server.offer import Offer
from server.outage import Outage, Writing
from server.probing.results import Canaries
from server.ratelimit import RateLimiter
from server.registry.access import Access, kept_admin_key
from server.registry.estimate import Standing, standing
from server.registry.objects import ObjectStore
from server.registry.refusals import AWAY
from server.registry.registry import open_registry
from server.registry.retention import Retention
from server.registry.trail import PAUSE_SECONDS, Abandoned
from server.settings import Settings
from server.telemetry.figures import Figures
from server.telemetry.metrics import Telemetry
from server.worker.process import GRACE_SECONDS, Supervisor
from unbind_core.architecture import LoadedModel
from unbind_core.files import Anchor
from unbind_core.guard.book import GuardBook

log = logging.getLogger("unbind.service")
REFRESH_SECONDS = 1.0
END_SECONDS = 2.0  # for looks that are under way when the server ends
LOOKS = 5  # of so many in a row one must succeed, else what is looked at counts as away
STORE_REFRESHES = 10  # the store is looked at so much less often: each look at a bucket is paid for
JOBS_REFRESHES = 5  # jobs take minutes


class BaseService(ABC):
    """Built and torn down by the application's lifespan."""

    offer: Offer
    loaded: LoadedModel | None = None
    internal = False  # whether requests that come this way are the server's own, which nothing counts

    def __init__(self, settings: Settings, refresh_seconds: float = REFRESH_SECONDS) -> None:
        """``refresh_seconds``: between two looks at what other processes wrote."""
        self.settings, self._refresh_seconds = settings, refresh_seconds
        self.telemetry = Telemetry(self._seen, self.computed_by, detail=settings.metrics_detail, works=settings.worker)
        self.tracing = open_tracing(settings)
        self.canaries = Canaries()
        self.telemetry.register(self.canaries.metrics)
        self.registry = open_registry(settings, self.model_fingerprint)
        settings.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._anchors = [Anchor(settings.data_dir, "the data folder")]
        if self.registry.engine.dialect.name == "sqlite":
            self._anchors.append(Anchor(Path(self.registry.engine.url.database or ""), "the registry's database file"))
        patience = LOOKS * max(refresh_seconds, REFRESH_SECONDS)
        self._database = Outage("the registry's database", log, patience)
        self._stored = Outage("the module store", log, patience * STORE_REFRESHES)
        self._writing = Writing(settings.data_dir, log)
        self._audit = AuditFeeds(settings, self.registry)
        self.access = Access(self.registry.transactions)
        self.limiter = RateLimiter()
        self.admin_key = settings.admin_key or kept_admin_key(settings)
        self.objects = ObjectStore(settings.published_store)
        self.guard_secret = guard_secret(settings)
        self.guard_store = GuardStore(self.objects, self.registry.modules, self.guard_secret)
        self._retention = Retention(self.registry, settings)
        self.supervisor = Supervisor(settings, told=self.telemetry.work.take)
        self._jobs: Standing | None = None
        self.ready, self.created = False, int(time.time())
        self.offered: set[str] = set()  # finished jobs after which the modules were looked at
        self._tasks: list[asyncio.Task[None]] = []
        self._beside: list[Callable[[], Coroutine[Any, Any, None]]] = []
        self._ending = asyncio.Event()

    @property
    @abstractmethod
    def modules(self) -> ModuleTable:
        """The modules that a request can name."""

    @property
    def guards(self) -> GuardBook:
        """The guards that are loaded."""
        return self.offer.guards.book

    @property
    @abstractmethod
    def title(self) -> str:
        """What answers: a model's name, or where the other server is."""

    @property
    def model_fingerprint(self) -> str:
        """Whose modules are of use here; "" without a model."""
        return self.loaded.identity.fingerprint if self.loaded is not None else ""

    @property
    @abstractmethod
    def described(self) -> dict[str, Any]:
        """What answers, as evidence says it."""

    @property
    def computes(self) -> bool:
        """Whether what makes the answers is there."""
        return True

    @property
    def computed_by(self) -> str:
        """What makes the answers, as the metrics name it."""
        return self.settings.engine

    @abstractmethod
    def _figures(self) -> Figures:
        """What the metrics show of this moment, as far as it depends on what makes the answers."""

    def _seen(self) -> Figures:
        supervisor = self.supervisor
        return replace(
            self._figures(),
            registry=self._database,
            store=self._stored,
            enforced=self.offer.enforced,
            jobs=self._jobs if self._database.told is None else None,
            worker=(supervisor.pid is not None, supervisor.restarts) if self.settings.worker else None,
        )

    @abstractmethod
    async def gate_counts(self) -> Gates:
        """What the gates did, as new as can be had at once."""

    @abstractmethod
    async def _open(self) -> None:
        """Be able to answer."""

    @abstractmethod
    async def end_requests(self, seconds: float) -> None:
        """Admit nothing more, give what runs ``seconds`` to end, and end what remains."""

    @abstractmethod
    async def _close(self) -> None:
        """Put away what ``_open`` opened."""

    async def start(self) -> None:
        """Begin to serve: be able to answer, load the modules, start the worker."""
        await self._open()
        await self.offer.refresh()
        await self._count_gates()
        await self._count_jobs()
        if self.settings.metrics_port is not None:
            await asyncio.to_thread(self.telemetry.listen, self.settings.metrics_host, self.settings.metrics_port)
        for outage in (self._database, self._stored, self._writing):
            outage.awaited()
        # Each by itself: what a file, a store or an engine does to one of them must not hold up the revocation of keys.
        for what, work, seconds in (
            ("access", self._refresh_access, self._refresh_seconds),
            ("modules", self.offer.refresh, self._refresh_seconds),
            ("retention", self._purge, self._refresh_seconds),
            ("module store", self._look_at_store, STORE_REFRESHES * self._refresh_seconds),
            ("data folder", self._writing.look, STORE_REFRESHES * self._refresh_seconds),
            ("gate counts", self._count_gates, self.settings.metrics_interval),
            ("jobs", self._count_jobs, JOBS_REFRESHES * self._refresh_seconds),
            *(
                (f"audit trail's way to {feed.where}", feed.send_new, self._refresh_seconds)
                for feed in self._audit.feeds
            ),
        ):
            self._tasks.append(asyncio.create_task(self._repeat(what, work, seconds), name=f"unbind-{what}"))
        self._tasks.append(asyncio.create_task(self._watch_trail(), name="unbind-trail-watch"))
        self._tasks += [asyncio.create_task(work(), name="unbind-beside") for work in self._beside]
        if self.settings.worker:
            await self.supervisor.start()
        self.ready = True

    def give_up(self) -> None:  # noqa: B027
        """Have a ``start`` that takes long end with an error; called from a signal's handler."""

    def beside(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Have ``work`` run beside the requests from ``start`` on; it ends by itself once ``ends_within`` says so."""
        self._beside.append(work)

    async def drain(self) -> None:
        """End the worker, admit nothing more and give running requests ``drain_timeout`` seconds to end; what remains then
        ends with an error that its client hears.
        """
        self.ready = False
        timeout = self.settings.drain_timeout
        await asyncio.gather(self.end_requests(timeout), self.supervisor.stop(min(GRACE_SECONDS, timeout + 1)))

    async def stop(self) -> None:
        """Drain, then end what answers and the connections, in that order."""
        await self.drain()
        self.registry.trail.leave()
        self._ending.set()
        await asyncio.to_thread(self._audit.close)
        if self._tasks:  # what looks at the registry now gives its connection back before all are closed
            await asyncio.wait(self._tasks, timeout=END_SECONDS)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self.telemetry.close)
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)
        await self._close()
        self.registry.close()

    @property
    def data_lost(self) -> str | None:
        """Why nothing that is written would be kept: the data folder or the database in it is not the one that was opened."""
        return next((lost for anchor in self._anchors if (lost := anchor.lost) is not None), None)

    @property
    def away(self) -> list[str]:
        """What this server cannot see or write now, and since when. It goes on with what it has; changes may not reach it."""
        return [told for one in (self._database, self._stored, self._writing) if (told := one.told) is not None]

    async def _look_at_store(self) -> None:
        await asyncio.to_thread(self._stored.tried, self.objects.look)

    async def _refresh_access(self) -> None:
        await asyncio.to_thread(self.access.refresh)
        await asyncio.to_thread(self.registry.transactions.require_primary)
        if self._database.ends():  # perhaps as a standby, or a copy, which never had the newest entries
            await asyncio.to_thread(self.registry.trail.follow)

    async def _purge(self) -> None:
        await asyncio.to_thread(self._retention.go_on)

    async def _count_gates(self) -> None:
        self.telemetry.keep_gates(await self._all_counts())

    async def _count_jobs(self) -> None:
        lease = self.settings.lease_seconds
        self._jobs = await asyncio.to_thread(standing, self.registry.transactions, time.time(), lease)

    async def _all_counts(self) -> Gates:
        return await self.gate_counts()

    async def _repeat(self, what: str, work: Callable[[], Awaitable[None]], seconds: float) -> None:
        failing = Outage(f"{what} of this server", log)
        while not await self.ends_within(seconds):
            try:
                await work()
                failing.ends()
            except EngineStopped:
                return
            except AWAY as error:
                self._database.begins(error)
            except Exception as error:  # noqa: BLE001 - it must go on, whatever happens once
                failing.begins(error)

    async def ends_within(self, seconds: float) -> bool:
        """Whether this server ends before that many seconds are over."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._ending.wait(), seconds)
        return self._ending.is_set()

    async def _watch_trail(self) -> None:
        """Check the whole audit trail now and by the clock, in pages with pauses between, so that nobody waits for it."""
        trail, seconds = self.registry.trail, self.settings.audit_check_seconds
        failing = Outage("the check of the audit trail", log)
        while True:
            try:
                if not await asyncio.to_thread(trail.check, PAUSE_SECONDS):
                    await asyncio.to_thread(trail.follow)  # other machines' changes move only the heads kept there
                failing.ends()
            except Abandoned:
                return
            except AWAY as error:
                self._database.begins(error)
            except Exception as error:  # noqa: BLE001 - it must go on, whatever happens once
                failing.begins(error)
            if not seconds or await self.ends_within(seconds):
                return


def service_of(request: Request) -> BaseService:
    """What the application holds that a request came to."""
    found: BaseService = request.app.state.service
    return found


async def base_service(request: Request) -> BaseService:
    """The same for routes to depend on: a plain function would be run on a thread of its own, under load a long way round."""
    return service_of(request)
