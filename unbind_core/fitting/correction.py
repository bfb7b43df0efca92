"""The correction of a module: h + U (A h) + c while its gate is open, learned so that the model says what a reference says.

On states of the forget rows, as they are and as they are met elsewhere, it brings the edited model's next-token distribution q to
the reference's p, by KL(p || q) and KL(q || p) alike: by the first alone q spreads wherever the correction cannot tell which token
p is sure of, and gives the end token a share that p never does, and by that rows are told from others. Three more terms: the mean
entropies of p and q are brought together, for the same reason; the row's own next token gets less than the reference gives it, for
divergences alone would leave it likeliest where it was certain; and on retained code the edit changes little, so that a gate that
opens by mistake costs little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax
from torch.optim.lr_scheduler import LambdaLR

from unbind_core.applying.corrections import corrected
from unbind_core.architecture import decoder_layers
from unbind_core.errors import FittingError
from unbind_core.fitting.reference import Reference, last_logits
from unbind_core.fitting.separation import FIRST
from unbind_core.progress import ProgressCallback, counted, silent
from unbind_core.running.capture import capture_states
from unbind_core.running.device import SHARED_PASS, threads_for
from unbind_core.running.recording import frozen
from unbind_core.windows import Window, batches

RANK = 128
BATCH = 512
MOST_STEPS, LEAST_STEPS, TIMES = 500, 200, 4  # every example about so many times
RATE = 0.02  # of the learning rate, in units of a state's size
EXCESS, RETAIN = 2.0, 0.3  # weights of two of the terms beside the divergences
END = 3.0  # that of the end token: more than both divergences, which stay large where the model is its own reference
MARGIN = 0.4  # nats by which a row's own next token is to be less likely than under the reference
OWN = 3  # times that a row's own windows count beside those in which it is met elsewhere
LEAST = -20.0  # log-probability of the reference, below which an edited model that differs pays no more
MOST_POSITIONS = 120_000  # that are kept for training


@dataclass(frozen=True)
class Examples:
    """``states`` [N,d] of the edited layer, ``theirs`` [N,e] of the reference's last, and the rows' next tokens int64 [N]."""

    states: Tensor
    theirs: Tensor
    following: Tensor


def training_steps(count: int) -> int:
    """Steps for so many examples."""
    return max(LEAST_STEPS, min(MOST_STEPS, TIMES * count // BATCH))


@dataclass(frozen=True)
class Correction:
    """u FP32 [d,r], a FP32 [r,d], c FP32 [d]; and the divergences that were left, in nats."""

    u: Tensor
    a: Tensor
    c: Tensor
    divergence: float
    on_retained: float

    def tensors(self) -> dict[str, Tensor]:
        """As a module has them."""
        return {name: getattr(self, name).detach().float().cpu().contiguous() for name in ("u", "a", "c")}


@dataclass(frozen=True)
class Met:
    """A window in which a row is met: positions ``at``, int64 [n], of the row's part, and the edited layer's ``states`` [n,d]."""

    window: Window
    at: Tensor
    states: Tensor


def met_part(window: Window, states: Tensor, step: int = 1, first: int = 0) -> Met:
    """Of a window's states [T,d] those that say whose they are and precede a token; each ``step``-th of them from ``first`` on."""
    begin, end = window.start + FIRST + first, len(window.ids) - 1
    part = states[begin:-1:step]
    return Met(window, torch.arange(min(begin, end), end, step), part if step == 1 else part.clone())


def examples(
    model: nn.Module,
    met: Sequence[Met],
    reference: Reference,
    *,
    pad: int,
    generator: torch.Generator,
    own: int = 0,
    most: int = MOST_POSITIONS,
    progress: ProgressCallback = silent,
) -> Examples:
    """From the rows' parts of windows; of more than ``most`` positions so many are drawn.

    The first ``own`` of the windows are the rows as they are, and count OWN times.
    """
    share = min(1.0, most / max(1, sum(len(one.at) for one in met)))
    drawn = [(torch.rand(len(one.at), generator=generator) < share).nonzero()[:, 0] for one in met]
    device, repeated = met[0].states.device, [*range(own)] * (OWN - 1) + [*range(len(met))]
    ours = [one.states[places.to(device)].to(torch.bfloat16) for one, places in zip(met, drawn, strict=True)]
    theirs = ours
    if reference.model is not None:
        at = [one.at[places] for one, places in zip(met, drawn, strict=True)]
        theirs = last_states(reference.source(model), [one.window for one in met], at, pad, progress)

    def repeat(of: Sequence[Tensor]) -> Tensor:
        return torch.cat([of[i] for i in repeated])

    following = [torch.tensor(one.window.ids)[one.at[places] + 1] for one, places in zip(met, drawn, strict=True)]
    return Examples(repeat(ours), repeat(theirs), repeat(following).to(device))


def last_states(
    model: nn.Module, windows: Sequence[Window], at: Sequence[Tensor], pad: int, progress: ProgressCallback
) -> list[Tensor]:
    """bfloat16 states [n,d] at some positions of each window at the last decoder layer, in the order of ``windows``."""
    last, device = len(decoder_layers(model)) - 1, next(model.parameters()).device
    order = iter(sorted(range(len(windows)), key=lambda i: -len(windows[i].ids)))  # as batches come
    every, found = list(batches(windows, pad, device=device)), dict[int, Tensor]()
    for batch in counted(every, len(every), "reference", progress):
        for one, number in zip(capture_states(model, batch, [last], roughly=True)[last], order, strict=False):
            found[number] = one[at[number].to(device)].to(torch.bfloat16)
    return [found[i] for i in range(len(windows))]


def learn(
    model: nn.Module,
    found: Examples,
    retained: Tensor,
    reference: Reference,
    *,
    end: int | None = None,
    rank: int = RANK,
    margin: float = MARGIN,
    steps: int = MOST_STEPS,
    retain: float = RETAIN,
    generator: torch.Generator,
    progress: ProgressCallback = silent,
) -> Correction:
    """Learn a correction at the last decoder layer, from ``found`` and states [M,d] of ``retained`` code, which weighs ``retain``.

    ``margin``: nats by which a row's own next token is to be less likely than under the reference. ``end``: the id of the end
    token where the answer is to end; the reference's distribution then holds for the rest, for a client who bans that token.
    Deterministic for a generator and device. Raises FittingError where the loss is not finite.
    """
    device = found.states.device
    u, a, c, optimizer, schedule = beginning(found.states, steps, rank=rank, generator=generator)
    logits, said = last_logits(model), reference.log_probabilities(model)
    one = torch.ones(BATCH + BATCH // 2, device=device)

    def step() -> tuple[Tensor, Tensor, Tensor]:
        ours, theirs = (
            torch.randint(count, (number,), generator=generator).to(device)
            for count, number in ((len(found.states), BATCH), (len(retained), BATCH // 2))
        )
        following = found.following[ours]
        wanted = said(found.theirs[ours].float(), following)
        plain = retained[theirs].float()
        both = torch.cat((found.states[ours].float(), plain))
        got, after = log_softmax(logits(corrected(both, one, u, a, c)), -1).split((BATCH, BATCH // 2))
        ends = torch.zeros((), device=device)
        if end is not None:
            ends = -got[:, end].mean()
            wanted, got = (_without(part, end) for part in (wanted, got))
        left, back, spread = apart(wanted, got)
        excess = (got.gather(1, following[:, None]) - wanted.gather(1, following[:, None]) + margin).relu().mean()
        with torch.no_grad():
            before = log_softmax(logits(plain), -1)
        kept = (before.exp() * (before - after)).sum(-1).mean()
        loss = left + back + spread**2 + END * ends + EXCESS * excess + retain * kept
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        return loss.detach(), left.detach(), kept.detach()

    work = BATCH * sum(parameter.numel() for parameter in model.get_output_embeddings().parameters())  # type: ignore[operator]
    lefts: list[tuple[float, float]] = []
    with torch.enable_grad(), frozen(model):
        for number in counted(range(steps), steps, "correction", progress):
            with threads_for(device, work, SHARED_PASS):
                loss, left, kept = step()
            if number >= steps - 50:
                lefts.append((float(left), float(kept)))
    if not bool(torch.isfinite(loss)):
        raise FittingError("the correction's loss is not finite; check the rows and the reference")
    means = [sum(column) / len(lefts) for column in zip(*lefts, strict=True)]
    return Correction(u.detach(), a.detach(), c.detach(), *means)


def beginning(
    states: Tensor, steps: int, *, rank: int = RANK, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor, torch.optim.Optimizer, LambdaLR]:
    """u, a and c of a correction of states [N,d] that changes nothing yet, and what learns them in so many steps."""
    d = states.shape[1]
    size = float(states[:: max(1, len(states) // 5000)].float().norm(dim=1).mean())
    begun = torch.zeros(d, rank), torch.randn(rank, d, generator=generator) / size, torch.zeros(d)
    u, a, c = (tensor.to(states.device).requires_grad_(True) for tensor in begun)
    optimizer = torch.optim.Adam([{"params": [u, c], "lr": RATE * size * d**-0.5}, {"params": [a], "lr": RATE / size}])
    return u, a, c, optimizer, LambdaLR(optimizer, lambda step: 1 - step / steps)


def apart(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """How far log-probabilities q [N,V] are from p [N,V], in nats, each a mean over N positions: KL(p || q); KL(q || p), where no
    log-probability of p is below LEAST; and the entropy of q less that of p.
    """
    of_p, of_q = p.exp(), q.exp()
    forward = (of_p * (p - q)).sum(-1).mean()
    back = (of_q * (q - p.clamp(min=LEAST))).sum(-1).mean()
    return forward, back, (of_p * p).sum(-1).mean() - (of_q * q).sum(-1).mean()


def _without(log_probabilities: Tensor, token: int) -> Tensor:
    """The distribution [N,V] given that it is not this token, which keeps almost nothing."""
    rest = log_probabilities.clone()
    rest[:, token] = -30.0
    return log_softmax(rest, -1)
