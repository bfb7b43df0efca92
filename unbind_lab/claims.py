"""Unbind's rows of the main table held against the paper's claims and the best of the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from unbind_lab.systems import BASELINES, RIVALS

Line = dict[str, Any]


def claims(found: Sequence[Line]) -> list[str]:
    """Each claim as reached or not, with the number, and the best of the others: entries that are neither reference nor Unbind."""
    known = {one["system"]: one for one in found if one["configuration"] == "shipped"}
    others = [one for one in found if one["system"] in {system.name for system in (*BASELINES, *RIVALS)}]
    scored = [one for one in others if "fu_h" in one]
    full = known["m-full"]
    told = []
    if (silent := known.get("unbind-silent")) and full["f_bleu"]:
        cut, rise = 100 * (1 - silent["f_bleu"] / full["f_bleu"]), 100 * (silent["r_ppl"] / full["r_ppl"] - 1)
        told += [
            f"`silent`, F-BLEU cut by 97 % or more: {_reached(cut >= 97)}, {cut:.1f} %",
            f"`silent`, R-PPL up by 1.6 % at most: {_reached(rise <= 1.6)}, {rise:+.2f} %",
            f"`silent`, no row with 50 exact tokens: {_reached(silent['spans_50'] == 0)}, {silent['spans_50']:.0f}",
        ]
        if "fu_h" in silent:
            told.append(_against(silent, scored, "highest FU-H", lambda one: -one["fu_h"], "fu_h", ".2f"))
    rewrite, retrained = known.get("unbind-rewrite"), known.get("m-retrain")
    if rewrite and retrained:
        told += [
            _against(
                rewrite,
                others,
                "closest F-BLEU to M_retrain's",
                lambda one: abs(one["f_bleu"] - retrained["f_bleu"]),
                "f_bleu",
                ".4f",
            ),
            _against(rewrite, others, "smallest KL from M_retrain", lambda one: float(one["kl"]), "kl", ".3f"),
        ]
    return told


def _against(
    own: Line, others: Sequence[Line], claim: str, distance: Callable[[Line], float], key: str, form: str
) -> str:
    name = f"`{own['system'].removeprefix('unbind-')}`, {claim}: "
    if not others:
        return f"{name}{own[key]:{form}}, and nothing else was measured"
    best = min(others, key=distance)
    reached = _reached(distance(own) <= distance(best))
    return (
        f"{name}{reached}, {own[key]:{form}} against {best[key]:{form}} of {best['system']} ({best['configuration']})"
    )


def _reached(yes: bool) -> str:
    return "reached" if yes else "**not reached**"
