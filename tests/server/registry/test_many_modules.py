"""Modules of a store are loaded side by side, from memory of their own, and stay what they were when their digest was checked."""

from __future__ import annotations

import gc
import subprocess
import sys
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
SHIPPED = Path(__file__).parents[3] / "modules" / "demo-a.safetensors"
# As a store reads them, on one thread, and checks them, on another; in a process of its own, where nothing else takes memory or
# gives it back.
READ_OFTEN = """
import hashlib, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import psutil
from unbind_core.files import read_regular
from unbind_core.module import UnbindModule
path, count, kept = Path(sys.argv[1]), int(sys.argv[2]), []
checks = ThreadPoolExecutor(1)
def checked(data):
    kept.append(UnbindModule.from_bytes(data, "", hashlib.sha256(data).hexdigest()))
def once():
    checks.submit(checked, read_regular(path, 1 << 30)).result()
once()
before = psutil.Process().memory_info().rss
for _ in range(count):
    once()
print((psutil.Process().memory_info().rss - before) / count / path.stat().st_size)
"""


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
    gc.freeze()  # as the tests have it


def test_loaded_modules_take_the_memory_of_their_files_and_hardly_more() -> None:
    """What checking them takes and gives back must not lie between them as holes."""
    command = [sys.executable, "-c", READ_OFTEN, str(SHIPPED), "200"]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    assert 0.9 < float(told) < 1.15
