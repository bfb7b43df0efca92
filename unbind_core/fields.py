"""The metadata of a module file, field by field: every type and every number, before a module is made of it.

A file may come from anybody who can write to a folder, so nothing of it is used before it was looked at.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from unbind_core.partitions import are_whole_numbers

DTYPES = ("float32", "bfloat16", "float16", "float64")
NAME = "[A-Za-z0-9][A-Za-z0-9._-]{0,63}"  # a whole name of a module
MOST_NESTED = 16  # levels of the free fields: reports have four
_LARGEST = 2.0**127  # what single precision, in which modules are applied, can hold


def field_problems(described: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Every (field, what is wrong with it) of a file's metadata, less its format and checksum."""
    yield from _object_problems("", described, _FIELDS)
    if isinstance(described.get("model"), dict):
        yield from _object_problems("model.", described["model"], _MODEL)


def is_number(value: Any) -> bool:
    """Whether this is a number, no boolean, that stays finite in single precision."""
    return type(value) in (int, float) and -_LARGEST <= value <= _LARGEST  # NaN is not


def numerics_problem(value: Any) -> str | None:
    """What is wrong with a module's ``calibrated``, if anything."""
    if not isinstance(value, Mapping) or set(value) != {"dtype", "quantisation"}:
        return "must be an object of dtype and quantisation"
    if value["dtype"] not in DTYPES:
        return f"must name a dtype of {', '.join(DTYPES)}"
    if value["quantisation"] is not None and not (_is_text(value["quantisation"]) and value["quantisation"]):
        return "must name the quantisation as text, or null"
    return None


def _object_problems(prefix: str, given: Mapping[str, Any], fields: Mapping[str, _Rule]) -> Iterator[tuple[str, str]]:
    for name, (holds, needed) in fields.items():
        if name in given and not holds(given[name]):
            yield f"{prefix}{name}", f"must be {needed}"
        elif name not in given and name not in _MAY_BE_MISSING:
            yield f"{prefix}{name}", "is missing"
    for name in given:
        if name not in fields:
            yield f"{prefix}{_shown(name)}", "is unknown"


def _shown(name: Any) -> str:
    return ascii(name)[1:-1][:80]


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and _plain(value, 0)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**31


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_free(value: Any) -> bool:
    return isinstance(value, dict) and _plain(value, MOST_NESTED)


_HALF = re.compile("[\ud800-\udfff]")  # of a character: JSON may hold such


def _plain(given: Any, levels: int) -> bool:
    """Whether any program can read this: text, finite numbers, nested no deeper than ``levels``."""
    waiting: list[tuple[Iterable[Any], int]] = [((given,), levels)]
    while waiting:
        values, levels = waiting.pop()
        for value in values:
            kind = type(value)
            if kind is float:
                if not math.isfinite(value):
                    return False
            elif kind is str:
                if not value.isascii() and _HALF.search(value) is not None:
                    return False
            elif kind is int:
                if not -(2**63) <= value < 2**63:
                    return False
            elif kind is dict or kind is list:
                if levels <= 0:
                    return False
                if kind is dict:
                    waiting.append((value, 0))
                waiting.append((value.values() if kind is dict else value, levels - 1))
            elif kind is not bool and value is not None:
                return False
    return True


_Rule = tuple[Callable[[Any], bool], str]
_TEXT: _Rule = (_is_text, "text")
_NUMBER: _Rule = (is_number, "a finite number in single precision")
_COUNT_OR_NULL: _Rule = (lambda value: value is None or _is_count(value), "a whole number below 2**31, or null")
_NUMBER_OR_NULL: _Rule = (lambda value: value is None or is_number(value), "a finite number, or null")
_COUNT: _Rule = (_is_count, "a whole number, not negative and below 2**31")
_FREE: _Rule = (_is_free, f"an object of text and finite numbers, nested at most {MOST_NESTED} levels")
_MAY_BE_MISSING = ("detector", "window", "tau_close", "hold")
_MODEL: Mapping[str, _Rule] = {"fingerprint": _TEXT, "name": _TEXT, "hidden_size": _COUNT, "num_layers": _COUNT}
_FIELDS: Mapping[str, _Rule] = {
    "name": _TEXT,
    "layer": _COUNT,
    "s_ref": _NUMBER,
    "tau": _NUMBER,
    "kappa": _NUMBER,
    "quantile": _NUMBER_OR_NULL,
    "model": (lambda value: isinstance(value, dict), "an object"),
    "forms": (_is_texts, "a list of texts"),
    "partitions": (are_whole_numbers, "an object of lists of row indices"),
    "budgets": _FREE,
    "measured": _FREE,
    "forget_digest": _TEXT,
    "created_at": _TEXT,
    "versions": _FREE,
    "settings": _FREE,
    "detector": _TEXT,
    "window": _COUNT,
    "first": _COUNT,
    "least": _COUNT,
    "tau_close": _NUMBER_OR_NULL,
    "hold": _COUNT_OR_NULL,
    "correction": _TEXT,
    "policy": _TEXT,
    "calibrated": (
        lambda value: numerics_problem(value) is None,
        f"an object of dtype ({', '.join(DTYPES)}) and quantisation",
    ),
}
