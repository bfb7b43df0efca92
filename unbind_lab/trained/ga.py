"""Gradient ascent (Appendix C.2): the likelihood of what is to be forgotten is pushed down, and nothing holds the rest."""

from __future__ import annotations

from torch import Tensor

from unbind_lab.trained.step import Step
from unbind_lab.trained.training import Configuration, Trained


def loss(step: Step) -> Tensor:
    """-N_F."""
    return -step.forget.nll.mean()


GA = Trained("ga", loss, Configuration(5e-6, 13))
