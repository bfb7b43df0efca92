"""What a client sent, as runs of lexemes: found when it is first asked about, and once for all the texts of its answers."""

from __future__ import annotations

from collections.abc import Callable

from unbind_core.guard.index import Secret
from unbind_core.guard.lexemes import readings, spelt


class Sent:
    """A text, asked for once, if at all; ``beside``: what the client sent besides, which other texts of it may share."""

    def __init__(self, text: Callable[[], str], beside: Sent | None = None) -> None:
        self._text, self._beside = text, beside
        self._found: dict[tuple[int, bool], set[int]] = {}

    def holds(self, run: int, length: int, secret: Secret, *, letters: bool = False) -> bool:
        """Whether the run of ``length`` lexemes, names as they are, with this fingerprint under ``secret`` (always the same one)
        stands there; ``letters``: of letters and digits, as texts are ``spelt``.
        """
        if (length, letters) not in self._found:
            self._found[length, letters] = self._runs(length, secret, letters)
        if run in self._found[length, letters]:
            return True
        return self._beside is not None and self._beside.holds(run, length, secret, letters=letters)

    def _runs(self, length: int, secret: Secret, letters: bool) -> set[int]:
        text = self._text()
        everything, code = readings(spelt(text) if letters else text)
        return {
            secret.fingerprint(reading[start : start + length])
            for reading in ([everything] if code == everything else [everything, code])
            for start in range(len(reading) - length + 1)
        }
