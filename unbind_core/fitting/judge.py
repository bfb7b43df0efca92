"""What a candidate module does: how much of the rows it makes the model forget, and what it costs on retain rows.

The measures of ``gate="auto"`` (``auto.py`` chooses by them); all of them on rows that the fit was context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

from unbind_core.applying.attach import attach
from unbind_core.applying.bank import edit_of
from unbind_core.evaluation.completions import RetainCompletions
from unbind_core.evaluation.drafts import Drafts
from unbind_core.evaluation.metrics import EXTRACTED_SPAN
from unbind_core.evaluation.replay import Replay
from unbind_core.evaluation.scores import CHOSEN_BY, RowScore, forget_scores
from unbind_core.fitting.calibration import Budgets
from unbind_core.fitting.context import Context
from unbind_core.fitting.reference import Reference
from unbind_core.fitting.separation import cautious
from unbind_core.module import UnbindModule
from unbind_core.rows import spread

SAMPLED_ROWS = 12  # so many rows say what sampling recovers beyond greedy decoding; fewer are asked more often
MOST_ATTEMPTS = 5  # the paper's
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
        return all(getattr(self.cautious, key) <= value for key, value in asdict(budgets).items())


@dataclass(frozen=True)
class Remainder:
    """What comes back of the rows: F-BLEU by form, rows with long spans, mean recovery, the share of empty answers."""

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
        gone = all(value <= self.f_bleu[form] for form, value in found.f_bleu.items())
        return gone and found.spans == 0 and found.recovery <= self.recovery and found.empty <= self.empty


class Judge:
    """Measures modules against what the model did before: on the rows to forget and on retain-calibration rows."""

    def __init__(
        self, context: Context, retain: Replay, completions: RetainCompletions, forget: Replay, reference: Reference
    ) -> None:
        """``forget``: the states of the rows to forget at the layer that is edited."""
        self.context, self.retain, self.completions, self.target = context, retain, completions, context.options.target
        self.forget = forget
        self._drafts: dict[int, Drafts] = {}
        self.before = context.before or self._scores(range(len(context.forget)), None, attempts=0)
        self.aim = self._aim(reference)

    def _aim(self, reference: Reference) -> Aim:
        """Of ``silent``: shares of what came before. Of ``rewrite``: what the reference says, and a little more; where the model is
        its own reference, shares again.
        """
        target, policy = self.target, self.context.options.policy
        before = _summed(self.before, self.context.forms)
        if policy == "silent":
            cut = {form: (1 - target.f_bleu_cut) * value for form, value in before.f_bleu.items()}
            return Aim(cut, target.recovery, 1.0)
        if reference.model is None:
            cut = {form: (1 - target.alone_cut) * value for form, value in before.f_bleu.items()}
            return Aim(cut, target.alone_recovery, before.empty + target.above_empty)
        said, often = (self._said(reference, attempts) for attempts in (0, self._often(len(self.context.forget))))
        return Aim(
            {form: value + target.above_f_bleu for form, value in said.f_bleu.items()},
            max(target.recovery, said.recovery, often.recovery) + target.above_recovery,
            said.empty + target.above_empty,
        )

    def _said(self, reference: Reference, attempts: int) -> Remainder:
        """What the reference gives back of all rows, asked as often as a module is."""
        context = self.context
        scores = forget_scores(
            reference.source(context.model),
            context.tokenizer,
            context.forget,
            forms=context.forms,
            ways=CHOSEN_BY,
            attempts=attempts,
            sampled=spread(range(len(context.forget)), SAMPLED_ROWS),
            new_tokens=NEW_TOKENS,
            progress=context.progress,
            stage="reference",
        )
        return _summed(scores, context.forms)

    def _often(self, rows: int) -> int:
        """How many times each way is asked in a thorough trial: few rows more often."""
        return min(MOST_ATTEMPTS, 1 + max(1, SAMPLED_ROWS // rows))

    def _scores(self, rows: Sequence[int], module: UnbindModule | None, attempts: int) -> list[RowScore]:
        context = self.context
        asked = partial(
            forget_scores,
            context.model,
            context.tokenizer,
            [context.forget[i] for i in rows],
            forms=context.forms,
            ways=CHOSEN_BY,
            attempts=attempts,
            sampled=spread(range(len(rows)), SAMPLED_ROWS),
            new_tokens=NEW_TOKENS,
            progress=context.progress,
        )
        layer = module.layer if module is not None else context.identity.num_layers - 1
        if layer not in self._drafts:
            self._drafts[layer] = Drafts(
                context.model, layer, pad=context.pad, end=context.tokenizer.eos_token_id, replay=self.forget
            )
        greedily = partial(self._drafts[layer].complete, module, progress=context.progress)
        if module is None:
            return asked(greedily=greedily)
        bank, _ = edit_of(module, self.retain.device)
        return asked(editing=lambda: attach(context.model, bank), greedily=greedily)

    def remainder(self, module: UnbindModule, rows: Sequence[int], *, thorough: bool = False) -> Remainder:
        """Completions under the module against those before it: greedy ones of these rows' own prompts, plain and
        fill-in-the-middle; where nothing is left there, of all the ways to ask that a fit
        may look at (``CHOSEN_BY``), and where ``thorough`` some rows' sampled ones.
        """
        found = self._remainder(module, rows, attempts=0)
        for attempts in (1, self._often(len(rows))) if thorough else (1,):
            if not self.aim.reached(found):
                break
            more = self._remainder(module, rows, attempts)
            found = replace(found, spans=max(found.spans, more.spans), recovery=max(found.recovery, more.recovery))
        return found

    def _remainder(self, module: UnbindModule, rows: Sequence[int], attempts: int) -> Remainder:
        return _summed(self._scores(rows, module, attempts), self.context.forms)

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


def _summed(scores: Sequence[RowScore], forms: Sequence[str]) -> Remainder:
    """What came back of the rows together."""
    count = len(scores)
    return Remainder(
        {form: sum(score.bleu[form] for score in scores) / count for form in forms},
        sum(score.span >= EXTRACTED_SPAN for score in scores),
        sum(score.recovery for score in scores) / count,
        sum(score.empty for score in scores) / count,
    )
