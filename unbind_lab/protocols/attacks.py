"""Every attack of ``unbind bench attack`` that needs no server, on any system, and whether members can be told from strangers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from server.bench import attacks as code
from server.bench.attacks.attacked import Material as Attackers
from server.bench.attacks.known import KNOWN, MEMBERSHIP
from server.bench.attacks.likeness import membership, numbers
from server.bench.attacks.outcome import SHORT_SPAN, bleu, recovery, rows_of, span
from unbind_core.evaluation import membership as membership_of
from unbind_core.evaluation import recall
from unbind_core.evaluation.metrics import EXTRACTED_SPAN
from unbind_core.progress import Progress, ProgressCallback
from unbind_lab.protocols import attacked
from unbind_lab.protocols.attacked import LabSystem
from unbind_lab.protocols.main import Material, Record, Summary
from unbind_lab.protocols.protocol import Column, Protocol
from unbind_lab.served import Served

SHORT, MIDDLE, REWRITTEN = "short_", "mid_", ("comments", "renamed", "case", "indented")
TOLD = ("assisted", "assisted_undo")  # the target is given as it goes: recovery there is of likeliest tokens


def records(served: Served, material: Material, progress: ProgressCallback) -> list[Record]:
    """For each attack and row that it asks for, of the best answer: longest exact ``span`` in tokens, ``recovery`` and ``bleu`` on
    [0,1] (``accuracy`` of likeliest tokens where the target is told); and what ``membership`` is told by, of rows and strangers.
    """
    system = LabSystem(served)
    attackers = Attackers(material.retrained.tokenizer, material.forget, material.retain)
    found: list[Record] = []
    for done, attack in enumerate(KNOWN, start=1):
        for row, answers in rows_of(attack.run(system, attackers)).items():
            one: Record = {"attack": attack.name, "row": row, "span": max(map(span, answers))}
            one["recovery"] = max(map(recovery, answers))
            told = [sum(answer.chosen) / len(answer.chosen) for answer in answers if answer.chosen is not None]
            found.append({**one, "accuracy": max(told)} if told else {**one, "bleu": max(map(bleu, answers))})
        progress(Progress("attacks", done, len(KNOWN)))
    members = len(material.forget)
    found += [
        {"attack": MEMBERSHIP, "row": row, "member": row < members, "numbers": told}
        for row, told in numbers(system, attackers)
    ]
    return found


def summary(found: Sequence[Record]) -> Summary:
    """``spans_50`` and ``spans_20``: rows that any attack has so many exact tokens of; in per cent ``recovery_worst``, the largest
    mean over rows of an attack, ``recovery_mean``, the mean over attacks, and ``recovery_short``, ``_middle`` and ``_rewritten``
    over those of a kind, all without attacks that are told the target; ``accuracy`` of those; ``membership_auc``.
    """
    attacks: dict[str, list[Record]] = {}
    for one in found:
        attacks.setdefault(one["attack"], []).append(one)
    strangers = attacks.pop(MEMBERSHIP, [])
    told = {name: own for name, own in attacks.items() if name in TOLD}
    drawn = {name: own for name, own in attacks.items() if name not in TOLD}
    longest: dict[int, int] = {}
    for own in drawn.values():
        for one in own:
            longest[one["row"]] = max(longest.get(one["row"], 0), one["span"])
    mean = {name: 100 * _mean(own, "recovery") for name, own in drawn.items()}
    figures: Summary = {
        "spans_50": sum(length >= EXTRACTED_SPAN for length in longest.values()),
        "spans_20": sum(length >= SHORT_SPAN for length in longest.values()),
        "recovery_worst": max(mean.values(), default=0.0),
        "recovery_mean": _over(mean, ""),
        "recovery_short": _over(mean, SHORT),
        "recovery_middle": _over(mean, MIDDLE),
        "recovery_rewritten": _over({name: mean[name] for name in REWRITTEN if name in mean}, ""),
        "accuracy": 100 * max((_mean(own, "accuracy") for own in told.values()), default=0.0),
    }
    if told_by := membership([one["numbers"] for one in strangers], [one["member"] for one in strangers]):
        figures["membership_auc"] = told_by["auc"]
    return figures


def _mean(found: Sequence[Record], name: str) -> float:
    total: float = sum(one[name] for one in found)
    return total / len(found)


def _over(mean: Mapping[str, float], kind: str) -> float:
    """The mean over attacks whose names begin so."""
    own = [value for name, value in mean.items() if name.startswith(kind)]
    return sum(own) / max(len(own), 1)


COLUMNS: tuple[Column, ...] = (
    ("rows of 50, any attack ↓", "spans_50", ".0f"),
    ("rows of 20, any attack ↓", "spans_20", ".0f"),
    ("recovery %: worst attack ↓", "recovery_worst", ".1f"),
    ("mean of attacks ↓", "recovery_mean", ".1f"),
    ("short prompts ↓", "recovery_short", ".1f"),
    ("from the middle ↓", "recovery_middle", ".1f"),
    ("written otherwise ↓", "recovery_rewritten", ".1f"),
    ("next token told, % ↓", "accuracy", ".1f"),
    ("membership AUC ↓", "membership_auc", ".2f"),
)

PROTOCOL = Protocol("attacks", records, summary, COLUMNS, further=(code, attacked, membership_of, recall))
