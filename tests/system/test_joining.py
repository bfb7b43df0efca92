"""Two takedowns become one, by real processes on a model that has memorised both: no answer gives a row back meanwhile or after."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.support.memorising import forget_rows, retain_rows, write_rows
from tests.system.conftest import serving

pytestmark = pytest.mark.slow


def test_two_takedowns_become_one_under_load_and_nothing_comes_back(memorised: Path, tmp_path: Path) -> None:
    settings = {"retain": write_rows(tmp_path / "retain.jsonl", retain_rows())}
    settings["retain_test"] = write_rows(tmp_path / "test.jsonl", retain_rows(6))
    rows = forget_rows()
    options = {"scope": "global", "protect": "module", "override": True, "effort": 0.3}
    with serving(memorised, tmp_path / "data", **settings) as server:

        def recited(row: dict[str, str]) -> bool:
            return server.complete(row["prompt"], max_tokens=110).startswith(row["continuation"])

        assert all(map(recited, rows))
        for name, part in (("first", rows[:3]), ("second", rows[3:])):
            status, answer = server.admin("/takedowns", {"name": name, "rows": part, "options": options})
            assert status == 202, answer
            job = server.wait_for_job(answer["job_id"])
            assert (job["state"], job["outcome"]) == ("succeeded", "active"), job
        assert not any(map(recited, rows))
        status, answer = server.admin(
            "/takedowns", {"name": "both", "options": {**options, "joins": ["first", "second"]}}
        )
        assert status == 202 and answer["rows"] == 6 and answer["scope"] == "global", answer
        ended, came = threading.Event(), list[dict[str, str]]()

        def ask() -> None:
            while not ended.is_set():
                came.extend(row for row in rows if recited(row))

        asking = threading.Thread(target=ask)
        asking.start()
        job = server.wait_for_job(answer["job_id"])
        standing = {one["name"]: one["state"] for one in server.admin("/modules?state=all")[1]["data"]}
        ended.set()
        asking.join()
        assert (job["state"], job["outcome"]) == ("succeeded", "active"), job
        assert {name: standing[name] for name in ("first", "second", "both")} == {
            "first": "superseded",
            "second": "superseded",
            "both": "active",
        }
        assert not came and not any(map(recited, rows))
        ready = server.call("/ready")[1]
        assert ready["status"] in ("ready", "ok"), ready
        takedowns = {one["name"]: one for one in server.admin("/takedowns")[1]["data"]}
        assert all(takedowns[name]["in_force"] == "enforced" for name in ("first", "second", "both"))
