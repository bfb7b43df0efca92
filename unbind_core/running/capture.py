"""States and exact per-target gradients of every layer from one forward and one backward pass.

The paper (B.1) calls autograd once per target token. In a causal decoder the loss of target ``t + 1`` depends on the state
``h_t`` only through position ``t``'s own stream: keys and values of earlier positions cannot depend on it. So the attention
below passes gradient to keys and values of the query's own position only. Then the gradient of the *summed* loss with
respect to a layer's output is, at row ``t``, exactly ``dL_t/dh_t``, for all layers at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask

from unbind_core.architecture import decoder_layers, unwrap
from unbind_core.errors import UnsupportedArchitecture
from unbind_core.running.device import bfloat16_is_fast
from unbind_core.windows import Batch, Window, make_batch

ATTENTION = "unbind_own_position"
_BLOCK = 256  # query rows at a time: attention memory is O(block x T), not O(T x T)
_REMEDY = "fit on a model with softmax attention, or use capture_per_target(), which needs one backward pass a target"


class _OwnPositionAttention(torch.autograd.Function):
    """Causal softmax attention whose backward is the ordinary one for queries and keeps only the diagonal for keys, values.

    With S = softcap(q k' * scaling) + mask, P = softmax(S), O = P v and incoming dO:
    dP = dO v', D_t = dO_t . O_t, dS = P * (dP - D);  dq = dS k;  dk_t = dS_tt q_t;  dv_t = P_tt dO_t.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, softcap: float | None
    ) -> Tensor:
        """q, k, v [B,H,T,D] of one dtype; additive mask [B or 1, H or 1, T, T] or None (causal); returns [B,H,T,D]."""
        out = torch.empty_like(q)
        for rows, weights, _ in _weights(q, k, mask, scaling, softcap):
            out[:, :, rows] = weights.to(q.dtype) @ v[:, :, : rows.stop]
        ctx.save_for_backward(q, k, v, out, mask)
        ctx.scaling, ctx.softcap = scaling, softcap
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients for q (ordinary), k and v (own position only)."""
        (d_out,) = grad_outputs
        q, k, v, out, mask = ctx.saved_tensors
        d_q, d_k, d_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        delta = (d_out * out).sum(-1, keepdim=True, dtype=torch.promote_types(q.dtype, torch.float32))
        for rows, weights, slope in _weights(q, k, mask, ctx.scaling, ctx.softcap):
            d_scores = (d_out[:, :, rows] @ v[:, :, : rows.stop].transpose(-1, -2)).to(weights.dtype)
            d_scores = d_scores.sub_(delta[:, :, rows]).mul_(weights).mul_(ctx.scaling)
            if slope is not None:
                d_scores = d_scores * slope
            own_score = d_scores.diagonal(rows.start, -2, -1).unsqueeze(-1)
            own_weight = weights.diagonal(rows.start, -2, -1).unsqueeze(-1)
            d_q[:, :, rows] = d_scores.to(q.dtype) @ k[:, :, : rows.stop]
            d_k[:, :, rows] = own_score.to(q.dtype) * q[:, :, rows]
            d_v[:, :, rows] = own_weight.to(q.dtype) * d_out[:, :, rows]
        return d_q, d_k, d_v, None, None, None


def _weights(
    q: Tensor, k: Tensor, mask: Tensor | None, scaling: float, softcap: float | None
) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """Blocks of query rows: (rows, attention weights [B,H,rows,keys so far] in FP32 or wider, slope of the soft cap)."""
    length = q.shape[2]
    wide = torch.promote_types(q.dtype, torch.float32)
    for start in range(0, length, _BLOCK):
        rows = slice(start, min(start + _BLOCK, length))
        scores = (q[:, :, rows] @ k[:, :, : rows.stop].transpose(-1, -2)).to(wide).mul_(scaling)
        slope = None
        if softcap is not None:
            bent = torch.tanh(scores / softcap)
            scores, slope = bent * softcap, 1.0 - bent * bent
        if mask is not None:
            scores = scores + mask[:, :, rows, : rows.stop].to(wide)
        else:
            future = torch.ones(rows.stop - start, rows.stop, dtype=torch.bool, device=q.device).triu_(start + 1)
            scores = scores.masked_fill_(future, float("-inf"))
        yield rows, torch.softmax(scores, dim=-1), slope


_attention_calls: list[nn.Module] = []  # modules that came through our attention in the pass under way


def _attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,  # noqa: ARG001 - capture runs in evaluation mode
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function transformers calls in place of its own attention; shapes as theirs (out [B,T,H,D])."""
    name = type(module).__name__
    if kwargs.get("s_aux") is not None or kwargs.get("position_bias") is not None:
        raise UnsupportedArchitecture(
            f"{name} adds attention sinks or a position bias, which exact capture does not cover; {_REMEDY}"
        )
    if query.shape[2] != key.shape[2] or kwargs.get("is_causal") is False or not getattr(module, "is_causal", True):
        raise UnsupportedArchitecture(f"{name} is not causal self-attention over one window; {_REMEDY}")
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    _attention_calls.append(module)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out: Tensor = _OwnPositionAttention.apply(  # type: ignore[no-untyped-call]
        query, key, value, attention_mask, scale, softcap
    )
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, _attention_forward)
AttentionMaskInterface.register(ATTENTION, eager_mask)


@contextmanager
def own_position_attention(model: nn.Module) -> Iterator[None]:
    """Run the model with gradients of other positions' keys and values cut; restores its own attention in any case."""
    inner = unwrap(model)
    if not isinstance(inner, PreTrainedModel):
        raise UnsupportedArchitecture(
            f"{type(inner).__name__} is not a transformers model; load it with AutoModelForCausalLM"
        )
    before = inner.config._attn_implementation
    inner.set_attn_implementation(ATTENTION)
    _attention_calls.clear()
    try:
        yield
    finally:
        inner.set_attn_implementation(before)
        _attention_calls.clear()


def require_own_position(model: nn.Module, layers: int) -> None:
    """Raise UnsupportedArchitecture where not all of the ``layers`` that were run came through our attention."""
    if len(_attention_calls) != layers:
        raise UnsupportedArchitecture(
            f"{type(unwrap(model)).__name__} ran {layers} decoder layers, of which {len(_attention_calls)} "
            f"use softmax attention, so exact one-pass capture does not apply; {_REMEDY}"
        )


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


@contextmanager
def recording(model: nn.Module, layers: Sequence[int], *, differentiable: bool = False) -> Iterator[dict[int, Tensor]]:
    """Collect the outputs [B,T,d] of the given decoder layers during a forward pass.

    ``differentiable`` starts the autograd graph at the lowest of them, so that nothing below it costs a backward pass.
    """
    states: dict[int, Tensor] = {}
    blocks = decoder_layers(model)
    handles: list[RemovableHandle] = []

    def hook(index: int, first: bool) -> Any:
        def record(_module: nn.Module, _args: Any, output: Any) -> Any:
            hidden = output[0] if isinstance(output, tuple) else output
            if differentiable and first:
                hidden = hidden.detach().requires_grad_(True)
                output = (hidden, *output[1:]) if isinstance(output, tuple) else hidden
            states[index] = hidden
            return output

        return record

    try:
        lowest = min(layers)
        handles += [blocks[i].register_forward_hook(hook(i, i == lowest)) for i in layers]
        yield states
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class Captured:
    """What one batch gave, N = scored predictions of the batch in window order.

    ``states`` and ``gradients``: layer -> [N,d] in the model's dtype (gradients empty if not asked for);
    ``nll``: FP32 (or wider) [N], natural log.
    """

    batch: Batch
    states: dict[int, Tensor]
    gradients: dict[int, Tensor]
    nll: Tensor


def target_nll(logits: Tensor, batch: Batch) -> Tensor:
    """-log p(x_{t+1} | x_<=t) of every target (paper eq. 1): logits [B,T,V] -> FP32 (or wider) [N]."""
    chosen = logits[batch.predictors]
    wide = chosen.to(torch.promote_types(chosen.dtype, torch.float32))
    return nn.functional.cross_entropy(wide, batch.next_tokens(), reduction="none")


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


def capture(model: nn.Module, batch: Batch, layers: Sequence[int]) -> Captured:
    """States and exact gradients dL_t/dh_t (paper eq. 1) at the given layers, by one forward and one backward pass.

    Raises UnsupportedArchitecture where the model mixes tokens by anything but causal softmax attention.
    """
    with torch.enable_grad(), frozen(model), own_position_attention(model):
        with recording(model, layers, differentiable=True) as states:
            logits = model(input_ids=batch.ids, attention_mask=batch.attention_mask, use_cache=False).logits
        require_own_position(model, len(decoder_layers(model)))
        nll = target_nll(logits, batch)
        grads = torch.autograd.grad(nll.sum(), [states[i] for i in layers])
    return Captured(
        batch,
        {i: states[i].detach()[batch.predictors] for i in layers},
        {i: g[batch.predictors] for i, g in zip(layers, grads, strict=True)},
        nll.detach(),
    )


def capture_per_target(model: nn.Module, window: Window, layers: Sequence[int]) -> Captured:
    """The paper's procedure (B.1): one autograd call a target on the model's own attention. The slow reference."""
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
    return Captured(
        batch,
        {i: states[i].detach()[batch.predictors] for i in layers},
        {i: torch.stack(rows[i]) for i in layers},
        nll.detach(),
    )


def relative_errors(found: Captured, reference: Captured) -> dict[int, float]:
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
        raise UnsupportedArchitecture(
            f"{type(unwrap(model)).__name__}: one-pass gradients are off by {worst:.1e} (relative) on a sample; {_REMEDY}"
        )
    return worst
