"""Stretches of protected rows by which a guard moves its module's gate."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.core.guard.test_guard import SECRET
from unbind_core.guard.book import GuardBook
from unbind_core.guard.follower import Follower
from unbind_core.guard.index import EASING, LEAST_HELD, OPENING, RENAMED, GuardIndex, Shape, Stretch, build_index

WORDS = [f"w{number}" for number in range(120)]
ROW = " ".join(WORDS)
CODE = """
def merge(first, second, deep=False):
    found = dict(first)
    for name, value in second.items():
        inner = found.get(name)
        if deep and isinstance(value, dict) and isinstance(inner, dict):
            value = merge(inner, value, deep=True)
        found[name] = value
    return found
"""


def index(*rows: str, name: str = "a", run: int = 50, fold: bool = False) -> GuardIndex:
    return build_index(rows, name=name, secret=SECRET, run=run, fold=fold)


def without_marks(made: GuardIndex) -> GuardIndex:
    """Its file as it was written before there were any."""
    return GuardIndex.from_bytes(replace(made, marks={}).to_bytes(), made.name, SECRET)


def met(text: str, *indexes: GuardIndex, asked: Sequence[str] = ("a",)) -> set[tuple[str, bool]]:
    """The guards of which a stretch ends in the text, and whether behind it their gates are held open."""
    guards = GuardBook.of(SECRET, indexes).select(asked)
    assert guards is not None
    follower = Follower(guards, str, marks=True)
    found = set()
    for piece in (text[at : at + 7] for at in range(0, len(text), 7)):
        assert not any(follower.take(piece))
        found |= {(one.name, met[0].holds) for met in follower.met for one in indexes if one.ends(*met)}
    return found


@pytest.mark.parametrize("run", [8, 24, 50, 100])
def test_what_moves_a_gate_has_as_many_lexemes_whatever_a_run_has(run: int) -> None:
    held = max(run // 2, LEAST_HELD)
    for count in (EASING.least - 1, EASING.least, held - 1, held):
        text = " other ".join(" ".join(WORDS[at : at + count]) for at in range(1, 120 - count, count)) + " other"
        expected = {("a", holds) for holds, least in ((False, EASING.least), (True, held)) if count >= least}
        assert met(text, index(ROW, run=run)) == expected


def test_a_rows_first_lexemes_ease_its_gate_and_no_others_do() -> None:
    least = OPENING.least
    made = index(ROW, "# of whom\n" + ROW.upper())
    for count in range(least - 1, least + 2):
        for where, expected in ((0, count >= least), (1, False), (40, False)):
            text = "before " + " ".join(WORDS[where : where + count]) + " other"
            for written in (text, text.replace("w", "W")):
                assert met(written, made) == ({("a", False)} if expected else set())
    assert len(made.marks[OPENING]) == 3  # of the second row with its comment and without


def test_names_are_seen_through_where_they_are_folded() -> None:
    text = re.sub(r"\b(merge|first|second|found|inner|value|deep|name)\b", lambda word: f"{word[0]}_of_mine", CODE)
    assert not met(text, index(CODE))
    assert met(text, index(CODE, fold=True)) == {("a", True)}
    assert RENAMED in index(CODE, fold=True).stretches and RENAMED not in index(CODE).stretches


def test_each_guard_hears_of_its_own_among_others_and_of_those_that_are_asked() -> None:
    one, other = index(ROW), index(CODE, name="b", run=24)
    assert met(ROW + "\n", one, other) == {("a", False), ("a", True)} == met(ROW + "\n", one)
    assert met(CODE, one, other, asked=["b"]) == {("b", False), ("b", True)}
    counting = build_index([CODE], name="c", secret=SECRET, action="report")
    guards = GuardBook.of(SECRET, [one, counting]).select(["a", "c"])
    assert guards is not None and len(guards.stretches) == len(one.stretches)


@pytest.mark.parametrize("fold", [False, True])
@pytest.mark.parametrize("run", [40, 50])
def test_files_without_marks_hold_gates_open_by_half_a_run_alone(fold: bool, run: int) -> None:
    made = index(CODE, run=run, fold=fold)
    old = without_marks(made)
    assert old.stretches.keys() == {Stretch(Shape(run, fold), LEAST_HELD)} and made.to_bytes() != old.to_bytes()
    assert met(CODE, old) == {("a", True)} == met(CODE, old, index(ROW, name="other", fold=True))
    again = GuardIndex.from_bytes(made.to_bytes(), "a", SECRET)
    assert again.stretches.keys() == made.stretches.keys() and again.digest == made.digest


@pytest.mark.parametrize("fold", [False, True])
def test_rows_too_short_for_a_stretch_have_their_beginnings_alone(fold: bool) -> None:
    short = [index(" ".join(WORDS[at : at + 11]), name=name, run=8, fold=fold) for at, name in ((0, "a"), (50, "b"))]
    assert all(one.marks.keys() == {OPENING} for one in short)
    assert met(" ".join(WORDS[:11]), *short) == {("a", False)} and not met(" ".join(WORDS[1:11]), *short)
    every = met(CODE, *short, index(CODE, name="c"), asked=["a", "b", "c"])
    assert every == {("c", False), ("c", True)}


def test_a_book_that_grows_is_one_made_at_once() -> None:
    every = [
        index(CODE),
        index(ROW, name="b", fold=True),
        without_marks(index(CODE + ROW, name="c", run=40, fold=True)),
    ]
    names = [one.name for one in every]
    book, nbytes = GuardBook.of(SECRET), []
    for count in (1, 2, 3, 1):
        book = GuardBook.of(SECRET, every[:count], book)
        fresh = GuardBook.of(SECRET, every[:count])
        for each in (book, fresh):
            guards = each.select(names[:count])
            assert guards is not None
            runs = {kind.stretch: kind.runs.values.tolist() for kind in guards.stretches}
            nbytes.append((runs, each.nbytes))
        assert nbytes[-1] == nbytes[-2]
