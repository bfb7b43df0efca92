"""Every supported family from a checkpoint on disk: layers, adapters, and an edit that equals one by hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from tests.core.conftest import (
    FAMILIES,
    TinyCheckpoint,
    build_tokenizer,
    make_module,
    make_network_module,
    save_checkpoint,
)
from unbind_core.applying.attach import attach
from unbind_core.applying.bank import ModuleBank
from unbind_core.architecture import LoadedModel, decoder_layers, identify, load_model, unwrap
from unbind_core.errors import UnbindError, UnsupportedArchitecture
from unbind_core.module import UnbindModule

PROMPTS = ["def add(first, second):", "for index in"]
TARGETS = {"gpt_bigcode": ["c_attn"], "deepseek_v3": ["q_b_proj", "kv_b_proj"]}


def make_adapter(base: Path, folder: Path, *, name: str = "default", seed: int = 1, alpha: int = 16) -> Path:
    """A LoRA adapter with weights that matter, saved by peft."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    family = model.config.model_type
    config = LoraConfig(r=4, lora_alpha=alpha, target_modules=TARGETS.get(family, ["q_proj", "v_proj"]))
    adapted = get_peft_model(model, config, adapter_name=name)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, value in adapted.named_parameters():
            if "lora_" in key:
                value.copy_(torch.randn(value.shape, generator=generator) * 0.3)
    adapted.save_pretrained(folder)
    return folder / name if name != "default" else folder


def one_module_bank(loaded: LoadedModel, **changes: Any) -> tuple[ModuleBank, UnbindModule]:
    module = make_module(loaded.identity, layer=1, **changes)
    bank = ModuleBank()
    bank.add(module)
    return bank, module


def by_hand(h: Tensor, module: UnbindModule) -> Tensor:
    """The paper's update of every state, written a second time and without the bank."""
    wide = h.float()
    a = torch.clamp((wide * module.w).sum(-1) - module.s_ref, min=0)
    gate = (a >= module.tau).float()
    return h - (module.kappa * gate * a).unsqueeze(-1).mul(module.v).to(h.dtype)


@contextmanager
def rewritten(layer: nn.Module, module: UnbindModule) -> Iterator[None]:
    """The layer's own forward replaced by one that edits its result; no hook is involved."""
    forward = layer.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        return (by_hand(out[0], module), *out[1:]) if isinstance(out, tuple) else by_hand(out, module)

    layer.forward = run  # type: ignore[method-assign]
    try:
        yield
    finally:
        del layer.forward


def inputs(loaded: LoadedModel) -> dict[str, Tensor]:
    tokens = loaded.tokenizer(PROMPTS, return_tensors="pt", padding=True, padding_side="left")
    return {"input_ids": tokens["input_ids"], "attention_mask": tokens["attention_mask"]}


def generate(loaded: LoadedModel) -> Any:
    model: Any = loaded.model
    return model.generate(
        **inputs(loaded),
        max_new_tokens=10,
        min_new_tokens=10,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )


def assert_hooked_equals_by_hand(loaded: LoadedModel, atol: float = 1e-3) -> None:
    bank, module = one_module_bank(loaded)
    plain = generate(loaded)
    with attach(loaded.model, bank):
        hooked = generate(loaded)
    with rewritten(decoder_layers(loaded.model)[1], module):
        expected = generate(loaded)
    assert torch.equal(hooked.sequences, expected.sequences)
    for ours, theirs in zip(hooked.logits, expected.logits, strict=True):
        assert torch.allclose(ours.float(), theirs.float(), atol=atol)
    assert not torch.allclose(hooked.logits[0], plain.logits[0])
    counts = bank.counts()["a"]
    assert counts["prefill"][0] == int(inputs(loaded)["attention_mask"].sum())
    assert counts["decode"][0] == 2 * 9
    assert torch.equal(generate(loaded).sequences, plain.sequences)


@pytest.mark.parametrize("family", FAMILIES)
def test_hooked_generation_equals_an_edit_by_hand(family: str, tiny_checkpoint: TinyCheckpoint) -> None:
    loaded = load_model(tiny_checkpoint(family))
    assert len(decoder_layers(loaded.model)) == loaded.identity.num_layers == 3
    assert loaded.identity.hidden_size == 32 and loaded.identity.name == family
    assert not loaded.model.training and not any(p.requires_grad for p in loaded.model.parameters())
    assert_hooked_equals_by_hand(loaded)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_decoder_layers_output_is_what_the_next_layer_reads(family: str, tiny_checkpoint: TinyCheckpoint) -> None:
    """The hook sees the residual stream after the whole block, not a part of it."""
    loaded = load_model(tiny_checkpoint(family))
    first, second = decoder_layers(loaded.model)[:2]
    seen: list[Tensor] = []
    handles = [
        first.register_forward_hook(lambda _m, _a, out: seen.append(out[0] if isinstance(out, tuple) else out)),
        second.register_forward_pre_hook(
            lambda _m, args, kw: seen.append(args[0] if args else kw["hidden_states"]), with_kwargs=True
        ),
    ]
    with torch.no_grad():
        loaded.model(**inputs(loaded))
    for handle in handles:
        handle.remove()
    assert torch.equal(seen[0], seen[1])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("merge", [True, False])
def test_adapters_are_hooked_merged_or_not(
    family: str, merge: bool, tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    base = tiny_checkpoint(family)
    loaded = load_model(base, make_adapter(base, tmp_path), merge=merge)
    assert (unwrap(loaded.model) is not loaded.model) is not merge
    assert isinstance(unwrap(loaded.model), PreTrainedModel)
    assert_hooked_equals_by_hand(loaded)
    with torch.no_grad():
        plain = load_model(base).model(**inputs(loaded)).logits
        assert not torch.allclose(loaded.model(**inputs(loaded)).logits, plain)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_hooked_and_has_the_identity_of_float32(family: str, tiny_checkpoint: TinyCheckpoint) -> None:
    path = tiny_checkpoint(family)
    half = load_model(path, dtype=torch.bfloat16)
    assert half.identity == load_model(path).identity == load_model(path, dtype=torch.float64).identity
    bank, module = one_module_bank(half)
    with torch.no_grad():
        with attach(half.model, bank):
            hooked = half.model(**inputs(half)).logits
        with rewritten(decoder_layers(half.model)[1], module):
            expected = half.model(**inputs(half)).logits
    assert hooked.dtype == torch.bfloat16
    assert torch.allclose(hooked.float(), expected.float(), atol=0.15, rtol=0.1)


def test_a_merged_checkpoint_answers_as_the_adapter_on_top(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    base = tiny_checkpoint("qwen2")
    adapter = make_adapter(base, tmp_path)
    merged, apart = load_model(base, adapter), load_model(base, adapter, merge=False)
    with torch.no_grad():
        assert torch.allclose(merged.model(**inputs(merged)).logits, apart.model(**inputs(apart)).logits, atol=1e-3)


def test_an_encoder_decoder_is_refused_by_name(tmp_path: Path) -> None:
    model = T5ForConditionalGeneration(
        T5Config(vocab_size=64, d_model=16, d_ff=16, d_kv=8, num_layers=2, num_heads=2, decoder_start_token_id=0)
    )
    with pytest.raises(UnsupportedArchitecture, match="T5ForConditionalGeneration is an encoder-decoder"):
        decoder_layers(model)
    model.save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedArchitecture, match="T5ForConditionalGeneration is an encoder-decoder"):
        load_model(tmp_path)


def test_a_state_space_model_has_blocks_that_can_be_hooked() -> None:
    torch.manual_seed(0)  # with some weights no gate opens on four tokens
    model = MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=16, state_size=4, num_hidden_layers=3)).eval()
    tokenizer = build_tokenizer()
    loaded = LoadedModel(model, tokenizer, identify(model, tokenizer))
    bank, module = one_module_bank(loaded, tau=0.0)
    ids = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad():
        with attach(model, bank):
            hooked = model(ids).logits
        with rewritten(decoder_layers(model)[1], module):
            assert torch.allclose(hooked, model(ids).logits, atol=1e-5)
        assert not torch.allclose(hooked, model(ids).logits)


def test_a_state_space_model_is_run_without_its_state_under_gates_that_remember() -> None:
    model: Any = MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=16, state_size=4, num_hidden_layers=3)).eval()
    tokenizer = build_tokenizer()
    bank = ModuleBank.of([make_network_module(identify(model, tokenizer))])
    ids = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad(), attach(model, bank):
        with pytest.raises(UnsupportedArchitecture, match=r"MambaModel: cache_params .* with use_cache=False"):
            model.generate(ids, max_new_tokens=2, pad_token_id=0)
        assert model.generate(ids, max_new_tokens=2, min_new_tokens=2, pad_token_id=0, use_cache=False).shape == (1, 6)


class Odd(PreTrainedModel):
    """A model whose layers carry no list of their own, then two."""

    def __init__(self, lists: int) -> None:
        super().__init__(PreTrainedConfig(num_hidden_layers=2, hidden_size=4))
        self.body = nn.Module()
        for i in range(lists):
            self.body.add_module(f"part{i}", nn.ModuleList(nn.Linear(4, 4) for _ in range(2)))


def test_layers_that_are_not_found_are_refused_with_the_remedy() -> None:
    with pytest.raises(UnsupportedArchitecture, match=r"Odd: no list of 2 decoder layers found; .*override="):
        decoder_layers(Odd(0))
    with pytest.raises(UnsupportedArchitecture, match=r"Odd: 2 lists \(body.part0, body.part1\)"):
        decoder_layers(Odd(2))
    with pytest.raises(UnsupportedArchitecture, match="Linear"):
        decoder_layers(nn.Linear(2, 2))


def test_an_override_names_the_layers() -> None:
    model = Odd(2)
    assert decoder_layers(model, "body.part1") == list(model.body.part1)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedArchitecture, match=r"Odd has no part 'body.layers'; .*body.part0, body.part1"):
        decoder_layers(model, "body.layers")
    with pytest.raises(UnsupportedArchitecture, match="'body' of Odd is not a list of layers"):
        decoder_layers(model, "body")


def test_a_device_that_is_not_there_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    for device in ("nothing", f"cuda:{torch.cuda.device_count()}"):
        with pytest.raises(UnbindError, match=f"device: '{device}' cannot be used here .*; choose cpu, or cuda where"):
            load_model(tmp_path / "nowhere", device=device)


def test_missing_and_damaged_folders_are_refused_with_their_path(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    with pytest.raises(UnbindError, match=r"model: .*nowhere.* is not a directory"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(UnbindError, match=r"model: .* has no config.json"):
        load_model(tmp_path)
    base = tiny_checkpoint("qwen2")
    with pytest.raises(UnbindError, match=r"adapter: .*nowhere.* is not a directory"):
        load_model(base, tmp_path / "nowhere")
    with pytest.raises(UnbindError, match=r"adapter: .* has no adapter_config.json"):
        load_model(base, base)
    broken = save_checkpoint("qwen2", tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(UnbindError, match=r"model: .*broken.* could not be loaded"):
        load_model(broken)
    damaged = save_checkpoint("qwen2", tmp_path / "damaged")
    tensors = load_file(damaged / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, damaged / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnbindError, match=r"weights are missing: model.layers.1.mlp.up_proj.weight"):
        load_model(damaged)


def test_an_adapter_with_weights_missing_is_refused(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    base = tiny_checkpoint("qwen2")
    adapter = make_adapter(base, tmp_path)
    tensors = load_file(adapter / "adapter_model.safetensors")
    tensors.popitem()
    save_file(tensors, adapter / "adapter_model.safetensors")
    with pytest.raises(UnbindError, match=r"adapter: .* does not fit the model .*missing adapter keys"):
        load_model(base, adapter)


def test_an_adapter_of_another_model_is_refused(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    adapter = make_adapter(tiny_checkpoint("gpt_bigcode"), tmp_path)
    with pytest.raises(UnbindError, match=r"adapter: .* does not fit the model"):
        load_model(tiny_checkpoint("qwen2"), adapter)
