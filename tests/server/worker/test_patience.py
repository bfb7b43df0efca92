"""What a worker and its stages do while the registry or the module store is away: ask again, say so once, name the remedy."""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from server.registry.audit import Actor
from server.registry.jobs import Claim
from server.registry.objects import ObjectStore
from server.registry.registry import Registry, open_registry
from server.registry.tables import JobKind, Origin
from server.settings import Settings
from server.worker.context import Context
from server.worker.patience import Patience, Stopping
from server.worker.plan import Task
from tests.server.conftest import MakeModule
from tests.support.disks import small_disk
from unbind_core.errors import DataError
from unbind_core.progress import Progress


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path / "data")


def test_a_database_that_goes_and_comes_back_is_told_of_in_two_lines(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    registry = open_registry(settings)
    file = settings.data_dir / "unbind.sqlite"
    beats: list[None] = []
    patience = Patience(settings, registry, threading.Event(), lambda: beats.append(None))
    away = file.rename(file.with_name("elsewhere"))
    registry.engine.dispose()
    file.mkdir()  # nothing that could be opened

    def back() -> None:
        time.sleep(1.2)
        file.rmdir()
        away.rename(file)

    with caplog.at_level(logging.INFO, "unbind.worker"):
        for _ in range(5):
            with pytest.raises(OperationalError), patience.asking():
                registry.jobs.newest(0.0)
        thread = threading.Thread(target=back)
        thread.start()
        assert patience.insist(lambda: registry.jobs.newest(0.0)) == []
        thread.join()
    told = [record.getMessage() for record in caplog.records]
    assert [line.partition(" (")[0] for line in told] == ["the registry does not answer", "the registry answers again"]
    assert len(beats) > 1 and not any("\n" in line for line in told)
    registry.close()


def claimed(registry: Registry, name: str = "m") -> Claim:
    asked: dict[str, Any] = {
        "forget_digest": "d",
        "notice": {},
        "options": {},
        "request_digest": "r",
        "fingerprint": "f",
    }
    registry.takedowns.submit(
        name=name, row_count=1, idempotency_key=None, actor=Actor("admin"), now=time.time(), **asked
    )
    claim = registry.jobs.claim("worker", time.time(), 600.0, 3)
    assert claim is not None
    return claim


def test_the_stage_that_begins_while_the_registry_is_away_is_told_of_once_it_is_back(settings: Settings) -> None:
    registry = open_registry(settings)
    patience = Patience(settings, registry, threading.Event(), lambda: None)
    claim, file = claimed(registry), settings.data_dir / "unbind.sqlite"
    patience.report(claim, {"stage": "check"})
    away = file.rename(file.with_name("elsewhere"))
    patience.report(claim, {"stage": "fit", "stage_started_at": 5.0, "message": "begins"})
    away.rename(file)
    patience.report(claim, {"message": "goes on"})
    found = registry.jobs.get(claim.job_id, time.time())
    assert (found["stage"], found["message"]) == ("fit", "goes on")
    away = file.rename(file.with_name("elsewhere"))
    patience.report(claim, {"stage": "verify"})
    away.rename(file)
    registry.jobs.release(claim, time.time())
    again = registry.jobs.claim("worker", time.time(), 600.0, 3)
    assert again is not None
    patience.report(again, {})
    assert (
        registry.jobs.get(claim.job_id, time.time())["stage"] == "fit"
    )  # what an attempt before was about to say is over
    registry.close()


def test_a_worker_that_is_asked_to_leave_waits_for_no_database(settings: Settings) -> None:
    registry = open_registry(settings)
    stop = threading.Event()
    stop.set()

    def never() -> None:
        raise OperationalError("SELECT", {}, Exception("gone"))

    with pytest.raises(Stopping):
        Patience(settings, registry, stop, lambda: None).insist(never)
    registry.close()


def test_a_worker_whose_store_has_no_room_gives_signs_of_life(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("server.worker.patience.REPORT_SECONDS", 0.02)
    registry = open_registry(settings)
    claim = claimed(registry)
    with small_disk(tmp_path / "disk") as disk:
        beats: list[None] = []

        def beat() -> None:
            beats.append(None)
            if len(beats) == 3:
                disk.free([os.getpid()])

        placed = settings.model_copy(update={"module_store": str(disk.folder / "store")})
        patience = Patience(placed, registry, threading.Event(), beat)
        monkeypatch.setattr("server.worker.patience.PATIENCE_SECONDS", 5.0)
        disk.fill([os.getpid()])
        key = patience.put(b"module", claim)
        assert len(beats) >= 3 and (disk.folder / "store" / key).read_bytes() == b"module"
    told = [record.getMessage() for record in caplog.records if record.name == "unbind.worker"]
    assert len(told) == 1 and "it is tried again for 5 s" in told[0], told  # and not at each try
    registry.close()


def stage_context(settings: Settings, told: list[Progress], patience: float) -> Context:
    task = Task("job", JobKind.ACTIVATE, "new", "", {}, "", {})
    return Context(settings, task, told.append, patience=patience, patience_step=0.02)


def kept(settings: Settings, make_module: MakeModule) -> tuple[dict[str, Any], Path]:
    module = make_module("other")
    key = ObjectStore(settings.published_store).put(module.to_bytes())
    record = {"name": "other", "origin": Origin.TAKEDOWN, "file": key, "digest": module.digest, "state": "active"}
    return record, Path(settings.published_store) / key


def test_a_stage_waits_for_a_store_that_is_away(settings: Settings, make_module: MakeModule) -> None:
    record, file = kept(settings, make_module)
    away = file.rename(file.with_name("elsewhere"))
    told: list[Progress] = []
    context = stage_context(settings, told, patience=60)
    thread = threading.Timer(0.3, lambda: away.rename(file))
    thread.start()
    assert context.stored(record).digest == record["digest"]
    thread.join()
    assert told and {one.stage for one in told} == {"waiting for the module store"} and "'other'" in told[0].message


def test_a_stage_that_waited_in_vain_names_module_reason_and_remedy(
    settings: Settings, make_module: MakeModule
) -> None:
    record, file = kept(settings, make_module)
    context = stage_context(settings, [], patience=0.1)
    file.rename(file.with_name("elsewhere"))
    with pytest.raises(
        DataError, match=r"module 'other' could not be read .*No such file.*; bring the store back, or retire"
    ):
        context.stored(record)
    with pytest.raises(DataError, match=r"'other' version 1 is retired, and its file is not in the store any more"):
        context.stored({**record, "version": 1, "state": "retired"})
    file.write_bytes(b"not what it says")
    with pytest.raises(DataError, match=r"module 'other': .*damaged.*restore it from a backup, then retry the job"):
        context.stored(record)
