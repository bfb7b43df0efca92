"""Workers and their child processes, killed at any instant: every job ends, one module each, nothing half-written or left over."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import time
from contextlib import closing, suppress

import pytest

from server.registry.tables import ENDED
from tests.system.workshop import LEASE, Workshop


def killings(shop: Workshop, count: int, workers: int, seed: int) -> None:
    """Kill workers and children at random instants, ``count`` times, while jobs run; then let them end."""
    rng = random.Random(seed)
    jobs = [shop.submit(f"m{number}") for number in range(max(3, count // 6))]
    killed = 0
    deadline = time.monotonic() + 10 * count + 60
    while killed < count:
        assert time.monotonic() < deadline, "".join(shop.log[-30:])
        while sum(worker.poll() is None for worker in shop.workers) < workers:
            shop.start()
        time.sleep(rng.random() * 1.2)
        if all(shop.job(job)["state"] in ENDED for job in jobs):
            jobs.append(shop.submit(f"m{len(jobs)}"))
        alive = [worker.pid for worker in shop.workers if worker.poll() is None]
        victims = alive if rng.random() < 0.5 else shop.children()
        if victims:
            with suppress(ProcessLookupError):
                os.kill(rng.choice(victims), signal.SIGKILL)
                killed += 1
    time.sleep(0.2)  # the last one killed has ended by then
    while sum(worker.poll() is None for worker in shop.workers) < workers:
        shop.start()
    for job in shop.ended(*jobs, seconds=60 + 2 * LEASE * len(jobs)):
        assert (job["state"], job["outcome"]) == ("succeeded", "active"), job
    shop.check_what_is_left(jobs)


def test_workers_and_children_killed_at_random_lose_nothing(shop: Workshop) -> None:
    killings(shop, 8, workers=2, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_hundred_killings_and_more_lose_nothing(shop: Workshop, seed: int) -> None:
    killings(shop, int(os.environ.get("UNBIND_TEST_KILLS", "30")), workers=1 + seed % 2, seed=seed)


@pytest.mark.slow
def test_a_database_locked_for_ten_seconds_delays_and_loses_nothing(shop: Workshop) -> None:
    job_id = shop.submit("m", seconds=0.5)
    shop.start()
    shop.wait(lambda: shop.job(job_id)["stage"] == "fit")
    with closing(sqlite3.connect(shop.registry.transactions.engine.url.database or "", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        time.sleep(11)
        other.execute("ROLLBACK")
    assert shop.ended(job_id)[0]["outcome"] == "active"
    shop.check_what_is_left([job_id])
