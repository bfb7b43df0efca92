"""Bytes that nobody else may read, by name: in a folder of mode 0700 or at any fsspec URL, sealed where keys are set.

A sealed file is AES-256-GCM under the first key, bound to its name, so that nobody who writes to the store can alter one or put it
in another's place. Any of the keys opens it: that is how they are rotated. Without keys files lie open.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from server.registry.objects import MARK, Mark, StoreUnreachable
from unbind_core.errors import UnbindError
from unbind_core.files import UNFINISHED, remove_tree, remove_unfinished, write_whole

_HEAD = b"unbind-sealed-1\n"
_MARK, _NONCE = 8, 12  # bytes that name the key, and that are new for each file


class Unreadable(UnbindError):
    """A file that the keys given do not open, or that lies open where there are keys."""


class Seal:
    """``keys``: of 32 bytes each; the first one closes, any one opens."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        self._keys = {_mark(key): AESGCM(key) for key in keys}
        self._first = _mark(keys[0]) if keys else b""

    def close(self, name: str, data: bytes) -> bytes:
        """What is kept under this name."""
        if not self._keys:
            return data
        nonce = os.urandom(_NONCE)
        return _HEAD + self._first + nonce + self._keys[self._first].encrypt(nonce, data, name.encode())

    def open(self, name: str, kept: bytes) -> bytes:
        """What was given. Raises Unreadable, which says what to do."""
        sealed = kept.startswith(_HEAD)
        if not sealed:
            if self._keys:
                raise Unreadable(
                    f"private store: {name} is not sealed, though private_key is set; submit its rows again"
                )
            return kept
        mark, nonce, text = (
            kept[len(_HEAD) :][part]
            for part in (slice(_MARK), slice(_MARK, _MARK + _NONCE), slice(_MARK + _NONCE, None))
        )
        if mark not in self._keys:
            raise Unreadable(
                f"private store: {name} was sealed under another key; "
                + (
                    "add that key behind the one in private_key"
                    if self._keys
                    else "set private_key to it, as the server has it"
                )
            )
        try:
            return self._keys[mark].decrypt(nonce, text, name.encode())
        except InvalidTag:
            raise Unreadable(f"private store: {name} was altered; restore it from a backup") from None


def _mark(key: bytes) -> bytes:
    return hashlib.sha256(b"unbind private store" + key).digest()[:_MARK]


class PrivateStore:
    """One store. Every method raises OSError, or StoreUnreachable, where it does not answer. So does a folder whose disk is not
    mounted any more: what is put there would be out of sight, and what is deleted there would be on the disk still.
    """

    def __init__(self, where: str, keys: Sequence[bytes] = ()) -> None:
        self.where = where.removeprefix("file://")
        self._folder = None if "://" in self.where else Path(self.where)
        self._seal = Seal(keys)
        self._files: Any = None
        self._mark = Mark(f"private store {self.where}", (Path(self.where) / MARK).stat)
        with suppress(OSError):  # told by who first reads or writes there
            self._near()

    def _near(self) -> Path | None:
        """The folder, None where the store is not on this machine."""
        if self._folder is not None:
            self._mark.there()
        return self._folder

    def put(self, name: str, data: bytes) -> None:
        """Keep ``data`` whole or not at all."""
        kept = self._seal.close(name, data)
        if (folder := self._folder) is None:
            self._remote("pipe_file", name, kept)
            return
        marked = self._mark.there()
        (folder / name).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not marked:
            (folder / MARK).touch(mode=0o600)
            self._mark.there()
        write_whole(folder / name, lambda temporary: temporary.write_bytes(kept))

    def get(self, name: str) -> bytes:
        """What is kept. Raises FileNotFoundError, Unreadable."""
        kept = self._remote("cat_file", name) if (folder := self._near()) is None else (folder / name).read_bytes()
        return self._seal.open(name, bytes(kept))

    def has(self, name: str) -> bool:
        """Whether there is something under this name."""
        return bool(self._remote("isfile", name)) if (folder := self._near()) is None else (folder / name).is_file()

    def names(self, under: str) -> list[str]:
        """The names of the files in a folder and the folders in it."""
        if (folder := self._near()) is not None:
            # os.walk passes over a folder that another process deletes meanwhile; Path.rglob raises there
            found = [Path(where) / name for where, _, names in os.walk(folder / under) for name in names]
            given = (path.relative_to(folder).as_posix() for path in found)
            return sorted(name for name in given if UNFINISHED not in name and name != MARK)
        try:
            listed = self._remote("find", under)
        except FileNotFoundError:
            return []
        root = f"{self._files[1]}/".lstrip("/")
        return sorted(str(path).lstrip("/").removeprefix(root) for path in listed)

    def delete(self, under: str) -> None:
        """A file, or a folder with all that is in it; nothing where nothing is there."""
        if (folder := self._near()) is not None:
            path = folder / under
            if path.is_dir():
                remove_tree(path)
            else:
                path.unlink(missing_ok=True)
                remove_unfinished(path.parent)
            return
        for name in [*self.names(under), *([under] if self.has(under) else [])]:
            try:
                self._remote("rm_file", name)
            except FileNotFoundError:
                continue

    def tidy(self) -> None:
        """Delete what processes that were killed left half written in a folder; elsewhere nothing shows before it is whole."""
        if (folder := self._near()) is not None:
            for where, _, _ in os.walk(folder):
                remove_unfinished(Path(where))

    def _remote(self, operation: str, name: str, *arguments: Any) -> Any:
        try:
            if self._files is None:
                from fsspec.core import url_to_fs

                self._files = url_to_fs(self.where)
            files, root = self._files
            files.invalidate_cache()  # what others wrote since is to be seen
            if operation == "pipe_file":
                files.makedirs(f"{root}/{name.rpartition('/')[0]}", exist_ok=True)
            return getattr(files, operation)(f"{root}/{name}", *arguments)
        except FileNotFoundError:
            raise
        except Exception as error:  # each kind of store raises its own
            raise StoreUnreachable(f"private store {self.where}: {type(error).__name__}: {error}") from error
