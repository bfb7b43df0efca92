"""One-pass gradients equal one autograd call per target, on every family, dtype and window shape."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, MambaConfig, MambaForCausalLM

from tests.core.conftest import FAMILIES, TinyCheckpoint
from unbind_core.architecture import load_model, unwrap
from unbind_core.errors import UnsupportedArchitecture
from unbind_core.running.capture import capture, capture_per_target, capture_states, check_exactness, relative_errors
from unbind_core.windows import Window, make_batch

LAYERS = [0, 1, 2]


def window(length: int = 24, first: int = 5, seed: int = 0) -> Window:
    ids = torch.randint(5, 300, (length,), generator=torch.Generator().manual_seed(seed))
    return Window(tuple(ids.tolist()), first, 0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_one_backward_gives_each_targets_own_gradient(
    family: str, dtype: torch.dtype, limit: float, tiny_checkpoint: TinyCheckpoint
) -> None:
    if family == "gemma2" and dtype is torch.float64:
        limit = 1e-6  # the library's own eager attention, which the reference runs on, takes its softmax in float32
    model = load_model(tiny_checkpoint(family), dtype=dtype).model
    reference = capture_per_target(model, window(), LAYERS)
    found = capture(model, reference.batch, LAYERS)
    assert max(relative_errors(found, reference).values()) <= limit
    for layer in LAYERS:
        torch.testing.assert_close(found.states[layer], reference.states[layer], rtol=10 * limit, atol=10 * limit)


@pytest.mark.parametrize("family", ["qwen2", "gpt_bigcode"])
def test_bfloat16_agrees_to_its_precision(family: str, tiny_checkpoint: TinyCheckpoint) -> None:
    model = load_model(tiny_checkpoint(family), dtype=torch.bfloat16).model
    reference = capture_per_target(model, window(), LAYERS)
    assert max(relative_errors(capture(model, reference.batch, LAYERS), reference).values()) < 0.1


def test_the_summed_loss_gradient_is_something_else(tiny_checkpoint: TinyCheckpoint) -> None:
    """The error that exact capture avoids is large, so the tests above can fail."""
    model = load_model(tiny_checkpoint("qwen2")).model
    reference = capture_per_target(model, window(), LAYERS)
    states: list[torch.Tensor] = []
    handle = model.model.layers[0].register_forward_hook(
        lambda m, a, o: states.append(o.detach().requires_grad_()) or states[0]
    )
    loss = torch.nn.functional.cross_entropy(
        model(reference.batch.ids).logits[0, :-1][reference.batch.predictors[0, :-1]],
        reference.batch.next_tokens(),
        reduction="sum",
    )
    handle.remove()
    (summed,) = torch.autograd.grad(loss, states)
    error = (summed[0][reference.batch.predictors[0]] - reference.gradients[0]).norm() / reference.gradients[0].norm()
    assert error > 0.05


def test_windows_longer_than_an_attention_block_are_exact(tiny_checkpoint: TinyCheckpoint) -> None:
    model = load_model(tiny_checkpoint("qwen2")).model
    long = window(length=400, first=392)
    reference = capture_per_target(model, long, LAYERS)
    assert max(relative_errors(capture(model, reference.batch, LAYERS), reference).values()) <= 1e-5


def test_padding_in_a_batch_does_not_matter(tiny_checkpoint: TinyCheckpoint) -> None:
    model = load_model(tiny_checkpoint("llama"), dtype=torch.float64).model
    windows = [window(12, 3, 1), window(30, 9, 2), window(21, 20, 3)]
    together = capture(model, make_batch(windows, 0), LAYERS)
    alone = [capture(model, make_batch([w], 0), LAYERS) for w in windows]
    for layer in LAYERS:
        torch.testing.assert_close(together.states[layer], torch.cat([a.states[layer] for a in alone]))
        torch.testing.assert_close(together.gradients[layer], torch.cat([a.gradients[layer] for a in alone]))


def test_the_model_is_left_as_it_was(tiny_checkpoint: TinyCheckpoint) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint("qwen2"))
    model.train()
    before = model.config._attn_implementation
    ids = make_batch([window()], 0)
    capture(model, ids, LAYERS)
    capture_states(model, ids, LAYERS)
    assert model.training and model.config._attn_implementation == before
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_state_space_model_is_refused_by_name() -> None:
    config = MambaConfig(vocab_size=300, hidden_size=16, num_hidden_layers=3, state_size=4)
    model = MambaForCausalLM(config)
    with pytest.raises(UnsupportedArchitecture, match=r"Mamba.* any has guards"):
        capture(model, make_batch([window()], 0), LAYERS)


def test_the_self_check_passes_a_good_model_and_stops_a_bad_one(tiny_checkpoint: TinyCheckpoint) -> None:
    model = load_model(tiny_checkpoint("qwen2")).model
    assert check_exactness(model, window(), LAYERS) <= 1e-5

    class Leaking(torch.nn.Module):
        """Mixes neighbouring positions after a layer, outside attention."""

        def __init__(self, layer: torch.nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, *args: object, **kwargs: object) -> torch.Tensor:
            out: torch.Tensor = self.layer(*args, **kwargs)
            return out + torch.nn.functional.pad(out, (0, 0, 1, 0))[:, :-1]

    layers = unwrap(model).model.layers
    layers[1] = Leaking(layers[1])
    with pytest.raises(UnsupportedArchitecture, match="off by"):
        check_exactness(model, window(), LAYERS)
