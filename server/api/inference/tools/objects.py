"""The JSON of one call as it comes, a character at a time: its name, and its arguments as they stand."""

from __future__ import annotations

from server.api.inference.written import rewritable

ARGUMENTS = ("arguments", "parameters")


class Called:
    """One object ``{"name": ..., "arguments": {...}}``, keys in any order; with a ``name`` the object is the arguments."""

    def __init__(self, name: str | None = None) -> None:
        self.name = name
        self.ended = self.broken = False
        self._whole = name is not None
        self._depth = 0
        self._string = self._escaped = False
        self._key, self._in_value = "", False
        self._piece = ""  # of a key, or of the value of any key but the arguments
        self._arguments = ""  # that have come and were not asked for
        self._told = False  # some of them were
        self._given = False

    def take(self, text: str) -> int:
        """Go on by ``text``; how many characters of it belong to the object."""
        for at, character in enumerate(text):
            self._one(character)
            if self.ended or self.broken:
                return at + 1
        return len(text)

    def arguments(self) -> str:
        """What of the arguments has come since they were asked for last. What is no object comes whole, as what it means."""
        text = self._arguments if self._told else self._arguments.lstrip()
        if not (self._told or text.startswith("{")) and not self.ended:
            return ""
        if not self._told and not text.startswith("{"):
            text = self._meant(text)
        self._arguments = ""
        self._told = self._told or bool(text)
        return text

    def _meant(self, text: str) -> str:
        try:
            value = rewritable(text) if self._given else None
        except ValueError:
            return text
        return (value or "{}") if isinstance(value, str | None) else text

    def _one(self, character: str) -> None:
        if not self._depth and character != "{":
            self.broken = True
            return
        opened, was_string = self._depth, self._string
        self._follow(character)
        if self._whole:
            self._arguments += character
            self.ended = not self._depth
            return
        if opened == 0:
            return
        ends = not self._depth or (opened == 1 and character == "," and not was_string)
        if ends:
            self._value()
            self.ended = not self._depth
        elif self._in_value and self._key in ARGUMENTS:
            self._arguments += character
            self._given = True
        elif not self._in_value and opened == 1 and character == ":" and not was_string:
            self._key, self._piece, self._in_value = _string(self._piece) or "", "", True
        else:
            self._piece += character

    def _follow(self, character: str) -> None:
        """Depth and strings."""
        if self._string:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._string = False
        elif character == '"':
            self._string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1

    def _value(self) -> None:
        """The value of a key has ended."""
        if self._in_value and self._key == "name" and self.name is None:
            self.name = _string(self._piece)
        self._piece, self._in_value = "", False


def _string(written: str) -> str | None:
    """What a string of JSON means; None where it is none."""
    try:
        found = rewritable(written)
    except ValueError:
        return None
    return found if isinstance(found, str) and found else None
