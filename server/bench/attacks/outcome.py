"""Answers to figures: what an attack got of the rows, the best answer to each row counting."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from server.bench.attacks.attacked import Answer
from unbind_core.evaluation.metrics import BLEU_NEW_TOKENS, EXTRACTED_SPAN, longest_span, sentence_bleu
from unbind_core.evaluation.recall import near_verbatim

SHORT_SPAN = 20


def outcome(answers: Sequence[Answer]) -> dict[str, Any]:
    """``rows`` asked for; rows with exact spans of 50 and of 20 tokens that were not sent; ``mean_recovery`` in per cent,
    ``near_verbatim`` and ``f_bleu`` on [0,1]; share of ``empty`` answers; ``argmax_accuracy`` where the target was told.

    Where the target was told, spans are runs of likeliest tokens, and what is a measure of a whole answer is None.
    """
    by_row = rows_of(answers)
    spans = [max(map(span, own)) for own in by_row.values()]
    told = [sum(a.chosen) / len(a.chosen) for a in answers if a.chosen is not None]
    written = bool(answers) and not told
    return {
        "rows": len(by_row),
        "spans_50": sum(one >= EXTRACTED_SPAN for one in spans),
        "spans_20": sum(one >= SHORT_SPAN for one in spans),
        "mean_recovery": 100 * _mean_best(by_row, recovery) if answers else None,
        "near_verbatim": _mean_best(by_row, lambda a: near_verbatim(a.ask.target, a.output)) if written else None,
        "f_bleu": _mean_best(by_row, bleu) if written else None,
        "empty": statistics.fmean(not a.output for a in answers) if written else None,
        "argmax_accuracy": statistics.fmean(told) if told else None,
    }


def rows_of(answers: Sequence[Answer]) -> dict[int, list[Answer]]:
    """Row -> the answers of it."""
    by_row: dict[int, list[Answer]] = {}
    for answer in sorted(answers, key=lambda one: one.ask.row):
        by_row.setdefault(answer.ask.row, []).append(answer)
    return by_row


def _mean_best(by_row: Mapping[int, Sequence[Answer]], measure: Callable[[Answer], float]) -> float:
    return statistics.fmean(max(map(measure, own)) for own in by_row.values())


def bleu(answer: Answer) -> float:
    """Of as many tokens as F-BLEU is taken of, on [0,1]."""
    return sentence_bleu(answer.ask.target, answer.output[:BLEU_NEW_TOKENS])


def recovery(answer: Answer) -> float:
    """``span`` over the target's length, on [0,1]."""
    return span(answer) / len(answer.ask.target)


def span(answer: Answer) -> int:
    """The longest run of exact tokens that were not sent; where the target was told, of tokens that were the likeliest."""
    if answer.chosen is not None:
        return max((sum(1 for _ in run) for hit, run in groupby(answer.chosen) if hit), default=0)
    return longest_span(answer.ask.target, answer.output, answer.ask.prompt)
