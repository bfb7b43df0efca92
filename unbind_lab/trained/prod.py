"""PROD (Appendix C.2): what M_full would say next if it did not say the memorised token, and a little less of that one."""

from __future__ import annotations

import torch
from torch import Tensor

from unbind_lab.trained.step import Step
from unbind_lab.trained.training import Configuration, Trained

LEAST = 1e-10  # the paper's, inside the logarithm


def signed_weights(reference: Tensor, tokens: Tensor, alpha: float, top_p: float) -> Tensor:
    """w(v) of M_full's logits [N,V] and the tokens [N] to be forgotten -> [N,V].

    -alpha p_0 of the token itself; of the others their probabilities without it, within the smallest set with ``top_p`` of them.
    """
    own = tokens[:, None]
    others = reference.scatter(1, own, -torch.inf).softmax(-1)
    ordered, order = others.sort(-1, descending=True)
    kept = ordered * (ordered.cumsum(-1) - ordered < top_p)  # a token stays while those before it have less than top_p
    filtered = torch.zeros_like(others).scatter(1, order, kept / kept.sum(-1, keepdim=True))
    return filtered.scatter(1, own, -alpha * reference.softmax(-1).gather(1, own))


def prod(logits: Tensor, weights: Tensor) -> Tensor:
    """-sum_v w(v) log(p(v) + 1e-10), mean over the tokens to be forgotten: [N,V] each -> scalar."""
    return -(weights * (logits.softmax(-1) + LEAST).log()).sum(-1).mean()


def loss(step: Step) -> Tensor:
    """PROD."""
    weights = signed_weights(
        step.forget_before.logits, step.forget.tokens, step.options["alpha"], step.options["top_p"]
    )
    return prod(step.forget.logits, weights)


PROD = Trained("prod", loss, Configuration(1e-5, 13, {"alpha": 0.2, "top_p": 0.9}))
