"""What one server process holds: model, engine, modules, registry, telemetry, worker.

Routes reach it through the dependency ``service``. Built and torn down by the lifespan in ``app.py``.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import torch
from fastapi import Request

from server.encoding import Encoder
from server.engine.engine import Engine, EngineStopped
from server.engine.memory import plan_memory
from server.engine.modules import Counts
from server.offer import Offer
from server.outage import Outage
from server.ratelimit import RateLimiter
from server.registry import retention
from server.registry.access import Access
from server.registry.anchor import Anchor
from server.registry.objects import ObjectStore
from server.registry.refusals import AWAY
from server.registry.registry import open_registry
from server.registry.store import ModuleStore
from server.registry.trail import Abandoned
from server.settings import Settings
from server.telemetry import Figures, Telemetry
from server.worker.process import GRACE_SECONDS, Supervisor
from unbind_core.architecture import LoadedModel, load_model
from unbind_core.encoding import fim_template, parse_fim_template
from unbind_core.files import write_text

log = logging.getLogger("unbind.service")
REFRESH_SECONDS = 1.0
TRAIL_PAUSE_SECONDS = 0.01  # after each page of the audit trail
COUNT_SECONDS = 0.1


class Service:
    """The parts of a running server."""

    def __init__(self, settings: Settings, loaded: LoadedModel, refresh_seconds: float = REFRESH_SECONDS) -> None:
        """``refresh_seconds``: between two looks at what other processes wrote."""
        self.memory = plan_memory(loaded.model, settings.max_slots, settings.max_model_len)
        settings = settings.model_copy(update={"max_slots": self.memory.slots, "max_model_len": self.memory.length})
        self.settings = settings
        self.loaded = loaded
        self._refresh_seconds = refresh_seconds
        self.telemetry = Telemetry(self._figures)
        self.registry = open_registry(settings)
        settings.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._anchors = [Anchor(settings.data_dir, "the data folder")]
        if self.registry.engine.dialect.name == "sqlite":
            file = Path(self.registry.engine.url.database or "")
            self._anchors.append(Anchor(file, "the registry's database file"))
        self._database = Outage("the registry's database", log)
        self.access = Access(self.registry.transactions)
        self.limiter = RateLimiter()
        self.admin_key = settings.admin_key or kept_admin_key(settings)
        self.engine = Engine(
            loaded.model,
            loaded.tokenizer,
            max_slots=self.memory.slots,
            max_length=self.memory.length,
            queue_limit=settings.queue_limit,
            chunk_tokens=settings.chunk_tokens,
        )
        self.encoder = Encoder(loaded.tokenizer, self.memory.length)
        objects = ObjectStore(settings.published_store)
        self.store = ModuleStore(settings.modules_dir, objects, self.registry.modules, loaded.identity)
        self.offer = Offer(settings, self.store, self.engine, self.access)
        self.fim = (
            parse_fim_template(loaded.tokenizer, settings.fim_template)
            if settings.fim_template
            else fim_template(loaded.tokenizer)
        )
        self.vocabulary = int(loaded.model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
        self.supervisor = Supervisor(settings)
        self.fingerprint = f"fp_{loaded.identity.fingerprint[:12]}"  # what answers carry: the same for the same model
        self.ready = False
        self.created = int(time.time())
        self.offered: set[str] = set()  # finished jobs after which the modules were looked at
        self._counts: Counts = {}
        self._counting: asyncio.Future[Counts] | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begin to serve: check the model on the engine, load the modules, start the worker."""
        await asyncio.to_thread(self.engine.start)
        await self.offer.refresh()
        await self._count_gates()
        if self.settings.metrics_port is not None:
            await asyncio.to_thread(self.telemetry.listen, self.settings.metrics_host, self.settings.metrics_port)
        # Each by itself: what a file, a store or an engine does to one of them must not hold up the revocation of keys.
        for what, work, seconds in (
            ("access", self._refresh_access, self._refresh_seconds),
            ("modules", self.offer.refresh, self._refresh_seconds),
            ("retention", self._purge, self._refresh_seconds),
            ("gate counts", self._count_gates, self.settings.metrics_interval),
        ):
            self._tasks.append(asyncio.create_task(self._repeat(what, work, seconds), name=f"unbind-{what}"))
        self._tasks.append(asyncio.create_task(self._watch_trail(), name="unbind-trail-watch"))
        if self.settings.worker:
            await self.supervisor.start()
        self.ready = True

    async def drain(self) -> None:
        """End the worker, admit nothing more and give running requests ``drain_timeout`` seconds to end; what remains then
        ends with an error that its client hears.
        """
        self.ready = False
        timeout = self.settings.drain_timeout

        async def requests() -> None:
            if await asyncio.to_thread(self.engine.drain, timeout):
                return
            left = self.engine.stats()
            await asyncio.to_thread(self.engine.close)
            if left.running + left.waiting:
                log.warning(
                    "%d requests that still ran and %d that waited after %g s (drain_timeout) were ended with an error",
                    left.running,
                    left.waiting,
                    timeout,
                )

        await asyncio.gather(requests(), self.supervisor.stop(min(GRACE_SECONDS, timeout + 1)))

    async def gate_counts(self) -> Counts:
        """What the gates did, as new as can be had in ``COUNT_SECONDS``: the engine tells between two steps, and a scrape does not
        wait for a long one.
        """
        if self._counting is None or self._counting.done():
            try:
                self._counting = asyncio.wrap_future(self.engine.gate_counts())
            except EngineStopped:
                return self._counts
            self._counting.add_done_callback(self._counted)
        await asyncio.wait({self._counting}, timeout=COUNT_SECONDS)
        return self._counts

    def _counted(self, counting: asyncio.Future[Counts]) -> None:
        if not counting.cancelled() and counting.exception() is None:
            self._counts = counting.result()

    async def stop(self) -> None:
        """Drain, then end the engine and the connections, in that order."""
        await self.drain()
        self.registry.trail.leave()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self.telemetry.close)
        await asyncio.to_thread(self.engine.close)
        self.encoder.close()
        self.registry.close()

    @property
    def most_requests(self) -> int:
        """How many requests can run and wait at the same time."""
        return self.settings.queue_limit + self.settings.max_slots

    @property
    def data_lost(self) -> str | None:
        """Why nothing that is written would be kept: the data folder or the database in it is not the one that was opened."""
        return next((lost for anchor in self._anchors if (lost := anchor.lost) is not None), None)

    def _figures(self) -> Figures:
        loaded, refused = len(self.engine.modules.current), len(self.offer.scan.problems)
        audit = len(self.registry.trail.problems)
        return Figures(self.engine.stats(), loaded, len(self.offer.missing_active), refused, audit)

    async def _refresh_access(self) -> None:
        await asyncio.to_thread(self.access.refresh)
        self._database.ends()

    async def _purge(self) -> None:
        await asyncio.to_thread(retention.purge_old, self.registry, self.settings)

    async def _count_gates(self) -> None:
        self.telemetry.keep_gates(await asyncio.wrap_future(self.engine.gate_counts()))

    async def _repeat(self, what: str, work: Callable[[], Awaitable[None]], seconds: float) -> None:
        failing = Outage(f"{what} of this server", log)
        while True:
            await asyncio.sleep(seconds)
            try:
                await work()
                failing.ends()
            except EngineStopped:
                return
            except AWAY as error:
                self._database.begins(error)
            except Exception as error:  # noqa: BLE001 - it must go on, whatever happens once
                failing.begins(error)

    async def _watch_trail(self) -> None:
        """Check the whole audit trail now and by the clock, in pages with pauses between, so that nobody waits for it."""
        trail, seconds = self.registry.trail, self.settings.audit_check_seconds
        failing = Outage("the check of the audit trail", log)
        while True:
            try:
                if not await asyncio.to_thread(trail.check, TRAIL_PAUSE_SECONDS):
                    await asyncio.to_thread(trail.follow)  # other machines' changes move only the heads kept there
                failing.ends()
            except Abandoned:
                return
            except AWAY as error:
                self._database.begins(error)
            except Exception as error:  # noqa: BLE001 - it must go on, whatever happens once
                failing.begins(error)
            if not seconds:
                return
            await asyncio.sleep(seconds)


def load_served(settings: Settings) -> LoadedModel:
    """The model that the settings name, under the name it is served by. Raises UnbindError saying what is missing."""
    if settings.threads:
        torch.set_num_threads(settings.threads)
    loaded = load_model(settings.model, settings.adapter, dtype=getattr(torch, settings.dtype), device=settings.device)
    return replace(loaded, identity=replace(loaded.identity, name=settings.served_name))


def kept_admin_key(settings: Settings) -> str:
    """The admin key in the data directory, made on first use and readable by its owner alone."""
    path = settings.data_dir / "admin.key"
    if path.is_file() and (kept := path.read_text(encoding="utf-8").strip()):
        return kept
    key = f"ubk_{secrets.token_urlsafe(24)}"
    write_text(path, key + "\n")
    return key


def service_of(request: Request) -> Service:
    """The service of the application that a request came to."""
    found: Service = request.app.state.service
    return found


async def service(request: Request) -> Service:
    """The same for routes to depend on: a plain function would be run on a thread of its own, under load a long way round."""
    return service_of(request)
