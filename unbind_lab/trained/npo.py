"""NPO with a KL on what is kept (Appendix C.2): the forget rows as rejected answers, M_full as their reference."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import softplus

from unbind_lab.trained.step import Step
from unbind_lab.trained.training import Configuration, Trained


def npo(now: Tensor, before: Tensor, beta: float) -> Tensor:
    """(2 / beta) E softplus(beta (s - s_0)), of sums over each row's tokens: [B] each -> scalar."""
    return 2 / beta * softplus(beta * (now - before)).mean()


def loss(step: Step) -> Tensor:
    """NPO + lambda_R K_R."""
    forget = npo(step.forget.row_log_likelihoods(), step.forget_before.row_log_likelihoods(), step.options["beta"])
    return forget + step.options["retain"] * step.retain_kl()


NPO = Trained("npo-kl", loss, Configuration(1e-5, 13, {"beta": 0.1, "retain": 1.0}), retains=True)
