"""What a module costs retain rows that chose nothing: measured once, when it is made, with bounds (``evaluation/bounds.py``).

The last station of a fit. The rows that trained the detector and those that chose threshold and strength say too little of others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from unbind_core.applying.bank import edit_of
from unbind_core.evaluation.bounds import LEVEL, mean_bound, share_bound
from unbind_core.evaluation.completions import RetainCompletions, retain_completions
from unbind_core.evaluation.replay import Replay, retain_replay
from unbind_core.fitting.context import Context
from unbind_core.module import UnbindModule
from unbind_core.progress import Progress

CAP = 1.0  # nats a token, the most that a row's mean KL or rise of NLL counts: no bound holds for costs without one


def certify(context: Context, module: UnbindModule, left_out: Sequence[int]) -> dict[str, Any] | None:
    """The certificate of ``module`` as JSON values; None where the fit has no rows for it. ``left_out``: rows not to count.

    ``touched`` is the share of rows in which a gate opens anywhere, in any of the fit's forms, with a bound of its own.
    ``open_rate``, ``kl``, ``nll`` and ``bleu`` are means over rows of what the budgets count, a row's part between 0 and ``cap``;
    their bounds hold together. ``over`` names those that were observed over their budget. All of it speaks of rows as these are.
    """
    rows = [i for i in certificate_rows(context) if i not in set(left_out)]
    if not rows:
        return None

    tell = partial(_tell, context)
    with context.clock.stage("certificate"):
        replay, completions = certificate_states(context, rows, module.layer)
        bank, selection = edit_of(module, replay.device)
        found = replay.run(selection, module.layer, kl_budget=float("inf"), progress=tell).rows.values()
        drops = completions.drops(bank, selection, module.layer, tell)
    costs = {
        "open_rate": [row.changed / row.positions for row in found],
        "kl": [_within(row.kl / row.scored, CAP) for row in found],
        "nll": [_within(row.nll / row.scored, CAP) for row in found],
        "bleu": [_within(drop, 1.0) for drop in drops],
    }
    certificate: dict[str, Any] = {
        "touched": share_bound(sum(row.changed > 0 for row in found), len(found)).to_json(),
        **{name: mean_bound(each, ways=len(costs)).to_json() for name, each in costs.items() if each},
        "level": LEVEL,
        "cap": CAP,
    }
    limits = asdict(context.options.limits)
    binding = [
        name for name in costs if name in certificate and (name != "open_rate" or context.options.gate == "auto")
    ]
    return {**certificate, "over": [name for name in binding if certificate[name]["observed"] > limits[name]]}


def certificate_rows(context: Context) -> list[int]:
    """The rows set apart to certify, less those whose text stands among the rows that train or choose as well, and those of a
    single token, on which nothing can be measured.
    """
    parts, retain = context.parts, context.retain
    chosen = {retain[i].text for i in (*parts.retain_fit, *parts.retain_calibration)}
    return [i for i in parts.retain_certificate if retain[i].text not in chosen and context.retain_windows([i])]


def certificate_states(context: Context, rows: Sequence[int], layer: int) -> tuple[Replay, RetainCompletions]:
    """What certifies a module of ``layer`` on retain rows, before any edit; from the cache where it is known."""
    shared: dict[str, Any] = {
        "cache": context.cache,
        "fingerprint": context.identity.fingerprint,
        "progress": partial(_tell, context),
    }
    windows = context.retain_windows(rows)
    replay = retain_replay(context.model, windows, [layer], pad=context.pad, **shared)
    return replay, retain_completions(context.model, context.tokenizer, context.retain, rows, [layer], **shared)


def _tell(context: Context, at: Progress) -> None:
    context.progress(replace(at, stage="certificate"))


def _within(cost: float, cap: float) -> float:
    """A row's cost as a share of the cap; a gain counts as none."""
    return min(max(cost, 0.0), cap) / cap
