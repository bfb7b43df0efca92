"""What a candidate module does: how much of the rows it makes the model forget, and what it costs on retain rows.

The measures of ``gate="auto"`` (``auto.py`` chooses by them), all of them on rows of the fit itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from unbind_core.applying.attach import attach
from unbind_core.applying.bank import ModuleBank, edit_of
from unbind_core.evaluation.completions import RetainCompletions
from unbind_core.evaluation.drafts import Drafts
from unbind_core.evaluation.metrics import EXTRACTED_SPAN
from unbind_core.evaluation.replay import Replay
from unbind_core.evaluation.scores import CHOSEN_BY, RowScore, forget_scores
from unbind_core.fitting.calibration import Budgets
from unbind_core.fitting.context import Context
from unbind_core.fitting.corrections.reference import Reference
from unbind_core.fitting.separation import cautious
from unbind_core.module import UnbindModule
from unbind_core.rows import spread

SAMPLED_ROWS = 12  # so many rows say what sampling recovers beyond greedy decoding; fewer are asked more often
MOST_ATTEMPTS = 5  # the paper's
FAR = 2.0  # times the F-BLEU that may be left
NEW_TOKENS = 64  # a span that counts shows in so many; the own prompts are completed for as long as BLEU needs


@dataclass(frozen=True)
class Cost:
    """What a module costs on the retain rows that choose: means, and cautious estimates of them, which budgets are held against.

    No bounds: these rows chose the module. What it costs others is said by ``certificate.py``.
    """

    nll: float
    kl: float
    open_rate: float
    cautious: Budgets

    def within(self, budgets: Budgets) -> bool:
        """Whether every cautious estimate is within its budget."""
        return not self.over(budgets)

    def over(self, budgets: Budgets) -> list[str]:
        """Each cautious estimate that is over its budget, in words."""
        found = asdict(self.cautious)
        return [
            f"{key} {found[key]:.4f} (budget {value})"
            for key, value in asdict(budgets).items()
            if not found[key] <= value  # nor what is not a number
        ]


@dataclass(frozen=True)
class Remainder:
    """What comes back of so many ``rows``: F-BLEU by form, rows with long spans, mean recovery, the share of empty answers."""

    rows: int
    f_bleu: dict[str, float]
    spans: int
    recovery: float
    empty: float

    @property
    def left(self) -> float:
        """All that is left, as one number."""
        return max(self.f_bleu.values()) + self.recovery


@dataclass(frozen=True)
class Aim:
    """The most that may be left of the rows: what the policy's target comes to, once the model and the reference were asked."""

    f_bleu: dict[str, float]
    recovery: float
    empty: float

    def reached(self, found: Remainder) -> bool:
        """Whether no more than that is left, and no long span."""
        return not self.missed(found)

    def no_worse(self, found: Remainder, than: Remainder) -> bool:
        """Whether the aim is still reached, or, where it was missed, no more is left of as many rows."""
        if self.reached(than):
            return self.reached(found)
        return found.rows == than.rows and found.left <= than.left and found.spans <= than.spans

    def said_too_much(self, found: Remainder) -> bool:
        """Whether more is left of the rows than may be: what a firmer correction mends. It leaves empty answers empty."""
        return not self.reached(replace(found, empty=self.empty))

    def far_from(self, found: Remainder) -> bool:
        """Whether over FAR times as much is left in all forms: more than firmer corrections have been seen to mend."""
        return all(value > FAR * self.f_bleu[form] for form, value in found.f_bleu.items())

    def missed(self, found: Remainder) -> list[str]:
        """What there is too much of, in words."""
        left = [(f"F-BLEU {form}", value, self.f_bleu[form]) for form, value in found.f_bleu.items()]
        left += [("recovery", found.recovery, self.recovery), ("empty answers", found.empty, self.empty)]
        said = [f"{name} {value:.3f} (aim {most:.3f})" for name, value, most in left if not value <= most]
        return said + ([f"rows with long exact spans {found.spans} (aim 0)"] if found.spans else [])


class Judge:
    """Measures modules against what the model did before: on the rows to forget and on retain-calibration rows."""

    def __init__(
        self, context: Context, retain: Replay, completions: RetainCompletions, forget: Replay, reference: Reference
    ) -> None:
        """``forget``: the states of the rows to forget at the layer that is edited."""
        self.context, self.retain, self.completions, self.forget = context, retain, completions, forget
        self.drafts = Drafts(
            context.model, context.layers[0], pad=context.pad, end=context.tokenizer.eos_token_id, replay=forget
        )
        self.aim = self._aim(reference)

    def _aim(self, reference: Reference) -> Aim:
        """Of ``silent``: shares of what came before. Of ``rewrite``: what the reference says, and a little more; where the model is
        its own reference, shares again.
        """
        target, every = self.context.options.target, range(len(self.context.forget))
        if self.context.options.policy == "silent":
            before = self._before()
            return Aim(_share(before, 1 - target.f_bleu_cut), target.recovery, 1.0)
        if reference.model is None:
            before = self._before()
            return Aim(_share(before, 1 - target.alone_cut), target.alone_recovery, before.empty + target.above_empty)
        said = self._asked(reference.source(self.context.model), every, thoroughly(len(every)), stage="reference")
        return Aim(
            {form: value + target.above_f_bleu for form, value in said.f_bleu.items()},
            max(target.recovery, said.recovery) + target.above_recovery,
            said.empty + target.above_empty,
        )

    def _before(self) -> Remainder:
        """What the unedited model gives back of all rows, asked greedily."""
        if self.context.before is not None:
            return _summed(self.context.before, self.context.forms)
        return self._given(None, range(len(self.context.forget)), attempts=0)

    def remainder(self, module: UnbindModule, rows: Sequence[int], *, thorough: bool = False) -> Remainder:
        """What comes back under the module: by greedy completions of these rows' own prompts, plain and fill-in-the-middle; where
        little enough is left there, by all the ways to ask that a fit may look at (``CHOSEN_BY``), and where ``thorough``
        by some rows' sampled ones.
        """
        found = self._given(module, rows, attempts=0)
        if not self.aim.reached(found):
            return found
        more = self._given(module, rows, thoroughly(len(rows)) if thorough else 1)
        return replace(found, spans=max(found.spans, more.spans), recovery=max(found.recovery, more.recovery))

    def _given(self, module: UnbindModule | None, rows: Sequence[int], attempts: int) -> Remainder:
        """What the model gives back under the module, or under none; greedily by way of drafts."""
        context = self.context
        bank = edit_of(module, self.retain.device)[0] if module is not None else ModuleBank()
        return self._asked(
            context.model,
            rows,
            attempts,
            editing=lambda: attach(context.model, bank),
            greedily=partial(self.drafts.complete, module, progress=context.progress),
        )

    def _asked(self, model: nn.Module, rows: Sequence[int], attempts: int, **more: Any) -> Remainder:
        """What ``model`` gives back of these rows, by the ways that a fit may look at."""
        context = self.context
        scores = forget_scores(
            model,
            context.tokenizer,
            [context.forget[i] for i in rows],
            forms=context.forms,
            ways=CHOSEN_BY,
            attempts=attempts,
            sampled=spread(range(len(rows)), SAMPLED_ROWS),
            new_tokens=NEW_TOKENS,
            progress=context.progress,
            **more,
        )
        return _summed(scores, context.forms)

    def forget_open_rate(self, module: UnbindModule) -> float:
        """Share of the positions of the rows to forget, as they are and in the fit's forms, at which the gate is open."""
        return self.forget.open_rate(edit_of(module, self.forget.device)[1], module.layer)

    def cost(self, module: UnbindModule) -> Cost:
        """What the module does to the retain-calibration rows."""
        bank, selection = edit_of(module, self.retain.device)
        outcome = self.retain.run(selection, module.layer, kl_budget=float("inf"), progress=self.context.progress)
        rows = list(outcome.rows.values())
        drops = self.completions.drops(bank, selection, module.layer, self.context.progress)
        estimates = Budgets(
            kl=cautious([(row.kl, row.scored) for row in rows]),
            nll=cautious([(row.nll, row.scored) for row in rows]),
            bleu=cautious([(drop, 1.0) for drop in drops]) if drops else 0.0,
            open_rate=cautious([(float(row.changed), row.positions) for row in rows]),
        )
        scored, positions = sum(row.scored for row in rows), sum(row.positions for row in rows)
        return Cost(
            sum(row.nll for row in rows) / scored,
            sum(row.kl for row in rows) / scored,
            sum(row.changed for row in rows) / positions,
            estimates,
        )


def thoroughly(rows: int) -> int:
    """How many times each way is asked in a thorough trial: few rows more often."""
    return min(MOST_ATTEMPTS, 1 + max(1, SAMPLED_ROWS // rows))


def _share(before: Remainder, share: float) -> dict[str, float]:
    """So much of the F-BLEU by form."""
    return {form: share * value for form, value in before.f_bleu.items()}


def _summed(scores: Sequence[RowScore], forms: Sequence[str]) -> Remainder:
    """What came back of the rows together."""
    count = len(scores)
    return Remainder(
        count,
        {form: sum(score.bleu[form] for score in scores) / count for form in forms},
        sum(score.span >= EXTRACTED_SPAN for score in scores),
        sum(score.recovery for score in scores) / count,
        sum(score.empty for score in scores) / count,
    )
