"""The (layer, quantile, strength) search: which candidate forgets most within the retain budgets.

Section 4.3, eq. (11), and Appendix B.3.

Lazy. Most candidates are far too strong: per gate, a bisection over strengths on one small batch of retain windows finds
where KL passes twice the budget, and what lies above is dropped (KL grows with strength). The rest are put in the
order of their forget-validation NLL, which is cheap to measure, and meet the retain budgets in that order: the first
feasible one is the paper's argmax over all of them and the others need not be measured. KL is never negative, so a
candidate whose running KL sum is over budget is dropped at once. ``full_scan`` measures everything. What is not a number,
as of states that half precision does not hold, is within no budget.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from unbind_core.applying.bank import edit_of
from unbind_core.evaluation.completions import RetainCompletions
from unbind_core.evaluation.replay import Replay
from unbind_core.fitting.calibration import Budgets, Gate
from unbind_core.module import UnbindModule
from unbind_core.progress import Progress, ProgressCallback

SCREEN_FACTOR = 2.0
SCREENED = "over KL budget (screened)"


@dataclass
class Candidate:
    """One candidate and what was measured of it; None where it was not needed. NLL and KL are means over scored tokens."""

    layer: int
    gate: Gate
    grid: str
    kappa: float
    forget_nll: float | None = None
    forget_gain: float | None = None
    forget_open_rate: float | None = None
    retain_kl: float | None = None
    retain_nll_increase: float | None = None
    retain_open_rate: float | None = None
    retain_bleu_drop: float | None = None
    verdict: str = "not needed"

    def to_json(self) -> dict[str, Any]:
        """One row of the scan, as reports hold it."""
        return {
            "layer": self.layer,
            "quantile": self.gate.quantile,
            "grid": self.grid,
            "kappa": self.kappa,
            "tau": self.gate.tau,
            "forget_nll": self.forget_nll,
            "forget_gain": self.forget_gain,
            "forget_open_rate": self.forget_open_rate,
            "retain_kl": self.retain_kl,
            "retain_nll_increase": self.retain_nll_increase,
            "retain_open_rate": self.retain_open_rate,
            "retain_bleu_drop": self.retain_bleu_drop,
            "verdict": self.verdict,
        }


def search(
    candidates: Sequence[Candidate],
    as_module: Callable[[Candidate], UnbindModule],
    forget: Replay,
    retain: Replay,
    completions: RetainCompletions,
    budgets: Budgets,
    *,
    full_scan: bool,
    progress: ProgressCallback,
) -> Candidate | None:
    """The feasible candidate with the highest forget-validation NLL and kappa > 0, or None. Fills in every candidate.

    Ties: smaller kappa, larger quantile, lower layer. ``full_scan`` measures the likelihood budgets of all candidates.
    """
    base = forget.base_nll / forget.count
    if not full_scan:
        _screen(candidates, as_module, retain, budgets, progress)
    alive = [candidate for candidate in candidates if candidate.verdict != SCREENED]
    for done, candidate in enumerate(alive, start=1):
        bank, selection = edit_of(as_module(candidate), retain.device)
        outcome = forget.run(selection, candidate.layer)
        candidate.forget_nll = outcome.nll / forget.count
        candidate.forget_open_rate = outcome.open_gates / max(outcome.evaluated, 1)
        candidate.forget_gain = candidate.forget_nll - base
        progress(Progress("forget scan", done, len(alive)))
    best: Candidate | None = None
    order = sorted(alive, key=lambda t: (-_known(t.forget_nll), t.kappa, -t.gate.quantile, t.layer))
    for done, candidate in enumerate(order, start=1):
        if best is not None and not full_scan:
            break
        progress(
            Progress(
                "retain budgets",
                done,
                len(order),
                f"layer {candidate.layer} q {candidate.gate.quantile} kappa {candidate.kappa:.3g}",
            )
        )
        if not (candidate.forget_gain or 0.0) > 0:
            candidate.verdict = "no gain"
            continue
        bank, selection = edit_of(as_module(candidate), retain.device)
        outcome = retain.run(selection, candidate.layer, kl_budget=float("inf") if full_scan else budgets.kl)
        candidate.retain_kl = outcome.kl / (retain.count if outcome.complete else max(outcome.scored, 1))
        if not (outcome.complete and candidate.retain_kl <= budgets.kl):
            candidate.verdict = "over KL budget"  # where the run was cut short, the KL is that of the tokens seen
            if not outcome.complete:
                continue
        candidate.retain_nll_increase = (outcome.nll - retain.base_nll) / retain.count
        candidate.retain_open_rate = outcome.open_gates / max(outcome.evaluated, 1)
        if not candidate.retain_kl <= budgets.kl:
            continue
        if not candidate.retain_nll_increase <= budgets.nll:
            candidate.verdict = "over NLL budget"
        elif best is None:
            candidate.retain_bleu_drop = completions.drop(bank, selection, candidate.layer)
            candidate.verdict = "over BLEU budget" if candidate.retain_bleu_drop > budgets.bleu else "selected"
            best = candidate if candidate.verdict == "selected" else None
        else:
            candidate.verdict = "within likelihood budgets"
    return best


def _known(nll: float | None) -> float:
    """An NLL to sort by; 0 where it is not known or not a number."""
    return 0.0 if nll is None or math.isnan(nll) else nll


def _screen(
    candidates: Sequence[Candidate],
    as_module: Callable[[Candidate], UnbindModule],
    retain: Replay,
    budgets: Budgets,
    progress: ProgressCallback,
) -> None:
    """Mark, per gate, the strengths above the largest whose screened KL is within SCREEN_FACTOR times the budget."""
    gates: dict[tuple[int, float], list[Candidate]] = {}
    for candidate in candidates:
        gates.setdefault((candidate.layer, candidate.gate.quantile), []).append(candidate)
    for done, rivals in enumerate(gates.values(), start=1):
        rivals.sort(key=lambda t: t.kappa)
        low, high = 0, len(rivals)  # all below ``low`` pass, all from ``high`` on fail
        while low < high:
            middle = (low + high) // 2
            _, selection = edit_of(as_module(rivals[middle]), retain.device)
            if retain.screen_kl(selection, rivals[middle].layer) <= SCREEN_FACTOR * budgets.kl:
                low = middle + 1
            else:
                high = middle
        for candidate in rivals[low:]:
            candidate.verdict = SCREENED
        progress(Progress("screening", done, len(gates)))
