"""Where in a finished text protected runs stand, by character: for those who may see it, never for a client's answer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from unbind_core.guard.index import GuardIndex, Secret
from unbind_core.guard.lexemes import Place, placed_letters, placed_readings


class Span(NamedTuple):
    """``text[start:end]`` holds runs of the guard of this name that overlap or touch; ``lexemes`` from the first to the last, or
    letters and digits of a secret.
    """

    name: str
    start: int
    end: int
    lexemes: int


def spans(text: str, guards: Iterable[GuardIndex], secret: Secret) -> list[Span]:
    """Every stretch of ``text`` that is made of runs of one of ``guards``, in either reading, in order of their beginnings.

    No prompt is taken into account: what the client sent itself is marked as well.
    """
    everything, code = placed_readings(text)
    lexemes, letters = [everything] if code == everything else [everything, code], [placed_letters(text)]
    found = {
        span
        for index in guards
        for reading in (letters if index.shape.secrets else lexemes)
        for span in _in_reading(reading, index, secret)
    }
    return sorted(found, key=lambda span: (span.start, span.end, span.name))


def _in_reading(reading: list[Place], index: GuardIndex, secret: Secret) -> Iterable[Span]:
    run, first, last = index.shape.run, -1, -1
    for start, fingerprint in enumerate(index.shape.runs([place.lexeme for place in reading], run, secret)):
        if fingerprint not in index.whole:
            continue
        if first >= 0 and start > last + 1:
            yield _span(reading, index, first, last)
            first = -1
        first, last = start if first < 0 else first, start + run - 1
    if first >= 0:
        yield _span(reading, index, first, last)


def _span(reading: list[Place], index: GuardIndex, first: int, last: int) -> Span:
    return Span(index.name, reading[first].start, reading[last].end, last - first + 1)
