"""Several modules on at once: ten that were fitted apart, and two that forget some of the same rows."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from server.bench.gate.world import Retained, World, fit_one, forgetting, scores
from server.bench.gate.written import written
from unbind_core.architecture import LoadedModel
from unbind_core.module import UnbindModule
from unbind_core.progress import ProgressCallback, counted
from unbind_core.rows import ForgetRow

JOINT_MODULES, JOINT_ROWS = 10, 12
SHARED = slice(8, 16)  # of set A, which one module forgets up to their end and the other from their beginning


def joint_figures(world: World, retained: Retained, cache: Path | None, progress: ProgressCallback) -> dict[str, Any]:
    """Ten modules fitted apart: forgetting of each alone and with all on, and what all of them cost together."""
    sets = [world.forget["c"][i * JOINT_ROWS : (i + 1) * JOINT_ROWS] for i in range(JOINT_MODULES)]
    modules = [fit_one(world, rows, f"joint-{i}", "auto", cache, progress)[0] for i, rows in enumerate(sets)]
    changes = []
    for rows, module in zip(counted(sets, len(sets), "joint", progress), modules, strict=True):
        before = scores(world, rows, (), 0, progress, "joint")
        alone, together = (
            forgetting(before, scores(world, rows, on, 0, progress, "joint")) for on in ((module,), modules)
        )
        changes.append(
            {
                "f_bleu_cut_alone": alone["f_bleu_cut"],
                "f_bleu_cut_together": together["f_bleu_cut"],
                "f_bleu_cut_fim_alone": alone["f_bleu_cut_fim"],
                "f_bleu_cut_fim_together": together["f_bleu_cut_fim"],
            }
        )
    worst = max(
        one[f"{form}_alone"] - one[f"{form}_together"] for one in changes for form in ("f_bleu_cut", "f_bleu_cut_fim")
    )
    return {"modules": changes, "worst_loss": worst, **retained.measure(modules)}


def overlap_figures(
    world: World, other: LoadedModel, retained: Retained, cache: Path | None, progress: ProgressCallback
) -> dict[str, Any]:
    """Two modules that have eight rows in common: both gates open there, and both corrections are added.

    What stands in place of those rows without a module, under each and under both; and what both cost together.
    """
    rows = world.forget["a"]
    first, second = (
        fit_one(world, part, name, "auto", cache, progress)[0]
        for part, name in ((rows[: SHARED.stop], "overlap-first"), (rows[SHARED.start :], "overlap-second"))
    )
    systems = {"none": (), "first": (first,), "second": (second,), "both": (first, second)}
    return {
        "rows": len(rows[SHARED]),
        "shared": {name: _there(world, other, rows[SHARED], on, progress) for name, on in systems.items()},
        "retained": retained.measure(systems["both"]),
    }


def _there(
    world: World,
    other: LoadedModel,
    rows: Sequence[ForgetRow],
    modules: Sequence[UnbindModule],
    progress: ProgressCallback,
) -> dict[str, Any]:
    after = scores(world, rows, modules, 1, progress, "overlap")
    table = written(world, other, rows, modules)
    return {
        **{f"f_bleu_{form}": statistics.fmean(s.bleu[form] for s in after) for form in ("plain", "fim")},
        "spans_50": sum(s.span >= 50 for s in after),
        "mean_recovery": 100 * statistics.fmean(s.recovery for s in after),
        **{key: table[key] for key in ("empty", "parse", "output_ppl", "kl_to_reference", "kl_to_retrained")},
    }
