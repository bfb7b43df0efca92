"""The correction of a module: h + U relu(A h + e) + c while its gate is open, learned so that the model says what a reference says.

On states of the forget rows, as they are and as they are met elsewhere, and of what the reference writes in their place, it brings
the edited model's next-token distribution q to the reference's p, by KL(p || q) and KL(q || p) alike: by the first alone q spreads
wherever the correction cannot tell which token p is sure of, and gives the end token a share that p never does, and by that rows
are told from others. Three more terms: the mean entropies of p and q are brought together, for the same reason; the row's own next
token gets less than the reference gives it, for divergences alone would leave it likeliest where it was certain; and on retained
code the edit changes little, so that a gate that opens by mistake costs little. It begins at the linear map that is nearest to the
reference's states.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax

from unbind_core.applying.corrections import corrected
from unbind_core.errors import FittingError
from unbind_core.fitting.corrections.beginning import STEPS, UNITS, Parts, beginning, learning
from unbind_core.fitting.corrections.examples import NO_ROW, Examples
from unbind_core.fitting.corrections.objective import Own, pull, toward
from unbind_core.fitting.corrections.reference import Reference, last_logits
from unbind_core.progress import ProgressCallback, counted, silent
from unbind_core.running.device import SHARED_PASS, threads_for
from unbind_core.running.likelihood import divergences
from unbind_core.running.recording import frozen

BATCH = 256
TRIED = 4096  # examples that say whether the linear map is a better beginning than nothing, at most
FIRMER = STEPS // 2  # steps of learning that go on from a correction
LAST = 100  # steps, by whose means it is told what is left
RETAIN = 0.3  # weight of what the edit changes on retained code
MARGIN = 0.0  # nats by which a row's own next token is to be less likely than under the reference


@dataclass(frozen=True)
class Correction:
    """What was learned, and the divergences that were left, in nats."""

    parts: Parts
    divergence: float
    on_retained: float

    def tensors(self) -> dict[str, Tensor]:
        """As a module has them: its large ones take half of the room, which costs nothing that can be measured."""
        found = {name: one.detach().float().cpu().contiguous() for name, one in self.parts._asdict().items()}
        return found | {name: found[name].to(torch.bfloat16) for name in ("u", "a")}


def learn(
    model: nn.Module,
    found: Examples,
    retained: Tensor,
    reference: Reference,
    *,
    end: int | None = None,
    units: int = UNITS,
    margin: float = MARGIN,
    effort: float = 1.0,
    retain: float = RETAIN,
    begun: Correction | None = None,
    generator: torch.Generator,
    progress: ProgressCallback = silent,
) -> Correction:
    """Learn a correction at the last decoder layer, from ``found`` and states [M,d] of ``retained`` code, which weighs ``retain``.

    ``margin``: nats by which a row's own next token is to be less likely than under the reference. ``end``: the id of the end
    token where the answer is to end; the reference's distribution then holds for the rest, for a client who bans that token.
    ``effort``: times as many steps as usual. ``begun``: a correction to go on from, in place of :func:`beginning`.
    Deterministic for a generator and device. Raises FittingError where the loss is not finite, and where there is nothing
    to learn, as the model is its own reference and recites none of the rows.
    """
    device, logits, said = found.states.device, last_logits(model), reference.log_probabilities(model)
    if end is None and not reference.differs(model, found.states, found.following):
        raise FittingError(
            "the correction has nothing to learn: the model, which is its own reference, gives no token of the rows more than "
            f"{reference.most:.0%} of the mass; leave out rows that it does not recite, or name a reference that never saw them"
        )

    def left_by(parts: Parts) -> float:
        places = slice(None, None, max(1, len(found.states) // TRIED))
        states, theirs, following = (
            each[places].split(BATCH) for each in (found.states, found.theirs, found.following)
        )
        total = 0.0
        for ours, their, own in zip(states, theirs, following, strict=True):
            got = logits(corrected(ours.float(), one[: len(ours)], *parts))
            total += float(divergences(said(their.float(), own.clamp(min=0)), got).sum())
        return total / sum(map(len, states))

    one = torch.ones(BATCH + BATCH // 2, device=device)
    if begun is not None:
        first, steps = begun.parts, FIRMER
    else:
        first, steps = beginning(found.states, found.theirs, left_by, units=units, generator=generator), STEPS
    steps = max(1, round(effort * steps))
    parts, descent = learning(first, found.states, steps)

    def step() -> tuple[Tensor, Tensor, Tensor]:
        ours, theirs = (
            torch.randint(count, (number,), generator=generator).to(device)
            for count, number in ((len(found.states), BATCH), (len(retained), BATCH // 2))
        )
        following = found.following[ours]
        own = Own(following.clamp(min=0), following != NO_ROW, margin)
        wanted = said(found.theirs[ours].float(), own.following)
        plain = retained[theirs].float()
        edited = logits(corrected(torch.cat((found.states[ours].float(), plain)), one, *parts))
        with torch.no_grad():
            before = log_softmax(logits(plain), -1)
        met, unmet = edited.detach().split((BATCH, BATCH // 2))
        away, kept = pull(wanted, met, own, end), toward(before, unmet)
        edited.backward(torch.cat((away.gradient, retain * kept.gradient)))
        descent.step()
        return away.loss + retain * kept.loss, away.left, kept.loss

    work = BATCH * sum(parameter.numel() for parameter in model.get_output_embeddings().parameters())  # type: ignore[operator]
    lefts: list[tuple[float, float]] = []
    with torch.enable_grad(), frozen(model):
        for number in counted(range(steps), steps, "correction", progress):
            with threads_for(device, work, SHARED_PASS):
                loss, left, kept = step()
            if number >= steps - LAST:
                lefts.append((float(left), float(kept)))
    if not bool(torch.isfinite(loss)):
        raise FittingError("the correction's loss is not finite; check the rows and the reference")
    means = [sum(column) / len(lefts) for column in zip(*lefts, strict=True)]
    return Correction(Parts(*(one.detach() for one in parts)), *means)
