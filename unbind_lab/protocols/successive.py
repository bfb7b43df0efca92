"""One takedown after another (MUSE's sustainability and scalability, arXiv 2407.06460): what a system is once it was asked again
and again, and what it does meanwhile to rows that nobody has asked it to forget yet.

A takedown is of five rows, and the setting says how many there are: of the forget rows in their order, as far as they go. Unbind
has a module for each, all of them on at once; a system that is trained is trained on each, from the weights that the one before
left, as often as its configuration says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from unbind_core import fitting
from unbind_core.progress import ProgressCallback
from unbind_core.rows import ForgetRow
from unbind_lab.protocols import main, varied
from unbind_lab.protocols.main import Material, Record, Summary
from unbind_lab.protocols.protocol import Column, Protocol
from unbind_lab.served import Served

SIZE = 5  # rows of a takedown
AFTER = (1, 5, 10, 20, 50)  # takedowns after which a system is measured, and after the last
MOST = 1000  # that a table knows of
AT_ONCE = "at-once"


def takedowns(rows: Sequence[ForgetRow], most: int) -> list[list[ForgetRow]]:
    """At most so many sets of SIZE; one of all rows, where they are fewer. What is left over is asked for by none."""
    count = max(1, min(most, len(rows) // SIZE))
    return [list(rows[i * SIZE : (i + 1) * SIZE]) for i in range(count)]


def records(served: Served, material: Material, progress: ProgressCallback) -> list[Record]:
    """The main protocol's after so many takedowns, of M_full and of the system as it is; ``asked`` says of a forget row whether a
    takedown had it by then. None of a system that is asked for one set alone.
    """
    apart = served.apart
    if apart is None:
        return []
    sets = takedowns(material.forget, material.takedowns)
    found: list[Record] = []

    def variants() -> Iterator[tuple[str, int, Served]]:
        yield varied.NONE, len(material.forget), apart([], progress)
        yield AT_ONCE, len(material.forget), served
        for count in sorted({*(n for n in AFTER if n < len(sets)), len(sets)}):
            yield f"after-{count}", sum(map(len, sets[:count])), apart(sets[:count], progress)

    for name, asked, system in variants():
        for one in main.records(system, material, progress):
            told = {"asked": one["row"] < asked} if one["role"] == "forget" else {}
            found.append({"variant": name, **told, **one})
    return found


def summary(found: Sequence[Record]) -> Summary:
    """``VARIANT: FIGURE`` for every figure of the main protocol over the rows that were asked for, FR, UR and FU-H against M_full
    on the same rows; ``others`` is what is left of the F-BLEU of the rows that were not, in per cent of M_full's.
    """
    by_variant = {
        name: [one for one in found if one["variant"] == name] for name in dict.fromkeys(map(_variant, found))
    }
    full = by_variant.get(varied.NONE, [])
    told: Summary = {}
    for name, own in by_variant.items():
        asked = {one["row"] for one in own if one.get("asked")}
        figures, theirs = (main.summary([one for one in rows if _counts(one, asked)]) for rows in (own, full))
        if theirs["f_bleu"]:  # of a few rows M_full may give nothing back
            figures |= main.joint_score(figures, theirs)
        left = [
            [one["bleu"] for one in rows if one["role"] == "forget" and one["row"] not in asked] for rows in (own, full)
        ]
        if sum(left[1]):
            figures["others"] = 100 * sum(left[0]) / sum(left[1])
        told |= {f"{name}: {key}": value for key, value in figures.items()}
    return told


def _variant(one: Record) -> str:
    return str(one["variant"])


def _counts(one: Record, asked: set[int]) -> bool:
    return one["role"] != "forget" or one["row"] in asked


COLUMNS: tuple[Column, ...] = (
    ("F-BLEU of rows asked for ↓", "f_bleu", ".4f"),
    ("rows with 50 tokens ↓", "spans_50", ".0f"),
    ("empty answers", "empty", ".0f"),
    ("R-PPL ↓", "r_ppl", ".3f"),
    ("R-BLEU ↑", "r_bleu", ".4f"),
    ("FU-H ↑", "fu_h", ".2f"),
    ("KL from M_retrain ↓", "kl", ".3f"),
    ("F-BLEU of the others, % of M_full's", "others", ".1f"),
)

PROTOCOL = Protocol(
    "successive",
    records,
    summary,
    COLUMNS,
    variants={AT_ONCE: "all in one", **{f"after-{n}": f"after {n}" for n in range(1, MOST + 1)}},
    further=(varied, fitting),  # of modules that are fitted for it
)
