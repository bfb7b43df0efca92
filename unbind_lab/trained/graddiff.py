"""GradDiff (Appendix C.2): gradient ascent on what is to be forgotten, language modelling on what is kept."""

from __future__ import annotations

from torch import Tensor

from unbind_lab.trained.step import Step
from unbind_lab.trained.training import Configuration, Trained


def loss(step: Step) -> Tensor:
    """-N_F + lambda_R N_R."""
    return -step.forget.nll.mean() + step.options["retain"] * step.retain.nll.mean()


GRADDIFF = Trained("graddiff", loss, Configuration(1e-5, 65, {"retain": 1.0}), retains=True)
