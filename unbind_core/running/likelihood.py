"""What logits say of tokens: how unlikely those that came were, and how far two distributions are apart."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from unbind_core.windows import Batch


def target_nll(logits: Tensor, batch: Batch) -> Tensor:
    """-log p(x_{t+1} | x_<=t) of every target (Section 3, eq. (1)): logits [B,T,V] -> FP32 (or wider) [N]."""
    return nll_of(logits[batch.predictors], batch.next_tokens())


def nll_of(logits: Tensor, following: Tensor) -> Tensor:
    """The same of logits [N,V] and the tokens that came, int64 [N]."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return nn.functional.cross_entropy(wide, following, reduction="none")


@torch.no_grad()
def divergences(original: Tensor, edited: Tensor) -> Tensor:
    """KL(original || edited) of each row, natural log, FP32 softmax: logits [N,V] -> [N]. No gradients, and no more than three
    tables of that size at a time, where ``kl_div`` has five.
    """
    p = torch.log_softmax(original.float(), -1)
    q = torch.log_softmax(edited.float(), -1)
    difference = torch.sub(p, q, out=q)
    return difference.mul_(p.exp_()).sum(-1)
