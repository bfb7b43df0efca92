"""The audit trail: rows that are only added, each sealed with the digest of the one before it.

An edit, a deletion, an insertion or a change of order breaks the chain. That rows are missing at the end shows against the
head file, which is kept beside the database or, better, elsewhere. Every change in the
registry appends here in its own transaction.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import select, text
from sqlalchemy.orm import Session

from server.registry.tables import AuditRow

ORIGIN = "0" * 64  # what the first row has for a predecessor
FIELDS = ("id", "at", "actor", "source", "action", "subject", "detail", "before", "after", "previous")
_LOCK = 7_235_310_414  # PostgreSQL's advisory lock for appending: two appenders would seal the same predecessor
_HEAD = "audit_head"


@dataclass(frozen=True)
class Actor:
    """Who does something, and from where."""

    name: str
    source: str = ""


def digest_of(value: Any) -> str:
    """SHA-256 of a JSON value in canonical form: what an audit row keeps of a record before and after."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def one_at_a_time(session: Session) -> None:
    """Let no other transaction that asks for this go on before this one ends; on SQLite every writer waits anyway."""
    if session.get_bind().dialect.name == "postgresql":
        session.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})


def append(
    session: Session, now: float, actor: Actor, action: str, subject: str, detail: dict[str, Any],
    *, before: Any = None, after: Any = None,
) -> None:  # fmt: skip
    """Add a row at the end of the chain, within the transaction of what it tells of."""
    one_at_a_time(session)
    session.flush()
    last = session.execute(select(AuditRow.id, AuditRow.digest).order_by(AuditRow.id.desc()).limit(1)).first()
    row: dict[str, Any] = {
        "id": last.id + 1 if last else 1, "at": now, "actor": actor.name, "source": actor.source, "action": action,
        "subject": subject, "detail": detail, "before": digest_of(before) if before is not None else "",
        "after": digest_of(after) if after is not None else "", "previous": last.digest if last else ORIGIN,
    }  # fmt: skip
    row["digest"] = digest_of(row)
    session.add(AuditRow(**row))
    session.flush()
    session.info[_HEAD] = (row["id"], row["digest"])


def appended(session: Session) -> tuple[int, str] | None:
    """The head that the session's transaction made, None where it appended nothing."""
    head: tuple[int, str] | None = session.info.pop(_HEAD, None)
    return head


def write_head(path: Path, head: tuple[int, str]) -> None:
    """Remember the newest row outside the database; an older one never replaces it."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    with os.fdopen(descriptor, "r+", encoding="ascii") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        kept = _parse(file.read())
        if kept is None or kept[0] < head[0]:
            file.seek(0)
            file.write(f"{head[0]} {head[1]}\n")
            file.truncate()
            file.flush()
            os.fsync(file.fileno())


def read_head(path: Path) -> tuple[int, str] | None:
    """The head that was remembered, None where there is none."""
    try:
        return _parse(path.read_text(encoding="ascii"))
    except (OSError, UnicodeDecodeError):
        return None


def _parse(line: str) -> tuple[int, str] | None:
    number, _, digest = line.strip().partition(" ")
    return (int(number), digest) if number.isdigit() and len(digest) == 64 else None


def rows(session: Session, *, after: int = 0, limit: int = 1000) -> list[dict[str, Any]]:
    """The rows that follow number ``after``, in order."""
    query = select(AuditRow).where(AuditRow.id > after).order_by(AuditRow.id).limit(limit)
    return [_view(row) for row in session.scalars(query)]


def rows_about(session: Session, subjects: Collection[str]) -> list[dict[str, Any]]:
    """The rows whose subject is one of these, in order."""
    return [
        _view(row)
        for row in session.scalars(select(AuditRow).where(AuditRow.subject.in_(subjects)).order_by(AuditRow.id))
    ]


def _view(row: AuditRow) -> dict[str, Any]:
    return {name: getattr(row, name) for name in (*FIELDS, "digest")}


def problems(session: Session, head: tuple[int, str] | None) -> Iterator[str]:
    """Everything that shows tampering, first things first; nothing where the trail is whole."""
    previous, expected, known = ORIGIN, 1, {}
    while page := rows(session, after=expected - 1, limit=1000):
        for row in page:
            if row["id"] != expected:
                yield f"row {expected}: missing; the next is {row['id']}"
            if row["digest"] != digest_of({name: row[name] for name in FIELDS}):
                yield f"row {row['id']}: its content was changed (the digest differs)"
            if row["previous"] != previous:
                yield f"row {row['id']}: does not follow the row before it (deleted, inserted or moved)"
            previous, expected = row["digest"], row["id"] + 1
            if head is not None and row["id"] == head[0]:
                known[head[0]] = row["digest"]
    if head is not None and head[0] not in known:
        yield f"row {head[0]}: missing at the end; the head that was kept knows it"
    elif head is not None and known[head[0]] != head[1]:
        yield f"row {head[0]}: is not the row that the kept head knows; the trail was written anew"
