"""Whether programs solve their tasks: each is called with the base and with the extended inputs, in a child for either.

Right values and times are those of the task's solution, which runs in such a child too. Values are compared here, not where the
program runs. The limits are the paper's (Appendix A.3) and EvalPlus's: ``max(1 s, 4 times the solution's time)`` an input, 10 s of
the clock for the base inputs and 10 s for the extended ones, 4 GiB of memory. A program may import the standard library and numpy.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from unbind_core.errors import UnbindError
from unbind_core.progress import ProgressCallback, counted, silent
from unbind_lab.evalplus.oracles import Given, agrees, never, plain, sets, tolerance
from unbind_lab.evalplus.problems import Problem
from unbind_lab.tasks.child import ask
from unbind_lab.tasks.harness import Passed
from unbind_lab.tasks.values import decode, encode

LEAST_LIMIT, TIMES = 1.0, 4.0  # seconds an input may take, and how much longer than the solution
OUTER = 10.0  # seconds of the clock for all inputs
START = 1.0  # and for a child to begin
SOLUTION = 600.0  # for a solution
MEMORY = 4 * 2**30
MOST = 1 << 28  # bytes of the values as JSON
_DIGEST = '["digest"'
PACKAGES = str(Path(np.__file__).parents[1])


@dataclass(frozen=True)
class Right:
    """What a solution gave for an input: its value as JSON, the set of it where one is asked for, the absolute tolerance there and
    the seconds that a program may take.
    """

    value: str
    as_set: str
    atol: float
    limit: float
    plain: bool  # what is told the same is right


@dataclass(frozen=True)
class Solved:
    """What a solution gave for all inputs, and the seconds that it took beside its calls: to begin, and to tell values."""

    rights: tuple[Right, ...]
    beside: float


@dataclass(frozen=True)
class Part:
    """A problem's base or extended inputs. Equal to one of the same objects."""

    problem: Problem
    inputs: Sequence[Sequence[Any]]

    def __hash__(self) -> int:
        return hash((id(self.problem), id(self.inputs)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Part) and self.problem is other.problem and self.inputs is other.inputs


def judge(
    problems: Sequence[Problem],
    programs: Sequence[str],
    progress: ProgressCallback = silent,
    *,
    seconds: float = OUTER,
    memory: int = MEMORY,
) -> list[Passed]:
    """Of each problem, whether its program gives what the solution gives. Raises UnbindError where a solution fails."""

    def passed(problem: Problem, program: str) -> Passed:
        parts = Part(problem, problem.base), Part(problem, problem.plus)
        return Passed(*(solves(part, program, seconds=seconds, memory=memory) for part in parts))

    workers = max(1, (os.cpu_count() or 1) // 2)  # the others are left to what measures time
    with ThreadPoolExecutor(workers) as pool:
        found = pool.map(passed, problems, programs)
        return [one for one, _ in counted(zip(found, problems, strict=True), len(problems), "tasks", progress)]


def solves(part: Part, program: str, *, seconds: float = OUTER, memory: int = MEMORY) -> bool:
    """Whether a program gives what is right for each input."""
    if never(part.problem):
        return False
    solved = solution(part, memory)
    found = _told(part, program, solved, seconds, memory)
    if found is None:
        return False
    differ = [
        number for number, (one, told) in enumerate(zip(solved.rights, found, strict=True)) if not _same(one, told)
    ]
    unknown = [number for number in differ if _DIGEST in (solved.rights[number].value + json.dumps(found[number]))]
    known = set(differ).difference(unknown)
    if not all(_agrees(part, number, found[number], solved.rights[number]) for number in known):
        return False
    return not unknown or _whole(part, program, unknown, solved, seconds, memory)


def _whole(part: Part, program: str, numbers: Sequence[int], solved: Solved, seconds: float, memory: int) -> bool:
    """The same of large values whose digests differ, which may still be close, or equal and of other types."""
    right = _solution(part, memory, numbers)
    if right is None:
        return False  # too large to be told
    found = _told(part, program, replace(right, rights=solved.rights), seconds, memory, numbers)
    return found is not None and all(_agrees(part, number, found[number], right.rights[number]) for number in numbers)


def _told(
    part: Part, program: str, solved: Solved, seconds: float, memory: int, whole: Sequence[int] = ()
) -> list[Any] | None:
    """What the program gives; None where it fails or takes too long."""
    limits = [one.limit for one in solved.rights]
    calls = min(seconds, sum(limits))
    found = _call(part, program, limits, seconds=calls + START + TIMES * solved.beside, memory=memory, whole=whole)
    try:
        return found if found is not None and sum(one[0] for one in found) <= calls + START else None
    except (TypeError, LookupError):
        return None


def _same(one: Right, told: Any) -> bool:
    return one.plain and json.dumps(told[1]) == one.value and "NaN" not in one.value  # which equals nothing


def _agrees(part: Part, number: int, told: Any, one: Right) -> bool:
    try:
        _, value, *further = told
        given = Given(decode(value), decode(further[0]) if further else None)
        wanted = Given(decode(json.loads(one.value)), decode(json.loads(one.as_set)) if one.as_set else None)
    except (ValueError, TypeError, LookupError, RecursionError, ArithmeticError, AttributeError):
        return False  # not what the child says of a value
    return agrees(part.problem, part.inputs[number], given, wanted, one.atol)


@lru_cache(maxsize=2048)
def solution(part: Part, memory: int = MEMORY) -> Solved:
    """What is right. Raises UnbindError where the solution fails."""
    found = _solution(part, memory)
    if found is None:
        raise UnbindError(
            f"--evalplus: the solution of {part.problem.name} fails here; it may take {memory >> 30} GiB and {SOLUTION:g} s"
        )
    return found


def _solution(part: Part, memory: int, whole: Sequence[int] = ()) -> Solved | None:
    begun = time.monotonic()
    program, limits = part.problem.prompt + part.problem.solution, [SOLUTION] * len(part.inputs)
    found = _call(part, program, limits, seconds=SOLUTION, memory=memory, whole=whole)
    if found is None:
        return None
    beside = time.monotonic() - begun - sum(one[0] for one in found)
    return Solved(tuple(_rights(part.problem, found)), beside)


def _rights(problem: Problem, found: Sequence[Any]) -> Iterator[Right]:
    atol = problem.atol
    for taken, value, *further in found:
        atol = tolerance(atol, decode(value))
        as_set = json.dumps(further[0]) if further else ""
        yield Right(json.dumps(value), as_set, atol, max(LEAST_LIMIT, TIMES * taken), plain(problem))


def _call(
    part: Part, program: str, limits: Sequence[float], *, seconds: float, memory: int, whole: Sequence[int]
) -> list[Any] | None:
    asked: dict[str, Any] = {
        "program": program,
        "entry": part.problem.entry,
        "inputs": [encode(one) for one in part.inputs],
        "limits": limits,
        "sets": sets(part.problem),
        "whole": whole,
        "memory": memory,
        "processor": int(seconds) + 1,
        "packages": PACKAGES if "numpy" in program else "",
    }
    found = ask(asked, seconds=seconds, most=MOST)
    return found if isinstance(found, list) and len(found) == len(part.inputs) else None
