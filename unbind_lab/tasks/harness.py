"""Runs programs that models wrote, each in a process of its own with little memory and time, no network and no files to write."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

from unbind_lab.tasks.child import ask
from unbind_lab.tasks.sets import Task

SECONDS, CPU_SECONDS = 10.0, 2  # by the clock, and of the processor
MEMORY = 256 * 2**20
MOST_OUTPUT = 1 << 20


@dataclass(frozen=True)
class Passed:
    """Whether all base tests, and all tests, give what the solution gives."""

    base: bool
    extended: bool


def run(program: str, tests: Sequence[str], *, seconds: float = SECONDS, memory: int = MEMORY) -> list[str] | None:
    """What each expression is after the program, as :mod:`sandboxed` says it; None where the program fails or is stopped."""
    asked = {"program": program, "tests": list(tests), "memory": memory, "processor": CPU_SECONDS}
    found = ask(asked, seconds=seconds, most=MOST_OUTPUT)
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
