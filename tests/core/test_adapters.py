"""Adapters that need care as they are merged: what is merged answers as it did beside the weights, or is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from tests.core.conftest import TinyCheckpoint
from unbind_core.architecture import load_model
from unbind_core.errors import UnbindError

IDS = torch.tensor([[9, 30, 41, 50, 17, 23]])


def adapter(base: Path, folder: Path, config: PeftConfig) -> Path:
    """An adapter with weights that matter, saved by peft."""
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for key, value in adapted.named_parameters():
            if "lora_" in key:
                value.copy_(torch.randn(value.shape, generator=generator) * 0.3)
    adapted.save_pretrained(folder)
    return folder


@pytest.mark.filterwarnings("ignore::UserWarning")  # peft warns of what is tried here
@pytest.mark.parametrize(
    ("target", "both"), [("embed_tokens", False), ("lm_head", False), ("embed_tokens", True)], ids=str
)
def test_an_adapter_on_embeddings_that_the_head_shares_is_merged_into_its_own_alone(
    target: str, both: bool, tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    tied: Any = AutoModelForCausalLM.from_pretrained(tiny_checkpoint("qwen2"))
    tied.lm_head.weight, tied.config.tie_word_embeddings = tied.model.embed_tokens.weight, True
    base = tmp_path / "base"
    tied.save_pretrained(base)
    load_model(tiny_checkpoint("qwen2")).tokenizer.save_pretrained(base)
    config = LoraConfig(r=4, target_modules=["q_proj", target], ensure_weight_tying=both, task_type="CAUSAL_LM")
    added = adapter(base, tmp_path / "adapter", config)
    beside, merged = load_model(base, added, merge=False), load_model(base, added)
    assert merged.identity == beside.identity
    with torch.no_grad():
        expected = beside.model(input_ids=IDS).logits
        torch.testing.assert_close(merged.model(input_ids=IDS).logits, expected, atol=1e-4, rtol=1e-4)
        written: Any = merged.model
        written.save_pretrained(tmp_path / "merged")
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        torch.testing.assert_close(again(input_ids=IDS).logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", [PromptTuningConfig, PrefixTuningConfig])
def test_an_adapter_that_is_no_change_of_weights_is_refused(
    kind: Any, tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    base = tiny_checkpoint("qwen2")
    added = adapter(base, tmp_path, kind(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.raises(UnbindError, match=r"adapter: .* is of kind PR.*; give one that changes weights, such as LoRA"):
        load_model(base, added)


def test_an_adapter_that_acts_behind_some_tokens_alone_is_refused(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    base = tiny_checkpoint("qwen2")
    config = LoraConfig(r=4, target_modules=["q_proj"], alora_invocation_tokens=[5, 6], task_type="CAUSAL_LM")
    added = adapter(base, tmp_path, config)
    with pytest.raises(UnbindError, match=r"adapter: '.*' does not merge into weights: aLoRA .*, such as LoRA"):
        load_model(base, added)


def test_an_adapter_of_a_model_with_more_layers_is_refused_with_what_has_no_place(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    base = tiny_checkpoint("qwen2")
    longer: Any = AutoConfig.from_pretrained(base)
    longer.num_hidden_layers, longer.layer_types = 4, ["full_attention"] * 4
    AutoModelForCausalLM.from_config(longer).save_pretrained(tmp_path / "longer")
    config = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    added = adapter(tmp_path / "longer", tmp_path / "adapter", config)
    for merge in (True, False):
        with pytest.raises(UnbindError, match=r"of its weights 2 have no place there \(.*layers\.3\.self_attn"):
            load_model(base, added, merge=merge)


def test_an_adapter_whose_weights_are_not_there_is_refused_with_what_is_missing(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    base = tiny_checkpoint("qwen2")
    added = adapter(base, tmp_path, LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    weights = added / "adapter_model.safetensors"
    weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1000\n")
    with pytest.raises(
        UnbindError, match=r"; Git LFS has left adapter_model.safetensors out: run `git lfs pull` where"
    ):
        load_model(base, added)
    weights.unlink()
    with pytest.raises(UnbindError, match=r"adapter: '.*' has no adapter_model.safetensors; give the folder that"):
        load_model(base, added)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"r": "four"}, "TypeError: .*; give the folder as save_pretrained wrote it"),
        ({"lora_alpha": None}, "TypeError: .*; give the folder as save_pretrained wrote it"),
        ({"target_modules": "((("}, "error: .*; give the folder as save_pretrained wrote it"),
        ({"peft_type": "NEW"}, "KeyError: 'NEW'.*; give the folder as save_pretrained wrote it"),
    ],
    ids=str,
)
def test_settings_that_peft_makes_nothing_of_are_refused_in_one_line(
    changed: dict[str, Any], said: str, tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    base = tiny_checkpoint("qwen2")
    added = adapter(base, tmp_path, LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    file = added / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text(encoding="utf-8")), **changed}), encoding="utf-8")
    with pytest.raises(UnbindError, match=rf"adapter: peft makes nothing of the adapter_config.json in .*{said}"):
        load_model(base, added)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"init_lora_weights": "pissa"}, r"depend on the threads, .*; give a checkpoint with it merged"),
        ({"init_lora_weights": "pissa_niter_4"}, r"depend on the threads, .*; give a checkpoint with it merged"),
        ({"init_lora_weights": "olora"}, r"depend on the threads, .*; give a checkpoint with it merged"),
        ({"layer_replication": [[0, 2], [1, 3]]}, r"repeats layers .*; give a checkpoint that has them repeated"),
    ],
    ids=str,
)
def test_an_adapter_that_would_not_be_what_was_trained_is_refused(
    changed: dict[str, Any], said: str, tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    base = tiny_checkpoint("qwen2")
    added = adapter(base, tmp_path, LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", **changed))
    with pytest.raises(UnbindError, match=rf"adapter: '.*' .*{said}"):
        load_model(base, added)
