"""The worker's loop: claim a job, run its stages under the lease, report, publish; survive any job's error.

Started by ``unbind serve`` (and then ends with it) or alone by ``unbind worker``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from server.registry.registry import CancelRequested, Claim, LeaseLost, Registry
from server.registry.tables import JobState, open_database
from server.settings import Settings
from server.worker.stages import (
    ACTIVE,
    INEFFECTIVE,
    NOTHING_TO_REMOVE,
    RUN,
    SHARES,
    STAGES,
    StageContext,
    finite,
    publish,
)
from unbind_core.architecture import LoadedModel, load_model
from unbind_core.errors import Cancelled, UnbindError
from unbind_core.progress import Progress

log = logging.getLogger("unbind.worker")
POLL_SECONDS = 0.5
REPORT_SECONDS = 0.3


class Stopping(Cancelled):
    """The worker itself is asked to leave."""


class Holding:
    """A claimed job while it is worked on: keeps the lease alive, carries progress, and hears of cancellation."""

    def __init__(self, registry: Registry, claim: Claim, lease: float, stop: threading.Event) -> None:
        self._registry, self._claim, self._lease, self._stop = registry, claim, lease, stop
        self._broken: Exception | None = None
        self._over = threading.Event()
        self._reported = 0.0
        self._done = 0.0  # progress of the whole job, never backwards
        self._base = self._share = 0.0
        self._within = 0.0
        self._step = ""

    def __enter__(self) -> Holding:
        """Start the heartbeat."""
        self._beat = threading.Thread(target=self._heartbeat, name="unbind-heartbeat", daemon=True)
        self._beat.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End the heartbeat."""
        self._over.set()
        self._beat.join()

    def begin(self, stage: str) -> None:
        """The next stage starts."""
        self._base = sum(SHARES[before] for before in STAGES[: STAGES.index(stage)])
        self._share, self._within, self._step = SHARES[stage], 0.0, ""
        self._done = max(self._done, self._base)
        self._report(stage=stage, message="", progress=self._done)

    def progress(self, progress: Progress) -> None:
        """The callback for ``unbind_core``. Raises Cancelled where the work must stop."""
        if self._stop.is_set():
            raise Stopping("the worker is shutting down")
        if self._broken is not None:
            raise Cancelled(str(self._broken)) from self._broken
        if progress.stage != self._step:
            # How many steps a stage has is not known beforehand: each takes half of what is left of the stage's share.
            self._within += (1 - self._within) / 2 if self._step else 0.0
            self._step = progress.stage
        part = self._within + (1 - self._within) / 2 * progress.done / max(progress.total, 1)
        self._done = max(self._done, self._base + self._share * part)
        now = time.monotonic()
        if now - self._reported >= REPORT_SECONDS:
            self._reported = now
            text = f"{progress.stage} {progress.done}/{progress.total}"
            self._report(progress=self._done, message=f"{text} {progress.message}".strip())

    def _report(self, **changes: Any) -> None:
        try:
            self._registry.report(self._claim, time.time(), self._lease, **changes)
        except (LeaseLost, CancelRequested) as error:
            self._broken = error
            raise Cancelled(str(error)) from error

    def _heartbeat(self) -> None:
        while not self._over.wait(min(self._lease / 4, 1.0)):
            try:
                self._registry.report(self._claim, time.time(), self._lease)
            except (LeaseLost, CancelRequested) as error:
                self._broken = error
                return
            except Exception:
                log.exception("heartbeat of job %s failed; trying again", self._claim.job_id)


class Worker:
    """One worker process's state: its name, the registry, and the model once the first job needs it."""

    def __init__(self, settings: Settings, stop: threading.Event) -> None:
        self.settings, self.stop = settings, stop
        self.owner = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        self.registry = Registry(open_database(settings.database))
        self._loaded: LoadedModel | None = None

    def run(self) -> None:
        """Claim and work until asked to stop. No job's error ends the loop."""
        log.info("worker %s waits for takedowns", self.owner)
        while not self.stop.is_set():
            try:
                claim = self.registry.claim(
                    self.owner, time.time(), self.settings.lease_seconds, self.settings.max_attempts
                )
            except Exception:
                log.exception("the registry cannot be reached; trying again")
                claim = None
            if claim is None:
                self.stop.wait(POLL_SECONDS)
            else:
                self.work(claim)
        self.registry.close()

    def work(self, claim: Claim) -> None:
        """Bring one job to an end, or give it back."""
        log.info("job %s (%s), attempt %d", claim.job_id, claim.module, claim.attempt)
        try:
            with Holding(self.registry, claim, self.settings.lease_seconds, self.stop) as holding:
                self._stages(claim, holding)
        except LeaseLost as error:
            log.warning("%s; another worker goes on", error)
        except Stopping:
            self.registry.release(claim, time.time())
        except Cancelled as error:
            if isinstance(error.__cause__, LeaseLost):
                log.warning("%s; another worker goes on", error)
            else:
                self._end(claim, JobState.CANCELLED, error="cancelled")
        except UnbindError as error:
            self._end(claim, JobState.FAILED, error=str(error))
        except Exception as error:
            log.exception("job %s failed", claim.job_id)
            self._end(claim, JobState.FAILED, error=f"{type(error).__name__}: {error}"[:2000])

    def _end(self, claim: Claim, state: JobState, **fields: Any) -> None:
        with contextlib.suppress(LeaseLost):
            self.registry.finish(claim, state, time.time(), **fields)

    def _stages(self, claim: Claim, holding: Holding) -> None:
        holding.begin("check")
        context = StageContext(
            settings=self.settings,
            loaded=self._model(),
            job_id=claim.job_id,
            name=claim.module,
            forget_digest=claim.forget_digest,
            options=dict(claim.options),
            progress=holding.progress,
        )
        results: dict[str, Any] = {stage: done["result"] for stage, done in claim.stages.items()}
        outcome = ACTIVE
        for stage, run in RUN.items():
            if stage not in results:
                holding.begin(stage)
                started = time.monotonic()
                with _calm(context):
                    results[stage] = finite(run(context))
                self.registry.stage_done(claim, stage, time.monotonic() - started, results[stage])
            if stage == "check" and not results[stage]["memorised"]:
                outcome = NOTHING_TO_REMOVE
                break
            if stage == "fit" and results[stage]["outcome"] == INEFFECTIVE:
                outcome = INEFFECTIVE
                break
        result = {"outcome": outcome, **results}
        if outcome != ACTIVE:
            self.registry.finish(claim, JobState.SUCCEEDED, time.time(), result=result)
            return
        holding.begin("publish")
        self.registry.finish(
            claim, JobState.SUCCEEDED, time.time(), result=result, publish=lambda: publish(context, results["verify"])
        )

    def _model(self) -> LoadedModel:
        if self._loaded is None:
            settings = self.settings
            loaded = load_model(
                settings.model, settings.adapter, dtype=getattr(torch, settings.dtype), device=settings.device
            )
            name = settings.served_name
            self._loaded = replace(loaded, identity=replace(loaded.identity, name=name))
        return self._loaded


@contextlib.contextmanager
def _calm(context: StageContext) -> Iterator[None]:
    """A stage leaves no tensors behind on an accelerator that the server shares."""
    try:
        yield
    finally:
        if context.settings.device.startswith("cuda"):
            torch.cuda.empty_cache()
