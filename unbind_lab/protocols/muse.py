"""MUSE's numbers that one forget set gives (arXiv 2407.06460), as OpenUnlearning defines them, on code.

Verbatim memorisation: ROUGE-L of the continuation. Knowledge memorisation, on forget rows and as utility on retain rows: MUSE asks
questions; here a line is taken out of a row and asked for by fill in the middle (by what stands before it, where the tokenizer
has none). Privacy leakage: Min-K% probabilities of forget rows and of retain rows that no model saw. Beside them OpenUnlearning's
exact memorisation and extraction strength; where not even the last token is right, the latter is 0 (theirs: 1 / tokens).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from unbind_core.encoding import encode_prompt, fim_prompt
from unbind_core.evaluation import membership
from unbind_core.evaluation.membership import auc
from unbind_core.evaluation.metrics import BLEU_NEW_TOKENS
from unbind_core.progress import ProgressCallback
from unbind_core.rows import ForgetRow, split_text
from unbind_core.windows import forget_prompt, forget_windows
from unbind_lab.protocols.main import Material, Record, Summary
from unbind_lab.protocols.protocol import Column, Protocol
from unbind_lab.served import Served

SHARE = 0.4  # of a row's tokens, the least likely: Min-K%
LINE_TOKENS = 32
FORGET, RETAIN = "forget", "retain"


def records(served: Served, material: Material, progress: ProgressCallback) -> list[Record]:
    """One a forget row and one a retain row that has anything behind its cut: ``verbatim`` and ``knowledge`` (ROUGE-L F1 on [0,1],
    the latter of rows with a line to ask for), ``min_k`` and M_retrain's, ``exact`` and ``strength`` on [0,1].
    """
    strangers = [ForgetRow(*split_text(row.text)) for row in material.retain]
    found: list[Record] = []
    for role, rows in ((FORGET, material.forget), (RETAIN, strangers)):
        own: dict[int, Record] = {
            index: {"role": role, "row": index} for index, row in enumerate(rows) if row.continuation
        }
        if role == FORGET:
            asked = [forget_prompt(served.tokenizer, row, "plain") for row in rows]
            outputs = served.complete([prompt for prompt, _ in asked], BLEU_NEW_TOKENS, progress)
            for one, (_, target), output in zip(own.values(), asked, outputs, strict=True):
                one["verbatim"] = rouge_l(served.text(target[:BLEU_NEW_TOKENS]), served.text(output))
        lines = [(index, *line) for index in own if (line := _line(served, rows[index])) is not None]
        answers = served.complete([prompt for _, prompt, _ in lines], LINE_TOKENS, progress)
        for (index, _, wanted), answer in zip(lines, answers, strict=True):
            own[index]["knowledge"] = rouge_l(wanted, served.text(answer).lstrip("\n").split("\n")[0])
        for name, system in (("", served), ("retrained_", material.retrained)):
            for index, told in _told(system, rows, [*own]):
                own[index] |= {f"{name}min_k": told[0]} | ({} if name else {"exact": told[1], "strength": told[2]})
        found += own.values()
    return found


def _line(served: Served, row: ForgetRow) -> tuple[list[int], str] | None:
    """Prompt and text of the longest line of a row's continuation; None where it says nothing."""
    text = row.prompt + row.continuation
    lines = row.continuation.splitlines(keepends=True)
    longest = max(lines, key=lambda line: len(line.strip()))
    if not _words(longest):
        return None
    at = len(row.prompt) + sum(map(len, lines[: lines.index(longest)]))
    before, after = text[:at], text[at + len(longest) :]
    prompt = fim_prompt(served.tokenizer, before, after)
    return (encode_prompt(served.tokenizer, before) if prompt is None else prompt), longest


def _told(
    system: Served, rows: Sequence[ForgetRow], indices: Sequence[int]
) -> Iterator[tuple[int, tuple[float, float, float]]]:
    """(row, (mean NLL of its least likely tokens, share of tokens that are the likeliest, share of the end that all are))."""
    windows = forget_windows(system.tokenizer, rows, indices)
    logs: dict[int, list[float]] = {}
    right: dict[int, list[bool]] = {}
    for index, q in system.log_probabilities(windows):
        window = windows[index]
        tokens = torch.tensor(window.ids[window.first_target :], device=q.device)
        logs.setdefault(window.row, []).extend((-q.gather(1, tokens[:, None])[:, 0]).tolist())
        right.setdefault(window.row, []).extend((q.argmax(-1) == tokens).tolist())
    for row, values in logs.items():
        least = sorted(values, reverse=True)[: max(1, round(SHARE * len(values)))]
        end = next((k for k, yes in enumerate(reversed(right[row])) if not yes), len(values))
        yield row, (sum(least) / len(least), sum(right[row]) / len(values), end / len(values))


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


def rouge_l(reference: str, output: str) -> float:
    """F1 of the longest common subsequence of words, letters and digits in lower case, on [0,1]; nothing is stemmed."""
    wanted, said = _words(reference), _words(output)
    row = [0] * (len(said) + 1)
    for word in wanted:
        before = 0
        for at, other in enumerate(said, start=1):
            before, row[at] = row[at], before + 1 if word == other else max(row[at], row[at - 1])
    return 2 * row[-1] / (len(wanted) + len(said)) if wanted and said else 0.0


def summary(found: Sequence[Record]) -> Summary:
    """In per cent. ``privleak``: AUC / M_retrain's AUC - 1, where an AUC is the chance that a forget row's Min-K% NLL is above a
    stranger's: below 0 rows are known still, above 0 they are avoided.
    """
    own, strangers = ([one for one in found if one["role"] == role] for role in (FORGET, RETAIN))
    members = np.array([one["role"] == FORGET for one in found])
    areas = [auc(np.array([one[name] for one in found]), members) for name in ("min_k", "retrained_min_k")]
    return {
        "verbatim": _mean(own, "verbatim"),
        "knowledge": _mean(own, "knowledge"),
        "utility": _mean(strangers, "knowledge"),
        "privleak": 100 * (areas[0] / areas[1] - 1) if areas[1] else 0.0,
        "exact": _mean(own, "exact"),
        "strength": _mean(own, "strength"),
    }


def _mean(found: Sequence[Record], name: str) -> float:
    values = [one[name] for one in found if name in one]
    total: float = sum(values)
    return 100 * total / max(len(values), 1)


COLUMNS: tuple[Column, ...] = (
    ("verbatim memorisation ↓", "verbatim", ".1f"),
    ("knowledge memorisation ↓", "knowledge", ".1f"),
    ("utility ↑", "utility", ".1f"),
    ("privacy leakage, 0 is best", "privleak", "+.1f"),
    ("exact memorisation ↓", "exact", ".1f"),
    ("extraction strength ↓", "strength", ".1f"),
)

PROTOCOL = Protocol("muse", records, summary, COLUMNS, further=(membership,))
