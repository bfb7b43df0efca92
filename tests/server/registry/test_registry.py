"""Takedowns and jobs under leases and fences: exactly one worker may write, and time is a parameter."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from server.registry.audit import Actor
from server.registry.estimate import Leases, remaining_seconds
from server.registry.jobs import Claim, Jobs
from server.registry.records import NewModule
from server.registry.refusals import CancelRequested, KeyReused, LeaseLost, NameTaken, NotAllowed, NotThere, RowsPurged
from server.registry.registry import Registry
from server.registry.tables import JobState, Origin

LEASE = 10.0
ADMIN = Actor("admin", "test")
_serial = itertools.count()


def submit(registry: Registry, name: str = "m", now: float = 0.0, **fields: Any) -> str:
    job, _ = registry.takedowns.submit(
        **{
            "name": name,
            "row_count": 3,
            "forget_digest": "f",
            "notice": {},
            "options": {},
            "request_digest": "r",
            "idempotency_key": None,
            "fingerprint": "model",
            "actor": ADMIN,
            "now": now,
            **fields,
        }
    )
    return str(job["id"])


def claim(registry: Registry, owner: str = "w", now: float = 0.0) -> Claim:
    found = registry.jobs.claim(owner, now, LEASE, 3)
    assert found is not None
    return found


def made_by(held: Claim, **fields: Any) -> NewModule:
    digest = f"{next(_serial):064x}"
    return NewModule(
        **{
            "name": held.module,
            "digest": digest,
            "fingerprint": "model",
            "file": f"objects/{digest}",
            "origin": Origin.TAKEDOWN,
            "job_id": held.job_id,
            "takedown_id": held.takedown_id,
            **fields,
        }
    )


def test_takedowns_are_found_by_name_and_notice_in_either_database(registry: Registry) -> None:
    for now, (name, notice) in enumerate({"one": {"claimant": "Acme é"}, "two": {"work": "50%_"}, "three": {}}.items()):
        submit(registry, name, float(now), notice=notice)
    # one that an older version kept, whose text PostgreSQL does not give
    submit(registry, "four", 3.0, notice={"claimant": "a\0b", "note": "u0000"})
    submit(registry, "five", 4.0, notice={"note": "u0000"})
    for words, names in (
        ("acme é", ["one"]),
        ("u0000", ["five"]),
        ("four", ["four"]),
        ("%_", ["two"]),
        ("O", ["four", "two", "one"]),
        ("claimant", []),
    ):
        assert [one["name"] for one in registry.takedowns.newest(find=words)] == names


def test_jobs_are_claimed_oldest_first_and_once(registry: Registry) -> None:
    first, second = submit(registry, "a", 1.0), submit(registry, "b", 2.0)
    assert [claim(registry, "w1", 3.0).job_id, claim(registry, "w2", 3.0).job_id] == [first, second]
    assert registry.jobs.claim("w3", 3.0, LEASE, 3) is None


def test_racing_workers_never_hold_the_same_job(registry: Registry) -> None:
    jobs = {submit(registry, f"m{i}", float(i)) for i in range(12)}
    with ThreadPoolExecutor(6) as pool:
        claims = list(pool.map(lambda i: registry.jobs.claim(f"w{i}", 100.0, LEASE, 3), range(30)))
    held = [found.job_id for found in claims if found is not None]
    assert len(held) == len(set(held)) and set(held) <= jobs
    while (more := registry.jobs.claim("last", 100.0, LEASE, 3)) is not None:  # a row that was locked is passed over
        held.append(more.job_id)
    assert sorted(held) == sorted(jobs)


def test_a_silent_worker_loses_its_job_and_may_write_nothing_more(registry: Registry) -> None:
    job_id = submit(registry)
    stale = claim(registry, "w1", 0.0)
    registry.jobs.report(stale, 5.0, LEASE, progress=0.3, message="step 3")
    assert registry.jobs.claim("w2", 14.9, LEASE, 3) is None  # the report renewed the lease
    fresh = claim(registry, "w2", 15.1)
    assert (fresh.job_id, fresh.attempt) == (job_id, 2) and fresh.fence > stale.fence
    assert registry.jobs.get(job_id, 15.1)["message"] == "attempt 2"  # and not what the other one did last
    for write in (
        lambda: registry.jobs.report(stale, 15.2, LEASE, progress=0.9),
        lambda: registry.jobs.stage_done(stale, "fit", {"seconds": 1.0}),
        lambda: registry.jobs.finish(stale, JobState.SUCCEEDED, 15.2, module=made_by(stale)),
    ):
        with pytest.raises(LeaseLost):
            write()
    assert registry.modules.versions() == [] and registry.jobs.get(job_id, 15.2)["progress"] == 0.3
    registry.jobs.release(stale, 15.3)
    assert registry.jobs.get(job_id, 15.3)["state"] == "running"


def test_an_ending_whose_answer_was_lost_may_be_written_again_and_is_there_once(registry: Registry) -> None:
    job_id = submit(registry)
    held = claim(registry)
    new = made_by(held)
    for now in (1.0, 2.0):  # as a connection that breaks behind the commit has it
        registry.jobs.finish(held, JobState.SUCCEEDED, now, result={}, module=new)
    assert registry.jobs.get(job_id, 3.0)["finished_at"] == 1.0 and len(registry.modules.versions()) == 1
    assert [row["action"] for row in registry.audit()].count("job.succeeded") == 1
    with pytest.raises(LeaseLost):  # another ending is not what was asked for
        registry.jobs.finish(held, JobState.FAILED, 3.0, error="it cannot be both")


@pytest.mark.parametrize("ahead", [3 * 3_600.0, 30 * 86_400.0])
def test_a_clock_that_was_ahead_keeps_no_job_from_other_workers(registry: Registry, ahead: float) -> None:
    steady = [0.0]
    others, job_id = Jobs(registry.transactions), submit(registry)
    others.leases = Leases(lambda: steady[0])
    stale = claim(registry, "w1", ahead)
    for _ in range(3):  # it lives, and its clock is still ahead of the others'
        assert others.claim("w2", 10.0, LEASE, 3) is None
        steady[0] += LEASE - 1
        registry.jobs.report(stale, ahead + steady[0], LEASE)
    assert others.claim("w2", 10.0, LEASE, 3) is None  # and it dies; then the clock is put right
    steady[0] += LEASE
    assert others.claim("w2", 10.0, LEASE, 3) is None
    steady[0] += 0.1
    fresh = others.claim("w2", 10.0, LEASE, 3)
    assert fresh is not None and (fresh.job_id, fresh.attempt) == (job_id, 2) and fresh.fence > stale.fence
    assert others.claim("w3", 10.0, LEASE, 3) is None
    with pytest.raises(LeaseLost):
        registry.jobs.report(stale, ahead + 100.0, LEASE)


def test_the_next_worker_finds_what_the_last_one_finished(registry: Registry) -> None:
    job_id = submit(registry)
    done = {"seconds": 2.5, "folder": "attempt-1", "result": {"memorised": True}}
    registry.jobs.stage_done(claim(registry, "w1", 0.0), "check", done)
    assert claim(registry, "w2", 20.0).stages == {"check": done}
    assert registry.jobs.get(job_id, 20.0)["timings"] == {"check": 2.5}


def test_a_job_that_workers_keep_dying_on_is_failed_and_can_be_retried(registry: Registry) -> None:
    job_id = submit(registry)
    for attempt in range(3):
        claim(registry, f"w{attempt}", attempt * 20.0)
    assert registry.jobs.claim("w9", 100.0, LEASE, 3) is None
    job = registry.jobs.get(job_id, 100.0)
    assert job["state"] == "failed" and "3 workers died" in job["error"]
    assert registry.jobs.retry(job_id, ADMIN, 101.0)["state"] == "queued"
    with pytest.raises(NotAllowed, match="queued"):
        registry.jobs.retry(job_id, ADMIN, 101.0)
    assert claim(registry, "w", 102.0).attempt == 1


def test_a_retry_goes_on_after_the_last_finished_stage(registry: Registry) -> None:
    job_id = submit(registry)
    held = claim(registry)
    registry.jobs.stage_done(held, "check", {"seconds": 1.0, "folder": "attempt-1", "result": {}})
    registry.jobs.finish(held, JobState.FAILED, 1.0, error="no space left on device")
    assert registry.jobs.get(job_id, 1.0)["error"] == "no space left on device"
    other = submit(registry, "m", 2.0)
    with pytest.raises(NameTaken, match="another job"):
        registry.jobs.retry(job_id, ADMIN, 2.0)
    registry.jobs.request_cancel(other, ADMIN, 3.0)
    registry.jobs.retry(job_id, ADMIN, 4.0)
    assert set(claim(registry, "w", 5.0).stages) == {"check"}


def test_a_retry_takes_no_name_from_the_takedown_that_has_it_by_now(registry: Registry) -> None:
    ours = Registry(registry.engine, model="model")  # of the server that is asked

    def failed(**fields: Any) -> str:
        job_id = submit(ours, **fields)
        ours.jobs.finish(claim(ours, now=9.0), JobState.FAILED, 9.0, error="no space left on device")
        return job_id

    plain, replaced = failed(), failed(options={"replace": True})
    submit(ours, now=2.0)
    held = claim(ours, now=9.0)
    ours.jobs.finish(held, JobState.SUCCEEDED, 9.0, module=made_by(held, scope="global"))
    for job_id in (plain, replaced):  # who asked to replace did not know of this one
        with pytest.raises(NameTaken, match=f"takedown {held.takedown_id}'s by now.*options.replace"):
            ours.jobs.retry(job_id, ADMIN, 9.0)
        assert ours.jobs.get(job_id, 9.0)["state"] == "failed"
    assert (
        Registry(registry.engine, model="other").jobs.retry(plain, ADMIN, 9.0)["state"] == "queued"
    )  # of another model
    ours.jobs.request_cancel(plain, ADMIN, 9.0)
    replacing = failed(options={"replace": True}, now=4.0)
    assert ours.jobs.retry(replacing, ADMIN, 9.0)["state"] == "queued"


def test_a_job_whose_rows_are_gone_is_not_queued_again(registry: Registry) -> None:
    job_id = submit(registry)
    registry.jobs.request_cancel(job_id, ADMIN, 1.0)
    registry.takedowns.purge(registry.jobs.get(job_id, 1.0)["takedown_id"], lambda *_: None, ADMIN, 2.0)
    with pytest.raises(RowsPurged, match="were purged; submit them again"):
        registry.jobs.retry(job_id, ADMIN, 3.0)
    assert registry.jobs.get(job_id, 3.0)["state"] == "cancelled"


def test_the_pause_before_a_retry_is_no_work(registry: Registry) -> None:
    job_id = submit(registry)
    registry.jobs.finish(claim(registry, now=1.0), JobState.FAILED, 2.0, error="no space left on device")
    assert registry.jobs.get(job_id, 500.0)["elapsed_seconds"] == 1.0
    registry.jobs.retry(job_id, ADMIN, 400.0)
    claim(registry, now=401.0)
    assert registry.jobs.get(job_id, 404.0)["elapsed_seconds"] == 3.0


def test_a_worker_that_leaves_in_good_order_is_not_counted_as_a_death(registry: Registry) -> None:
    submit(registry)
    for _ in range(5):
        registry.jobs.release(claim(registry), 0.0)
    assert claim(registry).attempt == 1


def test_module_job_and_audit_change_in_one_transaction(registry: Registry) -> None:
    job_id = submit(registry)
    held = claim(registry)
    trail = len(registry.audit(limit=1000))
    taken = made_by(held, job_id="no such job")  # what the database refuses at the very end
    with pytest.raises(Exception, match=r"(?i)foreign key"):
        registry.jobs.finish(held, JobState.SUCCEEDED, 1.0, module=taken)
    assert registry.jobs.get(job_id, 1.0)["state"] == "running" and registry.modules.versions() == []
    assert len(registry.audit(limit=1000)) == trail
    registry.jobs.finish(held, JobState.SUCCEEDED, 2.0, result={"check": {}}, module=made_by(held))
    job = registry.jobs.get(job_id, 2.0)
    assert (job["outcome"], job["progress"]) == ("active", 1.0)
    (module,) = registry.modules.versions()
    assert (module["name"], module["state"], module["job_id"], module["version"]) == ("m", "active", job_id, 1)
    assert job["module_id"] == module["id"] and job["result"]["digest"] == module["digest"]


def test_cancelling_stops_a_queued_job_at_once_and_a_running_one_at_its_next_report(registry: Registry) -> None:
    queued, running = submit(registry, "a", 5.0), submit(registry, "b", 1.0)
    held = claim(registry, "w", 6.0)
    assert held.job_id == running
    assert registry.jobs.request_cancel(queued, ADMIN, 7.0)["state"] == "cancelled"
    assert registry.jobs.request_cancel(running, ADMIN, 7.0)["state"] == "running"
    with pytest.raises(CancelRequested):
        registry.jobs.report(held, 8.0, LEASE)
    registry.jobs.finish(held, JobState.CANCELLED, 8.0)
    assert registry.jobs.request_cancel(running, ADMIN, 9.0)["state"] == "cancelled"
    with pytest.raises(NotThere):
        registry.jobs.request_cancel("nothing", ADMIN, 9.0)


def test_an_idempotency_key_gives_the_same_job_and_refuses_another_body(registry: Registry) -> None:
    job_id = submit(registry, idempotency_key="k")
    assert submit(registry, idempotency_key="k") == job_id
    with pytest.raises(KeyReused):
        submit(registry, idempotency_key="k", request_digest="other")
    assert len(registry.jobs.newest(0.0)) == 1


def test_racing_posts_with_one_key_make_one_job(registry: Registry) -> None:
    with ThreadPoolExecutor(8) as pool:
        jobs = set(pool.map(lambda _: submit(registry, idempotency_key="k"), range(16)))
    assert len(jobs) == 1 and len(registry.takedowns.newest()) == 1


def test_a_name_is_made_once_unless_it_is_to_be_replaced(registry: Registry) -> None:
    submit(registry, "a")
    with pytest.raises(NameTaken, match="is making module 'a'"):
        submit(registry, "a")
    held = claim(registry)
    registry.jobs.finish(held, JobState.SUCCEEDED, 1.0, module=made_by(held))
    with pytest.raises(NameTaken, match=r"options\.replace"):
        submit(registry, "a")
    submit(registry, "a", options={"replace": True})


def test_an_estimate_comes_from_the_past_jobs_of_most_alike_size(registry: Registry) -> None:
    looks = [{}, {}, {}, {"effort": 0.1}]  # the last is a quick one, which tells nothing of a whole fit
    for number, (rows, seconds) in enumerate([(10, 10.0), (40, 40.0), (1000, 999.0), (40, 4.0)]):
        submit(registry, f"past{number}", row_count=rows, options=looks[number])
        held = claim(registry)
        registry.jobs.stage_done(held, "check", {"seconds": 1.0, "folder": "", "result": {}})
        registry.jobs.stage_done(held, "fit", {"seconds": seconds, "folder": "", "result": {}})
        registry.jobs.finish(held, JobState.SUCCEEDED, 1.0, module=made_by(held))
    assert registry.jobs.expected(40) == {"check": 1.0, "fit": 40.0}
    job_id = submit(registry, "next", 100.0, row_count=40)
    held = claim(registry, now=100.0)
    registry.jobs.stage_done(held, "check", {"seconds": 1.0, "folder": "", "result": {}})
    registry.jobs.report(held, 110.0, LEASE, stage="fit", stage_progress=0.0, stage_started_at=101.0, progress=0.1)
    job = registry.jobs.get(job_id, 111.0)
    assert (job["eta_seconds"], job["eta_basis"]) == (30.0, "past jobs")


def test_nothing_is_said_of_the_time_left_where_nothing_is_known_of_it(registry: Registry) -> None:
    job_id = submit(registry)
    assert registry.jobs.get(job_id, 50.0)["eta_seconds"] is None
    registry.jobs.report(claim(registry, "w", 100.0), 110.0, LEASE, progress=0.25)
    job = registry.jobs.get(job_id, 110.0)  # no past job: how far a search is does not tell how long it goes on
    assert (job["eta_seconds"], job["eta_basis"]) == (None, None)


def test_the_longer_a_stage_lasts_the_longer_the_past_jobs_that_tell_of_it() -> None:
    near = {"check": [1.0, 1.0, 1.0], "fit": [10.0, 20.0, 60.0], "verify": [5.0, 5.0, 5.0]}
    left = [remaining_seconds(near, ["check"], "fit", seconds) for seconds in (0.0, 9.0, 15.0, 30.0, 59.0, 61.0)]
    assert left == [25.0, 16.0, 10.0, 35.0, 6.0, None]
    assert remaining_seconds(near, ["check", "fit"], "verify", 1.0) == 4.0
    assert remaining_seconds(near, [], "", 0.0) == 26.0


def test_takedowns_of_one_moment_each_have_their_place_in_pages(registry: Registry) -> None:
    for number in range(5):
        submit(registry, f"m{number}", now=float(number == 4))
    every = [takedown["id"] for takedown in registry.takedowns.newest()]
    pages: list[str] = []
    while page := registry.takedowns.newest(2, after=pages[-1] if pages else ""):
        pages += [takedown["id"] for takedown in page]
    assert pages == every and len(set(pages)) == 5
    assert registry.takedowns.get(pages[0])["name"] == "m4"
    jobs = [job["id"] for job in registry.jobs.newest(9.0)]
    assert (
        jobs == [job["id"] for at in ("", *jobs[1::2]) for job in registry.jobs.newest(9.0, 2, at)] and len(jobs) == 5
    )


def test_purging_deletes_rows_that_no_other_takedown_has(registry: Registry) -> None:
    submit(registry, "a", forget_digest="same"), submit(registry, "b", forget_digest="same")
    first, second = (takedown["id"] for takedown in registry.takedowns.newest())
    deleted: list[tuple[str, list[str]]] = []

    def delete(digest: str, jobs: list[str]) -> None:
        deleted.append((digest, jobs))

    with pytest.raises(NotAllowed, match="cancel"):
        registry.takedowns.purge(first, delete, ADMIN, 1.0)
    assert registry.takedowns.purgeable(100.0) == []
    for job in registry.jobs.newest(1.0):
        registry.jobs.request_cancel(job["id"], ADMIN, 1.0)
    assert sorted(registry.takedowns.purgeable(100.0)) == sorted([first, second])
    assert registry.takedowns.purge(first, delete, ADMIN, 2.0)["purged_at"] == 2.0
    registry.takedowns.purge(second, delete, ADMIN, 3.0)
    assert [digest for digest, _ in deleted] == ["", "same"] and all(len(jobs) == 1 for _, jobs in deleted)
    assert registry.takedowns.purgeable(100.0) == []
