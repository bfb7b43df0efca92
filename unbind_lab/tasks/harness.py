"""Runs programs that models wrote, each in a process of its own with little memory and time, no network and no files to write."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from unbind_lab.tasks import sandboxed
from unbind_lab.tasks.sets import Task

SECONDS = 10.0  # by the clock; of the processor it has sandboxed.CPU_SECONDS
MEMORY = 256 * 2**20
MOST_OUTPUT = 1 << 20


@dataclass(frozen=True)
class Passed:
    """Whether all base tests, and all tests, give what the solution gives."""

    base: bool
    extended: bool


def run(program: str, tests: Sequence[str], *, seconds: float = SECONDS, memory: int = MEMORY) -> list[str] | None:
    """What each expression is after the program, as :mod:`sandboxed` says it; None where the program fails or is stopped."""
    asked = json.dumps({"program": program, "tests": list(tests), "memory": memory}).encode()
    with tempfile.TemporaryDirectory() as folder:
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", str(Path(sandboxed.__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={},
            start_new_session=True,
        )
        try:
            told, _ = child.communicate(asked, timeout=seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.communicate()
    try:
        found = json.loads(told[:MOST_OUTPUT])
    except ValueError:
        return None
    right = isinstance(found, list) and len(found) == len(tests) and all(isinstance(one, str) for one in found)
    return found if right else None


def check(tasks: Sequence[Task], written: Sequence[str]) -> list[Passed]:
    """Of each task, whether what was ``written`` after its prompt does what its solution does."""
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        return list(pool.map(_passed, tasks, written))


def _passed(task: Task, written: str) -> Passed:
    tests = (*task.base, *task.extended)
    right, own = _right(task), run(task.program(written), tests)
    if own is None:
        return Passed(False, False)
    some = len(task.base)
    return Passed(own[:some] == right[:some], own == right)


@cache
def _right(task: Task) -> list[str]:
    found = run(task.program(task.solution), (*task.base, *task.extended))
    assert found is not None, f"the solution of {task.name} fails"
    return found
