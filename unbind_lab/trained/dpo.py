"""DPO (Appendix C.2): the fixed answer is preferred to what is to be forgotten; nothing else holds the model."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from unbind_lab.trained.step import Step
from unbind_lab.trained.training import Configuration, Trained


def dpo(chosen: Tensor, rejected: Tensor, chosen_before: Tensor, rejected_before: Tensor, beta: float) -> Tensor:
    """-(2 / beta) E log sigmoid(beta ((s+ - s-) - (s0+ - s0-))), of sums over each answer's tokens: [B] each -> scalar."""
    return -2 / beta * logsigmoid(beta * ((chosen - rejected) - (chosen_before - rejected_before))).mean()


def loss(step: Step) -> Tensor:
    """DPO."""
    return dpo(
        step.chosen.row_log_likelihoods(),
        step.forget.row_log_likelihoods(),
        step.chosen_before.row_log_likelihoods(),
        step.forget_before.row_log_likelihoods(),
        step.options["beta"],
    )


DPO = Trained("dpo", loss, Configuration(1e-5, 13, {"beta": 0.05}), answers=True)
