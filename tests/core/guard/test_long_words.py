"""A word of any length costs what its letters cost, however it comes: a model may write one without an end."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import pytest

from unbind_core.guard import lexemes
from unbind_core.guard.book import GuardBook
from unbind_core.guard.follower import Follower
from unbind_core.guard.index import Secret, build_index

RUN, LETTERS = 10, 400
ROW = " ".join(f"name{number} ( value{number} )" for number in range(RUN))


class Counting(Secret):
    """Counts the letters of what it is asked about."""

    letters = 0

    def fingerprint(self, lexemes: Sequence[str]) -> int:
        """As any."""
        self.letters += sum(map(len, lexemes))
        return super().fingerprint(lexemes)


class Reading:
    """Counts the letters that are looked at for words."""

    letters = 0

    def __init__(self, read: re.Pattern[str]) -> None:
        self._read = read

    def finditer(self, text: str) -> Iterator[re.Match[str]]:
        """As a pattern's."""
        self.letters += len(text)
        return self._read.finditer(text)


def test_a_long_word_is_not_read_anew_with_each_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    reading = Reading(lexemes._PARTS)
    monkeypatch.setattr(lexemes, "_PARTS", reading)
    pending, found = "", list[str]()
    for part in [*("\u00e9" * LETTERS), "", "."]:
        some, pending = lexemes.parts(pending, part)
        found += some
    assert found == ["e" * LETTERS, "."] and reading.letters <= 2 * LETTERS


def test_beginnings_of_a_long_word_behind_a_run_are_asked_about_once() -> None:
    secret = Counting(b"a key of the tests")
    guards = GuardBook.of(secret, [build_index([ROW], name="row", secret=secret, run=RUN)]).select(["row"])
    assert guards is not None
    follower, known = Follower(guards, str, cuts=True), " ".join(ROW.split()[: RUN - 1]) + " "
    assert not follower.take(known).now
    secret.letters = 0
    for _ in range(LETTERS):
        assert not follower.take("x").now
    each = len(known) + LETTERS  # letters of a run with the longest beginning
    assert secret.letters <= 4 * each * LETTERS


def test_a_word_that_begins_as_the_last_of_a_run_is_barred_where_it_comes_so_far() -> None:
    secret = Secret(b"a key of the tests")
    guards = GuardBook.of(secret, [build_index([ROW], name="row", secret=secret, run=RUN)]).select(["row"])
    assert guards is not None
    *before, last = ROW.split()[1 : RUN + 1]
    follower = Follower(guards, str, cuts=True)
    follower.take(" ".join(before) + " ")
    said = [bool(follower.take(letter).now) for letter in last + "xyz"]
    assert said == [letters == len(last) for letters in range(1, len(said) + 1)]
