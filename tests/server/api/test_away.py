"""A server that cannot see the registry or the store: it enforces what it has, says so, and sees again what changed meanwhile."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy.engine import make_url

from server.bench.fleet.postgres import Postgres, postgres
from server.outage import Outage
from server.registry.database import connect, upgrade
from server.registry.objects import ObjectStore, StoreUnreachable
from server.service import Service
from tests.server.api.admin.test_guards import ALONE, post
from tests.server.api.admin.test_modules import act, adopt, applied
from tests.support.databases import PROGRAMS
from tests.support.live import ADMIN_KEY, Live, live, until

REFRESH = 0.05


def gauges(server: Live) -> dict[str, float]:
    lines = server.call("/metrics", key=ADMIN_KEY).raw.decode().splitlines()
    return {line.split()[0]: float(line.split()[1]) for line in lines if line and line[0] != "#" and "{" not in line}


def reasons(server: Live) -> list[str]:
    ready = server.call("/ready")
    assert ready.status == 200 and ready.body["status"] == ("degraded" if "reasons" in ready.body else "ready")
    return list(ready.body.get("reasons", ()))


def test_what_nobody_has_seen_for_too_long_is_away_though_no_look_failed() -> None:
    seen = Outage("the store", logging.getLogger("unbind.service"), patience=0.05)
    assert seen.told is None
    time.sleep(0.06)
    assert "has not answered for 0 s (it says nothing)" in (seen.told or "")
    seen.ends()
    assert seen.told is None and seen.age < 0.05
    seen.begins(OSError("no route"))
    assert "OSError: no route" in (seen.told or "")
    seen.awaited()
    assert "OSError: no route" in (seen.told or "")  # that it is awaited does not make it work


def test_a_start_that_takes_long_is_no_outage(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of an engine with processes of its own, or of ten thousand modules: what was before it counts for nothing."""
    opened, started = Service._open, Service.start
    seen, since = [], []

    async def slowly(service: Service) -> None:
        await opened(service)
        await asyncio.sleep(0.1)
        since.append(time.monotonic())

    async def then(service: Service) -> None:
        await started(service)
        seen.extend(outage.age for outage in (service._database, service._stored, service._writing))
        since.append(time.monotonic())

    monkeypatch.setattr(Service, "_open", slowly)
    monkeypatch.setattr(Service, "start", then)
    with live(checkpoint, tmp_path):
        assert max(seen) <= since[1] - since[0]


def registry_in(database: Postgres) -> str:
    url = database.new_database()
    engine = connect(url)
    upgrade(engine)
    engine.dispose()
    return url


def without_registry(checkpoint: Path, tmp_path: Path) -> None:
    with postgres() as database:
        url = registry_in(database)
        with live(checkpoint, tmp_path, refresh_seconds=REFRESH, database_url=url) as server:
            adopt(server, "held", "global")
            assert reasons(server) == [] and gauges(server)["unbind_registry_reachable"] == 1
            database.kill()
            until(lambda: reasons(server) != [])
            (reason,) = reasons(server)
            assert reason.startswith("the registry's database: has not answered for") and "Error" in reason
            assert applied(server.complete()) == ["held"]  # enforced as before
            assert server.admin("/modules").error["code"] == "registry_unreachable"
            posted = server.admin("/takedowns", {"name": "new", "rows": [{"text": "def a():\n    return 1\n"}]})
            assert (posted.status, posted.error["code"]) == (503, "registry_unreachable")
            counted = server.call("/metrics", key=ADMIN_KEY).raw.decode()
            assert 'route="/admin/v1/takedowns",status="503"} 1.0' in counted and 'status="500"' not in counted
            first = gauges(server)
            assert first["unbind_registry_reachable"] == 0 and first["unbind_store_reachable"] == 1
            until(lambda: gauges(server)["unbind_registry_seen_seconds"] > first["unbind_registry_seen_seconds"])
            database.start()
            until(lambda: reasons(server) == [])
            assert gauges(server)["unbind_registry_reachable"] == 1
            act(server, "held", "suspend")
            assert applied(server.complete()) == []


def without_anything_to_read(checkpoint: Path, tmp_path: Path) -> None:
    with postgres() as database:
        url = registry_in(database)
        with live(checkpoint, tmp_path, refresh_seconds=REFRESH, database_url=url) as server:
            adopt(server, "held", "global")
            adopt(server, "other", "")
            database.kill()
            until(lambda: reasons(server) != [])
            answer = server.call(
                "/admin/v1/modules/held/suspend", {}, key=ADMIN_KEY, headers={"If-Match": "*"}, method="POST"
            )
            assert answer.status == 202 and "this server process only" in answer.body["withheld"]
            assert applied(server.complete()) == [] and applied(server.complete(unbind={"modules": ["other"]})) == [
                "other"
            ]
            unknown = server.call(
                "/admin/v1/modules/none/suspend", {}, key=ADMIN_KEY, headers={"If-Match": "*"}, method="POST"
            )
            assert (unknown.status, unknown.error["code"]) == (503, "registry_unreachable")
            database.start()
            until(lambda: reasons(server) == [])
            until(lambda: server.admin("/modules/held").body["state"] == "suspended")


def only_reads(database: Postgres, url: str, word: str) -> None:
    with database.connect() as administrator:
        says = f"ALTER DATABASE {make_url(url).database} SET default_transaction_read_only = {word}"
        administrator.execute(says.encode())
        # a pool that is put away while threads use it would leave their connections open
        ended = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s"
        administrator.execute(ended, [make_url(url).database])


def without_what_came_last(checkpoint: Path, tmp_path: Path) -> None:
    with postgres() as database:
        url = registry_in(database)
        with live(checkpoint, tmp_path, refresh_seconds=REFRESH, database_url=url) as server:
            adopt(server, "held", "global")
            act(server, "held", "suspend")
            only_reads(database, url, "on")
            until(lambda: reasons(server) != [])
            with psycopg.connect(url.replace("+psycopg", "")) as administrator:  # as a standby is that lagged
                administrator.execute("SET TRANSACTION READ WRITE")
                administrator.execute("SET LOCAL session_replication_role = replica")
                administrator.execute("DELETE FROM audit WHERE id = (SELECT max(id) FROM audit)")
            only_reads(database, url, "off")
            until(lambda: "missing at the end" in str(server.call("/ready").body.get("audit")))
            assert gauges(server)["unbind_audit_problems"] == 1


def without_writing(checkpoint: Path, tmp_path: Path) -> None:
    with postgres() as database:
        url = registry_in(database)
        with live(checkpoint, tmp_path, refresh_seconds=REFRESH, database_url=url) as server:
            adopt(server, "held", "global")

            only_reads(database, url, "on")  # as a primary that became a standby
            with pytest.raises(AssertionError, match=r"only takes reads.*registry_unreachable"):
                act(server, "held", "retire")
            with pytest.raises(AssertionError, match="assert 202 == 200"):
                act(server, "held", "suspend")
            assert "this server process only" in server.admin("/modules/held").body["withheld"]
            until(lambda: applied(server.complete()) == [])
            assert server.admin("/modules/held").body["state"] == "active"
            until(lambda: any("only takes reads" in reason for reason in reasons(server)))
            assert gauges(server)["unbind_registry_reachable"] == 0
            only_reads(database, url, "off")
            until(lambda: server.admin("/modules/held").body["state"] == "suspended")
            until(lambda: reasons(server) == [])


def without_a_word(checkpoint: Path, tmp_path: Path) -> None:
    with postgres() as database:
        url = registry_in(database)
        with (
            live(checkpoint, tmp_path, refresh_seconds=REFRESH, database_url=url) as server,
            ThreadPoolExecutor(40) as many,
        ):
            adopt(server, "held", "global")
            database.freeze()
            try:
                waiting = [many.submit(server.admin, "/jobs") for _ in range(40)]
                until(lambda: reasons(server) != [])
                for _ in range(10):
                    assert applied(server.complete()) == ["held"]
                    for path in ("/metrics", "/openapi.json", "/ready", "/health"):
                        assert server.call(path, key=ADMIN_KEY).status == 200
                assert not all(one.done() for one in waiting)
            finally:
                database.thaw()
            assert {one.result().status for one in waiting} <= {200, 503}
            until(lambda: reasons(server) == [])


if PROGRAMS:
    test_when_the_registry_is_back_without_its_last_changes_it_is_told_at_once = without_what_came_last
    test_where_the_registry_says_nothing_all_else_is_answered_at_once = without_a_word
    test_without_the_registry_a_server_enforces_what_it_has_and_says_so = without_registry
    test_where_the_registry_is_away_a_module_is_suspended_all_the_same = without_anything_to_read
    test_where_the_registry_takes_no_changes_a_module_is_suspended_all_the_same = without_writing


def test_damage_to_the_registry_is_told_until_the_end_and_a_module_can_be_suspended(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.registry.audit.WHOLE_SECONDS", 0.1)  # records are read again so often
    with live(checkpoint, tmp_path, refresh_seconds=REFRESH) as server:
        adopt(server, "held", "global")
        file = tmp_path / "data" / "unbind.sqlite"
        with closing(sqlite3.connect(file)) as other:
            # all of it into the file: not done while somebody reads, and what is in the log would be read from there
            until(lambda: other.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0)
            size = other.execute("PRAGMA page_size").fetchone()[0]
            pages = [row[0] for row in other.execute("SELECT rootpage FROM sqlite_master WHERE tbl_name = 'modules'")]
        with file.open("r+b") as damaged:
            for page in pages:
                damaged.seek((page - 1) * size)
                damaged.write(b"\xa5" * size)
        with closing(sqlite3.connect(file)) as other:
            other.execute("CREATE TABLE another (x)")  # else a connection may go on with the pages that it has read
        until(lambda: reasons(server) != [])
        assert "unbind.sqlite is damaged" in reasons(server)[0] and applied(server.complete()) == ["held"]
        time.sleep(5 * REFRESH)  # keys and rules are still read
        assert reasons(server) != []
        answer = server.call(
            "/admin/v1/modules/held/suspend", {}, key=ADMIN_KEY, headers={"If-Match": "*"}, method="POST"
        )
        assert answer.status == 202 and applied(server.complete()) == []
        assert server.admin("/modules").error["code"] == "data_lost"


def test_without_the_store_a_server_enforces_what_it_has_and_says_so(checkpoint: Path, tmp_path: Path) -> None:
    with live(checkpoint, tmp_path, refresh_seconds=REFRESH) as server:
        adopt(server, "held", "global")
        store = tmp_path / "data" / "modules"
        until(lambda: (store / "unbind-store").exists())
        away = store.rename(tmp_path / "away")
        store.mkdir()  # as a mount point without its file system
        until(lambda: reasons(server) != [])
        assert "is it mounted" in reasons(server)[0] and gauges(server)["unbind_store_reachable"] == 0
        assert applied(server.complete()) == ["held"]
        refused = post(server, "lost", **ALONE)
        assert (refused.status, refused.error["code"]) == (503, "store_unreachable") and list(store.iterdir()) == []
        store.rmdir()
        away.rename(store)
        until(lambda: reasons(server) == [])
        assert gauges(server)["unbind_store_reachable"] == 1


def test_nothing_is_put_where_a_store_that_was_seen_should_be_mounted(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    server, worker = ObjectStore(str(folder)), ObjectStore(str(folder))
    key = worker.put(b"first")  # there is none yet: it is made
    server.look()
    worker.put(b"second")  # and sees the mark that the server made
    away = folder.rename(tmp_path / "away")
    folder.mkdir()
    for store in (server, worker):
        with pytest.raises(StoreUnreachable, match="is it mounted"):
            store.put(b"third")
    assert list(folder.iterdir()) == []
    folder.rmdir()
    away.rename(folder)
    started = ObjectStore(str(folder))
    assert worker.put(b"first") == started.put(b"first") == key
    folder.rename(away)
    with pytest.raises(StoreUnreachable, match="is it mounted"):
        started.put(b"third")
    assert not folder.exists()


def test_a_store_that_cannot_be_looked_at_is_not_said_to_be_unmounted(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    store = ObjectStore(str(folder))
    store.put(b"first")
    store.look()
    folder.rename(tmp_path / "away")
    folder.touch()
    for call in (store.look, lambda: store.put(b"second")):
        with pytest.raises(NotADirectoryError):
            call()


def test_a_store_that_may_only_be_read_and_has_no_mark_yet_is_no_outage() -> None:
    store = ObjectStore("/sys")  # where nobody, not even root, makes a file
    store.look()
    store.look()


def test_a_store_that_holds_nothing_yet_is_no_reason(checkpoint: Path, tmp_path: Path) -> None:
    with live(checkpoint, tmp_path, refresh_seconds=0.001) as server:
        looks: list[Any] = []
        until(lambda: looks.append(None) or len(looks) > 20)
        assert reasons(server) == [] and not (tmp_path / "data" / "modules").exists()


def test_without_a_key_nobody_learns_what_is_away(checkpoint: Path, tmp_path: Path) -> None:
    with live(checkpoint, tmp_path) as server:
        server.admin("/keys", {"name": "k"})
        server.service._stored.begins(OSError("no route to store.example"))
        for key in (None, "ubk_wrong"):
            assert server.call("/ready", key=key).body == {"status": "degraded"}
        assert "store.example" in server.call("/ready", key=ADMIN_KEY).body["reasons"][0]
