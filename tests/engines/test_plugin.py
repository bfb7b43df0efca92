"""What edits cost vLLM is measured on an architecture whose weights are made up."""

from __future__ import annotations

import pytest
import torch

from server.bench.engines.plugin import beside, shaped
from server.bench.scale import world
from server.bench.serve import Workload
from server.engine.vllm.arguments import Arguments

TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
}


def test_vllm_takes_an_architecture_whose_weights_it_makes_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "CONFIGS", {"tiny": ("qwen2", TINY)})
    with shaped("tiny", torch.float32, "cpu", (-1,)) as plain:
        assert plain.module.layer == 1 and plain.layers == (1,) and plain.identity.num_layers == 2
        config = Arguments(str(plain.folder), plain.dtype, 512, 4, 64, "cpu", plain.flags, layers=plain.layers).config()
    assert config.model_config.hf_config.architectures == ["Qwen2ForCausalLM"]
    assert config.load_config.load_format == "dummy"


def test_ratios_are_of_the_same_repeat() -> None:
    found = beside(Workload(2, 8, 10), {"bare": [1.0, 2.0, 4.0], "1": [2.0, 2.0, 2.0]})
    assert found["bare"] == {"tokens_per_second": 10, "of_bare": [1, 1, 1]}
    assert found["1"] == {"tokens_per_second": 10, "of_bare": [0.75, 1, 1.5]}
