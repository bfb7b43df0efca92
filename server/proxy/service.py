"""What a server process holds that guards another server: the ``BaseService``, and the other server in place of a model."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterable
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from typing import Any

import torch
from fastapi import Request

from server.base_service import REFRESH_SECONDS, BaseService
from server.engine.modules import NO_GATES, Gates, ModuleTable
from server.errors import ApiError
from server.offer import Offer
from server.proxy.upstream import Upstream
from server.registry.modules import Modules
from server.registry.store import Scan
from server.settings import Settings
from server.telemetry.figures import Figures
from unbind_core.applying.bank import ModuleBank
from unbind_core.module import UnbindModule

log = logging.getLogger("unbind.service")
LAST_SECONDS = 1.0  # for requests that are ended to say so


class NoModules:
    """In place of an engine and its files: nothing is found and nothing can be named. Files lie for other servers to take up."""

    def __init__(self, records: Modules) -> None:
        self._records = records
        self.modules = ModuleTable(ModuleBank(torch.device("cpu")), {})

    def scan(self) -> Scan:
        """What is due by now happens."""
        self._records.pass_time(time.time())
        return Scan({}, {})

    def sync_modules(self, modules: Iterable[tuple[UnbindModule, str]]) -> Future[None]:
        """Have none loaded, as none was found."""
        done: Future[None] = Future()
        self.modules.sync(modules)
        done.set_result(None)
        return done


class GuardService(BaseService):
    """The parts of a running guard. Raises UnbindError where the settings name no other server."""

    def __init__(self, settings: Settings, refresh_seconds: float = REFRESH_SECONDS) -> None:
        super().__init__(settings.model_copy(update={"worker": False}), refresh_seconds)
        self.upstream = Upstream(settings.upstream, settings.upstream_key)
        self._none = NoModules(self.registry.modules)
        self.offer = Offer(settings, self._none, self.guard_store, self._none, self.access)
        self._running: set[asyncio.Timeout] = set()
        self._idle = asyncio.Event()  # nothing runs
        self._idle.set()
        self._draining = False

    @property
    def modules(self) -> ModuleTable:
        """None."""
        return self._none.modules

    @property
    def title(self) -> str:
        """Where the other server is."""
        return f"upstream {self.upstream.address}"

    @property
    def described(self) -> dict[str, Any]:
        """What is known of the model: by whom it is asked."""
        return {"name": self.title, "fingerprint": None}

    @property
    def computed_by(self) -> str:
        """Another server."""
        return "upstream"

    async def gate_counts(self) -> Gates:
        """There are no gates."""
        return NO_GATES

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Around a call, as long as its answer takes. Raises ApiError 503 where the server ends, before or within."""
        if self._draining:
            raise _ending()
        try:
            async with asyncio.timeout(None) as limit:
                self._running.add(limit)
                self._idle.clear()
                try:
                    yield
                finally:
                    self._running.discard(limit)
                    if not self._running:
                        self._idle.set()
        except TimeoutError:
            if not limit.expired():
                raise
            raise _ending() from None

    def _figures(self) -> Figures:
        problems, audit = len(self.offer.guards.problems), len(self.registry.trail.problems)
        return Figures(len(self._running), len(self.offer.missing_active), problems, audit)

    async def _open(self) -> None:
        """The other server may come later: until then it is told of in each answer."""

    async def end_requests(self, seconds: float) -> None:
        """Admit nothing more, give what runs ``seconds`` to end, and end what remains."""
        self._draining = True
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), seconds)
        if not self._running:
            return
        log.warning("%d requests that still ran after %g s (drain_timeout) were ended", len(self._running), seconds)
        for limit in self._running:
            limit.reschedule(asyncio.get_running_loop().time())
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), LAST_SECONDS)

    async def _close(self) -> None:
        await self.upstream.close()


def _ending() -> ApiError:
    return ApiError(503, "the server is shutting down", code="shutting_down", headers={"Retry-After": "10"})


def guarded_of(request: Request) -> GuardService:
    """What the application holds that a request came to."""
    found: GuardService = request.app.state.service
    return found


async def guarded(request: Request) -> GuardService:
    """The same for routes to depend on."""
    return guarded_of(request)
