"""A CPU model's linear layers computed from prepacked copies of their weights.

The plain product arranges a weight for the processor anew in every call, which costs most where a pass has few rows. Here it is
done once, by oneDNN's own operators (those that compiled models use); results are the same but for rounding.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from unbind_core.running.device import free_bytes

SHARE = 0.125  # of the free memory; where the copies would take more, nothing is packed
# Rows in float32: fewer read the weight as it lies as quickly as memory can, and packed a fourth slower or more.
FEW = 4


class PackedLinears(AbstractContextManager[None]):
    """While a thread has entered it, the model's ``nn.Linear`` layers use packed weights there; else, and after ``remove``, their
    own.

    For passes without gradients in float32 of ``FEW`` rows and more, and in bfloat16 where the processor has what that takes; all
    others take the plain product. The copies take as much memory again as the weights, and do not see them change. Nothing is
    packed off the CPU, or where torch was built without oneDNN.
    """

    def __init__(self, model: nn.Module) -> None:
        self._here = threading.local()
        layers = [module for module in model.modules() if type(module) is nn.Linear and _packable(module)]
        size = sum(module.weight.numel() * module.weight.element_size() for module in layers)
        cpu = torch.device("cpu")
        self.layers = layers if are_packed(size, cpu, free_bytes(cpu)) else []
        for module in self.layers:
            module.__dict__["forward"] = self._forward(module)

    def _forward(self, module: nn.Linear) -> Callable[[Tensor], Tensor]:
        weight, bias = module.weight, module.bias
        operators: Any = (
            torch.ops.mkldnn
        )  # without public names; the engine's self-test and the tests hold them to the plain product
        multiply, packed = operators._linear_pointwise, operators._reorder_linear_weight(weight.detach(), None)

        def forward(states: Tensor) -> Tensor:
            plain = torch.is_grad_enabled() or states.dtype != weight.dtype or torch.is_autocast_enabled("cpu")
            few = weight.dtype is torch.float32 and states.numel() < FEW * weight.shape[1]
            if plain or few or not getattr(self._here, "entered", False):
                return functional.linear(states, weight, bias)
            product: Tensor = multiply(states, packed, bias, "none", [], "")
            return product

        return forward

    def __enter__(self) -> None:
        self._here.entered = True

    def __exit__(self, *_: object) -> None:
        self._here.entered = False

    def remove(self) -> None:
        """Leave the model as it was."""
        for module in self.layers:
            module.__dict__.pop("forward", None)


@contextmanager
def packed_linears(model: nn.Module) -> Iterator[None]:
    """The model's linear layers use packed weights inside."""
    packed = PackedLinears(model)
    try:
        with packed:
            yield
    finally:
        packed.remove()


def are_packed(size: int, device: torch.device, free: int) -> bool:
    """Whether weights of ``size`` bytes on ``device`` are packed where so much memory is ``free``."""
    return device.type == "cpu" and size <= SHARE * free


def _packable(module: nn.Linear) -> bool:
    known = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    weight, free = module.weight, "forward" not in module.__dict__  # or somebody else computes it already
    plain = type(weight) in (
        nn.Parameter,
        Tensor,
    )  # a quantised one may stand for other tensors, and have a product of its own
    return known and free and plain and weight.device.type == "cpu" and _arranged(weight.dtype)


def _arranged(dtype: torch.dtype) -> bool:
    """Whether oneDNN arranges weights of this type here; those of bfloat16 need AVX-512 or its like."""
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype is torch.float32
