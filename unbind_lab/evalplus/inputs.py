"""Inputs of MBPP+ as Python has them: JSON has lists where the tasks speak of tuples and sets, and texts for complex numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Arguments = Sequence[Any]


def _tuples(arguments: Arguments) -> list[Any]:
    """Every argument is a tuple."""
    return [tuple(one) for one in arguments]


def _of_tuples(arguments: Arguments) -> list[Any]:
    """Every argument is a list of tuples."""
    return [[tuple(item) for item in one] for one in arguments]


def _tuples_of_tuples(arguments: Arguments) -> list[Any]:
    return [tuple(tuple(item) for item in one) for one in arguments]


def _first_of_tuples(arguments: Arguments) -> list[Any]:
    """The first of two is a list of tuples."""
    return [[tuple(item) for item in arguments[0]], arguments[1]]


def _first(arguments: Arguments) -> list[Any]:
    return [tuple(arguments[0]), *arguments[1:]]


def _second(arguments: Arguments) -> list[Any]:
    return [arguments[0], tuple(arguments[1])]


def _sets(arguments: Arguments) -> list[Any]:
    """A list of sets; what is empty is a dictionary, as ``{}`` was written for it."""
    return [[set(item) if isinstance(item, list) and item else {} for item in arguments[0]]]


def _nested(arguments: Arguments) -> list[Any]:
    """One tuple of what stands in it, its lists as tuples."""
    return [tuple(tuple(item) if isinstance(item, list) else item for item in arguments[0])]


def _values(arguments: Arguments) -> list[Any]:
    """A dictionary of tuples first."""
    return [{key: tuple(one) for key, one in arguments[0].items()}, *arguments[1:]]


def _everywhere(given: Any) -> Any:
    return tuple(_everywhere(one) for one in given) if isinstance(given, list) else given


FORMS: tuple[tuple[Callable[[Arguments], Sequence[Any]], tuple[int, ...]], ...] = (
    (
        _tuples,
        (2, 116, 132, 143, 222, 261, 273, 394, 399, 421, 424, 429, 470, 560, 579, 596, 616, 630, 726, 740, 744, 809),
    ),
    (_of_tuples, (63, 64, 70, 94, 120, 237, 272, 299, 400, 409, 417, 438, 473, 614, 780)),
    (_tuples_of_tuples, (259, 401, 445)),
    (_first_of_tuples, (75, 413, 444, 753)),
    (_first, (250, 307, 405, 446, 617, 720, 763, 808)),
    (_second, (106, 750)),
    (_sets, (115,)),
    (_nested, (278,)),
    (_values, (722,)),
    (_everywhere, (580, 615, 791)),
    (lambda arguments: [float(arguments[0]), complex(arguments[1])], (124,)),
    (lambda arguments: [complex(arguments[0])], (252,)),
)
_FORM = {number: form for form, numbers in FORMS for number in numbers}


def deserialised(name: str, inputs: Sequence[Arguments]) -> list[Sequence[Any]]:
    """The inputs of the task ``name`` (``Mbpp/2``), each a sequence of arguments, in the types that it is written for."""
    form = _FORM.get(int(name.removeprefix("Mbpp/")), list)
    return [form(arguments) for arguments in inputs]
