"""Stages for a fleet's workers that take moments: the worker, its child process and its stores are the real ones, the fit is not.

``python -m server.bench.fleet.stages`` is the child, ``... worker`` a worker that uses it. The module that comes out has random
directions and is a real file for the model that is served.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from server.registry.files import load_forget, save_json
from server.sources import load_settings
from server.worker import child
from server.worker.plan import Task
from unbind_core.identity import ModelIdentity
from unbind_core.progress import Progress

SECONDS = float(os.environ.get("FLEET_STAGE_SECONDS", "0.3"))
STEPS = 5


def check(task: Task) -> dict[str, Any]:
    """The rows are there."""
    return {"memorised": bool(load_forget(Path(task.rows)))}


def fit(task: Task) -> dict[str, Any]:
    """A module of random directions, the same for the same job."""
    from server.bench.filter import random_module

    identity = ModelIdentity(**json.loads(Path(os.environ["FLEET_IDENTITY"]).read_text(encoding="utf-8")))
    seed = int.from_bytes(hashlib.sha256(task.job_id.encode()).digest()[:4], "big")
    made = replace(random_module(identity, seed, layer=1), name=task.name, forget_digest=task.forget_digest)
    made.save(Path(task.folder) / "module.safetensors")
    return {"outcome": "calibrated"}


def verify(task: Task) -> dict[str, Any]:
    """As if it had been measured."""
    save_json(Path(task.folder) / "exhibits.json", {})
    return {"before": {}, "after": {}}


def joint(_: Task) -> dict[str, Any]:
    """As if it cost nothing."""
    return {"measured": False, "within": True, "beside": None}


def publish(task: Task) -> dict[str, Any]:
    """The file as it will be in the store."""
    made = (Path(task.folder).parent / str(task.done["fit"]["folder"]) / "module.safetensors").read_bytes()
    (Path(task.folder) / "final.safetensors").write_bytes(made)
    fingerprint = json.loads(Path(os.environ["FLEET_IDENTITY"]).read_text(encoding="utf-8"))["fingerprint"]
    return {"digest": hashlib.sha256(made).hexdigest(), "file": "final.safetensors", "fingerprint": fingerprint}


def _stage(work: Callable[[Task], dict[str, Any]]) -> child.Stage:
    def run(task: Task, progress: Callable[[Progress], None]) -> dict[str, Any]:
        for step in range(STEPS):
            time.sleep(SECONDS / STEPS)
            progress(Progress(work.__name__, step + 1, STEPS))
        return work(task)

    return run


STAGES = {work.__name__: _stage(work) for work in (check, fit, verify, joint, publish)}

if __name__ == "__main__":
    if sys.argv[1] == "worker":
        from server.worker.process import main, python

        logging.basicConfig(level="INFO", stream=sys.stderr, format="%(asctime)s %(name)s %(message)s")
        main(load_settings(environment=os.environ), None, python("server.bench.fleet.stages"))
    else:
        import server.bench.filter  # noqa: F401 - torch, before there is a task

        child.main(lambda: STAGES)
