"""States and exact per-target gradients of every layer from one forward and one backward pass.

The paper (Appendix B.1) calls autograd once per target token. In a causal decoder the loss of target ``t + 1`` depends on the state
``h_t`` only through position ``t``'s own stream: keys and values of earlier positions cannot depend on it. So the attention
of ``own_position.py`` passes gradient to keys and values of the query's own position only. Then the gradient of the *summed*
loss with respect to a layer's output is, at row ``t``, exactly ``dL_t/dh_t``, for all layers at once. Of the last layer alone it is
so on any model, as no attention lies above.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unbind_core.architecture import decoder_layers, unwrap
from unbind_core.errors import UnsupportedArchitecture
from unbind_core.running.device import bfloat16_is_fast
from unbind_core.running.likelihood import nll_of, target_nll
from unbind_core.running.own_position import (
    REMEDY,
    own_position_attention,
    require_own_position,
)
from unbind_core.running.recording import frozen, recording
from unbind_core.running.vocabulary import at_once, logits_of, part_size
from unbind_core.windows import Batch, Window, make_batch


@dataclass(frozen=True)
class Capture:
    """What one batch gave, N = scored predictions of the batch in window order.

    ``states`` and ``gradients``: layer -> [N,d] in the model's dtype (gradients empty if not asked for);
    ``nll``: FP32 (or wider) [N], natural log.
    """

    batch: Batch
    states: dict[int, Tensor]
    gradients: dict[int, Tensor]
    nll: Tensor


def capture_states(
    model: nn.Module, batch: Batch, layers: Sequence[int], *, roughly: bool = False
) -> dict[int, Tensor]:
    """States [B,T,d] at the given layers, of every position, by one forward pass without gradients and without logits.

    ``roughly`` takes matrix products in bfloat16 where those are fast: to train on, not to measure by.
    """
    device = batch.ids.device
    products = torch.autocast(device.type, torch.bfloat16, enabled=roughly and bfloat16_is_fast(device))
    with torch.no_grad(), frozen(model), recording(model, layers) as states, products:
        unwrap(model).base_model(input_ids=batch.ids, attention_mask=batch.attention_mask, use_cache=False)  # type: ignore[operator]
        return states


def capture_nll(model: nn.Module, batch: Batch, layers: Sequence[int]) -> tuple[dict[int, Tensor], Tensor]:
    """States [B,T,d] at the given layers and the NLL [N] of the batch's targets, by one forward pass without gradients."""
    last = len(decoder_layers(model)) - 1
    with torch.no_grad(), frozen(model):
        if at_once(model, batch.ids.numel()):
            with recording(model, layers) as states:
                logits = model(input_ids=batch.ids, attention_mask=batch.attention_mask, use_cache=False).logits
            return states, target_nll(logits, batch)
        states = capture_states(model, batch, sorted({*layers, last}))
        nll = nll_in_parts(batch, logits_of(model, states[last][batch.predictors]))
    return {layer: states[layer] for layer in layers}, nll


def nll_in_parts(batch: Batch, logits: Iterable[Tensor]) -> Tensor:
    """NLL [N] of the batch's targets, from the logits of its predictor positions in parts (``vocabulary.py``)."""
    found, following = [], batch.next_tokens()
    for part in logits:
        found.append(nll_of(part, following[: len(part)]))
        following = following[len(part) :]
    return torch.cat(found)


def capture(model: nn.Module, batch: Batch, layers: Sequence[int]) -> Capture:
    """States and exact gradients dL_t/dh_t (Section 3, eq. (1)) at the given layers, by one forward and one backward pass.

    Raises UnsupportedArchitecture where a layer above the first of these mixes tokens by anything but causal softmax attention.
    """
    last = len(decoder_layers(model)) - 1
    mixed = min(layers) < last  # above the last layer positions do not meet, so any attention will do
    with torch.enable_grad(), frozen(model), own_position_attention(model) if mixed else nullcontext():
        if at_once(model, batch.ids.numel()):
            with recording(model, layers, differentiable=True) as states:
                logits = model(input_ids=batch.ids, attention_mask=batch.attention_mask, use_cache=False).logits
            if mixed:
                require_own_position(model, last + 1)
            nll = target_nll(logits, batch)
            grads = torch.autograd.grad(nll.sum(), [states[i] for i in layers])
        else:
            states, nll, grads = _captured_in_parts(model, batch, layers)
    return Capture(
        batch,
        {i: states[i].detach()[batch.predictors] for i in layers},
        {i: g[batch.predictors] for i, g in zip(layers, grads, strict=True)},
        nll.detach(),
    )


def _captured_in_parts(
    model: nn.Module, batch: Batch, layers: Sequence[int]
) -> tuple[dict[int, Tensor], Tensor, tuple[Tensor, ...]]:
    """States of layers, NLL [N] and gradients, with the head applied to some positions after others."""
    last = len(decoder_layers(model)) - 1
    with recording(model, sorted({*layers, last}), differentiable=True) as states:
        unwrap(model).base_model(input_ids=batch.ids, attention_mask=batch.attention_mask, use_cache=False)  # type: ignore[operator]
    if min(layers) < last:
        require_own_position(model, last + 1)
    at, following = states[last].detach()[batch.predictors], batch.next_tokens()
    size = part_size(model)
    found: list[Tensor] = []
    slopes: list[Tensor] = []
    for one, tokens in zip(at.split(size), following.split(size), strict=True):
        leaf = one.requires_grad_(True)
        nll = nll_of(next(logits_of(model, leaf)), tokens)
        slopes += torch.autograd.grad(nll.sum(), leaf)
        found.append(nll.detach())
    above = torch.zeros_like(states[last])
    above[batch.predictors] = torch.cat(slopes)
    return states, torch.cat(found), torch.autograd.grad(states[last], [states[i] for i in layers], above)


def capture_per_target(model: nn.Module, window: Window, layers: Sequence[int]) -> Capture:
    """The paper's procedure (Appendix B.1): one autograd call a target on the model's own attention. The slow reference."""
    batch = make_batch([window], 0, next(model.parameters()).device)
    with torch.enable_grad(), frozen(model):
        with recording(model, layers, differentiable=True) as states:
            logits = model(input_ids=batch.ids, attention_mask=batch.attention_mask, use_cache=False).logits
        nll = target_nll(logits, batch)
        positions = batch.predictors[0].nonzero()[:, 0].tolist()
        rows: dict[int, list[Tensor]] = {i: [] for i in layers}
        for loss, position in zip(nll, positions, strict=True):
            grads = torch.autograd.grad(loss, [states[i] for i in layers], retain_graph=True)
            for i, grad in zip(layers, grads, strict=True):
                rows[i].append(grad[0, position])
    return Capture(
        batch,
        {i: states[i].detach()[batch.predictors] for i in layers},
        {i: torch.stack(rows[i]) for i in layers},
        nll.detach(),
    )


def relative_errors(found: Capture, reference: Capture) -> dict[int, float]:
    """Layer -> ||G - G_ref|| / ||G_ref|| in the Frobenius norm, in FP64."""
    return {
        i: float((found.gradients[i].double() - g.double()).norm() / g.double().norm())
        for i, g in reference.gradients.items()
    }


def check_exactness(
    model: nn.Module, window: Window, layers: Sequence[int], targets: int = 2, length: int = 64
) -> float:
    """Compare one-pass capture with the reference on a few targets of a short window; returns the largest relative error.

    Guards against models that mix tokens in ways the attention count cannot see. Raises UnsupportedArchitecture above
    1e-3 (float32, float64) or 0.2 (half precision).
    """
    ids = window.ids[:length]
    short = Window(ids, max(1, len(ids) - targets), window.row, window.form)
    reference = capture_per_target(model, short, layers)
    found = capture(model, reference.batch, layers)
    worst = max(itertools.chain(relative_errors(found, reference).values(), [0.0]))
    limit = 0.2 if found.nll.dtype is not torch.float64 and next(model.parameters()).dtype.itemsize == 2 else 1e-3
    if not worst <= limit:
        alone = min(layers) == len(decoder_layers(model)) - 1
        remedy = (
            "no module can be fitted on this model, but any has guards (options.protect 'guard')" if alone else REMEDY
        )
        raise UnsupportedArchitecture(
            f"{type(unwrap(model)).__name__}: one-pass gradients are off by {worst:.1e} (relative) on a sample; {remedy}"
        )
    return worst
