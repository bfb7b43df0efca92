"""How long a slot may be: no longer than the model's positions mean one thing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    GPTNeoConfig,
    GPTNeoForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MptConfig,
    MptForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    RwkvConfig,
    RwkvForCausalLM,
)

from server.engine.embedded.memory import DoesNotFit, plan_memory
from unbind_core.errors import UnsupportedArchitecture

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


def test_layers_that_keep_more_than_keys_and_values_are_refused_before_anything_is_planned() -> None:
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
    linear = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    }
    kinds = {"layer_types": ["linear_attention"], "head_dim": 16, "shared_expert_intermediate_size": 16}
    mixed = Qwen3NextForCausalLM(Qwen3NextConfig(**SHAPE, **experts, **linear, **kinds))
    with pytest.raises(
        UnsupportedArchitecture, match="Qwen3NextForCausalLM has layers of kind linear_attention, for which"
    ):
        plan_memory(mixed, free=10**9)
    sizes = {"hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 2}
    recurrent = RwkvForCausalLM(RwkvConfig(vocab_size=64, **sizes)).eval()
    with pytest.raises(
        UnsupportedArchitecture, match=r"RwkvForCausalLM has layers that keep .* than keys and values; take"
    ):
        plan_memory(recurrent, free=10**9)


def test_windows_that_are_counted_inside_the_attention_are_refused() -> None:
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_heads": 4}
    mixed = GPTNeoForCausalLM(GPTNeoConfig(**sizes, attention_types=[[["global", "local"], 1]]))
    with pytest.raises(UnsupportedArchitecture, match="GPTNeoForCausalLM has windows that no mask can move"):
        plan_memory(mixed, free=10**9)
    whole = GPTNeoForCausalLM(GPTNeoConfig(**sizes, attention_types=[[["global"], 2]])).eval()
    assert plan_memory(whole, free=10**9).length == 2048


def test_a_slot_ends_where_a_model_with_positions_of_another_name_has_no_more() -> None:
    sizes = {"vocab_size": 64, "d_model": 32, "n_heads": 4, "n_layers": 2}
    model = MptForCausalLM(MptConfig(max_seq_len=64, **sizes)).eval()
    assert plan_memory(model, free=10**9).length == 64
    with pytest.raises(DoesNotFit, match="max_model_len 65: the model has 64 positions"):
        plan_memory(model, length=65, free=10**9)
