"""A worker's dealings with the registry and the store, which may be away for a while: asked again, and told of once.

Meanwhile the lease is kept where it can be, and whoever watches over the worker sees that it lives.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from server.registry.jobs import Claim
from server.registry.objects import ObjectStore, in_thread
from server.registry.refusals import AWAY
from server.registry.registry import Registry
from server.settings import Settings
from server.worker.plan import PATIENCE_SECONDS

log = logging.getLogger("unbind.worker")
POLL_SECONDS = 0.5
REPORT_SECONDS = 1.0
T = TypeVar("T")


class Stopping(Exception):
    """The worker is asked to leave, or the job: another attempt goes on with it."""


class StageFailed(Exception):
    """Why a job cannot go on."""


class Patience:
    """One worker's; ``beat`` is called all the time."""

    def __init__(self, settings: Settings, registry: Registry, stop: threading.Event, beat: Callable[[], None]) -> None:
        self._settings, self._registry, self._stop, self._beat = settings, registry, stop, beat
        self._objects = ObjectStore(settings.published_store)
        self._away = False  # whether the registry did not answer when it was last asked
        self._met = ""  # what kept this worker from asking for a job
        self._untold: tuple[str, int, dict[str, Any]] = "", 0, {}  # of a job under a fence, what it did not take

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Say once that the registry does not answer, and once that it does again, however often it is asked."""
        try:
            yield
        except AWAY as error:
            if not self._away:
                reason = str(getattr(error, "orig", error)).strip().partition("\n")[0]
                log.warning("the registry does not answer (%s); it is asked again, and work goes on meanwhile", reason)
            self._away = True
            raise
        if self._away:
            log.info("the registry answers again")
        self._away, self._met = False, ""

    def met(self, error: Exception) -> None:
        """Tell of an error that ends no worker, once where it is the same at each try and nothing was asked between, as on a disk
        that is read-only by now.
        """
        met, self._met = self._met, f"{type(error).__name__}: {error}"
        if self._met != met:
            log.error("the worker met an error; it tries again, and goes on once it can", exc_info=error)

    def report(self, claim: Claim, changes: dict[str, Any]) -> None:
        """Renew the lease and tell of progress, if the registry answers; else the next report tells of it, too.

        Raises LeaseLost, CancelRequested; Stopping where the data folder is gone: what a job leaves would make it anew, in the way
        of the one to be put back.
        """
        with suppress(OSError):  # a file system that does not answer has lost nothing yet
            if not self._settings.data_dir.is_dir():
                log.warning("job %s is given up until the data folder is back", claim.job_id)
                raise Stopping
        job, fence, untold = self._untold
        changes = {**(untold if (job, fence) == (claim.job_id, claim.fence) else {}), **changes}
        self._untold = claim.job_id, claim.fence, changes
        with suppress(*AWAY), self.asking():
            self._registry.jobs.report(claim, time.time(), self._settings.lease_seconds, **changes)
            self._untold = "", 0, {}

    def insist(self, ask: Callable[[], T]) -> T:
        """What the registry answers, however long it does not. Raises Stopping, and whatever else ``ask`` raises."""
        while True:
            self._beat()
            with suppress(*AWAY), self.asking():
                return ask()
            if self._stop.wait(POLL_SECONDS):
                raise Stopping

    def put(self, data: bytes, claim: Claim) -> str:
        """Keep a module in the store; its key. Raises StageFailed where the store is away for PATIENCE_SECONDS."""
        return self.store(
            claim, "module store", "the module could not be put into the store", lambda: self._objects.put(data)
        )

    def store(self, claim: Claim, which: str, failed: str, work: Callable[[], T]) -> T:
        """What the ``which`` store answers. Raises StageFailed, which begins with ``failed``, where it is away too
        long; FileNotFoundError at once, as waiting brings nothing back.
        """
        patient_until, met = time.monotonic() + PATIENCE_SECONDS, ""
        while True:
            self._beat()  # what fails at once, as on a full disk, leaves no other sign of life
            try:
                return self._meanwhile(claim, work)
            except FileNotFoundError:
                raise
            except OSError as error:
                if time.monotonic() > patient_until:
                    raise StageFailed(f"{failed} ({error}); mend it and retry the job") from None
                if met != str(error):  # once, where it is the same at each try
                    log.warning("job %s: %s; it is tried again for %.0f s", claim.job_id, error, PATIENCE_SECONDS)
                met = str(error)
            if self._stop.wait(REPORT_SECONDS):
                raise Stopping
            self.report(claim, {"message": f"waiting for the {which}"})

    def _meanwhile(self, claim: Claim, work: Callable[[], T]) -> T:
        """The result of what may block for long."""
        result = in_thread(work)
        while not wait([result], REPORT_SECONDS).done:
            self._beat()
            if self._stop.is_set():
                raise Stopping
            self.report(claim, {})
        return result.result()
