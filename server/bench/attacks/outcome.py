"""Answers to figures: what an attack got of the rows, the best answer to each row counting."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
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
    by_row = {row: list(own) for row, own in groupby(sorted(answers, key=lambda a: a.ask.row), lambda a: a.ask.row)}
    best = {row: max((_span(a), _span(a) / len(a.ask.target)) for a in own) for row, own in by_row.items()}
    share = {row: max(_span(a) / len(a.ask.target) for a in own) for row, own in by_row.items()}
    told = [sum(a.chosen) / len(a.chosen) for a in answers if a.chosen is not None]
    written = not told and bool(answers)
    return {
        "rows": len(by_row),
        "spans_50": sum(span >= EXTRACTED_SPAN for span, _ in best.values()),
        "spans_20": sum(span >= SHORT_SPAN for span, _ in best.values()),
        "mean_recovery": 100 * statistics.fmean(share.values()) if share else None,
        "near_verbatim": _mean_best(by_row, near_verbatim) if written else None,
        "f_bleu": _mean_best(by_row, _bleu) if written else None,
        "empty": statistics.fmean(not a.output for a in answers) if written else None,
        "argmax_accuracy": statistics.fmean(told) if told else None,
    }


def _bleu(target: Sequence[int], output: Sequence[int]) -> float:
    return sentence_bleu(target, output[:BLEU_NEW_TOKENS])


def _mean_best(by_row: dict[int, list[Answer]], measure: Any) -> float:
    return statistics.fmean(max(measure(a.ask.target, a.output) for a in own) for own in by_row.values())


def _span(answer: Answer) -> int:
    if answer.chosen is not None:
        return max((sum(1 for _ in run) for hit, run in groupby(answer.chosen) if hit), default=0)
    return longest_span(answer.ask.target, answer.output, answer.ask.prompt)
