"""A text behind other tokens has the tokens that it has within a whole text, whatever a tokenizer puts before a text alone."""

from __future__ import annotations

import pytest

from tests.core.conftest import build_tokenizer
from tests.support.sentencepiece import FIM, sentencepiece
from unbind_core.encoding import encode, encode_behind, encode_prompt, fim_prompt
from unbind_core.rows import ForgetRow
from unbind_core.windows import fim_split, forget_windows

PROMPT, CONTINUATION = (
    "def add(first, second):\n",
    "    total = first\n    total += second\n    more = 2\n    return total * more\n",
)


@pytest.mark.parametrize("way", ["normalizer", "metaspace"])
def test_a_continuation_begins_without_the_blank_of_a_text_alone(way: str) -> None:
    tokenizer = sentencepiece(way)
    assert tokenizer.decode(encode(tokenizer, "total")) == " total"
    assert tokenizer.decode(encode_behind(tokenizer, "total")) == "total"
    behind = encode_behind(tokenizer, CONTINUATION)
    assert tokenizer.decode(behind) == CONTINUATION
    prompt = encode(tokenizer, PROMPT)
    assert tokenizer.decode(prompt + behind) == tokenizer.decode(encode(tokenizer, PROMPT + CONTINUATION))
    assert encode_behind(tokenizer, "") == []
    (window,) = forget_windows(tokenizer, [ForgetRow(PROMPT, CONTINUATION)], [0])
    assert list(window.ids) == encode_prompt(tokenizer, PROMPT) + behind


@pytest.mark.parametrize("way", ["normalizer", "metaspace"])
def test_a_suffix_and_what_stood_before_it_begin_without_it_too(way: str) -> None:
    tokenizer = sentencepiece(way)
    row = ForgetRow(PROMPT, CONTINUATION)
    prefix, suffix, middle = fim_split(row)
    assert suffix and middle and suffix.startswith("    ")
    (window,) = forget_windows(tokenizer, [row], [0], ["fim"])
    ids = list(window.ids)
    pre, suf, mid = (ids.index(tokenizer.convert_tokens_to_ids(name)) for name in FIM)
    assert (pre, suf) == (1, 2 + len(encode(tokenizer, prefix)))
    assert tokenizer.decode(ids[suf + 1 : mid]) == suffix and tokenizer.decode(ids[mid + 1 :]) == middle
    assert fim_prompt(tokenizer, prefix, suffix) == ids[: mid + 1]


def test_a_tokenizer_that_adds_nothing_is_asked_as_it_is() -> None:
    tokenizer = build_tokenizer()
    for text in (CONTINUATION, " x", "x", "☺"):
        assert encode_behind(tokenizer, text) == encode(tokenizer, text)
