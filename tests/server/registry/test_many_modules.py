"""Modules of a store are loaded side by side, from memory of their own, and stay what they were when their digest was checked."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from server.registry import store
from server.registry.database import open_database
from server.registry.objects import ObjectStore
from server.registry.records import NewModule
from server.registry.registry import Registry
from server.registry.store import ModuleStore
from server.registry.tables import Origin
from tests.server.conftest import MakeModule
from unbind_core.architecture import LoadedModel

COUNT = 12


@pytest.fixture
def stored(tmp_path: Path, make_module: MakeModule, loaded: LoadedModel) -> Iterator[ModuleStore]:
    """A store that nothing has been read from yet."""
    registry, objects = Registry(open_database(tmp_path / "r.sqlite")), ObjectStore(str(tmp_path / "published"))
    for number in range(COUNT):
        module = make_module(f"m{number:02}", seed=number)
        file = objects.put(module.to_bytes())
        new = NewModule(module.name, module.digest, module.model.fingerprint, file, Origin.TAKEDOWN)
        registry.modules.adopt(new, 1.0)
    yield ModuleStore(tmp_path / "shipped", objects, registry.modules, loaded.identity)
    registry.close()


def test_a_loaded_module_stays_as_it_was_whatever_becomes_of_its_file(stored: ModuleStore) -> None:
    found = stored.scan().modules
    before = {name: {key: part.clone() for key, part in one.module.tensors.items()} for name, one in found.items()}
    for number, one in enumerate(found.values()):
        path = Path(one.path)
        data = path.read_bytes()
        with path.open("r+b") as file:  # in place: no copy of the file keeps what was there
            file.truncate(0) if number % 2 else file.write(bytes(len(data)))
    again = stored.scan().modules
    assert again.keys() == before.keys() and len(again) == COUNT
    for name, one in again.items():
        assert all(torch.equal(part, before[name][key]) for key, part in one.module.tensors.items())


def test_the_collector_of_garbage_leaves_out_what_was_loaded_and_runs_again(
    stored: ModuleStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "MANY", COUNT)
    gc.unfreeze()
    try:
        module = stored.scan().modules["m03"].module
        assert gc.isenabled() and gc.get_freeze_count() > 0
        assert not any(one is module for one in gc.get_objects())
    finally:
        gc.unfreeze()
    assert any(one is module for one in gc.get_objects())
