"""Several modules on at once: ten that were fitted apart, two that forget some of the same rows, and ever more of few rows each."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from server.bench.gate.world import Retained, World, fit_kept, fit_one, forgetting, scores
from server.bench.gate.written import written
from unbind_core.architecture import LoadedModel
from unbind_core.module import UnbindModule
from unbind_core.progress import ProgressCallback, counted
from unbind_core.rows import ForgetRow

JOINT_MODULES, JOINT_ROWS, MANY_ROWS = 10, 12, 5
SHARED = slice(8, 16)  # of set A, which one module forgets up to their end and the other from their beginning


def joint_figures(
    world: World, retained: Retained, cache: Path | None, progress: ProgressCallback, policy: str | None = None
) -> dict[str, Any]:
    """Ten modules fitted one after another: forgetting of each alone and with all on, and what all of them cost together."""
    sets = [world.forget["c"][i * JOINT_ROWS : (i + 1) * JOINT_ROWS] for i in range(JOINT_MODULES)]
    modules = [fit_one(world, rows, f"joint-{i}", "auto", cache, progress, policy, i)[0] for i, rows in enumerate(sets)]
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
    world: World,
    other: LoadedModel,
    retained: Retained,
    cache: Path | None,
    progress: ProgressCallback,
    policy: str | None = None,
) -> dict[str, Any]:
    """Two modules that have eight rows in common: both gates open there, and both corrections are added.

    What stands in place of those rows without a module, under each and under both; and what both cost together.
    """
    rows = world.forget["a"]
    first, second = (
        fit_one(world, part, name, "auto", cache, progress, policy)[0]
        for part, name in ((rows[: SHARED.stop], "overlap-first"), (rows[SHARED.start :], "overlap-second"))
    )
    systems: dict[str, Sequence[UnbindModule]] = {
        "none": (),
        "first": (first,),
        "second": (second,),
        "both": (first, second),
    }
    return {
        "rows": len(rows[SHARED]),
        "shared": {name: _there(world, other, rows[SHARED], on, progress) for name, on in systems.items()},
        "retained": retained.measure(systems["both"]),
    }


def many_figures(
    world: World,
    other: LoadedModel,
    retained: Retained,
    counts: Sequence[int],
    cache: Path | None,
    keep: Path | None,
    progress: ProgressCallback,
    policy: str | None = None,
    size: int = MANY_ROWS,
) -> dict[str, Any]:
    """By how many modules of ``size`` rows each are on: what stands in place of all their rows, without them (``none``) and with
    them (``all``); of the first module's rows, whose neighbours grow in number (``first``); and what all cost together.

    What is kept in ``keep`` is not fitted again.
    """
    sets = [world.forget["c"][start : start + size] for start in range(0, size * max(counts), size)]
    modules = [
        fit_kept(world, rows, f"many-{i}-beside", cache, progress, policy, i, keep) for i, rows in enumerate(sets)
    ]
    found = {}
    for count in counts:
        on, rows = modules[:count], [row for some in sets[:count] for row in some]
        systems = {"none": (rows, ()), "all": (rows, on), "first": (sets[0], on)}
        found[str(count)] = {
            **{name: _there(world, other, some, using, progress) for name, (some, using) in systems.items()},
            "retained": retained.measure(on),
        }
    return found


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
