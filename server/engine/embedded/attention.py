"""Attention that reads the slots in place: what the model's layers call while a pass's rows are placed.

The library's own function repeats keys and values for grouped heads wherever there is a mask, and needs one tensor of
keys for the whole batch. Here sequences of any lengths share a pass: neighbouring slots with as many states each are a view, and
each run looks no further than its longest sequence.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from server.engine.embedded.slots import placement
from unbind_core.running.attention import one_token

NAME = "unbind_slots"
REPLACES = "sdpa"
QUERY_BLOCK = 128  # on the CPU: a block of queries reads the keys up to its own end instead of the chunk's


class SlotAttention(AbstractContextManager[None]):
    """While entered, the layers of a model with this configuration attend in place where a pass is placed.

    Only for models that attend by SDPA; ``in_place`` says whether this one does. Whoever runs the model without placing it
    gets the library's own function.
    """

    def __init__(self, config: Any) -> None:
        self._config = config
        self.in_place: bool = config._attn_implementation == REPLACES

    def __enter__(self) -> None:
        if self.in_place:
            self._config._attn_implementation = NAME

    def __exit__(self, *_: object) -> None:
        if self.in_place:
            self._config._attn_implementation = REPLACES


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Query [B,Hq,T,D], B or T being 1; key and value whole storages [slots,H,positions,D]; additive mask [B,1,T,L] ->
    [B,T,Hq,D].
    """
    at = placement()
    if at is None:
        plain: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return plain
    if each := query.shape[0] > 1:
        query, attention_mask = query.transpose(0, 2), attention_mask.transpose(0, 2)
    parts = []
    for run in at.runs:
        states, slots = slice(run.first, run.first + run.rows * run.steps), slice(run.slot, run.slot + run.rows)
        own = query[0, :, states].unflatten(1, (run.rows, run.steps)).transpose(0, 1)
        mask = attention_mask[0, 0, states, : run.length].unflatten(0, (run.rows, run.steps)).unsqueeze(1)
        attend = one_token if run.steps == 1 else _chunk
        parts.append(
            attend(own, key[slots, :, : run.length], value[slots, :, : run.length], mask, scaling).flatten(0, 1)
        )
    found = parts[0] if len(parts) == 1 else torch.cat(parts)
    return found.unsqueeze(1 if each else 0), None


def _chunk(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None) -> Tensor:
    """A causal triangle at the end of what is there already, in blocks that leave out most of what is masked."""
    steps = query.shape[2]
    before, block = key.shape[2] - steps, QUERY_BLOCK if query.device.type == "cpu" else steps
    parts = []
    for begin in range(0, steps, block):
        end = min(steps, begin + block)
        seen = before + end
        part = functional.scaled_dot_product_attention(
            query[:, :, begin:end],
            *_shared(query, key[:, :, :seen], value[:, :, :seen]),
            mask[:, :, begin:end, :seen],
            scale=scaling,
            enable_gqa=query.device.type == "cpu" and query.shape[1] != key.shape[1],
        )
        parts.append(part.transpose(1, 2))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _shared(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Grouped heads repeated where the fast kernels of a device cannot share them under a mask."""
    groups = query.shape[1] // key.shape[1]
    if groups == 1 or query.device.type == "cpu":
        return key, value
    return key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
