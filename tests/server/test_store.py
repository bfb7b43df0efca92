"""Module files: picked up, replaced, refused with a reason, never half-loaded, never fatal; in a folder and in a remote store."""

from __future__ import annotations

import os
import time
import uuid
from pathlib import Path

import fsspec
import pytest

from server.registry.audit import Actor
from server.registry.database import open_database
from server.registry.lifecycle import Action
from server.registry.modules import NewModule
from server.registry.objects import DamagedObject, ObjectStore, StoreUnreachable
from server.registry.registry import Registry
from server.registry.store import ModuleStore
from server.registry.tables import Origin
from tests.core.conftest import save_checkpoint
from tests.server.conftest import MakeModule, build_module
from unbind_core.architecture import LoadedModel, load_model

ADMIN = Actor("admin", "test")


class Place:
    """A registry, a folder of shipped files and a store."""

    def __init__(self, folder: Path, loaded: LoadedModel, store: str = "") -> None:
        self.shipped, self.published = folder / "shipped", folder / "published"
        self.registry = Registry(open_database(folder / "r.sqlite"))
        self.objects = ObjectStore(store or str(self.published))
        self.store = ModuleStore(self.shipped, self.objects, self.registry.modules, loaded.identity)
        self.shipped.mkdir()
        self.published.mkdir()


@pytest.fixture
def place(tmp_path: Path, loaded: LoadedModel) -> Place:
    return Place(tmp_path, loaded)


def settled(path: Path) -> None:
    """As if it had been copied a while ago."""
    os.utime(path, (time.time() - 60, time.time() - 60))


def test_shipped_files_are_read_where_they_lie_replaced_and_dropped(place: Place, make_module: MakeModule) -> None:
    assert place.store.scan().modules == {}
    first, second = make_module("one"), make_module("one", seed=9)
    file = place.shipped / "one.safetensors"
    first.save(file)
    assert place.store.scan().modules["one"].digest == first.digest
    second.save(file)
    assert place.store.scan().modules["one"].digest == second.digest
    assert [(m["version"], m["state"]) for m in place.registry.modules.versions()] == [(1, "superseded"), (2, "active")]
    file.unlink()
    assert place.store.scan().modules == {}
    second.save(file)
    assert place.store.scan().modules["one"].digest == second.digest


def test_a_dropped_file_is_taken_up_into_the_store(place: Place, make_module: MakeModule) -> None:
    module = make_module("one")
    module.save(place.published / "anything.safetensors")
    stored = place.store.scan().modules["one"]
    assert stored.digest == module.digest and stored.record["origin"] == "dropped"
    assert [p.relative_to(place.published).as_posix() for p in place.published.rglob("*.safetensors")] == [
        f"objects/{module.digest}.safetensors"
    ]
    place.registry.modules.act("one", Action.SUSPEND, "*", ADMIN, 1.0)
    assert place.store.scan().modules == {}
    module.save(place.published / "again.safetensors")  # what was suspended is not brought back by a file
    assert place.store.scan().modules == {}


def test_refused_files_are_quarantined_with_the_reason_where_they_were_dropped(
    place: Place, make_module: MakeModule, tmp_path: Path
) -> None:
    make_module("good").save(place.published / "good.safetensors")
    whole = (place.published / "good.safetensors").read_bytes()
    other = load_model(save_checkpoint("qwen2", tmp_path / "other", seed=3))
    for folder in (place.shipped, place.published):
        (folder / "cut.safetensors").write_bytes(whole[:-10])
        (folder / "text.safetensors").write_text("not a module")
        (folder / "future.safetensors").write_bytes(whole.replace(b'\\"format\\":1', b'\\"format\\":9'))
        (folder / "ignored.txt").write_text("not even named like one")
        build_module(other.identity, "foreign").save(folder / "foreign.safetensors")
    scan = place.store.scan()
    bad = ["cut.safetensors", "foreign.safetensors", "future.safetensors", "text.safetensors"]
    assert list(scan.modules) == ["good"]
    assert sorted(Path(file).name for file in scan.problems) == sorted(bad * 2)
    assert all(len(reason) > 20 for reason in scan.problems.values())
    assert not (place.published / "quarantine").exists()  # it may still be being copied
    for file in place.published.glob("*.safetensors"):
        settled(file)
    place.store.scan()
    quarantined = sorted(path.name for path in (place.published / "quarantine").iterdir())
    assert len(quarantined) == 8 and sorted(path.name for path in place.shipped.glob("*.safetensors")) == bad
    reason = next(
        path for path in (place.published / "quarantine").iterdir() if path.name.endswith("foreign.safetensors.reason")
    )
    assert "was fitted on" in reason.read_text()
    assert (
        sorted(Path(file).name for file in place.store.scan().problems) == bad
    )  # the shipped ones, reported, untouched


def test_a_takedown_s_module_stands_before_a_shipped_file_of_its_name(place: Place, make_module: MakeModule) -> None:
    made, shipped = make_module("one"), make_module("one", seed=5)
    fingerprint = made.model.fingerprint
    key = place.objects.put(made.to_bytes())
    place.registry.modules.adopt(NewModule("one", made.digest, fingerprint, key, Origin.TAKEDOWN), 1.0)
    shipped.save(place.shipped / "one.safetensors")
    assert place.store.scan().modules["one"].digest == made.digest
    states = {record["digest"]: record["state"] for record in place.registry.modules.versions()}
    assert states == {made.digest: "active", shipped.digest: "calibrated"}


def test_a_damaged_object_is_reported_and_not_loaded(
    place: Place, make_module: MakeModule, loaded: LoadedModel
) -> None:
    module = make_module("one")
    module.save(place.published / "one.safetensors")
    stored = place.store.scan().modules["one"]
    file = Path(stored.path)
    file.write_bytes(file.read_bytes()[:-1])
    assert place.store.scan().modules["one"].digest == module.digest  # what is loaded stays
    fresh = ModuleStore(place.shipped, place.objects, place.registry.modules, loaded.identity).scan()
    assert fresh.modules == {} and "damaged" in next(iter(fresh.problems.values()))
    module.save(place.published / "one.safetensors")  # dropping the right file mends it
    fresh = ModuleStore(place.shipped, place.objects, place.registry.modules, loaded.identity).scan()
    assert list(fresh.modules) == ["one"]


def test_a_remote_store_keeps_and_gives_the_same_bytes(
    tmp_path: Path, loaded: LoadedModel, make_module: MakeModule
) -> None:
    place = Place(tmp_path, loaded, f"memory://unbind-{uuid.uuid4().hex}")
    module = make_module("one")
    key = place.objects.put(module.to_bytes())
    place.registry.modules.adopt(NewModule("one", module.digest, module.model.fingerprint, key, Origin.TAKEDOWN), 1.0)
    assert place.store.scan().modules["one"].digest == module.digest
    files = fsspec.filesystem("memory")
    (path,) = [path for path in files.find("/") if module.digest in path]
    files.pipe_file(path, b"half")
    with pytest.raises(DamagedObject):
        place.objects.get(key, module.digest)
    files.rm(path)
    with pytest.raises(FileNotFoundError):
        place.objects.get(key, module.digest)


def test_an_unreachable_store_is_reported_by_its_address() -> None:
    for address in ("nonsense://bucket", "http://127.0.0.1:9/modules"):
        with pytest.raises(StoreUnreachable, match=address.split(":", maxsplit=1)[0]):
            ObjectStore(address).put(b"x")
