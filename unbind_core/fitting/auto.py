"""The choice among gates: from the simplest to the richest, the first that forgets within the budgets (``gate="auto"``).

Levels: the paper's linear gate where it can tell the rows apart; a network with one head a row over a window of positions, with
one threshold, then with a lower one to close, then wider. What each reached is in the report. Strength is the least that
reaches the target: what is gained by more is paid for wherever a gate opens by mistake.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import inf
from typing import Any

from torch import Tensor

from unbind_core.errors import FittingError
from unbind_core.fitting.context import Context
from unbind_core.fitting.judge import Cost, Judge, Remainder
from unbind_core.fitting.network import BATCH
from unbind_core.fitting.options import FitReport, Outcome
from unbind_core.fitting.paper import fit_paper
from unbind_core.fitting.screening import Screening, Sequences
from unbind_core.fitting.separation import Separation
from unbind_core.fitting.strength import Finding, StrengthSearch, Verdict
from unbind_core.module import UnbindModule
from unbind_core.progress import Progress
from unbind_core.rows import make_partitions

# tau_close / tau: one threshold, a little lower, nearly a latch; and how dear each is, in steps of the opening threshold
CLOSING = {1.0: 0, 0.9: 1, 0.5: 3}
LINEAR_COVERAGE = 0.9  # a linear gate that covers less of the forget positions cannot reach the target
FEW = 150  # rows, up to which a narrower network and fewer states a step do


@dataclass
class Level:
    """One gate that was tried: which it is, what it reached, and what became of it; ``reason`` where that wants more words."""

    gate: str
    layer: int
    coverage: float | None = None
    width: int | None = None
    steps: int | None = None
    axis: str | None = None
    tau: float | None = None
    tau_close: float | None = None
    separation: dict[str, float] | None = None
    strength: float | None = None
    cost: Cost | None = None
    remainder: Remainder | None = None
    verdict: Verdict = Verdict.UNFIT
    reason: str = ""

    def take(self, finding: Finding) -> None:
        """Note what the search for a strength found."""
        self.strength, self.cost = finding.strength, finding.cost
        self.remainder, self.verdict = finding.remainder, finding.verdict

    def to_json(self) -> dict[str, Any]:
        """As reports and modules hold it."""
        table = {key: value for key, value in asdict(self).items() if value is not None and key != "reason"}
        if "remainder" in table:
            table["forgot"] = table.pop("remainder")
        return table | {"verdict": self.reason or str(self.verdict)}


class _Auto:
    """One run: what is captured once, and the trials on it."""

    def __init__(self, context: Context) -> None:
        self.context, self.clock = context, context.clock
        self.budgets, self.target = context.options.limits, context.options.target
        self.screening = Screening(context)
        self.every = self.screening.every
        self.levels: list[Level] = []
        with self.clock.stage("rows before"):
            self.judge = Judge(context, self.screening.retain, self.screening.completions, self.screening.forget)
        self.search = StrengthSearch(self.judge, self.budgets, self.target, self.clock, self.every)

    # The levels.

    def linear(self) -> tuple[UnbindModule, FitReport] | None:
        """The paper's gate, where at the budgeted opening rate it covers enough of the forget positions to have a chance."""
        coverage, layer = self.screening.linear_coverage()
        level = Level("paper", layer, coverage=round(coverage, 4))
        self.levels.append(level)
        few = len(self.every) < 3
        if coverage < LINEAR_COVERAGE or few:
            level.reason = (
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
        if report.outcome is not Outcome.CALIBRATED:
            level.verdict = Verdict.NONE
            return None
        cost, remainder = self.judge.cost(module), self.judge.remainder(module, self.every)
        level.cost, level.remainder = cost, remainder
        if cost.within(self.budgets) and remainder.reaches(self.target):
            level.verdict = Verdict.CHOSEN
            return module, report
        level.verdict = Verdict.MISSES if cost.within(self.budgets) else Verdict.OVER
        return None

    def network(self, rows: Sequences, layer: int, width: int) -> Iterator[tuple[Level, Finding]]:
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
                level = Level("network", layer, None, width, steps, name, threshold, closing, split.to_json())
                self.levels.append(level)
                finding = self.search.least(partial(module, axis, split, threshold, closing))
                level.take(finding)
                self.context.progress(Progress("gates", len(self.levels), len(self.levels), str(level.verdict)))
                yield level, finding
                left.append(inf if finding.remainder is None else finding.remainder.left)
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
            report,
            levels=[level.to_json() for level in run.levels],
            seconds=run.clock.seconds,
            retain_rows_left_out=run.screening.left_out,
        )
    layer, screened = run.screening.best_layer()
    best: tuple[float, Level, UnbindModule] | None = None
    last: UnbindModule | None = None
    rows = run.screening.embedded(layer)
    for width in network_widths(len(run.every)):
        for level, finding in run.network(rows, layer, width):
            last = finding.module
            if finding.remainder is None:
                continue
            if best is None or finding.remainder.left < best[0]:
                best = finding.remainder.left, level, finding.module
            if finding.verdict is Verdict.CHOSEN:
                return _finish(run, finding.module, level, Outcome.CALIBRATED, screened)
    if best is not None:
        _, level, module = best
        level.remainder, level.verdict = run.judge.remainder(module, run.every, thorough=True), Verdict.BEST
        return _finish(run, module, level, Outcome.SHORT, screened)
    if last is None:
        raise FittingError("no layer's states could be told apart; are the rows memorised at all?")
    return _finish(run, replace(last, kappa=0.0), run.levels[-1], Outcome.INEFFECTIVE, screened)


def _finish(
    run: _Auto, module: UnbindModule, level: Level, outcome: Outcome, screened: list[dict[str, Any]]
) -> tuple[UnbindModule, FitReport]:
    """The module with what was measured, and the report."""
    positions = {
        "forget": run.screening.forget.count,
        "retain_fit": len(run.screening.retained[module.layer]),
        "retain_calibration": run.screening.retain.count,
    }
    reached = level.to_json()
    measured = {
        **{key: value for key, value in reached.items() if key != "verdict"},
        "positions": positions,
        **run.screening.contradicting,
    }
    report = FitReport(
        outcome=outcome,
        selected=None if outcome is Outcome.INEFFECTIVE else reached,
        scan=[],
        layers=screened,
        positions=positions,
        seconds=run.clock.seconds,
        exactness=run.context.exactness,
        gate="network",
        levels=[one.to_json() for one in run.levels],
        retain_rows_left_out=run.screening.left_out,
    )
    return replace(module, measured=measured), report
