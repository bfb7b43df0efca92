"""Whether gradients pass through a model's quantised products: some formats' kernels give none, and say nothing of it.

What a fit takes gradients of lies above the layer that is edited: of gate auto's, at the last one, the final norm and the head; of
the paper's gates all layers above. Comparing two ways to take them (``capture.py``) does not show what both leave out.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unbind_core.architecture import decoder_layers, numerics, unwrap
from unbind_core.errors import UnsupportedArchitecture

TOLERANCE = 0.1  # of the product's square: rounding of activations to 8 bits takes 0.02
_ROWS = 8


def require_gradients(model: nn.Module, layers: Sequence[int]) -> None:
    """Raise UnsupportedArchitecture, with the remedy, where gradients at one of ``layers`` would miss what lies above it.

    Every product is tried, on a few positions. Models that are not quantised pass as they are.
    """
    quantised, blocks = numerics(model)["quantisation"], decoder_layers(model)
    if quantised is None:
        return
    inner = unwrap(model)
    above: list[nn.Module] = [*blocks[min(layers) + 1 :], inner.get_output_embeddings()]  # type: ignore[operator]
    names = {part: name for name, part in inner.named_modules()}
    for part in (
        one for block in above for one in block.modules() if isinstance(getattr(one, "in_features", None), int)
    ):
        if not _error(part, next(inner.parameters())) <= TOLERANCE:
            remedy = "fit on the model as it is before this quantisation, and have the module measured on this one"
            if min(layers) < len(blocks) - 1:
                remedy = "fit with gate 'auto', which needs the head's alone"
            raise UnsupportedArchitecture(
                f"{type(inner).__name__} ({quantised}): the product '{names[part]}' ({type(part).__name__}) gives no gradient of "
                f"its input on this device, and the fit needs it; {remedy}"
            )


def _error(part: nn.Module, like: Tensor) -> float:
    """|g.x - |Wx|^2| / |Wx|^2, where g is the gradient of Wx.y at y = Wx: 0 of an exact product, 1 where there is no gradient."""
    width: Any = part.in_features
    drawn = torch.randn(1, _ROWS, width, generator=torch.Generator().manual_seed(0))
    x = drawn.to(like.device, like.dtype).requires_grad_(True)
    with torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of kernels without one
        out = part(x)
        product = (out - part(-x)).detach().double() / 2  # without the bias
        if not out.requires_grad:
            return 1.0
        try:
            (found,) = torch.autograd.grad(out, x, product.to(out.dtype), allow_unused=True)
        except RuntimeError:
            return 1.0
    if found is None:
        return 1.0
    square = (product**2).sum()
    return float(((found.double() * x.detach().double()).sum() - square).abs() / square)
