"""Streaming text: whole characters, and nothing of a stop string ever leaves."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders
from transformers import PreTrainedTokenizerBase

from server.engine.text import TextStream
from tests.core.conftest import build_tokenizer

TOKENIZER: PreTrainedTokenizerBase = build_tokenizer()


def _run(ids: list[int], stop: tuple[str, ...]) -> tuple[str, bool]:
    stream = TextStream(TOKENIZER, stop)
    text = ""
    for token in ids:
        piece, stopped = stream.push(token)
        text += piece
        if stopped:
            return text, True
    return text + stream.flush(), False


@given(st.text(max_size=40))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_pieces_join_to_the_text(text: str) -> None:
    ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    assert _run(ids, ()) == (TOKENIZER.decode(ids), False)


@given(st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=30))
@settings(max_examples=300, deadline=None)
def test_any_tokens_give_what_the_tokenizer_decodes(ids: list[int]) -> None:
    decoded = TOKENIZER.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert _run(ids, ()) == (decoded, False)


@given(st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=30))
@settings(max_examples=100, deadline=None)
def test_vocabularies_of_other_kinds_are_decoded_by_the_tokenizer(ids: list[int]) -> None:
    other = build_tokenizer()
    other.backend_tokenizer.decoder = decoders.Sequence([decoders.ByteLevel()])
    stream = TextStream(other, ())
    text = "".join(stream.push(token)[0] for token in ids) + stream.flush()
    assert text.replace("\ufffd", "") == _run(ids, ())[0].replace("\ufffd", "")


@given(st.text(alphabet="abé\n", max_size=30), st.lists(st.text(alphabet="abé\n", min_size=1, max_size=4), max_size=3))
@settings(max_examples=300, deadline=None)
def test_a_stop_string_ends_the_text_before_its_first_occurrence(text: str, stop: list[str]) -> None:
    ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    found = [text.find(one) for one in stop if one in text]
    shown, stopped = _run(ids, tuple(stop))
    assert stopped == bool(found)
    # of several stop strings the one that is complete first wins, so the cut is at or after the earliest start
    assert text.startswith(shown) and not any(one in shown for one in stop)
    if len(stop) == 1 and found:
        assert shown == text[: found[0]]
    if not found:
        assert shown == text


def test_half_a_character_is_held_back() -> None:
    ids = TOKENIZER("é", add_special_tokens=False)["input_ids"]
    assert len(ids) == 2
    stream = TextStream(TOKENIZER, ())
    assert stream.push(ids[0]) == ("", False)
    assert stream.push(ids[1]) == ("é", False)


@pytest.mark.parametrize("special", ["<|fim_middle|>", "<|endoftext|>"])
def test_a_stop_string_may_spell_a_special_token(special: str) -> None:
    token = TOKENIZER.convert_tokens_to_ids(special)
    ids = TOKENIZER("ab", add_special_tokens=False)["input_ids"]
    assert _run([*ids, token, *ids], (special,)) == ("ab", True)
    assert _run([*ids, token, *ids], ()) == ("abab", False)
