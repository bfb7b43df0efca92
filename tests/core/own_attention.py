"""Families whose attention is their own, or has sinks, in tiny configurations; three have a table of positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import CodeGenConfig, GPTJConfig, GptOssConfig, MptConfig, PreTrainedConfig

POSITIONS = 256
SHAPE: dict[str, Any] = {
    "vocab_size": 384,
    "initializer_range": 0.15,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "gptj": lambda: GPTJConfig(n_embd=32, n_layer=3, n_head=4, n_positions=POSITIONS, rotary_dim=8, **SHAPE),
    "codegen": lambda: CodeGenConfig(n_embd=32, n_layer=3, n_head=4, n_positions=POSITIONS, rotary_dim=8, **SHAPE),
    "mpt": lambda: MptConfig(d_model=32, n_layers=3, n_heads=4, max_seq_len=POSITIONS, **SHAPE),
    "gpt_oss": lambda: GptOssConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        **SHAPE,
    ),
}
