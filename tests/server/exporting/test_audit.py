"""The audit trail's rows outside: a line or a record each, whole after restarts, torn lines and a collector that was away."""

from __future__ import annotations

import errno
import json
import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from server.exporting.audit import Collector, Feed, to_file, to_stdout
from server.registry.audit import Actor, append, digest_of
from server.registry.database import connect, upgrade
from server.registry.registry import Registry
from tests.support.collector import attributes, collector
from tests.support.live import ADMIN_KEY, live, until
from unbind_core.errors import UnbindError

FIELDS = ("id", "at", "actor", "source", "action", "subject", "detail", "before", "after", "previous")


@pytest.fixture
def trail(tmp_path: Path) -> Registry:
    """A registry with a trail of three rows."""
    engine = connect(f"sqlite:///{tmp_path / 'unbind.sqlite'}")
    upgrade(engine)
    made = Registry(engine)
    grow(made, 3)
    return made


def grow(registry: Registry, rows: int, why: str = "é") -> None:
    for _ in range(rows):
        with registry.transactions.change() as session:
            append(session, time.time(), Actor("somebody", "test"), "thing.do", "thing_1", {"why": why})


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_each_row_is_a_line_whose_digest_can_be_checked(trail: Registry, tmp_path: Path) -> None:
    file = tmp_path / "audit.jsonl"
    feed = Feed(trail, tmp_path / "kept", "audit_log", to_file(file))
    feed.go_on()
    grow(trail, 2)
    feed.go_on()
    found = lines(file)
    assert [row["id"] for row in found] == [1, 2, 3, 4, 5] and {row["event"] for row in found} == {"unbind.audit"}
    assert all(row["digest"] == digest_of({name: row[name] for name in FIELDS}) for row in found)
    assert [row["previous"] for row in found[1:]] == [row["digest"] for row in found[:-1]]
    assert file.stat().st_mode & 0o777 == 0o600
    trail.close()


def test_a_restart_goes_on_where_it_stopped_and_mends_a_torn_line(trail: Registry, tmp_path: Path) -> None:
    file, kept = tmp_path / "audit.jsonl", tmp_path / "kept"
    Feed(trail, kept, "audit_log", to_file(file)).go_on()
    with file.open("a") as torn:
        torn.write('{"event": "unb')
    grow(trail, 1)
    Feed(trail, kept, "audit_log", to_file(file)).go_on()
    written = file.read_text().splitlines()
    assert len(written) == 5 and written[3] == '{"event": "unb' and json.loads(written[4])["id"] == 4
    file.rename(tmp_path / "rotated")
    grow(trail, 1)
    Feed(trail, kept, "audit_log", to_file(file)).go_on()
    assert [row["id"] for row in lines(file)] == [5]
    trail.close()


def test_of_rows_that_find_no_room_nothing_stays_and_each_comes_once_when_there_is(
    trail: Registry, tmp_path: Path
) -> None:
    file = tmp_path / "audit.jsonl"
    feed = Feed(trail, tmp_path / "kept", "audit_log", to_file(file))
    feed.go_on()
    before = file.read_bytes()
    grow(trail, 60, "x" * 4000)
    for room in (100_000, 150_000):
        with writing_at_most(room):
            for _ in range(2):
                with pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
                    feed.go_on()
                assert file.read_bytes() == before
    feed.go_on()
    assert [row["id"] for row in lines(file)] == list(range(1, 64))
    trail.close()


@contextmanager
def writing_at_most(size: int) -> Iterator[None]:
    """No file of this process grows beyond ``size`` bytes, as on a disk that has so much room."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("kept", ["3 " + "0" * 64, "90 " + "0" * 64, "nothing"])
def test_where_the_place_is_of_another_trail_all_is_sent_again(trail: Registry, tmp_path: Path, kept: str) -> None:
    (tmp_path / "kept").write_text(kept)
    Feed(trail, tmp_path / "kept", "audit_log", to_file(tmp_path / "a")).go_on()
    assert [row["id"] for row in lines(tmp_path / "a")] == [1, 2, 3]
    trail.close()


def test_rows_that_were_not_taken_are_sent_again(trail: Registry, tmp_path: Path) -> None:
    with collector() as received:
        made = Collector(received.url)
        feed = Feed(trail, tmp_path / "kept", "otel_endpoint", made.send)
        received.refuses = True
        with pytest.raises(OSError, match="otel_endpoint"):
            feed.go_on()
        received.refuses = False
        feed.go_on()
        made.close()
    told = [attributes(record) for record in received.records]
    assert [each["unbind.audit.id"] for each in told] == [1, 2, 3]
    assert told[0]["unbind.audit.action"] == "thing.do" and len(told[0]["unbind.audit.digest"]) == 64
    assert json.loads(received.records[2].body.string_value)["previous"] == told[1]["unbind.audit.digest"]
    trail.close()


def test_standard_output_takes_lines_too(trail: Registry, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Feed(trail, tmp_path / "kept", "audit_log", to_stdout).go_on()
    assert [json.loads(line)["id"] for line in capsys.readouterr().out.splitlines()] == [1, 2, 3]
    trail.close()


def test_a_server_writes_its_trail_and_sends_it(checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "audit.jsonl"
    with (
        collector() as received,
        live(checkpoint, tmp_path, audit_log=str(file), otel_endpoint=received.url, refresh_seconds=0.05) as server,
    ):
        made = server.admin("/keys", {"name": "reader", "scopes": ["inference"]}).body
        trail = server.admin("/audit?limit=1000").body["data"]
        until(lambda: file.exists() and len(lines(file)) == len(trail) == len(received.records))
        assert [row["digest"] for row in lines(file)] == [row["digest"] for row in trail]
        shown = file.read_text() + "".join(record.body.string_value for record in received.records)
        assert made["key"] not in shown and ADMIN_KEY not in shown


def test_a_folder_that_is_not_there_is_named(checkpoint: Path, tmp_path: Path) -> None:
    from server.exporting.audit import AuditFeeds
    from server.settings import Settings

    settings = Settings(model=checkpoint, data_dir=tmp_path, audit_log=str(tmp_path / "none" / "a"))
    with pytest.raises(UnbindError, match="audit_log: the folder"):
        AuditFeeds(settings, None)  # type: ignore[arg-type]
