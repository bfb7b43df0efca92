"""The fit that holds (``gate="auto"``): a network's gate that opens early and anywhere, and a correction that leads elsewhere.

Both stand at the last decoder layer. There a state alone determines what comes next, so the correction is learned without running
anything below, and what a client can do to logits does not take it back (docs/decisions.md). Gates are tried before it, those that
open earliest first, until one reaches the target within the budgets. Where none does, a firmer correction goes on from it and is
tried behind those gates that were within the budgets and left too much of the rows. A model that is its own reference is asked
by the last few tokens of the text alone, and, where that leaves too much, by all of it less the memorised token: at once, where
it leaves far too much.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import NamedTuple

import torch

from unbind_core.fitting.context import Context
from unbind_core.fitting.corrections.beginning import UNITS
from unbind_core.fitting.corrections.examples import examples
from unbind_core.fitting.corrections.learning import MARGIN, Correction, learn
from unbind_core.fitting.corrections.nearsighted import near_by, nearsighted
from unbind_core.fitting.corrections.reference import Reference
from unbind_core.fitting.judge import Judge, Remainder
from unbind_core.fitting.levels import Level, Verdict, Way
from unbind_core.fitting.network import network_batch, network_steps, network_width
from unbind_core.fitting.options import FitReport, Outcome
from unbind_core.fitting.screening import Screening
from unbind_core.fitting.separation import FIRST, HOLD, clear, later, least, opens_within, told
from unbind_core.module import UnbindModule
from unbind_core.progress import Progress
from unbind_core.rows import spread

# tau_close / tau: nearly a latch first, as a gate that closes lets the model find its way back
CLOSING = (0.5, 0.9, 1.0)
# Of corrections, in nats: each goes on from the one before, where that leaves too much of the rows.
MARGINS = (MARGIN, 0.4, 0.8)
SOME = 60  # rows, up to which corrections of half the units and half the steps do
MOST_ASKED = 2  # gates within the budgets that all rows are asked about: where those miss, the correction does
PROBED_ROWS, MANY = 8, 40  # so many say whether all are worth asking, where there are more than many


class Lead(NamedTuple):
    """What a correction is learned towards, and how firmly."""

    reference: Reference
    margin: float

    @property
    def last_tokens(self) -> int | None:
        """Of a model that is its own reference, where it is asked by these alone."""
        return self.reference.near.tokens if self.reference.near else None


class _Auto:
    """One run: what is captured and learned once, and the gates that are tried on it."""

    def __init__(self, context: Context, reference: Reference) -> None:
        self.context, self.clock = context, context.clock
        rewrites = context.options.policy == "rewrite"
        near = near_by(context) if reference.model is None and rewrites else None
        self.screening = Screening(context, near.early if near else None)
        self.every = range(len(context.forget))
        self.levels: list[Level] = []
        self.effort = min(1.0, context.options.effort)
        with self.clock.stage("rows before"):
            screening = self.screening
            self.judge = Judge(context, screening.retain, screening.completions, screening.forget, reference)
        self.generator = torch.Generator().manual_seed(context.options.seed)
        asked = nearsighted(context, reference, near, screening.met, screening.retain) if near else None
        references = [asked, reference] if asked else [reference]
        self.leads = [Lead(each, margin) for each in references for margin in MARGINS[: None if rewrites else 1]]
        self.corrections: dict[Lead, Correction] = {}
        self._toward(references[0])
        rows = len(self.every)
        self.sizes = network_width(rows), max(1, round(self.effort * network_steps(rows)))
        self.network, self.splits, self.ours, self.theirs = self.screening.detector(*self.sizes, network_batch(rows))

    def _toward(self, reference: Reference) -> None:
        """What the next corrections are learned from."""
        context, screening = self.context, self.screening
        with self.clock.stage("reference"):
            self.examples = examples(
                context.model,
                screening.met,
                reference,
                pad=context.pad,
                generator=self.generator,
                own=screening.own,
                continued=screening.continued(reference),
                effort=self.effort,
                progress=context.progress,
            )

    def _correction(self, lead: Lead) -> Correction:
        context, before = self.context, next(reversed(self.corrections.items()), None)
        if before is not None and before[0].reference is not lead.reference:
            self._toward(lead.reference)
            before = None
        with self.clock.stage("correction"):
            return learn(
                context.model,
                self.examples,
                self.screening.retained,
                lead.reference,
                margin=lead.margin,
                end=context.tokenizer.eos_token_id if context.options.policy == "silent" else None,
                units=correction_units(len(self.every)),
                effort=self.effort * correction_effort(len(self.every)),
                begun=before and before[1],
                generator=self.generator,
                progress=context.progress,
            )

    def ways(self) -> list[Way]:
        """Each window and pair of thresholds, those that open earliest and stay open first; of two windows the shorter one, or,
        where an open gate ends the answer, the longer, which opens by mistake in fewer.
        """
        first = -1 if self.context.options.policy == "silent" else 1
        ways = [
            (number + dear, number, first * split.window, Way(split, threshold, closing))
            for split in self.splits
            for number, threshold in enumerate(split.thresholds)
            for dear, closing in enumerate(CLOSING)
        ]
        return [way for *_, way in sorted(ways, key=lambda each: each[:3])]

    def gates(self, ways: Sequence[Way], lead: Lead) -> Iterator[tuple[Way, Level, UnbindModule]]:
        """Modules of the network used in these ways, with a correction that leads so."""
        self.corrections[lead] = self._correction(lead)
        for way in ways:
            yield self.gate(way, lead)

    def gate(self, way: Way, lead: Lead) -> tuple[Way, Level, UnbindModule]:
        """The module of the network used in this way, its boundaries moved to where no position is near."""
        way = Way(way.split, *clear(way.split, way.threshold, way.closing, self.ours, self.theirs))
        opens = told(opens_within(self.ours, way.split, way.threshold))
        split = way.split.to_json()
        level = Level(*self.sizes, lead.last_tokens, lead.margin, way.threshold, way.closing, split, opens)
        self.levels.append(level)
        return way, level, self.module(way, self.corrections[lead])

    def lead(self, level: Level) -> Lead:
        """What the correction of this level was learned by."""
        told = level.last_tokens, level.margin
        return next(lead for lead in self.leads if (lead.last_tokens, lead.margin) == told)

    def beside(self, way: Way, level: Level, module: UnbindModule) -> tuple[Level, UnbindModule]:
        """Where other modules are on, the same gate opening as late as its rows allow, if it forgets as much: what modules cost
        ordinary code adds up.
        """
        if not self.context.options.beside:
            return level, module
        split = way.split
        threshold = later(split, way.threshold, way.closing, self.screening.scored_parts(self.network))
        if threshold <= way.threshold:
            return level, module
        closes = way.closing * (way.threshold - split.reference) / (threshold - split.reference)
        _, raised, candidate = self.gate(Way(split, threshold, closes), self.lead(level))
        self.tries(raised, candidate)
        before, after = level.remainder, raised.remainder
        if before is None or after is None or not self.judge.aim.no_worse(after, before):
            return level, module
        raised.verdict, level.verdict = level.verdict, Verdict.RAISED
        return raised, candidate

    def module(self, way: Way, correction: Correction) -> UnbindModule:
        """A module with this gate before this correction."""
        split = way.split
        tau = way.threshold - split.reference
        return self.context.module(
            layer=self.screening.layer,
            detector="network",
            s_ref=split.reference,
            tau=tau,
            kappa=1.0,
            tau_close=None if way.closing == 1 else way.closing * tau,
            window=split.window,
            first=FIRST,
            least=least(split.window),
            hold=HOLD,
            quantile=None,
            measured={},
            correction="network",
            policy=self.context.options.policy,
            **{name: getattr(self.network, name).cpu() for name in ("w", "b", "heads", "heads_b")},
            **correction.tensors(),
        )

    def tries(self, level: Level, module: UnbindModule) -> None:
        """Enter what the level's gate costs, and, where that is within the budgets, what it leaves of the rows."""
        with self.clock.stage("gates"):
            level.cost = self.judge.cost(module)
            if level.cost.within(self.context.options.limits):
                level.remainder = self._left(module)
        if level.remainder is not None:
            reached = self.judge.aim.reached(level.remainder)
            level.verdict = Verdict.CHOSEN if reached else Verdict.MISSES
        self.context.progress(Progress("gates", len(self.levels), len(self.levels), str(level.verdict)))

    def _left(self, module: UnbindModule) -> Remainder:
        """What the module leaves: of some rows, where those give long spans back already, else of all, asked thoroughly."""
        if len(self.every) > MANY:
            probed = self.judge.remainder(module, spread(self.every, PROBED_ROWS))
            if probed.spans:
                return probed
        return self.judge.remainder(module, self.every, thorough=True)


def correction_units(rows: int) -> int:
    """Hidden units of a correction that leads so many rows elsewhere."""
    return UNITS if rows <= SOME else 2 * UNITS


def correction_effort(rows: int) -> int:
    """Times as many steps as the rows of a small set take."""
    return 1 if rows <= SOME else 2


def fit_auto(context: Context, reference: Reference) -> tuple[UnbindModule, FitReport]:
    """The first of the gates that reaches the target within the budgets; else the best within the budgets, outcome "short".

    Outcome "ineffective", with kappa 0, where no gate is within the budgets.
    """
    run = _Auto(context, reference)
    best: tuple[float, Way, Level, UnbindModule] | None = None
    last: UnbindModule | None = None
    ways, given_up = run.ways(), None
    for lead in run.leads:
        if lead.reference is given_up:
            continue
        missing: list[tuple[Way, Remainder]] = []
        for way, level, module in run.gates(ways, lead):
            run.tries(level, module)
            last = module
            if level.verdict is Verdict.CHOSEN:
                return _finish(run, *run.beside(way, level, module), Outcome.CALIBRATED)
            if level.remainder is None:
                continue
            if best is None or level.remainder.left < best[0]:
                best = level.remainder.left, way, level, module
            missing.append((way, level.remainder))
            if len(missing) == MOST_ASKED:
                break
        ways = [way for way, left in missing if run.judge.aim.said_too_much(left)]
        if not ways:
            break
        if lead.last_tokens is not None and all(run.judge.aim.far_from(left) for _, left in missing):
            given_up = lead.reference
    if best is not None:
        _, way, level, module = best
        if level.remainder is not None and level.remainder.rows < len(run.every):
            level.remainder = run.judge.remainder(module, run.every, thorough=True)
        level.verdict = Verdict.BEST
        return _finish(run, *run.beside(way, level, module), Outcome.SHORT)
    assert last is not None  # a network has ways to use it
    return _finish(run, run.levels[-1], replace(last, kappa=0.0), Outcome.INEFFECTIVE)


def _finish(run: _Auto, level: Level, module: UnbindModule, outcome: Outcome) -> tuple[UnbindModule, FitReport]:
    """The module with what was measured, and the report."""
    positions = {
        "forget": run.screening.forget.count,
        "retain_fit": len(run.screening.retained),
        "retain_calibration": run.screening.retain.count,
    }
    lead = run.lead(level)
    learned = run.corrections[lead]
    correction = {
        "reference": lead.reference.to_json(),
        "divergence": learned.divergence,
        "on_retained": learned.on_retained,
    }
    missed = run.judge.aim.missed(level.remainder) if level.remainder is not None else []
    levels = [one.to_json() for one in run.levels]
    chosen = levels[run.levels.index(level)]
    reached = {**chosen, "layer": module.layer, "correction": correction, "aim": asdict(run.judge.aim)}
    reached["forget_open_rate"] = run.judge.forget_open_rate(module)
    measured = {**reached, "positions": positions, **run.screening.contradicting}
    del measured["verdict"]  # of this fit, and no figure
    report = FitReport(
        outcome=outcome,
        selected=None if outcome is Outcome.INEFFECTIVE else {**reached, "missed": missed},
        scan=[],
        layers=[{"layer": module.layer}],
        positions=positions,
        seconds=run.clock.seconds,
        memory=run.clock.memory,
        exactness=run.context.exactness,
        gate="network",
        levels=levels,
        retain_rows_left_out=run.screening.left_out,
        retain_rows_alike=run.screening.alike,
    )
    return replace(module, measured=measured), report
