"""Worker and child killed at named places of publishing, each twice: nothing is published twice, nothing is lost."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.support import markers
from tests.system.workshop import LEASE, Workshop

KILLS = 2  # at each place: the next worker is killed there as well
COMMITTED = markers.WORKER[4:]  # where nothing is left to come there a second time
FATES = [(place, victim) for place in markers.CHILD for victim in ("child", "worker")]
FATES += [(place, "worker") for place in markers.WORKER]  # 22 kills at these places in all


def stopped(pid: int) -> bool:
    """Whether a process has stopped itself."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def pids(shop: Workshop) -> list[int]:
    """The workers' process ids and their children's."""
    return [*(worker.pid for worker in shop.workers if worker.poll() is None), *shop.children()]


def wait_until_stopped(shop: Workshop) -> int:
    """The process that has stopped itself, once one has."""
    shop.wait(lambda: any(map(stopped, pids(shop))), 60)
    return next(filter(stopped, pids(shop)))


@pytest.mark.slow
@pytest.mark.parametrize(("place", "victim"), FATES)
def test_a_kill_at_a_place_of_publishing_loses_nothing_and_repeats_nothing(
    shop: Workshop, place: str, victim: str
) -> None:
    job_id = shop.submit("m")
    worker = shop.start(STOP_AT=place)
    kills = 1 if place in COMMITTED else KILLS
    for left in reversed(range(kills)):
        marked = wait_until_stopped(shop)
        if place in COMMITTED:
            assert shop.job(job_id)["state"] == "succeeded"
        os.kill(marked if victim == "child" else worker.pid, signal.SIGKILL)
        shop.wait(lambda: not any(map(stopped, pids(shop))), 10)
        if victim == "worker":
            worker.wait()
            worker = shop.start(STOP_AT=place if left else "")
    if victim == "child":  # a worker hands its own mark on to each child
        worker.kill()
        worker.wait()
        shop.start()
    other = shop.submit("other")  # whatever was left half done hinders nobody
    for job in shop.ended(job_id, other, seconds=60):
        assert (job["state"], job["outcome"]) == ("succeeded", "active")
    shop.check_what_is_left([job_id, other])


@pytest.mark.slow
@pytest.mark.parametrize("place", [markers.WORKER[0], markers.WORKER[2]])
def test_a_worker_that_wakes_up_after_another_published_its_job_publishes_nothing(shop: Workshop, place: str) -> None:
    job_id = shop.submit("m")
    stale = shop.start(STOP_AT=place, UNBIND_DEVICE="cpu:0")
    shop.wait(lambda: stopped(stale.pid), 60)
    time.sleep(LEASE)
    shop.start(UNBIND_DEVICE="cpu:1")
    (job,) = shop.ended(job_id, seconds=60)
    assert (job["outcome"], job["attempt"]) == ("active", 2)
    os.kill(stale.pid, signal.SIGCONT)
    shop.wait(lambda: any("another worker goes on" in line for line in shop.log))
    shop.check_what_is_left([job_id])
