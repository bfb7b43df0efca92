"""RMU (Appendix C.2): forget states are led to a fixed random vector, retain states held where they were, by three matrices.

The paper takes layer 7 of 28 and of 32, and the matrices of 5, 6 and 7. Of another depth it is the layer at 7 / 28 of it, the third
at least.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from unbind_core.architecture import decoder_layers
from unbind_core.running.recording import recording
from unbind_core.windows import Batch
from unbind_lab.trained.step import Step, pieces
from unbind_lab.trained.training import Configuration, Trained

PAPER_LAYER, PAPER_DEPTHS, MATRICES, VECTOR_SEED = 7, (28, 32), 3, 42


def layer_of(model: nn.Module) -> int:
    """Whose output is led away, from 0: the paper's in models as deep as its own two."""
    depth = len(decoder_layers(model))
    return PAPER_LAYER if depth in PAPER_DEPTHS else max(MATRICES - 1, round(PAPER_LAYER * depth / PAPER_DEPTHS[0]))


def weights(model: nn.Module) -> list[str]:
    """The down projections of that layer and the two below it."""
    last = layer_of(model)
    wanted = tuple(
        f"layers.{i}.mlp.down_proj{part}.weight"
        for i in range(last - MATRICES + 1, last + 1)
        for part in ("", ".base_layer")
    )
    return [name for name, _ in model.named_parameters() if name.endswith(wanted)]


def control(size: int, length: float) -> Tensor:
    """c u: a vector [size] of this length; its direction depends on its size alone."""
    drawn = torch.rand(size, generator=torch.Generator().manual_seed(VECTOR_SEED))
    aim: Tensor = length * drawn / drawn.norm()
    return aim


def rmu(forget: Tensor, aim: Tensor, retain: Tensor, before: Tensor, strength: float) -> Tensor:
    """MSE(h_F, c u) + lambda_R MSE(h_R, h_R of M_full): states [N,d], aim [d] -> scalar."""
    return mse_loss(forget, aim.expand_as(forget)) + strength * mse_loss(retain, before)


def loss(step: Step) -> Tensor:
    """RMU, over the positions that predict scored tokens."""
    forget, retain = _states(step, step.model, step.forget_batch), _states(step, step.model, step.retain_batch)
    with torch.no_grad():
        before = _states(step, step.reference_model, step.retain_batch)
    aim = control(forget.shape[-1], step.options["length"]).to(forget)
    return rmu(forget, aim, retain, before, step.options["retain"])


def _states(step: Step, model: nn.Module, batch: Batch) -> Tensor:
    layer = layer_of(model)
    found = []
    for piece in pieces(batch):
        with recording(model, [layer]) as states:
            step.run(model, piece)
        found.append(states[layer][piece.predictors])
    return torch.cat(found)


RMU = Trained("rmu", loss, Configuration(2e-5, 13, {"length": 20.0, "retain": 100.0}), retains=True, weights=weights)
