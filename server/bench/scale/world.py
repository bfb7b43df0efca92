"""Models of real sizes with random weights, and rows for them: what the cost of a takedown is measured on without a download.

The architectures are exact; the tokenizer is the demo's, whose 4,096 tokens stand for a vocabulary of any size. A fit on random
weights makes no module worth having, and costs what any costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from server.planning.planned import retain_rows
from unbind_core.architecture import LoadedModel
from unbind_core.encoding import encode
from unbind_core.errors import DataError
from unbind_core.identity import ModelIdentity
from unbind_core.rows import ForgetRow, RetainRow

_QWEN = {"vocab_size": 151_936, "max_position_embeddings": 32_768, "rms_norm_eps": 1e-6}
CONFIGS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "qwen2.5-coder-0.5b": (
        "qwen2",
        _QWEN
        | {
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
        },
    ),
    "qwen2.5-coder-1.5b": (
        "qwen2",
        _QWEN
        | {
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
        },
    ),
    "qwen2.5-coder-7b": (
        "qwen2",
        _QWEN
        | {
            "vocab_size": 152_064,
            "hidden_size": 3584,
            "intermediate_size": 18_944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "tie_word_embeddings": False,
        },
    ),
    "starcoder2-3b": (
        "starcoder2",
        {
            "vocab_size": 49_152,
            "hidden_size": 3072,
            "intermediate_size": 12_288,
            "num_hidden_layers": 30,
            "num_attention_heads": 24,
            "num_key_value_heads": 2,
            "max_position_embeddings": 16_384,
            "sliding_window": 4096,
            "use_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "codellama-7b": (
        "llama",
        {
            "vocab_size": 32_016,
            "hidden_size": 4096,
            "intermediate_size": 11_008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "max_position_embeddings": 16_384,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
        },
    ),
}
DEMO = Path(__file__).resolve().parents[2] / "demo"


def known(name: str) -> None:
    """Raise DataError where there is no architecture of this name."""
    if name not in CONFIGS:
        raise DataError(f"config: '{name}' is unknown; choose from {', '.join(CONFIGS)}")


def _config(name: str, layers: int | None) -> Any:
    known(name)
    kind, values = CONFIGS[name]
    return CONFIG_MAPPING[kind](**values | ({"num_hidden_layers": layers} if layers else {}))


def bare(name: str, dtype: torch.dtype) -> nn.Module:
    """The architecture without weights (on the meta device)."""
    config = _config(name, None)
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model


def with_weights(name: str, dtype: torch.dtype, device: str, layers: int | None = None) -> LoadedModel:
    """The architecture with so many of its layers, or all, and random weights, the demo's tokenizer beside it.

    Raises DataError where there is no such architecture.
    """
    config = _config(name, layers)
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "base", local_files_only=True)
    return LoadedModel(
        model, tokenizer, ModelIdentity("0" * 64, name, int(config.hidden_size), int(config.num_hidden_layers))
    )


def rows(
    tokenizer: PreTrainedTokenizerBase, forget: int, retain: int, length: int
) -> tuple[list[ForgetRow], list[RetainRow]]:
    """So many rows of about ``length`` tokens each, cut from the demo's retain rows laid end to end, again and again."""
    ids = [token for row in retain_rows(DEMO / "rows" / "retain_train.jsonl") for token in encode(tokenizer, row.text)]
    found: list[str] = []
    while len(found) < forget + retain:
        at = len(found) * (length + 1) % (len(ids) - length)
        found.append(str(tokenizer.decode(ids[at : at + length])))
    ours = [ForgetRow(text[: len(text) // 4], text[len(text) // 4 :], "python") for text in found[:forget]]
    return ours, [RetainRow(text) for text in found[forget:]]
