"""How long a slot may be: no longer than the model's positions mean one thing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

from server.engine.embedded.memory import DoesNotFit, plan_memory

SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def test_a_slot_of_a_longrope_model_ends_where_its_frequencies_would_change() -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [float(1 + i) for i in range(8)]}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64, **factors}
    torch.manual_seed(0)
    model = Phi3ForCausalLM(Phi3Config(**SHAPE, rope_parameters=rope, original_max_position_embeddings=64)).eval()
    plan = plan_memory(model, free=10**9)
    assert plan.length == 64 and plan_memory(model, length=64, free=10**9).length == 64
    with pytest.raises(DoesNotFit, match=r"max_model_len 65: .*longrope.* 64 positions; lower --max-model-len"):
        plan_memory(model, length=65, free=10**9)
    short, long = (torch.arange(1, 1 + count) % 64 for count in (plan.length, plan.length + 1))
    with torch.inference_mode():
        alone = model(short[None], use_cache=False).logits[0]
        assert not torch.allclose(model(long[None], use_cache=False).logits[0, : plan.length], alone, atol=1e-4)


def test_a_slot_of_a_dynamic_rope_ends_where_its_frequencies_would_change() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=rope)).eval()
    plan = plan_memory(model, free=10**9)
    frequencies = model.model.rotary_emb.inv_freq.clone()
    with torch.inference_mode():
        model(torch.ones((1, plan.length), dtype=torch.int64), use_cache=False)
        assert torch.equal(model.model.rotary_emb.inv_freq, frequencies)
        model(torch.ones((1, plan.length + 1), dtype=torch.int64), use_cache=False)
        assert not torch.equal(model.model.rotary_emb.inv_freq, frequencies)
