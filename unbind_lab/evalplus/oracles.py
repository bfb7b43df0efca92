"""When a value is right: EvalPlus 0.3.1's comparison with the solution's value, its tolerances and its special tasks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from unbind_lab.evalplus.problems import HUMAN_EVAL, MBPP, Problem
from unbind_lab.tasks.values import Derived, Digest, Opaque

SETS = frozenset(  # MBPP+: the order and number of what is in a value do not count
    (
        *("similar_elements", "find_char_long", "common_in_nested_lists", "extract_singly"),
        *("larg_nnum", "intersection_array", "find_dissimilar", "Diff"),
    )
)
PRESENT = frozenset(("check_str", "text_match_three", "text_starta_endb"))  # MBPP+: whether there is a value
RELATIVE, ABSOLUTE = 1e-7, 1e-6  # of floats; the second where the file names none


@dataclass(frozen=True)
class Given:
    """What a program gave for an input: its value, and the set of it where the task is one of ``SETS``."""

    value: Any
    as_set: Any = None


def sets(problem: Problem) -> bool:
    """Whether a set of a value is asked for."""
    return problem.kind == MBPP and problem.entry in SETS


def plain(problem: Problem) -> bool:
    """Whether what equals the solution's value is right, with no look at the task."""
    return not sets(problem) and not (problem.kind == MBPP and problem.entry in PRESENT)


def never(problem: Problem) -> bool:
    """Whether the task is solved by nobody: EvalPlus 0.3.1 calls HumanEval/32 with its inputs and counts none of them as done, so
    that even its own solution fails.
    """
    return problem.kind == HUMAN_EVAL and problem.entry == "find_zero"


def floats(value: Any) -> bool:
    """A float, or a list or tuple of floats that is not empty."""
    if isinstance(value, Digest):
        return value.floats
    if isinstance(value, Derived):
        value = value.value
    if isinstance(value, list | tuple) and value:
        return all(isinstance(one, float) for one in value)
    return isinstance(value, float)


def tolerance(before: float, right: Any) -> float:
    """The absolute tolerance at an input, ``before`` being that at the one before it: from its first float on it is not 0."""
    return ABSOLUTE if before == 0 and floats(right) else before


def agrees(problem: Problem, arguments: Sequence[Any], given: Given, right: Given, atol: float) -> bool:
    """Whether the value for these arguments is right. ``atol``: of ``tolerance``. Never raises."""
    try:
        equal = _equal(problem, arguments, given, right)
        return equal if equal or atol == 0 else _close(given.value, right.value, atol)
    except Exception:  # noqa: BLE001 - whatever the value is, what it cannot be compared with it is not
        return False


def _equal(problem: Problem, arguments: Sequence[Any], given: Given, right: Given) -> bool:
    value, wanted = _whole(given.value), _whole(right.value)
    if problem.kind == MBPP:
        if problem.entry in SETS:
            return bool(given.as_set == right.as_set)
        if problem.entry in PRESENT:
            there = wanted is not None
            return there == (value if isinstance(given.value, bool) else value is not None)
        if problem.entry == "are_equivalent":
            return True
        if problem.entry == "sum_div" and value == 0:
            return True
        if problem.entry == "surface_Area" and value != wanted:
            return bool(abs(value - _surface(*arguments)) <= problem.atol)
        if problem.entry == "digit_distance_nums" and value == _digit_distance(*arguments):
            return True
    return bool(value == wanted)


def _whole(value: Any) -> Any:
    return value.value if isinstance(value, Derived) else value


def _close(value: Any, right: Any, atol: float) -> bool:
    """As numpy finds numbers close, and only values of the very same type."""
    if type(value) is not type(right) or isinstance(value, Opaque | Derived):
        return False
    if isinstance(right, list | tuple) and len(value) != len(right):
        return False
    with np.errstate(all="ignore"):
        return bool(np.allclose(value, right, rtol=RELATIVE, atol=atol))


def _surface(base_edge: float, height: float) -> int:
    """Mbpp/581: of a pyramid whose height is meant as the distance of the apex from the base."""
    slant = math.sqrt((base_edge / 2) ** 2 + height**2)
    return round(base_edge**2 + 4 * (base_edge * slant) / 2)


def _digit_distance(one: int, other: int) -> int:
    """Mbpp/558: the shorter number has zeros in front."""
    texts = str(one), str(other)
    longest = max(map(len, texts))
    return sum(abs(int(a) - int(b)) for a, b in zip(*(text.zfill(longest) for text in texts), strict=True))
