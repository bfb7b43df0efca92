"""Who may ask, and under which modules: keys, stored as hashes, and the rules of each scope.

The admin API and ``unbind key`` write; requests read a ``Snapshot``, so that no request waits for the database.
"""

from __future__ import annotations

import hashlib
import secrets
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from sqlalchemy import JSON, Engine, select
from sqlalchemy.orm import Mapped, Session, mapped_column

from server.registry.tables import Base
from server.rules import NO_RULES, Rules

SCOPES = ("inference", "report", "admin")
Scope = Literal["inference", "report", "admin"]
SERVER_SCOPE = "global"


class KeyRow(Base):
    """A key, known by the SHA-256 of its text. Revoked keys stay: what was once locked never falls open."""

    __tablename__ = "api_keys"
    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    digest: Mapped[str] = mapped_column(unique=True)
    scopes: Mapped[list[str]] = mapped_column(JSON)
    profile: Mapped[str | None] = mapped_column(default=None)
    per_minute: Mapped[float | None] = mapped_column(default=None)
    burst: Mapped[int] = mapped_column(default=1)
    created_at: Mapped[float]
    expires_at: Mapped[float | None] = mapped_column(default=None)
    revoked_at: Mapped[float | None] = mapped_column(default=None)


class RulesRow(Base):
    """The rules of a scope: ``global``, ``key:ID`` or ``profile:NAME``."""

    __tablename__ = "policies"
    scope: Mapped[str] = mapped_column(primary_key=True)
    rules: Mapped[dict[str, Any]]
    updated_at: Mapped[float]


class NoSuchKey(Exception):
    """No key has this id."""


@dataclass(frozen=True)
class Key:
    """A key as requests see it."""

    id: str
    name: str
    scopes: frozenset[str]
    profile: str | None
    per_minute: float | None
    burst: int
    created_at: float
    expires_at: float | None
    revoked_at: float | None

    def usable(self, now: float) -> bool:
        """Neither revoked nor expired."""
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)


@dataclass(frozen=True)
class Snapshot:
    """Every key by the digest of its text, and the rules by scope."""

    keys: Mapping[str, Key] = field(default_factory=dict)
    rules: Mapping[str, Rules] = field(default_factory=dict)

    def of(self, scope: str) -> Rules:
        """The rules of a scope; none where nothing was said."""
        return self.rules.get(scope, NO_RULES)


def key_digest(text: str) -> str:
    """What is stored of a key. It is random and long, so that one round of a plain hash is enough."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


class Access:
    """Keys and rules in the registry's database. ``current`` is as fresh as the last ``refresh`` or change made here."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._reading = engine.execution_options(reading=True)
        self.current = Snapshot()
        self.refresh()

    def refresh(self) -> None:
        """Read what any process has written since."""
        with Session(self._reading) as session:
            self.current = Snapshot(
                {row.digest: _key(row) for row in session.scalars(select(KeyRow))},
                {row.scope: Rules.model_validate(row.rules) for row in session.scalars(select(RulesRow))},
            )

    def create_key(
        self, name: str, now: float, *, scopes: tuple[Scope, ...] = ("inference",), rules: Rules = NO_RULES,
        profile: str | None = None, expires_at: float | None = None, per_minute: float | None = None,
        burst: int | None = None,
    ) -> tuple[Key, str]:  # fmt: skip
        """A new key, and its text, which is not kept anywhere."""
        text = f"ubk_{secrets.token_urlsafe(24)}"
        row = KeyRow(
            id=f"key_{uuid.uuid4().hex[:16]}", name=name, digest=key_digest(text), scopes=list(scopes), profile=profile,
            per_minute=per_minute, burst=burst or max(1, int(per_minute or 1)), created_at=now, expires_at=expires_at,
        )  # fmt: skip
        with Session(self._engine) as session, session.begin():
            session.add(row)
            session.flush()
            key = _key(row)
            if rules != NO_RULES:
                session.add(RulesRow(scope=f"key:{row.id}", rules=rules.model_dump(mode="json"), updated_at=now))
        self.refresh()
        return key, text

    def revoke_key(self, key_id: str, now: float) -> Key:
        """Make a key useless for good. Raises NoSuchKey."""
        with Session(self._engine) as session, session.begin():
            row = session.get(KeyRow, key_id)
            if row is None:
                raise NoSuchKey(f"no key '{key_id[:80]}'")
            row.revoked_at = row.revoked_at or now
            session.flush()
            key = _key(row)
        self.refresh()
        return key

    def put_rules(self, scope: str, rules: Rules, now: float) -> None:
        """Write the rules of a scope, whole."""
        with Session(self._engine) as session, session.begin():
            session.merge(RulesRow(scope=scope, rules=rules.model_dump(mode="json"), updated_at=now))
        self.refresh()

    def delete_rules(self, scope: str) -> bool:
        """Forget the rules of a scope; whether there were any."""
        with Session(self._engine) as session, session.begin():
            row = session.get(RulesRow, scope)
            if row is not None:
                session.delete(row)
        self.refresh()
        return row is not None


def _key(row: KeyRow) -> Key:
    return Key(
        row.id, row.name, frozenset(row.scopes), row.profile, row.per_minute, row.burst, row.created_at,
        row.expires_at, row.revoked_at,
    )  # fmt: skip
