"""FLAT (Appendix C.2) by two divergences: mean token probabilities of the fixed answer up, of what is to be forgotten down."""

from __future__ import annotations

from torch import Tensor

from unbind_lab.trained.step import Step
from unbind_lab.trained.training import Configuration, Trained


def by_kl(rejected: Tensor, chosen: Tensor) -> Tensor:
    """E exp(a(y-) - 1) - a(y+), of mean token probabilities: [B] each -> scalar."""
    return ((rejected - 1).exp() - chosen).mean()


def by_total_variation(rejected: Tensor, chosen: Tensor) -> Tensor:
    """E (tanh a(y-) - tanh a(y+)) / 2: [B] each -> scalar."""
    return ((rejected.tanh() - chosen.tanh()) / 2).mean()


def kl_loss(step: Step) -> Tensor:
    """As the paper ran it on CodeSearchNet."""
    return by_kl(step.forget.row_probabilities(), step.chosen.row_probabilities())


def total_variation_loss(step: Step) -> Tensor:
    """As the paper ran it on The Stack."""
    return by_total_variation(step.forget.row_probabilities(), step.chosen.row_probabilities())


FLAT_KL = Trained("flat-kl", kl_loss, Configuration(2e-5, 26), answers=True)
FLAT_TV = Trained("flat-tv", total_variation_loss, Configuration(5e-5, 10), answers=True)  # its numbers on The Stack
