"""The fast judge of the guard finds what the slow one finds."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.bench.guard.matcher import Judge, Watch, lexemes, plain
from tests.support.slow_matcher import longest_run, scraps

ROWS = (
    "def weigh(items, scale):\n    # all of them, in order\n    total = 0\n    for item in items:\n"
    "        total += item.weight * scale[item.kind]\n    return total / len(items)\n",
    "/* opens the door */ function open(door) { if (door.locked) { throw new Error('locked') } // or not\n"
    "door.state = 'open'; return door.state; }\n",
)
JUNK = [
    "x",
    " ",
    "\n",
    "#",
    "//",
    "/*",
    "*/",
    "--",
    "/",
    "*",
    "-",
    "total",
    "(",
    "'",
    "é",
    "# no\n",
    "/* no */",
    "/*/",
    "\\n",
    "\\",
]
RUN = 8
JUDGE = Judge(ROWS, RUN)


@settings(deadline=None)
@given(scraps(ROWS, JUNK))
def test_it_finds_a_run_exactly_where_the_slow_matcher_does(text: str) -> None:
    assert bool(JUDGE.found(text)) == (longest_run(text, ROWS) >= RUN)


@settings(deadline=None)
@given(scraps(ROWS, JUNK), st.integers(0, 2**32))
def test_a_text_that_leaves_in_parts_is_judged_after_each(text: str, seed: int) -> None:
    rng = random.Random(seed)
    cuts = sorted(rng.sample(range(len(text) + 1), min(len(text), rng.randint(0, 12))))
    ends = [*cuts, len(text)]
    watch = Watch(JUDGE)
    for start, end in zip([0, *cuts], ends, strict=True):
        watch.take(text[start:end])
    assert bool(watch.found) == any(longest_run(text[:end], ROWS) >= RUN for end in ends)


@pytest.mark.parametrize(
    ("written", "read"),
    [("wеіgһ", "weigh"), ("ｔｏｔａｌ", "total"), ("to\u200btal", "total"), ("tótal", "total"), ("“", '"')],
)
def test_what_looks_alike_is_the_same(written: str, read: str) -> None:
    assert plain(written) == read


def test_what_the_client_sent_may_be_repeated_and_nothing_beyond_it() -> None:
    words = lexemes(ROWS[1])[0]
    sent = JUDGE.own(" ".join(words[:14]))
    assert not JUDGE.found(" ".join(words[:14]), sent)
    assert not JUDGE.found(
        " ".join(words[: 13 + RUN]), sent
    )  # the last of them shares its first word with what was sent
    assert JUDGE.found(" ".join(words[: 14 + RUN]), sent)


def test_what_was_sent_excuses_nothing_that_stands_before_it() -> None:
    """As a text leaves, nobody knows that the client's own comes next."""
    words = lexemes(ROWS[1])[0]
    sent = JUDGE.own(" ".join(words[RUN - 2 : RUN + 6]))
    assert JUDGE.found(" ".join(words[: RUN + 6]), sent) == " ".join(words[:RUN])
    assert not JUDGE.found(" ".join(words[2 : RUN + 6]), sent)
