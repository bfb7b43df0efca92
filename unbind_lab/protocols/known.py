"""Every protocol by name: the one place that lists them."""

from __future__ import annotations

from collections.abc import Mapping

from unbind_lab.protocols import (
    ablations,
    access,
    activations,
    attacks,
    evalplus,
    layers,
    main,
    muse,
    related,
    strengths,
    successive,
    tasks,
    weights,
)
from unbind_lab.protocols.protocol import Column, Protocol

MAIN: tuple[Column, ...] = (
    ("F-BLEU ↓", "f_bleu", ".4f"),
    ("R-PPL ↓", "r_ppl", ".3f"),
    ("R-BLEU ↑", "r_bleu", ".4f"),
    ("HE+ ↑", "he_plus", ".0f"),
    ("MBPP+ ↑", "mbpp_plus", ".0f"),
    ("FR", "fr", ".3f"),
    ("UR", "ur", ".3f"),
    ("FU-H ↑", "fu_h", ".2f"),
    ("KL from M_retrain ↓", "kl", ".3f"),
    ("rows with 50 tokens ↓", "spans_50", ".0f"),
    ("recovery % ↓", "mean_recovery", ".1f"),
    ("empty answers", "empty", ".0f"),
)


def scored(own: Mapping[str, float], full: Mapping[str, float]) -> main.Summary:
    """FR, UR and FU-H; nothing where M_full gives nothing back of the rows, as they are then undefined."""
    return main.joint_score(own, full) if full["f_bleu"] else {}


PROTOCOLS = {
    one.name: one
    for one in (
        Protocol("main", main.records, main.summary, MAIN, scored),
        evalplus.PROTOCOL,
        access.PROTOCOL,
        related.PROTOCOL,
        attacks.PROTOCOL,
        muse.PROTOCOL,
        tasks.PROTOCOL,
        strengths.PROTOCOL,
        ablations.PROTOCOL,
        layers.PROTOCOL,
        activations.PROTOCOL,
        successive.PROTOCOL,
        weights.PROTOCOL,
    )
}
