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
from server.bench.gate.neighbours import apart_figures, neighbours_rise
from server.bench.gate.together import MANY_ROWS, joint_figures, many_figures, overlap_figures
from server.bench.gate.world import Retained, World, fit_one, forgetting, scores
from server.bench.gate.written import outputs, paraphrased, written
from unbind_core.architecture import LoadedModel, load_model
from unbind_core.evaluation.scores import RowScore
from unbind_core.files import write_text
from unbind_core.fitting.corrections.reference import Kind
from unbind_core.module import UnbindModule
from unbind_core.progress import ProgressCallback

SIZES = (5, 12, 24, 40, 120, 300)
GATES = ("paper", "auto")


def gate_figures(
    loaded: LoadedModel,
    *,
    sizes: Sequence[int] = SIZES,
    gates: Sequence[str] = GATES,
    policy: str | None = None,
    reference: Kind = Kind.NAMED,
    attempts: int = 5,
    joint: bool = True,
    overlap: bool = False,
    many: Sequence[int] = (),
    many_rows: int = MANY_ROWS,
    cache: Path | None = None,
    keep: Path | None = None,
    quick: bool = False,
    progress: ProgressCallback,
    report: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """The whole table. ``attempts`` a way to ask for the measured choice; one for the paper's gate and before.

    ``keep``: a folder for the modules that were fitted and each size's figures. ``quick``: on a third of the retain rows.
    ``report`` hears of each result as it comes.
    """
    world = World.load(loaded, quick, reference)
    retained = Retained(world, progress)
    other = load_model(demo.BASE, demo.RETRAINED, device=world.device)
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
                "paraphrased": paraphrased(world, rows, (module,), progress),
                "policy": module.policy,
                "reference": str(reference) if gate == "auto" else None,  # the paper's lead towards nothing
                **written(world, other, rows, (module,)),
            }
            entry[gate]["groups"] = _groups(module, before, after)
            report(
                f"{size} rows, {gate}: " + ", ".join(f"{k} {_short(v)}" for k, v in entry[gate].items() if _short(v))
            )
        entry["before"]["paraphrased"] = paraphrased(world, rows, (), progress)
        entry["before"] |= written(world, other, rows, ())
        entry |= {  # what modules are held against, and led towards (a model without its adapter as it is, not led)
            name: outputs(world, other, rows, (), model)
            for name, model in (("retrained", other.model), ("reference", world.reference.model))
            if model is not None
        }
        table["sizes"][str(size)] = entry
        if keep is not None:
            _write(keep / f"{size}-{'-'.join(gates)}.json", entry)
    if joint:
        table["joint"] = joint_figures(world, retained, cache, progress, policy)
        report(f"joint: {table['joint']}")
    if overlap:
        table["overlap"] = overlap_figures(world, other, retained, cache, progress, policy)
        report(f"overlap: {table['overlap']}")
    if many:
        table["many"] = many_figures(world, other, retained, many, cache, keep, progress, policy, many_rows)
    return table


def _write(path: Path, entry: Mapping[str, Any]) -> None:
    """One size's figures, kept as soon as they are known."""
    write_text(path, json.dumps(entry, indent=1))


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value) if isinstance(value, int | str) else ""


def _groups(module: UnbindModule, before: Sequence[RowScore], after: Sequence[RowScore]) -> dict[str, Any]:
    """The same figures for rows by what the fit did with them."""
    parts = {part: module.partitions[f"forget_{part}"] for part in ("fit", "calibration", "validation")}
    return {
        part: {"rows": len(rows), **forgetting([before[i] for i in rows], [after[i] for i in rows])}
        for part, rows in parts.items()
        if rows
    }
