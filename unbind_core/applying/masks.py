"""Which positions of a pass are real, as its attention mask has it: gates and counts leave padding out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from unbind_core.errors import UnsupportedArchitecture


def real_positions(mask: Any, batch: int, length: int, past: Any, *, needed: bool) -> Tensor | None:
    """bool [B, past and new positions] from a model's ``attention_mask``; None where there is none, or where it
    does not tell and is not ``needed``.

    With a cache of fixed size ``generate`` passes the finished mask [B or 1,1,length,keys] in place of [B,positions], by layer
    type where the model mixes them; models that read images do so with every cache. Raises UnsupportedArchitecture where a
    finished mask hides anything else than padding: what a window leaves out, other texts of the row.
    """
    try:
        return _read(mask, batch, length, past)
    except UnsupportedArchitecture:
        if needed:
            raise
        return None


def _read(mask: Any, batch: int, length: int, past: Any) -> Tensor | None:
    if isinstance(mask, Mapping):  # None where causal attention needs none
        mask = mask["full_attention"] if "full_attention" in mask else next(iter(mask.values()), None)
    if mask is None:
        return None
    fixed = getattr(past, "is_compileable", False)
    if isinstance(mask, Tensor) and mask.dim() == 2:
        if mask.shape[0] != batch or mask.shape[1] < length:
            return None
        # Bloom's mask is as long as such a cache; others need not tell how long they are
        real: Tensor = mask[:, : int(past.get_seq_length()) + length] if fixed else mask
        return real.bool()
    if not isinstance(mask, Tensor) or mask.dim() != 4:
        raise _untold(fixed)
    whole = length + (int(past.get_seq_length()) if past is not None else 0)
    if mask.shape[2] != length or mask.shape[3] < whole:
        raise _untold(fixed)
    sees = mask[:, 0, :, :whole]
    sees = (sees if sees.dtype == torch.bool else sees == 0).expand(batch, -1, -1)  # else what is added to scores
    real = sees[:, -1].clone()
    if _hides_more(sees, real):
        raise _untold(fixed)
    return real


def _hides_more(sees: Tensor, real: Tensor) -> bool:
    """Whether a new position's view of what comes before it, bool [B,length,keys], is not all that is real, bool [B,keys]."""
    length, whole = sees.shape[1:]
    before = torch.ones((length, whole), dtype=torch.bool, device=sees.device).tril(whole - length - 1)
    of_real = real[:, None, :]
    missed = ~sees & of_real & real[:, whole - length :, None]
    return bool((before & (missed | (sees & ~of_real))).any())


def _untold(fixed: bool) -> UnsupportedArchitecture:
    cache = ", and generate without cache_implementation" if fixed else ""
    return UnsupportedArchitecture(
        "attention_mask: it does not tell which positions are padding, as it hides others too (a window of attention, another "
        f"text in the row), and gates go by all that is no padding; give a mask [batch, positions] of ones and zeros{cache}"
    )
