"""The worker's loop: claim a job, have a child process run its stages under the lease, report, publish; survive any job's error.

It holds no tensors, so that it can report, cancel and take its leave at any moment. Started by ``unbind serve`` (and then ends
with it) or alone by ``unbind worker``.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy.exc import OperationalError

from server.registry.files import job_dir, tidy
from server.registry.jobs import Claim
from server.registry.modules import NewModule
from server.registry.objects import ObjectStore
from server.registry.refusals import CancelRequested, LeaseLost, Refusal
from server.registry.registry import open_registry
from server.registry.tables import JobKind, JobState, ModuleState, Origin
from server.settings import PREFIX, Settings
from server.worker.hands import Child
from server.worker.locks import take
from server.worker.plan import OVER_BUDGET, PLANS, Task, ends, progress_of, remark, verdict
from server.worker.preparing import Preparer
from unbind_core.files import remove_unfinished

log = logging.getLogger("unbind.worker")
COMMAND = (sys.executable, "-m", "server.worker.child")
POLL_SECONDS = 0.5
TICK_SECONDS = 0.25
REPORT_SECONDS = 1.0
PATIENCE_SECONDS = 60.0  # how long a finished module waits for a store that does not answer


class Stopping(Exception):
    """The worker itself is asked to leave."""


class ChildDied(Exception):
    """The child process ended without a word."""


class StageFailed(Exception):
    """A stage said why it cannot go on."""


class Worker:
    """One worker process: its name, the registry, and a child process that waits for the next job."""

    def __init__(self, settings: Settings, stop: threading.Event, command: Sequence[str] = COMMAND) -> None:
        self.settings, self.stop, self._command = settings, stop, command
        self.owner = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        self.registry = open_registry(settings)
        self.objects = ObjectStore(settings.published_store)
        self._standby: Child | None = None
        self._preparer = Preparer(settings, self._child)

    def run(self) -> None:
        """Claim and work until asked to stop. No job's error ends the loop."""
        remove_unfinished(self.settings.data_dir / "cache")
        log.info("worker %s waits for takedowns", self.owner)
        try:
            while not self.stop.is_set():
                worked = False
                try:
                    self._ready()
                    with _device(self.settings) as free:
                        claim = self._claim() if free else None
                        if claim is None and free:
                            self._preparer.go_on()
                        else:
                            self._preparer.stop()
                        if claim is not None:
                            worked = True
                            self.work(claim)
                except Exception:
                    log.exception("the worker met an error; going on")
                if not worked:
                    self.stop.wait(POLL_SECONDS)
        finally:
            self._preparer.stop()
            if self._standby is not None:
                self._standby.kill()
            self.registry.close()

    def _ready(self) -> Child:
        """A child that waits for a task, its imports behind it."""
        if self._standby is None or not self._standby.alive:
            self._standby = self._child()
        return self._standby

    def _child(self) -> Child:
        environment = {key: value for key, value in os.environ.items() if not key.startswith(PREFIX)}
        return Child(self._command, environment | self.settings.to_environment())

    def _claim(self) -> Claim | None:
        settings = self.settings
        return self.registry.jobs.claim(self.owner, time.time(), settings.lease_seconds, settings.max_attempts)

    def work(self, claim: Claim) -> None:
        """Bring one job to an end, or give it back."""
        log.info("job %s (%s), attempt %d", claim.job_id, claim.module, claim.attempt)
        jobs, child = self.registry.jobs, self._ready()
        self._standby = None
        try:
            stages = self._run(claim, child)
            self._conclude(claim, stages)
            tidy(self.settings.data_dir, claim.job_id, stages)
        except LeaseLost as error:
            log.warning("%s; another worker goes on", error)
        except Stopping:
            jobs.release(claim, time.time())
        except CancelRequested:
            self._end(claim, JobState.CANCELLED, error="cancelled")
        except StageFailed as error:
            self._end(claim, JobState.FAILED, error=str(error))
        except ChildDied as error:
            log.warning("job %s: %s", claim.job_id, error)
            if claim.attempt < self.settings.max_attempts:
                self._insist(claim, lambda: jobs.release(claim, time.time(), died=True))
            else:
                self._end(claim, JobState.FAILED, error=f"{error}, {claim.attempt} times; see the worker's log")
        except Exception as error:
            log.exception("job %s failed", claim.job_id)
            self._end(claim, JobState.FAILED, error=f"{type(error).__name__}: {error}"[:2000])
        finally:
            child.kill()
            remove_unfinished(self.settings.data_dir / "cache")

    # The stages, run by the child.

    def _run(self, claim: Claim, child: Child) -> dict[str, Any]:
        """All finished stages of the job, earlier attempts' included."""
        task = self._task(claim)
        done: dict[str, Any] = dict(task.done)
        if not task.todo:
            return done
        child.give(task)
        stage, reported, changes = task.todo[0], 0.0, dict[str, Any]()
        while True:
            try:
                said = child.messages.get(timeout=TICK_SECONDS)
            except queue.Empty:
                said = {}
            if self.stop.is_set():
                raise Stopping
            if said is None:
                raise ChildDied(f"the process of stage '{stage}' ended with status {child.wait()}")
            if "failed" in said:
                raise StageFailed(said["failed"])
            if "finished" in said:
                return done
            if "stage" in said:
                stage, reported = said["stage"], 0.0
                begun = progress_of(claim.kind, stage, 0.0)
                changes |= {"stage": stage, "stage_progress": 0.0, "stage_started_at": time.time(), "progress": begun}
            if "progress" in said:
                whole = progress_of(claim.kind, stage, said["progress"])
                changes |= {"stage_progress": said["progress"], "progress": whole, "message": said["message"]}
            if "done" in said:
                done[stage] = json.loads((Path(task.folder) / f"{stage}.json").read_text(encoding="utf-8"))
                self._insist(claim, lambda: self.registry.jobs.stage_done(claim, stage, done[stage]))  # noqa: B023
            if time.monotonic() - reported >= REPORT_SECONDS:
                reported, sent, changes = time.monotonic(), changes, {}
                self._report(claim, sent)

    def _task(self, claim: Claim) -> Task:
        live: list[dict[str, Any]] = []
        module = (
            self.registry.modules.get(claim.module_id) if claim.kind != JobKind.TAKEDOWN and claim.module_id else None
        )
        if "joint" in PLANS[claim.kind]:
            # Files that were only put into the folder apply where a request names them, and promise nothing together.
            active = [record for record in self.registry.modules.versions() if record["state"] == ModuleState.ACTIVE]
            live = [record for record in active if record["takedown_id"] or record["scope"]]
        folder = job_dir(self.settings.data_dir, claim.job_id) / f"attempt-{claim.fence}"
        done: dict[str, Any] = {}
        for stage in PLANS[claim.kind]:
            finished = claim.stages.get(stage)
            if finished is None or not (folder.parent / str(finished.get("folder"))).is_dir():
                break  # where the files are gone, it is done again, and all that rests on it
            done[stage] = finished
        return Task(
            job_id=claim.job_id, kind=claim.kind, name=claim.module, forget_digest=claim.forget_digest,
            options=dict(claim.options), folder=str(folder), done=done, module=module, others=live,
        )  # fmt: skip

    # What goes to the registry.

    def _report(self, claim: Claim, changes: dict[str, Any]) -> None:
        try:
            self.registry.jobs.report(claim, time.time(), self.settings.lease_seconds, **changes)
        except OperationalError as error:
            log.warning("job %s: the registry does not answer (%s); the work goes on", claim.job_id, error.orig)

    def _insist(self, claim: Claim, write: Any) -> None:
        """Write to the registry, however long it does not answer; ends with the lease or with the worker."""
        while True:
            try:
                write()
            except OperationalError as error:
                log.warning("job %s: the registry does not answer (%s); trying again", claim.job_id, error.orig)
                if self.stop.wait(POLL_SECONDS):
                    raise Stopping from None
            else:
                return

    def _end(self, claim: Claim, state: JobState, **fields: Any) -> None:
        try:
            self._insist(claim, lambda: self.registry.jobs.finish(claim, state, time.time(), **fields))
        except (LeaseLost, Stopping) as error:
            log.warning("job %s could not be ended: %s", claim.job_id, error)

    def _conclude(self, claim: Claim, stages: dict[str, Any]) -> None:
        """What the finished stages mean: a published module, or an answer without one."""
        results = {stage: finished["result"] for stage, finished in stages.items()}
        outcome = next((found for stage in results if (found := ends(stage, results[stage]))), None)
        result = {"outcome": outcome or "verified", **results}
        if said := remark(results):
            result["remark"] = said
        joint = results.get("joint", {"within": True})
        if not joint["within"]:
            result["joint_verdict"] = verdict(joint)
        if outcome is not None or claim.kind == JobKind.VERIFY:
            self._insist_finish(claim, result)
        elif claim.kind == JobKind.ACTIVATE:
            result["outcome"] = ModuleState.ACTIVE if joint["within"] else OVER_BUDGET
            self._insist_finish(claim, result, activate=joint["within"])
        else:
            published = results["publish"]
            folder = job_dir(self.settings.data_dir, claim.job_id) / stages["publish"]["folder"]
            self._report(claim, {"message": "publishing"})  # a stale worker ends here, and leaves nothing in the store
            key = self._put((folder / published["file"]).read_bytes(), claim)
            self._insist_finish(claim, result, module=self._new_module(claim, published, key, bool(joint["within"])))

    def _insist_finish(self, claim: Claim, result: dict[str, Any], **fields: Any) -> None:
        def write() -> None:
            try:
                self.registry.jobs.finish(claim, JobState.SUCCEEDED, time.time(), result=result, **fields)
            except Refusal as error:
                raise StageFailed(str(error)) from None

        self._insist(claim, write)

    def _new_module(self, claim: Claim, published: dict[str, Any], key: str, within: bool) -> NewModule:
        options = claim.options
        activation = str(options.get("activation") or "auto")
        return NewModule(
            name=claim.module, digest=published["digest"], fingerprint=published["fingerprint"], file=key,
            origin=Origin.TAKEDOWN, activation=activation if within else "manual", job_id=claim.job_id,
            takedown_id=claim.takedown_id, scope=str(options.get("scope") or ""),
            effective_at=options.get("effective_at"), expires_at=options.get("expires_at"),
        )  # fmt: skip

    def _put(self, data: bytes, claim: Claim) -> str:
        """Keep the module in the store, which may be away for a while. Raises StageFailed with the reason."""
        patient_until = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                return self.objects.put(data)
            except OSError as error:
                if time.monotonic() > patient_until:
                    raise StageFailed(
                        f"the module could not be put into the store ({error}); mend it and retry the job"
                    ) from None
                log.warning("job %s: %s; trying again", claim.job_id, error)
            if self.stop.wait(REPORT_SECONDS):
                raise Stopping
            self._report(claim, {"message": "waiting for the module store"})


@contextmanager
def _device(settings: Settings) -> Iterator[bool]:
    """Whether this worker may use the device now: one heavy job at a time on each of a machine's devices."""
    lock = take(settings.data_dir, f"{socket.gethostname()}-{settings.device.replace(':', '-')}")
    try:
        yield lock is not None
    finally:
        if lock is not None:
            lock.close()
