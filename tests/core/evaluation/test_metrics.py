"""BLEU's golden values and exact spans against a plain reading of the definition."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbind_core.evaluation.metrics import longest_span, sentence_bleu


@pytest.mark.parametrize(("length", "floor"), [(128, 0.00395), (64, 0.00800), (16, 0.03459)])
def test_no_overlap_scores_the_papers_floor(length: int, floor: float) -> None:
    assert sentence_bleu([1] * length, [2] * length) == pytest.approx(floor, abs=5e-6)


def test_equal_sequences_score_one_and_empty_ones_zero() -> None:
    assert sentence_bleu([1, 2, 3, 4, 5], [1, 2, 3, 4, 5]) == pytest.approx(1.0)
    assert sentence_bleu([], [1]) == sentence_bleu([1], []) == 0.0


def test_a_short_hypothesis_is_penalised() -> None:
    full = list(range(40))
    assert sentence_bleu(full, full[:20]) == pytest.approx(2.718281828 ** (1 - 40 / 20))


tokens = st.lists(st.integers(0, 3), max_size=12)


@given(tokens, tokens, tokens)
def test_the_longest_span_is_in_target_and_output_and_not_in_the_prompt(
    target: list[int], output: list[int], prompt: list[int]
) -> None:
    def within(part: tuple[int, ...], whole: list[int]) -> bool:
        return any(tuple(whole[i : i + len(part)]) == part for i in range(len(whole) - len(part) + 1))

    spans = {tuple(target[i:j]) for i in range(len(target)) for j in range(i + 1, len(target) + 1)}
    allowed = [len(s) for s in spans if within(s, output) and not within(s, prompt)]
    assert longest_span(target, output, prompt) == max(allowed, default=0)
