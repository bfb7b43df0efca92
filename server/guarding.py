"""Forget rows -> the guard of a takedown, built while its POST waits; and the key that the fingerprints of guards are made with.

No fit is needed for it, so that nothing waits for a worker: what it promises holds from the answer to the POST on.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from server.registry.objects import ObjectStore
from server.registry.records import NewModule
from server.registry.tables import Kind, Origin
from server.settings import GUARD_KEY_BYTES, Settings
from unbind_core.errors import DataError, UnbindError
from unbind_core.files import MAX_BYTES, write_text
from unbind_core.guard.index import GuardIndex, Secret, build_index
from unbind_core.rows import ForgetRow, forget_digest


def guard_secret(settings: Settings) -> Secret:
    """What guards are made and asked with: the setting, else the key kept in the data directory, made on first use.

    Raises UnbindError where the file is there and holds no key: a new one would be of no use to the guards there are.
    """
    if settings.guard_key:
        return Secret(bytes.fromhex(settings.guard_key))
    path = settings.data_dir / "guard.key"
    if not path.exists():
        with suppress(FileExistsError):  # another server made it at the same moment
            write_text(path, secrets.token_hex(GUARD_KEY_BYTES) + "\n", new=True)
    try:
        key = bytes.fromhex(path.read_text(encoding="ascii"))
    except ValueError:
        key = b""
    if len(key) != GUARD_KEY_BYTES:
        raise UnbindError(
            f"{path}: holds no key of {GUARD_KEY_BYTES} bytes; restore it from a backup, or set guard_key"
        )
    return Secret(key)


def build_guard(name: str, rows: Sequence[ForgetRow], options: Mapping[str, Any], secret: Secret) -> GuardIndex:
    """The guard of these rows; ``options`` are those of a takedown. Raises DataError.

    A row is guarded as one text, so that a run may begin in its prompt; where the rows are secrets, what precedes one is none.
    """
    said = options.get("guard") or {}
    index = build_index(
        (row.continuation if said.get("secrets") else row.prompt + row.continuation for row in rows),
        name=name,
        secret=secret,
        forget_digest=forget_digest(rows),
        **said,
    )
    if (size := len(index.to_bytes())) > MAX_BYTES:
        raise DataError(
            f"rows: their guard would take {size} bytes, at most {MAX_BYTES}; split them into several takedowns"
        )
    return index


def kept_guard(
    index: GuardIndex, options: Mapping[str, Any], objects: ObjectStore, reference: str | None = None
) -> NewModule:
    """Put a guard into the store; what its record is to say, with the notice's ``reference``. Raises OSError, StoreUnreachable."""
    return NewModule(
        name=index.name,
        digest=index.digest,
        fingerprint="",
        file=objects.put(index.to_bytes()),
        origin=Origin.TAKEDOWN,
        activation=str(options.get("activation") or "auto"),
        scope=str(options.get("scope") or ""),
        effective_at=options.get("effective_at"),
        expires_at=options.get("expires_at"),
        kind=Kind.GUARD,
        facts={**index.facts, "reference": reference},
    )
