"""How the parts of the registry reach the database: one transaction a change, one snapshot a look."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from server.registry.audit import appended, write_head


class Transactions:
    """Sessions on one database. After a change that the audit trail tells of, its head is kept in ``head``."""

    def __init__(self, engine: Engine, head: Path | None = None) -> None:
        self.engine = engine
        self.head = head
        self._reading = engine.execution_options(reading=True)

    @contextmanager
    def change(self) -> Iterator[Session]:
        """Everything within happens, or nothing of it. On SQLite the writer's lock is taken first."""
        with Session(self.engine, expire_on_commit=False) as session:
            with session.begin():
                yield session
            head = appended(session)
        if head is not None and self.head is not None:
            write_head(self.head, head)

    @contextmanager
    def look(self) -> Iterator[Session]:
        """Read without holding anybody up."""
        with Session(self._reading) as session:
            yield session
