"""Code that is like the rows to forget (the paper's table 4): what a system does to its likelihood.

Groups are of the reported retain rows without those that hold 50 tokens of a forget row. The paper's neighbours are found by
UniXcoder and reviewed by hand; here they are the nearest by TF-IDF over identifiers, one for each forget row and each once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from unbind_core.encoding import encode
from unbind_core.evaluation import neighbours as found_by
from unbind_core.evaluation.neighbours import nearest, repeating
from unbind_core.progress import ProgressCallback
from unbind_core.windows import perplexity_windows
from unbind_lab.protocols.main import Material, Record, Summary
from unbind_lab.protocols.protocol import Column, Protocol
from unbind_lab.served import Served

GROUPS = {
    "same": "same language",
    "cross": "another language",
    "format": "like length",
    "ordinary": "ordinary",
}


def records(served: Served, material: Material, _progress: ProgressCallback) -> list[Record]:
    """One a retain row of any group: its ``groups``, and ``nll``, a sum over ``tokens``, natural logarithm."""
    groups = _groups(material)
    chosen = sorted({row for rows in groups.values() for row in rows})
    found: dict[int, Record] = {
        row: {"row": row, "groups": [name for name in GROUPS if row in groups[name]], "nll": 0.0, "tokens": 0}
        for row in chosen
    }
    rows = [material.retain[row] for row in chosen]
    windows = perplexity_windows(served.tokenizer, rows)
    for index, q in served.log_probabilities(windows):
        one = found[chosen[windows[index].row]]
        tokens = q.new_tensor(windows[index].ids[windows[index].first_target :]).long()
        one["nll"] -= float(q.gather(1, tokens[:, None]).sum())
        one["tokens"] += len(tokens)
    return list(found.values())


def _groups(material: Material) -> dict[str, set[int]]:
    tokenizer, forget, retain = material.retrained.tokenizer, material.forget, material.retain
    repeated = repeating(tokenizer, forget, retain)
    own = {row.language for row in forget}
    apart = [index for index in range(len(retain)) if index not in repeated]
    same = [index for index in apart if retain[index].language in own]
    cross = [index for index in apart if retain[index].language not in own]

    def near(pool: Sequence[int]) -> set[int]:
        return {pool[i] for i in nearest(forget, [retain[index] for index in pool])} if pool else set()

    lengths = {index: len(encode(tokenizer, retain[index].text)) for index in apart}
    like = {
        min(apart, key=lambda index: abs(lengths[index] - wanted))
        for wanted in (len(encode(tokenizer, row.prompt + row.continuation)) for row in forget)
    }
    neighbours = near(same) | near(cross)
    return {"same": near(same), "cross": near(cross), "format": like, "ordinary": {*apart} - neighbours - like}


def summary(found: Sequence[Record]) -> Summary:
    """``nll_GROUP``, mean over the tokens of a group, and ``rows_GROUP``; a group without rows has neither."""
    told: Summary = {}
    for name in GROUPS:
        own = [one for one in found if name in one["groups"]]
        if own:
            told[f"nll_{name}"] = sum(one["nll"] for one in own) / sum(one["tokens"] for one in own)
            told[f"rows_{name}"] = len(own)
    return told


def beside(own: Mapping[str, float], full: Mapping[str, float]) -> Summary:
    """``rise_GROUP``, against M_full in per cent."""
    there = [name for name in GROUPS if f"nll_{name}" in own]
    return {f"rise_{name}": 100 * (own[f"nll_{name}"] / full[f"nll_{name}"] - 1) for name in there}


def _columns() -> Iterable[Column]:
    for name, told in GROUPS.items():
        yield f"{told}: NLL ↓", f"nll_{name}", ".4f"
        yield "rise %", f"rise_{name}", "+.2f"


PROTOCOL = Protocol("related", records, summary, tuple(_columns()), beside, further=(found_by,))
