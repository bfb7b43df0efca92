"""Modules attached to a running model: the right rows, the right counts, and no trace afterwards."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.core.applying.conftest import PROMPTS, encoded, generate, hooks_on
from tests.core.conftest import make_module
from unbind_core.applying.attach import attach
from unbind_core.applying.bank import ModuleBank
from unbind_core.architecture import LoadedModel, decoder_layers, decoder_stack
from unbind_core.errors import ModelMismatch, UnbindError


def test_modules_change_the_text_and_leave_no_trace(tiny: LoadedModel, bank: ModuleBank) -> None:
    plain = generate(tiny)
    with attach(tiny.model, bank):
        assert generate(tiny) != plain
    assert hooks_on(tiny.model) == 0
    assert generate(tiny) == plain


def test_a_row_alone_equals_the_row_in_a_padded_mixed_batch(tiny: LoadedModel, bank: ModuleBank) -> None:
    wanted = [{"a": 1.0}, {}, {"a": 0.5, "b": 2.0}]
    with attach(tiny.model, bank, wanted):
        together = generate(tiny)
    for prompt, names, row in zip(PROMPTS, wanted, together, strict=True):
        with attach(tiny.model, bank, names):
            assert generate(tiny, [prompt])[0] == row
    assert together[1] == generate(tiny)[1]


def test_a_row_without_modules_has_the_plain_models_logits_to_the_last_bit(tiny: LoadedModel, bank: ModuleBank) -> None:
    inputs = encoded(tiny)
    with torch.no_grad():
        plain = tiny.model(**inputs).logits
        with attach(tiny.model, bank, [{"a": 1.0, "b": 1.0}, {}, {"b": 1.0}]):
            mixed = tiny.model(**inputs).logits
        with attach(tiny.model, bank, [{}, {}, {}]):
            untouched = tiny.model(**inputs).logits
        with attach(tiny.model, bank, dict.fromkeys("ab", 0.0)):
            measured = tiny.model(**inputs).logits
    assert torch.equal(mixed[1], plain[1]) and not torch.allclose(mixed[0], plain[0])
    assert torch.equal(untouched, plain)
    assert torch.equal(measured, plain)


def test_gradient_checkpointing_is_refused_where_modules_apply(tiny: LoadedModel, bank: ModuleBank) -> None:
    model: Any = copy.deepcopy(tiny.model).requires_grad_(True).train()
    model.gradient_checkpointing_enable()
    inputs = encoded(tiny)
    with attach(model, bank):
        with pytest.raises(UnbindError, match="gradient_checkpointing_disable"):
            model(**inputs, use_cache=False)
        with torch.no_grad():
            model(**inputs, use_cache=False)
        model.eval()(**inputs, use_cache=False)
        model.gradient_checkpointing_disable()
        model.train()(**inputs, use_cache=False).logits.sum().backward()
    model.gradient_checkpointing_enable()
    with attach(model, bank, []):
        model(**inputs, use_cache=False).logits.sum().backward()


def test_left_padding_does_not_change_a_rows_logits(tiny: LoadedModel, bank: ModuleBank) -> None:
    inputs = encoded(tiny)
    with torch.no_grad(), attach(tiny.model, bank):
        padded = tiny.model(**inputs, position_ids=(inputs["attention_mask"].cumsum(1) - 1).clamp(0)).logits
        for row, prompt in enumerate(PROMPTS):
            alone = tiny.model(**encoded(tiny, [prompt])).logits[0]
            assert torch.allclose(padded[row, -alone.shape[0] :], alone, atol=1e-4)


def test_cached_decoding_equals_one_pass_over_the_whole_text(tiny: LoadedModel, bank: ModuleBank) -> None:
    prompt = encoded(tiny, PROMPTS[:1])["input_ids"]
    with attach(tiny.model, bank):
        new = torch.tensor(generate(tiny, PROMPTS[:1]))
        with torch.no_grad():
            logits = tiny.model(torch.cat([prompt, new], dim=1)).logits
    assert torch.equal(logits[:, prompt.shape[1] - 1 : -1].argmax(-1), new)


def test_layers_nobody_asked_for_are_not_touched(tiny: LoadedModel, bank: ModuleBank) -> None:
    seen: list[tuple[int, bool]] = []
    layers = decoder_layers(tiny.model)

    def remember(index: int) -> Any:
        forward = layers[index].forward

        def run(*args: Any, **kwargs: Any) -> Any:
            made[index] = forward(*args, **kwargs)
            return made[index]

        return run

    def compare(index: int) -> Any:
        return lambda _module, _args, output: seen.append((index, output is made[index]))

    made: dict[int, Any] = {}
    handles: list[Any] = []
    try:
        with attach(tiny.model, bank, ["b"]), torch.no_grad():
            for index, layer in enumerate(layers):
                layer.forward = remember(index)  # type: ignore[method-assign]
                handles.append(layer.register_forward_hook(compare(index)))
            tiny.model(**encoded(tiny))
    finally:
        for layer in layers:
            del layer.forward
        for handle in handles:
            handle.remove()
    assert seen == [(0, True), (1, True), (2, False)]


def test_counts_follow_generation_by_phase_and_leave_padding_out(tiny: LoadedModel, bank: ModuleBank) -> None:
    real = int(encoded(tiny)["attention_mask"].sum())
    with attach(tiny.model, bank, ["a"]):
        generate(tiny, max_new_tokens=5, min_new_tokens=5)
    counts = bank.counts()
    assert counts["a"]["prefill"][0] == real
    assert counts["a"]["decode"][0] == 3 * 4  # the first new token comes out of the prefill
    assert 0 < counts["a"]["prefill"][1] <= real
    assert counts["b"] == {"prefill": (0, 0), "decode": (0, 0)}


def test_a_prompt_of_one_token_is_a_prefill(tiny: LoadedModel, bank: ModuleBank) -> None:
    with attach(tiny.model, bank), torch.no_grad():
        tiny.model(torch.tensor([[20]]))
    assert bank.counts()["a"] | {"prefill": (1, 0)} == {"prefill": (1, 0), "decode": (0, 0)}


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_beams": 4, "num_return_sequences": 2}])
def test_beams_keep_their_rows_modules(tiny: LoadedModel, bank: ModuleBank, options: dict[str, int]) -> None:
    wanted = [{"a": 1.0, "b": 1.0}, {}, {"b": 3.0}]
    each = options.get("num_return_sequences", 1)
    with attach(tiny.model, bank, wanted):
        together = generate(tiny, **options)
    plain = generate(tiny, **options)
    assert together[each : 2 * each] == plain[each : 2 * each]
    for row, names in enumerate(wanted):
        with attach(tiny.model, bank, names):
            alone = generate(tiny, [PROMPTS[row]], **options)
        assert together[row * each : (row + 1) * each] == alone


def test_sampling_under_modules_is_repeatable_and_spares_plain_rows(tiny: LoadedModel, bank: ModuleBank) -> None:
    options = {"do_sample": True, "temperature": 1.0, "top_k": 20}
    torch.manual_seed(3)
    plain = generate(tiny, **options)
    runs = []
    for _ in range(2):
        torch.manual_seed(3)
        with attach(tiny.model, bank, [{"a": 1.0}, {}, {"b": 1.0}]):
            runs.append(generate(tiny, **options))
    assert runs[0] == runs[1]
    assert runs[0][1] == plain[1] and runs[0][0] != plain[0]


def test_embeddings_in_place_of_ids_are_edited_too(tiny: LoadedModel, bank: ModuleBank) -> None:
    ids = encoded(tiny, PROMPTS[:1])["input_ids"]
    model: Any = tiny.model
    with torch.no_grad(), attach(tiny.model, bank):
        assert torch.equal(model(inputs_embeds=model.get_input_embeddings()(ids)).logits, model(ids).logits)


def test_a_bank_that_changes_does_not_change_a_generation_under_way(tiny: LoadedModel, bank: ModuleBank) -> None:
    with attach(tiny.model, bank, ["a"]):
        expected = generate(tiny)

    class Swap:
        """Takes the module out of the bank and puts another in its place after the third token."""

        def __call__(self, ids: Tensor, _scores: Tensor, **_: Any) -> Tensor:
            if ids.shape[1] == encoded(tiny)["input_ids"].shape[1] + 3:
                bank.remove("a")
                bank.add(make_module(tiny.identity, "a", 1, seed=9, kappa=50.0))
            return torch.zeros(ids.shape[0], dtype=torch.bool)

    with attach(tiny.model, bank, ["a"]):
        assert generate(tiny, stopping_criteria=[Swap()]) == expected
    assert bank["a"].layer == 1


def test_rows_that_do_not_go_into_the_batch_are_refused(tiny: LoadedModel, bank: ModuleBank) -> None:
    with (
        torch.no_grad(),
        attach(tiny.model, bank, [{"a": 1.0}, {}]),
        pytest.raises(UnbindError, match=r"2 rows.*batch of 3"),
    ):
        tiny.model(**encoded(tiny))
    with pytest.raises(UnbindError, match="list of names"), attach(tiny.model, bank, "a"):
        pass


@pytest.mark.parametrize(("layers", "width"), [(2, 32), (4, 32), (3, 64)])
def test_a_model_of_another_size_is_refused(bank: ModuleBank, layers: int, width: int) -> None:
    model = Qwen2ForCausalLM(
        Qwen2Config(
            hidden_size=width,
            intermediate_size=32,
            num_hidden_layers=layers,
            num_attention_heads=2,
            num_key_value_heads=2,
            vocab_size=64,
        )
    )
    told = f"'b' was fitted on 'qwen2', 32 wide with 3 layers, for layer 2; this model is {width} wide with {layers} "
    with pytest.raises(ModelMismatch, match=told), attach(model, bank, ["b"]):
        pass
    assert hooks_on(model) == 0


def test_an_empty_bank_changes_nothing(tiny: LoadedModel) -> None:
    plain = generate(tiny)
    with attach(tiny.model, ModuleBank()):
        assert generate(tiny) == plain


def test_layers_that_run_outside_a_pass_of_the_model_are_refused_where_modules_are_on(
    tiny: LoadedModel, bank: ModuleBank
) -> None:
    inner: Any = decoder_stack(tiny.model)[0]
    states = inner.embed_tokens(torch.arange(5, 13)[None])
    turned = inner.rotary_emb(states, torch.arange(8)[None])
    plain = inner.layers[0](states, position_embeddings=turned)
    with attach(tiny.model, bank), pytest.raises(UnbindError, match="runs outside a pass of the model"):
        inner.layers[0](states, position_embeddings=turned)
    with attach(tiny.model, bank, {}):
        assert torch.equal(inner.layers[0](states, position_embeddings=turned), plain)


def test_a_copy_made_inside_a_block_is_refused_there_and_behind_it(tiny: LoadedModel, bank: ModuleBank) -> None:
    with attach(tiny.model, bank):
        other = copy.deepcopy(tiny.model)
        with pytest.raises(UnbindError, match="copy the model outside"):
            other(**encoded(tiny))
        generate(tiny)
    with pytest.raises(UnbindError, match="copy the model outside"):
        other(**encoded(tiny))
