"""The correction of a module: h + U (A h) + c while its gate is open, learned so that the model says what a reference says.

On states of the forget rows, as they are and as they are met elsewhere, and of what the reference writes in their place, it brings
the edited model's next-token distribution q to the reference's p, by KL(p || q) and KL(q || p) alike: by the first alone q spreads
wherever the correction cannot tell which token p is sure of, and gives the end token a share that p never does, and by that rows
are told from others. Three more terms: the mean entropies of p and q are brought together, for the same reason; the row's own next
token gets less than the reference gives it, for divergences alone would leave it likeliest where it was certain; and on retained
code the edit changes little, so that a gate that opens by mistake costs little. It begins at the linear map that is nearest to the
reference's states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from unbind_core.running.likelihood import apart, without
from unbind_core.running.recording import frozen
from unbind_core.windows import Window, batches

RANK = 128
BATCH = 512
STEPS, UNAIDED = 200, 500  # of learning: from the nearest linear map, and where that is no help
RATE = 0.02  # of the learning rate, in units of a state's size
ON = 0.06  # of the learning rate of u and a that are begun, in units of the size of their numbers
RIDGE = 0.01  # of the states' variances, added to them before the linear map is solved for
PART = 8192  # states that are added up at a time for it
TRIED = 4096  # examples that say whether the linear map is a better beginning than nothing, at most
EXCESS, RETAIN = 2.0, 0.3  # weights of two of the terms beside the divergences
END = 3.0  # that of the end token: more than both divergences, which stay large where the model is its own reference
MARGIN = 0.4  # nats by which a row's own next token is to be less likely than under the reference
NO_ROW = -1  # in place of a token, where what follows is no row's
OWN = 3  # times that a row's own windows count beside those in which it is met elsewhere
# Positions that are learned from, of the rows as they are and as they are met elsewhere.
MOST_OWN, MOST_ELSEWHERE = 60_000, 40_000


Parts = tuple[Tensor, Tensor, Tensor]  # u, a and c of a correction


@dataclass(frozen=True)
class Examples:
    """``states`` [N,d] of this layer, ``theirs`` [N,e] of the reference's last, the rows' next tokens int64 [N] (or NO_ROW)."""

    states: Tensor
    theirs: Tensor
    following: Tensor


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
    continued: Sequence[Met] = (),
    most: tuple[int, int] = (MOST_OWN, MOST_ELSEWHERE),
    progress: ProgressCallback = silent,
) -> Examples:
    """From the rows' parts of windows, which are drawn whole: of the first ``own``, the rows as they are, until they have
    ``most[0]`` positions, and of the others until they have ``most[1]``; and all of the ``continued`` ones, where no row's token
    follows. Those of the rows as they are count OWN times.
    """
    first, others = _drawn(met[:own], most[0], generator), _drawn(met[own:], most[1], generator)
    met = [*first, *others, *continued]
    of_rows, repeated = len(met) - len(continued), [*range(len(first))] * (OWN - 1) + [*range(len(met))]
    ours = [one.states.to(torch.bfloat16) for one in met]
    theirs, at = ours, [one.at for one in met]
    if reference.model is not None:
        theirs = last_states(reference.source(model), [one.window for one in met], at, pad, progress)

    def repeat(of: Sequence[Tensor]) -> Tensor:
        return torch.cat([of[i] for i in repeated])

    ids = [torch.tensor(one.window.ids)[one.at + 1] for one in met]
    following = repeat([own if i < of_rows else torch.full_like(own, NO_ROW) for i, own in enumerate(ids)])
    states = repeat(ours)
    return Examples(states, states if theirs is ours else repeat(theirs), following.to(states.device))


def _drawn(met: Sequence[Met], most: int, generator: torch.Generator) -> list[Met]:
    """Windows in no order, until there are ``most`` positions."""
    found, count = list[Met](), 0
    for number in torch.randperm(len(met), generator=generator).tolist():
        if count >= most:
            break
        found.append(met[number])
        count += len(met[number].at)
    return found


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
    Deterministic for a generator and device. Raises FittingError where the loss is not finite.
    """
    device, logits, said = found.states.device, last_logits(model), reference.log_probabilities(model)

    def left_by(u: Tensor, a: Tensor, c: Tensor) -> float:
        places = slice(None, None, max(1, len(found.states) // TRIED))
        states, theirs, following = (
            each[places].split(BATCH) for each in (found.states, found.theirs, found.following)
        )
        total = 0.0
        for ours, their, own in zip(states, theirs, following, strict=True):
            got = logits(corrected(ours.float(), one[: len(ours)], u, a, c))
            total += float(apart(said(their.float(), own.clamp(min=0)), log_softmax(got, -1))[0]) * len(ours)
        return total / sum(map(len, states))

    one = torch.ones(BATCH + BATCH // 2, device=device)
    if begun is None:
        first, steps = beginning(found.states, found.theirs, left_by, rank=rank, generator=generator)
    else:
        first, steps = (begun.u, begun.a, begun.c), STEPS
    steps = max(1, round(effort * steps))
    (u, a, c), optimizer, schedule = learning(first, found.states, steps)

    def step() -> tuple[Tensor, Tensor, Tensor]:
        ours, theirs = (
            torch.randint(count, (number,), generator=generator).to(device)
            for count, number in ((len(found.states), BATCH), (len(retained), BATCH // 2))
        )
        following = found.following[ours]
        protected, following = following != NO_ROW, following.clamp(min=0)
        wanted = said(found.theirs[ours].float(), following)
        plain = retained[theirs].float()
        both = torch.cat((found.states[ours].float(), plain))
        got, after = log_softmax(logits(corrected(both, one, u, a, c)), -1).split((BATCH, BATCH // 2))
        ends = torch.zeros((), device=device)
        if end is not None:
            ends = -got[:, end].mean()
            wanted, got = (without(part, end) for part in (wanted, got))
        left, back, spread = apart(wanted, got)
        above = (got.gather(1, following[:, None]) - wanted.gather(1, following[:, None])).squeeze(1) + margin
        excess = (above.relu() * protected).mean()
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
    states: Tensor,
    wanted: Tensor,
    left_by: Callable[[Tensor, Tensor, Tensor], float],
    *,
    rank: int,
    generator: torch.Generator,
) -> tuple[Parts, int]:
    """Where the learning of a correction of ``states`` [N,d] begins, and how many steps it takes from there.

    At the linear map nearest to states ``wanted`` [N,e], if the divergence that ``left_by`` says u, a and c leave is less with it
    than with nothing. States of another model may be of another width, or mean something else to the head.
    """
    d = states.shape[1]
    drawn = (torch.randn(rank, d, generator=generator) / _size(states)).to(states.device)
    begun = nothing = drawn.new_zeros(d, rank), drawn, drawn.new_zeros(d)
    steps = UNAIDED
    if wanted.shape == states.shape and wanted is not states:
        mapped = nearest(states, wanted, drawn)
        with torch.no_grad():
            before, after = left_by(*nothing), left_by(*mapped)
        if after < before:
            begun, steps = mapped, STEPS if after <= before / 2 else UNAIDED
    return begun, steps


def nearest(states: Tensor, wanted: Tensor, drawn: Tensor) -> Parts:
    """u FP32 [d,r], a FP32 [r,d] and c FP32 [d], with which x + u (a x) + c is nearest to ``wanted`` [N,d] for ``states`` x [N,d]:
    ridge regression of reduced rank. Of ranks that there is nothing to map with, ``a`` holds those of ``drawn`` [r,d].
    """
    d, rank = states.shape[1], len(drawn)
    square, cross = drawn.new_zeros(d, d), drawn.new_zeros(d, d)
    mean = sum(part.float().sum(0) for part in states.split(PART)) / len(states)
    change = sum(part.float().sum(0) for part in wanted.split(PART)) / len(states) - mean
    for ours, theirs in zip(states.split(PART), wanted.split(PART), strict=True):
        x = ours.float() - mean
        square += x.T @ x
        cross += x.T @ (theirs.float() - ours.float() - change)
    square.diagonal().mul_(1 + RIDGE).clamp_(min=1e-6)
    root = torch.linalg.cholesky(square)
    left, values, right = torch.linalg.svd(torch.linalg.solve_triangular(root, cross, upper=False))
    kept = min(rank, int((values > 1e-6 * values[0]).sum()))
    half = values[:kept].sqrt()  # as much in u as in a
    u, a = drawn.new_zeros(d, rank), drawn.clone()
    u[:, :kept] = right[:kept].T * half
    a[:kept] = torch.linalg.solve_triangular(root.T, left[:, :kept] * half, upper=True).T
    return u, a, change - u @ (a @ mean)


def learning(begun: Parts, states: Tensor, steps: int) -> tuple[Parts, torch.optim.Optimizer, LambdaLR]:
    """u, a and c of a correction of states [N,d] as they are begun, and what learns them in so many steps."""
    size, d = _size(states), states.shape[1]
    u, a, c = (tensor.clone().requires_grad_(True) for tensor in begun)
    rates = [RATE * size * d**-0.5, RATE / size]
    if bool(u.any()):
        rates = [ON * float(tensor.detach().pow(2).mean().sqrt()) for tensor in (u, a)]
    groups = [([u], rates[0]), ([a], rates[1]), ([c], RATE * size * d**-0.5)]
    optimizer = torch.optim.Adam([{"params": tensors, "lr": rate} for tensors, rate in groups])
    return (u, a, c), optimizer, LambdaLR(optimizer, lambda step: 1 - step / steps)


def _size(states: Tensor) -> float:  # the mean norm of states [N,d]
    return float(states[:: max(1, len(states) // 5000)].float().norm(dim=1).mean())
