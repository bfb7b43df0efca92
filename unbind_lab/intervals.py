"""How much of a figure is the rows that happened to be drawn: percentile bootstrap over rows, of the main protocol and of
HumanEval+ and MBPP+."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from unbind_lab.protocols import evalplus
from unbind_lab.protocols.main import COUNTED, Record, Summary, joint_score, summary

DRAWS, LEVEL = 1000, 0.95
ROLES = ("forget", "retain", *COUNTED)
Interval = tuple[float, float]


def intervals(
    system: Sequence[Record], full: Sequence[Record], *, draws: int = DRAWS, seed: int = 0
) -> dict[str, Interval]:
    """Name of a figure -> (low, high): the central LEVEL of so many summaries, each of as many forget and as many retain rows, and
    where there are any as many tasks of HumanEval+ and of MBPP+, drawn with replacement.

    FR, UR, FU-H and ``r_ppl_rise``, the rise of R-PPL in per cent, are of the same draws of M_full's records. It tells how
    figures vary with rows, not with seeds of a training. Draws in which M_full gives nothing back have no FU-H.
    Raises ValueError where the two are not of the same rows.
    """
    own, reference = _by_row(system), _by_row(full)
    if own.keys() != reference.keys():
        raise ValueError("the system and M_full were not measured on the same rows")
    roles = [role for role in ROLES if any(key[0] == role for key in own)]
    draw = np.random.default_rng(seed)
    found: dict[str, list[float]] = {}
    for _ in range(draws):
        rows: list[tuple[str, int]] = []
        for role in roles:
            keys = [key for key in own if key[0] == role]
            rows += [keys[i] for i in draw.integers(len(keys), size=len(keys))]
        figures, whole = (_figures([records[key] for key in rows]) for records in (own, reference))
        figures["r_ppl_rise"] = 100 * (figures["r_ppl"] / whole["r_ppl"] - 1)
        if whole["f_bleu"]:
            figures |= joint_score(figures, whole)
        for name, value in figures.items():
            found.setdefault(name, []).append(value)
    tail = (1 - LEVEL) / 2
    return {name: _central(values, tail) for name, values in found.items()}


def _figures(records: Sequence[Record]) -> Summary:
    counted = evalplus.summary(records) if any(one["role"] in COUNTED for one in records) else {}
    return {**summary(records), **counted}


def _by_row(records: Sequence[Record]) -> Mapping[tuple[str, int], Record]:
    return {(str(one["role"]), int(one["row"])): one for one in records}


def _central(values: Sequence[float], tail: float) -> Interval:
    low, high = np.quantile(np.array(values), (tail, 1 - tail))
    return float(low), float(high)
