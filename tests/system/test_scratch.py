"""Workers on machines of their own, by data folders of their own: one takes over where the other was killed, by the store alone."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import pytest

from server.registry.objects import MARK
from server.registry.private.files import TakedownFiles
from server.registry.retention import purge
from tests.support.folders import files_in
from tests.system.workshop import ADMIN, workshop
from unbind_core.rows import ForgetRow

KEY = "5a" * 32
ROW = ForgetRow("def secret(", "of):\n    return protected_text\n")


def holding(folder: Path, text: bytes) -> list[Path]:
    found = []
    for path in files_in(folder):
        with suppress(FileNotFoundError):  # it is deleted while we look
            found += [path] if text in path.read_bytes() else []
    return found


@pytest.mark.slow
def test_a_worker_elsewhere_goes_on_where_a_killed_one_stopped(tmp_path: Path) -> None:
    shared = {
        "database_url": f"sqlite:///{tmp_path / 'registry.sqlite'}",
        "module_store": str(tmp_path / "store"),
        "private_store": str(tmp_path / "private"),
        "private_key": KEY,
    }
    with workshop(tmp_path / "here", **shared) as shop:
        files = TakedownFiles(shop.settings)
        digest = files.save_forget([ROW])
        job_id = shop.submit("m", forget_digest=digest, seconds=0.5, reads=True)
        killed = shop.start()
        shop.wait(lambda: shop.job(job_id)["stage"] == "verify")
        before = shop.job(job_id)["timings"]
        assert holding(tmp_path / "here", b"protected_text")  # while it works
        killed.kill()
        killed.wait()
        shop.wait(lambda: not shop.children(), 2)
        shop.start(UNBIND_DATA_DIR=str(tmp_path / "there"))
        (job,) = shop.ended(job_id, seconds=60)
        assert (job["outcome"], job["attempt"]) == ("active", 2) and before.items() <= job["timings"].items()
        stages = shop.registry.jobs.stages(job_id)
        assert {stages[name]["folder"] for name in ("check", "fit")} == {"attempt-1"}
        shop.wait(lambda: not holding(tmp_path / "there", b"protected_text"))
        assert not holding(tmp_path / "private", b"protected_text")
        assert files.read_json(job_id, "attempt-1", "scores.json") == [ROW.continuation]
        shop.start()  # on the machine of the killed one
        deadline = time.monotonic() + 30
        while holding(tmp_path / "here", b"protected_text"):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        record = shop.registry.jobs.get(job_id, time.time())
        purge(shop.registry, shop.settings, str(record["takedown_id"]), ADMIN)
        assert [path.name for path in files_in(tmp_path / "private")] == [MARK]
