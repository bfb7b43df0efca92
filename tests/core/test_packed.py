"""GPTQ and AWQ checkpoints: read as the weights that they stand for, and refused where they cannot be."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config

from tests.core.conftest import TinyCheckpoint, build_tokenizer
from tests.support.quantised import packed, said_to_be
from unbind_core.architecture import load_model, numerics
from unbind_core.errors import UnbindError
from unbind_core.packed import plain_weights

IDS = torch.tensor([[5, 17, 42, 99, 7, 3, 250, 11]])
# Whole numbers from 0 to 15 and zero points from 1 to 13 at scale 1, as others pack them. AutoAWQ 0.2.9: WQLinear_GEMM.from_linear,
# 8 inputs, 32 outputs, groups of 4. AutoRound 0.16.1: QuantLinear.pack of qlinear_torch_zp, and of qlinear_torch, which is the
# layout gptq_v2; the first 8 of 32 inputs, in a group of 16.
AWQ_NUMBERS = [
    763497040, -2099752795, -668097270, 763497040, 1604660594, -1510313257, -94382291, 1604660594, 1925664676, -953375494,
    745732687, 1925664676, -1795591737, -112212196, 1335106673, -1795591737, -971205399, 476178766, 1640386196, -971205399,
    -381766117, 1049828193, -1813421642, -381766117, 190900286, 1622556291, -1240759320, 190900286, 1031998288, -2082975563,
    -667044597, 1031998288,
]  # fmt: skip
AWQ_ZEROS = [-1388947279, -1320719934, -1034388781, -748057836, 343579685, 629910838, 916238663, 1202569816]
GPTQ_NUMBERS = ([247034912, -1201397798, 1394526837] * 11)[:32]
GPTQ_ZEROS = {
    "gptq": [-1798886832, -1526187167, -1239856014, -953528189],
    "gptq_v2": [-1512555679, -1239856014, -953524861, -667197036],
}


def _known(inputs: int, width: int, group: int) -> Tensor:
    """The weight that the numbers above were made from; ``width``: inputs of the layer that the first ``inputs`` are of."""
    numbers = torch.arange(32 * width).reshape(32, width).mul(7).div(3, rounding_mode="floor").remainder(16)
    zeros = (torch.arange(32 * (width // group)).reshape(-1, 32) * 5).remainder(13) + 1
    return (numbers - zeros.t().repeat_interleave(group, 1))[:, :inputs].float()


def _layer(folder: Path, **parts: Tensor) -> Path:
    folder.mkdir()
    save_file({f"layer.{name}": part for name, part in parts.items()}, folder / "model.safetensors")
    return folder


def test_numbers_that_autoawq_packed(tmp_path: Path) -> None:
    qweight, qzeros = torch.tensor(AWQ_NUMBERS).int().reshape(8, 4), torch.tensor(AWQ_ZEROS).int().reshape(2, 4)
    folder = _layer(tmp_path / "it", qweight=qweight, qzeros=qzeros, scales=torch.ones(2, 32).half())
    (weight,) = plain_weights(folder, {"quant_method": "awq", "bits": 4}, torch.float32).values()
    assert torch.equal(weight, _known(8, 8, 4))


@pytest.mark.parametrize("layout", ["gptq", "gptq_v2"])
def test_numbers_that_autoround_packed(layout: str, tmp_path: Path) -> None:
    qweight, qzeros = torch.tensor([GPTQ_NUMBERS]).int(), torch.tensor([GPTQ_ZEROS[layout]]).int()
    folder = _layer(tmp_path / "it", qweight=qweight, qzeros=qzeros, scales=torch.ones(1, 32).half())
    settings = {"quant_method": "gptq", "bits": 4, "checkpoint_format": layout}
    (weight,) = plain_weights(folder, settings, torch.float32).values()
    assert torch.equal(weight, _known(8, 32, 16))


@pytest.mark.parametrize(
    ("family", "method", "options"),
    [
        ("qwen2", "gptq", {}),
        ("qwen2", "awq", {}),
        ("starcoder2", "gptq", {"sym": True}),
        ("llama", "gptq", {"shuffled": True}),
        ("mistral", "gptq", {"bits": 8}),
        ("gemma2", "gptq", {"bits": 2, "group": 8}),
        ("qwen3_moe", "awq", {}),
        ("qwen3_moe", "gptq", {}),
    ],
)
def test_a_packed_checkpoint_computes_what_its_weights_stand_for(
    family: str, method: str, options: dict[str, Any], tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    source = tiny_checkpoint(family)
    loaded = load_model(packed(source, tmp_path / "packed", method, **options))
    assert torch.equal(loaded.model(IDS).logits, load_model(tmp_path / "packed-plain").model(IDS).logits)
    assert not torch.equal(loaded.model(IDS).logits, load_model(source).model(IDS).logits)


def test_a_packed_checkpoint_is_one_model_in_every_precision_and_says_what_it_was(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    folder = packed(tiny_checkpoint("qwen2"), tmp_path / "packed", "awq")
    exact, half = load_model(folder), load_model(folder, dtype=torch.bfloat16)
    said = "awq, bits 4, group_size 16, zero_point, dequantised"
    assert exact.identity == half.identity and half.identity.quantisation == said
    assert numerics(half.model) == {"dtype": "bfloat16", "quantisation": said}
    assert exact.identity.fingerprint != load_model(tiny_checkpoint("qwen2")).identity.fingerprint


def test_files_of_a_checkpoint_may_each_have_a_part_of_a_layer(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    folder = packed(tiny_checkpoint("qwen2"), tmp_path / "packed", "gptq")
    expected = load_model(folder).identity
    whole = load_file(folder / "model.safetensors")
    names = sorted(whole)
    index = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(names)}
    for file in set(index.values()):
        save_file({name: whole[name] for name in names if index[name] == file}, folder / file)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert load_model(folder).identity == expected
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(UnbindError, match=r"model-1\.safetensors is missing"):
        load_model(folder)


def test_an_adapter_is_merged_into_what_packed_weights_stand_for(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    folder = packed(tiny_checkpoint("qwen2"), tmp_path / "packed", "gptq")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "packed-plain")
    get_peft_model(plain, LoraConfig(init_lora_weights=False, target_modules=["q_proj"])).save_pretrained(
        tmp_path / "adapter"
    )
    adapted, alone = load_model(folder, tmp_path / "adapter"), load_model(folder)
    assert torch.equal(
        adapted.model(IDS).logits, load_model(tmp_path / "packed-plain", tmp_path / "adapter").model(IDS).logits
    )
    assert adapted.identity.fingerprint != alone.identity.fingerprint


def _without(folder: Path, part: str) -> None:
    kept = {name: value for name, value in load_file(folder / "model.safetensors").items() if not name.endswith(part)}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def _halved(folder: Path, part: str) -> None:
    every = load_file(folder / "model.safetensors")
    every[part] = every[part][: len(every[part]) // 2].contiguous()
    save_file(every, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda it: _without(it, "q_proj.scales"), r"weights are missing: model.layers.0.self_attn.q_proj.scales"),
        (lambda it: _without(it, "q_proj.qweight"), r"weights are missing: model.layers.0.self_attn.q_proj.weight"),
        (
            lambda it: _halved(it, "model.layers.1.mlp.up_proj.qweight"),
            r"packed weights of model.layers.1.mlp.up_proj do not fit each other: 16 inputs, 32 with a group",
        ),
        (
            lambda it: _halved(it, "model.layers.1.mlp.up_proj.qzeros"),
            r"packed weights of model.layers.1.mlp.up_proj do not fit each other",
        ),
        (
            lambda it: said_to_be(it, {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}),
            r"packed as gptq with checkpoint_format 'marlin'; gptq and gptq_v2 can be read",
        ),
        (
            lambda it: said_to_be(it, {"quant_method": "awq", "bits": 4, "version": "gemv"}),
            r"packed as awq with version 'gemv'; gemm can be read",
        ),
        (lambda it: (it / "model.safetensors").rename(it / "pytorch_model.bin"), r"model.safetensors is missing"),
    ],
)
def test_damaged_or_other_layouts_are_refused_with_what_is_wrong(
    damage: Any, said: str, tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    folder = packed(tiny_checkpoint("qwen2"), tmp_path / "packed", "gptq")
    damage(folder)
    with pytest.raises(UnbindError, match=rf"'{folder}' could not be loaded .*{said}"):
        load_model(folder)


def test_numbers_of_three_bits_are_refused(tmp_path: Path) -> None:
    words = {"qweight": torch.zeros(3, 32).int(), "qzeros": torch.zeros(1, 3).int(), "scales": torch.ones(1, 32).half()}
    with pytest.raises(ValueError, match="3 bits a number; 2, 4, 8 can be read"):
        plain_weights(_layer(tmp_path / "it", **words), {"quant_method": "gptq", "bits": 3}, torch.float32)


def test_layers_that_keep_their_weights_the_other_way_round_are_refused(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    config = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "gpt2")
    tokenizer.save_pretrained(tmp_path / "gpt2")
    with pytest.raises(UnbindError, match="its layers keep their weights the other way round"):
        load_model(said_to_be(Path(shutil.copytree(tmp_path / "gpt2", tmp_path / "it")), {"quant_method": "gptq"}))
