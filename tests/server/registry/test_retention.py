"""Forget rows are kept exactly as long as a takedown has them: under races, refusals, deaths and age. Files of the store go once
nothing can need them.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from typer.testing import CliRunner

from server.api.admin.bodies import TakedownFields
from server.api.admin.intake import from_json
from server.api.admin.modules import verify
from server.api.admin.takedowns import Asked, _submit
from server.cli import build
from server.errors import ApiError
from server.guarding import guard_secret
from server.registry import records, retention
from server.registry.audit import Actor
from server.registry.files import job_dir, save_json
from server.registry.lifecycle import Action
from server.registry.objects import ObjectStore
from server.registry.private.files import TakedownFiles
from server.registry.records import NewModule
from server.registry.refusals import NameTaken, NotAllowed, RowsPurged
from server.registry.registry import Registry
from server.registry.retention import DAY, Retention
from server.registry.tables import JobKind, JobState, Kind, Origin
from server.settings import Settings
from server.worker.process import environment_of
from tests.support.folders import unfinished_in
from tests.support.repository import ROOT

ADMIN = Actor("admin", "test")
HOUR = 3600.0


class Shop:
    """What a POST asks of a server, and POSTs to it."""

    def __init__(self, registry: Registry, settings: Settings) -> None:
        self.registry, self.settings, self.files = registry, settings, TakedownFiles(settings)
        self.served: Any = SimpleNamespace(
            settings=settings,
            registry=registry,
            model_fingerprint="model",
            guard_secret=guard_secret(settings),
            objects=ObjectStore(settings.published_store),
        )

    def post(self, name: str, rows: str = "shared", **options: Any) -> str:
        """The takedown's id."""
        fields = TakedownFields(name=name, options={"protect": "module", **options})
        intake = from_json(
            [{"prompt": f"def {rows}_{number}():", "continuation": " return a + b"} for number in range(3)]
        )
        job, _ = _submit(self.served, Asked(fields, options, intake), None, ADMIN, None)
        return str(job["takedown_id"])

    def kept(self, takedown: str) -> bool:
        return self.files.has_forget(self.registry.takedowns.get(takedown)["forget_digest"])

    def cancel(self, takedown: str) -> None:
        for job in self.registry.takedowns.get(takedown)["jobs"]:
            self.registry.jobs.request_cancel(job, ADMIN, time.time())


@pytest.fixture(params=["data", "private"])
def shop(request: pytest.FixtureRequest, registry: Registry, tmp_path: Path) -> Shop:
    private = {"private_store": str(tmp_path / "private"), "private_key": "5a" * 32}
    return Shop(registry, Settings(data_dir=tmp_path / "data", **(private if request.param == "private" else {})))


def before(call: Callable[..., Any], first: Callable[[], object]) -> Callable[..., Any]:
    """The call, and something else just before it."""

    def called(*arguments: Any, **named: Any) -> Any:
        first()
        return call(*arguments, **named)

    return called


def test_of_two_posts_of_the_same_rows_the_refused_one_leaves_the_other_s(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    takedowns, both = shop.registry.takedowns, Barrier(2)
    monkeypatch.setattr(takedowns, "submit", before(takedowns.submit, both.wait))  # both have passed every check so far

    def post(_: int) -> str:
        try:
            return shop.post("m")
        except NameTaken:
            return "refused"

    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(post, range(2)))
    (accepted,) = set(answers) - {"refused"}
    assert "refused" in answers and shop.kept(accepted)


def test_a_purge_while_the_same_rows_are_posted_again_leaves_them(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    takedowns, old = shop.registry.takedowns, shop.post("old")
    shop.cancel(old)

    def purge() -> None:
        retention.purge(shop.registry, shop.settings, old, ADMIN)

    monkeypatch.setattr(takedowns, "submit", before(takedowns.submit, purge))
    assert shop.kept(shop.post("new"))


@pytest.mark.parametrize("adopt", [False, True])
def test_of_rows_that_another_takedown_keeps_a_purged_one_has_nothing_made_any_more(shop: Shop, adopt: bool) -> None:
    registry, purged = shop.registry, shop.post("purged")

    def verified() -> str:
        told = json.loads(bytes(verify("purged", shop.served, ADMIN, adopt=adopt).body))
        return str(told["job_id"])

    claim = registry.jobs.claim("worker", time.time(), HOUR, 3)
    assert claim is not None
    made = NewModule(claim.module, "d", "model", "objects/d", Origin.TAKEDOWN, job_id=claim.job_id, takedown_id=purged)
    registry.jobs.finish(claim, JobState.SUCCEEDED, time.time(), module=made)
    shop.post("kept")
    before_it = verified()
    registry.jobs.request_cancel(before_it, ADMIN, time.time())
    retention.purge(registry, shop.settings, purged, ADMIN)
    assert shop.kept(purged)
    # what a job leaves holds samples of the rows, and the purge that deletes it is over
    with pytest.raises(ApiError, match="were purged") as refused:
        verified()
    assert refused.value.code == "rows_not_kept"
    with pytest.raises(RowsPurged):
        registry.jobs.retry(before_it, ADMIN, time.time())


def test_what_is_refused_at_the_last_leaves_no_rows(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    takedowns = shop.registry.takedowns
    submit = takedowns.submit
    monkeypatch.setattr(takedowns, "submit", before(submit, lambda: setattr(takedowns, "submit", submit) or taken()))

    def taken() -> None:
        shop.post("m", "others")

    with pytest.raises(NameTaken):
        shop.post("m")
    (accepted,) = takedowns.newest()
    assert shop.files.kept_forget() == {accepted["forget_digest"]}


def test_what_cannot_be_deleted_keeps_nothing_else_and_is_not_called_purged(registry: Registry, tmp_path: Path) -> None:
    shop = Shop(registry, Settings(data_dir=tmp_path / "data", forget_retention_days=1e-9))
    posted = [shop.post(name, name) for name in ("a", "b", "c")]
    for takedown in posted:
        shop.cancel(takedown)
    (job,) = registry.takedowns.get(posted[0])["jobs"]
    folder = job_dir(shop.settings.data_dir, job)
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")  # as what the system refuses to delete
    kept = Retention(registry, shop.settings)
    assert kept.purge_old(0.0) == []
    with pytest.raises(OSError, match="symbolic link"):
        kept.purge_old(HOUR)
    assert [registry.takedowns.get(takedown)["purged_at"] is None for takedown in posted] == [True, False, False]
    assert not shop.kept(posted[1]) and not shop.kept(posted[2])
    folder.unlink()
    assert kept.purge_old(HOUR + 1) == [posted[0]] and not shop.kept(posted[0])


def test_rows_that_are_too_old_by_a_clock_that_is_ahead_for_less_than_an_hour_are_kept(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop = Shop(registry, Settings(data_dir=tmp_path / "data", forget_retention_days=30))
    posted, kept = shop.post("m"), Retention(registry, shop.settings)
    shop.cancel(posted)
    right = time.time()
    for now, ahead in ((0.0, 31), (HOUR - 1, 31), (HOUR, 0), (HOUR + 1, 31), (2 * HOUR, 31)):
        monkeypatch.setattr(time, "time", lambda ahead=ahead: right + ahead * DAY)
        assert kept.purge_old(now) == [] and shop.kept(posted)
    assert kept.purge_old(2 * HOUR + 1) == [posted] and not shop.kept(posted)


def test_rows_of_a_post_that_died_go_once_they_were_found_without_a_takedown_for_a_day(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    accepted, sweeper = shop.post("m"), Retention(shop.registry, shop.settings)

    def die() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(shop.registry.takedowns, "submit", before(shop.registry.takedowns.submit, die))
        with pytest.raises(KeyboardInterrupt):
            shop.post("died", "other")
    (left,) = shop.files.kept_forget() - {shop.registry.takedowns.get(accepted)["forget_digest"]}
    assert sweeper.sweep(0) == [] and shop.files.has_forget(left)
    again = shop.post("again", "other")
    assert sweeper.sweep(2 * DAY) == [] and shop.kept(again)  # it has a takedown by now
    shop.cancel(again)
    shop.registry.takedowns.purge(again, lambda *_: None, ADMIN, time.time())  # as a store that lost the deletion
    assert sweeper.sweep(3 * DAY) == [] and sweeper.sweep(4 * DAY - 1) == []
    assert sweeper.sweep(4 * DAY) == [left]
    assert not shop.files.has_forget(left) and shop.kept(accepted)


WRITES_ROWS = """
import os, sys, time
from server.registry.private.files import TakedownFiles
from server.sources import load_settings
from unbind_core.rows import ForgetRow

os.fsync = lambda _: (print("all is written, and in no place yet", flush=True), time.sleep(600))
TakedownFiles(load_settings({}, os.environ)).save_forget([ForgetRow("def secret():", sys.argv[1])])
"""


@pytest.mark.parametrize("purged", [False, True])
def test_rows_that_a_killed_process_left_half_written_go_at_the_next_look_and_with_a_purge(
    shop: Shop, purged: bool
) -> None:
    @contextmanager
    def writing(continuation: str) -> Iterator[subprocess.Popen[str]]:
        with subprocess.Popen(
            [sys.executable, "-c", WRITES_ROWS, continuation],
            env=environment_of(shop.settings) | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                assert process.stdout is not None and process.stdout.readline()
                yield process
            finally:
                process.kill()

    accepted = shop.post("m")
    shop.cancel(accepted)
    folder = Path(shop.files.store.where) if shop.files.store is not None else shop.files.data_dir
    with writing("killed") as killed, writing("at work"):
        both = set(unfinished_in(folder))
        killed.kill()
        killed.wait()
        assert set(unfinished_in(folder)) == both and len(both) == 2
        if purged:
            retention.purge(shop.registry, shop.settings, accepted, ADMIN)
        else:
            Retention(shop.registry, shop.settings).sweep(0.0)
        assert len(unfinished_in(folder)) == 1
    Retention(shop.registry, shop.settings).sweep(0.0)
    assert unfinished_in(folder) == [] and shop.kept(accepted) is not purged


def test_what_jobs_left_that_no_takedown_with_rows_has_goes_after_a_day(shop: Shop) -> None:
    registry, files, sweeper = shop.registry, shop.files, Retention(shop.registry, shop.settings)
    takedowns = {name: shop.post(name, name) for name in ("kept", "purged")}
    (kept,), (purged,) = (registry.takedowns.get(one)["jobs"] for one in takedowns.values())
    shop.cancel(takedowns["purged"])
    retention.purge(registry, shop.settings, takedowns["purged"], ADMIN)
    about = {"id": "mod_1", "name": "purged", "takedown_id": takedowns["purged"]}
    activation = registry.jobs.create(JobKind.ACTIVATE, about, {}, ADMIN, time.time())["id"]
    unknown = f"job_{uuid.uuid4().hex[:16]}"  # of a registry that was put back, say
    for job in (kept, purged, activation, unknown):  # the purged one's by a worker that was taken for dead meanwhile
        if files.store is not None:
            files.store.put(f"jobs/{job}/attempt-1/exhibits.json", b"{}")
        else:
            save_json(job_dir(files.data_dir, job) / "attempt-1" / "exhibits.json", {})
    assert sweeper.sweep(0.0) == [] and sweeper.sweep(DAY - 1) == []
    assert sorted(sweeper.sweep(DAY)) == sorted([purged, unknown])
    assert files.kept_jobs() == {kept, activation} and shop.kept(takedowns["kept"])
    assert sweeper.sweep(2 * DAY) == []


def test_a_server_looks_for_rows_without_a_takedown_once_an_hour(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[None] = []
    kept = Retention(shop.registry, shop.settings)
    monkeypatch.setattr(kept, "sweep", before(kept.sweep, lambda: looks.append(None)))
    for _ in range(3):
        kept.go_on()
    assert len(looks) == 1 and kept._next - time.monotonic() > 3000
    kept._next = time.monotonic()
    kept.go_on()
    assert len(looks) == 2


class Shelf:
    """A store, in a folder or elsewhere, and records of files in it."""

    def __init__(self, registry: Registry, where: str) -> None:
        self.registry, self.store = registry, ObjectStore(where)

    def put(self, data: bytes, days: float) -> str:
        """A file that was put there so long ago; its key."""
        key = self.store.put(data)
        if self.store.folder is not None:
            os.utime(self.store.folder / key, (time.time() - days * DAY,) * 2)
        else:
            files = fsspec.filesystem("memory").store
            (path,) = [path for path in files if path.endswith(f"{self.store.where.partition('://')[2]}/{key}")]
            files[path].modified = datetime.fromtimestamp(time.time() - days * DAY, UTC)
        return key

    def version(self, name: str, key: str, *, retired: float | None = None, kind: Kind = Kind.GUARD) -> str:
        """The id of a record of this file: the newest version, which is active, or was retired so many days ago."""
        digest = key.rpartition("/")[2].partition(".")[0]
        new = NewModule(name, digest, "", key, Origin.TAKEDOWN, kind=kind)
        with self.registry.transactions.change() as session:
            made = records.add(session, new, "auto", ADMIN, time.time()).id
        if retired is not None:
            self.registry.modules.act(made, Action.RETIRE, "*", ADMIN, time.time() - retired * DAY)
        return made


@pytest.fixture(params=["folder", "elsewhere"])
def shelf(request: pytest.FixtureRequest, registry: Registry, tmp_path: Path) -> Shelf:
    folder = request.param == "folder"
    return Shelf(registry, str(tmp_path / "store") if folder else f"memory://unbind-{uuid.uuid4().hex}")


def test_only_files_that_nothing_can_need_again_are_deleted(shelf: Shelf) -> None:
    registry, store = shelf.registry, shelf.store
    first, second = shelf.put(b"first", 9), shelf.put(b"second", 9)
    superseded, active = shelf.version("a", first), shelf.version("a", second)
    both = shelf.put(b"the same rows, posted again", 9)
    shelf.version("b", both, retired=5)
    shelf.version("b", both)
    gone = shelf.put(b"retired", 9)
    retired = shelf.version("c", gone, retired=2)
    for name, days in (("today", 0.5), ("by a clock that is ahead", -400)):
        shelf.version(name, shelf.put(name.encode(), 9), retired=days)
    left, young = shelf.put(b"of a post that died", 2), shelf.put(b"whose record is still to come", 0.5)
    before = store.sizes()

    found = retention.spare_files(registry, store)
    assert {file.file: (file.bytes, file.records) for file in found} == {gone: (7, [retired]), left: (19, [])}
    assert store.sizes() == before
    assert retention.sweep_files(registry, store, found, ADMIN) == found
    assert store.sizes().keys() == before.keys() - {gone, left} and young in store.sizes()
    assert retention.spare_files(registry, store) == [] and retention.sweep_files(registry, store, found, ADMIN) == []

    told = [row["subject"] for row in registry.audit(limit=1000) if row["action"] == "store.sweep"]
    assert sorted(told) == sorted([gone, left]) and registry.audit_problems() == []
    assert registry.modules.rollback("guard:a", "*", ADMIN, time.time())["id"] == superseded
    store.get(first, registry.modules.get(superseded)["digest"])
    assert registry.modules.get(active)["state"] == "superseded"


def test_what_is_needed_by_the_time_it_would_go_stays(shelf: Shelf) -> None:
    again, posted = shelf.put(b"put again", 9), shelf.put(b"recorded", 9)
    shelf.version("other", shelf.put(b"other", 9))
    found = retention.spare_files(shelf.registry, shelf.store)
    assert {file.file for file in found} == {again, posted}
    shelf.store.put(b"put again")  # as of a post of the same rows, whose record is still to come
    shelf.version("new", posted)
    assert retention.sweep_files(shelf.registry, shelf.store, found, ADMIN) == []
    assert {again, posted} <= shelf.store.sizes().keys()


class Otherwise(MemoryFileSystem):
    """Takes what it is asked in another order, as Google's does."""

    protocol = "otherwise"

    def find(self, path: str, withdirs: bool = False, detail: bool = False, prefix: str = "", **named: Any) -> Any:
        assert not prefix
        return super().find(path, withdirs=withdirs, detail=detail, **named)


def test_stores_of_every_kind_list_their_files() -> None:
    fsspec.register_implementation("otherwise", Otherwise, clobber=True)
    store = ObjectStore(f"otherwise://{uuid.uuid4().hex}")
    assert store.sizes() == {}
    key = store.put(b"module")
    store.look()
    assert store.sizes() == {key: 6}


def test_the_store_of_another_registry_is_left_alone(shelf: Shelf) -> None:
    assert retention.spare_files(shelf.registry, shelf.store) == []
    key = shelf.put(b"another's", 9)
    with pytest.raises(NotAllowed, match=r"names none of the 1 files in .*see database_url"):
        retention.spare_files(shelf.registry, shelf.store)
    assert key in shelf.store.sizes()


def test_the_command_lists_and_deletes_only_where_it_is_told_to(
    registry: Registry, database_url: str, tmp_path: Path
) -> None:
    shelf = Shelf(registry, str(tmp_path / "data" / "modules"))
    shelf.version("a", shelf.put(b"active", 9))
    retired = shelf.version("b", gone := shelf.put(b"retired", 9), retired=3)

    def sweep(*words: str) -> str:
        where = ["--data-dir", str(tmp_path / "data"), "--database-url", database_url]
        done = CliRunner().invoke(build(), ["db", "sweep", *words, *where])
        assert done.exit_code == 0, done.output
        return done.stdout

    listed = {"bytes": 7, "files": [{"file": gone, "bytes": 7, "records": [retired]}]}
    assert json.loads(sweep("--json")) == {"deleted": False, **listed}
    assert gone in sweep() and "--delete" in sweep() and gone in shelf.store.sizes()
    assert json.loads(sweep("--json", "--delete")) == {"deleted": True, **listed}
    assert len(shelf.store.sizes()) == 1 and sweep("--delete") == "nothing can go\n"


def test_a_post_that_finds_no_room_leaves_neither_guard_nor_rows(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    takedowns, store = shop.registry.takedowns, shop.served.objects

    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    guard: Any = {"protect": "guard", "guard": {"run": 8}}
    with monkeypatch.context() as patched:
        patched.setattr(takedowns, "submit", before(takedowns.submit, full))
        with pytest.raises(OSError, match="No space left"):
            shop.post("m", **guard)
    assert store.sizes() == {} and shop.files.kept_forget() == set()
    kept = shop.registry.takedowns.get(shop.post("m", **guard))["guard"]["file"]
    with pytest.raises(NameTaken):
        shop.post("m", **guard)
    assert list(store.sizes()) == [kept]
    takedown = shop.registry.modules.versions("m")[0]
    shop.registry.modules.act(takedown["id"], Action.RETIRE, "*", ADMIN, time.time() - 9 * DAY)
    retention.drop_file(shop.registry, store, kept)  # as after a post of the same guard that failed
    assert list(store.sizes()) == [kept]
