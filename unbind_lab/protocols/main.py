"""The main protocol (Appendix A.3), and beside it what silence does not reward.

F-BLEU, R-PPL and R-BLEU as published; FR, UR and FU-H of eq. (12) from unrounded values, over the utilities that are measured:
HE+ and MBPP+ are of the protocol ``evalplus``.
Beside them KL(M_retrain || system) on the forget continuations, rows with 50 exact tokens, mean recovery (Appendix E.2) and empty
answers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from unbind_core.evaluation.completions import retain_prompts
from unbind_core.evaluation.metrics import BLEU_NEW_TOKENS, EXTRACTED_SPAN, sentence_bleu
from unbind_core.evaluation.scores import forget_scores
from unbind_core.progress import ProgressCallback
from unbind_core.rows import ForgetRow, RetainRow, spread
from unbind_core.windows import Window, forget_windows, perplexity_windows
from unbind_lab.served import Served

Record = dict[str, Any]
Summary = dict[str, float]
COUNTED = ("he_plus", "mbpp_plus")  # the utilities that are numbers of tasks
LARGEST = 700.0  # a mean NLL that still has an exponential


@dataclass(frozen=True)
class Material:
    """The rows that systems are measured on, how many of the retain rows are completed, M_retrain, and how often each access
    condition is tried, how many takedowns follow each other, and the folder of HumanEval+ and MBPP+, where there is one.
    """

    forget: Sequence[ForgetRow]
    retain: Sequence[RetainRow]
    completed: int
    retrained: Served
    attempts: int = 5
    takedowns: int = 20
    evalplus: Path | None = None

    @cached_property
    def windows(self) -> list[Window]:
        """The forget rows, continuations scored."""
        return forget_windows(self.retrained.tokenizer, self.forget, range(len(self.forget)))

    @cached_property
    def truth(self) -> dict[int, Tensor]:
        """Index of such a window -> what M_retrain says of it, FP32 [N,V]."""
        return dict(self.retrained.log_probabilities(self.windows))


def records(served: Served, material: Material, progress: ProgressCallback) -> list[Record]:
    """One a row: ``nll`` is a sum over ``tokens``, natural logarithm, and so is ``kl``; ``bleu`` on [0,1], of completed rows."""
    return [*_forget(served, material, progress), *_retain(served, material, progress)]


def _forget(served: Served, material: Material, progress: ProgressCallback) -> list[Record]:
    scores = forget_scores(
        served.model,
        served.tokenizer,
        material.forget,
        forms=("plain",),
        attempts=0,
        answering=lambda prompts, how: served.complete(prompts, how, progress),
    )
    found: list[Record] = [
        {
            "role": "forget",
            "row": row,
            "bleu": score.bleu["plain"],
            "span": score.span,
            "recovery": score.recovery,
            "empty": score.empty,
            "nll": 0.0,
            "kl": 0.0,
            "tokens": 0,
        }
        for row, score in enumerate(scores)
    ]
    for index, q in served.log_probabilities(material.windows):
        p, window = material.truth[index], material.windows[index]
        one = found[window.row]
        one["nll"] += _nll(window, q)
        one["kl"] += float((p.exp() * (p - q)).sum())
        one["tokens"] += window.target_count
    return found


def _retain(served: Served, material: Material, progress: ProgressCallback) -> list[Record]:
    found: list[Record] = [
        {"role": "retain", "row": row, "nll": 0.0, "tokens": 0} for row in range(len(material.retain))
    ]
    windows = perplexity_windows(served.tokenizer, material.retain)
    for index, q in served.log_probabilities(windows):
        one = found[windows[index].row]
        one["nll"] += _nll(windows[index], q)
        one["tokens"] += windows[index].target_count
    some = spread(range(len(material.retain)), material.completed)
    asked = [row for row in some if retain_prompts(served.tokenizer, material.retain, [row])[0]]  # others are too short
    prompts, references = retain_prompts(served.tokenizer, material.retain, asked)
    for row, reference, output in zip(
        asked, references, served.complete(prompts, BLEU_NEW_TOKENS, progress), strict=True
    ):
        found[row]["bleu"] = sentence_bleu(reference, output)
    return found


def _nll(window: Window, log_probabilities: Tensor) -> float:
    tokens = log_probabilities.new_tensor(window.ids[window.first_target :]).long()
    return -float(log_probabilities.gather(1, tokens[:, None]).sum())


def summary(found: Sequence[Record]) -> Summary:
    """Of records alone. R-PPL is one exponential over all tokens, ``kl`` a mean over tokens, ``mean_recovery`` in per cent."""
    forget = [one for one in found if one["role"] == "forget"]
    retain = [one for one in found if one["role"] == "retain"]
    return {
        "f_bleu": _mean([one["bleu"] for one in forget]),
        "r_ppl": math.exp(min(_per_token(retain, "nll"), LARGEST)),
        "r_bleu": _mean([one["bleu"] for one in retain if "bleu" in one]),
        "kl": _per_token(forget, "kl"),
        "forget_nll": _per_token(forget, "nll"),
        "spans_50": sum(one["span"] >= EXTRACTED_SPAN for one in forget),
        "mean_recovery": 100 * _mean([one["recovery"] for one in forget]),
        "empty": sum(one["empty"] for one in forget),
    }


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / max(len(values), 1)


def _per_token(found: Sequence[Record], name: str) -> float:
    tokens: int = sum(one["tokens"] for one in found)
    return math.fsum(one[name] for one in found) / max(tokens, 1)


def joint_score(system: Mapping[str, float], full: Mapping[str, float]) -> Summary:
    """FR, UR and FU-H of eq. (12) against M_full; UR is the geometric mean of as many capped ratios as M_full has utilities.
    One that is zero of M_full contributes zero, as in the paper.

    Raises ValueError where M_full has no F-BLEU: then the score is undefined; and KeyError where the system lacks a utility.
    """
    if full["f_bleu"] == 0:
        raise ValueError("M_full gives nothing back of the forget rows: FU-H is undefined")
    fr = max(0.0, 1 - system["f_bleu"] / full["f_bleu"])
    rising = ["r_bleu", *(name for name in COUNTED if name in full)]
    ratios = [full["r_ppl"] / system["r_ppl"], *(system[one] / full[one] if full[one] else 0.0 for one in rising)]
    ur = math.prod(min(1.0, ratio) for ratio in ratios) ** (1 / len(ratios))
    return {"fr": fr, "ur": ur, "fu_h": 100 * 2 * fr * ur / (fr + ur) if fr + ur else 0.0}
