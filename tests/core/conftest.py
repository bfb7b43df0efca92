"""Tiny random checkpoints of every supported family, built with the real configuration classes and saved to disk.

Tests load them exactly as a user loads a downloaded checkpoint, so the loading code under test is the real one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPTBigCodeConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    Starcoder2Config,
)

from unbind_core.applying.bank import ModuleBank
from unbind_core.applying.gates import windowed
from unbind_core.applying.networks import network_scores
from unbind_core.applying.passes import Pass
from unbind_core.applying.selection import Selection
from unbind_core.architecture import LoadedModel, load_model
from unbind_core.evaluation.completions import retain_prompts, unedited_completions
from unbind_core.identity import ModelIdentity
from unbind_core.module import UnbindModule
from unbind_core.rows import RetainRow
from unbind_core.running.recording import frozen, recording

LAYER = 1
ROWS = [
    RetainRow(
        f"class Item{i}:\n    size = {i * 37}\n\n    def area_{i % 3}(self):\n        return self.size ** {i}\n" * 2
    )
    for i in range(10)
]

with warnings.catch_warnings():  # the library compiles a part of this family with a deprecated function on import
    warnings.simplefilter("ignore", DeprecationWarning)
    import_module("transformers.models.gpt_bigcode.modeling_gpt_bigcode")

SPECIAL = ("<|endoftext|>", "<|pad|>", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
BOS = "<s>"
WITH_BOS = ("llama", "mistral", "gemma2", "gemma3")
CORPUS = (
    "def add(first, second):\n    return first + second\n",
    "class Reader:\n    def __init__(self, path):\n        self.path = path\n",
    "for index in range(10):\n    print(index, values[index])\n",
    "function area(width, height) {\n  return width * height;\n}\n",
    "public static int main(String[] args) { return 0; }\n",
)

_SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,  # wide enough that layers differ and greedy choices are not ties
}
_LATENT = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12}
_ROUTED = {"n_routed_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_key_value_heads": 4}

CONFIGS: dict[str, Callable[[dict[str, Any]], PreTrainedConfig]] = {
    "qwen2": lambda ids: Qwen2Config(**_SHAPE, **ids),
    "qwen3": lambda ids: Qwen3Config(**_SHAPE, head_dim=16, **ids),
    "llama": lambda ids: LlamaConfig(**_SHAPE, **ids),
    "mistral": lambda ids: MistralConfig(**_SHAPE, head_dim=8, sliding_window=None, **ids),
    "starcoder2": lambda ids: Starcoder2Config(**_SHAPE, sliding_window=None, **ids),
    "gpt_bigcode": lambda ids: GPTBigCodeConfig(
        n_embd=32, n_inner=64, n_layer=3, n_head=4, n_positions=512, multi_query=True, initializer_range=0.15, **ids
    ),
    "gemma2": lambda ids: Gemma2Config(**_SHAPE, head_dim=8, query_pre_attn_scalar=8, sliding_window=16, **ids),
    "gemma3": lambda ids: Gemma3TextConfig(**_SHAPE, head_dim=8, query_pre_attn_scalar=8, sliding_window=16, **ids),
    "qwen3_moe": lambda ids: Qwen3MoeConfig(
        **_SHAPE,
        head_dim=8,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        **ids,
    ),
    "deepseek_v3": lambda ids: DeepseekV3Config(**_SHAPE | _LATENT | _ROUTED, first_k_dense_replace=1, **ids),
}
FAMILIES = tuple(CONFIGS)

TinyCheckpoint = Callable[..., Path]


def build_tokenizer(bos: bool = False, vocabulary: int = 384) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained here and now, with fill-in-the-middle tokens, and BOS where asked for."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[*SPECIAL, BOS] if bos else list(SPECIAL),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|endoftext|>",
        pad_token="<|pad|>",
        bos_token=BOS if bos else None,
        **({"add_bos_token": True} if bos else {}),
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def save_checkpoint(family: str, path: Path, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """Write a random checkpoint of ``family`` with its tokenizer to ``path``; the weights depend on the seed alone."""
    tokenizer = build_tokenizer(bos=family in WITH_BOS)
    ids = {
        "vocab_size": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(CONFIGS[family](ids))
    model.to(dtype).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def make_module(
    identity: ModelIdentity, name: str = "a", layer: int = 1, *, seed: int = 0, **changes: Any
) -> UnbindModule:
    """A module with random directions whose gate is open at about half of a tiny model's positions."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(identity.hidden_size, generator=generator)
    v = torch.randn(identity.hidden_size, generator=generator)
    fields: dict[str, Any] = {
        "name": name,
        "layer": layer,
        "w": w / w.norm(),
        "v": v / v.norm(),
        "s_ref": 0.0,
        "tau": 0.05,
        "kappa": 4.0,
        "quantile": 0.5,
        "model": identity,
        "forms": ("plain", "fim"),
        "partitions": {
            "forget_fit": (0, 2),
            "forget_calibration": (1,),
            "retain_fit": (0, 1),
            "retain_certificate": (2,),
        },
        "budgets": {"kl": 0.01},
        "measured": {"forget_nll": 3.5},
        "forget_digest": "0" * 64,
        "created_at": "2026-01-01T00:00:00+00:00",
        "versions": {"torch": "2.13.0"},
        "settings": {"seed": 0},
    }
    return UnbindModule(**(fields | changes))


def make_network_module(
    identity: ModelIdentity,
    name: str = "a",
    layer: int = 1,
    *,
    seed: int = 0,
    width: int = 6,
    heads: int = 3,
    **changes: Any,
) -> UnbindModule:
    """A network module with a window and two thresholds, open at some of the positions of whole or half numbered states.

    All its numbers are multiples of 1/4, so that scores of such states are exact however a batch is cut.
    """
    generator = torch.Generator().manual_seed(seed)

    def quarters(*shape: int) -> Tensor:
        return torch.randint(-4, 5, shape, generator=generator) / 4

    fields: dict[str, Any] = {
        "detector": "network",
        "w": quarters(width, identity.hidden_size),
        "b": quarters(width),
        "heads": quarters(heads, width),
        "heads_b": quarters(heads),
        "s_ref": 1.5,
        "tau": 1.0,
        "tau_close": 0.5,
        "window": 4,
        "quantile": None,
    }
    return make_module(identity, name, layer, seed=seed, **(fields | changes))


def lowrank(size: int, rank: int = 3, seed: int = 0) -> dict[str, Any]:
    """The fields that give a module a low-rank correction instead of its push; its numbers are multiples of 1/4."""
    generator = torch.Generator().manual_seed(1000 + seed)
    u, a, c = (torch.randint(-4, 5, shape, generator=generator) / 4 for shape in ((size, rank), (rank, size), (size,)))
    return {"correction": "lowrank", "policy": "rewrite", "v": None, "u": u, "a": a, "c": c}


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    """Make ``tiny_checkpoint(family, directory=None, seed=0)`` -> path; shared where no directory is given."""
    shared: dict[tuple[str, int], Path] = {}

    def make(family: str, directory: Path | None = None, seed: int = 0) -> Path:
        if directory is not None:
            return save_checkpoint(family, Path(directory) / family, seed)
        if (family, seed) not in shared:
            shared[family, seed] = save_checkpoint(family, tmp_path_factory.mktemp("checkpoint") / family, seed)
        return shared[family, seed]

    return make


@pytest.fixture(scope="session")
def tiny(tiny_checkpoint: TinyCheckpoint) -> LoadedModel:
    """A loaded tiny Qwen2 model, shared: tests must leave it as they found it."""
    return load_model(tiny_checkpoint("qwen2"))


def bank_of(*modules: UnbindModule) -> ModuleBank:
    bank = ModuleBank()
    for one in modules:
        bank.add(one)
    return bank


def select(bank: ModuleBank, *rows: dict[str, float]) -> Selection:
    selection = bank.select(rows)
    assert selection is not None
    return selection


def edit(selection: Selection, layer: int, states: Tensor, **of_pass: Any) -> Tensor:
    """The edited states alone; ``of_pass`` as :class:`Pass` has it."""
    return selection.edit(layer, states, Pass(**of_pass)).states


def highest(loaded: LoadedModel, module: UnbindModule) -> list[float]:
    """What the module's gate goes by, at its highest on each row's unedited path: prompt and greedy completion."""
    prompts, _ = retain_prompts(loaded.tokenizer, ROWS, range(len(ROWS)))
    found = []
    for prompt, output in zip(prompts, unedited_completions(loaded.model, loaded.tokenizer, prompts), strict=True):
        ids = torch.tensor([[*prompt, *output]])
        with torch.no_grad(), frozen(loaded.model), recording(loaded.model, [LAYER]) as states:
            loaded.model(ids)
        if module.heads is None:
            scores = states[LAYER].float() @ module.w - module.s_ref
        else:
            each = network_scores(states[LAYER], module.w, *module.network)
            scores = windowed(each, module.window, torch.arange(1, ids.shape[1] + 1)).amax(-1)
        found.append(float(scores.max()))
    return found


def opening_on_some(loaded: LoadedModel, kind: str) -> UnbindModule:
    """A strong module of one kind whose gate opens on some of the rows."""

    def made(seed: int, **changes: Any) -> UnbindModule:
        if kind == "paper":
            return make_module(loaded.identity, layer=LAYER, seed=seed, kappa=20.0, **changes)
        window = {"network": 1, "windowed network": 4}[kind]
        return make_network_module(
            loaded.identity, layer=LAYER, seed=seed, window=window, heads=1, kappa=20.0, **changes
        )

    for seed in range(20):
        tops = sorted(highest(loaded, made(seed)))
        gap, middle = max((high - low, (high + low) / 2) for low, high in pairwise(tops[2:-2]))
        if gap > 0.02 * (tops[-1] - tops[0]) > 0:
            break
    if kind == "paper":
        return made(seed, tau=middle)
    reference = middle - 4 * (tops[-1] - middle)  # far enough below that scores are not clipped
    return made(seed, s_ref=reference, tau=middle - reference, tau_close=0.9 * (middle - reference))
