"""The audit trail finds any tampering, and the database refuses the plain kind."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from server.registry.audit import Actor, append, digest_of, read_head, write_head
from server.registry.registry import Registry


@pytest.fixture
def trail(registry: Registry) -> Registry:
    """A registry with six entries."""
    for number in range(6):
        with registry.transactions.change() as session:
            append(session, float(number), Actor("admin", "::1"), "test", f"thing {number}", {"n": number, "π": "日本"},
                   before={"state": number}, after={"state": number + 1})  # fmt: skip
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
    assert trail.transactions.head is not None
    assert read_head(trail.transactions.head) == (6, trail.audit(after=5)[0]["digest"])


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
        (["UPDATE audit SET id = 9 WHERE id = 3", "UPDATE audit SET id = 3 WHERE id = 4",
          "UPDATE audit SET id = 4 WHERE id = 9"], "does not follow"),
        (["DELETE FROM audit WHERE id > 4"], "row 6: missing at the end"),
        (["DELETE FROM audit"], "row 6: missing at the end"),
        ([f"INSERT INTO audit (id, at, {_COPY}) SELECT 7, at, {_COPY} FROM audit WHERE id = 4"], "row 7"),
    ],
)  # fmt: skip
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


def test_an_older_head_never_replaces_a_newer_one(tmp_path: Path) -> None:
    path = tmp_path / "head"
    write_head(path, (5, "a" * 64))
    write_head(path, (4, "b" * 64))
    assert read_head(path) == (5, "a" * 64)
    path.write_text("nonsense")
    assert read_head(path) is None
