"""Near-verbatim recall: long stretches with small slips count, short ones and those out of order do not."""

from __future__ import annotations

from unbind_core.evaluation.recall import near_verbatim

TARGET = list(range(100))
OTHER = list(range(1000, 1100))


def test_a_text_that_came_back_whole_is_recalled_whole() -> None:
    assert near_verbatim(TARGET, [*OTHER, *TARGET, *OTHER]) == 1.0


def test_unrelated_text_and_nothing_recall_nothing() -> None:
    assert near_verbatim(TARGET, OTHER) == near_verbatim(TARGET, []) == near_verbatim([], TARGET) == 0.0


def test_a_slip_does_not_tear_a_stretch() -> None:
    assert near_verbatim(TARGET, [*TARGET[:15], 7000, *TARGET[16:30], *OTHER]) == 29 / 100


def test_blocks_far_apart_each_have_to_be_long_enough() -> None:
    short = [*TARGET[:19], *OTHER[:10], *TARGET[29:48]]
    assert near_verbatim(TARGET, short) == 0.0
    assert near_verbatim(TARGET, [*TARGET[:20], *OTHER[:10], *TARGET[30:48]]) == 20 / 100


def test_what_comes_out_of_order_counts_once() -> None:
    assert near_verbatim(TARGET, [*TARGET[60:], *TARGET[:60]]) == 60 / 100


def test_a_target_shorter_than_a_block_must_come_back_whole() -> None:
    assert near_verbatim(TARGET[:8], TARGET) == 1.0
    assert near_verbatim(TARGET[:8], TARGET[:7]) == 0.0
