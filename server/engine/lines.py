"""The lines of an answer as they come: what editors bound an answer by, beside its tokens."""

from __future__ import annotations


class Lines:
    """Follows one answer's text. ``least``: whitespace characters that every line but the first must begin with."""

    def __init__(self, least: int = 0) -> None:
        self.any_ended = False
        self._least = least
        self._indent: int | None = None  # so far, of the line that begins; None in the middle of a line

    def take(self, text: str) -> tuple[str, bool]:
        """The text before the first line that is indented less, its own whitespace kept, and whether there is such a line.

        An empty line counts as one that is not indented.
        """
        for at, character in enumerate(text):
            if self._indent is not None and character not in " \t":
                if self._indent < self._least:
                    return text[:at], True
                self._indent = None
            elif self._indent is not None:
                self._indent += 1
            if character == "\n":
                self.any_ended, self._indent = True, 0
        return text, False
