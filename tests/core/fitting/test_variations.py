"""Rewritings of code as a detector is trained on: they change what they say, the same everywhere, and nothing else."""

from __future__ import annotations

import ast
import copy
import random
import re

import pytest

from unbind_core.architecture import LoadedModel
from unbind_core.fitting.variations import (
    REWRITINGS,
    Elsewhere,
    commented,
    cropped,
    identifiers,
    indented,
    recased,
    renamed,
)
from unbind_core.rows import RetainRow

CODE = """def total(self, first_value, factor=2):
    # sums things up
    result = [first_value * factor for _ in range(3)]
    if result:
        return sum(result)
    return self.total(first_value)
"""


def test_identifiers_are_names_and_neither_keywords_nor_words_of_comments() -> None:
    found = identifiers(CODE, "python")
    assert {"total", "first_value", "factor", "result"} <= found
    assert not found & {"def", "if", "return", "for", "sums", "things", "range", "sum"}
    assert "value" in identifiers("int value = other + 1;", "java") and "int" not in identifiers("int value;", "java")
    assert identifiers("any words", "a language that nobody lexes") == {"any", "words"}


@pytest.mark.parametrize("seed", range(20))
def test_renamed_code_is_the_same_program_under_other_names(seed: int) -> None:
    other = renamed(CODE, "python", random.Random(seed))
    table: dict[str, str] = {}
    ours, theirs = (re.findall(r"[A-Za-z_]\w*|\W+", text) for text in (CODE, other))
    assert len(ours) == len(theirs)
    for one, two in zip(ours, theirs, strict=True):
        assert table.setdefault(one, two) == two  # each name always becomes the same
    assert {one for one, two in table.items() if one != two} <= identifiers(CODE, "python")


def test_names_are_renamed_in_one_draw_or_another() -> None:
    assert any(renamed(CODE, "python", random.Random(seed)) != CODE for seed in range(3))


@pytest.mark.parametrize("language", ["python", "java", "sql"])
def test_comments_come_in_the_languages_own_form_and_between_the_lines(language: str) -> None:
    mark = {"python": "#", "java": "//", "sql": "--"}[language]
    text = "one = 1\n  two = 2\nthree = 3\n"
    found = [commented(text, language, random.Random(seed)) for seed in range(20)]
    assert any(mark in other for other in found)
    for other in found:
        bare = [
            line.split(f"  {mark} ")[0]
            for line in other.splitlines()
            if line.strip() and not line.strip().startswith(mark)
        ]
        assert bare == text.splitlines()


@pytest.mark.parametrize("seed", range(10))
def test_commented_python_is_the_same_program(seed: int) -> None:
    assert ast.dump(ast.parse(commented(CODE, "python", random.Random(seed)))) == ast.dump(ast.parse(CODE))


def test_another_indentation_changes_white_space_alone() -> None:
    found = {indented(CODE, "python", random.Random(seed)) for seed in range(30)}
    assert len(found) > 3
    assert all(re.sub(r"(?m)^\s+", "", other) == re.sub(r"(?m)^\s+", "", CODE) for other in found)


def test_another_letter_case_changes_letters_and_underscores_alone() -> None:
    for seed in range(20):
        other = recased(CODE, "python", random.Random(seed))
        assert other.replace("_", "").lower() == CODE.replace("_", "").lower()


@pytest.mark.parametrize("text", [CODE, "x", "no line end", "\n\n"])
def test_a_crop_is_an_end_of_the_text_and_most_of_it_may_be_gone(text: str) -> None:
    for seed in range(50):
        rest = cropped(text, random.Random(seed))
        assert text.endswith(rest) and len(rest) >= len(text) * 0.2 - 1


def test_a_seed_gives_the_same_rewriting() -> None:
    for rewrite in REWRITINGS:
        assert rewrite(CODE, "python", random.Random(5)) == rewrite(CODE, "python", random.Random(5))


def test_a_retain_row_is_asked_for_in_a_chat_from_its_first_character_on(tiny: LoadedModel) -> None:
    tokenizer = copy.deepcopy(tiny.tokenizer)
    tokenizer.chat_template = "{% for m in messages %}<u>{{ m.content }}</u>{% endfor %}<a>"
    ways = Elsewhere(tokenizer, ["plain"], lambda _: "")
    row = RetainRow("ab\n")  # so short that a cut in front of it is drawn often
    found = [ways.retain_window(3, row, random.Random(seed)) for seed in range(200)]
    assert all(window.row == 3 for window in found)
    assert any("<a>" in tokenizer.decode(list(window.ids)) for window in found)
