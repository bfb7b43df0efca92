"""A text behind other tokens has the tokens that it has within a whole text, whatever a tokenizer puts before a text alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.core.conftest import build_tokenizer
from tests.support.modules import build_module
from tests.support.sentencepiece import FIM, sentencepiece
from unbind_core.architecture import LoadedModel
from unbind_core.encoding import (
    encode,
    encode_behind,
    encode_prompt,
    fim_markers,
    fim_prompt,
    fim_template,
    marks,
    use_fim_template,
)
from unbind_core.errors import DataError
from unbind_core.evaluation.scores import extractable
from unbind_core.evaluation.verify import measure, verify
from unbind_core.fitting.fit import fit
from unbind_core.rows import ForgetRow, RetainRow
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


def test_a_token_that_the_model_does_not_know_is_refused_with_its_row(tiny: LoadedModel) -> None:
    size = tiny.model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    more = copy.deepcopy(tiny.tokenizer)
    more.add_tokens([f"<added{i}>" for i in range(size)])
    forget = [ForgetRow(PROMPT, CONTINUATION), ForgetRow("def f():\n", f"    return <added{size - 1}>\n")]
    retain = [RetainRow(f"def g{i}():\n    return {i}\n") for i in range(8)]
    module = build_module(tiny.identity, "m")
    for ask in (
        lambda: fit(tiny.model, more, forget, retain, name="m", identity=tiny.identity),
        lambda: extractable(tiny.model, more, forget),
        lambda: verify(tiny.model, more, module, forget, retain, identity=tiny.identity),
        lambda: measure(tiny.model, more, forget, retain),
    ):
        with pytest.raises(
            DataError, match=f"forget row 2: the tokenizer has the token '<added{size - 1}>', and the model does not"
        ):
            ask()


def test_a_prompt_begins_as_the_tokenizer_itself_begins_a_text() -> None:
    for tokenizer in (build_tokenizer(), build_tokenizer(bos=True), sentencepiece("metaspace")):
        assert encode_prompt(tokenizer, PROMPT) == tokenizer(PROMPT)["input_ids"]
    defines: Any = build_tokenizer(bos=True)
    defines.add_bos_token = False  # as StarCoder2's and Phi-3's, which define one
    assert defines.bos_token_id is not None
    assert encode_prompt(defines, PROMPT) == defines(PROMPT)["input_ids"] == encode(defines, PROMPT)
    defines.eos_token, defines.add_eos_token = defines.bos_token, True  # the same token, behind a text
    assert defines("")["input_ids"] == [defines.bos_token_id] and encode_prompt(defines, PROMPT) == encode(
        defines, PROMPT
    )


def test_a_template_that_is_named_is_that_of_requests_and_of_fits() -> None:
    tokenizer = sentencepiece("normalizer")
    tokenizer.add_tokens(["[BEFORE]", "[BEHIND]"], special_tokens=True)
    rows = [ForgetRow(PROMPT, CONTINUATION)]
    families = fim_template(tokenizer)
    use_fim_template(tokenizer, "")
    assert fim_template(tokenizer) == families
    use_fim_template(tokenizer, "[BEHIND]{suffix}[BEFORE]{prefix}")
    assert fim_template(copy.deepcopy(tokenizer)) == ("[BEHIND]", "{suffix}", "[BEFORE]", "{prefix}")
    before, behind = tokenizer.convert_tokens_to_ids(["[BEFORE]", "[BEHIND]"])
    assert {before, behind} <= set(marks(tokenizer))
    (window,) = forget_windows(tokenizer, rows, [0], ["fim"])
    assert list(window.ids).index(behind) < list(window.ids).index(before)
    made = fim_prompt(tokenizer, "a", "b")
    assert made is not None and made.index(behind) < made.index(before)


@pytest.mark.parametrize("wrong", ["{prefix}", "{prefix}{suffix}{prefix}", "<NOPE>{prefix}{suffix}"])
def test_what_cannot_be_a_template_is_refused(wrong: str) -> None:
    with pytest.raises(DataError, match="fim_template"):
        use_fim_template(build_tokenizer(), wrong)


def test_markers_are_those_of_all_families_the_pad_and_the_named_template_s() -> None:
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["<fim-suffix>", "<|fim_pad|>", "[MINE]", "<|file_sep|>"], special_tokens=True)
    use_fim_template(tokenizer, "{suffix}[MINE]{prefix}")
    assert set(tokenizer.convert_ids_to_tokens(list(fim_markers(tokenizer)))) == {
        *("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<fim-suffix>", "<|fim_pad|>", "[MINE]")
    }
