"""A gate that was tried: which it is, how it uses its network, and what became of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from unbind_core.fitting.judge import Cost, Remainder
from unbind_core.fitting.separation import Separation


class Verdict(StrEnum):
    """What becomes of a gate that was tried."""

    CHOSEN = "chosen"
    BEST = "chosen: the best within the budgets"
    RAISED = "raised, as other modules are on"
    MISSES = "misses the target"
    OVER = "over budget"


@dataclass(frozen=True)
class Way:
    """One way to use the network: how scores are averaged and split, the threshold to open at, and that to close at over it."""

    split: Separation
    threshold: float
    closing: float


@dataclass
class Level:
    """One gate that was tried before a correction of this margin, towards a reference by so many last tokens: which it is, what it
    reached, and what became of it.
    """

    width: int
    steps: int
    last_tokens: int | None
    margin: float
    tau: float
    tau_close: float
    separation: dict[str, float]
    opens: dict[str, float | None]
    cost: Cost | None = None
    remainder: Remainder | None = None
    verdict: Verdict = Verdict.OVER

    def to_json(self) -> dict[str, Any]:
        """As reports and modules hold it."""
        table = {key: value for key, value in asdict(self).items() if value is not None}
        if "remainder" in table:
            table["forgot"] = table.pop("remainder")
        return {"gate": "network", **table, "verdict": str(self.verdict)}
