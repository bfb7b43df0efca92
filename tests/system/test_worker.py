"""Workers and their child processes: stages, retries, cancelling, and what is left where a disk is full or a store away."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from server.registry.tables import ENDED
from tests.support.collector import attributes, collector
from tests.support.disks import Disk
from tests.support.folders import files_in, unfinished_in
from tests.system.workshop import ADMIN, LEASE, Workshop, workshop


def test_an_idle_worker_prepares_and_yields_to_a_job(tmp_path: Path) -> None:
    with workshop(tmp_path, prepare=True) as shop:
        shop.start(FAST_STAGE_SECONDS="120")
        shop.wait(lambda: len(shop.children()) == 2)  # one prepares, one waits for a job
        (job,) = shop.ended(shop.submit("m", seconds=0.05))
        assert job["outcome"] == "active"
    with workshop(tmp_path, prepare=True) as shop:
        shop.start()
        shop.wait(lambda: any("prepared for takedowns" in line for line in shop.log))
        shop.wait(lambda: len(shop.children()) == 1)


def test_two_workers_prepare_one_after_the_other(tmp_path: Path) -> None:
    with workshop(tmp_path, prepare=True) as shop:
        shop.start(FAST_STAGE_SECONDS="1"), shop.start(FAST_STAGE_SECONDS="1")
        most = 0
        while sum("prepared for takedowns" in line for line in shop.log) < 2:
            most = max(most, len(shop.children()))
            time.sleep(0.02)
        assert most == 3  # one for each worker that waits for a job, and one that prepares


def test_what_a_killed_preparer_left_is_gone_when_a_worker_starts(tmp_path: Path) -> None:
    cache = tmp_path / "data" / "cache"
    left = cache / ".states-a.safetensors.x1y2.partial"
    left.mkdir(parents=True)
    (left / "states-a.safetensors").write_bytes(b"half")
    (cache / "completions-a.json").write_text("[]")
    with workshop(tmp_path) as shop:
        shop.start()
        shop.wait(lambda: any("waits for takedowns" in line for line in shop.log))
        assert [path.name for path in cache.iterdir()] == ["completions-a.json"]


def test_a_job_goes_through_every_stage_and_publishes(shop: Workshop) -> None:
    job_id = shop.submit("m")
    shop.start()
    (job,) = shop.ended(job_id)
    assert (job["state"], job["outcome"], job["attempt"], job["progress"]) == ("succeeded", "active", 1, 1.0)
    assert set(job["timings"]) == {"check", "fit", "verify", "joint", "publish"}
    shop.check_what_is_left([job_id])
    assert not unfinished_in(shop.settings.data_dir / "jobs")
    unknown = shop.submit("unknown", unknown=True)
    assert shop.ended(unknown)[0]["outcome"] == "nothing_to_remove"
    manual = shop.submit("manual", activation="manual")
    assert shop.ended(manual)[0]["outcome"] == "calibrated"
    (short,) = shop.ended(shop.submit("short", fit="short"))
    assert short["outcome"] == "active" and short["message"] == short["result"]["remark"]
    assert "misses its aim" in short["message"]
    (nothing,) = shop.ended(shop.submit("nothing", fit="ineffective"))
    assert nothing["outcome"] == "ineffective" and nothing["module_id"] is None
    shop.wait(lambda: any(f"job {job_id} (m) succeeded: its module is made" in line for line in shop.log))
    shop.wait(lambda: any(f"job {nothing['id']} (nothing) succeeded: ineffective" in line for line in shop.log))


def test_a_job_and_its_stages_are_spans(tmp_path: Path) -> None:
    with collector() as received, workshop(tmp_path, otel_endpoint=received.url) as shop:
        job_id = shop.submit("m")
        shop.start(OTEL_BSP_SCHEDULE_DELAY="50")
        shop.ended(job_id)
        shop.wait(lambda: any(span.name == "job takedown" for span in received.spans))
        root = next(span for span in received.spans if span.name == "job takedown")
        assert attributes(root)["unbind.job.id"] == job_id and attributes(root)["unbind.job.state"] == "succeeded"
        stages = [span.name for span in received.spans if span.parent_span_id == root.span_id]
        assert stages == [f"stage {name}" for name in ("check", "fit", "verify", "joint", "publish")]


@pytest.mark.parametrize("stage", ["check", "fit", "verify", "joint", "publish"])
def test_a_worker_killed_at_a_stage_is_followed_by_one_that_goes_on_there(shop: Workshop, stage: str) -> None:
    job_id = shop.submit("m", seconds=0.4)
    worker = shop.start()
    shop.wait(lambda: shop.job(job_id)["stage"] == stage)
    before = shop.job(job_id)["timings"]
    worker.kill()
    worker.wait()
    shop.wait(lambda: not shop.children(), 2)  # its child ends with it
    shop.start()
    shop.wait(lambda: sum("waits for takedowns" in line for line in shop.log) == 2)
    ready = time.monotonic()
    shop.wait(lambda: shop.job(job_id)["attempt"] == 2)
    assert time.monotonic() - ready < LEASE + 4
    (job,) = shop.ended(job_id)
    assert job["outcome"] == "active" and before.items() <= job["timings"].items()
    shop.check_what_is_left([job_id])


@pytest.mark.parametrize("stage", ["check", "fit", "verify", "publish"])
def test_cancelling_takes_effect_within_five_seconds_at_any_stage(shop: Workshop, stage: str) -> None:
    job_id = shop.submit("m", seconds=0.3)
    shop.start()
    shop.wait(lambda: shop.job(job_id)["stage"] == stage)
    os.kill(shop.children()[0], signal.SIGSTOP)  # as if deep in a computation that never looks up
    asked = time.monotonic()
    shop.registry.jobs.request_cancel(job_id, ADMIN, time.time())
    (job,) = shop.ended(job_id)
    assert time.monotonic() - asked < 5
    assert job["state"] == "cancelled"
    done = shop.job(job_id)["timings"]
    shop.registry.jobs.retry(job_id, ADMIN, time.time())
    (job,) = shop.ended(job_id)
    assert job["outcome"] == "active" and done.items() <= job["timings"].items()
    shop.check_what_is_left([job_id])


def test_a_checkpoint_that_is_gone_is_made_again_with_all_that_rests_on_it(shop: Workshop) -> None:
    job_id = shop.submit("m", fails="joint")
    shop.start()
    (job,) = shop.ended(job_id)
    assert set(job["timings"]) == {"check", "fit", "verify"}
    for stage in ("fit", "verify"):
        done = shop.registry.jobs.stages(job_id)
        assert done[stage]["folder"] == "attempt-1"
    shutil.rmtree(shop.settings.data_dir / "jobs" / job_id / "attempt-1")
    shop.registry.jobs.retry(job_id, ADMIN, time.time())
    shop.ended(job_id)
    assert {done["folder"] for done in shop.registry.jobs.stages(job_id).values()} == {"attempt-2"}


@pytest.mark.parametrize("what", ["a file is missing", "an older version left it"])
def test_a_checkpoint_that_lacks_what_is_read_of_it_is_made_again(shop: Workshop, what: str) -> None:
    job_id = shop.submit("m", fails="joint")
    shop.start()
    shop.ended(job_id)
    if what == "a file is missing":  # as in a folder that was restored in part
        (shop.settings.data_dir / "jobs" / job_id / "attempt-1" / "module.safetensors").unlink()
    else:
        with closing(sqlite3.connect(shop.settings.data_dir / "unbind.sqlite")) as old, old:
            old.execute("UPDATE jobs SET stages = json_remove(stages, '$.fit.files')")
    shop.registry.jobs.retry(job_id, ADMIN, time.time())
    shop.ended(job_id)
    folders = {stage: done["folder"] for stage, done in shop.registry.jobs.stages(job_id).items()}
    assert folders == {"check": "attempt-1", "fit": "attempt-2", "verify": "attempt-2"}


def test_a_stage_that_fails_says_why_and_can_be_retried(shop: Workshop) -> None:
    failed, broken = shop.submit("a", fails="verify"), shop.submit("b", breaks="fit")
    shop.start()
    one, two = shop.ended(failed, broken)
    shop.wait(lambda: any(f"job {failed} (a) failed: " in line and "no space left" in line for line in shop.log))
    assert one["state"] == "failed" and "no space left" in one["error"] and set(one["timings"]) == {"check", "fit"}
    assert two["state"] == "failed" and two["error"].startswith("KeyError in fast_stages.py, line")
    assert not any("protected code" in line for line in [*shop.log, two["error"]])


def test_a_child_that_keeps_dying_fails_its_job(tmp_path: Path) -> None:
    with workshop(tmp_path, max_attempts=2) as shop:
        job_id = shop.submit("m", dies="fit")
        shop.start()
        (job,) = shop.ended(job_id)
        assert job["state"] == "failed" and "stage 'fit' ended with status 9, 2 times" in job["error"]


def test_a_worker_asked_to_leave_gives_its_job_back(shop: Workshop) -> None:
    job_id = shop.submit("m", seconds=0.5)
    worker = shop.start()
    shop.wait(lambda: shop.job(job_id)["stage"] == "fit")
    worker.terminate()
    assert worker.wait(5) == 0 and not shop.children()
    job = shop.job(job_id)
    assert (job["state"], job["attempt"]) == ("queued", 0) and set(job["timings"]) == {"check"}


def test_what_keeps_a_worker_from_its_lock_is_told_of_once_and_waited_out(shop: Workshop) -> None:
    shop.start()
    locks = shop.settings.data_dir / "locks"
    shop.wait(locks.is_dir)
    away = locks.rename(locks.with_name("away"))
    locks.write_text("")  # nothing can be opened there
    shop.wait(lambda: any("FileExistsError" in line or "NotADirectory" in line for line in shop.log))
    time.sleep(2.5)  # in which it tries some times more
    locks.unlink()
    away.rename(locks)
    (job,) = shop.ended(shop.submit("m"))
    assert job["state"] == "succeeded"
    told = [line for line in shop.log if line.startswith(("FileExistsError", "NotADirectoryError"))]
    assert told and len(told) == len(set(told))


def test_a_data_folder_that_is_lost_is_not_made_anew_by_a_worker(shop: Workshop) -> None:
    shop.start()
    data = shop.settings.data_dir
    shop.wait((data / "locks").is_dir)
    away = data.rename(data.with_name("away"))
    shop.wait(lambda: any("met an error" in line or "does not answer" in line for line in shop.log))
    time.sleep(1.5)  # in which it tries some times more
    assert not data.exists()
    away.rename(data)  # which would have put it into the other
    (job,) = shop.ended(shop.submit("m"))
    assert job["state"] == "succeeded"


def test_a_job_at_work_while_the_data_folder_is_lost_goes_on_once_it_is_back(shop: Workshop) -> None:
    job_id = shop.submit("m", seconds=2.0)
    shop.start()
    data = shop.settings.data_dir
    shop.wait(lambda: shop.job(job_id)["stage"] == "fit")
    away = data.rename(data.with_name("away"))
    shop.wait(lambda: any("until the data folder is back" in line for line in shop.log))
    time.sleep(2.5)  # for longer than its stage would take
    assert not data.exists()
    away.rename(data)
    (job,) = shop.ended(job_id)
    assert (job["outcome"], job["attempt"]) == ("active", 2)
    assert shop.registry.jobs.stages(job_id)["check"]["folder"] == "attempt-1"


def test_two_workers_share_a_device_one_job_at_a_time(shop: Workshop) -> None:
    jobs = [shop.submit(f"m{number}", seconds=0.15) for number in range(4)]
    shop.start(), shop.start()
    most = 0
    while not all(shop.job(job)["state"] in ENDED for job in jobs):
        most = max(most, sum(job["state"] == "running" for job in shop.registry.jobs.newest(time.time())))
        time.sleep(0.02)
    assert most == 1
    shop.check_what_is_left(jobs)


@pytest.mark.parametrize("stage", ["fit", "verify", "publish"])
def test_a_full_disk_fails_the_job_with_the_reason_and_the_next_one_succeeds(
    tmp_path: Path, disk: Disk, stage: str
) -> None:
    with workshop(disk.folder, database_url=f"sqlite:///{tmp_path / 'registry.db'}") as shop:
        job_id = shop.submit("m", seconds=0.5)
        shop.start()
        shop.wait(lambda: shop.job(job_id)["stage"] == stage)
        disk.fill(shop.children())
        (job,) = shop.ended(job_id)
        assert job["state"] == "failed" and disk.full in job["error"], job
        modules = [path for path in files_in(disk.folder) if path.suffix == ".safetensors"]
        assert not [path for path in modules if path.stat().st_size != 4096]
        disk.free(shop.children())
        shop.registry.jobs.retry(job_id, ADMIN, time.time())
        other = shop.submit("n")
        assert [job["outcome"] for job in shop.ended(job_id, other)] == ["active", "active"]
        shop.check_what_is_left([job_id, other])


def test_a_full_disk_under_the_registry_delays_and_loses_nothing(disk: Disk) -> None:
    def writers() -> list[int]:
        return [*(worker.pid for worker in shop.workers), *shop.children()]

    with workshop(disk.folder) as shop:
        job_id = shop.submit("m", seconds=0.5)
        shop.start()
        shop.wait(lambda: shop.job(job_id)["stage"] == "check")
        disk.fill(writers())
        shop.wait(lambda: any("the registry does not answer" in line for line in shop.log))
        disk.free(writers())
        (job,) = shop.ended(job_id)
        if job["state"] == "failed":
            assert disk.full in job["error"], job
            shop.registry.jobs.retry(job_id, ADMIN, time.time())
            (job,) = shop.ended(job_id)
        assert job["outcome"] == "active"
        shop.check_what_is_left([job_id])


def test_a_store_that_is_away_delays_publishing(tmp_path: Path) -> None:
    with workshop(tmp_path) as shop:
        store = Path(shop.settings.published_store)
        store.parent.mkdir(exist_ok=True, parents=True)
        store.write_text("a file where the folder should be")
        job_id = shop.submit("m")
        shop.start()
        shop.wait(lambda: shop.job(job_id)["message"] == "waiting for the module store")
        store.unlink()
        assert shop.ended(job_id)[0]["outcome"] == "active"
        shop.check_what_is_left([job_id])
