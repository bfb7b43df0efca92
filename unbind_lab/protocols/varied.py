"""One system in several variants: the main protocol's records of each, its figures under the variant's name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from unbind_core.progress import ProgressCallback
from unbind_lab.protocols import main
from unbind_lab.protocols.main import Material, Record, Summary
from unbind_lab.protocols.protocol import Column
from unbind_lab.served import Served

NONE = "none"  # the variant that is M_full
COLUMNS: tuple[Column, ...] = (
    ("F-BLEU ↓", "f_bleu", ".4f"),
    ("R-PPL ↓", "r_ppl", ".3f"),
    ("FR", "fr", ".3f"),
    ("UR", "ur", ".3f"),
    ("FU-H ↑", "fu_h", ".2f"),
    ("KL from M_retrain ↓", "kl", ".3f"),
    ("empty answers", "empty", ".0f"),
)


def records(variants: Iterator[tuple[str, Served]], material: Material, progress: ProgressCallback) -> list[Record]:
    """Those of the main protocol, each with its ``variant``."""
    return [{"variant": name, **one} for name, served in variants for one in main.records(served, material, progress)]


def summary(found: Sequence[Record]) -> Summary:
    """``VARIANT: FIGURE`` for every figure of the main protocol, and FR, UR and FU-H against the variant ``none``."""
    names = list(dict.fromkeys(one["variant"] for one in found))
    told = {name: main.summary([one for one in found if one["variant"] == name]) for name in names}
    return {
        f"{name}: {key}": value
        for name, figures in told.items()
        for key, value in {**figures, **main.joint_score(figures, told[NONE])}.items()
    }
