"""Values of programs as JSON, in full, so that they are compared where no program runs. Nothing that is read is executed.

What JSON has no form for is a list whose first element says its kind. A value of a class of the program's own is ``opaque``: it
equals nothing, whatever its ``__eq__`` says. One of a subclass of a type that is known is ``derived``: its contents as that type.
A large value is told by a ``digest`` of it, of which equal ones of the same types have the same. Few modules are imported here, as
every child has to.
"""

from __future__ import annotations

import marshal
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any

LARGEST = 1 << 53  # integers beyond it are in base 16, which no limit on digits holds for
LARGE = 1 << 16  # bytes; and that many elements of a sequence are looked at in one go
SEQUENCES: Mapping[str, Callable[[list[Any]], Any]] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
KNOWN = (str, float, int, complex, bytes, list, tuple, dict, set, frozenset)


class Opaque:
    """A value that cannot be told in full; only that there is one."""


class Derived:
    """``value`` is what it holds as a builtin type, which its own type is not."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Digest:
    """In place of a large value. ``floats``: whether that is a list or tuple of floats alone."""

    def __init__(self, floats: bool) -> None:
        self.floats = floats


def told(value: Any, *, whole: bool = False) -> Any:
    """``encode(value)``, or, unless it is wanted ``whole``, the digest of a large value."""
    if whole:
        return encode(value)
    some = type(value) in (list, tuple) and len(value) > LARGE
    try:
        if some:  # memory for a copy of all of it there may not be
            parts: Iterator[bytes] = (marshal.dumps(value[at : at + LARGE], 2) for at in range(0, len(value), LARGE))
        else:
            parts = iter([marshal.dumps(value, 2)])
        first = next(parts)
        if not some and len(first) <= LARGE:
            return encode(value)
        import hashlib

        found = hashlib.sha256(type(value).__name__.encode() + first)
        for part in parts:
            found.update(part)
    except ValueError:  # an object of another type is somewhere in it
        return encode(value)
    return ["digest", found.hexdigest(), type(value) in (list, tuple) and all(type(one) is float for one in value)]


def encode(value: Any) -> Any:
    """A JSON value. Raises RecursionError for what holds itself."""
    kind = type(value)
    if value is None or kind is bool or kind is str or kind is float:
        return value
    if kind is int:
        return value if -LARGEST < value < LARGEST else ["int", hex(value)]
    if kind is list or kind is tuple or kind is set or kind is frozenset:
        return [kind.__name__, *map(encode, value)]
    if kind is dict:
        return ["dict", *([encode(key), encode(one)] for key, one in value.items())]
    if kind is complex:
        return ["complex", value.real, value.imag]
    if kind is bytes:
        return ["bytes", value.hex()]
    return _other(value, kind)


def _other(value: Any, kind: type) -> Any:
    for known in KNOWN:
        if issubclass(kind, known):
            return ["derived", encode(_plain(value, known))]
    module = getattr(kind, "__module__", "")  # not every class has one
    if (module, kind.__name__) == ("fractions", "Fraction"):
        return ["fraction", hex(value.numerator), hex(value.denominator)]
    if (module, kind.__name__) == ("decimal", "Decimal"):
        return ["decimal", str(value)]
    if module == "numpy" and hasattr(value, "item") and not hasattr(value, "__len__"):
        return ["derived", encode(value.item())]  # a scalar
    if isinstance(value, Set):  # the keys of a dictionary
        return ["derived", ["set", *map(encode, value)]]
    return ["opaque"]


def _plain(value: Any, known: type) -> Any:
    """The contents by the builtin type's own methods, not by what the subclass makes of them."""
    if known is dict:
        return dict(dict.items(value))
    if known is int:
        return int.__add__(value, 0)
    if known is float:
        return float.__add__(value, 0.0)
    if known is complex:
        return complex.__add__(value, 0j)
    if known is str:
        return str.__str__(value)
    if known is bytes:
        return bytes.__getitem__(value, slice(None))
    return known(known.__iter__(value))  # type: ignore[attr-defined]


def decode(given: Any) -> Any:
    """The value, ``Opaque``, ``Digest`` or ``Derived`` at the top; within others what is derived is as what it holds.

    Raises ValueError, TypeError, LookupError or RecursionError for what ``encode`` does not give.
    """
    if isinstance(given, list) and given[0] == "derived":
        return Derived(_decoded(given[1]))
    if isinstance(given, list) and given[0] == "digest":
        return Digest(bool(given[2]))
    return _decoded(given)


def _decoded(told: Any) -> Any:
    if not isinstance(told, list):
        if isinstance(told, dict):
            raise TypeError("an object is no value")
        return told
    kind, given = told[0], told[1:]
    if kind in SEQUENCES:
        return SEQUENCES[kind]([_decoded(one) for one in given])
    if kind == "dict":
        return {_decoded(key): _decoded(one) for key, one in given}
    if kind == "derived":
        return _decoded(given[0])
    return Opaque() if kind == "opaque" else _number(kind, given)


def _number(kind: str, given: list[Any]) -> Any:
    if kind == "int":
        return int(given[0], 16)
    if kind == "complex":
        return complex(*given)
    if kind == "bytes":
        return bytes.fromhex(given[0])
    from decimal import Decimal  # slow to import, and seldom met
    from fractions import Fraction

    if kind == "fraction":
        return Fraction(*(int(one, 16) for one in given))
    if kind == "decimal":
        return Decimal(given[0])
    raise ValueError(f"{kind} is no kind of value")
