"""What must apply and could not be loaded is missed until it is loaded, however long the loading takes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from server.engine.modules import ModuleTable
from server.guarding import build_guard, guard_secret, kept_guard
from server.guards import GuardStore
from server.offer import Offer
from server.registry.access import Access
from server.registry.objects import ObjectStore
from server.registry.registry import open_registry
from server.registry.store import Scan, StoredModule
from server.settings import Settings
from tests.server.conftest import MakeModule
from tests.server.registry.test_guards import OPTIONS, ROWS
from tests.server.registry.test_registry import submit
from unbind_core.applying.bank import ModuleBank
from unbind_core.errors import UnbindError
from unbind_core.guard.index import Secret
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


def test_what_stands_in_for_others_is_demanded_before_they_go(tmp_path: Path, make_module: MakeModule) -> None:
    settings = Settings(data_dir=tmp_path / "data")
    registry, found, engine = open_registry(settings), Found(), Busy()
    guards = GuardStore(ObjectStore(settings.published_store), registry.modules, guard_secret(settings))
    offer = Offer(settings, found, guards, engine, Access(registry.transactions))

    def stored(*names: str) -> Scan:
        modules = [make_module(name) for name in names]
        return Scan({m.name: StoredModule(m, m.digest, m.name, {**RECORD, "name": m.name}) for m in modules}, {})

    async def run() -> None:
        found.scanned = stored("first", "second", "other")
        seen = list[tuple[set[str], set[str]]]()
        for joined in (False, True):
            if joined:
                found.scanned = stored("both", "other")
            loading = asyncio.create_task(offer.refresh())
            while not loading.done():
                await asyncio.sleep(0.001)
                if joined:
                    seen.append((offer.demanded_of_all, set(engine.modules.current)))
                if engine.asked:
                    engine.load()
        await loading
        assert offer.demanded_of_all == set(engine.modules.current) == {"both", "other"}
        for demanded, loaded in seen:
            assert {"first", "second"} <= demanded or "both" in demanded
            assert "both" not in demanded or "both" in loaded

    asyncio.run(run())
    registry.close()


def test_another_version_that_joins_more_or_fewer_leaves_no_call_without_both(
    tmp_path: Path, make_module: MakeModule
) -> None:
    settings = Settings(data_dir=tmp_path / "data")
    registry, found, engine = open_registry(settings), Found(), Busy()
    guards = GuardStore(ObjectStore(settings.published_store), registry.modules, guard_secret(settings))
    offer = Offer(settings, found, guards, engine, Access(registry.transactions))
    few, more = make_module("both"), make_module("both", seed=1)  # the rows of first; and of second, too
    assert few.digest != more.digest

    def stored(*modules: UnbindModule) -> Scan:
        return Scan({m.name: StoredModule(m, m.digest, m.name, {**RECORD, "name": m.name}) for m in modules}, {})

    async def run() -> None:
        for scanned in (stored(few, make_module("second")), stored(more), stored(few, make_module("second"))):
            began = not engine.modules.current
            found.scanned = scanned
            loading = asyncio.create_task(offer.refresh())
            while not loading.done():
                await asyncio.sleep(0.001)
                if not began:
                    whole = engine.modules.current["both"].digest == more.digest
                    assert whole or "second" in offer.demanded_of_all
                    assert "second" not in offer.demanded_of_all or "second" in engine.modules.current
                if engine.asked:
                    engine.load()
            await loading
            assert offer.demanded_of_all == set(engine.modules.current) == set(scanned.modules)

    asyncio.run(run())
    registry.close()


@pytest.mark.parametrize("scope", ["global", "key:k"])
def test_a_guard_that_stands_alone_is_told_of_as_enforced_where_it_is_missed(tmp_path: Path, scope: str) -> None:
    settings = Settings(data_dir=tmp_path / "data")
    registry, found, objects = open_registry(settings), Found(), ObjectStore(settings.published_store)
    found.scanned = Scan({}, {})
    made = build_guard("g", ROWS, OPTIONS, guard_secret(settings))
    submit(registry, "g", guard=kept_guard(made, {"scope": scope}, objects), module=False)

    def enforced(secret: Secret) -> dict[str, bool]:
        store = GuardStore(objects, registry.modules, secret)
        offer = Offer(settings, found, store, Busy(), Access(registry.transactions))
        asyncio.run(offer.refresh())
        return offer.enforced

    assert enforced(guard_secret(settings)) == {}  # it has no gate that is read
    assert enforced(guard_secret(Settings(guard_key="ab" * 32))) == {"g": False}
    registry.close()


def test_what_an_ended_request_leaves_takes_no_room_from_what_comes(make_module: MakeModule) -> None:
    bank = ModuleBank(torch.device("cpu"))

    def reserve() -> None:
        if len(bank) > 1:
            raise UnbindError("there is room for one")

    table = ModuleTable(bank, FLOAT32, reserve)
    first, second = make_module("first"), make_module("second")
    table.sync([(first, first.digest)])
    running = table.pin(["first"])
    table.sync([])
    with pytest.raises(UnbindError, match="room for one"):
        table.sync([(second, second.digest)])
    del running
    table.sync([(second, second.digest)])
    assert list(table.current) == ["second"] and len(bank) == 1


class Picky:
    """An engine that takes all but those of some names."""

    def __init__(self) -> None:
        self.modules = ModuleTable(ModuleBank(torch.device("cpu")), FLOAT32)
        self.bad, self.calls = {"bad"}, 0

    def sync_modules(self, modules: Iterable[tuple[UnbindModule, str]]) -> Future[None]:
        self.calls += 1
        done: Future[None] = Future()
        given = list(modules)
        if self.bad & {module.name for module, _ in given}:
            done.set_exception(UnbindError("there is no room for it"))
        else:
            self.modules.sync(given)
            done.set_result(None)
        return done


def test_what_cannot_be_loaded_costs_the_engine_nothing_until_something_changes(
    tmp_path: Path, make_module: MakeModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, now = Settings(data_dir=tmp_path / "data"), [1000.0]
    monkeypatch.setattr("server.offer.time", SimpleNamespace(monotonic=lambda: now[0]))
    registry, found, engine = open_registry(settings), Found(), Picky()
    guards = GuardStore(ObjectStore(settings.published_store), registry.modules, guard_secret(settings))
    offer = Offer(settings, found, guards, engine, Access(registry.transactions))

    def stored(*names: str) -> Scan:
        modules = [make_module(name) for name in names]
        return Scan({m.name: StoredModule(m, m.digest, m.name, {**RECORD, "name": m.name}) for m in modules}, {})

    def refreshed() -> tuple[int, list[str], list[str]]:
        before = engine.calls
        asyncio.run(offer.refresh())
        return engine.calls - before, sorted(engine.modules.current), offer.missing_active

    found.scanned = stored("a", "b", "bad", "c")
    assert refreshed()[1:] == (["a", "b", "c"], ["bad"])
    waits = 0
    for _ in range(200):  # a second each
        now[0] += 1.0
        asked, *rest = refreshed()
        assert asked <= 1 and rest == [["a", "b", "c"], ["bad"]]
        waits += not asked
    assert waits >= 190
    found.scanned = stored("a", "bad", "c")  # suspended elsewhere: at once, and there may be room now
    assert refreshed() == (2, ["a", "c"], ["bad"]) and refreshed() == (0, ["a", "c"], ["bad"])
    engine.bad.clear()
    now[0] += 1.0
    assert refreshed() == (1, ["a", "bad", "c"], []) and refreshed() == (0, ["a", "bad", "c"], [])
    registry.close()
