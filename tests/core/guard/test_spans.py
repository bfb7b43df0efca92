"""Spans mark exactly what of a text is made of protected runs, wherever it stands and however it is written."""

from __future__ import annotations

import random

import pytest

from tests.core.guard.test_guard import JUNK, ROW, RUN, SECRET
from tests.support.slow_matcher import longest_run
from unbind_core.guard.index import build_index
from unbind_core.guard.lexemes import placed_readings, readings
from unbind_core.guard.spans import spans

INDEX = build_index([ROW], name="rows", secret=SECRET, run=RUN)
BODY = ROW.strip()


def marked(text: str) -> list[str]:
    return [text[span.start : span.end] for span in spans(text, [INDEX], SECRET)]


@pytest.mark.parametrize("before", ["", "x = 1\n\n", "é ﬁ 𝒳 ", "\u200b\n"])
def test_a_whole_row_is_marked_from_its_first_lexeme_to_its_last(before: str) -> None:
    (found,) = {text for text in marked(before + BODY + "\n\nprint(merge)") if "#" in text}
    assert BODY.startswith(found) and len(found) >= len(BODY) - 1


def test_a_run_is_marked_and_one_lexeme_less_is_not() -> None:
    places = placed_readings(ROW)[0]
    run = ROW[places[12].start : places[12 + RUN - 1].end]
    assert set(marked(f"zebra {run} zebra")) == {run}
    assert marked(f"zebra {ROW[places[12].start : places[12 + RUN - 2].end]} zebra") == []


def test_comments_within_a_run_are_within_its_span() -> None:
    lines = BODY.splitlines(keepends=True)
    text = "".join(line.rstrip("\n") + f"  # note {at}\n" if "#" not in line else line for at, line in enumerate(lines))
    assert any(found.startswith("def merge") and "note 4" in found for found in marked(text))


def test_there_is_a_span_where_an_independent_matcher_finds_a_run_and_nowhere_else() -> None:
    rng = random.Random(5)
    hits = 0
    for _ in range(60):
        start = rng.randrange(len(BODY))
        text = "".join(rng.choices(JUNK, k=4)) + BODY[start : start + rng.randrange(10, 120)] + rng.choice(JUNK)
        hits += bool(found := marked(text))
        assert bool(found) == (longest_run(text, [ROW]) >= RUN), text
        assert all(longest_run(part, [ROW]) >= RUN for part in found)
    assert 10 < hits < 60


def test_readings_are_those_of_places() -> None:
    placed = placed_readings(ROW + "/* a\u00a0b */ ﬁn")
    assert tuple([place.lexeme for place in reading] for reading in placed) == readings(ROW + "/* a\u00a0b */ ﬁn")
