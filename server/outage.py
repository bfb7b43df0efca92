"""Whether something can be seen from here, and since when not; one line in the log when it goes and one when it is back."""

from __future__ import annotations

import asyncio
import logging
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
_APART = ThreadPoolExecutor(4, "apart")


async def apart(work: Callable[..., T], *arguments: object) -> T:
    """``work(*arguments)`` on a thread that nothing has which waits for registry or store: of the event loop's own there are as
    few as six, and one that says nothing may have them all.
    """
    return await asyncio.get_running_loop().run_in_executor(_APART, partial(copy_context().run, work, *arguments))


class Outage:
    """Whether something works. Any thread may say so."""

    def __init__(self, what: str, log: logging.Logger, patience: float = float("inf")) -> None:
        """Where nobody has said for ``patience`` seconds that it works, it does not: a look at it may hang for long."""
        self._what, self._log, self._patience = what, log, patience
        self._lock = threading.Lock()
        self._reason: str | None = None
        self._lasts = False
        self._seen = time.monotonic()

    def awaited(self) -> None:
        """From now on somebody looks: until then nobody could say that it works, however long a start took."""
        self._seen = time.monotonic()

    def begins(self, error: BaseException) -> None:
        """It failed; where the error is ``lasting``, it fails until this process ends, whatever else works."""
        lasts = bool(getattr(error, "lasting", False))
        said = error if lasts else getattr(error, "orig", None) or error
        reason = " ".join(f"{type(error).__name__}: {said}".split())[:300]
        with self._lock:
            if self._reason is None:
                self._log.error("%s: fails (%s); what is loaded is served, and it is tried again", self._what, reason)
            if lasts or not self._lasts:
                self._reason = reason
            self._lasts = self._lasts or lasts

    def ends(self) -> bool:
        """It worked; whether it had failed before."""
        with self._lock:
            if self._lasts:
                return False
            failed = self._reason is not None
            if failed:
                self._log.warning("%s: works again", self._what)
            self._reason, self._seen = None, time.monotonic()
            return failed

    def tried(self, work: Callable[[], object]) -> None:
        """Say whether it works by whether ``work`` raises OSError."""
        try:
            work()
        except OSError as error:
            self.begins(error)
        else:
            self.ends()

    @property
    def age(self) -> float:
        """Seconds since it worked; where nobody has looked yet, since that is awaited, or else since this was made."""
        return time.monotonic() - self._seen

    @property
    def told(self) -> str | None:
        """What does not work, for how long and why, in one sentence; None where it works."""
        with self._lock:
            reason = self._reason
        if reason is None and self.age < self._patience:
            return None
        return f"{self._what}: has not answered for {self.age:.0f} s ({reason or 'it says nothing'})"


class Writing(Outage):
    """Whether a folder can be written to; nothing of what is tried is kept."""

    def __init__(self, folder: Path, log: logging.Logger) -> None:
        super().__init__("writing to the data folder", log)
        self._folder = folder

    async def look(self) -> None:
        """Write a few bytes: what may keep from it is no room, no right, or a disk that turned read-only."""
        await apart(self.tried, self._write)

    def _write(self) -> None:
        with tempfile.TemporaryFile(dir=self._folder, buffering=0) as file:
            file.write(bytes(16))
