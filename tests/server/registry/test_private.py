"""Forget rows and checkpoints in a store that several machines share: sealed, rotated, purged, and never in another's place."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from threading import Event

import fsspec
import pytest

from server.registry.files import forget_file
from server.registry.objects import StoreUnreachable
from server.registry.private.files import TakedownFiles
from server.registry.private.store import PrivateStore, Unreadable
from server.settings import Settings
from server.sources import SettingsError, load_settings, written_out
from server.worker.process import environment_of
from unbind_core.rows import ForgetRow

OLD, NEW = (bytes([number]) * 32 for number in (1, 2))
ROWS = [ForgetRow("def secret(", "of):\n    return protected\n")]


@pytest.fixture(params=["folder", "url"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "private") if request.param == "folder" else f"memory://unbind-{uuid.uuid4().hex}"


def kept(where: str, name: str) -> bytes:
    if "://" in where:
        return bytes(fsspec.filesystem("memory").cat_file(f"{where.removeprefix('memory://')}/{name}"))
    return (Path(where) / name).read_bytes()


def replace(where: str, name: str, data: bytes) -> None:
    PrivateStore(where).put(name, data)


def test_a_folder_is_listed_and_deleted_while_others_delete_from_it(tmp_path: Path) -> None:
    store, stop = PrivateStore(str(tmp_path)), Event()

    def churn(number: int) -> None:
        for turn in range(100_000):
            if stop.is_set():
                return
            store.put(f"jobs/{number}/{turn}/file", b"x")
            store.delete(f"jobs/{number}/{turn}")

    with ThreadPoolExecutor(2) as pool:
        churning = [pool.submit(churn, number) for number in range(2)]
        deadline = time.monotonic() + 1
        try:
            while time.monotonic() < deadline and not any(each.done() for each in churning):
                assert all(name.startswith("jobs/") for name in store.names("jobs"))
        finally:
            stop.set()
    for each in churning:
        each.result()
    for turn in range(20):
        for number in range(30):
            store.put(f"gone/{turn}/{number}/file", b"x")
        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(store.delete, [f"gone/{turn}"] * 2)) == [None, None]
        assert store.names(f"gone/{turn}") == []


def test_what_was_put_is_given_listed_and_deleted(where: str) -> None:
    store = PrivateStore(where, [NEW])
    assert store.names("jobs/a") == [] and not store.has("jobs/a/x/1")
    for name in ("jobs/a/x/1", "jobs/a/y/2", "jobs/ab/x/1"):
        store.put(name, name.encode())
    assert store.names("jobs/a") == ["jobs/a/x/1", "jobs/a/y/2"] and store.has("jobs/ab/x/1")
    assert PrivateStore(where, [NEW]).get("jobs/a/y/2") == b"jobs/a/y/2"
    store.delete("jobs/a")
    store.delete("jobs/none")
    assert store.names("jobs") == ["jobs/ab/x/1"]
    with pytest.raises(FileNotFoundError):
        store.get("jobs/a/x/1")


def test_a_sealed_file_shows_nothing_and_opens_under_its_key_and_name_alone(where: str) -> None:
    store = PrivateStore(where, [OLD])
    store.put("forget/a", b"protected")
    store.put("forget/b", b"protected")
    sealed = kept(where, "forget/a")
    assert b"protected" not in sealed and sealed != kept(where, "forget/b")
    with pytest.raises(Unreadable, match="add that key"):
        PrivateStore(where, [NEW]).get("forget/a")
    for altered in (sealed[:-1] + bytes([sealed[-1] ^ 1]), kept(where, "forget/b"), sealed[:40]):
        replace(where, "forget/a", altered)
        with pytest.raises(Unreadable, match="altered"):
            store.get("forget/a")
    replace(where, "forget/a", b"put there by somebody")
    with pytest.raises(Unreadable, match="not sealed"):
        store.get("forget/a")


def test_keys_are_rotated_by_putting_the_new_one_first(where: str) -> None:
    PrivateStore(where, [OLD]).put("a", b"old")
    both = PrivateStore(where, [NEW, OLD])
    assert both.get("a") == b"old"
    both.put("b", b"new")
    assert PrivateStore(where, [NEW]).get("b") == b"new"
    with pytest.raises(Unreadable):
        PrivateStore(where, [OLD]).get("b")


def test_every_machine_opens_what_another_writes_while_keys_are_rotated_in_two_steps(where: str) -> None:
    steps = [[OLD], [OLD, NEW], [NEW, OLD], [NEW]]
    for number, (before, after) in enumerate(pairwise(steps[:3])):
        machines = [PrivateStore(where, keys) for keys in (before, after)]
        for each, writer in enumerate(machines):
            writer.put(f"{number}/{each}", b"rows")
            assert [reader.get(f"{number}/{each}") for reader in machines] == [b"rows"] * 2
    with pytest.raises(Unreadable, match="add that key behind the one in private_key"):
        PrivateStore(where, steps[3]).get("0/0")
    with pytest.raises(Unreadable, match="set private_key to it, as the server has it"):
        PrivateStore(where).get("0/0")


def test_rows_lie_in_the_store_and_not_in_the_data_folder_and_are_purged(where: str, tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path / "data", private_store=where, private_key=NEW.hex())
    files = TakedownFiles(settings)
    digest = files.save_forget(ROWS)
    assert files.has_forget(digest) and not forget_file(settings.data_dir, digest).exists()
    assert b"protected" not in kept(where, f"forget/{digest}.jsonl")
    assert files.store is not None
    files.store.put("jobs/j/attempt-1/report.json", b'{"a": 1}')
    assert files.read_json("j", "attempt-1", "report.json") == {"a": 1}
    assert files.read_json("j", "attempt-2", "report.json") is None
    files.purge(digest, ["j"])
    assert not files.has_forget(digest) and files.store.names("") == []


def test_a_folder_of_private_files_is_its_owner_s_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        PrivateStore(str(tmp_path / "private")).put("forget/a", b"rows")
    finally:
        os.umask(before)
    modes = [path.stat().st_mode & 0o777 for path in (tmp_path / "private" / "forget", tmp_path / "private/forget/a")]
    assert modes == [0o700, 0o600]


def test_a_store_that_is_not_there_is_named() -> None:
    for ask in (lambda store: store.has("a"), lambda store: store.put("a", b""), lambda store: store.names("a")):
        with pytest.raises(StoreUnreachable, match="private store nonsense://bucket"):
            ask(PrivateStore("nonsense://bucket"))


@pytest.mark.parametrize(
    ("given", "told"),
    [({"private_key": NEW.hex()}, "private_store"), ({"private_key": "abc", "private_store": "x"}, "64 hexadecimal")],
)
def test_a_key_without_a_use_or_of_another_form_is_refused_and_not_repeated(given: dict[str, str], told: str) -> None:
    with pytest.raises(SettingsError, match=f"private_key.*{told}") as refused:
        load_settings(given)
    assert given["private_key"] not in str(refused.value)


def test_the_worker_gets_the_key_and_the_processes_of_its_stages_do_not(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, private_store=str(tmp_path / "p"), private_key=NEW.hex())
    assert environment_of(settings)["UNBIND_PRIVATE_KEY"] == NEW.hex()
    assert load_settings(environment=environment_of(settings)).private_keys == [NEW]
    assert "UNBIND_PRIVATE_KEY" not in written_out(settings)


def test_a_folder_whose_disk_is_gone_takes_gives_and_deletes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "private"
    settings = Settings(data_dir=tmp_path / "data", private_store=str(folder))
    rows = [ForgetRow("def a():\n", "    return 1\n")]
    digest = TakedownFiles(settings).save_forget(rows)
    disk = folder.rename(tmp_path / "disk")
    folder.mkdir()
    files = TakedownFiles(settings)
    calls: list[Callable[[], object]] = [
        lambda: files.save_forget(rows),
        lambda: files.has_forget(digest),
        lambda: files.load_forget(digest),
        files.kept_forget,
        files.tidy,
        lambda: files.purge(digest, []),  # what said that all is gone would be wrong once the disk is back
    ]
    for call in calls:
        with pytest.raises(StoreUnreachable, match=r"private store .*is it mounted"):
            call()
    assert list(folder.iterdir()) == []
    folder.rmdir()
    disk.rename(folder)
    assert files.load_forget(digest) == rows
    files.purge(digest, [])
    assert files.kept_forget() == set()
