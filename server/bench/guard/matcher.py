"""The judge of the guard: whether a text holds a protected run. It shares no code with what it judges.

Texts are brought into a normal form as a whole, never in parts; runs are looked up as they are, never as fingerprints.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence

# A Latin letter, then the Cyrillic and Greek ones that look like it.
_LETTERS = (
    "aа cс dԁ eе hһ iі jј oоο pрρ qԛ sѕ vν wԝ xх yу iι iı "
    "AАΑ BВΒ CС EЕΕ HНΗ IІΙ JЈ KКΚ MМΜ NΝ OОΟ PРΡ SЅ TТΤ XХΧ YҮΥ ZΖ"
)
_ALIKE = {ord(other): family[0] for family in _LETTERS.split() for other in family[1:]}
_ALIKE |= dict.fromkeys(map(ord, "'‘’‚‛“”„‟′″«»‹›ʼ"), '"') | dict.fromkeys(map(ord, "‐‑‒–—―−"), "-")
_ALIKE |= dict.fromkeys(map(ord, "\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"), "\n")
_ALIKE |= dict.fromkeys((*range(9), *range(14, 28), 127), "")  # no shape, and no space
_ALIKE[0xFFFD] = ""  # half a character
_UNSEEN = ("M", "C")  # beginnings of categories: marks that are put on letters, and what has no shape
_MARKS = re.compile(r"\n|//|/\*|\*/|--|#")
_LEXEMES = re.compile(r"\w+|[^\w\s#/*+>|;\\-]")


def plain(text: str) -> str:
    """The text in the letters that it looks like, with the line ends that it writes out."""
    if text.isascii():
        read = text.translate(_ALIKE)
    else:
        spelt = unicodedata.normalize("NFKD", text.translate(_ALIKE)).translate(_ALIKE)
        read = "".join(c for c in spelt if c in "\n\t " or unicodedata.category(c)[0] not in _UNSEEN)
    return read.replace("\\n", "\n").replace("\\r", "\n").replace("\\t", " ")


def uncommented(text: str) -> str:
    """Without comments, whatever the language: ``/*`` begins one that counts once ``*/`` has come, back to the newest ``/*``."""
    kept: list[str] = []
    start, opened, to_line_end = 0, -1, False
    for mark in _MARKS.finditer(text):
        if not to_line_end:
            kept.append(text[start : mark.start()])
        start = mark.end()
        if mark[0] == "\n":
            to_line_end = False
        elif mark[0] == "*/" and opened >= 0:
            del kept[opened:]
            opened, to_line_end = -1, False
        elif mark[0] == "/*" and not to_line_end:
            opened = len(kept)
        elif mark[0] not in ("/*", "*/"):
            to_line_end = True
        kept.append(" ")
    if not to_line_end:
        kept.append(text[start:])
    return "".join(kept)


def lexemes(text: str) -> tuple[list[str], list[str]]:
    """Words and punctuation of a whole text: all, and without what comments say."""
    read = plain(text)
    everything = _LEXEMES.findall(read)
    return everything, _LEXEMES.findall(uncommented(read)) if _MARKS.search(read) else everything


def runs(words: Sequence[str], length: int) -> list[str]:
    """Every run of so many words, each as one string."""
    return [" ".join(words[at : at + length]) for at in range(len(words) - length + 1)]


class Judge:
    """Knows every run of ``run`` lexemes of the protected ``rows``. ``folded``: of a guard to which names mean nothing, so that any
    half run that a client sends may be one of a row's.
    """

    def __init__(self, rows: Iterable[str], run: int, *, folded: bool = False) -> None:
        self.run, self._folded = run, folded
        readings = [reading for row in rows for reading in lexemes(row)]
        self._runs = {one for reading in readings for one in runs(reading, run)}
        self._halves = {one for reading in readings for one in runs(reading, run // 2)}

    @staticmethod
    def lexemes(text: str) -> int:
        """How many lexemes a text has."""
        return len(lexemes(text)[0])

    def own(self, sent: str) -> frozenset[str]:
        """Half runs in what the client sent, which an answer may repeat."""
        halves = {one for reading in lexemes(sent) for one in runs(reading, self.run // 2)}
        return frozenset(halves if self._folded else halves & self._halves)

    def found(self, text: str, own: frozenset[str] = frozenset()) -> str:
        """A protected run that the text holds; empty where there is none. One that shares a lexeme with a stretch of ``own`` is
        none, if the stretch ends where the run does or earlier: what comes later is not known as a text leaves.
        """
        return next((run for reading in lexemes(text) if (run := self.within(reading, own))), "")

    def within(self, words: Sequence[str], own: frozenset[str] = frozenset(), start: int = 0) -> str:
        """The same of one reading; only runs that end with word ``start`` or later are looked at."""
        first = max(0, start + 1 - self.run)
        for at, run in enumerate(runs(words[first:], self.run), first):
            if run in self._runs and not (own and self._shares(words, at, own)):
                return run
        return ""

    def _shares(self, words: Sequence[str], at: int, own: frozenset[str]) -> bool:
        half = self.run // 2
        return any(stretch in own for stretch in runs(words[max(0, at + 1 - half) : at + self.run], half))


class Watch:
    """One text as it leaves, part by part: looked at after each, as nothing that was sent can be taken back."""

    def __init__(self, judge: Judge, own: frozenset[str] = frozenset()) -> None:
        self.judge, self.text, self.found = judge, "", ""
        self._own = own
        self._seen: list[list[str]] = [[], []]

    def take(self, part: str) -> None:
        """``found`` keeps the first run that the text held at any time."""
        self.text += part
        if not part or self.found:
            return
        everything, code = lexemes(self.text)
        for number, words in enumerate([everything] if code is everything else [everything, code]):
            seen, same = self._seen[number], len(self._seen[number])
            while seen[:same] != words[:same]:
                same -= 1
            self.found = self.found or self.judge.within(words, self._own, same)
            self._seen[number] = words
