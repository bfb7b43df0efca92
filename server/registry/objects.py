"""Module files by content: ``objects/<sha256>.safetensors`` in a folder or at any fsspec URL, written whole or not at all.

Workers put, servers get. What is read is checked against its name, so nothing half-written is ever loaded. A server looks by the
clock whether the store is still there, and waits a moment alone for what a store elsewhere is slow to give. What may be deleted
is for ``retention.py`` to say.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from unbind_core.files import MAX_BYTES, Memory, read_regular, remove_unfinished, write_whole

QUARANTINE = "quarantine"
MARK = "unbind-store"
PATIENCE_SECONDS = 0.5
CONNECT_SECONDS = 5.0  # for the first object, which has the store's own package imported
_ASKED_AT_ONCE = 8
_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)
_KEY = re.compile(r"objects/[0-9a-f]{64}\.safetensors")
T = TypeVar("T")
_KEPT = 200  # bytes of a name, so that with time and ending it is still one that file systems take


class StoreUnreachable(OSError):
    """The store does not answer; trying again later may help."""


class DamagedObject(Exception):
    """An object whose bytes are not those of its name."""


class Mark:
    """A file ``MARK`` at the top of a store, so that an empty folder where it should be mounted is told from it."""

    def __init__(self, store: str, look: Callable[[], object]) -> None:
        """``look`` raises FileNotFoundError where the file is not there."""
        self._store, self._look = store, look
        self._seen = False

    def there(self) -> bool:
        """Whether it is. Raises StoreUnreachable where it was and is not, OSError where that cannot be told."""
        try:
            self._look()
        except FileNotFoundError:
            if not self._seen:
                return False
            raise StoreUnreachable(
                f"{self._store}: holds no '{MARK}' any more; is it mounted, and the same bucket?"
            ) from None
        self._seen = True
        return True


class ObjectStore:
    """One store. ``folder`` is where it lies, None where it is not on this machine."""

    def __init__(self, where: str) -> None:
        self.where = where.removeprefix("file://")
        self.folder = None if "://" in self.where else Path(self.where)
        self._files: Any = None
        self._mark = Mark(f"module store {self.where}", self._look_for_mark)
        self._asking = threading.Lock()
        self._asked: dict[str, Future[Memory]] = {}  # what the store has not answered yet
        self._slow_until = 0.0
        if self.folder is not None:
            with suppress(OSError):  # told by who first reads or writes there
                self._mark.there()

    def put(self, data: bytes) -> str:
        """Keep ``data``; returns its key, which is the same for the same bytes. Raises OSError, StoreUnreachable."""
        key = f"objects/{hashlib.sha256(data).hexdigest()}.safetensors"
        if self.folder is not None:
            self._mark.there()  # what is written where a disk should be mounted is out of sight once it is
            path = self.folder / key

            def write(temporary: Path) -> None:
                temporary.write_bytes(data)
                temporary.chmod(0o644)  # the account that serves need not be the one that fits

            try:
                known = path.is_file() and path.read_bytes() == data
                if known:
                    os.utime(path)  # it is as young as one that is new: its record is still to come
            except OSError:  # deleted meanwhile, or another account's
                known = False
            if not known:
                write_whole(path, write)
            remove_unfinished(path.parent)
        else:
            self._remote("pipe_file", key, data)
        return key

    def get(self, key: str, digest: str) -> Memory:
        """The bytes under ``key``, the caller's alone. Raises OSError, StoreUnreachable; DamagedObject where they are others."""
        near = self.folder
        data = read_regular(near / key, MAX_BYTES) if near is not None else bytearray(self._remote("cat_file", key))
        if hashlib.sha256(data).hexdigest() != digest:
            raise DamagedObject(
                f"{self.where}/{key}: damaged (its content is not that of its name); restore it from a backup"
            )
        return data

    def soon(self, key: str, digest: str, patience: float = PATIENCE_SECONDS) -> Memory:
        """The same for threads that cannot wait: what a store elsewhere has not given in ``patience`` seconds comes at a later
        call. Raises StoreUnreachable until then.
        """
        if self.folder is not None:
            return self.get(key, digest)
        with self._asking:
            future = self._asked.get(digest)
            if future is None:
                if len(self._asked) >= _ASKED_AT_ONCE:
                    self._asked = {asked: future for asked, future in self._asked.items() if not future.done()}
                if len(self._asked) >= _ASKED_AT_ONCE:
                    raise StoreUnreachable(f"module store {self.where}: is slow to answer; {key} waits its turn")
                future = self._asked[digest] = in_thread(lambda: self.get(key, digest))
        with suppress(TimeoutError):
            first = patience if self._files is not None else CONNECT_SECONDS
            wait = first if time.monotonic() > self._slow_until else 0.0  # several are waited for once
            future.exception(wait)
        if not future.done():
            self._slow_until = time.monotonic() + patience
            raise StoreUnreachable(f"module store {self.where}: has not given {key} yet")
        with self._asking:
            self._asked.pop(digest, None)
        return future.result()

    def sizes(self) -> dict[str, int]:
        """The bytes of every file by its key; what has another name than a file that was put here is left out. Raises OSError."""
        if self.folder is not None:
            found = {}
            for path in (self.folder / "objects").glob("*.safetensors"):
                with suppress(FileNotFoundError):  # deleted since it was listed
                    found[f"objects/{path.name}"] = path.stat().st_size
        else:
            try:
                listed = self._remote("find", "objects", detail=True)
            except FileNotFoundError:
                return {}
            found = {f"objects/{path.rpartition('/')[2]}": int(about["size"]) for path, about in listed.items()}
        return {key: found[key] for key in sorted(found) if _KEY.fullmatch(key)}

    def put_at(self, key: str) -> float:
        """When a file was put here last. Raises OSError; StoreUnreachable, also where the store does not say."""
        if self.folder is not None:
            return (self.folder / key).stat().st_mtime
        if self._files is not None:
            self._files[0].invalidate_cache()
        return float(self._remote("modified", key).timestamp())

    def delete(self, key: str) -> None:
        """A file, for good; nothing where it is not there. Raises OSError, StoreUnreachable."""
        with suppress(FileNotFoundError):
            if self.folder is not None:
                (self.folder / key).unlink()
            else:
                self._remote("rm_file", key)

    def look(self) -> None:
        """See that the store is there. Raises OSError, StoreUnreachable."""
        if self._mark.there() or (self.folder is not None and not self.folder.is_dir()):
            return  # a folder is made when the first file is put there
        try:
            self._make_mark()
        except OSError as error:
            if error.errno not in _READ_ONLY:
                raise
        else:  # where this server may only read, another makes its mark
            self._mark.there()

    def _look_for_mark(self) -> object:
        return self._remote("cat_file", MARK) if self.folder is None else (self.folder / MARK).stat()

    def _make_mark(self) -> None:
        if self.folder is None:
            self._remote("pipe_file", MARK, b"Unbind keeps modules and guards here.\n")
        else:
            (self.folder / MARK).touch(mode=0o644)

    def _remote(self, operation: str, key: str, *arguments: Any, **named: Any) -> Any:
        try:
            if self._files is None:
                from fsspec.core import url_to_fs

                self._files = url_to_fs(self.where)
            files, root = self._files
            if operation == "pipe_file" and "/" in key:
                files.makedirs(f"{root}/{key.rpartition('/')[0]}", exist_ok=True)
            return getattr(files, operation)(f"{root}/{key}", *arguments, **named)
        except FileNotFoundError:
            raise
        except Exception as error:  # each kind of store raises its own
            raise StoreUnreachable(f"module store {self.where}: {type(error).__name__}: {error}") from error


def in_thread(work: Callable[[], T]) -> Future[T]:
    """The result of what may block for long, by a thread that keeps no process from ending."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised where the result is waited for
            result.set_exception(error)

    threading.Thread(target=run, name="unbind-store", daemon=True).start()
    return result


def quarantine(path: Path, reason: str) -> Path:
    """Move a file that cannot be used out of the way, with the reason beside it. Raises OSError."""
    folder = path.parent / QUARANTINE
    folder.mkdir(exist_ok=True)
    stamp = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{uuid.uuid4().hex[:6]}"
    target = folder / f"{stamp}-{os.fsdecode(os.fsencode(path.name)[-_KEPT:])}"
    path.rename(target)
    target.with_name(f"{target.name}.reason").write_text(reason + "\n", encoding="utf-8", errors="replace")
    return target
