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

    def __init__(self, layer: nn.Module, states: Tensor | None, packs: bool) -> None:
        super().__init__()
        self.__dict__["layer"] = layer  # not registered: its parameters must not appear twice
        self.__dict__["states"] = states
        self.__dict__["packs"] = packs

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["layer"], name)

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        """Hand on what came in, or the kept states where there are some, as the layer itself would put them out."""
        states = self.__dict__["states"]
        out = hidden_states if states is None else states
        return (out, None) if self.__dict__["packs"] else out


_PACKS: dict[type, bool] = {}


def _packs(model: nn.Module, layer: nn.Module) -> bool:
    """Whether layers of this class put their states out in a tuple (GPT-J, CodeGen, MPT): seen once, on one token."""
    kind = type(layer)
    if kind not in _PACKS:
        seen: list[bool] = []
        handle = layer.register_forward_hook(lambda _layer, _args, out: seen.append(isinstance(out, tuple)))
        ids = torch.zeros((1, 1), dtype=torch.int64, device=next(model.parameters()).device)
        try:
            with torch.no_grad():
                unwrap(model).base_model(input_ids=ids, use_cache=False)  # type: ignore[operator]
        finally:
            handle.remove()
        _PACKS[kind] = seen[0]
    return _PACKS[kind]


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
    packs = _packs(model, originals[layer])
    try:
        for index, original in enumerate(originals):
            container[index] = _Bypass(original, states if index == layer else None, packs)
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
