"""States of decoder layers as a model computes them, with its parameters left alone, and what it keeps of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from unbind_core.architecture import decoder_layers, unwrap
from unbind_core.errors import UnsupportedArchitecture


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Evaluation mode and no parameter gradients inside; restores both."""
    training = model.training
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model.eval()
    for parameter in wanted:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in wanted:
            parameter.requires_grad_(True)
        model.train(training)


def states_in(output: Any, name: str) -> Tensor:
    """The states [B,T,d] in what a decoder layer of a model of class ``name`` puts out. Raises UnsupportedArchitecture."""
    states = output[0] if isinstance(output, tuple) else output
    if not isinstance(states, Tensor) or states.dim() != 3:
        found = f"a tensor {list(states.shape)}" if isinstance(states, Tensor) else f"a {type(states).__name__}"
        raise UnsupportedArchitecture(
            f"{name}: a decoder layer puts out {found}, not one state [batch, positions, width] for each token (Gemma 3n "
            "keeps several), so no module can work there; take another model, or let `unbind guard` stand before a server of it"
        )
    return states


@contextmanager
def recording(model: nn.Module, layers: Sequence[int], *, differentiable: bool = False) -> Iterator[dict[int, Tensor]]:
    """Collect the outputs [B,T,d] of the given decoder layers during a forward pass.

    ``differentiable`` starts the autograd graph at the lowest of them, so that nothing below it costs a backward pass.
    Raises UnsupportedArchitecture where a layer puts out anything else.
    """
    name, states = type(unwrap(model)).__name__, dict[int, Tensor]()
    blocks = decoder_layers(model)
    handles: list[RemovableHandle] = []

    def hook(index: int, first: bool) -> Any:
        def record(_module: nn.Module, _args: Any, output: Any) -> Any:
            hidden = states_in(output, name)
            if differentiable and first:
                hidden = hidden.detach().requires_grad_(True)
                output = (hidden, *output[1:]) if isinstance(output, tuple) else hidden
            states[index] = hidden
            return output

        return record

    try:
        lowest = min(layers, default=0)
        handles += [blocks[i].register_forward_hook(hook(i, i == lowest)) for i in layers]
        yield states
    finally:
        for handle in handles:
            handle.remove()


def kept_tensors(model: nn.Module) -> list[Tensor]:
    """Keys and values of one token, of all layers, as they are in the cache of a pass.

    Raises UnsupportedArchitecture where a layer keeps anything else.
    """
    ids = torch.zeros((1, 1), dtype=torch.int64, device=next(model.parameters()).device)
    name = type(unwrap(model)).__name__
    with torch.no_grad(), frozen(model):  # one that is trained with gradient checkpointing keeps nothing
        cache = getattr(model(input_ids=ids, use_cache=True), "past_key_values", None)
    layers = getattr(cache, "layers", None) or ()
    kept = [getattr(layer, part, None) for layer in layers for part in ("keys", "values")]
    found = [part for part in kept if isinstance(part, Tensor)]
    if not layers or len(found) < len(kept):
        raise UnsupportedArchitecture(
            f"{name} has layers that keep other things than keys and values; take a model with full or sliding-window attention"
        )
    return found
