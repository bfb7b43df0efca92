"""Which checkpoints are loaded: whatever puts out one state a token as it decodes, images or not, and nothing that brings code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PreTrainedConfig,
    PreTrainedModel,
    SiglipVisionConfig,
    ViTConfig,
)

from tests.core.conftest import build_tokenizer, make_module
from tests.core.test_unreadable import TEXT as SIZES
from unbind_core.applying.attach import attach
from unbind_core.applying.bank import ModuleBank
from unbind_core.architecture import LoadedModel, decoder_layers, load_model, outline
from unbind_core.errors import UnbindError, UnsupportedArchitecture
from unbind_core.running.recording import recording

IDS = torch.tensor([[9, 30, 41, 50, 17, 23]])
TEXT: dict[str, Any] = {**SIZES, "head_dim": 8, "initializer_range": 0.15}
SIGHT = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}


def with_images(kind: str, layers: int) -> PreTrainedModel:
    """A model that reads images too, by as many layers as said."""
    torch.manual_seed(0)
    if kind == "mistral3":
        sight: dict[str, Any] = {"model_type": "pixtral", **SIGHT, "num_hidden_layers": layers}
        text = {"model_type": "ministral3", **TEXT, "sliding_window": None}
        return Mistral3ForConditionalGeneration(Mistral3Config(text_config=text, vision_config=sight))
    sight = {**SIGHT, "num_hidden_layers": layers}
    return Gemma3ForConditionalGeneration(
        Gemma3Config(text_config=TEXT, vision_config=sight, mm_tokens_per_image=4, image_token_id=380)
    )


@pytest.mark.parametrize(("kind", "layers"), [("mistral3", 2), ("mistral3", 3), ("gemma3", 3)])
def test_a_model_that_also_reads_images_answers_text_and_is_edited_in_its_decoder(
    kind: str, layers: int, tmp_path: Path
) -> None:
    model = with_images(kind, layers).eval()
    model.save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    assert loaded.identity.num_layers == 3 and loaded.identity.hidden_size == 32
    assert [len(decoder_layers(outline(tmp_path)[0])), *map(type, decoder_layers(loaded.model))] == [
        3,
        *map(type, model.get_decoder().layers),
    ]
    bank = ModuleBank()
    bank.add(make_module(loaded.identity, layer=1))
    with torch.no_grad():
        plain = loaded.model(input_ids=IDS, use_cache=False).logits
        assert torch.equal(plain, model(input_ids=IDS, use_cache=False).logits)
        with attach(loaded.model, bank):
            assert not torch.allclose(loaded.model(input_ids=IDS, use_cache=False).logits, plain)


def refused(folder: Path, config: PreTrainedConfig, **changes: Any) -> str:
    """What is said of a folder with this configuration, by those who load it and those who only look."""
    config.save_pretrained(folder)
    found = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(found))
    said = []
    for load in (load_model, outline):
        with pytest.raises(UnsupportedArchitecture) as error:
            load(folder)
        said.append(str(error.value))
    assert said[0] == said[1]
    return said[0]


def test_code_that_a_checkpoint_brings_is_not_run_nor_asked_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(_: str = "") -> str:
        raise AssertionError("a server has nobody to ask")

    monkeypatch.setattr("builtins.input", asked)
    (tmp_path / "configuration_own.py").write_text("raise AssertionError('was run')\n")
    brings = {"auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}
    said = refused(tmp_path, BertConfig(), model_type="own", **brings)
    assert "model_type 'own', which transformers" in said and "auto_map) is never run; take a checkpoint" in said
    said = refused(tmp_path, BertConfig(), model_type="own")
    assert "does not have; take a checkpoint" in said


def test_a_tokenizer_that_is_code_of_the_checkpoint_is_refused_without_a_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda _="": "y")
    LlamaForCausalLM(LlamaConfig(**TEXT)).save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "tokenization_own.py").write_text("raise AssertionError('was run')\n")
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    brings = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["tokenization_own.Own", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | brings))
    for load in (load_model, outline):
        with pytest.raises(UnbindError) as caught:
            load(tmp_path)
        said = str(caught.value)
        assert "code that the checkpoint brings (auto_map), and that is never run" in said
        assert "trust_remote_code" not in said and "\n" not in said


def test_what_is_no_decoder_is_refused_by_its_name_in_one_line(tmp_path: Path) -> None:
    for config in (ViTConfig(), SiglipVisionConfig()):
        said = refused(tmp_path, config)
        assert said.startswith(f"{type(config).__name__} is not a causal language model") and len(said) < 200


def test_layers_with_several_states_a_token_are_refused_where_they_are_recorded() -> None:
    config = Gemma3nTextConfig(
        **TEXT | {"num_hidden_layers": 2},
        layer_types=["sliding_attention", "full_attention"],
        num_kv_shared_layers=0,
        vocab_size_per_layer_input=384,
        hidden_size_per_layer_input=8,
        laurel_rank=4,
        activation_sparsity_pattern=None,
    )
    model = Gemma3nForCausalLM(config).eval()
    with (
        torch.no_grad(),
        pytest.raises(UnsupportedArchitecture, match=r"Gemma3nForCausalLM: .* \[4, 1, 6, 32\], not one state"),
        recording(model, [1]),
    ):
        model(input_ids=IDS, use_cache=False)


def test_a_wrapper_without_a_configuration_is_refused_with_the_lists_that_it_has(tiny: LoadedModel) -> None:
    wrapped = nn.DataParallel(tiny.model)
    with pytest.raises(
        UnsupportedArchitecture, match=r"DataParallel: nothing says how many .* lists: module.model.layers"
    ):
        decoder_layers(wrapped)
    assert decoder_layers(wrapped, "module.model.layers") == decoder_layers(tiny.model)
