"""CodeEraser (Appendix C.2): ascent on the continuation, descent on its context, a KL from M_full traded between both roles."""

from __future__ import annotations

from torch import Tensor

from unbind_lab.trained.step import Step, kl
from unbind_lab.trained.training import Configuration, Trained


def loss(step: Step) -> Tensor:
    """-N_F + gamma N_context - lambda K_F + lambda alpha K_R, each a mean over its own tokens."""
    options = step.options
    forget = -step.forget.nll.mean() + options["gamma"] * step.forget.context_nll.mean()
    apart = kl(step.forget_before.logits, step.forget.logits)
    return forget - options["lambda"] * apart + options["lambda"] * options["alpha"] * step.retain_kl()


CODE_ERASER = Trained(
    "code-eraser",
    loss,
    Configuration(3e-6, 10, {"gamma": 0.5, "lambda": 0.1, "alpha": 1.0}),
    retains=True,
    retain_tokens=128,
    weight_decay=0.0,
)
