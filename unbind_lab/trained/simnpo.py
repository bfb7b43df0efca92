"""SimNPO with a KL on what is kept (Appendix C.2): NPO by the mean over each row's tokens, without a reference."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import softplus

from unbind_lab.trained.step import Step
from unbind_lab.trained.training import Configuration, Trained


def simnpo(mean: Tensor, beta: float, gamma: float) -> Tensor:
    """(2 / beta) E softplus(beta s_bar + gamma), of means over each row's tokens: [B] -> scalar."""
    return 2 / beta * softplus(beta * mean + gamma).mean()


def loss(step: Step) -> Tensor:
    """SimNPO + lambda_R K_R."""
    forget = simnpo(step.forget.row_log_likelihoods(mean=True), step.options["beta"], step.options["gamma"])
    return forget + step.options["retain"] * step.retain_kl()


SIMNPO = Trained(
    "simnpo-kl", loss, Configuration(2e-5, 13, {"beta": 0.7, "gamma": 0.0, "retain": 1.0}), retains=True, pool=600
)
