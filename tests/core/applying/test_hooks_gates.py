"""``attach`` with gates that remember: whatever way text is generated, gates are those of the whole sequence."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from tests.core.applying.conftest import PROMPTS, encoded, generate, hooks_on
from tests.core.conftest import TinyCheckpoint, bank_of, make_module, make_network_module
from unbind_core.applying.attach import attach
from unbind_core.applying.bank import ModuleBank
from unbind_core.applying.gates import windowed
from unbind_core.applying.hooks import Intervention
from unbind_core.applying.networks import network_scores
from unbind_core.architecture import LoadedModel, decoder_layers, load_model
from unbind_core.errors import UnbindError
from unbind_core.module import UnbindModule
from unbind_core.running.recording import recording

EACH = ({"n": 1.0}, {}, {"m": 0.5, "p": 1.0})


def remembering_module(tiny: LoadedModel, name: str, layer: int, **changes: Any) -> UnbindModule:
    """A network module that opens and closes on this model's own states."""
    one = make_network_module(tiny.identity, name, layer, **changes)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, 300, (4, 40), generator=generator)
    with torch.no_grad(), recording(tiny.model, [layer]) as states:
        tiny.model(ids)
    scores = network_scores(states[layer], one.w, *one.network)
    e = windowed(scores, one.window, torch.arange(1, 41)).amax(-1)
    low, middle, high = (float(e.quantile(q)) for q in (0.2, 0.45, 0.7))
    size = float(states[layer].norm(dim=-1).mean())
    return make_network_module(
        tiny.identity,
        name,
        layer,
        **{"kappa": size, **changes, "s_ref": low, "tau": high - low, "tau_close": middle - low},
    )


@pytest.fixture(scope="module")
def bank(tiny: LoadedModel) -> ModuleBank:
    return bank_of(
        remembering_module(tiny, "n", 0, window=5),
        remembering_module(tiny, "m", 1, seed=1, window=3, heads=1),
        make_module(tiny.identity, "p", 1, seed=2),
    )


def by_whole_sequences(
    tiny: LoadedModel, bank: ModuleBank, prompt: str, names: dict[str, float], new: int
) -> list[int]:
    """Greedy tokens by running the model on the whole of the growing text, without any cache or memory."""
    ids = encoded(tiny, [prompt])["input_ids"]
    length = ids.shape[1]
    with torch.no_grad(), Intervention(tiny.model) as intervention:
        for _ in range(new):
            with intervention.step(bank.select([names])):
                last = tiny.model(ids, use_cache=False).logits[0, -1]
            ids = torch.cat((ids, last.argmax().view(1, 1)), dim=1)
    return ids[0, length:].tolist()


def test_generation_equals_running_the_whole_growing_text(tiny: LoadedModel, bank: ModuleBank) -> None:
    plain = generate(tiny, max_new_tokens=20, min_new_tokens=0, eos_token_id=None)
    expected = [by_whole_sequences(tiny, bank, prompt, names, 20) for prompt, names in zip(PROMPTS, EACH, strict=True)]
    with attach(tiny.model, bank, EACH):
        for _ in range(2):  # a second generation begins without a past
            assert generate(tiny, max_new_tokens=20, min_new_tokens=0, eos_token_id=None) == expected
    assert expected[1] == plain[1]
    assert expected[0] != plain[0] and expected[2] != plain[2]
    totals = [phase for name in "nm" for phase in bank.counts()[name].values()]
    assert 0 < sum(opened for _, opened in totals) < sum(evaluated for evaluated, _ in totals), bank.counts()
    for prompt, names, row in zip(PROMPTS, EACH, expected, strict=True):
        with attach(tiny.model, bank, names):
            assert generate(tiny, [prompt], max_new_tokens=20, min_new_tokens=0, eos_token_id=None) == [row]


@pytest.mark.parametrize(
    "options", [{"num_beams": 3}, {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.5}]
)
def test_beams_take_their_gates_along(tiny: LoadedModel, bank: ModuleBank, options: dict[str, Any]) -> None:
    each = options.get("num_return_sequences", 1)
    with attach(tiny.model, bank, EACH):
        found = generate(tiny, max_new_tokens=16, **options)
        whole = generate(tiny, max_new_tokens=16, use_cache=False, **options)
    assert found == whole
    plain = generate(tiny, max_new_tokens=16, **options)
    assert found[each : 2 * each] == plain[each : 2 * each] and found[:each] != plain[:each]


def test_a_cache_of_fixed_size_gives_the_same_answers(tiny: LoadedModel, bank: ModuleBank) -> None:
    options: dict[str, Any] = {"max_new_tokens": 20, "min_new_tokens": 0, "eos_token_id": None}
    with attach(tiny.model, bank, EACH):
        expected = generate(tiny, **options)
        for _ in range(2):  # a second generation begins without a past
            assert generate(tiny, cache_implementation="static", **options) == expected
    assert generate(tiny, cache_implementation="static", **options)[0] != expected[0]


def test_guessed_tokens_that_are_taken_back_leave_no_trace(tiny: LoadedModel, bank: ModuleBank) -> None:
    prompt = PROMPTS[1] * 2  # something to look up
    other = copy.deepcopy(tiny.model)
    with attach(tiny.model, bank, ["n", "m"]):
        expected = generate(tiny, [prompt], max_new_tokens=24)
        assert generate(tiny, [prompt], max_new_tokens=24, prompt_lookup_num_tokens=4) == expected
        for assistant in (other, tiny.model):  # the latter guesses under modules itself
            assert generate(tiny, [prompt], max_new_tokens=24, assistant_model=assistant) == expected
        for options in ({"assistant_early_exit": 2}, {"prefill_chunk_size": 5}):
            assert generate(tiny, [prompt], max_new_tokens=24, **options) == expected


def _steps(tiny: LoadedModel, ids: Tensor, sizes: Sequence[int]) -> Iterator[Tensor]:
    """Logits of a text computed in parts, by a loop as anybody writes it: the cache comes from the first pass."""
    past = None
    for part in ids.split(list(sizes), dim=1):
        model: Any = tiny.model
        out = model(part, past_key_values=past, use_cache=True)
        past = out.past_key_values
        yield out.logits


def test_two_generations_in_turns_do_not_mix(tiny: LoadedModel, bank: ModuleBank) -> None:
    texts = torch.randint(5, 300, (2, 1, 24), generator=torch.Generator().manual_seed(2))
    sizes = [10, 1, 1, 6, 1, 5]
    with torch.no_grad(), attach(tiny.model, bank, ["n", "m"]):
        whole = [tiny.model(ids, use_cache=False).logits for ids in texts]
        turns = list(zip(*(_steps(tiny, ids, sizes) for ids in texts), strict=True))
    for found, expected in zip(zip(*turns, strict=True), whole, strict=True):
        torch.testing.assert_close(torch.cat(found, dim=1), expected, atol=1e-4, rtol=1e-4)


def test_threads_that_generate_side_by_side_do_not_mix(tiny: LoadedModel, bank: ModuleBank) -> None:
    """At every pass of the one a pass of the other is under way."""
    together = threading.Barrier(2)

    def wait(_module: nn.Module, _args: Any) -> None:
        together.wait(30)

    first, last = decoder_layers(tiny.model)[0], decoder_layers(tiny.model)[-1]
    with attach(tiny.model, bank, ["n", "m"]):
        alone = [generate(tiny, [prompt]) for prompt in PROMPTS[:2]]
        before = bank.counts()
        hooks = [layer.register_forward_pre_hook(wait) for layer in (first, last)]
        try:
            with ThreadPoolExecutor(2) as threads:
                assert list(threads.map(lambda prompt: generate(tiny, [prompt]), PROMPTS[:2])) == alone
        finally:
            for hook in hooks:
                hook.remove()
        assert generate(tiny, PROMPTS[:1]) == alone[0]
    assert bank.counts()["n"]["decode"][0] - before["n"]["decode"][0] == 3 * 11
    assert hooks_on(tiny.model) == 0


def test_a_computed_prompt_can_be_copied_and_continued_many_ways(tiny: LoadedModel, bank: ModuleBank) -> None:
    model: Any = tiny.model
    prompt = encoded(tiny, [PROMPTS[1]])["input_ids"]
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    with torch.no_grad(), attach(tiny.model, bank, ["n", "m"]):
        prefix = DynamicCache(config=tiny.model.config)
        model(prompt, past_key_values=prefix)
        for more in (PROMPTS[0], PROMPTS[2]):
            ids = torch.cat((prompt, encoded(tiny, [more])["input_ids"]), dim=1)
            found = model.generate(ids, past_key_values=copy.deepcopy(prefix), **options)
            assert torch.equal(found, model.generate(ids, **options))
    copied = copy.deepcopy(prefix)
    copied.batch_repeat_interleave(2)
    copied.reorder_cache(torch.tensor([1, 0]))
    assert copied.layers[0].keys.shape[0] == 2 and prefix.layers[0].keys.shape[0] == 1


def test_rows_that_are_repeated_or_chosen_keep_their_gates(tiny: LoadedModel, bank: ModuleBank) -> None:
    model: Any = tiny.model
    first, second = torch.randint(5, 300, (2, 2, 12), generator=torch.Generator().manual_seed(3))
    with torch.no_grad(), attach(tiny.model, bank, ["n", "m"]):
        past = model(first, use_cache=True).past_key_values
        past.batch_repeat_interleave(2)
        past.batch_select_indices(torch.tensor([3, 0, 1]))
        found = model(second[[0, 1, 0]], past_key_values=past).logits
        whole = model(torch.cat((first[[1, 0, 0]], second[[0, 1, 0]]), dim=1)).logits[:, 12:]
    torch.testing.assert_close(found, whole, atol=1e-4, rtol=1e-4)


def test_a_padded_second_turn_continues_where_each_row_stands(tiny: LoadedModel, bank: ModuleBank) -> None:
    """Left padding in front of both turns, so that it also stands between them."""
    model: Any = tiny.model
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(5, 300, (2, 24), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, :3] = mask[1, 12:17] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad(), attach(tiny.model, bank, ["n", "m"]):
        past = model(ids[:, :12], attention_mask=mask[:, :12], position_ids=positions[:, :12]).past_key_values
        found = model(ids[:, 12:], attention_mask=mask, position_ids=positions[:, 12:], past_key_values=past).logits
        for row in range(2):
            alone = model(ids[row : row + 1, mask[row].bool()]).logits[0]
            kept = found[row, mask[row, 12:].bool()]
            torch.testing.assert_close(kept, alone[-len(kept) :], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("change", ["none", "copied", "cropped", "moved"])
def test_a_cache_from_outside_the_block_is_refused(tiny: LoadedModel, bank: ModuleBank, change: str) -> None:
    model: Any = tiny.model
    ids = torch.randint(5, 300, (1, 20), generator=torch.Generator().manual_seed(5))
    alike = bank_of(*(bank[name] for name in bank.names))
    for filled in (attach(tiny.model, alike), attach(tiny.model, bank, []), nullcontext()):
        with torch.no_grad():
            with filled:
                past = model(ids[:, :14], use_cache=True).past_key_values
            if change == "copied":
                past = copy.deepcopy(past)
            elif change == "cropped":
                past.crop(-2)
            elif change == "moved":
                past.batch_repeat_interleave(2)
                past.batch_select_indices(torch.tensor([1]))
            start = past.get_seq_length()
            with attach(tiny.model, bank, ["n", "m"]):
                for _ in range(2):  # what was refused once is not known the second time
                    with pytest.raises(UnbindError, match=f"holds {start} positions .* compute the prompt again"):
                        model(ids[:, start:], past_key_values=past)
                    with pytest.raises(UnbindError, match="keep a cache within one block"):
                        model.generate(ids, past_key_values=past, max_new_tokens=4)
            with attach(tiny.model, bank, ["p"]):  # which goes by each state alone
                model(ids[:, start:], past_key_values=past)
    assert hooks_on(tiny.model) == 0


def test_a_cache_whose_rows_were_changed_by_hand_is_refused(tiny: LoadedModel, bank: ModuleBank) -> None:
    model: Any = tiny.model
    ids = torch.randint(5, 300, (2, 20), generator=torch.Generator().manual_seed(6))
    with torch.no_grad(), attach(tiny.model, bank, ["n", "m"]):
        past = model(ids[:, :12], use_cache=True).past_key_values
        for layer in past.layers:
            layer.keys, layer.values = layer.keys[:1], layer.values[:1]
        with pytest.raises(UnbindError, match="saw 2 rows in this cache, and the batch has 1"):
            model(ids[:1, 12:], past_key_values=past)


def test_a_cache_that_a_failed_pass_has_half_filled_is_refused(tiny: LoadedModel, bank: ModuleBank) -> None:
    model: Any = tiny.model
    ids = torch.randint(5, 300, (1, 12), generator=torch.Generator().manual_seed(7))

    def fail(_module: nn.Module, _args: Any) -> None:
        raise ZeroDivisionError

    past = DynamicCache(config=tiny.model.config)
    hook = decoder_layers(tiny.model)[1].register_forward_pre_hook(fail)
    with torch.no_grad(), attach(tiny.model, bank, ["n", "m"]):
        with pytest.raises(ZeroDivisionError):
            model(ids, past_key_values=past)
        hook.remove()
        with pytest.raises(UnbindError, match="holds 12 positions"):
            model(ids, past_key_values=past)


def test_samples_under_remembering_gates_are_repeatable(tiny: LoadedModel, bank: ModuleBank) -> None:
    runs = []
    for options in ({}, {}, {"use_cache": False}):
        torch.manual_seed(3)
        with attach(tiny.model, bank, EACH):
            runs.append(generate(tiny, do_sample=True, temperature=1.0, top_k=20, **options))
    assert runs[0] == runs[1] == runs[2]


def test_no_hook_is_left_and_an_exception_does_not_hurt_the_next_generation(
    tiny: LoadedModel, bank: ModuleBank
) -> None:
    with torch.no_grad(), attach(tiny.model, bank, ["n"]):
        expected = generate(tiny)
        with pytest.raises(IndexError):
            tiny.model(torch.tensor([[10**6]]))
        assert generate(tiny) == expected
    assert hooks_on(tiny.model) == 0


@pytest.mark.parametrize("family", ["gemma3", "gpt_bigcode", "qwen3_moe"])
def test_other_families_remember_as_well(family: str, tiny_checkpoint: TinyCheckpoint) -> None:
    """Sliding windows, learned positions, experts."""
    loaded = load_model(tiny_checkpoint(family))
    bank = bank_of(remembering_module(loaded, "n", 1, window=5))
    with attach(loaded.model, bank):
        found = generate(loaded, max_new_tokens=20, num_beams=2)
        assert found == generate(loaded, max_new_tokens=20, num_beams=2, use_cache=False)
    assert 0 < bank.counts()["n"]["decode"][1] < bank.counts()["n"]["decode"][0]
