"""Quantised checkpoints: what they are told as, what they need, and that a module of other weights is refused on them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.core.conftest import TinyCheckpoint, make_module
from tests.support.quantised import FP8_TOLD, fp8, said_to_be
from unbind_core.architecture import LoadedModel, decoder_layers, identify, load_model, numerics
from unbind_core.errors import ModelMismatch, UnbindError, UnsupportedArchitecture
from unbind_core.module import UnbindModule
from unbind_core.quantisation import computed_in, remember, told
from unbind_core.running.gradients import require_gradients

BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "load_in_8bit": False}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
PACKED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 8}, "input_activations": {"num_bits": 8}}},
}
TORCHAO = {
    "quant_method": "torchao",
    "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_data": {"bits": 3}}},
}


@pytest.fixture(scope="module")
def quantised(tiny_checkpoint: TinyCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fp8(tiny_checkpoint("qwen2"), tmp_path_factory.mktemp("quantised") / "fp8")


def test_a_quantised_checkpoint_is_a_model_of_its_own_that_says_how_it_is_stored(
    quantised: Path, tiny: LoadedModel
) -> None:
    loaded = load_model(quantised)
    assert loaded.identity.fingerprint != tiny.identity.fingerprint
    assert loaded.identity == load_model(quantised, dtype=torch.bfloat16).identity
    assert loaded.identity.quantisation == f"{FP8_TOLD}, dequantised"
    assert numerics(loaded.model) == {"dtype": "float32", "quantisation": f"{FP8_TOLD}, dequantised"}
    assert tiny.identity.quantisation is numerics(tiny.model)["quantisation"] is None


def test_a_module_of_plain_weights_is_refused_on_quantised_ones_with_both_and_the_remedy(
    quantised: Path, tiny: LoadedModel, tmp_path: Path
) -> None:
    make_module(tiny.identity).save(tmp_path / "a.safetensors")
    with pytest.raises(ModelMismatch) as refusal:
        UnbindModule.load(tmp_path / "a.safetensors", load_model(quantised).identity)
    said = str(refusal.value)
    for part in (
        "not quantised)",
        f"{FP8_TOLD}, dequantised)",
        "fit the forget set again",
        "unbind module verify --adopt",
    ):
        assert part in said


def test_a_module_s_file_does_not_change_with_what_an_identity_says(quantised: Path) -> None:
    module = make_module(load_model(quantised).identity)
    assert module.model.quantisation is not None
    assert UnbindModule.from_bytes(module.to_bytes()) == module
    assert set(module.describe()["model"]) == {"fingerprint", "name", "hidden_size", "num_layers"}


def test_a_format_that_the_library_does_not_read_is_refused_before_its_numbers_pass_for_weights(
    quantised: Path, tmp_path: Path
) -> None:
    folder = said_to_be(
        Path(shutil.copytree(quantised, tmp_path / "it")), {"quant_method": "modelopt", "quant_algo": "FP8"}
    )
    with pytest.raises(
        UnbindError, match=r"quantised \(modelopt\), a format that transformers does not read; take a check"
    ):
        load_model(folder)


@pytest.mark.parametrize(
    ("settings", "package"),
    [
        (BNB, "bitsandbytes"),
        (PACKED, "compressed-tensors"),
        (TORCHAO, "torchao"),
        ({"quant_method": "quanto", "weights": "int8"}, "optimum-quanto"),
    ],
)
def test_a_format_whose_package_is_missing_names_it(
    settings: dict[str, Any], package: str, tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    folder = said_to_be(Path(shutil.copytree(tiny_checkpoint("qwen2"), tmp_path / "it")), settings)
    with pytest.raises(UnbindError, match=rf"'{folder}' could not be loaded .* needs {package}: `pip install "):
        load_model(folder)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (BNB, "bitsandbytes, load_in_4bit, quant_type nf4"),
        (GPTQ, "gptq, bits 4, group_size 128, sym"),
        (PACKED, "compressed-tensors, format int-quantized, num_bits 8, activations num_bits 8"),
        (TORCHAO, "torchao, type Int8WeightOnlyConfig"),
        ({**BNB, "load_in_4bit": False, "load_in_8bit": True}, "bitsandbytes, load_in_8bit"),
        ({}, "unknown"),
    ],
)
def test_a_quantisation_is_told_in_words(settings: dict[str, Any], words: str) -> None:
    assert told(settings) == words


def test_modules_of_before_the_details_were_told_stay_loadable(tiny: LoadedModel) -> None:
    running = {"dtype": "float32", "quantisation": told(GPTQ)}
    assert computed_in(told(GPTQ)) == "gptq" and computed_in(f"{FP8_TOLD}, dequantised") is None
    make_module(tiny.identity, calibrated={"dtype": "float32", "quantisation": "gptq"}).require_numerics(running)
    plain = make_module(tiny.identity)
    plain.require_numerics({"dtype": "float32", "quantisation": f"{FP8_TOLD}, dequantised"})
    with pytest.raises(ModelMismatch, match="float32, and the model runs in float32 with gptq, bits 4, group_size 128"):
        plain.require_numerics(running)


class Silent(nn.Linear):
    """A product whose kernel knows no gradient."""

    def forward(self, states: Tensor) -> Tensor:
        """Without one."""
        return super().forward(states.detach())


def test_a_product_without_a_gradient_is_refused_where_the_fit_needs_it(quantised: Path) -> None:
    loaded = load_model(quantised)
    require_gradients(loaded.model, [0])
    mlp: Any = decoder_layers(loaded.model)[2].mlp
    plain, mlp.down_proj = mlp.down_proj, Silent(64, 32, bias=False)
    with pytest.raises(UnsupportedArchitecture, match=r"'model\.layers\.2\.mlp\.down_proj' \(Silent\).* gate 'auto'"):
        require_gradients(loaded.model, [0, 2])
    require_gradients(loaded.model, [2])  # the last layer's gradient passes the head alone
    mlp.down_proj, model = plain, loaded.model
    model.lm_head = Silent(32, int(model.lm_head.out_features), bias=False)  # type: ignore[union-attr, arg-type]
    with pytest.raises(UnsupportedArchitecture, match=r"'lm_head' \(Silent\).* measured on this one"):
        require_gradients(loaded.model, [2])


class Scaled(torch.Tensor):
    """Whole numbers with a scale that stand for a weight, as some libraries keep them."""

    @staticmethod
    def __new__(cls, numbers: Tensor, scale: Tensor) -> Scaled:
        made: Scaled = torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=torch.float32)  # type: ignore[attr-defined]
        made.numbers, made.scale = numbers, scale  # type: ignore[attr-defined]
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["numbers", "scale"], None

    @staticmethod
    def __tensor_unflatten__(parts: Any, *_: Any) -> Scaled:
        return Scaled(parts["numbers"], parts["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise RuntimeError(f"{func} is not known")


def test_weights_that_stand_for_other_tensors_are_identified_by_those(tiny_checkpoint: TinyCheckpoint) -> None:
    loaded = load_model(tiny_checkpoint("qwen2"))

    def of(number: int, scale: float) -> str:
        weight = Scaled(torch.full((64, 32), number, dtype=torch.int8), torch.tensor([scale]))
        mlp: Any = decoder_layers(loaded.model)[0].mlp
        mlp.up_proj.weight = nn.Parameter(weight, requires_grad=False)
        return identify(loaded.model, loaded.tokenizer).fingerprint

    assert of(1, 0.5) == of(1, 0.5)
    assert len({of(1, 0.5), of(2, 0.5), of(1, 0.25)}) == 3
    remember(loaded.model, GPTQ)
    assert identify(loaded.model, loaded.tokenizer).quantisation == "gptq, bits 4, group_size 128, sym, dequantised"
