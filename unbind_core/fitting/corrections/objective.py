"""What a correction is learned by, with its gradient in the logits written down.

A table [N,V] of a batch is read a dozen times by these terms, and by autograd's way back once more for each: here rows are taken
few at a time, so that they stay in the processor's cache, and the gradient takes the place of what it is made of.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

EXCESS = 2.0  # weight of the row's own next token beside the divergences
END = 3.0  # that of the end token: more than both divergences, which stay large where the model is its own reference
LEAST = -20.0  # a log-probability of p, below which a q that differs is no further apart
NEVER = -30.0  # the log-probability of a token that is taken out
TOGETHER = 1 << 17  # numbers of a table that are taken at a time on a CPU


class Pull(NamedTuple):
    """``loss`` and, of it, ``left`` = KL(p || q): scalars in nats, means over positions; ``gradient`` [N,V] of the loss in the
    logits.
    """

    loss: Tensor
    left: Tensor
    gradient: Tensor


class Own(NamedTuple):
    """The row's next token at each position, int64 [N], and where it is protected, bool [N]; ``margin`` in nats."""

    following: Tensor
    protected: Tensor
    margin: float = 0.0


@torch.no_grad()
def pull(p: Tensor, logits: Tensor, own: Own, end: int | None = None) -> Pull:
    """Brings q = softmax(logits) to the log-probabilities ``p`` [N,V]: KL(p || q) + KL(q || p) + (H(q) - H(p))^2, H being mean
    entropies, and EXCESS times what q gives a protected token beyond ``margin`` nats below p.

    With ``end``, q is to be that token, END times -log q(end), and what q says of the others is brought to what p says of them.
    """
    q = log_softmax(logits, -1)
    if end is None:
        return _pull(p, q, own)
    whole, count = q.exp(), len(q)
    ends = -q[:, end].mean()
    loss, left, gradient = _pull(_without(p, end), _without(q, end), own)
    gradient[:, end] = 0
    gradient += whole * (END / count - gradient.sum(1, keepdim=True))
    gradient[:, end] -= END / count
    return Pull(loss + END * ends, left, gradient)


@torch.no_grad()
def toward(p: Tensor, logits: Tensor) -> Pull:
    """KL(p || softmax(logits)) alone."""
    q = log_softmax(logits, -1)
    left = q.new_zeros(())
    for some in _few_at_a_time(q):
        share = p[some].exp()
        left += torch.linalg.vecdot(share, p[some] - q[some]).sum()
        q[some].exp_().sub_(share)
    left /= len(q)
    return Pull(left, left, q.div_(len(q)))


def _pull(p: Tensor, q: Tensor, own: Own) -> Pull:
    """Of log-probabilities ``q``, in whose place the gradient comes."""
    at = own.following[:, None]
    above = (q.gather(1, at) - p.gather(1, at)).squeeze(1) + own.margin
    excess = EXCESS * ((above > 0) & own.protected).to(q.dtype)
    # Of each position: the divergences, and sums of p log p and of q log q, which are the entropies' opposites.
    forward, back, of_p, of_q = (torch.empty_like(above) for _ in range(4))
    for some in _few_at_a_time(q):
        said, ours = p[some], q[some]
        share, held = said.exp(), ours.exp()
        of_p[some] = torch.linalg.vecdot(share, said)
        of_q[some] = torch.linalg.vecdot(held, ours)
        forward[some] = of_p[some] - torch.linalg.vecdot(share, ours)
        back[some] = of_q[some] - torch.linalg.vecdot(held, said.clamp(min=LEAST))
    wider = of_p.mean() - of_q.mean()
    left = forward.mean()
    loss = left + back.mean() + wider**2 + (excess * above).mean()
    # d/dlogit_i of KL(q || p) is q_i (log q_i - log p_i - KL(q || p)), and of an entropy -q_i (log q_i - sum_j q_j log q_j).
    constant = 1 - back + 2 * wider * of_q - excess
    for some in _few_at_a_time(q):
        said, gradient = p[some], q[some]
        held = gradient.exp()
        gradient.mul_(1 - 2 * wider).sub_(said.clamp(min=LEAST)).add_(constant[some, None]).mul_(held).sub_(said.exp())
    q.scatter_add_(1, at, excess[:, None])
    return Pull(loss, left, q.div_(len(q)))


def _few_at_a_time(table: Tensor) -> Iterator[slice]:
    """Rows of a table [N,V]: all of them at once where the device is no CPU."""
    step = max(1, TOGETHER // table.shape[1]) if table.device.type == "cpu" else len(table)
    for begin in range(0, len(table), step):
        yield slice(begin, begin + step)


def _without(log_probabilities: Tensor, token: int) -> Tensor:
    """The distribution [N,V] given that it is not this token, which keeps almost nothing."""
    rest = log_probabilities.clone()
    rest[:, token] = NEVER
    return log_softmax(rest, -1)
