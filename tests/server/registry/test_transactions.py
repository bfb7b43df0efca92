"""Who reads the registry and who changes it: neither holds the other up, whatever becomes of them."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from sqlalchemy import text
from sqlalchemy.engine import make_url

from server.bench.fleet.postgres import Postgres
from server.registry import database, jobs, records, takedowns
from server.registry.audit import append
from server.registry.lifecycle import Action
from server.registry.refusals import AWAY, DatabaseReads
from server.registry.registry import Registry
from tests.server.registry.test_modules import act, make
from tests.server.registry.test_registry import ADMIN, claim, submit
from tests.support.databases import PROGRAMS


def test_who_reads_holds_up_no_change(registry: Registry) -> None:
    record, job_id = make(registry), submit(registry, "next", 1.0)
    with registry.transactions.look() as session:
        found = jobs._find(session, job_id)
        takedowns._find(session, str(found.takedown_id))
        records.find(session, "m")
        assert claim(registry, now=2.0).job_id == job_id
        assert act(registry, record, Action.SUSPEND)["state"] == "suspended"


def test_a_look_sees_the_registry_as_it_was_at_one_moment(registry: Registry) -> None:
    with registry.transactions.look() as session:
        assert takedowns._same(session, "key", "digest") is None
        submit(registry, "m", 1.0, idempotency_key="key", request_digest="digest")
        # Else the second of two posts with one key would be refused, as its name is the first one's.
        takedowns._check_name(session, "m", "fingerprint", replacing=False)
    assert registry.takedowns.known("m", "fingerprint", False, "key", "digest", 2.0) is not None


def standing_still(postgresql_server: Postgres, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = database.connect(postgresql_server.new_database())
    database.upgrade(engine)
    monkeypatch.setattr(database, "LOCK_SECONDS", 0.6)
    with closing(Registry(engine)) as registry:

        def stand_still() -> None:
            with registry.transactions.change() as session:
                time.sleep(0.5)  # as a process that is stopped
                submit(registry)  # waits until the other is ended
                session.execute(text("SELECT 1"))

        with pytest.raises(AWAY):
            stand_still()
        with ThreadPoolExecutor(1) as pool, registry.transactions.change() as working:
            waiting = pool.submit(submit, registry, "next")
            for _ in range(4):
                working.execute(text("SELECT pg_sleep(0.3)"))
            with pytest.raises(AWAY, match="lock timeout"):
                waiting.result()
        assert [job["module"] for job in registry.jobs.newest(1.0)] == ["m"]


def leaving_nothing_prepared(postgresql_server: Postgres) -> None:
    engine = database.connect(postgresql_server.new_database())
    database.upgrade(engine)
    with closing(Registry(engine)) as registry, registry.transactions.change() as session:
        for number in range(10):
            append(session, 1.0, ADMIN, "test", str(number), {})
        # What one transaction leaves in its server connection, a pooler gives to the next client.
        assert session.execute(text("SELECT statement FROM pg_prepared_statements")).all() == []


def leaving_what_only_reads(postgresql_server: Postgres) -> None:
    url = postgresql_server.new_database()
    engine = database.connect(url)
    database.upgrade(engine)
    engine.dispose()

    def only_reads(word: str) -> None:
        with postgresql_server.connect() as administrator:
            administrator.execute(
                f"ALTER DATABASE {make_url(url).database} SET default_transaction_read_only = {word}".encode()
            )

    only_reads("on")  # of connections that are made from now on
    with closing(Registry(database.connect(url))) as registry:
        for work in (registry.transactions.require_primary, lambda: submit(registry)):
            with pytest.raises(DatabaseReads, match="target_session_attrs"):
                work()
        only_reads("off")
        registry.transactions.require_primary()
        submit(registry)


if PROGRAMS:
    test_connections_to_what_only_reads_are_not_gone_on_with = leaving_what_only_reads
    test_changes_and_looks_may_go_through_a_pooler = leaving_nothing_prepared
    test_a_change_that_stands_still_is_ended_and_the_next_goes_on = standing_still
