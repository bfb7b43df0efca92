"""What must apply and could not be loaded is missed until it is loaded, however long the loading takes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path

import torch

from server.engine.modules import ModuleTable
from server.guarding import guard_secret
from server.guards import GuardStore
from server.offer import Offer
from server.registry.access import Access
from server.registry.objects import ObjectStore
from server.registry.registry import open_registry
from server.registry.store import Scan, StoredModule
from server.settings import Settings
from tests.server.conftest import MakeModule
from unbind_core.applying.bank import ModuleBank
from unbind_core.module import UnbindModule
from unbind_core.module_file import FLOAT32

RECORD = {"name": "m", "state": "active", "scope": "global", "origin": "takedown"}


class Found:
    """A store that tells what it is told to."""

    scanned = Scan({}, {}, absent={"m": RECORD})

    def scan(self) -> Scan:
        return self.scanned


class Busy:
    """An engine that is deep in a step, and loads when it is let."""

    def __init__(self) -> None:
        self.modules = ModuleTable(ModuleBank(torch.device("cpu")), FLOAT32)
        self.turn = threading.Event()
        self.asked: list[tuple[list[tuple[UnbindModule, str]], Future[None]]] = []

    def sync_modules(self, modules: Iterable[tuple[UnbindModule, str]]) -> Future[None]:
        self.asked.append((list(modules), Future()))
        self.turn.set()
        return self.asked[-1][1]

    def load(self) -> None:
        modules, done = self.asked.pop()
        self.modules.sync(modules)
        done.set_result(None)


def test_a_module_that_was_missed_is_missed_until_it_is_loaded(tmp_path: Path, make_module: MakeModule) -> None:
    settings = Settings(data_dir=tmp_path / "data")
    registry, found, engine = open_registry(settings), Found(), Busy()
    guards = GuardStore(ObjectStore(settings.published_store), registry.modules, guard_secret(settings))
    offer = Offer(settings, found, guards, engine, Access(registry.transactions))
    module = make_module("m")

    async def run() -> None:
        await offer.refresh()
        assert offer.missing_modules == ["m"]
        found.scanned = Scan({"m": StoredModule(module, module.digest, "m", RECORD)}, {})  # the store answers again
        loading = asyncio.create_task(offer.refresh())
        await asyncio.to_thread(engine.turn.wait, 10)
        assert offer.missing_modules == ["m"]  # and not in use without it
        engine.load()
        await loading
        assert offer.missing_modules == [] and "m" in offer.applicable

    asyncio.run(run())
    registry.close()
