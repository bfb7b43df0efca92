"""Attention of one new token a row without repeating keys and values, which the library does wherever there is a mask.

Query heads that share keys stand as queries of one head instead: the same products over a fraction of the memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from unbind_core.architecture import unwrap

NAME, REPLACES = "unbind_shared_keys", "sdpa"


def one_token(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """query [B,Hq,1,D], key [B,H,L,D], value [B,H,L,Dv], mask [B,1,1,L] or None -> [B,1,Hq,Dv]; Dv is smaller in DeepSeek's."""
    count, heads, _, size = query.shape
    folded = query.reshape(count, key.shape[1], heads // key.shape[1], size)
    out = functional.scaled_dot_product_attention(folded, key, value, mask, scale=scaling)
    return out.reshape(count, 1, heads, value.shape[-1])


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function transformers calls in place of its own; shapes as theirs."""
    if query.shape[2] == 1 and kwargs.get("position_bias") is None and not kwargs.get("dropout"):
        return one_token(query, key, value, attention_mask, scaling), None
    out: tuple[Tensor, None] = sdpa_attention_forward(
        module, query, key, value, attention_mask, scaling=scaling, **kwargs
    )
    return out


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, sdpa_mask)


@contextmanager
def sharing_keys(model: nn.Module) -> Iterator[None]:
    """The layers of a model that attends by SDPA share keys inside, on a CPU; others are left as they are."""
    inner: Any = unwrap(model)
    config = inner.config.get_text_config()
    if config._attn_implementation != REPLACES or next(model.parameters()).device != torch.device("cpu"):
        yield
        return
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = REPLACES
