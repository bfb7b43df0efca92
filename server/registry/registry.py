"""The registry as server, worker and commands hold it: takedowns, jobs, modules and the audit trail over one database."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from sqlalchemy import Engine

from server.registry import audit
from server.registry.audit import Actor
from server.registry.database import open_database
from server.registry.jobs import Jobs
from server.registry.joining import left, superseding
from server.registry.modules import Modules
from server.registry.refusals import NotAllowed
from server.registry.tables import ModuleRow
from server.registry.takedowns import Takedowns
from server.registry.trail import Trail
from server.registry.transactions import Transactions
from server.settings import Settings


class Registry:
    """The records, without locks of their own; any thread may use them."""

    def __init__(self, engine: Engine, audit_head: Path | None = None, model: str | None = None) -> None:
        """``model``: fingerprint of the model that runs here, "" without one; None where that is not known. Of several modules of
        a name, the name means the one for it, and others bind nothing here.
        """
        self.transactions = Transactions(engine, audit_head)
        self.takedowns = Takedowns(self.transactions, model)
        self.jobs = Jobs(self.transactions, model or "")
        self.modules = Modules(self.transactions, model or "")

    @property
    def engine(self) -> Engine:
        """The database, for other records in it."""
        return self.transactions.engine

    @property
    def trail(self) -> Trail:
        """Whether the audit trail is whole."""
        return self.transactions.trail

    def close(self) -> None:
        """Give the connections back."""
        self.trail.leave()
        self.transactions.engine.dispose()

    def audit(
        self, after: int = 0, limit: int = 100, wanted: audit.Wanted | None = None, *, newest_first: bool = False
    ) -> list[dict[str, Any]]:
        """Rows of the audit trail in order, or the newest first."""
        with self.transactions.look() as session:
            return audit.rows(session, after=after, limit=limit, wanted=wanted, newest_first=newest_first)

    def audit_of(self, subjects: Collection[str]) -> list[dict[str, Any]]:
        """The rows that tell of any of these records, in order."""
        with self.transactions.look() as session:
            return audit.rows_about(session, subjects)

    def left(self, module_id: str, new: Collection[str] = ()) -> list[str]:
        """The superseded modules, by name, that nothing stands in for where this one is out of use; ``new`` as ``joining.left``."""
        with self.transactions.look() as session:
            return sorted(row.name for row in left(session, session.get_one(ModuleRow, module_id), new))

    def superseding(self, takedown_id: str | None) -> list[str]:
        """The takedowns whose modules are superseded once that of this one is active, as it joins them."""
        with self.transactions.look() as session:
            return sorted(superseding(session, takedown_id))

    def audit_problems(self, head: tuple[int, str] | None = None) -> list[str]:
        """What shows that the trail was tampered with, measured against ``head`` or the head kept here."""
        return self.trail.check() if head is None else list(audit.problems(self.trail.entries(), head))

    def accept_head(self, actor: Actor, reason: str, now: float) -> dict[str, Any]:
        """Take the trail as it stands for the right one, though the kept head knows another end; what is said in the trail.

        For a database that was restored from an older copy. Raises NotAllowed where there is nothing to accept, and where the
        chain itself is broken: that stays to be seen.
        """
        kept, damaged = self.trail.kept()
        if broken := next(audit.problems(self.trail.entries(), None), None):
            raise NotAllowed(f"the trail itself is broken ({broken}); restore a copy of the database that is whole")
        if not damaged and (kept is None or not any(audit.problems(self.trail.entries(), kept))):
            raise NotAllowed("the trail holds the kept head; there is nothing to accept")
        with self.transactions.change(accept_head=True) as session:
            audit.one_at_a_time(session)
            detail = {"reason": reason, "kept": kept, "found": audit.newest(session)}
            audit.append(session, now, actor, "audit.accept_head", "audit", detail)
        return detail


def open_registry(settings: Settings, model: str | None = None, *, existing: bool = False) -> Registry:
    """The registry that the settings name, made where it is missing and need not be ``existing``; ``model`` as for ``Registry``.

    Raises DatabaseRefused.
    """
    engine = open_database(settings.database_address, settings.data_dir / "backups", existing=existing)
    return Registry(engine, settings.audit_head_file, model)
