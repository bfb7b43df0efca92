"""What a takedown will take is told before it starts, kept with its job, and warned of where it does not fit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.live import ADMIN_KEY, Live, live
from unbind_core.planning import room
from unbind_core.planning.machine import Machine

ROWS = [{"prompt": f"def secret_{i}(key):\n", "continuation": f"    return key + {i * 7919}\n" * 3} for i in range(4)]


@pytest.fixture(scope="module")
def running(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server without a worker."""
    with live(checkpoint, tmp_path_factory.mktemp("planned")) as server:
        yield server


def submitted(server: Live, name: str, **options: object) -> dict[str, object]:
    answer = server.admin("/takedowns", {"name": name, "rows": ROWS, "options": {"protect": "module", **options}})
    assert answer.status in (200, 202), answer.raw
    return answer.body


def test_a_dry_run_tells_memory_disk_and_time_stage_by_stage(running: Live) -> None:
    plan = submitted(running, "dry", dry_run=True)["plan"]
    assert plan["fits"] and plan["problem"] is None and plan["device"] == "cpu"
    assert 0 < plan["weights_bytes"] < plan["memory_bytes"] < plan["free_memory_bytes"]
    assert 0 < plan["disk_bytes"] < plan["free_disk_bytes"]
    names = [stage["name"] for stage in plan["stages"]]
    assert names[0] == "check" and {"retain states", "correction", "detector", "gates", "verify"} <= {*names}
    assert max(stage["memory"] for stage in plan["stages"]) == plan["memory_bytes"]
    paper = submitted(running, "dry", dry_run=True, gate="auto", seed=3)["plan"]
    assert paper["memory_bytes"] == pytest.approx(plan["memory_bytes"], rel=0.2)


def test_a_quick_look_is_planned_as_one(running: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Machine, "measured", lambda *_: Machine(1e8, 1e8))  # so slow that nothing is rounded to 0
    whole, quick = (submitted(running, "quick", dry_run=True, effort=effort)["plan"] for effort in (1, 0.1))
    seconds = [{stage["name"]: stage["seconds"] for stage in plan["stages"]}["correction"] for plan in (whole, quick)]
    assert 0 < seconds[1] < 0.2 * seconds[0]
    for options in ({"effort": 0}, {"effort": 1.5}, {"effort": "all"}, {"effort": 0.5, "gate": "paper"}):
        body = {"name": "quick", "rows": ROWS, "options": options}
        answer = running.admin("/takedowns", body)
        assert (answer.status, answer.body["error"]["param"]) == (400, "options.effort")


def test_a_guard_alone_has_no_plan(running: Live) -> None:
    options = {"protect": "guard", "guard": {"run": 8}, "dry_run": True}
    assert running.admin("/takedowns", {"name": "g", "rows": ROWS, "options": options}).body["plan"] is None


def test_a_job_keeps_the_plan_that_it_was_queued_with(running: Live) -> None:
    answer = submitted(running, "kept")
    job = running.admin(f"/jobs/{answer['job_id']}").body
    assert job["plan"] == answer["plan"] and job["plan"]["memory_bytes"] > 0


def test_what_does_not_fit_now_is_warned_of(running: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "free_bytes", lambda _: 2**20)
    answer = submitted(running, "large", dry_run=True)
    assert not answer["plan"]["fits"]
    (warning,) = [said for said in answer["warnings"] if said.startswith("plan:")]
    assert "1 MiB are free" in warning and "worker_device" in warning
    assert running.call("/v1/models", key=ADMIN_KEY).status == 200


def test_retain_rows_that_no_fit_can_use_are_warned_of(checkpoint: Path, tmp_path: Path) -> None:
    few = tmp_path / "few.jsonl"
    few.write_text('{"text": "x = 1"}\n')
    for file, said in ((tmp_path / "none.jsonl", "No such file"), (few, "at least 10 are needed")):
        with live(checkpoint, tmp_path / file.stem, retain=file) as server:
            for dry_run in (True, False):
                answer = submitted(server, "doomed", dry_run=dry_run)
                (warning,) = [line for line in answer["warnings"] if line.startswith("plan:")]
                assert answer["plan"] is None and said in warning and "will refuse the fit" in warning
