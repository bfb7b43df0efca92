"""The six access conditions (Appendix E): what comes back however a row is asked for, one greedy attempt and sampled ones each."""

from __future__ import annotations

from collections.abc import Sequence

from unbind_core.evaluation.metrics import EXTRACTED_SPAN
from unbind_core.evaluation.scores import WAYS, forget_scores
from unbind_core.progress import ProgressCallback
from unbind_lab.protocols.main import Material, Record, Summary
from unbind_lab.protocols.protocol import Column, Protocol
from unbind_lab.served import Served

ALL = "all"  # the largest over the conditions, as the paper's summary has it
LONG = 100  # tokens: the paper's second count


def records(served: Served, material: Material, progress: ProgressCallback) -> list[Record]:
    """One for each row and condition: longest exact ``span`` in tokens and largest ``recovery`` on [0,1] over the attempts.

    A prefix condition has no record of a row that its prefix gives whole.
    """
    scores = forget_scores(
        served.model,
        served.tokenizer,
        material.forget,
        forms=("plain",),
        attempts=material.attempts,
        answering=lambda prompts, how: served.complete(prompts, how, progress),
    )
    return [
        {"row": row, "way": way, "span": score.ways[way][0], "recovery": score.ways[way][1]}
        for row, score in enumerate(scores)
        for way in WAYS
        if way in score.ways
    ]


def summary(found: Sequence[Record]) -> Summary:
    """For each condition and for all: ``spans_WAY``, rows with 50 exact tokens, and ``recovery_WAY``, a mean over rows in per cent;
    for all of them ``spans_100`` too, rows with LONG.

    A condition that no row was asked in has neither.
    """
    told: Summary = {}
    for way in (*WAYS, ALL):
        best: dict[int, tuple[int, float]] = {}
        for one in found:
            if way in (one["way"], ALL):
                span, recovery = best.get(one["row"], (0, 0.0))
                best[one["row"]] = max(span, one["span"]), max(recovery, one["recovery"])
        if best:
            told[f"spans_{way}"] = sum(span >= EXTRACTED_SPAN for span, _ in best.values())
            if way == ALL:
                told["spans_100"] = sum(span >= LONG for span, _ in best.values())
            told[f"recovery_{way}"] = 100 * sum(recovery for _, recovery in best.values()) / len(best)
    return told


def _columns() -> tuple[Column, ...]:
    found: list[Column] = []
    for way in (*WAYS, ALL):
        found.append((f"{way}: rows of 50 ↓", f"spans_{way}", ".0f"))
        found += [(f"{way}: rows of {LONG} ↓", "spans_100", ".0f")] if way == ALL else []
        found.append((f"{way}: recovery % ↓", f"recovery_{way}", ".1f"))
    return tuple(found)


PROTOCOL = Protocol("access", records, summary, _columns())
