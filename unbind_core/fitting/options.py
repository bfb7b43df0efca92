"""What can be chosen of a fit, and what it reports: shared by both ways to choose a gate.

``fit.py`` prepares; ``paper.py`` and ``auto.py`` fit.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

import torch

from unbind_core.errors import DataError
from unbind_core.evaluation.scores import CHOSEN_BY, REPORTED_BY
from unbind_core.fitting.calibration import NORM_STRENGTHS, PAPER_QUANTILES, PAPER_STRENGTHS, QUANTILES, Budgets
from unbind_core.fitting.moments import RIDGE
from unbind_core.running.device import forget_peak, peak_bytes
from unbind_core.windows import MAX_WINDOW

# "auto" is held to the likelihood budgets of the paper with cautious estimates, where the paper holds means to them.
BUDGETS = {"paper": Budgets(), "paper-strict": Budgets(), "auto": Budgets(bleu=0.01, open_rate=0.002)}
GATES = tuple(BUDGETS)
POLICIES = ("rewrite", "silent")  # the default first
PAPER_GATES = ("paper", "paper-strict")
PAPERS = ("quantiles", "strengths", "norm_strengths", "full_scan")  # what only those gates look at
# What "paper-strict" fixes: Appendices A.1 and B.3. Layers and seed are left to choose.
STRICT: dict[str, Any] = {
    "forms": ("plain",),
    "quantiles": PAPER_QUANTILES,
    "strengths": PAPER_STRENGTHS,
    "norm_strengths": (),
    "ridge": RIDGE,
    "budgets": BUDGETS["paper-strict"],
    "retain_limit": 600,
    "max_window": MAX_WINDOW,
    "full_scan": True,
}


@dataclass(frozen=True)
class Target:
    """What ``gate="auto"`` aims at on the rows to forget; never an exact span of 50 tokens.

    Policy ``silent``: share of the F-BLEU of the plain and of the fill-in-the-middle prompts that must go, ``f_bleu_cut``, and the
    largest mean ``recovery``: the paper's own figures (its tables 1, 2 and 3). Policy ``rewrite``: how far F-BLEU, recovery and
    the share of empty answers may be above the reference's; where the model is its own reference, ``alone_cut`` and
    ``alone_recovery``. A fit asks each way twice, of a few rows up to five times, and the best of the paper's thirty attempts
    recovers more.
    """

    f_bleu_cut: float = 0.973
    recovery: float = 0.06
    above_f_bleu: float = 0.02
    above_recovery: float = 0.01
    above_empty: float = 0.05
    alone_cut: float = 0.8
    alone_recovery: float = 0.08


@dataclass(frozen=True)
class FitOptions:
    """What can be chosen. ``gate`` "paper-strict" does what the paper did, and nothing else (``STRICT``); "paper" gives the paper's
    kind of module with finer grids, more rows and both forms; "auto" makes a network's gate and a learned correction at the last
    layer, for the ``policy`` "rewrite" (another continuation) or "silent" (the answer ends), and takes the first gate that reaches
    the ``target`` with cautious estimates of its costs within the budgets. The paper's gates know "silent" alone; ``policy`` None
    means the gate's first.

    ``budgets`` None means the gate's own (``BUDGETS``); ``layers`` None tries all where the gate may stand; ``forms`` None takes
    all that the tokenizer has; ``retain_limit`` rows are drawn for fitting and calibration together: None means 2,500;
    ``state_bytes``: how much of the retain states is kept. ``quantiles``, ``strengths``, ``norm_strengths`` and ``full_scan``
    (every candidate's budgets are measured, for the report) are the paper gate's. ``effort`` is gate auto's: below 1 it trains for
    that share of the steps, on as many fewer positions, for a quick look. ``beside``: how many other modules are on with this
    one. What modules cost adds up, so where there are any, a gate of "auto" opens as late as its rows allow.
    """

    gate: str = "auto"
    policy: str | None = None
    layers: tuple[int, ...] | None = None
    forms: tuple[str, ...] | None = None
    seed: int = 0
    ridge: float = RIDGE
    quantiles: tuple[float, ...] = QUANTILES
    strengths: tuple[float, ...] = PAPER_STRENGTHS
    norm_strengths: tuple[float, ...] = NORM_STRENGTHS
    budgets: Budgets | None = None
    target: Target = field(default_factory=Target)
    retain_limit: int | None = None
    max_window: int = MAX_WINDOW
    full_scan: bool = False
    state_bytes: int = 2**30
    effort: float = 1.0
    beside: int = 0

    def settled(self) -> FitOptions:
        """These options with what the gate fixes. Raises DataError, naming the field, where another value was asked for."""
        if self.beside < 0:
            raise DataError(f"beside: {self.beside} is no number of other modules; give 0 or more")
        known = POLICIES if self.gate == "auto" else ("silent",)
        if self.policy not in (None, *known):
            raise DataError(f"policy: gate '{self.gate}' knows {' and '.join(known)}, not '{self.policy}'")
        if self.effort != 1 and self.gate != "auto":
            raise DataError(f"effort: gate '{self.gate}' trains nothing; leave it out, or use gate 'auto'")
        default = FitOptions()
        for key in PAPERS if self.gate == "auto" else ():
            if getattr(self, key) != getattr(default, key):
                raise DataError(f"{key}: gate 'auto' has no use for it; leave it out, or use gate 'paper'")
        if self.gate != "paper-strict":
            return replace(self, policy=self.policy or known[0])
        for key, value in STRICT.items():
            if getattr(self, key) not in (getattr(default, key), value):
                raise DataError(f"{key}: gate 'paper-strict' fixes it to {value}; leave it out, or use gate 'paper'")
        return replace(self, policy=known[0], **STRICT)

    @property
    def limits(self) -> Budgets:
        """The budgets that hold."""
        return self.budgets or BUDGETS[self.gate]

    def to_json(self) -> dict[str, Any]:
        """Plain lists and numbers, as the module file records them."""
        return json.loads(json.dumps(asdict(self)))  # type: ignore[no-any-return]


def possible_layers(gate: str, count: int) -> list[int]:
    """Where a gate's module may stand: a learned correction at the last decoder layer, a push below the last two, where a client
    could take it off the logits again. What the paper did is done at all layers.
    """
    if gate == "auto":
        return [count - 1]
    return list(range(count if gate == "paper-strict" else max(1, count - 2)))


class Outcome(StrEnum):
    """What a fit came to; equal to its text."""

    CALIBRATED = "calibrated"
    SHORT = "short"
    INEFFECTIVE = "ineffective"


@dataclass(frozen=True)
class FitReport:
    """How a module came about.

    ``outcome``: "calibrated"; "short" where the module stays within the budgets but misses the target; "ineffective" where
    nothing above strength 0 met the budgets. ``gate``: the kind that was chosen. ``levels``: what each kind that was
    tried reached, and why it was or was not taken. ``layers``: those that were considered, with what the paper's gate found
    there, and ``scan``: every candidate of it. ``retain_rows_left_out``: the retain rows (numbered as in the module's
    partitions) that repeat forget rows so far that neither detector nor thresholds may go by them. ``retain_rows_alike``:
    those that chose, but are so like a forget row that the detector learned them too. ``certificate``: what
    the module costs retain rows that chose nothing, with upper bounds (``certificate.py``); None where there are no such
    rows. ``ways``: by which ways to ask forgetting was chosen, and which only reports look at; every figure of
    forgetting in here is of the first kind. ``memory``: the most there was at a time in each stage, bytes.
    """

    outcome: Outcome
    selected: dict[str, Any] | None
    scan: list[dict[str, Any]]
    layers: list[dict[str, Any]]
    positions: dict[str, int]
    seconds: dict[str, float]
    memory: dict[str, int]
    exactness: float
    gate: str = "paper"
    levels: list[dict[str, Any]] = field(default_factory=list)
    retain_rows_left_out: list[int] = field(default_factory=list)
    retain_rows_alike: list[int] = field(default_factory=list)
    certificate: dict[str, Any] | None = None
    ways: dict[str, tuple[str, ...]] = field(
        default_factory=lambda: {"chosen_by": CHOSEN_BY, "reported_by": REPORTED_BY}
    )

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return asdict(self)


class Clock:
    """Seconds spent per stage, and the most memory there was in it, bytes: of tensors on the device, or of this process."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = {}
        self.memory: dict[str, int] = {}
        self._device = device

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time inside to stage ``name``. Stages do not stand within each other."""
        begun = time.monotonic()
        forget_peak(self._device)
        try:
            yield
        finally:
            self.seconds[name] = round(self.seconds.get(name, 0.0) + time.monotonic() - begun, 3)
            self.memory[name] = max(self.memory.get(name, 0), peak_bytes(self._device))
