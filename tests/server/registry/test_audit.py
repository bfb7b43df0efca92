"""The audit trail finds any tampering, and the database refuses the plain kind."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session
from typer.testing import CliRunner

from server.cli import build
from server.registry.audit import FIELDS, Actor, append, digest_of
from server.registry.refusals import NotAllowed
from server.registry.registry import Registry, open_registry
from server.registry.trail import Abandoned, Trail, read_head, unguarded
from server.settings import Settings

ADMIN = Actor("operator", "test")


@pytest.fixture
def trail(registry: Registry) -> Registry:
    """A registry with six entries."""
    for number in range(6):
        with registry.transactions.change() as session:
            append(
                session,
                float(number),
                Actor("admin", "::1"),
                "test",
                f"thing {number}",
                {"n": number, "π": "日本"},
                before={"state": number},
                after={"state": number + 1},
            )
    return registry


def tamper(registry: Registry, *statements: str) -> None:
    """What somebody with the database's own rights can do: take the guards away first."""
    engine = registry.transactions.engine
    guards = (
        ["DROP TRIGGER audit_no_update", "DROP TRIGGER audit_no_delete"]
        if engine.dialect.name == "sqlite"
        else ["DROP TRIGGER audit_no_change ON audit"]
    )
    with engine.begin() as connection:
        for statement in (*guards, *statements):
            connection.execute(text(statement))


def test_a_whole_trail_has_no_problems_and_names_actor_source_and_digests(trail: Registry) -> None:
    assert trail.audit_problems() == []
    (row,) = trail.audit(after=2, limit=1)
    assert (row["actor"], row["source"], row["detail"]) == ("admin", "::1", {"n": 2, "π": "日本"})
    assert (row["before"], row["after"]) == (digest_of({"state": 2}), digest_of({"state": 3}))
    assert trail.trail.head is not None
    assert read_head(trail.trail.head) == (6, trail.audit(after=5)[0]["digest"])


@pytest.mark.parametrize(
    "statement", ["UPDATE audit SET actor = 'nobody' WHERE id = 2", "DELETE FROM audit WHERE id = 6"]
)
def test_the_database_refuses_changes(trail: Registry, statement: str) -> None:
    with pytest.raises(DBAPIError, match="never changed"), trail.transactions.engine.begin() as connection:
        connection.execute(text(statement))
    assert trail.audit_problems() == []


_COPY = "actor, source, action, subject, detail, before, after, previous, digest"


@pytest.mark.parametrize(
    ("statements", "says"),
    [
        (["UPDATE audit SET actor = 'nobody' WHERE id = 3"], "row 3: its content was changed"),
        (["UPDATE audit SET at = at + 1 WHERE id = 3"], "row 3: its content was changed"),
        (["UPDATE audit SET digest = previous WHERE id = 3"], "row 3: its content was changed"),
        (["DELETE FROM audit WHERE id = 3"], "row 3: missing"),
        (["DELETE FROM audit WHERE id = 3", "UPDATE audit SET id = id - 1 WHERE id > 3"], "does not follow"),
        (
            [
                "UPDATE audit SET id = 9 WHERE id = 3",
                "UPDATE audit SET id = 3 WHERE id = 4",
                "UPDATE audit SET id = 4 WHERE id = 9",
            ],
            "does not follow",
        ),
        (["DELETE FROM audit WHERE id > 4"], "row 6: missing at the end"),
        (["DELETE FROM audit"], "row 6: missing at the end"),
        ([f"INSERT INTO audit (id, at, {_COPY}) SELECT 7, at, {_COPY} FROM audit WHERE id = 4"], "row 7"),
    ],
)
def test_tampering_is_found(trail: Registry, statements: list[str], says: str) -> None:
    tamper(trail, *statements)
    assert any(says in problem for problem in trail.audit_problems()), trail.audit_problems()


def test_a_trail_that_was_written_anew_differs_from_the_head_kept_elsewhere(trail: Registry) -> None:
    rows = trail.audit()
    tamper(trail, "DELETE FROM audit")
    for row in rows:
        with trail.transactions.change() as session:
            append(session, row["at"], Actor("somebody"), row["action"], row["subject"], row["detail"])
    assert trail.audit_problems((6, rows[-1]["digest"])) == [
        "row 6: is not the row that the kept head knows; the trail was written anew"
    ]


def more(registry: Registry, entries: int) -> None:
    for number in range(entries):
        with registry.transactions.change() as session:
            append(session, 50.0 + number, Actor("admin"), "test", f"later {number}", {})


def written_anew(registry: Registry, first: int, **changes: Any) -> None:
    """Change entry ``first`` and seal it and all that follow again, so that the chain itself is whole."""
    rows = registry.audit()
    previous = rows[first - 2]["digest"]
    statements = []
    for row in rows[first - 1 :]:
        sealed = {name: row[name] for name in FIELDS} | (changes if row["id"] == first else {}) | {"previous": previous}
        previous = digest_of(sealed)
        statements.append(
            f"UPDATE audit SET actor = '{sealed['actor']}', previous = '{sealed['previous']}', digest = '{previous}' "
            f"WHERE id = {row['id']}"
        )
    tamper(registry, *statements)
    assert registry.audit_problems((1, rows[0]["digest"])) == []


@pytest.mark.parametrize(
    ("attack", "says"),
    [
        (lambda trail: written_anew(trail, 5, actor="nobody"), "row 6: is not the row that the kept head knows"),
        (lambda trail: tamper(trail, "DELETE FROM audit WHERE id > 3"), "row 6: missing at the end"),
        (lambda trail: tamper(trail, "DELETE FROM audit"), "row 6: missing at the end"),
    ],
)
def test_what_was_tampered_with_is_still_reported_after_further_changes(
    trail: Registry, caplog: pytest.LogCaptureFixture, attack: Callable[[Registry], None], says: str
) -> None:
    kept = trail.trail.kept()
    attack(trail)
    for further in range(8):  # the new chain grows past the entry that the head names
        more(trail, 1)
        problems = trail.audit_problems()
        assert says in problems[0] or (further and "row 6: is not the row" in problems[0]), problems
    assert trail.trail.kept() == kept and trail.trail.problems == problems
    again = Registry(trail.engine, trail.trail.head)  # another process
    assert again.audit_problems() == problems
    told = [record.levelname for record in caplog.records if "not whole" in record.message]
    assert told == ["ERROR", "ERROR"]  # each process once, not at every change


def test_the_head_moves_on_over_what_other_processes_wrote(trail: Registry, tmp_path: Path) -> None:
    elsewhere = Registry(trail.engine, tmp_path / "other.head")
    with elsewhere.transactions.change() as session:
        for number in range(700):
            append(session, 9.0, ADMIN, "test", f"elsewhere {number}", {})
    assert trail.trail.kept()[0] == (6, trail.audit(after=5, limit=1)[0]["digest"])
    more(trail, 1)
    assert trail.trail.kept()[0] == (707, trail.audit(after=706)[0]["digest"])
    assert trail.audit_problems() == trail.trail.problems == []


def test_the_head_stays_where_what_follows_it_does_not_link_up(trail: Registry, tmp_path: Path) -> None:
    elsewhere = Registry(trail.engine, tmp_path / "other.head")
    more(elsewhere, 4)
    tamper(trail, "UPDATE audit SET actor = 'nobody' WHERE id = 8")
    more(trail, 1)
    assert trail.trail.kept()[0] == (6, trail.audit(after=5, limit=1)[0]["digest"])
    assert trail.trail.problems == ["row 8: its content was changed (the digest differs)"]


def test_many_at_once_leave_the_head_at_the_end(trail: Registry) -> None:
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda _: more(trail, 3), range(6)))
    assert trail.trail.kept()[0] == (24, trail.audit(after=23)[0]["digest"]) and trail.trail.problems == []


def test_a_head_that_cannot_be_written_undoes_no_change(trail: Registry) -> None:
    assert trail.trail.head is not None
    trail.trail.head.unlink()
    trail.trail.head.mkdir()  # as good as a disk that refuses
    more(trail, 1)
    assert trail.audit(after=6)[0]["subject"] == "later 0"
    trail.trail.head.rmdir()
    more(trail, 1)
    assert trail.trail.kept()[0] == (8, trail.audit(after=7)[0]["digest"])


def test_a_head_that_is_gone_is_told_of_and_a_new_trail_is_none(
    trail: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    assert trail.trail.head is not None and not caplog.records
    trail.trail.head.unlink()
    more(trail, 2)
    [told] = [record.message for record in caplog.records]
    assert told.startswith("no head of the audit trail was kept in ")
    assert "At the first start with this data folder that is as it should be" in told  # of a server that joins others


def test_a_lost_folder_of_the_head_is_not_made_again(trail: Registry, tmp_path: Path) -> None:
    apart = Registry(trail.engine, tmp_path / "disk" / "audit.head")
    apart.trail.follow()
    (tmp_path / "disk").rename(tmp_path / "lost")
    apart.trail.follow()
    assert not (tmp_path / "disk").exists()
    (tmp_path / "lost").rename(tmp_path / "disk")
    assert read_head(tmp_path / "disk" / "audit.head") == read_head(trail.trail.head)  # type: ignore[arg-type]


def test_a_head_written_over_is_told_of_and_kept(trail: Registry) -> None:
    assert trail.trail.head is not None
    trail.trail.head.write_text("nonsense")
    more(trail, 1)
    assert "does not hold the end" in trail.trail.problems[0] and trail.audit_problems() == trail.trail.problems
    assert trail.trail.head.read_text() == "nonsense"
    trail.accept_head(ADMIN, "mended", 60.0)
    assert trail.audit_problems() == []


def test_a_restored_older_database_is_accepted_once_somebody_says_so(trail: Registry) -> None:
    kept, _ = trail.trail.kept()
    tamper(trail, "DELETE FROM audit WHERE id > 4")  # what an older copy looks like
    more(trail, 3)
    assert trail.trail.problems
    trail.accept_head(ADMIN, "restored the copy of Monday", 60.0)
    assert trail.audit_problems() == trail.trail.problems == []
    entry = trail.audit(after=7)[0]
    assert (entry["actor"], entry["action"]) == ("operator", "audit.accept_head")
    assert entry["detail"]["reason"] == "restored the copy of Monday" and entry["detail"]["kept"] == list(kept or ())
    assert trail.audit_problems(kept)  # whoever kept the former end elsewhere still sees the difference
    more(trail, 1)
    assert trail.trail.kept()[0] == (9, trail.audit(after=8)[0]["digest"])


def test_nothing_is_accepted_where_nothing_is_missing_or_the_chain_is_broken(trail: Registry) -> None:
    with pytest.raises(NotAllowed, match="nothing to accept"):
        trail.accept_head(ADMIN, "why not", 60.0)
    tamper(trail, "UPDATE audit SET actor = 'nobody' WHERE id = 3")
    with pytest.raises(NotAllowed, match="row 3: its content was changed"):
        trail.accept_head(ADMIN, "hide it", 60.0)
    assert len(trail.audit()) == 6


def test_a_check_can_be_left_between_two_pages(trail: Registry) -> None:
    trail.trail.leave()
    with pytest.raises(Abandoned):
        trail.trail.check()


class Slowly:
    """Looks of a registry, the ``number``th of which waits until it may go on."""

    def __init__(self, registry: Registry, number: int) -> None:
        self._registry, self._number, self.looks = registry, number, 0
        self.waits, self.may = threading.Event(), threading.Event()

    @contextmanager
    def look(self) -> Iterator[Session]:
        self.looks += 1
        if self.looks == self._number:
            self.waits.set()
            assert self.may.wait(60)
        with self._registry.transactions.look() as session:
            yield session


@pytest.mark.parametrize(
    ("statements", "says"),
    [
        ((), ""),
        (("UPDATE audit SET actor = 'nobody' WHERE id = 2",), "row 2: its content was changed"),
        (("DELETE FROM audit WHERE id = 1",), "row 1: missing"),
        (("UPDATE audit SET actor = 'nobody' WHERE id = 6",), "row 6: its content was changed"),
    ],
)
def test_who_asks_during_a_check_shares_it_and_hears_of_what_was_done_behind_it(
    trail: Registry, monkeypatch: pytest.MonkeyPatch, statements: tuple[str, ...], says: str
) -> None:
    monkeypatch.setattr("server.registry.trail.PAGE", 2)
    slowly = Slowly(trail, 3)
    own = Trail(slowly.look, trail.trail.head)
    first = own.checking()
    assert slowly.waits.wait(60)  # four entries were read
    tamper(trail, *statements)
    others = [own.checking() for _ in range(5)]
    slowly.may.set()
    found = first.result(60)
    assert [other.result(60) for other in others] == [found] * 5
    assert any(says in problem for problem in found) if says else found == []
    assert slowly.looks <= 8  # six entries, and once more those that were read: no run for each
    assert own.check() == found


@pytest.mark.parametrize("number", [1, 3])
def test_who_asks_during_a_check_hears_of_an_end_that_came_and_went_since_it_began(
    trail: Registry, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr("server.registry.trail.PAGE", 2)
    slowly = Slowly(trail, number)
    own = Trail(slowly.look, trail.trail.head)
    own.checking()
    assert slowly.waits.wait(60)
    more(trail, 1)
    last = trail.audit(limit=1, newest_first=True)[0]["id"]
    tamper(trail, f"DELETE FROM audit WHERE id = {last}")
    waiting = own.checking()
    slowly.may.set()
    assert waiting.result(60) == [f"row {last}: missing at the end; the head that was kept knows it"] == own.check()


def test_a_check_that_fails_fails_for_all_who_wait_and_the_next_begins_anew(
    trail: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.registry.trail.PAGE", 2)
    slowly = Slowly(trail, 2)
    own = Trail(slowly.look, None)
    waiting = [own.checking(), own.checking()]
    assert slowly.waits.wait(60)
    waiting[0].cancel()  # one who leaves takes nothing from the others
    own.leave()
    slowly.may.set()
    for each in waiting:
        with pytest.raises(Abandoned):
            each.result(60)
    anew = own.checking()
    assert anew is not waiting[0] and isinstance(anew.exception(60), Abandoned)


def test_a_check_that_gets_no_thread_is_in_the_way_of_no_later_one(
    trail: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="can't start"):
            trail.trail.checking().result(60)
    assert trail.trail.checking().result(60) == []


def test_guards_that_were_taken_away_or_made_harmless_are_missed(registry: Registry) -> None:
    assert unguarded(registry.engine) == []
    harmless = {
        "sqlite": [
            "DROP TRIGGER audit_no_update",
            "DROP TRIGGER audit_no_delete",
            "CREATE TRIGGER audit_no_delete BEFORE DELETE ON audit WHEN 0 BEGIN SELECT 1; END",
        ],
        "postgresql": [
            "ALTER TABLE audit DISABLE TRIGGER audit_no_change",
            "CREATE OR REPLACE FUNCTION audit_refuse() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END'",
        ],
    }
    with registry.engine.begin() as connection:
        for statement in harmless[registry.engine.dialect.name]:
            connection.execute(text(statement))
    first, second = unguarded(registry.engine)
    assert "is missing" in first and "is not as it was made" in second
    with registry.engine.begin() as connection:  # the remedies that are told bring them back
        names = {"sqlite": ["TRIGGER audit_no_delete"], "postgresql": ["FUNCTION audit_refuse CASCADE"]}
        for name in names[registry.engine.dialect.name]:
            connection.execute(text(f"DROP {name}"))
        remedies = [problem.split("`")[1] for problem in (first, second)]
        for remedy in sorted(remedies):  # a function before the trigger that calls it
            connection.execute(text(remedy))
    assert unguarded(registry.engine) == []


def test_the_commands_report_tampering_and_accept_a_restored_end(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    registry = open_registry(settings)
    more(registry, 6)

    def run(*arguments: str) -> Any:
        return CliRunner().invoke(build(), [*arguments, "--data-dir", str(tmp_path), "--json"])

    assert json.loads(run("db", "check").stdout)["sound"]
    tamper(registry, "DELETE FROM audit WHERE id > 3")
    more(registry, 5)
    registry.close()
    verified, checked = run("audit", "verify"), run("db", "check")
    assert verified.exit_code == checked.exit_code == 1
    assert "row 6: is not the row" in json.loads(verified.stdout)["problems"][0]
    found = json.loads(checked.stdout)["problems"]
    assert [line.split(":")[0] for line in found] == ["guard", "guard", "audit"]
    assert "audit_no_update is missing" in found[0] and "audit_no_delete is missing" in found[1]
    assert run("audit", "accept-head").exit_code == 2  # a reason must be given
    for reason, says in ((" ", "say why"), ("f\udcfcr", "no UTF-8")):  # which no answer of the API could hold
        refused = run("audit", "accept-head", "--reason", reason)
        assert refused.exit_code == 1 and says in refused.stderr, refused.output
    assert json.loads(run("audit", "accept-head", "--reason", "restored").stdout)["kept"][0] == 6
    assert run("audit", "verify").exit_code == 0 and run("audit", "accept-head", "--reason", "again").exit_code == 1
