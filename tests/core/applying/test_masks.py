"""``attach`` where the model is given another mask than ones and zeros as long as the text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    Gemma3Config,
    Gemma3TextConfig,
    PreTrainedConfig,
    Starcoder2Config,
)

from tests.core.applying.test_hooks_gates import remembering_module
from tests.core.conftest import bank_of, build_tokenizer
from unbind_core.applying.attach import attach
from unbind_core.applying.bank import ModuleBank
from unbind_core.architecture import LoadedModel, identify
from unbind_core.errors import UnbindError

_SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.15,
}


def remembering(config: PreTrainedConfig) -> tuple[Any, ModuleBank]:
    """A random model, and a module whose gate remembers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(config).eval()
    tokenizer = build_tokenizer()
    bank = bank_of(remembering_module(LoadedModel(model, tokenizer, identify(model, tokenizer)), "n", 1, window=5))
    return model, bank


def random_ids(*shape: int) -> Tensor:
    return torch.randint(10, 300, shape, generator=torch.Generator().manual_seed(3))


def gemma3_that_reads_images() -> Gemma3Config:
    kinds = ["sliding_attention", "full_attention"] * 2
    text = Gemma3TextConfig(
        **_SHAPE, vocab_size=384, head_dim=8, query_pre_attn_scalar=8, sliding_window=16, layer_types=kinds
    )
    seeing = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    return Gemma3Config(
        text_config=text.to_dict(), vision_config=seeing | {"image_size": 28, "patch_size": 14}, image_token_index=5
    )


def test_gates_open_alike_whatever_the_length_of_the_mask() -> None:
    tokenizer = build_tokenizer()
    config = BloomConfig(vocab_size=len(tokenizer), hidden_size=32, n_layer=3, n_head=4, initializer_range=0.15)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = BloomForCausalLM(config).eval()
        ids = torch.randint(5, 300, (2, 9))
    tiny = LoadedModel(model, tokenizer, identify(model, tokenizer))
    bank = bank_of(remembering_module(tiny, "n", 1, window=5))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0

    def first(**options: Any) -> torch.Tensor:
        """Logits behind the prompt and the tokens after it."""
        settings = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0, **options}
        answer = model.generate(
            input_ids=ids, attention_mask=mask, output_logits=True, return_dict_in_generate=True, **settings
        )
        return torch.stack(answer.logits)

    plain = first(cache_implementation="static")
    with attach(model, bank):
        expected = first()
        torch.testing.assert_close(first(cache_implementation="static"), expected, atol=1e-4, rtol=1e-4)
    assert (plain[0] - expected[0]).abs().max() > 0.01


def test_padding_is_left_out_where_a_model_that_reads_images_finishes_the_mask() -> None:
    model, bank = remembering(gemma3_that_reads_images())
    ids, mask = random_ids(2, 40), torch.ones((2, 40), dtype=torch.int64)
    mask[1, :8] = 0
    with torch.no_grad(), attach(model, bank):
        alone = model(input_ids=ids[1:, 8:]).logits[0]
        beside = model(input_ids=ids, attention_mask=mask).logits[1, 8:]
    torch.testing.assert_close(beside, alone, atol=1e-4, rtol=1e-4)
    assert bank.counts()["n"]["prefill"][0] == 32 + 72


def test_a_mask_that_hides_padding_alone_is_read_and_any_other_refused() -> None:
    model, bank = remembering(Starcoder2Config(**_SHAPE, vocab_size=384, sliding_window=None))
    ids, real = random_ids(1, 40), torch.ones((1, 40), dtype=torch.bool)
    real[0, :8] = False
    positions = torch.arange(40).sub(8).clamp(min=0)[None]
    whole = torch.ones((40, 40), dtype=torch.bool).tril()
    padded = whole & (real[:, None, None, :] | torch.eye(40, dtype=torch.bool))
    added = torch.zeros(padded.shape).masked_fill_(~padded, torch.finfo(torch.float32).min)
    texts = torch.arange(40) // 20
    with torch.no_grad(), attach(model, bank):
        alone = model(input_ids=ids[:, 8:]).logits
        for mask in (padded, added):
            beside = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits[:, 8:]
            torch.testing.assert_close(beside, alone, atol=1e-4, rtol=1e-4)
        for mask in (whole & (texts[:, None] == texts), whole.triu(-9), whole.flip(1), whole[:, 1:]):
            with pytest.raises(UnbindError, match="does not tell which positions are padding"):
                model(input_ids=ids, attention_mask=mask[None, None])


def test_a_cache_of_fixed_size_under_a_window_goes_as_far_as_the_window() -> None:
    model, bank = remembering(Starcoder2Config(**_SHAPE, vocab_size=384, sliding_window=24))
    ids, mask = random_ids(2, 12), torch.ones((2, 12), dtype=torch.int64)
    mask[1, :4] = 0

    def answer(new: int, **options: Any) -> Tensor:
        settings = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0, **options}
        text: Tensor = model.generate(input_ids=ids, attention_mask=mask, **settings)
        return text

    with attach(model, bank):
        assert answer(12, cache_implementation="static").tolist() == answer(12).tolist()
        with pytest.raises(UnbindError, match="generate without cache_implementation"):
            answer(30, cache_implementation="static")
        assert answer(30).tolist() == answer(30, use_cache=False).tolist()
