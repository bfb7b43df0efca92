"""Two models are the same if and only if their fingerprints are equal."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file

from tests.core.conftest import TinyCheckpoint
from tests.core.test_architectures import (
    PROMPTS,
    generate,
    make_adapter,
)
from tests.support.repository import ROOT
from unbind_core.architecture import identify, load_model, unwrap
from unbind_core.module import UnbindModule


def test_an_adapters_identity_is_its_own_and_the_same_merged_or_not(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    base = tiny_checkpoint("qwen2")
    adapter = make_adapter(base, tmp_path / "one")
    identity = load_model(base, adapter).identity
    assert load_model(base, adapter, merge=False).identity == identity
    assert load_model(base, adapter, dtype=torch.bfloat16).identity == identity
    assert identity.fingerprint != load_model(base).identity.fingerprint
    named = make_adapter(base, tmp_path / "named", name="other")
    assert load_model(base, named).identity == identity
    assert load_model(base, make_adapter(base, tmp_path / "two", seed=2)).identity != identity
    assert load_model(base, make_adapter(base, tmp_path / "three", alpha=8)).identity != identity


def adapted(base: Path, *folders: Path) -> tuple[Any, Callable[[], str]]:
    """A model with adapters a, b, ... beside its weights, and what its fingerprint is as it runs."""
    loaded = load_model(base)
    model: Any = PeftModel.from_pretrained(loaded.model, str(folders[0]), adapter_name="a")
    for name, folder in zip("bc", folders[1:], strict=False):
        model.load_adapter(str(folder), adapter_name=name)
    return model, lambda: identify(model, loaded.tokenizer).fingerprint


def lora_layers(model: Any) -> list[Any]:
    return [layer for layer in model.modules() if isinstance(layer, LoraLayer)]


def test_of_several_adapters_those_that_act_are_the_models(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    base = tiny_checkpoint("qwen2")
    one, two = make_adapter(base, tmp_path / "one"), make_adapter(base, tmp_path / "two", seed=2)
    alone = [load_model(base, folder).identity.fingerprint for folder in (one, two)]
    plain = load_model(base).identity.fingerprint
    model, found = adapted(base, one, two)
    assert found() == alone[0]
    model.set_adapter("b")
    assert found() == alone[1]
    with model.disable_adapter():
        assert found() == plain
    assert found() == alone[1]
    model.base_model.set_adapter(["a", "b"])
    assert len({found(), *alone, plain}) == 4
    model.base_model.set_adapter("a")
    layer = lora_layers(model)[0]
    layer.set_adapter("b")  # in one layer the other
    assert len({found(), *alone, plain}) == 4
    layer.set_adapter("a")
    assert found() == alone[0]
    model.merge_adapter()
    assert found() == identify(load_model(base, one).model, load_model(base).tokenizer).fingerprint


def test_the_scale_that_an_adapter_runs_at_is_the_models(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    base = tiny_checkpoint("qwen2")
    one = make_adapter(base, tmp_path / "one")
    alone, double = (
        load_model(base, folder).identity.fingerprint
        for folder in (one, make_adapter(base, tmp_path / "double", alpha=32))
    )
    model, found = adapted(base, one)
    for layer in lora_layers(model):
        layer.set_scale("a", 2)
    assert found() == double  # the same product
    lora_layers(model)[0].set_scale("a", 3)
    assert found() not in (alone, double)
    for layer in lora_layers(model):
        layer.set_scale("a", 0)
    assert found() == load_model(base).identity.fingerprint
    for layer in lora_layers(model):
        layer.set_scale("a", 1)
    assert found() == alone


def test_a_layer_that_an_adapter_replaces_counts_while_it_does(tiny_checkpoint: TinyCheckpoint) -> None:
    loaded = load_model(tiny_checkpoint("llama"))
    model: Any = get_peft_model(loaded.model, LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]))
    found = lambda: identify(model, loaded.tokenizer).fingerprint  # noqa: E731
    before = found()
    with model.disable_adapter():
        assert found() == loaded.identity.fingerprint != before
    with torch.no_grad():
        model.base_model.model.lm_head.modules_to_save["default"].weight += 0.5
    assert found() != before
    with model.disable_adapter():
        assert found() == loaded.identity.fingerprint


def test_the_demo_s_adapter_has_the_identity_that_stored_modules_carry() -> None:
    for merge in (True, False):
        loaded = load_model(ROOT / "server/demo/base", ROOT / "server/demo/adapter", merge=merge)
        UnbindModule.load(ROOT / "modules/demo-a.safetensors", model=loaded.identity)


def test_identity_does_not_depend_on_place_or_use(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    path = tiny_checkpoint("qwen2")
    loaded = load_model(path)
    shutil.copytree(path, tmp_path / "elsewhere")
    assert load_model(tmp_path / "elsewhere").identity.fingerprint == loaded.identity.fingerprint
    loaded.tokenizer(PROMPTS, padding=True, truncation=True, max_length=3)
    generate(loaded)
    unwrap(loaded.model).set_attn_implementation("eager")  # type: ignore[operator]
    assert identify(loaded.model, loaded.tokenizer, "qwen2") == loaded.identity


def test_identity_survives_saving_again_and_library_versions(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    loaded = load_model(tiny_checkpoint("qwen2"))
    model: Any = loaded.model
    model.save_pretrained(tmp_path)
    loaded.tokenizer.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"transformers_version": "9.9.9", "dtype": "bfloat16", "use_cache": False, "field_of_tomorrow": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_model(tmp_path).identity.fingerprint == loaded.identity.fingerprint


def change_weight(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    key = sorted(key for key in tensors if key.endswith("down_proj.weight"))[-1]
    tensors[key][0, 0] += 0.5
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def change_tokenizer(folder: Path) -> None:
    state = json.loads((folder / "tokenizer.json").read_text())
    state["model"]["merges"] = state["model"]["merges"][:-1]
    (folder / "tokenizer.json").write_text(json.dumps(state))


def change_rope(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 12345.0
    (folder / "config.json").write_text(json.dumps(config))


def change_epsilon(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))


@pytest.mark.parametrize("change", [change_weight, change_tokenizer, change_rope, change_epsilon])
def test_identity_differs_when_the_model_does(change: Any, tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    shutil.copytree(tiny_checkpoint("qwen2"), tmp_path / "qwen2")
    before = load_model(tmp_path / "qwen2").identity
    change(tmp_path / "qwen2")
    assert load_model(tmp_path / "qwen2").identity.fingerprint != before.fingerprint


def test_two_families_and_two_seeds_are_four_models(tiny_checkpoint: TinyCheckpoint) -> None:
    paths = [tiny_checkpoint(family, seed=seed) for family in ("qwen2", "llama") for seed in (0, 1)]
    assert len({load_model(path).identity.fingerprint for path in paths}) == 4
