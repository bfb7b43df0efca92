"""The least strength at which a gate makes the model forget enough, within the budgets.

What is left of the rows falls with the strength and what it costs rises, so both are found by bisection; a few rows say where
to look, all of them decide.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from unbind_core.fitting.calibration import Budgets
from unbind_core.fitting.judge import Cost, Judge, Remainder
from unbind_core.fitting.options import Clock, Target
from unbind_core.module import UnbindModule
from unbind_core.rows import spread

UPDATE_SIZES = (0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0)  # in units of the mean retain-state norm
PROBED_ROWS = 8


class Verdict(StrEnum):
    """What becomes of a gate that was tried."""

    CHOSEN = "chosen"
    BEST = "chosen: the best within the budgets"
    MISSES = "misses the target"
    OVER = "over budget"
    NONE = "no strength within the budgets"
    UNFIT = "not tried"


@dataclass(frozen=True)
class Finding:
    """A gate at one strength: the module, its cost, what is left of the rows (None where no strength is within the budgets)."""

    module: UnbindModule
    strength: float
    cost: Cost
    remainder: Remainder | None
    verdict: Verdict


@dataclass
class StrengthSearch:
    """What every search of one fit goes by: ``every`` forget row, the ``budgets`` and the ``target``."""

    judge: Judge
    budgets: Budgets
    target: Target
    clock: Clock
    every: Sequence[int]

    def least(self, at: Callable[[float], UnbindModule]) -> Finding:
        """The module at the least strength that reaches the target on all rows, if that is within the budgets; or else at the
        largest that is, with what is left under it: of all rows, or of the probed ones where those miss already; or else at the
        smallest of all. ``at`` makes the module for a strength.
        """
        probed, everything = spread(self.every, PROBED_ROWS), range(len(UPDATE_SIZES))

        @cache
        def cost(index: int) -> Cost:
            return self.judge.cost(at(UPDATE_SIZES[index]))

        @cache
        def probe(index: int) -> Remainder:
            return self.judge.remainder(at(UPDATE_SIZES[index]), probed)

        @cache
        def whole(index: int) -> Remainder:
            return self.judge.remainder(at(UPDATE_SIZES[index]), self.every, thorough=True)

        def reaches(index: int) -> bool:
            return probe(index).reaches(self.target)

        def affordable() -> int:
            if cost(everything[-1]).within(self.budgets):  # as it is for most
                return len(everything)
            return bisect_left(everything, True, key=lambda index: not cost(index).within(self.budgets))

        def finding(index: int, remainder: Remainder | None, verdict: Verdict) -> Finding:
            return Finding(at(UPDATE_SIZES[index]), UPDATE_SIZES[index], cost(index), remainder, verdict)

        with self.clock.stage("strength"):
            strongest = everything[-1]  # asked first: where it is not enough, nothing is
            least = bisect_left(everything[:strongest], True, key=reaches) if reaches(strongest) else len(everything)
            for index in everything[least:]:  # more than one where the probe was kinder than all rows are
                if not cost(index).within(self.budgets):
                    if index + 1 >= affordable():
                        break
                elif whole(index).reaches(self.target):
                    return finding(index, whole(index), Verdict.CHOSEN)
                elif index == least + 1 and not whole(max(index, affordable() - 1)).reaches(self.target):
                    break  # asking all rows is slow: two strengths on the way are enough
            if (best := affordable() - 1) < 0:
                return finding(0, None, Verdict.NONE)
            return finding(best, whole(best) if best >= least else probe(best), Verdict.MISSES)
