"""Text metrics over token ids: sentence BLEU and exact spans (Appendices A.3 and E)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

BLEU_NEW_TOKENS = 128  # of a completion that BLEU is taken of
EXTRACTED_SPAN = 50  # tokens in a row that count as the text itself


def sentence_bleu(reference: Sequence[int], hypothesis: Sequence[int], order: int = 4) -> float:
    """Sentence BLEU-4 on [0,1] with uniform weights and the standard brevity penalty, over token ids (Appendix A.3).

    A zero precision becomes 1 / max(2 N_n, 1) with N_n the hypothesis' n-grams; an empty side scores 0.
    """
    if not reference or not hypothesis:
        return 0.0
    logs = 0.0
    for n in range(1, order + 1):
        total = max(len(hypothesis) - n + 1, 0)
        found = Counter(tuple(hypothesis[i : i + n]) for i in range(total))
        allowed = Counter(tuple(reference[i : i + n]) for i in range(max(len(reference) - n + 1, 0)))
        matches = sum(min(count, allowed[gram]) for gram, count in found.items())
        logs += math.log(matches / total if matches else 1.0 / max(2 * total, 1))
    brevity = min(0.0, 1.0 - len(reference) / len(hypothesis))
    return math.exp(logs / order + brevity)


def longest_span(target: Sequence[int], output: Sequence[int], prompt: Sequence[int] = ()) -> int:
    """Length of the longest contiguous run of ``target`` that ``output`` has and ``prompt`` does not (Appendix E.2).

    A run counts only if its whole token sequence does not already stand in the prompt that was supplied.
    """
    wanted = np.asarray(target, dtype=np.int64)
    # The longest run ending at a place is the only one to look at: if the prompt has it, it has its suffixes too.
    in_output, in_prompt = _longest_ending(wanted, output), _longest_ending(wanted, prompt)
    return int(np.where(in_output > in_prompt, in_output, 0).max(initial=0))


def spans(ids: Sequence[int], length: int) -> set[tuple[int, ...]]:
    """All contiguous runs of so many tokens."""
    return {tuple(ids[i : i + length]) for i in range(len(ids) - length + 1)}


def _longest_ending(target: NDArray[np.int64], text: Sequence[int]) -> NDArray[np.int64]:
    """For every position of ``target``: the length of the longest run ending there that occurs in ``text``."""
    best = np.zeros(len(target), dtype=np.int64)
    run = np.zeros(len(target) + 1, dtype=np.int64)
    for token in text:
        run[1:] = np.where(target == token, run[:-1] + 1, 0)
        np.maximum(best, run[1:], out=best)
    return best
