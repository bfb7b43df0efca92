"""A text of JSON read as what its strings mean: ``\\n`` ends a line there, and is not a backslash and an n.

The arguments of a tool call are such a text, and so is an answer to which a JSON format was asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

_MEANINGS = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}  # every other character stands for itself


class Unescaped:
    """Reads as the text comes, and knows which characters that came stand for which that are meant."""

    def __init__(self) -> None:
        self._begun = ""  # an escape that has not come whole
        self._place = 0  # characters that came
        self._ends: list[int] = []  # of each character that is meant and was not let go, where it ended in what came
        self._passed = 0

    def read(self, text: str) -> str:
        """What more is meant."""
        if not self._begun and "\\" not in text:
            self._ends.extend(range(self._place + 1, self._place + len(text) + 1))
            self._place += len(text)
            return text
        meant = []
        for character in text:
            self._place += 1
            found, self._begun = _next(self._begun, character)
            if found:
                meant.append(found)
                self._ends.append(self._place)
        return "".join(meant)

    def passed(self, count: int) -> int:
        """How many of the characters that came may go, once ``count`` more of those that are meant may."""
        if count:
            self._passed = self._ends[count - 1]
            del self._ends[:count]
        # Nothing of an escape goes before the whole, except that nothing is left to wait for.
        return self._passed


def meant(begun: str, text: str) -> tuple[str, str]:
    """What ``text`` means after an escape that has ``begun``, and what of the newest escape has come."""
    if not begun and "\\" not in text:
        return text, ""
    found = []
    for character in text:
        meaning, begun = _next(begun, character)
        found.append(meaning)
    return "".join(found), begun


class Reading(Protocol):
    """Reads one answer otherwise than as it stands, piece by piece: what a client is told may hold a run that the text does not."""

    def take(self, text: str) -> str:
        """What more there is to read once ``text`` has come."""

    def fork(self) -> Reading:
        """The same as far as it has come; what either takes from here on is not the other's."""


class Escapes:
    """What the strings of JSON in an answer mean, or in another reading ``of`` it: an escape can hide a letter of a run."""

    def __init__(self, of: Reading | None = None, begun: str = "") -> None:
        """``begun``: what has come of an escape that is not whole."""
        self._of, self._begun = of, begun

    def take(self, text: str) -> str:
        """See ``Reading``."""
        found, self._begun = meant(self._begun, text if self._of is None else self._of.take(text))
        return found

    def fork(self) -> Escapes:
        """See ``Reading``."""
        return Escapes(self._of and self._of.fork(), self._begun)


AS_JSON: tuple[Callable[[], Reading], ...] = (Escapes,)


def _next(begun: str, character: str) -> tuple[str, str]:
    """What one more character completes, "" while more is to come; and what has begun then: an escape, the first half of a pair of
    them, or both. A half is said by itself and again in the whole: no guard reads it, and it may have no other.
    """
    half, escape = ("", begun) if begun.startswith("\\") else (begun[:1], begun[1:])
    if not escape and character != "\\":
        return character, ""
    found = _meaning(escape + character)
    if found is None:
        return "", begun + character
    if half and "\udc00" <= found <= "\udfff":
        return (half + found).encode("utf-16", "surrogatepass").decode("utf-16"), ""
    return found, found if "\ud800" <= found <= "\udbff" else ""


def _meaning(escape: str) -> str | None:
    """What an escape stands for; None while more of it is to come. What is no escape stands for itself."""
    if len(escape) < 2:
        return None
    kind = escape[1]
    if kind != "u":
        return _MEANINGS.get(kind, kind)
    digits = escape[2:]
    if len(digits) < 4 and all(digit in "0123456789abcdefABCDEF" for digit in digits):
        return None
    try:
        return chr(int(digits, 16))
    except ValueError:
        return digits[-1]
