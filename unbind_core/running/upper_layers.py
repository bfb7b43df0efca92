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


class _Bypass(nn.Module):
    """Stands in for a decoder layer that is not run; answers attribute look-ups (attention type and the like) as that layer."""

    def __init__(self, layer: nn.Module, states: Tensor | None) -> None:
        super().__init__()
        self.__dict__["layer"] = layer  # not registered: its parameters must not appear twice
        self.__dict__["states"] = states

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["layer"], name)

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        """Hand on what came in, or the kept states where there are some."""
        states = self.__dict__["states"]
        return hidden_states if states is None else states


@contextmanager
def starting_above(model: nn.Module, layer: int, states: Tensor) -> Iterator[None]:
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
            container[index] = _Bypass(original, states if index == layer else None)
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
    gradients: bool = False,
) -> Tensor:
    """Logits [B,T,V] with the output of decoder layer ``layer`` set to ``states`` [B,T,d].

    ``ids`` and ``attention_mask`` int64 [B,T] as in the pass that gave the states. Differentiable in the states where
    ``gradients`` are wanted and the caller has them enabled.
    """
    with torch.set_grad_enabled(gradients and torch.is_grad_enabled()), starting_above(model, layer, states):
        logits: Tensor = model(input_ids=ids, attention_mask=attention_mask, use_cache=False).logits
    return logits
