"""While nothing waits: what takedowns need of the retain rows, by a child process of its own, which is killed when a job comes.

What it has finished is in the cache by then. Workers of one data directory take turns: the second finds what the first has made.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import IO

from server.registry.files import private
from server.registry.tables import JobKind
from server.settings import Settings
from server.worker.hands import Child
from server.worker.locks import take
from server.worker.plan import Task
from unbind_core.files import remove_unfinished

log = logging.getLogger("unbind.worker")


class Preparer:
    """One worker's part in it; ``start`` makes a child process."""

    def __init__(self, settings: Settings, start: Callable[[], Child]) -> None:
        self._settings, self._start = settings, start
        self._child: Child | None = None
        self._turn: IO[str] | None = None
        self._done = not settings.prepare

    def go_on(self) -> None:
        """Begin where it is this worker's turn, or see how far it is."""
        if self._done:
            return
        if self._child is None:
            self._turn = take(self._settings.data_dir, "prepare")
            if self._turn is None:
                return
            self._child = self._start()
            folder = str(private(self._settings.data_dir / "cache"))
            self._child.give(Task("", JobKind.PREPARE, "", "", {}, folder, {}))
        while not self._child.messages.empty():
            said = self._child.messages.get()
            if said is None or "failed" in said or "finished" in said:
                reason = (said or {"failed": "its process died"}).get("failed")
                log.info("retain rows: %s", f"could not be prepared ({reason})" if reason else "prepared for takedowns")
                self._done = True
                self.stop()
                return

    def stop(self) -> None:
        """End the child, if there is one; what is unfinished goes, what is finished stays."""
        if self._child is not None:
            self._child.kill()
            self._child = None
            remove_unfinished(self._settings.data_dir / "cache")
        if self._turn is not None:
            self._turn.close()
            self._turn = None
