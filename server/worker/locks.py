"""Locks between the workers of a data directory: files that the kernel unlocks when their holder ends, however it ends."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import IO

from server.registry.files import private


def take(data_dir: Path, name: str) -> IO[str] | None:
    """The lock of this name until it is closed; None where another holds it."""
    lock = (private(data_dir / "locks") / f"{name}.lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    return lock
