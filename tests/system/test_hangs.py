"""Processes that stand still without ending, by a real SIGSTOP: they are killed, and their jobs go on elsewhere."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from server.worker.process import Supervisor, python
from tests.system.conftest import ROOT
from tests.system.workshop import Workshop, workshop

HANG = 2.0


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Workshop]:
    with workshop(tmp_path, hang_seconds=HANG) as made:
        yield made


@contextmanager
def supervised(shop: Workshop) -> Iterator[Supervisor]:
    """A worker under a server's supervisor, which runs in a loop of its own as in the server."""
    supervisor = Supervisor(shop.settings, python("tests.support.fast_stages", "worker"))
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(supervisor.start(), loop).result(10)
        yield supervisor
    finally:
        asyncio.run_coroutine_threadsafe(supervisor.stop(), loop).result(20)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def gone(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return False
    return True


def test_a_hung_worker_is_killed_and_frees_its_device(
    shop: Workshop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    job_id, waiting = shop.submit("m", seconds=0.5), shop.submit("n")
    with supervised(shop) as supervisor, caplog.at_level(logging.ERROR, "unbind.worker"):
        shop.wait(lambda: shop.job(job_id)["stage"] == "fit", 60)
        hung = supervisor.pid
        assert hung is not None
        os.kill(hung, signal.SIGSTOP)
        shop.start()  # another worker of this host, which cannot have the device before
        jobs = shop.ended(job_id, waiting, seconds=90)
        assert [job["outcome"] for job in jobs] == ["active", "active"] and jobs[0]["attempt"] == 2
        assert gone(hung)
        shop.wait(lambda: supervisor.pid not in (None, hung), 30)  # there is another
    assert any("gave no sign of life for 2 s (hang_seconds)" in record.getMessage() for record in caplog.records)
    shop.check_what_is_left([job_id, waiting])


def test_a_worker_that_works_for_longer_than_a_hang_lives(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    job_id = shop.submit("m", seconds=HANG + 1)
    with supervised(shop) as supervisor:
        shop.wait(lambda: shop.job(job_id)["stage"] == "check", 60)
        first = supervisor.pid
        (job,) = shop.ended(job_id, seconds=90)
        assert (job["outcome"], job["attempt"], supervisor.pid) == ("active", 1, first)


def test_a_stopped_child_is_killed_and_its_job_goes_on(shop: Workshop) -> None:
    job_id = shop.submit("m", seconds=0.5)
    shop.start()
    shop.wait(lambda: shop.job(job_id)["stage"] == "fit")
    (child,) = shop.children()
    os.kill(child, signal.SIGSTOP)
    (job,) = shop.ended(job_id)
    assert (job["outcome"], job["attempt"]) == ("active", 2) and gone(child)
    assert any("stage 'fit' gave no sign of life for 2 s (hang_seconds)" in line for line in shop.log)
    shop.check_what_is_left([job_id])


def test_a_stopped_worker_that_goes_on_does_not_hold_that_against_its_child(shop: Workshop) -> None:
    job_id = shop.submit("m", seconds=1.0)
    worker = shop.start()
    shop.wait(lambda: shop.job(job_id)["stage"] == "fit")
    for pid in (worker.pid, *shop.children()):
        os.kill(pid, signal.SIGSTOP)
    time.sleep(HANG + 1)
    for pid in (worker.pid, *shop.children()):
        os.kill(pid, signal.SIGCONT)
    (job,) = shop.ended(job_id)
    assert job["outcome"] == "active" and not any("no sign of life" in line for line in shop.log)


def test_a_worker_that_is_started_again_makes_no_lost_data_folder_anew(
    shop: Workshop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    data = shop.settings.data_dir
    with supervised(shop) as supervisor, caplog.at_level(logging.ERROR, "unbind.worker"):
        shop.wait((data / "locks").is_dir, 60)
        killed = supervisor.pid
        assert killed is not None
        away = data.rename(data.with_name("away"))
        os.kill(killed, signal.SIGKILL)
        shop.wait(lambda: sum("ended with code 1" in record.getMessage() for record in caplog.records) > 0, 60)
        assert not data.exists()
        away.rename(data)
        (job,) = shop.ended(shop.submit("m"), seconds=90)
        assert job["outcome"] == "active"
