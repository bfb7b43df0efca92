"""Stages that take milliseconds and leave what real ones leave: the worker, its child process and the paths are the real ones.

``python -m tests.support.fast_stages`` is the child; ``python -m tests.support.fast_stages worker [PARENT]`` a worker that uses it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from server.registry.files import load_forget, save_json
from server.sources import load_settings
from server.worker import child
from server.worker.plan import Task
from tests.support import markers
from unbind_core.errors import DataError
from unbind_core.files import write_whole
from unbind_core.progress import Progress

SECONDS = float(os.environ.get("FAST_STAGE_SECONDS", "0.05"))
STEPS = 5


def _work(name: str, seconds: float, progress: Callable[[Progress], None]) -> None:
    for step in range(STEPS):
        time.sleep(seconds / STEPS)
        progress(Progress(name, step + 1, STEPS))


def _stage(name: str) -> child.Stage:
    def run(task: Task, progress: Callable[[Progress], None]) -> dict[str, Any]:
        _work(name, float(task.options.get("seconds", SECONDS)), progress)
        if task.options.get("fails") == name:
            raise DataError(f"{name} cannot go on: no space left on device")
        if task.options.get("dies") == name:
            os._exit(9)
        if task.options.get("breaks") == name:
            raise KeyError("a row of protected code")
        if task.options.get("waits") == name:  # until a test lets it go on
            while not (Path(task.folder).parent / "go").exists():
                time.sleep(0.02)
        folder = Path(task.folder)
        if name == "check":
            if task.options.get("reads"):
                rows = load_forget(Path(task.rows))
                save_json(folder / "scores.json", [row.continuation for row in rows])
            return {"memorised": not task.options.get("unknown")}
        if name == "fit":
            write_whole(folder / "module.safetensors", lambda path: path.write_bytes(os.urandom(4096)))
            return {"outcome": task.options.get("fit", "calibrated"), "attempt": folder.name}
        if name == "joint":
            return _joint(task)
        if name == "publish":
            made = folder.parent / task.done["fit"]["folder"] / "module.safetensors"
            markers.here(markers.CHILD[0])
            write_whole(folder / "final.safetensors", lambda path: path.write_bytes(made.read_bytes()))
            markers.here(markers.CHILD[1])
            return {"digest": child_digest(made), "file": "final.safetensors", "fingerprint": "model"}
        return {"before": {}, "after": {}}

    return run


def _joint(task: Task) -> dict[str, Any]:
    """Options: ``dear``, any two modules together are over the budget; ``stale``, others are in force whenever it has measured."""
    if not task.measures_jointly:
        return {"measured": False, "within": True, "beside": None}
    others = task.beside("model")
    beside = sorted(other["digest"] for other in others)
    if task.options.get("stale"):
        return {"measured": True, "within": True, "beside": ["0" * 64]}
    if not others or not task.options.get("dear"):
        return {"measured": bool(others), "within": True, "beside": beside}
    cost = {"kl": 0.5, "nll_increase": 0.5}
    pairs = [{"modules": [task.name, other["name"]], **cost} for other in others]
    modules = [task.name, *(other["name"] for other in others)]
    return {
        "measured": True,
        "within": False,
        "beside": beside,
        "modules": modules,
        **cost,
        "pairs": pairs,
        "budgets": {"kl": 0.01, "nll": 0.01},
    }


def child_digest(path: Path) -> str:
    """SHA-256 of a file."""
    import hashlib

    return hashlib.sha256(path.read_bytes()).hexdigest()


STAGES = {name: _stage(name) for name in ("check", "fit", "verify", "joint", "publish", "prepare")}


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        import logging

        from server.worker.process import main, python

        markers.mark_worker()
        logging.basicConfig(level="INFO", stream=sys.stderr, format="%(asctime)s %(name)s %(message)s")
        parent = int(sys.argv[2]) if len(sys.argv) > 2 else None
        main(load_settings(environment=os.environ), parent, python("tests.support.fast_stages"))
    else:
        saved = child.save_json

        def save(path: Path, value: Any) -> None:
            saved(path, value)
            if path.name == "publish.json":
                markers.here(markers.CHILD[2])

        child.save_json = save
        child.main(lambda: STAGES)
