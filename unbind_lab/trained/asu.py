"""ASU with a KL on what is kept (Appendix C.2): the teacher of the forget rows is M_full with its attention smoothed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from unbind_core.errors import UnsupportedArchitecture
from unbind_lab.trained.step import Step, kl
from unbind_lab.trained.training import Configuration, Trained


@contextmanager
def smoothed_attention(model: nn.Module, temperature: float) -> Iterator[None]:
    """Attention logits divided by ``temperature`` before the softmax. Raises UnsupportedArchitecture where nothing scales them."""
    scaled: list[Any] = [part for part in model.modules() if isinstance(getattr(part, "scaling", None), float)]
    scaled = [part for part in scaled if "attention" in type(part).__name__.lower()]
    if not scaled:
        raise UnsupportedArchitecture(
            f"asu-kl: {type(model).__name__} has no attention with a 'scaling'; leave the system out"
        )
    before = [part.scaling for part in scaled]
    try:
        for part in scaled:
            part.scaling /= temperature
        yield
    finally:
        for part, scaling in zip(scaled, before, strict=True):
            part.scaling = scaling


def loss(step: Step) -> Tensor:
    """KL(p_0 smoothed || p) on the forget rows + lambda_R K_R."""
    with smoothed_attention(step.reference_model, step.options["temperature"]):
        teacher = step.taught(step.forget_batch).logits
    return kl(teacher, step.forget.logits) + step.options["retain"] * step.retain_kl()


ASU = Trained("asu-kl", loss, Configuration(2e-5, 65, {"temperature": 1.5, "retain": 0.03}), retains=True)
