"""Task Vector (Appendix C.2): the forget rows are learned still better, and what changed is taken off instead."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from unbind_lab.trained.step import Step
from unbind_lab.trained.training import Configuration, Trained, Weights


def loss(step: Step) -> Tensor:
    """N_F."""
    return step.forget.nll.mean()


def subtracted(before: Weights, after: Weights, options: Mapping[str, float]) -> Weights:
    """phi_0 - alpha (phi_reinforced - phi_0), on the adapter's tensors."""
    return {name: tensor - options["alpha"] * (after[name] - tensor) for name, tensor in before.items()}


TASK_VECTOR = Trained("task-vector", loss, Configuration(5e-5, 13, {"alpha": 1.0}), finish=subtracted)
