"""Decoding that shares keys gives the library's own logits, and leaves the model as it was."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.core.conftest import FAMILIES, TinyCheckpoint
from unbind_core.architecture import load_model, unwrap
from unbind_core.running.attention import NAME, one_token, sharing_keys


def _decoded(model: Any, mask: Tensor, steps: int, shared: bool) -> tuple[list[Tensor], str]:
    """Logits of prefill and some steps of left-padded rows, and how the model attended."""
    ids = torch.randint(5, 60, mask.shape, generator=torch.Generator().manual_seed(1))
    found, past = [], None
    with torch.no_grad(), sharing_keys(model) if shared else nullcontext():
        for _ in range(steps):
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
            out = model(
                input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=past, use_cache=True
            )
            past, ids = out.past_key_values, out.logits[:, -1:].argmax(-1)
            mask = torch.cat((mask, torch.ones_like(ids)), 1)
            found.append(out.logits[:, -1])
        return found, unwrap(model).config.get_text_config()._attn_implementation


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_the_library_s_own_in_every_family(family: str, tiny_checkpoint: TinyCheckpoint) -> None:
    model = load_model(tiny_checkpoint(family)).model
    own = unwrap(model).config.get_text_config()._attn_implementation
    mask = torch.tensor([[0] * 7 + [1] * 5, [1] * 12, [0] * 11 + [1]])
    expected, used = _decoded(model, mask, 6, shared=False)
    assert used == own
    found, used = _decoded(model, mask, 6, shared=True)
    assert used == (NAME if own == "sdpa" else own)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert unwrap(model).config.get_text_config()._attn_implementation == own


def test_the_model_attends_as_before_after_an_error(tiny_checkpoint: TinyCheckpoint) -> None:
    model = load_model(tiny_checkpoint("qwen2")).model
    with pytest.raises(KeyError), sharing_keys(model):
        raise KeyError
    assert unwrap(model).config.get_text_config()._attn_implementation == "sdpa"


@pytest.mark.parametrize("heads", [1, 2, 6])
def test_one_token_attends_as_if_keys_were_repeated(heads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(3, h, n, 8, generator=generator) for h, n in ((6, 1), (heads, 9), (heads, 9)))
    mask = torch.ones(3, 1, 1, 9, dtype=torch.bool)
    mask[1, ..., :4] = False
    found = one_token(query, key, value, mask, 0.3)
    repeated = [part.repeat_interleave(6 // heads, dim=1) for part in (key, value)]
    scores = (query @ repeated[0].transpose(-1, -2) * 0.3).masked_fill(~mask, float("-inf"))
    torch.testing.assert_close(found, (scores.softmax(-1) @ repeated[1]).transpose(1, 2))
