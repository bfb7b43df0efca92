"""The audit trail: rows that are only added, each sealed with the digest of the one before it.

An edit, a deletion, an insertion or a change of order breaks the chain. That rows are missing at the end, or that the chain was
made anew, shows against the head that ``trail.py`` keeps outside the database. Every change in the registry appends here in its
own transaction.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, select, text
from sqlalchemy.orm import Session

from server.registry.tables import AuditRow
from unbind_core.canonical import canonical_json

ORIGIN = "0" * 64  # what the first row has for a predecessor
FIELDS = ("id", "at", "actor", "source", "action", "subject", "detail", "before", "after", "previous")
_NAMES = (*FIELDS, "digest")
_COLUMNS = [
    AuditRow.__table__.columns[name] for name in _NAMES
]  # and no objects of rows, which take longer than the database
_LOCK = 7_235_310_414  # PostgreSQL's advisory lock for appending: two appenders would seal the same predecessor
_APPENDED = "audit_appended"
# After so long records are read again though no change is told of: somebody may have written by hand.
WHOLE_SECONDS = 60.0
Mark = tuple[tuple[int, str] | None, int]


@dataclass(frozen=True)
class Actor:
    """Who does something, and from where."""

    name: str
    source: str = ""


def digest_of(value: Any) -> str:
    """SHA-256 of a JSON value in canonical form: what an audit row keeps of a record before and after."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def one_at_a_time(within: Session | Connection) -> None:
    """Let no other transaction that asks for this go on before this one ends; on SQLite every writer waits anyway."""
    if (within.get_bind() if isinstance(within, Session) else within).dialect.name == "postgresql":
        within.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})


def append(
    session: Session,
    now: float,
    actor: Actor,
    action: str,
    subject: str,
    detail: dict[str, Any],
    *,
    before: Any = None,
    after: Any = None,
) -> None:
    """Add a row at the end of the chain, within the transaction of what it tells of."""
    one_at_a_time(session)
    session.flush()
    number, previous = newest(session) or (0, ORIGIN)
    row: dict[str, Any] = {
        "id": number + 1,
        "at": now,
        "actor": actor.name,
        "source": actor.source,
        "action": action,
        "subject": subject,
        "detail": detail,
        "before": digest_of(before) if before is not None else "",
        "after": digest_of(after) if after is not None else "",
        "previous": previous,
    }
    row["digest"] = digest_of(row)
    session.add(AuditRow(**row))
    session.flush()
    session.info.setdefault(_APPENDED, row["id"])


def appended(session: Session) -> int:
    """The number of the first row that the session's transaction appended, 0 where it appended nothing."""
    return int(session.info.pop(_APPENDED, 0))


def newest(session: Session) -> tuple[int, str] | None:
    """Number and digest of the last row, None where there is none."""
    last = session.execute(select(AuditRow.id, AuditRow.digest).order_by(AuditRow.id.desc()).limit(1)).first()
    return (last.id, last.digest) if last else None


def mark_of(session: Session) -> Mark:
    """What is another wherever records may have changed: every change ends the audit trail with another entry. It is read before
    the records are, so that they are as it says or newer.
    """
    return newest(session), int(time.monotonic() / WHOLE_SECONDS)


@dataclass(frozen=True)
class Wanted:
    """Which rows are looked for; empty texts ask for nothing. ``action`` is one, or the first word of several: ``key``."""

    action: str = ""
    actor: str = ""
    subject: str = ""

    def conditions(self) -> list[ColumnElement[bool]]:
        """As SQL has it."""
        kind = AuditRow.action.startswith(f"{self.action}.", autoescape=True)
        said: list[tuple[str, ColumnElement[bool]]] = [
            (self.action, (AuditRow.action == self.action) | kind),
            (self.actor, AuditRow.actor == self.actor),
            (self.subject, AuditRow.subject == self.subject),
        ]
        return [condition for given, condition in said if given]


def rows(
    session: Session, *, after: int = 0, limit: int = 1000, wanted: Wanted | None = None, newest_first: bool = False
) -> list[dict[str, Any]]:
    """The rows behind number ``after``, in order; ``newest_first``: those before it, or from the end where it is 0."""
    query = select(*_COLUMNS).where(*(wanted or Wanted()).conditions()).limit(limit)
    if newest_first:
        query = query.order_by(AuditRow.id.desc())
        query = query.where(AuditRow.id < after) if after else query
    else:
        query = query.order_by(AuditRow.id).where(AuditRow.id > after)
    return [_view(row) for row in session.execute(query)]


def rows_about(session: Session, subjects: Collection[str]) -> list[dict[str, Any]]:
    """The rows whose subject is one of these, in order."""
    return [
        _view(row)
        for row in session.execute(select(*_COLUMNS).where(AuditRow.subject.in_(subjects)).order_by(AuditRow.id))
    ]


def last_word(
    session: Session, actor: Actor, action: str, subject: str, others: Collection[str]
) -> dict[str, Any] | None:
    """The detail of the newest such row about ``subject``; None without one, or where somebody else wrote of it or them since."""
    own = (AuditRow.actor == actor.name) & (AuditRow.source == actor.source)
    said = own & (AuditRow.action == action) & (AuditRow.subject == subject)
    row = session.scalar(select(AuditRow).where(said).order_by(AuditRow.id.desc()).limit(1))
    if row is None:
        return None
    since = select(AuditRow.id).where(AuditRow.id > row.id, AuditRow.subject.in_([subject, *others]), ~own)
    return None if session.scalar(since.limit(1)) is not None else dict(row.detail)


def _view(row: Row[Any]) -> dict[str, Any]:
    return dict(zip(_NAMES, row, strict=True))


def problems(entries: Iterable[dict[str, Any]], head: tuple[int, str] | None, *, first: int = 1) -> Iterator[str]:
    """Everything that shows tampering in rows that begin at number ``first``, in order; nothing where they are whole.

    ``head`` is an entry that they must hold, None where none is known.
    """
    previous, expected, known = ORIGIN if first == 1 else None, first, None
    for row in entries:
        if row["id"] != expected:
            yield f"row {expected}: missing; the next is {row['id']}"
        if row["digest"] != digest_of({name: row[name] for name in FIELDS}):
            yield f"row {row['id']}: its content was changed (the digest differs)"
        if previous is not None and row["previous"] != previous:
            yield f"row {row['id']}: does not follow the row before it (deleted, inserted or moved)"
        previous, expected = row["digest"], row["id"] + 1
        if head is not None and row["id"] == head[0]:
            known = row["digest"]
            if known != head[1]:
                yield f"row {head[0]}: is not the row that the kept head knows; the trail was written anew"
    if head is not None and known is None:
        yield f"row {head[0]}: missing at the end; the head that was kept knows it"
