"""What the strings of JSON mean, judged by Python's own reader of it."""

from __future__ import annotations

import json

from hypothesis import example, given
from hypothesis import strategies as st

from unbind_core.guard.book import GuardBook
from unbind_core.guard.escapes import Unescaped, meant
from unbind_core.guard.follower import Follower
from unbind_core.guard.index import Secret, build_index

LOG = "".join(f'log("\U0001f4be saved", name_{name})\n' for name in "abcdefgh")  # signs that JSON escapes as two halves


def whole(text: str) -> str:
    """Without halves of a pair, which guards read as nothing."""
    return "".join(character for character in text if not "\ud800" <= character <= "\udfff")


@given(st.text(st.characters()), st.booleans())
@example("\ud83d\ud83d\ude00\\\U0001f600\U0001d41d\ud83d a", True)
def test_a_string_of_json_means_what_it_was_made_of(text: str, ascii_only: bool) -> None:
    written, begun, by_one = json.dumps(text, ensure_ascii=ascii_only)[1:-1], "", ""
    text = json.loads(f'"{written}"')
    assert whole(Unescaped().read(written)) == whole(text)
    for character in written:
        said, begun = meant(begun, character)
        by_one += said
    assert whole(by_one) == whole(text)


def test_a_run_with_signs_that_are_escaped_as_two_halves_is_found() -> None:
    secret = Secret(b"a key of the tests")
    guards = GuardBook.of(secret, [build_index([LOG], name="log", secret=secret, run=20)]).select(["log"])
    assert guards is not None
    assert Follower(guards, str).take(Unescaped().read(json.dumps(LOG))).sure
