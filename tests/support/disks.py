"""A disk that the kernel says is full: a small file system, or, where none may be mounted, a limit on the size of files."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Disk:
    """``folder`` lies on it; ``own`` says whether it is a file system of its own, ``full`` what the kernel answers."""

    folder: Path
    own: bool

    @property
    def full(self) -> str:
        """The reason that a failure must give."""
        return os.strerror(errno.ENOSPC if self.own else errno.EFBIG)

    def fill(self, pids: Sequence[int]) -> None:
        """Leave no room; ``pids`` are the processes that write."""
        if not self.own:
            self._limit(pids, 0)
            return
        with (self.folder / "filler").open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(4096))

    def free(self, pids: Sequence[int]) -> None:
        """Give the room back."""
        if self.own:
            (self.folder / "filler").unlink()
        else:
            self._limit(pids, resource.RLIM_INFINITY)

    def _limit(self, pids: Sequence[int], size: int) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


@contextmanager
def small_disk(folder: Path) -> Iterator[Disk]:
    """One of 2 MiB at ``folder``."""
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "unbind-test", folder], capture_output=True)
    try:
        yield Disk(folder, mounted.returncode == 0)
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", "--lazy", folder], check=True)
