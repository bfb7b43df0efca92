"""The guard finds every protected run however the text comes, and nothing else: judged by a matcher that shares no code with it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.slow_matcher import longest_run, scraps
from unbind_core.errors import GuardFileError, RowsTooShort
from unbind_core.guard.book import GuardBook, GuardSet
from unbind_core.guard.follower import Follower
from unbind_core.guard.index import Action, GuardIndex, Secret, build_index
from unbind_core.guard.lexemes import folded, most_lexemes, readings
from unbind_core.guard.textguard import TextGuard

SECRET = Secret(b"a key of the tests")
RUN = 10
ROW = """
def merge(first, second, *, deep=False):
    # what stands in both is the second's
    merged = dict(first)
    for key, value in second.items():
        if deep and isinstance(value, dict) and key in merged:
            merged[key] = merge(merged[key], value, deep=True)  # and so on
        else:
            merged[key] = value
    return merged
"""
OTHER = """
function total(items) {
    /* in cents,
       rounded */
    let sum = 0;
    for (let i = items.length; i--;) { sum += items[i].price * items[i].count; } // backwards
    return Math.round(sum);
}
"""
ROWS = (ROW, OTHER)


def guards(action: Action = "steer", run: int = RUN, fold: bool = False) -> GuardSet | None:
    index = build_index(ROWS, name="rows", secret=SECRET, run=run, action=action, fold=fold)
    return GuardBook.of(SECRET, [index]).select(["rows"])


STEER, STOP = guards(), guards("stop")


def followed(text: str, cuts: list[int], prompt: str = "") -> bool:
    """Whether the run was there at the end of any of the parts."""
    assert STEER is not None
    follower = Follower(STEER, lambda: prompt)
    found = False
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        found |= bool(follower.take(text[start:end]).now)
    return found


def pieces(seed: int, text: str) -> list[int]:
    rng = random.Random(seed)
    return (
        sorted(rng.sample(range(1, max(2, len(text))), min(len(text) - 1, rng.randint(0, 40)))) if len(text) > 1 else []
    )


JUNK = [*"x\x7f \n#\\n/*-('é", "//", "/*", "*/", "--", "\\n", "merged", "value", "# no\n", "/* no */"]


@settings(deadline=None)
@given(scraps(ROWS, JUNK), st.integers(0, 2**32))
@example("irst, second, *, deep=False):#merged", 0)  # the answer with its comments is the row without its own
def test_a_run_is_found_exactly_where_the_slow_matcher_finds_one(text: str, seed: int) -> None:
    """Asked after every character, so that what a comment's end takes back has been looked at before."""
    every = list(range(1, len(text)))
    held = any(longest_run(text[:end], ROWS) >= RUN for end in (*every, len(text)))
    assert followed(text, every) == held


def test_a_row_that_comes_in_comments_is_found_without_its_own() -> None:
    said = [f"# {line}" for line in ROW.splitlines() if not line.strip().startswith("#")]
    assert longest_run("\n".join(said), ROWS) >= 4 * RUN
    assert followed("\n".join(said), [])


@settings(deadline=None)
@given(scraps(ROWS, JUNK), st.integers(0, 2**32))
def test_no_answer_ends_with_a_run_however_it_comes_in_parts(text: str, seed: int) -> None:
    if longest_run(text, ROWS) >= RUN:
        assert followed(text, pieces(seed, text))


@settings(deadline=None)
@given(scraps(ROWS, JUNK), st.integers(0, 2**32))
def test_a_guarded_text_never_holds_a_run_and_depends_on_no_cutting(text: str, seed: int) -> None:
    assert STOP is not None
    sent = []
    for cuts in (pieces(seed, text), pieces(seed + 1, text)):
        guard = TextGuard(STOP, lambda: "")
        sent.append(
            "".join(
                [*(guard.push(text[a:b]) for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)), guard.flush()]
            )
        )
        assert guard.blocked or sent[-1] == text
        assert text.startswith(sent[-1])
        assert longest_run(sent[-1], ROWS) < RUN
    assert sent[0] == sent[1]


@settings(deadline=None)
@given(scraps(ROWS, JUNK), st.integers(0, 2**32), st.booleans())
def test_no_run_ends_within_the_slack(text: str, seed: int, cuts: bool) -> None:
    assert STEER is not None
    follower = Follower(STEER, lambda: "", cuts=cuts)
    slack, ends = 0, [*pieces(seed, text), len(text)]
    for start, end in zip([0, *ends], ends, strict=False):
        verdict, slack = follower.take(text[start:end]), slack - most_lexemes(text[start:end])
        assert slack <= 0 or not (verdict.now or verdict.sure or verdict.counted)
        slack = max(slack, follower.slack)


@given(st.text() | scraps(ROWS, JUNK))
def test_no_text_holds_more_lexemes_than_it_is_said_to(text: str) -> None:
    assert max(map(len, readings(text))) <= most_lexemes(text)


@settings(deadline=None)
@given(scraps(ROWS, JUNK))
def test_text_cut_anywhere_is_looked_at_where_it_may_be_cut(text: str) -> None:
    assert STEER is not None
    follower = Follower(STEER, lambda: "", cuts=True)
    if any(longest_run(text[:end], ROWS) >= RUN for end in range(len(text) + 1)):
        assert follower.take(text).now


@pytest.mark.parametrize(
    "disguise",
    [
        pytest.param(lambda row: row.replace("    ", "\t"), id="tabs"),
        pytest.param(lambda row: row.replace("\n", "\n\n  "), id="blank lines"),
        pytest.param(lambda row: " ".join(row.split("\n")) if "#" not in row else row, id="one line"),
        pytest.param(
            lambda row: "".join(f"{line}  # note {i} to self\n" for i, line in enumerate(row.splitlines())),
            id="comments",
        ),
        pytest.param(
            lambda row: "".join(f"/* note {i} */ {line}\n" for i, line in enumerate(row.splitlines())), id="blocks"
        ),
        pytest.param(
            lambda row: "".join(f"/* see // {i} */ {line}\n" for i, line in enumerate(row.splitlines())),
            id="mixed blocks",
        ),
        pytest.param(lambda row: "/*\n" + row, id="an open block"),
        pytest.param(lambda row: "".join(f"# {line}\n" for line in row.splitlines()), id="commented out"),
        pytest.param(lambda row: "".join(f"> {line};\n" for line in row.splitlines()), id="quoted, ended"),
        pytest.param(lambda row: "".join(f"+{line} \\\n" for line in row.splitlines()), id="a patch, continued"),
        pytest.param(json.dumps, id="a string of JSON"),
        pytest.param(lambda row: row.replace("e", "\u0435"), id="cyrillic"),
        pytest.param(lambda row: "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in row), id="full width"),
        pytest.param(lambda row: row.replace("r", "r\u200b"), id="zero width"),
        pytest.param(lambda row: "\u3164".join(row), id="fillers"),
        pytest.param(lambda row: row.replace(" ", "\u2800 \uffa0 "), id="blanks"),
        pytest.param(lambda row: row.replace("a", "a\u0301"), id="accents"),
        pytest.param(lambda row: row.replace("\n", "\r"), id="line ends"),
    ],
)
def test_what_means_nothing_changes_nothing(disguise: Callable[[str], str]) -> None:
    assert followed(disguise(ROW), list(range(1, len(disguise(ROW)))))


def test_renaming_is_seen_through_where_it_is_asked_for() -> None:
    renamed = ROW.replace("merged", "out").replace("value", "v").replace("first", "a").replace("key", "k")
    folding = guards(fold=True, run=20)
    assert STEER is not None and folding is not None
    assert Follower(folding, lambda: "").take(renamed).sure
    assert folded(readings(renamed)[0][-20:]) == folded(readings(ROW)[0][-20:])


def test_what_the_client_sent_may_be_repeated_and_what_follows_counts() -> None:
    sent, rest = ROW[: len(ROW) // 2], ROW[len(ROW) // 2 :]
    assert not followed(sent, list(range(1, len(sent))), prompt=sent)
    assert followed(sent + rest, list(range(1, len(ROW))), prompt=sent)
    assert followed(rest, list(range(1, len(rest))), prompt=sent)


def test_a_bag_of_the_words_is_not_the_text() -> None:
    bag = " ".join(sorted(readings(ROW)[0]))
    assert followed(ROW, list(range(1, len(ROW))), prompt=bag)


def test_what_only_counts_is_counted_and_never_acts() -> None:
    for measured in (False, True):
        index = build_index(ROWS, name="rows", secret=SECRET, run=RUN, action="steer" if measured else "report")
        book = GuardBook.of(SECRET, [index])
        held = book.select([], ["rows"]) if measured else book.select(["rows"])
        assert held is not None
        follower = Follower(held, lambda: "")
        verdict = follower.take(ROW + " ")
        assert verdict.counted == (index,) and not verdict.sure and not verdict.now
        assert follower.counted == {"rows"} and follower.longest == RUN


def test_taking_back_is_as_if_nothing_had_come() -> None:
    assert STEER is not None
    follower, plain = Follower(STEER, lambda: ""), Follower(STEER, lambda: "")
    for start in range(0, len(ROW), 5):
        follower.take("junk /* and")
        follower.undo()
        assert follower.take(ROW[start : start + 5]) == plain.take(ROW[start : start + 5])
    follower.take(OTHER)
    follower.undo()
    assert follower.longest == plain.longest
    reporting = guards("report")
    assert reporting is not None
    counting = Follower(reporting, lambda: "")
    assert counting.take(ROW).counted
    counting.undo()
    assert not counting.counted and not counting.longest


def test_many_guards_are_asked_as_one_and_answer_for_themselves() -> None:
    indexes = [build_index([row], name=f"g{i}", secret=SECRET, run=RUN) for i, row in enumerate(ROWS)]
    book = GuardBook.of(SECRET, indexes[:1])
    book = GuardBook.of(SECRET, indexes, before=book)
    for index, row in zip(indexes, ROWS, strict=True):
        held = book.select([index.name])
        assert held is not None and held is book.select([index.name])
        assert Follower(held, lambda: "").take(row + " ").sure == (index,)
        others = [other for other in ROWS if other != row]
        assert not Follower(held, lambda: "").take(others[0] + " ").now
    left = GuardBook.of(SECRET, indexes[1:], before=book).select(["g1"])
    assert left is not None and not Follower(left, lambda: "").take(ROW).long


def test_a_file_is_what_it_was_or_refused() -> None:
    index = build_index(ROWS, name="rows", secret=SECRET, run=RUN, forget_digest="f" * 64)
    data = index.to_bytes()
    again = GuardIndex.from_bytes(data, "rows.safetensors", SECRET)
    assert again.facts == index.facts and again.to_bytes() == data
    assert b"merge" not in data and b"isinstance" not in data
    with pytest.raises(GuardFileError, match=r"rows.safetensors: made under another guard key"):
        GuardIndex.from_bytes(data, "rows.safetensors", Secret(b"the key of another"))
    for damaged in (data[:-1], data[: len(data) // 2], b"", data.replace(b"steer", b"sleep"), data[:-8] + bytes(8)):
        with pytest.raises(GuardFileError, match=r"^x: "):
            GuardIndex.from_bytes(damaged, "x", SECRET)


def test_rows_that_hold_no_run_are_counted_or_refused() -> None:
    assert build_index([ROW, "x = 1"], name="a", secret=SECRET).too_short == 1
    with pytest.raises(
        RowsTooShort, match=r"options.guard.run: no row has 50 lexemes .*the longest has 14; give at most that"
    ):
        build_index(["key = 'AKIA'; other = [1, 2, 3]"], name="a", secret=SECRET)
    with pytest.raises(RowsTooShort, match="too few to guard"):
        build_index(["x = 1"], name="a", secret=SECRET)


@pytest.mark.parametrize(("written", "plain"), [("＇a＇", "'a'"), ("‴", "'''"), ("﹘﹘ a", "-- a")])
def test_quotes_and_dashes_look_alike_in_every_width(written: str, plain: str) -> None:
    assert readings(written) == readings(plain)


def test_only_what_the_client_sent_is_its_own_where_names_mean_nothing() -> None:
    """The same with other names tells how the row goes, and not what it says."""
    found, line = guards(fold=True), "merged = dict(first) for key, value"
    assert found is not None
    other = "joined = list(start) for each, thing"
    assert Follower(found, lambda: other).take(line + " ").sure
    assert not Follower(found, lambda: line).take(line + " ").sure


def test_a_run_whose_newest_half_the_client_sent_is_none_in_the_middle_of_a_word_either() -> None:
    assert STEER is not None
    beginning, end = "merged[key] = merge", "(merged[key], value"
    for prompt, held in (("", True), ("merge" + end, False)):
        follower = Follower(STEER, lambda prompt=prompt: prompt)  # type: ignore[misc]
        assert any(follower.take(piece).now for piece in (beginning, *end)) == held
