"""The choice among gates: from the simplest to the richest, the first that forgets within the budgets (``gate="auto"``).

Levels: the paper's linear gate where it can tell the rows apart; a network with one head a row over a window of positions, with
one threshold, then with a lower one to close, then wider. What each reached is in the report. Strength is the least that
reaches the target: what is gained by more is paid for wherever a gate opens by mistake.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from math import inf
from typing import Any

from torch import Tensor

from unbind_core.errors import FittingError
from unbind_core.fitting.context import Context
from unbind_core.fitting.judge import Judge, Remainder
from unbind_core.fitting.network import BATCH
from unbind_core.fitting.options import FitReport
from unbind_core.fitting.paper import fit_paper
from unbind_core.fitting.screening import Screening, Sequences
from unbind_core.fitting.separation import Separation
from unbind_core.fitting.strength import StrengthSearch
from unbind_core.module import UnbindModule
from unbind_core.progress import Progress
from unbind_core.rows import make_partitions

# tau_close / tau: one threshold, a little lower, nearly a latch; and how dear each is, in steps of the opening threshold
CLOSING = {1.0: 0, 0.9: 1, 0.5: 3}
LINEAR_COVERAGE = 0.9  # a linear gate that covers less of the forget positions cannot reach the target
FEW = 150  # rows, up to which a narrower network and fewer states a step do


class _Auto:
    """One run: what is captured once, and the trials on it."""

    def __init__(self, context: Context) -> None:
        self.context, self.clock = context, context.clock
        self.budgets, self.target = context.options.limits, context.options.target
        self.screening = Screening(context)
        self.every = self.screening.every
        self.levels: list[dict[str, Any]] = []
        with self.clock.stage("rows before"):
            self.judge = Judge(context, self.screening.retain, self.screening.completions, self.screening.forget)
        self.search = StrengthSearch(self.judge, self.budgets, self.target, self.clock, self.every)

    # The levels.

    def linear(self) -> tuple[UnbindModule, FitReport] | None:
        """The paper's gate, where at the budgeted opening rate it covers enough of the forget positions to have a chance."""
        coverage, layer = self.screening.linear_coverage()
        level: dict[str, Any] = {"gate": "paper", "layer": layer, "coverage": round(coverage, 4)}
        self.levels.append(level)
        few = len(self.every) < 3
        if coverage < LINEAR_COVERAGE or few:
            level["verdict"] = (
                "fewer than 3 rows cannot be split as the paper does"
                if few
                else f"at the budgeted opening rate it opens on {coverage:.0%} of the forget positions; "
                f"{LINEAR_COVERAGE:.0%} are needed"
            )
            return None
        options = replace(self.context.options, gate="paper", budgets=self.budgets)
        # the paper's gate keeps rows back for calibration and validation
        held = make_partitions(self.context.forget, self.context.retain, options.seed)
        parts = replace(
            self.context.parts,
            forget_fit=held.forget_fit,
            forget_calibration=held.forget_calibration,
            forget_validation=held.forget_validation,
            retain_fit=tuple(i for i in self.context.parts.retain_fit if i not in self.screening.left_out),
            retain_calibration=tuple(
                i for i in self.context.parts.retain_calibration if i not in self.screening.left_out
            ),
        )
        module, report = fit_paper(replace(self.context, options=options, parts=parts))
        if report.outcome != "calibrated":
            level["verdict"] = "no strength within the budgets"
            return None
        cost, forgot = self.judge.cost(module), self.judge.remainder(module, self.every)
        level |= {"cost": asdict(cost), "forgot": asdict(forgot)}
        if cost.within(self.budgets) and forgot.reaches(self.target):
            level["verdict"] = "chosen"
            return module, report
        level["verdict"] = "misses the target" if cost.within(self.budgets) else "over budget"
        return None

    def network(
        self, rows: Sequences, layer: int, width: int
    ) -> Iterator[tuple[UnbindModule, Remainder | None, dict[str, Any]]]:
        """Modules of one network, for each window and pair of thresholds, at the least strength that reaches the target: with the
        first axis, and with the others where that one left least.
        """
        steps = network_steps(len(self.every))
        net, splits = self.screening.detector(rows, layer, width, steps, network_batch(len(self.every)))
        norm = self.screening.retain_norm(layer)
        tensors = {
            "w": net.w.cpu(),
            "b": net.b.cpu(),
            "heads": net.heads.cpu(),
            "heads_b": net.heads_b.cpu(),
        }

        def module(axis: Tensor, split: Separation, threshold: float, closing: float, strength: float) -> UnbindModule:
            tau = threshold - split.reference
            return self.context.module(
                layer=layer,
                detector="network",
                v=axis,
                s_ref=split.reference,
                tau=tau,
                kappa=strength * norm,
                tau_close=None if closing == 1 else closing * tau,
                window=split.window,
                quantile=None,
                measured={},
                **tensors,
            )

        # A gate that stays open costs most where it opens by mistake, a lower threshold opens it there more often: both come last.
        ways = sorted(
            (
                (number + dear, number, -split.margin, split, threshold, closing)
                for split in splits
                for number, threshold in enumerate(split.thresholds)
                for closing, dear in CLOSING.items()
            ),
            key=lambda way: way[:3],
        )
        for name, axis in self.screening.axes(layer).items():
            left = []
            for *_, split, threshold, closing in ways:
                level: dict[str, Any] = {
                    "gate": "network",
                    "layer": layer,
                    "width": width,
                    "steps": steps,
                    "axis": name,
                    "tau": threshold,
                    "tau_close": closing,
                    "separation": split.to_json(),
                }
                self.levels.append(level)
                found = self.search.least(partial(module, axis, split, threshold, closing), level)
                self.context.progress(Progress("gates", len(self.levels), len(self.levels), str(level["verdict"])))
                yield found
                left.append(inf if found[1] is None else found[1].left)
            ways = [ways[left.index(min(left))]]  # what another axis changes is not when a gate opens


def network_steps(rows: int) -> int:
    """Training steps for so many heads: what they took on the demo model to tell their rows apart."""
    return 375 + 18 * rows if rows <= FEW else min(4000, 250 + 12 * rows)


def network_batch(rows: int) -> int:
    """States a step: for few heads more steps do more than more states, for many it was not so."""
    return BATCH if rows <= FEW else 2 * BATCH


def network_widths(rows: int) -> tuple[int, ...]:
    """Hidden widths to try, the smaller first."""
    return (128, 512) if rows <= 32 else (256, 512) if rows <= FEW else (512,)


def fit_auto(context: Context) -> tuple[UnbindModule, FitReport]:
    """The first of the levels that reaches the target within the budgets; else the best within the budgets, outcome "short".

    Outcome "ineffective", with kappa 0, where no level has any strength within the budgets.
    """
    run = _Auto(context)
    if (plain := run.linear()) is not None:
        module, report = plain
        return replace(module, measured={**module.measured, **run.screening.contradicting}), replace(
            report, levels=run.levels, seconds=run.clock.seconds, retain_rows_left_out=run.screening.left_out
        )
    layer, screened = run.screening.best_layer()
    best: tuple[float, UnbindModule, dict[str, Any]] | None = None
    last: UnbindModule | None = None
    rows = run.screening.embedded(layer)
    for width in network_widths(len(run.every)):
        for module, forgot, level in run.network(rows, layer, width):
            last = module
            if forgot is None:
                continue
            if best is None or forgot.left < best[0]:
                best = (forgot.left, module, level)
            if level["verdict"] == "chosen":
                return _finish(run, module, level, "calibrated", screened)
    if best is not None:
        left = run.judge.remainder(best[1], run.every, thorough=True)
        best[2].update(forgot=asdict(left), verdict="chosen: the best within the budgets")
        return _finish(run, best[1], best[2], "short", screened)
    if last is None:
        raise FittingError("no layer's states could be told apart; are the rows memorised at all?")
    return _finish(run, replace(last, kappa=0.0), run.levels[-1], "ineffective", screened)


def _finish(
    run: _Auto, module: UnbindModule, level: dict[str, Any], outcome: str, screened: list[dict[str, Any]]
) -> tuple[UnbindModule, FitReport]:
    """The module with what was measured, and the report."""
    positions = {
        "forget": run.screening.forget.count,
        "retain_fit": len(run.screening.retained[module.layer]),
        "retain_calibration": run.screening.retain.count,
    }
    measured = {
        **{key: value for key, value in level.items() if key != "verdict"},
        "positions": positions,
        **run.screening.contradicting,
    }
    report = FitReport(
        outcome=outcome,
        selected=None if outcome == "ineffective" else level,
        scan=[],
        layers=screened,
        positions=positions,
        seconds=run.clock.seconds,
        exactness=run.context.exactness,
        gate="network",
        levels=run.levels,
        retain_rows_left_out=run.screening.left_out,
    )
    return replace(module, measured=measured), report
