"""The registry as server, worker and commands hold it: takedowns, jobs, modules and the audit trail over one database."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from sqlalchemy import Engine

from server.registry import audit
from server.registry.database import open_database
from server.registry.jobs import Jobs
from server.registry.modules import Modules
from server.registry.takedowns import Takedowns
from server.registry.transactions import Transactions
from server.settings import Settings


class Registry:
    """The records, without locks of their own; any thread may use them."""

    def __init__(self, engine: Engine, audit_head: Path | None = None) -> None:
        self.transactions = Transactions(engine, audit_head)
        self.takedowns = Takedowns(self.transactions)
        self.jobs = Jobs(self.transactions)
        self.modules = Modules(self.transactions)

    @property
    def engine(self) -> Engine:
        """The database, for other records in it."""
        return self.transactions.engine

    def close(self) -> None:
        """Give the connections back."""
        self.transactions.engine.dispose()

    def audit(self, after: int = 0, limit: int = 100) -> list[dict[str, Any]]:
        """Rows of the audit trail in order."""
        with self.transactions.look() as session:
            return audit.rows(session, after=after, limit=limit)

    def audit_of(self, subjects: Collection[str]) -> list[dict[str, Any]]:
        """The rows that tell of any of these records, in order."""
        with self.transactions.look() as session:
            return audit.rows_about(session, subjects)

    def audit_problems(self, head: tuple[int, str] | None = None) -> list[str]:
        """What shows that the trail was tampered with, measured against ``head`` or the head kept here."""
        if head is None and self.transactions.head is not None:
            head = audit.read_head(self.transactions.head)
        with self.transactions.look() as session:
            return list(audit.problems(session, head))


def open_registry(settings: Settings) -> Registry:
    """The registry that the settings name. Raises DatabaseRefused."""
    engine = open_database(settings.database_address, settings.data_dir / "backups")
    return Registry(engine, settings.audit_head_file)
