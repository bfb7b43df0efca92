"""The hooks of an intervention: one step at a time, and nothing left behind."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.core.applying.conftest import PROMPTS, encoded, hooks_on
from unbind_core.applying.attach import attach
from unbind_core.applying.bank import ModuleBank
from unbind_core.applying.hooks import Intervention
from unbind_core.applying.passes import Pass
from unbind_core.architecture import LoadedModel, decoder_layers
from unbind_core.errors import UnbindError, UnknownModule, UnsupportedArchitecture


def test_no_hook_is_left_after_an_exception(tiny: LoadedModel, bank: ModuleBank) -> None:
    with pytest.raises(ZeroDivisionError), attach(tiny.model, bank):
        raise ZeroDivisionError
    assert hooks_on(tiny.model) == 0
    with (
        pytest.raises(ZeroDivisionError),
        Intervention(tiny.model) as intervention,
        intervention.step(bank.select([{"a": 1.0}])),
    ):
        raise ZeroDivisionError
    assert hooks_on(tiny.model) == 0 and intervention.current is None
    with pytest.raises(UnknownModule), attach(tiny.model, bank, ["nobody"]):
        pass
    assert hooks_on(tiny.model) == 0


@pytest.mark.parametrize("whole", [True, False], ids=["model", "forward"])
def test_a_compiled_model_is_edited_inside_and_plain_outside(tiny: LoadedModel, bank: ModuleBank, whole: bool) -> None:
    model, inputs = copy.deepcopy(tiny.model), encoded(tiny)
    other, late = torch.compile(nn.Linear(2, 2), backend="eager"), torch.compile(model, backend="eager")
    if whole:
        model.compile(backend="eager")
    else:
        model.forward = torch.compile(model.forward, backend="eager")  # type: ignore[method-assign]
    with torch.no_grad():
        plain = model(**inputs).logits
        with attach(tiny.model, bank):
            expected = tiny.model(**inputs).logits
        with attach(model, bank):
            with attach(tiny.model, bank):  # another model's block does not end this one's
                other(torch.ones(2))
            assert torch.allclose(model(**inputs).logits, expected, atol=1e-4)
            late(**inputs)
        assert torch.allclose(model(**inputs).logits, plain, atol=1e-4)
        assert torch.allclose(late(**inputs).logits, plain, atol=1e-4)
        assert not torch.allclose(plain, expected, atol=1e-2)
        with pytest.raises(ZeroDivisionError), attach(model, bank):
            raise ZeroDivisionError
        with torch.compiler.set_stance("fail_on_recompile"), pytest.raises(RuntimeError, match="recompile"):
            torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))  # compiling is on again


def test_a_failing_forward_pass_leaves_the_next_one_in_order(tiny: LoadedModel, bank: ModuleBank) -> None:
    with torch.no_grad(), attach(tiny.model, bank, ["a"]):
        expected = tiny.model(**encoded(tiny)).logits
        with pytest.raises(IndexError):
            tiny.model(torch.tensor([[10**6]]))
        assert torch.equal(tiny.model(**encoded(tiny)).logits, expected)


def test_a_step_inside_a_step_is_refused(tiny: LoadedModel, bank: ModuleBank) -> None:
    selection = bank.select([{"a": 1.0}])
    with Intervention(tiny.model) as intervention, intervention.step(selection):
        with pytest.raises(UnbindError, match="under way"), intervention.step(selection):
            pass
        assert intervention.current is not None
    with pytest.raises(UnbindError, match="not attached"), intervention.step(selection):
        pass


def test_a_copy_of_the_model_knows_nothing_of_a_step_on_the_model(tiny: LoadedModel, bank: ModuleBank) -> None:
    inputs = encoded(tiny, PROMPTS[:1])
    with torch.no_grad(), Intervention(tiny.model) as intervention:
        other: Any = copy.deepcopy(tiny.model)
        plain = other(**inputs).logits
        with intervention.step(bank.select([{"a": 1.0}])):
            assert torch.equal(other(**inputs).logits, plain)
            assert not torch.equal(tiny.model(**inputs).logits, plain)


def test_one_model_carries_one_intervention(tiny: LoadedModel, bank: ModuleBank) -> None:
    with Intervention(tiny.model):
        with pytest.raises(UnbindError, match="already"), attach(tiny.model, bank):
            pass
        assert len(decoder_layers(tiny.model)) == hooks_on(tiny.model)
    assert hooks_on(tiny.model) == 0


def test_an_engines_step_takes_flat_row_indices_and_a_mask(tiny: LoadedModel, bank: ModuleBank) -> None:
    inputs = encoded(tiny)
    selection = bank.select([{"a": 1.0}, {}])
    with torch.no_grad():
        with attach(tiny.model, bank, [{}, {"a": 1.0}, {"a": 1.0}]):
            expected = tiny.model(**inputs).logits
        before = bank.counts()["a"]["prefill"][0]
        with Intervention(tiny.model) as intervention:
            real = inputs["attention_mask"].bool()
            with intervention.step(selection, Pass(rows=torch.tensor([1, 0, 0]), real=real)):
                assert torch.equal(tiny.model(**inputs).logits, expected)
            with intervention.step(None):
                plain = tiny.model(**inputs).logits
            assert torch.equal(plain, tiny.model(**inputs).logits)
    assert bank.counts()["a"]["prefill"][0] - before == before


def test_layers_that_do_not_return_states_are_refused(bank: ModuleBank) -> None:
    config = Qwen2Config(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=64,
    )

    class Wordy(nn.Module):
        def forward(self, hidden_states: Tensor, **_: Any) -> Any:
            return {"states": hidden_states}

    model = Qwen2ForCausalLM(config).eval()
    model.model.layers[0] = Wordy()
    with torch.no_grad(), attach(model, bank), pytest.raises(UnsupportedArchitecture, match="Wordy returns dict"):
        model(torch.tensor([[1, 2, 3]]))
    assert hooks_on(model) == 0


def test_one_layer_object_used_twice_is_refused(bank: ModuleBank) -> None:
    model = Qwen2ForCausalLM(
        Qwen2Config(
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=2,
            vocab_size=64,
        )
    )
    model.model.layers[1] = model.model.layers[0]
    with pytest.raises(UnsupportedArchitecture, match="several places"), Intervention(model):
        pass
    assert hooks_on(model) == 0
