"""Locks between the workers of a data directory: files that the kernel unlocks when their holder ends, however it ends."""

from __future__ import annotations

from pathlib import Path
from typing import IO

from server.registry.files import private
from unbind_core.files import locked


def take(data_dir: Path, name: str) -> IO[str] | None:
    """The lock of this name until it is closed; None where another holds it."""
    try:
        return locked(private(data_dir / "locks") / f"{name}.lock", wait=False)
    except BlockingIOError:
        return None
