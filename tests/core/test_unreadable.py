"""Why a checkpoint's or an adapter's folder is refused: one line, which names the file or the setting and the remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from tests.core.conftest import build_tokenizer
from unbind_core.architecture import load_model, outline
from unbind_core.errors import UnbindError

TEXT: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize("family", ["empty", "none"])
def test_a_checkpoint_without_its_tokenizer_is_refused_with_what_to_put_there(family: str, tmp_path: Path) -> None:
    kind, model = (Qwen2Config, Qwen2ForCausalLM) if family == "empty" else (LlamaConfig, LlamaForCausalLM)
    model(kind(**TEXT)).save_pretrained(tmp_path)  # of the first the library makes a tokenizer without words
    with pytest.raises(UnbindError) as caught:
        load_model(tmp_path)
    said = str(caught.value)
    assert said.startswith("model: ") and f"'{tmp_path}'" in said and "tokenizer" in said and "\n" not in said
    assert said.endswith("save_pretrained writes, tokenizer.json and tokenizer_config.json among them")


def test_files_that_a_clone_left_out_are_named_with_how_to_get_them(tmp_path: Path) -> None:
    Qwen2ForCausalLM(Qwen2Config(**TEXT)).save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1000\n"
    (tmp_path / "other.onnx").write_text(pointer)
    load_model(tmp_path)  # which it needs no more than that one
    for name in ("tokenizer.json", "model.safetensors"):
        (tmp_path / name).write_text(pointer)
        with pytest.raises(UnbindError, match=rf"Git LFS has left .*{name}.* out: run `git lfs pull` where it was"):
            load_model(tmp_path)


def folder_of(tmp_path: Path, **saving: Any) -> Path:
    """A whole checkpoint."""
    Qwen2ForCausalLM(Qwen2Config(**TEXT)).save_pretrained(tmp_path, **saving)
    build_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def change(folder: Path, **settings: Any) -> Path:
    """The folder, with other settings in its config.json."""
    found = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(found | settings))
    return folder


def said_of(folder: Path, *adapter: Path) -> str:
    """What is said of a folder that cannot be loaded: one line."""
    with pytest.raises(UnbindError) as caught:
        load_model(folder, *adapter)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_shard_that_is_not_whole_is_named(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, max_shard_size="20KB")
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 2
    shards[1].write_bytes(shards[1].read_bytes()[:-9])
    assert said_of(folder).endswith(f"; not whole: {shards[1].name}; download it again")


def test_weights_that_would_be_run_as_code_are_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    (folder / "model.safetensors").unlink()
    torch.save({"weight": Ran()}, folder / "pytorch_model.bin")
    assert "holds more than tensors, and code in it is never run; take safetensors" in said_of(folder)


class Ran:
    """What a pickle may do."""

    def __reduce__(self) -> Any:
        return exec, ("raise AssertionError('was run')",)


def test_a_configuration_of_other_weights_is_told_by_a_tensor(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    said = said_of(change(folder, vocab_size=400))
    assert (
        "weight has the shape [384, 32], and config.json asks for [400, 32]; take config.json and weights of one"
        in said
    )


def test_an_adapter_of_a_wider_model_is_told_by_a_tensor(tmp_path: Path) -> None:
    wider = Qwen2ForCausalLM(Qwen2Config(**TEXT | {"hidden_size": 64}))
    get_peft_model(wider, LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")).save_pretrained(
        tmp_path / "adapter"
    )
    said = said_of(folder_of(tmp_path / "model"), tmp_path / "adapter")
    assert "has the shape [4, 64], and this model takes [4, 32]; give one that was trained on this model" in said


def test_what_is_no_json_and_what_is_not_there_is_named_with_the_remedy(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, max_shard_size="20KB")
    shard, index = sorted(folder.glob("*.safetensors"))[1], folder / "model.safetensors.index.json"
    kept = shard.read_bytes()
    shard.unlink()
    assert said_of(folder).endswith(f"; missing: {shard.name}; download it again")
    shard.write_bytes(kept)
    index.write_text("{")
    assert said_of(folder).endswith(f": not a JSON object: {index.name}; download it again")
    index.unlink()
    assert said_of(folder).endswith(f"; missing: {index.name}; download it again")
    for shard in folder.glob("*.safetensors"):
        shard.unlink()
    assert said_of(folder).endswith("; missing: model.safetensors; download it again")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_settings_that_are_no_json_object_are_named(name: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    assert (folder / name).is_file()
    for broken in ("{", "[]"):
        (folder / name).write_text(broken)
        assert said_of(folder).endswith(f": not a JSON object: {name}; download it again")


def test_an_adapter_s_settings_that_are_no_json_object_are_named(tmp_path: Path) -> None:
    folder, adapter = folder_of(tmp_path / "model"), tmp_path / "adapter"
    model = get_peft_model(Qwen2ForCausalLM(Qwen2Config(**TEXT)), LoraConfig(r=4, target_modules=["q_proj"]))
    model.save_pretrained(adapter)
    (adapter / "adapter_config.json").write_text("[]")
    assert said_of(folder, adapter).endswith(": not a JSON object: adapter_config.json; download it again")


@pytest.mark.parametrize(
    ("setting", "value"), [("hidden_act", "own"), ("hidden_size", "wide"), ("num_attention_heads", 0)]
)
def test_a_setting_that_makes_no_model_is_an_error_in_one_line(setting: str, value: Any, tmp_path: Path) -> None:
    change(folder_of(tmp_path), **{setting: value})
    for load in (load_model, outline):
        with pytest.raises(UnbindError) as caught:
            load(tmp_path)
        said = str(caught.value)
        assert "; mend what it names, or take the folder's *.json files as they were published" in said
        assert str(value) in said or "ZeroDivisionError" in said


def test_weights_of_more_layers_than_the_configuration_tells_of_are_refused(tmp_path: Path) -> None:
    folder = change(folder_of(tmp_path), num_hidden_layers=2, layer_types=None)
    said = said_of(folder)
    assert "config.json tells of 2 layers, and there are weights of more (model.layers.2." in said
    assert said.endswith("; take config.json and weights of one checkpoint")
    change(folder, num_nextn_predict_layers=1)  # which the library leaves out, as it does not guess ahead
    assert load_model(folder).identity.num_layers == 2
