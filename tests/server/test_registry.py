"""Jobs under leases and fences: exactly one worker may write, and time is a parameter."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from server.registry.registry import CancelRequested, Claim, KeyReused, LeaseLost, NameTaken, NotThere, Registry
from server.registry.tables import JobState, open_database

LEASE = 10.0


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    """A registry on a fresh database."""
    made = Registry(open_database(tmp_path / "data" / "unbind.sqlite"))
    yield made
    made.close()


def _submit(registry: Registry, name: str = "m", now: float = 0.0, **fields: Any) -> str:
    job, _ = registry.submit(
        **{"name": name, "row_count": 3, "forget_digest": "f", "notice": {}, "options": {}, "request_digest": "r",
           "idempotency_key": None, "now": now, **fields}
    )  # fmt: skip
    return str(job["id"])


def _claim(registry: Registry, owner: str, now: float) -> Claim:
    claim = registry.claim(owner, now, LEASE, 3)
    assert claim is not None
    return claim


def test_jobs_are_claimed_oldest_first_and_once(registry: Registry) -> None:
    first, second = _submit(registry, "a", 1.0), _submit(registry, "b", 2.0)
    assert [_claim(registry, "w1", 3.0).job_id, _claim(registry, "w2", 3.0).job_id] == [first, second]
    assert registry.claim("w3", 3.0, LEASE, 3) is None


def test_racing_workers_never_hold_the_same_job(registry: Registry) -> None:
    jobs = {_submit(registry, f"m{i}", float(i)) for i in range(12)}
    with ThreadPoolExecutor(6) as pool:
        claims = list(pool.map(lambda i: registry.claim(f"w{i}", 100.0, LEASE, 3), range(18)))
    held = [claim.job_id for claim in claims if claim is not None]
    assert len(held) == 12 and set(held) == jobs


def test_a_silent_worker_loses_its_job_and_may_write_nothing_more(registry: Registry) -> None:
    job_id = _submit(registry)
    stale = _claim(registry, "w1", 0.0)
    registry.report(stale, 5.0, LEASE, progress=0.3)
    assert registry.claim("w2", 14.9, LEASE, 3) is None  # the report renewed the lease
    fresh = _claim(registry, "w2", 15.1)
    assert (fresh.job_id, fresh.attempt) == (job_id, 2) and fresh.fence > stale.fence
    published: list[str] = []

    def publish() -> dict[str, str]:
        published.append("stale")
        return {"digest": "d", "file": "f"}

    for write in (
        lambda: registry.report(stale, 15.2, LEASE, progress=0.9),
        lambda: registry.stage_done(stale, "fit", 1.0, {}),
        lambda: registry.finish(stale, JobState.SUCCEEDED, 15.2, publish=publish),
    ):
        with pytest.raises(LeaseLost):
            write()
    assert published == [] and registry.job(job_id, 15.2)["progress"] == 0.3


def test_the_next_worker_finds_what_the_last_one_finished(registry: Registry) -> None:
    job_id = _submit(registry)
    first = _claim(registry, "w1", 0.0)
    registry.stage_done(first, "check", 2.5, {"memorised": True})
    second = _claim(registry, "w2", 20.0)
    assert second.stages == {"check": {"seconds": 2.5, "result": {"memorised": True}}}
    assert registry.job(job_id, 20.0)["timings"] == {"check": 2.5}


def test_a_job_that_workers_keep_dying_on_is_failed(registry: Registry) -> None:
    job_id = _submit(registry)
    for attempt in range(3):
        _claim(registry, f"w{attempt}", attempt * 20.0)
    assert registry.claim("w9", 100.0, LEASE, 3) is None
    job = registry.job(job_id, 100.0)
    assert job["state"] == "failed" and "3 workers died" in job["error"]


def test_a_worker_that_leaves_in_good_order_is_not_counted_as_a_death(registry: Registry) -> None:
    _submit(registry)
    for _ in range(5):
        registry.release(_claim(registry, "w", 0.0), 0.0)
    assert _claim(registry, "w", 0.0).attempt == 1


def test_publishing_and_success_are_one_transaction(registry: Registry) -> None:
    job_id = _submit(registry)
    claim = _claim(registry, "w", 0.0)

    def disk_full() -> dict[str, str]:
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        registry.finish(claim, JobState.SUCCEEDED, 1.0, publish=disk_full)
    assert registry.job(job_id, 1.0)["state"] == "running" and registry.modules() == []
    registry.finish(
        claim, JobState.SUCCEEDED, 2.0, result={"outcome": "active"}, publish=lambda: {"digest": "d", "file": "f"}
    )
    assert registry.job(job_id, 2.0)["outcome"] == "active"
    assert [(m["name"], m["state"], m["job_id"]) for m in registry.modules()] == [("m", "active", job_id)]


def test_cancelling_stops_a_queued_job_at_once_and_a_running_one_at_its_next_report(registry: Registry) -> None:
    queued, running = _submit(registry, "a", 5.0), _submit(registry, "b", 1.0)
    claim = _claim(registry, "w", 6.0)
    assert claim.job_id == running
    assert registry.request_cancel(queued, 7.0)["state"] == "cancelled"
    assert registry.request_cancel(running, 7.0)["state"] == "running"
    with pytest.raises(CancelRequested):
        registry.report(claim, 8.0, LEASE)
    registry.finish(claim, JobState.CANCELLED, 8.0)
    assert registry.request_cancel(running, 9.0)["state"] == "cancelled"
    with pytest.raises(NotThere):
        registry.request_cancel("nothing", 9.0)


def test_an_idempotency_key_gives_the_same_job_and_refuses_another_body(registry: Registry) -> None:
    job_id = _submit(registry, idempotency_key="k")
    assert _submit(registry, idempotency_key="k") == job_id
    with pytest.raises(KeyReused):
        _submit(registry, idempotency_key="k", request_digest="other")
    assert len(registry.jobs(0.0)) == 1


def test_a_name_is_made_once(registry: Registry) -> None:
    _submit(registry, "a")
    with pytest.raises(NameTaken, match="is making module 'a'"):
        _submit(registry, "a")
    with pytest.raises(NameTaken, match="loaded already"):
        _submit(registry, "b", existing={"b"})


def test_an_estimate_of_the_rest_comes_from_the_time_so_far(registry: Registry) -> None:
    job_id = _submit(registry)
    assert registry.job(job_id, 50.0)["eta_seconds"] is None
    claim = _claim(registry, "w", 100.0)
    registry.report(claim, 110.0, LEASE, progress=0.25)
    assert registry.job(job_id, 110.0)["eta_seconds"] == 30.0


def test_the_database_is_its_owner_s_alone(tmp_path: Path) -> None:
    path = tmp_path / "new" / "unbind.sqlite"
    open_database(path).dispose()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
