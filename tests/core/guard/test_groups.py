"""Guards are asked together in one table, and each request hears of its own alone."""

from __future__ import annotations

import pytest

from tests.core.guard.test_guard import OTHER, ROW, RUN, SECRET
from unbind_core.guard.book import GuardBook, GuardSet
from unbind_core.guard.follower import Follower
from unbind_core.guard.index import build_index


def text_so_far(guards: GuardSet | None) -> list[bool]:
    """Whether a run of more than N/2 goes on, after each line of OTHER."""
    assert guards is not None
    follower = Follower(guards, lambda: "")
    return [follower.take(line).long for line in OTHER.splitlines(keepends=True)]


def test_a_run_goes_on_of_those_that_are_asked_and_act_alone() -> None:
    """Else who is under any guard could find out what is protected from others, or is only measured."""
    made = [build_index([row], name=name, secret=SECRET, run=RUN) for name, row in (("own", ROW), ("other", OTHER))]
    counting = build_index([OTHER], name="counting", secret=SECRET, run=RUN, action="report")
    book = GuardBook.of(SECRET, [*made, counting])
    assert any(text_so_far(book.select(["own", "other"])))
    for unseen in (book.select(["own"]), book.select(["own"], ["other"]), book.select(["own", "counting"])):
        assert not any(text_so_far(unseen))
    alone, both = (book.select(["own"], measured) for measured in ([], ["other", "counting"]))
    assert alone is not None and both is not None
    for guards, longest in ((alone, 0), (both, RUN)):
        follower = Follower(guards, lambda: "")
        follower.take(OTHER + " ")
        assert follower.longest == longest
        assert follower.counted == {index.name for index in guards.measured}


@pytest.mark.parametrize("asked", [1, 2, 5])
def test_a_run_is_held_by_the_guards_that_are_asked_however_many_are_loaded(asked: int) -> None:
    rows = [ROW.replace("merge", f"merge{number}") for number in range(6)]
    book = GuardBook.of(SECRET, [build_index([row], name=str(n), secret=SECRET, run=RUN) for n, row in enumerate(rows)])
    chosen = book.select([str(number) for number in range(asked)])
    assert chosen is not None
    (group,) = chosen.groups
    own = {half for index in group.guards for half in index.half.tolist()}
    every = {half for index in book.indexes.values() for half in index.half.tolist()}
    assert {half for half in (*every, 0, 2**64 - 1) if group.holds(half)} == own < every
