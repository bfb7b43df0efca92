"""Module files: picked up, replaced, refused with a reason, never half-loaded, never fatal; in a folder and in a remote store."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import threading
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from typer.testing import CliRunner

from server.cli import build
from server.registry.audit import Actor
from server.registry.database import open_database
from server.registry.lifecycle import Action
from server.registry.objects import DamagedObject, ObjectStore, StoreUnreachable
from server.registry.records import NewModule, add
from server.registry.refusals import NotAllowed
from server.registry.registry import Registry
from server.registry.store import ModuleStore
from server.registry.tables import ModuleRow, Origin
from tests.core.conftest import save_checkpoint
from tests.server.conftest import MakeModule, build_module
from tests.support.disks import small_disk
from unbind_core.architecture import LoadedModel, load_model
from unbind_core.files import MAX_BYTES
from unbind_core.module import UnbindModule

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


def test_a_look_at_what_is_as_before_finds_the_same(place: Place, make_module: MakeModule) -> None:
    make_module("shipped").save(place.shipped / "shipped.safetensors")
    made = make_module("made")
    new = NewModule("made", made.digest, made.model.fingerprint, place.objects.put(made.to_bytes()), Origin.TAKEDOWN)
    place.registry.modules.adopt(new, 1.0)
    scan = place.store.scan()
    assert place.store.scan() is scan and sorted(scan.modules) == ["made", "shipped"]
    place.registry.modules.act("made", Action.SUSPEND, "*", ADMIN, 1.0)
    assert sorted(place.store.scan().modules) == ["shipped"]
    (place.shipped / "shipped.safetensors").unlink()
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
    assert [(record["digest"], record["state"]) for record in place.registry.modules.versions()] == [
        (made.digest, "active")
    ]


def states(place: Place) -> list[tuple[str, str]]:
    return [(record["origin"], record["state"]) for record in place.registry.modules.versions()]


@pytest.mark.parametrize("way", [[], [Action.ACTIVATE, Action.SUSPEND], [Action.RETIRE]])
@pytest.mark.parametrize("model", ["this", "another"])
def test_no_file_stands_in_for_a_takedown_s_module_in_any_state(
    place: Place, make_module: MakeModule, way: list[Action], model: str
) -> None:
    made = make_module("one")
    fingerprint = made.model.fingerprint if model == "this" else "f" * 64
    key = place.objects.put(made.to_bytes())
    new = NewModule("one", made.digest, fingerprint, key, Origin.TAKEDOWN, activation="manual")
    place.registry.modules.adopt(new, 1.0)
    with place.registry.transactions.change() as session:  # as a takedown leaves it that is to be activated by hand
        session.query(ModuleRow).update({"state": "calibrated"})
    for action in way:
        place.registry.modules.act("one", action, "*", ADMIN, 2.0)
    for folder in (place.shipped, place.published):
        make_module("one", seed=5, kappa=1e-30).save(folder / "harmless.safetensors")
    before = states(place)
    scan = place.store.scan()
    assert scan.modules == {} and states(place) == before
    assert len(scan.problems) == 2 and all("a takedown's module" in reason for reason in scan.problems.values())


def test_a_file_that_was_there_first_gives_way_to_a_takedown_s_module(place: Place, make_module: MakeModule) -> None:
    make_module("one", seed=5).save(place.published / "one.safetensors")
    assert list(place.store.scan().modules) == ["one"]
    made = make_module("one")
    key = place.objects.put(made.to_bytes())
    new = NewModule("one", made.digest, made.model.fingerprint, key, Origin.TAKEDOWN, activation="manual")
    with place.registry.transactions.change() as session:
        add(session, new, "manual", ADMIN, time.time())
    assert place.store.scan().modules == {}
    assert states(place) == [("dropped", "superseded"), ("takedown", "calibrated")]
    for act in (
        lambda: place.registry.modules.act(
            place.registry.modules.versions()[0]["id"], Action.ACTIVATE, "*", ADMIN, 2.0
        ),
        lambda: place.registry.modules.rollback("one", "*", ADMIN, 2.0),
    ):
        with pytest.raises(NotAllowed, match="a file never stands in for it"):
            act()
    assert place.store.scan().modules == {}
    assert place.registry.audit_problems() == []


def test_a_file_that_does_nothing_is_refused(place: Place, make_module: MakeModule) -> None:
    for strength in (0.0, 1e-300):  # in single precision, in which it is applied, the second is 0 as well
        make_module("idle", kappa=strength).save(place.shipped / f"{strength}.safetensors")
    scan = place.store.scan()
    assert scan.modules == {} and states(place) == []
    assert all("kappa is 0" in reason for reason in scan.problems.values()) and len(scan.problems) == 2


def resealed(module: UnbindModule) -> bytes:
    """The same module in a file with another header: JSON with spaces."""
    data = module.to_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.dumps(json.loads(data[8 : 8 + size])).encode()
    return len(header).to_bytes(8, "little") + header + data[8 + size :]


def test_a_module_whose_file_is_spelt_otherwise_keeps_the_digest_of_its_bytes(
    place: Place, make_module: MakeModule
) -> None:
    data = resealed(make_module("one"))
    digest = hashlib.sha256(data).hexdigest()
    assert digest != make_module("one").digest
    (place.published / "one.safetensors").write_bytes(data)
    for _ in range(2):
        scan = place.store.scan()
        assert scan.problems == {} and scan.modules["one"].digest == digest
    assert (place.published / "objects" / f"{digest}.safetensors").read_bytes() == data


def test_whatever_lies_in_a_folder_the_good_files_are_read(
    place: Place, make_module: MakeModule, tmp_path: Path
) -> None:
    make_module("good").save(tmp_path / "elsewhere.safetensors")
    whole = make_module("good").to_bytes()
    for number, folder in enumerate((place.shipped, place.published)):
        os.mkfifo(folder / "pipe.safetensors")
        (folder / "folder.safetensors").mkdir()
        (folder / "loop.safetensors").symlink_to("loop.safetensors")
        (folder / "nowhere.safetensors").symlink_to("nowhere")
        with (folder / "huge.safetensors").open("wb") as file:
            file.truncate(MAX_BYTES + 1)
        (folder / ("n" * 240 + ".safetensors")).write_bytes(b"")
        Path(os.fsdecode(os.fsencode(folder) + b"/\xff.safetensors")).write_bytes(b"")
        text = whole.replace(b'\\"detector\\":\\"fisher\\"', b'\\"detector\\":[1]     ')
        assert text != whole
        (folder / "detector.safetensors").write_bytes(text)
        make_module(f"last-{number}", seed=number).save(folder / "zz.safetensors")
    (place.shipped / "linked.safetensors").symlink_to(tmp_path / "elsewhere.safetensors")
    (place.published / "linked.safetensors").symlink_to(tmp_path / "elsewhere.safetensors")
    scan = place.store.scan()
    assert sorted(scan.modules) == ["good", "last-0", "last-1"]  # a shipped link is followed, a dropped one is not
    assert json.dumps(scan.problems, ensure_ascii=False).encode()  # can be answered and logged
    for file in place.published.iterdir():
        os.utime(file, (time.time() - 60, time.time() - 60), follow_symlinks=False)
    assert sorted(place.store.scan().modules) == ["good", "last-0", "last-1"]
    assert list(place.published.glob("*.safetensors")) == []
    assert len(list((place.published / "quarantine").glob("*.reason"))) == 9
    assert sorted(place.store.scan().modules) == ["good", "last-0", "last-1"]


def test_a_file_that_cannot_be_put_away_is_reported_once(
    place: Place, make_module: MakeModule, caplog: pytest.LogCaptureFixture
) -> None:
    (place.published / "quarantine").write_text("no folder")
    (place.published / "bad.safetensors").write_text("no module")
    settled(place.published / "bad.safetensors")
    make_module("good").save(place.published / "good.safetensors")
    for _ in range(4):
        scan = place.store.scan()
        assert list(scan.modules) == ["good"] and len(scan.problems) == 1
    assert [record.getMessage().count("cannot be quarantined") for record in caplog.records].count(1) == 1
    assert len(caplog.records) == 2


def test_a_dropped_file_waits_where_the_store_cannot_take_it(place: Place, make_module: MakeModule) -> None:
    (place.published / "objects").write_text("no folder")
    make_module("one").save(place.published / "one.safetensors")
    settled(place.published / "one.safetensors")
    for _ in range(2):
        scan = place.store.scan()
        assert scan.modules == {} and list(scan.problems) == [str(place.published / "one.safetensors")]
    (place.published / "objects").unlink()
    assert list(place.store.scan().modules) == ["one"]


def test_a_damaged_shipped_file_is_missing_and_a_removed_one_is_gone(
    place: Place, make_module: MakeModule, loaded: LoadedModel
) -> None:
    make_module("one").save(place.shipped / "one.safetensors")
    place.store.scan()
    (place.shipped / "one.safetensors").write_text("damaged")
    for store in (place.store, ModuleStore(place.shipped, place.objects, place.registry.modules, loaded.identity)):
        assert list(store.scan().absent) == ["one"]
    (place.shipped / "one.safetensors").unlink()
    assert place.store.scan().absent == {}


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


def test_of_many_objects_each_that_is_damaged_is_missing_and_all_others_are_loaded(
    place: Place, make_module: MakeModule, loaded: LoadedModel
) -> None:
    stored = {f"m{number:02}": make_module(f"m{number:02}", seed=number) for number in range(20)}
    for name, module in stored.items():
        data = module.to_bytes()
        key = place.objects.put(data)
        new = NewModule(name, module.digest, module.model.fingerprint, key, Origin.TAKEDOWN)
        place.registry.modules.adopt(new, 1.0)
        if name in ("m03", "m11"):  # the last byte is a tensor's
            (place.published / key).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        if name == "m17":
            (place.published / key).unlink()
    other = load_model(save_checkpoint("qwen2", place.shipped.parent / "other", seed=3))
    foreign = build_module(other.identity, "foreign")  # as if its record were changed
    key = place.objects.put(foreign.to_bytes())
    place.registry.modules.adopt(
        NewModule("foreign", foreign.digest, loaded.identity.fingerprint, key, Origin.TAKEDOWN), 1.0
    )
    for _ in range(2):
        scan = place.store.scan()
        assert set(scan.absent) == {"m03", "m11", "m17", "foreign"} and len(scan.problems) == 4
        assert {name: found.digest for name, found in scan.modules.items()} == {
            name: module.digest for name, module in stored.items() if name not in scan.absent
        }
    told = " ".join(scan.problems.values())
    assert told.count("damaged") == 2 and "was fitted on" in told


def test_an_object_is_read_once_while_it_is_live_and_again_when_it_is_live_again(
    place: Place, make_module: MakeModule
) -> None:
    module = make_module("one")
    key = place.objects.put(module.to_bytes())
    place.registry.modules.adopt(NewModule("one", module.digest, module.model.fingerprint, key, Origin.TAKEDOWN), 1.0)
    assert list(place.store.scan().modules) == ["one"]
    (place.published / key).write_bytes(b"damaged since")
    assert list(place.store.scan().modules) == ["one"]
    place.registry.modules.act("one", Action.SUSPEND, "*", ADMIN, 2.0)
    assert place.store.scan().modules == {}
    place.registry.modules.act("one", Action.ACTIVATE, "*", ADMIN, 3.0)
    scan = place.store.scan()
    assert scan.modules == {} and list(scan.absent) == ["one"]


def test_the_check_names_the_files_that_are_missing_or_damaged_and_not_those_of_retired_modules(
    place: Place, make_module: MakeModule, tmp_path: Path
) -> None:
    for name in ("whole", "missing", "damaged", "retired"):
        make_module(name, seed=len(name)).save(place.published / f"{name}.safetensors")
    place.store.scan()
    records = {record["name"]: record for record in place.registry.modules.versions()}
    place.registry.modules.act(records["retired"]["id"], Action.RETIRE, "*", ADMIN, 1.0)
    for name in ("missing", "retired"):
        (place.published / records[name]["file"]).unlink()
    with (place.published / records["damaged"]["file"]).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xa5")
    where = ["--database-url", f"sqlite:///{tmp_path / 'r.sqlite'}", "--module-store", str(place.published)]
    checked = CliRunner().invoke(build(), ["db", "check", "--data-dir", str(tmp_path), *where, "--json"])
    first, second = sorted(json.loads(checked.stdout)["problems"])
    assert checked.exit_code == 1 and "module 'damaged'" in first and "restore it from a backup" in first
    assert first.startswith("store: ") and "module 'missing'" in second and "No such file" in second


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


class Slow(MemoryFileSystem):
    """Gives a file when ``may`` is set."""

    protocol = "slowly"
    may = threading.Event()

    def cat_file(self, path: str, *given: Any, **named: Any) -> bytes:
        assert self.may.wait(30)
        return bytes(super().cat_file(path, *given, **named))


def test_a_store_that_is_slow_to_answer_holds_no_change_up(
    tmp_path: Path, loaded: LoadedModel, make_module: MakeModule
) -> None:
    fsspec.register_implementation("slowly", Slow, clobber=True)
    place = Place(tmp_path, loaded, f"slowly://{uuid.uuid4().hex}")
    Slow.may.set()
    modules = [make_module(f"m{number}", seed=number) for number in range(4)]
    for module in modules:
        new = NewModule(module.name, module.digest, module.model.fingerprint, "", Origin.TAKEDOWN)
        place.registry.modules.adopt(replace(new, file=place.objects.put(module.to_bytes())), 1.0)
        if module is modules[0]:
            assert list(place.store.scan().modules) == ["m0"]
            Slow.may.clear()
    began = time.monotonic()
    found = place.store.scan()
    assert list(found.modules) == ["m0"] and set(found.absent) == {"m1", "m2", "m3"}
    assert all("has not given" in reason for reason in found.problems.values())
    place.registry.modules.act("m0", Action.SUSPEND, "*", ADMIN, 2.0)
    assert place.store.scan().modules == {} and time.monotonic() - began < 10
    Slow.may.set()
    while place.store.scan().absent:
        assert time.monotonic() - began < 30
    assert set(place.store.scan().modules) == {"m1", "m2", "m3"}


def test_a_store_that_may_only_be_read_is_there_though_nobody_has_marked_it(tmp_path: Path) -> None:
    with small_disk(tmp_path / "store") as disk:
        if disk.own:
            subprocess.run(["mount", "-o", "remount,ro", disk.folder], check=True)
        else:
            disk.folder.chmod(0o500)
        ObjectStore(str(disk.folder)).look()
