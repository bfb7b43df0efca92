"""Run only the layers above a given one, on states kept from an earlier pass.

States below an edited layer do not change, so a calibration that tries hundreds of edits at a layer keeps that layer's
output once and starts every trial from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from unbind_core.architecture import decoder_layers, unwrap
from unbind_core.errors import UnsupportedArchitecture
from unbind_core.running.likelihood import target_nll
from unbind_core.running.own_position import own_position_attention, require_own_position
from unbind_core.running.recording import frozen
from unbind_core.windows import Batch


class _Bypass(nn.Module):
    """Stands in for a decoder layer that is not run; answers attribute look-ups (attention type and the like) as that layer."""

    def __init__(self, layer: nn.Module, states: Tensor | None, as_tuple: bool) -> None:
        super().__init__()
        self.__dict__["layer"] = layer  # not registered: its parameters must not appear twice
        self.__dict__["states"] = states
        self.__dict__["as_tuple"] = as_tuple

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["layer"], name)

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        """Hand on what came in, or the kept states where there are some."""
        states = self.__dict__["states"]
        hidden = hidden_states if states is None else states
        return (hidden,) if self.__dict__["as_tuple"] else hidden


@contextmanager
def starting_above(model: nn.Module, layer: int, states: Tensor, as_tuple: bool = False) -> Iterator[None]:
    """Replace decoder layers 0..``layer`` so that layer ``layer`` puts out ``states``; puts the layers back in any case."""
    blocks = decoder_layers(model)
    container = next(
        (m for m in unwrap(model).modules() if isinstance(m, nn.ModuleList) and len(m) and m[0] is blocks[0]), None
    )
    if container is None:
        raise UnsupportedArchitecture(
            f"{type(unwrap(model)).__name__}: the decoder layers are not in a torch ModuleList"
        )
    originals = [container[i] for i in range(layer + 1)]
    try:
        for index, original in enumerate(originals):
            container[index] = _Bypass(original, states if index == layer else None, as_tuple)
        yield
    finally:
        for index, original in enumerate(originals):
            container[index] = original


def logits_above(
    model: nn.Module,
    ids: Tensor,
    attention_mask: Tensor,
    layer: int,
    states: Tensor,
    *,
    as_tuple: bool = False,
    gradients: bool = False,
) -> Tensor:
    """Logits [B,T,V] with the output of decoder layer ``layer`` set to ``states`` [B,T,d].

    ``ids`` and ``attention_mask`` int64 [B,T] as in the pass that gave the states. Differentiable in the states where
    ``gradients`` are wanted and the caller has them enabled.
    """
    with torch.set_grad_enabled(gradients and torch.is_grad_enabled()), starting_above(model, layer, states, as_tuple):
        logits: Tensor = model(input_ids=ids, attention_mask=attention_mask, use_cache=False).logits
    return logits


def gradients_above(model: nn.Module, batch: Batch, layer: int, states: Tensor, *, as_tuple: bool = False) -> Tensor:
    """Exact gradients dL_t/dh_t [N,d] (Section 3, eq. (1)) at ``layer``, from its kept ``states`` [B,T,d], in window order.

    As :func:`unbind_core.running.capture.capture` gives them by a pass through the whole model; raises as that does.
    """
    leaf = states.detach().requires_grad_(True)
    with torch.enable_grad(), frozen(model), own_position_attention(model):
        with starting_above(model, layer, leaf, as_tuple):
            logits = model(input_ids=batch.ids, attention_mask=batch.attention_mask, use_cache=False).logits
        require_own_position(model, len(decoder_layers(model)) - 1 - layer)
        (gradients,) = torch.autograd.grad(target_nll(logits, batch).sum(), leaf)
    return gradients[batch.predictors]
