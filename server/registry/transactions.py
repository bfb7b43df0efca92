"""How the parts of the registry reach the database: one transaction a change, one snapshot a look."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import Engine, select
from sqlalchemy.orm import Session

from server.registry.audit import appended, one_at_a_time
from server.registry.tables import AuditRow
from server.registry.trail import Trail


class Transactions:
    """Sessions on one database. After a change that the audit trail tells of, its head in the file ``head`` follows."""

    def __init__(self, engine: Engine, head: Path | None = None) -> None:
        self.engine = engine
        # PostgreSQL's own would give each statement of a look another snapshot; SQLite knows one for all of them.
        snapshot = {"isolation_level": "REPEATABLE READ"} if engine.dialect.name == "postgresql" else {}
        self._reading = engine.execution_options(reading=True, **snapshot)
        self.trail = Trail(self.look, head)

    @contextmanager
    def change(self, *, accept_head: bool = False) -> Iterator[Session]:
        """Everything within happens, or nothing of it, and no other change meanwhile.

        The writer's lock is taken before anything is read: what a change decides by still holds when it is committed, and
        of two that change the same rows in another order neither waits for the other.
        ``accept_head`` has the trail's head name the newest entry whatever it named before.
        """
        with Session(self.engine, expire_on_commit=False) as session:
            with session.begin():
                one_at_a_time(session)
                yield session
            first = appended(session)
        if first:
            self.trail.follow(first, accept=accept_head)

    def require_primary(self) -> None:
        """See that the database takes more than reads, and change nothing. Raises one of AWAY where it does not."""
        if self.engine.dialect.name == "postgresql":  # of SQLite's file the data folder tells
            with self.look() as session:
                session.execute(select(AuditRow.id).limit(0).with_for_update())

    @contextmanager
    def look(self) -> Iterator[Session]:
        """Read what the database held at one moment, without holding anybody up."""
        with Session(self._reading) as session:
            yield session
