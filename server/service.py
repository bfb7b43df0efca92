"""What one server process holds: model, engine, modules, registry, telemetry, worker.

Routes reach it through the dependency ``service``. Built and torn down by the lifespan in ``app.py``.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from dataclasses import replace
from pathlib import Path

import torch
from fastapi import Request

from server.engine.engine import Engine, EngineStopped
from server.engine.memory import plan_memory
from server.ratelimit import RateLimiter
from server.registry import retention
from server.registry.access import SERVER_SCOPE, Access
from server.registry.objects import ObjectStore
from server.registry.registry import open_registry
from server.registry.store import ModuleStore, Scan, StoredModule
from server.settings import Settings
from server.telemetry import Telemetry
from server.worker.process import Supervisor
from unbind_core.architecture import LoadedModel, load_model
from unbind_core.encoding import fim_template, parse_fim_template
from unbind_core.files import write_whole

log = logging.getLogger("unbind.service")
REFRESH_SECONDS = 1.0


class Service:
    """The parts of a running server."""

    def __init__(self, settings: Settings, loaded: LoadedModel) -> None:
        self.memory = plan_memory(loaded.model, settings.max_slots, settings.max_model_len)
        settings = settings.model_copy(update={"max_slots": self.memory.slots, "max_model_len": self.memory.length})
        self.settings = settings
        self.loaded = loaded
        self.telemetry = Telemetry()
        self.registry = open_registry(settings)
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
        objects = ObjectStore(settings.published_store)
        self.store = ModuleStore(settings.modules_dir, objects, self.registry.modules, loaded.identity)
        self.scan = Scan({}, {})
        self.fim = (
            parse_fim_template(loaded.tokenizer, settings.fim_template)
            if settings.fim_template
            else fim_template(loaded.tokenizer)
        )
        self.vocabulary = int(loaded.model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
        self.supervisor = Supervisor(settings)
        self.ready = False
        self.created = int(time.time())
        self.offered: set[str] = set()  # finished jobs after which the modules were looked at
        self._refreshing = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begin to serve: check the model on the engine, load the modules, start the worker."""
        await asyncio.to_thread(self.engine.start)
        await self.refresh_modules()
        self._tasks.append(asyncio.create_task(self._watch_modules(), name="unbind-module-watch"))
        if self.settings.worker:
            await self.supervisor.start()
        self.ready = True

    async def drain(self) -> None:
        """End the worker, admit nothing more and give running requests ``drain_timeout`` seconds to end."""
        self.ready = False
        timeout = self.settings.drain_timeout
        drained, _ = await asyncio.gather(asyncio.to_thread(self.engine.drain, timeout), self.supervisor.stop())
        if not drained:
            log.warning("requests still ran after %g s (drain_timeout); they are cut", timeout)

    async def stop(self) -> None:
        """Drain, then end the engine and the connections, in that order."""
        await self.drain()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self.engine.close)
        self.registry.close()

    async def refresh_modules(self) -> None:
        """Bring the engine's modules in line with the registry and the folders; what is due by now happens first."""
        async with self._refreshing:
            scan = await asyncio.to_thread(self.store.scan)
            if {name: m.digest for name, m in scan.modules.items()} != {
                name: entry.digest for name, entry in self.engine.modules.current.items()
            }:
                wanted: list[StoredModule] = list(scan.modules.values())
                # What goes is demanded no longer before it goes, what comes is demanded once it is there: else the calls
                # between would be refused. Where loading fails, what cannot be had is demanded all the same.
                staying = {name: scan.modules[name] for name in self.scan.modules.keys() & scan.modules.keys()}
                self.scan = replace(scan, modules=staying)
                try:
                    await asyncio.wrap_future(self.engine.sync_modules([(m.module, m.digest) for m in wanted]))
                finally:
                    self.scan = scan
                log.info("modules: %s", ", ".join(e.label for e in self.engine.modules.current.values()) or "none")
            self.scan = scan

    @property
    def missing_modules(self) -> list[str]:
        """Modules that every request must run under and that are not active here."""
        rules = self.access.current.of(SERVER_SCOPE)
        demanded = {*self.settings.enforced, *rules.enforced, *rules.modules, *self.scan.enforced([SERVER_SCOPE])}
        return sorted(demanded - self.applicable)

    @property
    def applicable(self) -> set[str]:
        """The modules that a policy can apply: loaded, and not in shadow."""
        return self.engine.modules.current.keys() - self.scan.shadow

    async def _watch_modules(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_SECONDS)
            try:
                await self.refresh_modules()
                await asyncio.to_thread(self.access.refresh)
                await asyncio.to_thread(retention.purge_old, self.registry, self.settings)
            except EngineStopped:
                return
            except Exception:
                log.exception(
                    "modules or access rules could not be read; what is loaded is served, and it is tried again"
                )


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

    def write(temporary: Path) -> None:
        temporary.chmod(0o600)
        temporary.write_text(key + "\n", encoding="utf-8")

    write_whole(path, write)
    return key


def service(request: Request) -> Service:
    """The service of the application that a request came to, for routes to depend on."""
    found: Service = request.app.state.service
    return found
