"""Streaming text: whole characters, and nothing of a stop string ever leaves."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from server.engine.answering import end_ids
from server.engine.lines import Lines
from server.engine.pieces import pieces_of
from server.engine.stops import StopAutomaton
from server.engine.text import TextStream
from tests.core.conftest import build_tokenizer
from tests.support.sentencepiece import sentencepiece
from unbind_core.encoding import decode_behind

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
    assert _run(ids, ()) == (TOKENIZER.decode(ids, skip_special_tokens=True), False)  # some texts spell one


@given(st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=30))
@settings(max_examples=300, deadline=None)
def test_any_tokens_give_what_the_tokenizer_decodes(ids: list[int]) -> None:
    decoded = TOKENIZER.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert _run(ids, ()) == (decoded, False)


def _bytes(*spelt: int) -> list[int]:
    """The tokens of single bytes."""
    of_bytes = {pieces_of(TOKENIZER).spell(token): token for token in range(len(TOKENIZER))}
    return [of_bytes[bytes([one])] for one in spelt]


@given(st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=30))
@example(_bytes(0xA1, 0xA1, 0xA1, 0xE0, 0xA1, 0xA1))  # a character behind bytes that are none
@example(_bytes(0xA1, 0xA1, 0xE0, 0xA1, 0xA1, 0xF0, 0x9F, 0x98, 0x80))
@settings(max_examples=100, deadline=None)
def test_vocabularies_of_other_kinds_are_decoded_by_the_tokenizer(ids: list[int]) -> None:
    other = build_tokenizer()
    other.backend_tokenizer.decoder = decoders.Sequence([decoders.ByteLevel()])
    stream = TextStream(other, ())
    text = "".join(stream.push(token)[0] for token in ids) + stream.flush()
    assert text == _run(ids, ())[0]


def _sentencepiece(decoder: Any) -> PreTrainedTokenizerBase:
    """As Llama 2, CodeLlama, Mistral and Phi-3 have it: ``▁`` for a blank, bytes for what has no piece of its own."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "▁▁▁▁",
        "▁return",
        "▁x",
        "x",
        "=",
        "(",
        "é",
    ]
    backend = Tokenizer(
        models.BPE({piece: index for index, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    backend.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


LLAMA = _sentencepiece(
    decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]  # type: ignore[no-untyped-call]
    )
)
METASPACE = _sentencepiece(decoders.Sequence([decoders.Metaspace(), decoders.ByteFallback(), decoders.Fuse()]))  # type: ignore[no-untyped-call]
WHOLE = (["▁"], ["▁▁▁▁"], ["▁return"], ["▁x"], ["x"], ["é"], ["<0x0A>"], ["</s>"], ["<0xE2>", "<0x82>", "<0xAC>"])


@pytest.mark.parametrize("tokenizer", [LLAMA, METASPACE])
@given(prompt=st.lists(st.sampled_from(WHOLE), max_size=12), answer=st.lists(st.sampled_from(WHOLE), max_size=12))
@settings(max_examples=200, deadline=None)
def test_an_answer_is_what_its_tokens_add_to_the_prompt(
    tokenizer: PreTrainedTokenizerBase, prompt: list[list[str]], answer: list[list[str]]
) -> None:
    before, after = (
        [tokenizer.convert_tokens_to_ids(piece) for part in parts for piece in part] for parts in (prompt, answer)
    )
    stream, text = TextStream(tokenizer, (), prompt=(1, *before)), ""
    for token in after:
        foreseen = stream.peek(token)
        text += (piece := stream.push(token)[0])
        assert foreseen == piece
    lead, whole = (tokenizer.decode([1, *ids], skip_special_tokens=True) for ids in (before, before + after))
    assert text + stream.flush() == decode_behind(tokenizer, [1, *before], after) == whole[len(lead) :]


def test_half_a_character_at_the_end_of_a_prompt_takes_nothing_along() -> None:
    def ids(*pieces: str) -> list[int]:
        return [LLAMA.convert_tokens_to_ids(piece) for piece in pieces]

    for prompt in (
        ids("x", "<0xE2>", "<0x82>"),
        ids(*["<0xF0>", "<0x9F>", "<0x98>", "<0x80>"] * 3),
        ids(*["<0x82>"] * 9),
    ):
        stream = TextStream(LLAMA, (), prompt=prompt)
        assert [stream.push(token)[0] for token in ids("<0x0A>", "▁▁▁▁", "x")] == ["\n", "    ", "x"]


def test_a_stop_string_may_begin_with_the_blank_that_an_answer_begins_with() -> None:
    first, shown = LLAMA.convert_tokens_to_ids("▁return"), LLAMA.convert_tokens_to_ids("</s>")
    stream = TextStream(LLAMA, (" return",), shown=(shown,), prompt=(1, LLAMA.convert_tokens_to_ids("=")))
    assert stream.peek(first) == " return"
    assert stream.push(shown) == ("</s>", "") and stream.push(first) == ("", " return")


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
    assert stream.push(ids[0]) == ("", "")
    assert stream.push(ids[1]) == ("é", "")


@pytest.mark.parametrize("special", ["<|fim_middle|>", "<|endoftext|>"])
def test_a_stop_string_may_spell_a_special_token(special: str) -> None:
    token = TOKENIZER.convert_tokens_to_ids(special)
    ids = TOKENIZER("ab", add_special_tokens=False)["input_ids"]
    assert _run([*ids, token, *ids], (special,)) == ("ab", True)
    assert _run([*ids, token, *ids], ()) == ("abab", False)


def _pushes(ids: list[int], stop: tuple[str, ...], min_tokens: int = 0) -> list[tuple[str, bool]]:
    stream, made = TextStream(TOKENIZER, stop, min_tokens), []
    for token in ids:
        text, met = stream.push(token)
        made.append((text, bool(met)))
        if met:
            return made
    return [*made, (stream.flush(), False)]


def _naive(pieces: list[str], stop: list[str]) -> list[tuple[str, bool]]:
    """Every stop string looked for in all that is held back, after every piece."""
    held, made = "", []
    for piece in pieces:
        held += piece
        found = [held.find(one) for one in stop if one in held]
        if found:
            return [*made, (held[: min(found)], True)]
        beginnings = [one[:length] for one in stop for length in range(1, len(one))]
        keep = max((len(one) for one in beginnings if held.endswith(one)), default=0)
        made.append((held[: len(held) - keep], False))
        held = held[len(held) - keep :]
    return [*made[:-1], (made[-1][0] + held, False)]


@given(st.text(alphabet="ab\n", max_size=40), st.lists(st.text(alphabet="ab\n", min_size=1, max_size=6), max_size=8))
@settings(max_examples=500, deadline=None)
def test_each_piece_is_what_looking_for_every_stop_string_gives(text: str, stop: list[str]) -> None:
    ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    pieces = [piece for piece, _ in _pushes(ids, ())]
    assert _pushes(ids, tuple(stop)) == _naive(pieces, stop)


def test_a_character_costs_the_same_under_one_stop_string_and_under_a_thousand() -> None:
    class Counting(dict[tuple[int, str], int]):
        asked = 0

        def get(self, *arguments: Any) -> Any:
            self.asked += 1
            return super().get(*arguments)

    text = "abracadabra" * 100
    for stop in (("abrak",), tuple(f"abracadab{number}" for number in range(1024))):
        made = StopAutomaton(stop)
        made._next = counting = Counting(made._next)
        state = 0
        for character in text:
            state = made.step(state, character)
        assert counting.asked <= 2 * len(text)


def test_what_the_first_tokens_complete_stops_nothing() -> None:
    ids = [TOKENIZER(character, add_special_tokens=False)["input_ids"][0] for character in "abcabcd"]
    text = "".join(piece for piece, _ in _pushes(ids, ("abc",), min_tokens=3))
    assert text == "abc"  # the second one stopped
    assert "".join(piece for piece, _ in _pushes(ids, ("abc",), min_tokens=6)) == "abcabcd"
    special = TOKENIZER.convert_tokens_to_ids("<|fim_middle|>")
    assert _pushes([special, ids[0], special], ("<|fim_middle|>",), min_tokens=1)[-1] == ("", True)


@pytest.mark.parametrize(
    ("text", "least", "kept", "cut"),
    [
        ("a\nb", 0, "a\nb", False),
        ("a\n  b\n\tc", 1, "a\n  b\n\tc", False),
        ("a\n  b\n c\n  d", 2, "a\n  b\n ", True),
        ("a\n  b\n\n  c", 2, "a\n  b\n", True),
        ("a\n  ", 4, "a\n  ", False),
    ],
)
def test_a_line_that_is_indented_less_ends_the_text(text: str, least: int, kept: str, cut: bool) -> None:
    assert Lines(least).take(text) == (kept, cut)
    lines, made = Lines(least), ""
    for character in text:  # however it is cut into pieces
        part, ended = lines.take(character)
        made += part
        if ended:
            break
    assert (made, ended) == (kept, cut) and lines.any_ended


def test_what_codellama_fills_a_gap_with_ends_at_its_own_end_token() -> None:
    tokenizer, model = (
        sentencepiece("normalizer"),
        LlamaForCausalLM(LlamaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1)),
    )
    ends = end_ids(model, tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["▁<EOT>"]})
    assert end_ids(model, tokenizer) == ends | {len(tokenizer) - 1}
