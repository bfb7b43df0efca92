"""Locks between the workers of a data directory: files that the kernel unlocks when their holder ends, however it ends."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from server.settings import Settings
from unbind_core.files import locked


def take(data_dir: Path, name: str) -> IO[str] | None:
    """The lock of this name until it is closed; None where another holds it. Raises OSError, also where the data folder is lost."""
    folder = data_dir / "locks"
    folder.mkdir(exist_ok=True, mode=0o700)  # in it alone: made anew it would be in the way of the one to be put back
    try:
        return locked(folder / f"{name}.lock", wait=False)
    except BlockingIOError:
        return None


@contextmanager
def device(settings: Settings) -> Iterator[bool]:
    """Whether this worker may use the device now: one heavy job at a time on each of a machine's devices."""
    lock = take(settings.data_dir, f"{socket.gethostname()}-{settings.fitting_device.replace(':', '-')}")
    try:
        yield lock is not None
    finally:
        if lock is not None:
            lock.close()
