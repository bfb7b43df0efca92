"""Who may ask, and under which modules: keys, stored as hashes, and the rules of each scope.

The admin API and ``unbind key`` write; requests read a ``Snapshot``, so that no request waits for the database.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from sqlalchemy import Row, select
from sqlalchemy.orm import Session

from server.registry.audit import Actor, Mark, append, digest_of, mark_of
from server.registry.lifecycle import LIVE
from server.registry.refusals import AlreadyThere, NotAllowed, Stale
from server.registry.tables import ENDED, Job, JobKind, KeyRow, ModuleRow, ModuleState, RulesRow, Takedown
from server.registry.transactions import Transactions
from server.rules import NO_RULES, Rules
from server.settings import Settings
from unbind_core.files import write_text

SCOPES = ("inference", "report", "metrics", "admin")
Scope = Literal["inference", "report", "metrics", "admin"]
SERVER_SCOPE = "global"
PROFILE_SCOPE = "profile:"  # with the profile's name behind it


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
    tokens_per_minute: float | None = None

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

    def profiles(self, settings: Settings) -> list[str]:
        """Every profile there is, in the settings or here."""
        kept = (scope.removeprefix(PROFILE_SCOPE) for scope in self.rules if scope.startswith(PROFILE_SCOPE))
        return sorted({*settings.profiles, *kept})

    def unreached(self, scope: str, now: float, profiles: Collection[str] = ()) -> str:
        """Why no request comes under a scope, in words; "" where requests may. ``profiles``: those of the settings."""
        kind, _, name = scope.partition(":")
        if kind == "profile" and name not in profiles and scope not in self.rules:
            return f"profile '{name}' does not exist"
        if kind == "key":
            key = next((key for key in self.keys.values() if key.id == name), None)
            if key is None:
                return f"key '{name}' does not exist"
            if not key.usable(now):
                return f"key '{name}' {'is revoked' if key.revoked_at is not None else 'has expired'}"
        return ""


def key_digest(text: str) -> str:
    """What is stored of a key. It is random and long, so that one round of a plain hash is enough."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def revision(rules: Rules) -> str:
    """What If-Match must say for rules to be written in place of these: the digest of what they say."""
    return f'"{digest_of(rules.model_dump(mode="json"))[:32]}"'


class Access:
    """Keys and rules in the registry's database. ``current`` is as fresh as the last ``refresh`` or change made here.

    Every change is told of in the audit trail, in its own transaction.
    """

    def __init__(self, transactions: Transactions) -> None:
        self._transactions = transactions
        self._refreshing = threading.Lock()  # else an older snapshot could be put in place of a newer one
        self.current = Snapshot()
        self._mark: Mark | None = None  # what the registry was as when ``current`` was read
        self.refresh()

    def refresh(self) -> None:
        """Read what any process has written since. Servers ask each second for what hardly ever changes: see ``mark_of``."""
        with self._refreshing, self._transactions.look() as session:
            now = mark_of(session)
            if now == self._mark:
                return
            keys = session.execute(select(*KeyRow.__table__.columns))  # and no objects of rows, which take longer
            rules = session.execute(select(RulesRow.scope, RulesRow.rules))
            self.current = Snapshot(
                {row.digest: _key(row) for row in keys}, {scope: Rules.model_validate(said) for scope, said in rules}
            )
            self._mark = now

    def create_key(
        self,
        name: str,
        actor: Actor,
        now: float,
        *,
        scopes: tuple[Scope, ...] = ("inference",),
        rules: Rules = NO_RULES,
        profile: str | None = None,
        expires_at: float | None = None,
        per_minute: float | None = None,
        burst: int | None = None,
        tokens_per_minute: float | None = None,
    ) -> tuple[Key, str]:
        """A new key, and its text, which is not kept anywhere."""
        text = f"ubk_{secrets.token_urlsafe(24)}"
        row = KeyRow(
            id=f"key_{uuid.uuid4().hex[:16]}",
            name=name,
            digest=key_digest(text),
            scopes=list(scopes),
            profile=profile,
            per_minute=per_minute,
            burst=burst or max(1, int(per_minute or 1)),
            created_at=now,
            expires_at=expires_at,
            tokens_per_minute=tokens_per_minute,
        )
        with self._transactions.change() as session:
            session.add(row)
            session.flush()
            key = _key(row)
            said = rules.model_dump(mode="json")
            if rules != NO_RULES:
                session.add(RulesRow(scope=f"key:{row.id}", rules=said, updated_at=now))
            append(
                session,
                now,
                actor,
                "key.create",
                key.id,
                {"name": name, "scopes": sorted(scopes)},
                after={**_record(key), "rules": said},
            )
        self.refresh()
        return key, text

    def revoke_key(self, key_id: str, actor: Actor, now: float) -> Key:
        """Make a key useless for good. Raises NoSuchKey."""
        with self._transactions.change() as session:
            row = session.get(KeyRow, key_id)
            if row is None:
                raise NoSuchKey(f"no key '{key_id[:80]}'")
            key = _key(row)
            if row.revoked_at is None:
                before, row.revoked_at = key, now
                key = _key(row)
                append(
                    session,
                    now,
                    actor,
                    "key.revoke",
                    key_id,
                    {"name": key.name},
                    before=_record(before),
                    after=_record(key),
                )
        self.refresh()
        return key

    def put_rules(
        self, scope: str, rules: Rules, actor: Actor, now: float, expected: str | None = None, *, new: bool = False
    ) -> None:
        """Write the rules of a scope, whole.

        Raises Stale where they are no longer those of the revision ``expected``, and AlreadyThere where they are to be ``new``
        and there are some.
        """
        with self._transactions.change() as session:
            row = session.get(RulesRow, scope)
            if new and row is not None:
                raise AlreadyThere(f"'{scope}' has rules already; look at them, then send their ETag in If-Match")
            if expected not in (None, "*", revision(Rules.model_validate(row.rules) if row is not None else NO_RULES)):
                raise Stale(f"the rules of '{scope}' changed meanwhile; look at them again, then send their ETag")
            before, said = row.rules if row is not None else None, rules.model_dump(mode="json")
            session.merge(RulesRow(scope=scope, rules=said, updated_at=now))
            append(session, now, actor, "rules.put", scope, said, before=before, after=said)
        self.refresh()

    def bound_to(self, scope: str) -> list[str]:
        """The modules and guards of this scope that are live or are to be, in words."""
        with self._transactions.look() as session:
            return _bound_to(session, scope)

    def delete_rules(self, scope: str, actor: Actor, now: float) -> bool:
        """Forget the rules of a scope; whether there were any. Raises NotAllowed for a profile that something is bound to."""
        with self._transactions.change() as session:
            row = session.get(RulesRow, scope)
            kind, _, name = scope.partition(":")
            if row is not None and kind == "profile" and (bound := _bound_to(session, scope)):
                raise NotAllowed(
                    f"profile '{name}': {', '.join(bound)} would bind no request any more; suspend or retire them first, cancel "
                    "the job, or take their rows down again with options.replace and another options.scope"
                )
            if row is not None:
                session.delete(row)
                append(session, now, actor, "rules.delete", scope, {}, before=row.rules)
        self.refresh()
        return row is not None


def _bound_to(session: Session, scope: str) -> list[str]:
    """What is live and of this scope, what is to be once it is due, and what a job is about to make so."""
    due = (ModuleRow.state == ModuleState.CALIBRATED) & ModuleRow.effective_at.is_not(None)
    rows = select(ModuleRow.kind, ModuleRow.name).where(ModuleRow.scope == scope, ModuleRow.state.in_(LIVE) | due)
    rows = rows.distinct().order_by(ModuleRow.name, ModuleRow.kind.desc())
    work = select(Job.id, Job.module, Takedown.options).join(Takedown, Takedown.id == Job.takedown_id)
    work = work.where(Job.state.not_in(ENDED), Job.kind != JobKind.VERIFY).order_by(Job.created_at)
    return [
        *(f"{kind} '{name}'" for kind, name in session.execute(rows)),
        *(f"module '{name}' of {job}" for job, name, options in session.execute(work) if options.get("scope") == scope),
    ]


def left_behind(key_id: str, bound: Sequence[str]) -> list[str]:
    """What whoever revoked a key to which these are ``bound`` may not have meant."""
    if not bound:
        return []
    return [
        f"key '{key_id}': {', '.join(bound)} bound requests with this key, or were to, and bind none any more but those that name "
        "them; take their rows down again with options.replace and another options.scope where they must be kept back"
    ]


def _record(key: Key) -> dict[str, Any]:
    """What the audit trail keeps a digest of."""
    return {**asdict(key), "scopes": sorted(key.scopes)}


def _key(row: KeyRow | Row[Any]) -> Key:
    return Key(
        row.id,
        row.name,
        frozenset(row.scopes),
        row.profile,
        row.per_minute,
        row.burst,
        row.created_at,
        row.expires_at,
        row.revoked_at,
        row.tokens_per_minute,
    )


def kept_admin_key(settings: Settings) -> str:
    """The admin key in the data directory, made on first use and readable by its owner alone."""
    path = settings.data_dir / "admin.key"
    if path.is_file() and (kept := path.read_text(encoding="utf-8").strip()):
        return kept
    key = f"ubk_{secrets.token_urlsafe(24)}\n"
    try:
        write_text(path, key, new=True)
    except FileExistsError:  # another server made it at the same moment, or it is empty
        if not path.read_text(encoding="utf-8").strip():
            write_text(path, key)
    return path.read_text(encoding="utf-8").strip()
