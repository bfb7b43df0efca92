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
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from server.registry.jobs import Claim
from server.registry.refusals import AWAY, CancelRequested, JointOutdated, LeaseLost, Refusal
from server.registry.registry import open_registry
from server.registry.tables import JobKind, JobState, ModuleState
from server.settings import Settings
from server.sources import written_out
from server.worker.hands import Child
from server.worker.locks import device
from server.worker.made import new_module
from server.worker.patience import POLL_SECONDS, REPORT_SECONDS, Patience, StageFailed, Stopping
from server.worker.plan import MEASUREMENTS, OVER_BUDGET, PLANS, UNSETTLED, Task, ends, progress_of, remark, withheld
from server.worker.preparing import Preparer
from server.worker.process import without_settings
from server.worker.scratch import Scratch
from unbind_core.files import remove_unfinished

log = logging.getLogger("unbind.worker")
TICK_SECONDS = 0.25
STARTING_SECONDS = 300.0  # until a child's first sign of life


class ChildDied(Exception):
    """The child process ended without a word."""


class Worker:
    """One worker process: its name, the registry, and a child process that waits for the next job."""

    def __init__(
        self,
        settings: Settings,
        stop: threading.Event,
        command: Sequence[str],
        beat: Callable[[], None] | None = None,
        told: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> None:
        """``command`` starts a child process; ``beat`` is called all the time, for whoever watches over this process, and ``told``
        hears what was done (``Work.take``).
        """
        self.settings, self.stop, self._command = settings, stop, command
        self._beat, self._told = beat or (lambda: None), told or (lambda _: None)
        self.owner = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        self.registry = open_registry(settings, existing=beat is not None)  # a server has made it; lost, it stays so
        self._patience = Patience(settings, self.registry, stop, self._beat)
        self._scratch = Scratch(settings, self._patience)
        self._standby: Child | None = None
        self._furthest = 0.0  # of the job at hand: a stage that is done again takes nothing back
        self._preparer = Preparer(settings, self._child)

    def run(self) -> None:
        """Claim and work until asked to stop. No job's error ends the loop."""
        remove_unfinished(self.settings.data_dir / "cache")
        log.info("worker %s waits for takedowns", self.owner)
        try:
            while not self.stop.is_set():
                worked = False
                self._beat()
                try:
                    self._ready()
                    with device(self.settings) as free:
                        claim = self._claim() if free else None
                        if claim is None and free:
                            self._preparer.go_on()
                        else:
                            self._preparer.stop()
                        if claim is not None:
                            worked = True
                            self.work(claim)
                except AWAY:
                    pass  # said where it was met
                except Exception as error:  # noqa: BLE001 - told of there
                    self._patience.met(error)
                    self._preparer.stop()
                if not worked:
                    self.stop.wait(POLL_SECONDS)
        finally:
            self._preparer.stop()
            if self._standby is not None:
                self._standby.kill()
            self._scratch.close()
            self.registry.close()

    def _ready(self) -> Child:
        """A child that waits for a task, its imports behind it."""
        if self._standby is None or not self._standby.alive:
            self._standby = self._child()
        return self._standby

    def _child(self) -> Child:
        return Child(self._command, without_settings(os.environ) | written_out(self.settings))

    def _claim(self) -> Claim | None:
        settings = self.settings
        with self._patience.asking():
            return self.registry.jobs.claim(self.owner, time.time(), settings.lease_seconds, settings.max_attempts)

    def work(self, claim: Claim) -> None:
        """Bring one job to an end, or give it back."""
        log.info("job %s (%s), attempt %d", claim.job_id, claim.module, claim.attempt)
        jobs, self._furthest = self.registry.jobs, 0.0
        try:
            stages = self._run(claim, self._task(claim, self._finished(claim)))
            for measured in range(1, MEASUREMENTS + 1):
                try:
                    self._conclude(claim, stages)
                    break
                except JointOutdated as error:
                    log.info("job %s: %s", claim.job_id, error)
                    if measured == MEASUREMENTS:
                        self._conclude(claim, stages, unsettled=str(error))
                        break
                kept = {stage: done for stage, done in stages.items() if stage != "joint"}
                stages = self._run(claim, self._task(claim, kept))
            self._scratch.tidy(claim, stages)
        except LeaseLost as error:
            log.warning("%s; another worker goes on", error)
        except Stopping:
            with suppress(*AWAY), self._patience.asking():
                jobs.release(claim, time.time())
        except CancelRequested:
            self._end(claim, JobState.CANCELLED, error="cancelled")
        except StageFailed as error:
            self._end(claim, JobState.FAILED, error=str(error))
        except ChildDied as error:
            log.warning("job %s: %s", claim.job_id, error)
            if claim.attempt < self.settings.max_attempts:
                self._patience.insist(lambda: jobs.release(claim, time.time(), died=True))
            else:
                self._end(claim, JobState.FAILED, error=f"{error}, {claim.attempt} times; see the worker's log")
        except Exception as error:
            log.exception("job %s failed", claim.job_id)
            self._end(claim, JobState.FAILED, error=f"{type(error).__name__}: {error}"[:2000])
        finally:
            self._scratch.clear()
            remove_unfinished(self.settings.data_dir / "cache")

    # The stages, run by the child.

    def _run(self, claim: Claim, task: Task) -> dict[str, Any]:
        """All finished stages of the job, earlier attempts' included."""
        if not task.todo:
            return dict(task.done)
        child, self._standby = self._ready(), None
        try:
            child.give(task)
            return self._listen(claim, task, child)
        finally:
            child.kill()

    def _listen(self, claim: Claim, task: Task, child: Child) -> dict[str, Any]:
        """Follow a child through its stages until it has finished them; see that it lives."""
        done: dict[str, Any] = dict(task.done)
        stage, reported, changes = task.todo[0], 0.0, dict[str, Any]()
        signs, silent = 0, 0.0
        while True:
            self._beat()
            try:
                said = child.messages.get(timeout=TICK_SECONDS)
            except queue.Empty:
                said = {}
                # by this process's own waiting, so that its own standstill is not held against the child
                signs, silent = child.signs, silent + TICK_SECONDS if signs == child.signs else 0.0
                limit = self.settings.hang_seconds if signs else STARTING_SECONDS
                if silent > limit:
                    child.kill()
                    reason = f"the process of stage '{stage}' gave no sign of life for {limit:g} s (hang_seconds)"
                    raise ChildDied(reason) from None
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
                self._furthest = max(self._furthest, progress_of(claim.kind, stage, 0.0))
                changes |= {"stage": stage, "stage_progress": 0.0, "stage_started_at": time.time()}
                changes |= {"progress": self._furthest}
            if "progress" in said:
                self._furthest = max(self._furthest, progress_of(claim.kind, stage, said["progress"]))
                changes |= {"stage_progress": said["progress"], "progress": self._furthest, "message": said["message"]}
            if "done" in said:
                done[stage] = json.loads((Path(task.folder) / f"{stage}.json").read_text(encoding="utf-8"))
                self._scratch.keep(claim, Path(task.folder))
                self._patience.insist(lambda: self.registry.jobs.stage_done(claim, stage, done[stage]))  # noqa: B023
                self._told({"stage": stage, "seconds": done[stage]["seconds"]})
            if time.monotonic() - reported >= REPORT_SECONDS:
                reported, sent, changes = time.monotonic(), changes, {}
                self._patience.report(claim, sent)

    def _finished(self, claim: Claim) -> dict[str, Any]:
        """The stages that earlier attempts finished and whose files are there."""
        done: dict[str, Any] = {}
        for stage in PLANS[claim.kind]:
            finished = claim.stages.get(stage)
            # A version from before stages told their files may have left others than this one reads.
            files = (finished or {}).get("files")
            if finished is None or files is None or not self._scratch.has(claim, str(finished["folder"]), files):
                break  # where files are missing, it is done again, and all that rests on it
            done[stage] = finished
        return done

    def _task(self, claim: Claim, done: dict[str, Any]) -> Task:
        modules = self.registry.modules
        about = claim.module_id if claim.kind != JobKind.TAKEDOWN else None
        module = self._patience.insist(lambda: modules.get(about)) if about else None
        jointly = "joint" in PLANS[claim.kind]
        in_force = self._patience.insist(modules.in_force) if jointly else []
        replaces = self._patience.insist(lambda: self.registry.superseding(claim.takedown_id)) if jointly else []
        folder = self._scratch.job(claim.job_id) / f"attempt-{claim.fence}"
        return Task(
            job_id=claim.job_id,
            kind=claim.kind,
            name=claim.module,
            forget_digest=claim.forget_digest,
            options=dict(claim.options),
            folder=str(folder),
            done=done,
            module=module,
            others=in_force,
            replaces=replaces,
            rows=str(self._scratch.rows(claim)),
        )

    # What goes to the registry.

    def _end(self, claim: Claim, state: JobState, **fields: Any) -> None:
        try:
            self._patience.insist(lambda: self.registry.jobs.finish(claim, state, time.time(), **fields))
            self._ended(claim, state, fields.get("error", ""))
        except (LeaseLost, Stopping) as error:
            log.warning("job %s could not be ended: %s", claim.job_id, str(error) or "the worker leaves")

    def _conclude(self, claim: Claim, stages: dict[str, Any], unsettled: str = "") -> None:
        """What the finished stages mean: a published module, or an answer without one.

        Raises JointOutdated where other modules are in force than the joint cost was measured beside; with the reason
        ``unsettled`` the module is published and not activated.
        """
        results = {stage: finished["result"] for stage, finished in stages.items()}
        outcome = next((found for stage in results if (found := ends(stage, results[stage]))), None)
        result = {"outcome": outcome or "verified", **results}
        if said := remark(results):
            result["remark"] = said
        beside, said = results.get("joint", {}).get("beside", ()), withheld(results, claim.options, unsettled)
        within = not said
        if said:
            result["joint_verdict"] = said
        if outcome is not None or claim.kind == JobKind.VERIFY:
            self._insist_finish(claim, result)
        elif claim.kind == JobKind.ACTIVATE:
            result["outcome"] = ModuleState.ACTIVE if within else UNSETTLED if unsettled else OVER_BUDGET
            self._insist_finish(claim, result, activate=within, beside=beside)
        else:
            published = results["publish"]
            folder = self._scratch.job(claim.job_id) / stages["publish"]["folder"]
            # a stale worker ends here, and leaves nothing in the store
            self._patience.report(claim, {"message": "publishing"})
            key = self._patience.put((folder / published["file"]).read_bytes(), claim)
            self._insist_finish(claim, result, module=new_module(claim, published, key, within), beside=beside)

    def _insist_finish(self, claim: Claim, result: dict[str, Any], **fields: Any) -> None:
        def write() -> None:
            try:
                self.registry.jobs.finish(claim, JobState.SUCCEEDED, time.time(), result=result, **fields)
            except Refusal as error:
                raise StageFailed(str(error)) from None

        self._patience.insist(write)
        made = "its module is made" if "module" in fields else result["outcome"]
        self._ended(claim, JobState.SUCCEEDED, result.get("joint_verdict") or made)

    def _ended(self, claim: Claim, state: JobState, told: str) -> None:
        said = f": {told}" if told not in ("", state) else ""
        log.info("job %s (%s) %s%s", claim.job_id, claim.module, state, said)
        self._told({"ended": state})
