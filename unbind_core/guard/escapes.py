"""A text of JSON read as what its strings mean: ``\\n`` ends a line there, and is not a backslash and an n.

The arguments of a tool call are such a text, and so is an answer to which a JSON format was asked for.
"""

from __future__ import annotations

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
            if not self._begun and character != "\\":
                meant.append(character)
                self._ends.append(self._place)
                continue
            self._begun += character
            if (found := _meaning(self._begun)) is not None:
                meant.append(found)
                self._ends.append(self._place)
                self._begun = ""
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
        if not begun and character != "\\":
            found.append(character)
            continue
        begun += character
        if (meaning := _meaning(begun)) is not None:
            found.append(meaning)
            begun = ""
    return "".join(found), begun


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
