"""Packed linear layers compute what the model's own do, only where they should, and leave no trace."""

from __future__ import annotations

import pytest
import torch

from tests.core.conftest import FAMILIES, TinyCheckpoint
from unbind_core.architecture import LoadedModel, load_model
from unbind_core.cpu import linears
from unbind_core.cpu.linears import FEW, PackedLinears, packed_linears

IDS = torch.arange(3, 27).view(2, 12)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_family_gives_the_same_logits(tiny_checkpoint: TinyCheckpoint, family: str, dtype: torch.dtype) -> None:
    model = load_model(tiny_checkpoint(family), dtype=dtype).model
    before = {name: dict(part.__dict__) for name, part in model.named_modules()}
    with torch.inference_mode():
        expected = model(IDS).logits
        with packed_linears(model):
            found, one = model(IDS).logits, model(IDS[:1, :1]).logits
        assert torch.equal(model(IDS).logits, expected)
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))
    torch.testing.assert_close(one, expected[:1, :1], rtol=tolerance, atol=tolerance * float(expected.abs().max()))
    assert {name: dict(part.__dict__) for name, part in model.named_modules()} == before


def test_nothing_is_packed_in_a_type_that_the_processor_cannot_arrange(
    tiny_checkpoint: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without AVX-512 oneDNN refuses bfloat16 weights, and a fit of such a model ended with its error."""
    model = load_model(tiny_checkpoint("qwen2"), dtype=torch.bfloat16).model
    can = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    packed = PackedLinears(model)
    assert bool(packed.layers) == can
    packed.remove()
    monkeypatch.setattr(linears, "_arranged", lambda dtype: dtype is torch.float32)
    assert not PackedLinears(model).layers


def test_a_pass_with_gradients_takes_the_plain_product(tiny: LoadedModel) -> None:
    embedded = tiny.model.get_input_embeddings()(IDS).detach().requires_grad_(True)

    def gradient() -> torch.Tensor:
        loss = tiny.model(inputs_embeds=embedded).logits.float().square().sum()
        return torch.autograd.grad(loss, embedded)[0]

    with torch.enable_grad():
        expected = gradient()
        with packed_linears(tiny.model):
            assert torch.equal(gradient(), expected)


def test_packed_weights_are_used_only_while_entered(tiny: LoadedModel) -> None:
    with torch.inference_mode():
        expected = tiny.model(IDS).logits
        packed = PackedLinears(tiny.model)
        try:
            assert packed.layers and not PackedLinears(tiny.model).layers  # they are packed once
            layer = packed.layers[0]
            kept = layer.weight.clone()
            assert torch.equal(tiny.model(IDS).logits, expected)
            with packed:
                inside = tiny.model(IDS).logits
                layer.weight.zero_()  # which the copies do not see
                assert torch.equal(tiny.model(IDS).logits, inside)
            assert not torch.allclose(tiny.model(IDS).logits, expected)
            layer.weight.copy_(kept)
        finally:
            packed.remove()
        assert torch.equal(tiny.model(IDS).logits, expected)


def test_few_rows_take_the_weights_as_they_lie(tiny: LoadedModel) -> None:
    with torch.inference_mode(), packed_linears(tiny.model):
        layer = next(part for part in tiny.model.modules() if "forward" in part.__dict__)
        states = torch.ones(1, FEW, layer.in_features)
        kept = layer.weight.clone()
        packed, plain = layer(states), layer(states[:, 1:])
        layer.weight.zero_()  # which the copies do not see
        assert torch.equal(layer(states), packed) and not torch.equal(layer(states[:, 1:]), plain)
        layer.weight.copy_(kept)


def test_nothing_is_packed_where_memory_is_short_or_torch_lacks_the_operator(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as short:
        short.setattr(linears, "free_bytes", lambda _: 1024)
        assert not PackedLinears(tiny.model).layers
    with monkeypatch.context() as lacking:
        lacking.setattr(torch.backends.mkldnn, "is_available", lambda: False)
        assert not PackedLinears(tiny.model).layers
