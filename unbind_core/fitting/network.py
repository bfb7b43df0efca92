"""The network detector: a hidden layer and one head a forget row, trained on captured states to tell whose row this is.

A linear detector asks "is this protected code?" of every state and is often wrong where rows are many and dimensions few. This one
asks "is this row 17?". Ordinary code resembles some protected row at many a position, but another one at the next, so the
mean of one row's score over a window of positions tells them apart where no single score can.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unbind_core.applying.networks import network_scores
from unbind_core.errors import FittingError
from unbind_core.fitting.descent import Descent
from unbind_core.progress import ProgressCallback, counted, silent
from unbind_core.running.device import SHARED_PASS, bfloat16_is_fast, threads_for

BATCH = 2048
FEW = 60  # rows, up to which a narrower network and fewer states a step do
SAMPLE = 10_000  # retained states whose mean and deviation scale all others
LEARNING_RATE, WEIGHT_DECAY = 4e-3, 0.25
LOOKED_FOR = (0.2, 0.45, 0.7)  # of the steps: when the hardest states are looked for,
EVERY = 4  # among every so-manieth retained one,
MORE = 1 / 16  # of a batch's retained states are those of rows that are learned too
PART = 1 << 16  # so many at a time


def network_steps(rows: int) -> int:
    """Training steps for so many heads: what they took on the demo model to tell their rows apart."""
    return 800 + 10 * rows if rows <= FEW else min(4000, 1000 + 10 * rows)


def network_batch(rows: int) -> int:
    """States a step: for few heads more steps do more than more states, for many it was not so."""
    return BATCH if rows <= FEW else 2 * BATCH


def network_width(rows: int) -> int:
    """Hidden units for so many heads."""
    return 128 if rows <= 32 else 256 if rows <= FEW else 512


@dataclass(frozen=True)
class Share:
    """Of a side's states in a batch ``drawn`` come from those that are hardest now, the ``hardest`` of all and no fewer than
    half a batch.
    """

    drawn: float
    hardest: float


FORGET, RETAINED = Share(0.3, 0.3), Share(0.5, 0.02)


@dataclass(frozen=True)
class Network:
    """f(h) = heads relu(w h + b) + heads_b, FP32: w [h,d], b [h], heads [K,h], heads_b [K]; one head a forget row.

    A head's score is the log odds, as trained, of its row against retained code.
    """

    w: Tensor
    b: Tensor
    heads: Tensor
    heads_b: Tensor

    def scores(self, states: Tensor) -> Tensor:
        """f of states [...,d] -> [...,K]."""
        return network_scores(states, self.w, self.b, self.heads, self.heads_b)


def train_network(
    forget: Tensor,
    rows: Tensor,
    retain: Tensor,
    *,
    width: int,
    steps: int,
    batch: int = BATCH,
    more: Tensor | None = None,
    seed: int = 0,
    progress: ProgressCallback = silent,
    stage: str = "detector",
) -> Network:
    """Train by cross-entropy over "retained" and the K rows, half of each ``batch`` of states from either side.

    What opens a gate by mistake is a few states in a thousand, which a draw hardly ever meets. So a part of either side is drawn
    from the states that the network, as it is by then, gets most wrong.

    ``forget`` [N,d] with ``rows`` int64 [N] in 0..K-1, ``retain`` [M,d], any floating dtype; ``more`` [A,d], at least one: few
    retained states, of which every step meets some. Muon, weight decay, learning rate falling to zero; products in bfloat16 where
    those are fast. Deterministic for a seed and device. Raises FittingError where the loss is not finite.
    """
    generator = torch.Generator().manual_seed(seed)
    device, count = forget.device, int(rows.max()) + 1
    fast = bfloat16_is_fast(device)  # elsewhere they take several times as long as in FP32
    roughly = torch.bfloat16 if fast else torch.float32
    sample = retain[:: max(1, len(retain) // SAMPLE)].float()
    mean, deviation = sample.mean(0), sample.std(0).clamp(min=1e-6)
    hidden, out = (
        nn.utils.skip_init(nn.Linear, i, o, device=device) for i, o in ((forget.shape[1], width), (width, count + 1))
    )
    for part in (hidden, out):
        bound = part.in_features**-0.5
        for parameter in part.parameters():
            parameter.data.copy_(torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator))
    descent = Descent(
        [(parameter, LEARNING_RATE) for part in (hidden, out) for parameter in part.parameters()],
        lambda step: min(1.0, (step + 1) / 50) * (1 - step / steps),
        decay=WEIGHT_DECAY,
    )
    targets = torch.cat((rows.cpu() + 1, torch.zeros(len(retain), dtype=torch.int64)))
    work = batch * width * (forget.shape[1] + count)
    labels = targets[: len(forget), None].to(device)
    hard_ours = hard_theirs = torch.empty(0, dtype=torch.int64)

    def evidence(states: Tensor, label: Tensor | None) -> Tensor:
        """The log odds against "retained" of the row ``label`` [N,1], or of the likeliest one."""
        w = hidden.weight / deviation
        products = [w, hidden.bias - w @ mean, out.weight, out.bias]
        into, into_b, onto, onto_b = (each.to(roughly) for each in products)
        found = []
        for start in range(0, len(states), PART):
            part = states[start : start + PART].to(roughly)
            logits = nn.functional.linear(nn.functional.linear(part, into, into_b).relu_(), onto, onto_b).float()
            rows = logits[:, 1:].amax(1) if label is None else logits.gather(1, label[start : start + PART])[:, 0]
            found.append(rows - logits[:, 0])
        return torch.cat(found)

    def draw(count: int, share: Share, hard: Tensor) -> Tensor:
        some = torch.randint(count, (batch // 2,), generator=generator)
        if len(hard):
            few = round(share.drawn * len(some))
            some[:few] = hard[torch.randint(len(hard), (few,), generator=generator)]
        return some

    def step() -> Tensor:
        ours, theirs = draw(len(forget), FORGET, hard_ours), draw(len(retain), RETAINED, hard_theirs)
        states = [forget.index_select(0, ours.to(device)), retain.index_select(0, theirs.to(device))]
        if more is not None:  # in place of some that were drawn last
            few = more[torch.randint(len(more), (round(MORE * len(theirs)),), generator=generator).to(device)]
            states = [states[0], states[1][: -len(few)], few.to(retain.dtype)]
        x = torch.cat(states).float().sub_(mean).div_(deviation)
        y = targets[torch.cat((ours, theirs + len(forget)))].to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=fast):
            logits = out(hidden(x).relu())
        loss = nn.functional.cross_entropy(logits.float(), y)
        loss.backward()
        descent.step()
        return loss.detach()

    looking = {int(part * steps) for part in LOOKED_FOR}
    for number in counted(range(steps), steps, stage, progress):  # who follows may change the number of threads
        if number in looking:
            with torch.no_grad(), threads_for(device, PART * width * (forget.shape[1] + count), SHARED_PASS):
                hard_ours = _largest(-evidence(forget, labels), FORGET, batch // 2)
                hard_theirs = _largest(evidence(retain[::EVERY], None), RETAINED, batch // 2) * EVERY
        with torch.enable_grad(), threads_for(device, work, SHARED_PASS):
            loss = step()
    if not bool(torch.isfinite(loss)):
        raise FittingError("the detector's loss is not finite; check the rows and the model's dtype")
    with torch.no_grad():
        w = hidden.weight / deviation
        return Network(
            w.contiguous(),
            (hidden.bias - w @ mean).contiguous(),
            (out.weight[1:] - out.weight[:1]).contiguous(),
            (out.bias[1:] - out.bias[:1]).contiguous(),
        )


def _largest(values: Tensor, share: Share, least: int) -> Tensor:
    """Where the largest of all values are, int64, on the CPU: that share of them, and at least so many where there are."""
    return values.topk(min(len(values), max(least, int(share.hardest * len(values))))).indices.cpu()
