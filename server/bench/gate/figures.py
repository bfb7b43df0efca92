"""``unbind bench gate``: what the paper's gate and the measured choice reach on forget sets of growing size, side by side.

Every figure is of the demo model. Rows to forget come from its memorised sets, retain figures from 300 held-out rows.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from server import demo
from server.bench.gate_neighbours import apart_figures, neighbours_rise
from server.bench.gate_world import Retained, World, forgetting, scores
from server.bench.gate_written import paraphrased, written
from unbind_core.architecture import LoadedModel, load_model
from unbind_core.evaluation.scores import RowScore
from unbind_core.files import write_text
from unbind_core.fitting.fit import fit
from unbind_core.fitting.options import FitOptions
from unbind_core.module import UnbindModule
from unbind_core.progress import ProgressCallback, counted
from unbind_core.rows import ForgetRow

SIZES = (5, 12, 24, 40, 120, 300)
GATES = ("paper", "auto")
JOINT_MODULES, JOINT_ROWS = 10, 12


def gate_figures(
    loaded: LoadedModel,
    *,
    sizes: Sequence[int] = SIZES,
    gates: Sequence[str] = GATES,
    policy: str | None = None,
    attempts: int = 5,
    joint: bool = True,
    cache: Path | None = None,
    keep: Path | None = None,
    progress: ProgressCallback,
    report: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """The whole table. ``attempts`` a way to ask for the measured choice; one for the paper's gate and before.

    ``keep``: a folder for the modules that were fitted and each size's figures. ``report`` hears of each result as it comes.
    """
    world = World.load(loaded)
    retained = Retained(world, progress)
    other = load_model(demo.BASE, demo.RETRAINED)
    table: dict[str, Any] = {"sizes": {}}
    for size in sizes:
        rows = world.rows(size)
        before = scores(world, rows, (), 1, progress, f"{size} rows before")
        entry: dict[str, Any] = {"before": {"f_bleu": statistics.fmean(s.bleu["plain"] for s in before)}}
        fitted: dict[str, UnbindModule] = {}
        for gate in gates:
            begun = time.monotonic()
            module, found = fit_one(world, rows, f"{gate}-{size}", gate, cache, progress, policy)
            seconds = time.monotonic() - begun
            fitted[gate] = module
            if keep is not None:
                module.save(keep / f"{module.name}.safetensors")
            tries = attempts if gate == "auto" else 1
            after = scores(world, rows, (module,), tries, progress, f"{size} rows, {gate}")
            entry[gate] = {
                "gate": found.gate,
                "outcome": found.outcome,
                **forgetting(before, after),
                **retained.measure((module,)),
                "certificate": found.certificate,
                "fit_seconds": seconds,
                "attempts": 6 * tries,
                "layer": module.layer,
                "kappa": module.kappa,
                "apart": apart_figures(world, retained, rows, module),
                "neighbours": neighbours_rise(world, retained, rows, module),
                "paraphrased": paraphrased(world, rows, module, progress),
                "policy": module.policy,
                **written(world, other, rows, module),
            }
            entry[gate]["groups"] = _groups(module, before, after)
            report(
                f"{size} rows, {gate}: " + ", ".join(f"{k} {_short(v)}" for k, v in entry[gate].items() if _short(v))
            )
        entry["before"]["paraphrased"] = paraphrased(world, rows, None, progress)
        entry["before"] |= written(world, other, rows, None)
        table["sizes"][str(size)] = entry
        if keep is not None:
            _write(keep / f"{size}-{'-'.join(gates)}.json", entry)
    if joint:
        table["joint"] = joint_figures(world, retained, cache, progress)
        report(f"joint: {table['joint']}")
    return table


def _write(path: Path, entry: Mapping[str, Any]) -> None:
    """One size's figures, kept as soon as they are known."""
    write_text(path, json.dumps(entry, indent=1))


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value) if isinstance(value, int | str) else ""


def fit_one(
    world: World,
    rows: Sequence[ForgetRow],
    name: str,
    gate: str,
    cache: Path | None,
    progress: ProgressCallback,
    policy: str | None = None,
) -> tuple[UnbindModule, Any]:
    """One fit as ``unbind fit`` makes it."""
    return fit(
        world.loaded.model,
        world.loaded.tokenizer,
        rows,
        world.retain,
        name=name,
        retain_calibration=world.calibration,
        identity=world.loaded.identity,
        options=FitOptions(gate=gate, policy=policy if gate == "auto" else None),
        progress=progress,
        cache=cache,
        reference=world.reference,
    )


def _groups(module: UnbindModule, before: Sequence[RowScore], after: Sequence[RowScore]) -> dict[str, Any]:
    """The same figures for rows by what the fit did with them."""
    parts = {part: module.partitions[f"forget_{part}"] for part in ("fit", "calibration", "validation")}
    return {
        part: {"rows": len(rows), **forgetting([before[i] for i in rows], [after[i] for i in rows])}
        for part, rows in parts.items()
        if rows
    }


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
