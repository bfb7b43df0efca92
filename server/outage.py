"""One line when something goes away, one when it is back, however often it is asked in between."""

from __future__ import annotations

import logging
import threading


class Outage:
    """Whether something works. Any thread may say so."""

    def __init__(self, what: str, log: logging.Logger) -> None:
        self._what, self._log = what, log
        self._lock = threading.Lock()
        self._reason: str | None = None

    def begins(self, error: BaseException) -> None:
        """It failed."""
        reason = " ".join(f"{type(error).__name__}: {getattr(error, 'orig', None) or error}".split())[:300]
        with self._lock:
            if self._reason is None:
                self._log.error("%s: fails (%s); what is loaded is served, and it is tried again", self._what, reason)
            self._reason = reason

    def ends(self) -> None:
        """It worked."""
        with self._lock:
            if self._reason is not None:
                self._log.warning("%s: works again", self._what)
            self._reason = None
