"""Attention whose backward pass gives each position its own gradient alone: why capture in one pass is exact (``capture.py``)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask

from unbind_core.architecture import unwrap
from unbind_core.errors import UnsupportedArchitecture

ATTENTION = "unbind_own_position"
_BLOCK = 256  # query rows at a time: attention memory is O(block x T), not O(T x T)
REMEDY = "fit with gate 'auto', which needs gradients above the last layer alone, and any has guards (options.protect 'guard')"


class _OwnPositionAttention(torch.autograd.Function):
    """Causal softmax attention whose backward is the ordinary one for queries and keeps only the diagonal for keys, values.

    With S = softcap(q k' * scaling) + mask, P = softmax(S), O = P v and incoming dO:
    dP = dO v', D_t = dO_t . O_t, dS = P * (dP - D);  dq = dS k;  dk_t = dS_tt q_t;  dv_t = P_tt dO_t.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, softcap: float | None
    ) -> Tensor:
        """q, k [B,H,T,D], v [B,H,T,Dv], one dtype; additive mask [B or 1, H or 1, T, T] or None (causal); returns [B,H,T,Dv]."""
        out = q.new_empty((*q.shape[:3], v.shape[3]))
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
            f"{name} adds attention sinks or a position bias, which exact capture does not cover; {REMEDY}"
        )
    if query.shape[2] != key.shape[2] or kwargs.get("is_causal") is False or not getattr(module, "is_causal", True):
        raise UnsupportedArchitecture(f"{name} is not causal self-attention over one window; {REMEDY}")
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
            f"have an attention that transformers can replace, so gradients of all positions in one pass cannot be had; {REMEDY}"
        )
