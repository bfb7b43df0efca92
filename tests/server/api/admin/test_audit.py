"""A server that notices tampering with its audit trail says so: in its metrics, when asked whether it is ready, in its log."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.live import Live, live


def tamper(data: Path, statement: str) -> None:
    """Write into the database as somebody would who has its file."""
    with closing(sqlite3.connect(data / "unbind.sqlite", timeout=10)) as connection:
        for guard in ("audit_no_update", "audit_no_delete"):
            connection.execute(f"DROP TRIGGER IF EXISTS {guard}")
        connection.execute(statement)
        connection.commit()


def problems(running: Live) -> float:
    """The gauge."""
    lines = running.call("/metrics").raw.decode().splitlines()
    return float(next(line for line in lines if line.startswith("unbind_audit_problems ")).split()[1])


def until(running: Live, count: float) -> None:
    """Wait until the gauge says so many."""
    deadline = time.monotonic() + 20
    while problems(running) != count:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_tampering_is_told_of_while_the_server_runs_and_when_it_starts(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with live(checkpoint, tmp_path, audit_check_seconds=0.1) as running:
        assert problems(running) == 0 and "audit" not in running.call("/ready").body
        tamper(tmp_path / "data", "UPDATE audit SET actor = 'nobody' WHERE id = 2")
        until(running, 1)
        ready = running.call("/ready")
        assert ready.status == 200 and ready.body["audit"] == ["row 2: its content was changed (the digest differs)"]
        time.sleep(0.5)  # several checks, one line
        assert sum("not whole" in record.message for record in caplog.records) == 1
    with live(checkpoint, tmp_path) as again:
        until(again, 1)


def test_deleted_entries_are_told_of_at_the_next_change_and_until_they_are_accepted(
    checkpoint: Path, tmp_path: Path
) -> None:
    with live(checkpoint, tmp_path, audit_check_seconds=0) as running:
        for number in range(3):
            running.admin("/keys", {"name": f"k{number}"})
        tamper(tmp_path / "data", "DELETE FROM audit WHERE id > (SELECT max(id) - 3 FROM audit)")
        for number in range(6):
            assert running.admin("/keys", {"name": f"later{number}"}).status == 201
        assert running.service.registry.trail.problems
        verified = running.admin("/audit/verify").body
        assert not verified["whole"] and "written anew" in verified["problems"][0]


def test_the_trail_is_read_from_either_end_and_by_what_was_done(checkpoint: Path, tmp_path: Path) -> None:
    with live(checkpoint, tmp_path) as running:
        keys = [running.admin("/keys", {"name": f"k{number}"}).body["id"] for number in range(3)]
        running.admin(f"/keys/{keys[1]}", method="DELETE")
        running.admin("/policies/global", {"shadow": ["one"]}, method="PUT")
        every = running.admin("/audit").body["data"]
        assert [row["id"] for row in every] == list(range(1, len(every) + 1))
        pages, after = [], 0
        while True:
            page = running.admin(f"/audit?order=newest&limit=2&after={after}").body
            pages += page["data"]
            after = pages[-1]["id"]
            if not page["has_more"]:
                break
        assert pages == every[::-1]
        told = {
            "action=key": {"key.create", "key.revoke"},
            "action=key.revoke": {"key.revoke"},
            "action=ke": set(),
            "actor=admin&action=rules": {"rules.put"},
            "actor=nobody": set(),
            f"subject={keys[1]}": {"key.create", "key.revoke"},
        }
        for asked, actions in told.items():
            assert {row["action"] for row in running.admin(f"/audit?{asked}").body["data"]} == actions


@pytest.mark.parametrize(
    ("path", "method", "told"),
    [
        ("/jobs/a%00b", "GET", "the path"),
        ("/modules/a%00b", "GET", "the path"),
        ("/modules/a%00b/suspend", "POST", "the path"),
        ("/keys/a%00b", "DELETE", "the path"),
        ("/audit?actor=%00", "GET", "actor: holds a NUL"),
        ("/modules?state=all&name=a%00", "GET", "name: holds a NUL"),
    ],
)
def test_what_no_database_can_look_for_is_refused_before_it_is_asked(
    server: Live, path: str, method: str, told: str
) -> None:
    refused = server.admin(path, method=method)
    assert refused.status == 400 and refused.error["message"].startswith(told), refused.raw
