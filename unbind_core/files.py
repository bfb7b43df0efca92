"""Files that exist whole or not at all: written in a folder of their own, fsync, rename, fsync of the folder; locks; and anchors.

Who writes holds a lock on that folder, which the kernel drops with the process: one that is not locked was left by a process that
was killed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from safetensors import SafetensorError

UNFINISHED = ".partial"
Memory = bytearray | mmap.mmap
APART = 2**17  # bytes of a file, and more, have pages of their own
MAX_BYTES = 2**28  # of a module: a network of 4,096 units on a model as wide as 16,384 has as many


def write_whole(path: Path, write: Callable[[Path], object], *, new: bool = False) -> None:
    """Let ``write(temporary)`` make a file beside ``path``, then put it in place atomically.

    The file is its owner's alone unless ``write`` says otherwise. A failure leaves what was there before; OSError (disk full, no
    permission) goes through to the caller and names ``path``, FileExistsError where it must be ``new`` and there is one.
    """
    with _folder_beside(path) as folder:
        temporary = folder / path.name
        temporary.touch(0o600)
        write(temporary)
        _sync(temporary)
        if new:
            path.hardlink_to(temporary)
        else:
            temporary.replace(path)
    _sync(path.parent)


def require_writable(path: Path) -> None:
    """Make sure that :func:`write_whole` can put a file there, before work that would be lost otherwise. Makes its folder.

    Raises OSError naming ``path``.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    with _folder_beside(path):
        pass


def write_text(path: Path, text: str, *, new: bool = False, mode: int = 0o600) -> None:
    """The same for a text, in UTF-8. ``mode``: 0o644 for what others are to read."""

    def write(temporary: Path) -> None:
        temporary.write_text(text, encoding="utf-8")
        temporary.chmod(mode)

    write_whole(path, write, new=new)


def locked(path: Path, *, wait: bool = True) -> IO[str]:
    """A file of its owner's alone, made where it is missing, and locked until it is closed or its holder ends, however that ends.

    Waits for another holder; raises BlockingIOError where there is one and ``wait`` is off.
    """
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+", encoding="ascii", errors="replace")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BaseException:
        file.close()
        raise
    return file


def read_regular(path: Path, most: int, follow: bool = True) -> Memory:
    """The bytes of a regular file of at most ``most``, in memory of their own: what becomes of the file later does not change them.

    Never waits, as a pipe would have it; ``follow`` links or refuse them.

    Raises OSError, which says so where it is no regular file or too large.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW))
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        data = _room(found.st_size if found.st_size <= most else 0)
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            count, more = file.readinto(data), b""
            if count == found.st_size and (more := file.read(1)):  # it grows; room for ``most`` is not made each time
                more += file.read(most - count)
    finally:
        os.close(descriptor)
    if max(found.st_size, count + len(more)) > most:
        raise OSError(errno.EINVAL, f"it is larger than {most} bytes", str(path))
    if more or count < len(data):  # or has shrunk
        data = bytearray(data[:count]) + more
    return data


def _room(size: int) -> Memory:
    """Memory to read into. A bytearray is cleared first, with Python's lock held: for a large file as long as reading takes."""
    if size < APART:
        return bytearray(size)
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def remove_unfinished(folder: Path) -> None:
    """Delete what processes that were killed left of files they wrote into ``folder``; what is being written stays."""
    for left in folder.glob(f".*{UNFINISHED}"):
        with contextlib.suppress(OSError):  # deleted meanwhile, or somebody writes it
            lock = os.open(left, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left)
            finally:
                os.close(lock)


def remove_tree(folder: Path) -> None:
    """Delete a folder and all in it; what is not there, or what another process deletes meanwhile, is deleted. Raises OSError."""

    def missing(_: object, __: str, error: tuple[type[BaseException], BaseException, object]) -> None:
        if not isinstance(error[1], FileNotFoundError):
            raise error[1]

    shutil.rmtree(folder, onerror=missing)


def own_folder(path: Path) -> tuple[int, Path]:
    """A new folder beside ``path``, and the descriptor that locks it."""
    while True:
        folder = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=UNFINISHED))
        with contextlib.suppress(FileNotFoundError):  # somebody tidied it away before it was locked
            lock = os.open(folder, os.O_RDONLY)
            with contextlib.suppress(OSError):  # a file system without locks: what is left over there stays
                fcntl.flock(lock, fcntl.LOCK_EX)
            if folder.exists():
                return lock, folder
            os.close(lock)


@contextlib.contextmanager
def _folder_beside(path: Path) -> Iterator[Path]:
    """A folder of our own while a file is made in it. An OSError that names it, or no file, names ``path``, which people know."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        lock, folder = own_folder(path)
        try:
            yield folder
        except SafetensorError as error:  # it tells what the system said in words alone
            if (told := re.search(r"\(os error (\d+)\)", str(error))) is None:
                raise
            raise OSError(int(told[1]), os.strerror(int(told[1])), str(path)) from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)
    except OSError as error:
        if error.errno is None or UNFINISHED not in str(error.filename or UNFINISHED):  # a full disk names no file
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Anchor:
    """A path, and what lay there when this was made: somebody may delete or replace it under a running process.

    The operating system lets a process go on with a file that has no name any more; what is written to it is lost with the process.
    """

    def __init__(self, path: Path, what: str) -> None:
        """``what`` names it in messages. Raises OSError where nothing is there."""
        self._path, self._what = path, what
        self._first = _identity(path)

    @property
    def lost(self) -> str | None:
        """What is wrong with it and what to do, None where all is well."""
        try:
            now = _identity(self._path)
        except FileNotFoundError:
            now = None
        except OSError:
            return None  # a file system that does not answer has lost nothing yet
        if now == self._first:
            return None
        what = "removed" if now is None else "replaced"
        return (
            f"{self._what} was {what} while the server ran, and nothing that is written now would be kept; stop the server, "
            "put the data folder back, and start again"
        )


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


def told(size: float) -> str:
    """A number of bytes for people."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 / 10 else f"{size / 2**20:.0f} MiB"
