"""Module files by content: ``objects/<sha256>.safetensors`` in a folder or at any fsspec URL, written whole or not at all.

Workers put, servers get. What is read is checked against its name, so nothing half-written is ever loaded.
"""

from __future__ import annotations

import hashlib
import os
import time
import uuid
from pathlib import Path
from typing import Any

from unbind_core.files import MAX_BYTES, read_regular, remove_unfinished, write_whole

QUARANTINE = "quarantine"
_KEPT = 200  # bytes of a name, so that with time and ending it is still one that file systems take


class StoreUnreachable(OSError):
    """The store does not answer; trying again later may help."""


class DamagedObject(Exception):
    """An object whose bytes are not those of its name."""


class ObjectStore:
    """One store. ``folder`` is where it lies, None where it is not on this machine."""

    def __init__(self, where: str) -> None:
        self.where = where.removeprefix("file://")
        self.folder = None if "://" in self.where else Path(self.where)
        self._files: Any = None

    def put(self, data: bytes) -> str:
        """Keep ``data``; returns its key, which is the same for the same bytes. Raises OSError, StoreUnreachable."""
        key = f"objects/{hashlib.sha256(data).hexdigest()}.safetensors"
        if self.folder is not None:
            path = self.folder / key

            def write(temporary: Path) -> None:
                temporary.write_bytes(data)
                temporary.chmod(0o644)  # the account that serves need not be the one that fits

            if not path.is_file() or path.read_bytes() != data:
                write_whole(path, write)
            remove_unfinished(path.parent)
        else:
            self._remote("pipe_file", key, data)
        return key

    def get(self, key: str, digest: str) -> bytes:
        """The bytes under ``key``. Raises OSError, StoreUnreachable; DamagedObject where they are not of this digest."""
        folder = self.folder
        data = read_regular(folder / key, MAX_BYTES) if folder is not None else bytes(self._remote("cat_file", key))
        if hashlib.sha256(data).hexdigest() != digest:
            raise DamagedObject(
                f"{self.where}/{key}: damaged (its content is not that of its name); restore it from a backup"
            )
        return data

    def _remote(self, operation: str, key: str, *arguments: Any) -> Any:
        try:
            if self._files is None:
                from fsspec.core import url_to_fs

                self._files = url_to_fs(self.where)
            files, root = self._files
            if operation == "pipe_file" and "/" in key:
                files.makedirs(f"{root}/{key.rpartition('/')[0]}", exist_ok=True)
            return getattr(files, operation)(f"{root}/{key}", *arguments)
        except FileNotFoundError:
            raise
        except Exception as error:  # each kind of store raises its own
            raise StoreUnreachable(f"module store {self.where}: {type(error).__name__}: {error}") from error


def quarantine(path: Path, reason: str) -> Path:
    """Move a file that cannot be used out of the way, with the reason beside it. Raises OSError."""
    folder = path.parent / QUARANTINE
    folder.mkdir(exist_ok=True)
    stamp = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{uuid.uuid4().hex[:6]}"
    target = folder / f"{stamp}-{os.fsdecode(os.fsencode(path.name)[-_KEPT:])}"
    path.rename(target)
    target.with_name(f"{target.name}.reason").write_text(reason + "\n", encoding="utf-8", errors="replace")
    return target
