"""What a candidate module does: how much of the rows it makes the model forget, and what it costs on retain rows.

The measures of ``gate="auto"`` (``auto.py`` chooses by them); all of them on rows that the fit was context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial

from unbind_core.applying.attach import attach
from unbind_core.applying.bank import edit_of
from unbind_core.evaluation.completions import RetainCompletions
from unbind_core.evaluation.drafts import Drafts
from unbind_core.evaluation.replay import Replay
from unbind_core.evaluation.scores import CHOSEN_BY, RowScore, forget_scores
from unbind_core.fitting.calibration import Budgets
from unbind_core.fitting.context import Context
from unbind_core.fitting.options import Target
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
    """What is left of the rows under a module: shares of the former F-BLEU by form, rows with long spans, mean recovery."""

    f_bleu_left: dict[str, float]
    spans: int
    recovery: float

    @property
    def left(self) -> float:
        """All that is left, as one number."""
        return max(self.f_bleu_left.values()) + self.recovery

    def reaches(self, target: Target) -> bool:
        """Whether this is as little as was aimed at."""
        gone = all(left <= 1 - target.f_bleu_cut for left in self.f_bleu_left.values())
        return gone and self.spans == 0 and self.recovery <= target.recovery


class Judge:
    """Measures modules against what the model did before: on the rows to forget and on retain-calibration rows."""

    def __init__(
        self, context: Context, retain: Replay, completions: RetainCompletions, forget: Replay | None = None
    ) -> None:
        """``forget``: the states of the rows to forget at all layers that modules are tried at, where they are kept."""
        self.context, self.retain, self.completions, self.target = context, retain, completions, context.options.target
        self.forget = forget
        self._drafts: dict[int, Drafts] = {}
        self.before = context.before or self._scores(range(len(context.forget)), None, attempts=0)

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
        often = min(MOST_ATTEMPTS, 1 + max(1, SAMPLED_ROWS // len(rows)))
        for attempts in (1, often) if thorough else (1,):
            if not found.reaches(self.target):
                break
            more = self._remainder(module, rows, attempts)
            found = Remainder(found.f_bleu_left, max(found.spans, more.spans), max(found.recovery, more.recovery))
        return found

    def _remainder(self, module: UnbindModule, rows: Sequence[int], attempts: int) -> Remainder:
        after = self._scores(rows, module, attempts)
        left = {}
        for form in self.context.forms:
            whole = sum(self.before[i].bleu[form] for i in rows)
            left[form] = sum(score.bleu[form] for score in after) / max(whole, 1e-9)
        long = sum(score.span >= self.target.span for score in after)
        return Remainder(left, long, sum(score.recovery for score in after) / len(after))

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
