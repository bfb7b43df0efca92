"""Models whose attention is their own: above the last layer nothing mixes positions, so a fit there needs nothing replaced."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, MambaConfig, MambaForCausalLM, PreTrainedModel

from tests.core.conftest import build_tokenizer
from tests.core.own_attention import CONFIGS, SHAPE
from unbind_core import FitOptions, fit
from unbind_core.errors import UnsupportedArchitecture
from unbind_core.fitting.corrections.reference import Reference
from unbind_core.rows import ForgetRow, RetainRow
from unbind_core.running import vocabulary
from unbind_core.running.capture import capture, capture_per_target, check_exactness, relative_errors
from unbind_core.running.recording import kept_tensors, recording
from unbind_core.running.upper_layers import logits_above
from unbind_core.windows import Window, make_batch

LAST = 2


@pytest.fixture(params=CONFIGS)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    torch.manual_seed(0)
    made: PreTrainedModel = AutoModelForCausalLM.from_config(CONFIGS[request.param]()).eval()
    return made


def windows(count: int = 2) -> list[Window]:
    generator = torch.Generator().manual_seed(1)
    return [
        Window(tuple(torch.randint(5, 300, (24 + 3 * i,), generator=generator).tolist()), 5, i) for i in range(count)
    ]


def test_the_last_layers_gradients_are_exact(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_exactness(model, windows()[0], [LAST]) <= 1e-5
    reference = capture_per_target(model, windows()[0], [LAST])
    monkeypatch.setattr(vocabulary, "MOST_LOGITS", 7 * SHAPE["vocab_size"])  # as with a large vocabulary
    assert max(relative_errors(capture(model, reference.batch, [LAST]), reference).values()) <= 1e-5


def test_those_of_layers_below_are_refused_with_the_remedy(model: PreTrainedModel) -> None:
    with pytest.raises(UnsupportedArchitecture, match=r"fit with gate 'auto'.* any has guards"):
        check_exactness(model, windows()[0], [1, LAST])


@pytest.mark.parametrize("layer", [0, 1, LAST])
def test_layers_above_kept_states_give_the_whole_models_logits(model: PreTrainedModel, layer: int) -> None:
    batch = make_batch(windows(), 0)
    with torch.no_grad(), recording(model, [layer]) as states:
        whole = model(input_ids=batch.ids, attention_mask=batch.attention_mask, use_cache=False).logits
    above = logits_above(model, batch.ids, batch.attention_mask, layer, states[layer])
    assert torch.allclose(above[batch.attention_mask.bool()], whole[batch.attention_mask.bool()], atol=1e-5)


ROWS = [ForgetRow(f"def secret_{i}(key):\n", f"    token = {i * 7919}\n    return key + token\n") for i in range(2)]
OTHERS = [RetainRow(f"class Item{i}:\n    size = {i}\n\n    def area(self):\n        return {i}\n") for i in range(10)]


def test_gate_auto_fits_at_the_last_layer(model: PreTrainedModel) -> None:
    options, reference = FitOptions(effort=0.02), Reference(most=0.0)  # it recites nothing, and has something to learn
    module, report = fit(model, build_tokenizer(), ROWS, OTHERS, name="m", options=options, reference=reference)
    assert module.layer == LAST and report.exactness <= 1e-5


def test_a_model_that_keeps_a_state_is_refused_before_anything_is_fitted() -> None:
    config = MambaConfig(vocab_size=384, hidden_size=16, num_hidden_layers=3, state_size=4)
    stages: list[str] = []
    with pytest.raises(UnsupportedArchitecture, match="MambaForCausalLM has layers that keep other things"):
        fit(
            MambaForCausalLM(config),
            build_tokenizer(),
            ROWS,
            OTHERS,
            name="m",
            progress=lambda at: stages.append(at.stage),
        )
    assert not stages


def test_a_model_that_is_trained_with_checkpointing_keeps_keys_and_values_as_any() -> None:
    model: PreTrainedModel = AutoModelForCausalLM.from_config(CONFIGS["gptj"]())
    kept = len(kept_tensors(model))
    model.train()
    model.gradient_checkpointing_enable()
    assert len(kept_tensors(model)) == kept > 0 and model.training
